"""The picture of a report: how reward, lengths, entropy, KL and memory went, and where the time goes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from fastgrpo.runlog import RunRecord
from fastgrpo.tools.plot import moving_mean
from fastgrpo.tools.report.lines import Line, points, standing
from fastgrpo.tools.report.summary import PHASES, RunSummary

_COLOURS = ("#1f5fbf", "#e08a2e", "#2f9e77", "#8a63b8", "#c0392b", "#5b6470", "#c9a227", "#17909c")
_PHASE_COLOURS = {"generation": "#6f9fdc", "reward": "#e0b15e", "sync": "#9a86c8", "update": "#2f9e77"}
_INK, _FAINT, _GRID = "#1f2430", "#8a909c", "#e6e9ef"
_TITLE: dict[str, Any] = {"loc": "left", "color": _INK, "fontsize": 11, "fontweight": "bold"}
_LEGEND_COLUMNS, _LONGEST_NAME = 4, 36


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

    colours = _colours(len(summaries))
    names = [_name(summary.name) for summary in summaries]
    crowd = max(0, len(names) - len(_COLOURS))
    figure = Figure(figsize=(13, 7 + 0.1 * crowd), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 3)
    lines = [standing(record.steps) for record in records]
    _lines(grid[0, 0], lines, colours, "reward", "reward")
    _mark_evals(grid[0, 0], records, colours)
    _lines(grid[0, 1], lines, colours, "real tokens per step", "tokens_real")
    _lines(grid[0, 2], lines, colours, "entropy", "entropy")
    _lines(grid[1, 0], lines, colours, "KL to the reference", "kl")
    _times(grid[1, 1], summaries, names)
    _lines(grid[1, 2], lines, colours, "peak memory, GB", "peak_memory_gb", smooth=False)
    _plans(grid[1, 2], summaries, colours)
    handles = [grid[0, 0].plot([], [], color=colour, linewidth=2.4)[0] for colour in colours]
    figure.legend(handles, names, loc="outside upper center", ncols=min(_LEGEND_COLUMNS, len(names)), frameon=False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # of names in other scripts
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _lines(
    axes: Any, runs: Sequence[Sequence[Line]], colours: Sequence[Any], title: str, key: str, smooth: bool = True
) -> None:
    _prepare(axes, title, "optimizer step")
    drawn = False
    for lines, colour in zip(runs, colours, strict=True):
        known = points(lines, key)
        if not known:
            continue
        steps, numbers = (list(column) for column in zip(*known, strict=True))
        drawn = True
        marker = "o" if len(known) == 1 else None  # a line of one point is none
        axes.plot(steps, numbers, color=colour, linewidth=1, alpha=0.3 if smooth and not marker else 1, marker=marker)
        if smooth:
            axes.plot(steps, moving_mean(numbers, max(10, len(numbers) // 40)), color=colour, linewidth=2.2)
    if not drawn:
        _say_nothing_is_there(axes)


def _say_nothing_is_there(axes: Any) -> None:
    axes.text(0.5, 0.5, "not in the log", transform=axes.transAxes, ha="center", color=_FAINT)
    axes.set_xticks([])
    axes.set_yticks([])


def _mark_evals(axes: Any, records: Sequence[RunRecord], colours: Sequence[Any]) -> None:
    for record, colour in zip(records, colours, strict=True):
        for step, rate in points((line for line in record.evals if line["temperature"] is None), "pass_at_1"):
            if step is None:
                continue
            axes.plot([step], [rate], "D", color=colour, markersize=6, markeredgecolor="white")
            axes.set_title("reward, and pass@1 (diamonds)", **_TITLE)


def _times(axes: Any, summaries: Sequence[RunSummary], names: Sequence[str]) -> None:
    _prepare(axes, "seconds of a step", "")
    if not any(summary.phase_seconds for summary in summaries):
        _say_nothing_is_there(axes)
        return
    for row, summary in enumerate(summaries):
        left = 0.0
        for phase in PHASES:
            seconds = summary.phase_seconds.get(phase, 0.0)
            label = phase if row == 0 else None
            axes.barh(row, seconds, left=left, height=0.6, color=_PHASE_COLOURS[phase], label=label)
            left += seconds
    axes.set_yticks(range(len(names)), names, fontsize=max(4, min(10, 100 / len(names))))
    # One run's bar as thin as one of three, and room for the names below the bars.
    axes.set_ylim(max(len(summaries), 3) - 0.5, -0.5)
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _plans(axes: Any, summaries: Sequence[RunSummary], colours: Sequence[Any]) -> None:
    for summary, colour in zip(summaries, colours, strict=True):
        if summary.plan_gb and summary.peak_memory_gb is not None:
            axes.axhline(summary.plan_gb, color=colour, linestyle="--", linewidth=1.4)
            axes.set_title("peak memory, GB (dashed: the plan)", **_TITLE)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])


def _prepare(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, **_TITLE)
    axes.set_xlabel(below)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if below:
        axes.xaxis.get_major_locator().set_params(integer=True)


def _name(name: str) -> str:
    """As a label that matplotlib shows as it is: `$` would be mathematics, and a leading `_` hides it."""
    short = name if len(name) <= _LONGEST_NAME else f"...{name[-_LONGEST_NAME:]}"
    return ("\N{ZERO WIDTH SPACE}" if short.startswith("_") else "") + short.replace("$", r"\$")


def _colours(count: int) -> list[Any]:
    """A colour a run; of more than have a name, all from one map."""
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    from matplotlib import colormaps

    return [colormaps["turbo"](0.05 + 0.9 * index / (count - 1)) for index in range(count)]
