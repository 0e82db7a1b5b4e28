"""The picture of a report: how reward, lengths, entropy, KL and memory went, and where the time goes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from fastgrpo.runlog import RunRecord
from fastgrpo.tools.plot import moving_mean
from fastgrpo.tools.report.summary import PHASES, RunSummary

_COLOURS = ("#1f5fbf", "#e08a2e", "#2f9e77", "#8a63b8", "#c0392b", "#5b6470", "#c9a227", "#17909c")
_PHASE_COLOURS = {"generation": "#6f9fdc", "reward": "#e0b15e", "sync": "#9a86c8", "update": "#2f9e77"}
_INK, _GRID = "#1f2430", "#e6e9ef"


def draw_runs(records: Sequence[RunRecord], summaries: Sequence[RunSummary]) -> bytes:
    """
    Draws the runs over each other, panel by panel.

    Args:
        records, summaries: the runs, in the same order.

    Returns:
        a PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 3)
    _lines(grid[0, 0], records, "reward", "reward", mark=_mark_evals)
    _lines(grid[0, 1], records, "real tokens per step", "tokens_real")
    _lines(grid[0, 2], records, "entropy", "entropy")
    _lines(grid[1, 0], records, "KL to the reference", "kl")
    _times(grid[1, 1], summaries)
    _lines(grid[1, 2], records, "peak memory, GB", "peak_memory_gb", smooth=False)
    _plans(grid[1, 2], summaries)
    names = [summary.name for summary in summaries]
    handles = [grid[0, 0].plot([], [], color=_colour(i), linewidth=2.4)[0] for i in range(len(names))]
    figure.legend(handles, names, loc="outside upper center", ncols=min(4, len(names)), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _lines(
    axes: Any,
    records: Sequence[RunRecord],
    title: str,
    key: str,
    smooth: bool = True,
    mark: Callable[[Any, RunRecord, str], None] | None = None,
) -> None:
    _prepare(axes, title, "optimizer step")
    drawn = False
    for index, record in enumerate(records):
        points = [(line["step"], line[key]) for line in record.steps if line[key] is not None]
        if mark is not None:
            mark(axes, record, _colour(index))
        if not points:
            continue
        steps, numbers = (list(column) for column in zip(*points, strict=True))
        drawn = True
        axes.plot(steps, numbers, color=_colour(index), linewidth=1, alpha=0.3 if smooth else 1)
        if smooth:
            axes.plot(steps, moving_mean(numbers, max(10, len(numbers) // 40)), color=_colour(index), linewidth=2.2)
    if not drawn:
        axes.text(0.5, 0.5, "not in the log", transform=axes.transAxes, ha="center", color="#8a909c")


def _mark_evals(axes: Any, record: RunRecord, colour: str) -> None:
    for line in record.evals:
        if line["pass_at_1"] is not None and line["temperature"] is None:
            axes.plot([line["step"]], [line["pass_at_1"]], "D", color=colour, markersize=6, markeredgecolor="white")
    if record.evals:
        axes.set_title("reward, and pass@1 (diamonds)", loc="left", color=_INK, fontsize=11, fontweight="bold")


def _times(axes: Any, summaries: Sequence[RunSummary]) -> None:
    _prepare(axes, "seconds of a step", "")
    if not any(summary.phase_seconds for summary in summaries):
        axes.text(0.5, 0.5, "not in the log", transform=axes.transAxes, ha="center", color="#8a909c")
        return
    for row, summary in enumerate(summaries):
        left = 0.0
        for phase in PHASES:
            seconds = summary.phase_seconds.get(phase, 0.0)
            label = phase if row == 0 else None
            axes.barh(row, seconds, left=left, height=0.6, color=_PHASE_COLOURS[phase], label=label)
            left += seconds
    axes.set_yticks(range(len(summaries)), [summary.name for summary in summaries])
    # One run's bar as thin as one of three, and room for the names below the bars.
    axes.set_ylim(max(len(summaries), 3) - 0.5, -0.5)
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _plans(axes: Any, summaries: Sequence[RunSummary]) -> None:
    for index, summary in enumerate(summaries):
        if summary.plan_gb:
            axes.axhline(summary.plan_gb, color=_colour(index), linestyle="--", linewidth=1.4)
            axes.set_title("peak memory, GB (dashed: the plan)", loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])


def _prepare(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel(below)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
