"""`reward.png`: the reward of a run, step by step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastgrpo.runlog import RunRecord

_WINDOW = 10
_INK, _FAINT, _ACCENT = "#1f2430", "#9db4d6", "#1f5fbf"


def missing_matplotlib() -> str:
    """What to install for pictures; empty where it is there."""
    return "" if find_spec("matplotlib") else 'matplotlib is not installed (pip install "fastgrpo[demo]")'


def moving_mean(values: list[float], window: int = _WINDOW) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def plot_reward(record: RunRecord, path: Path, title: str) -> None:
    """
    Draws reward per step, its moving mean, and pass@1 where it was evaluated.

    Args:
        record: a run with at least one reward.
        path: the picture to write; its ending says the format.
        title: heading.

    Raises:
        ValueError: a run without rewards.
    """
    points = [(line["step"], line["reward"]) for line in record.steps if line["reward"] is not None]
    if not points:
        raise ValueError(f"{record.path} has no step with a reward; there is nothing to draw.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, rewards = (list(column) for column in zip(*points, strict=True))
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color=_FAINT, linewidth=1.2, label="mean reward of a step")
    axes.plot(steps, moving_mean(rewards), color=_ACCENT, linewidth=2.4, label=f"mean of the last {_WINDOW} steps")
    _mark_evals(axes, record)
    axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward, pass@1" if record.evals else "reward")
    axes.set_ylim(1.05 * min(0.0, *rewards), 1.05 * max(1.0, *rewards))
    axes.grid(axis="y", color="#e6e9ef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def _mark_evals(axes: Any, record: RunRecord) -> None:
    for line in record.evals:
        last = line is record.evals[-1] and len(record.evals) > 1
        axes.plot([line["step"]], [line["pass_at_1"]], "D", color=_INK, markersize=6, zorder=3)
        axes.annotate(
            f"pass@1 {line['pass_at_1']:.1%}",
            (line["step"], line["pass_at_1"]),
            xytext=(-8 if last else 8, 10),
            textcoords="offset points",
            ha="right" if last else "left",
            color=_INK,
            fontsize=10,
        )
    if record.evals:
        axes.plot(
            [], [], "D", color=_INK, markersize=6, label=f"greedy pass@1, {record.evals[0]['n']} held-out problems"
        )
