"""A plan as a horizontal bar."""

from __future__ import annotations

from pathlib import Path

from fastgrpo.tools.plan.memory import RESERVE, MemoryPlan

_COLOURS = ("#1f5fbf", "#6f9fdc", "#8a63b8", "#2f9e77", "#e08a2e", "#c9ced8")
_INK = "#1f2430"
_ROOM_FOR_TEXT = 0.05
"""Share of the bar that a figure needs to stand in it."""


def draw_plan(plan: MemoryPlan, path: Path) -> None:
    """
    Draws the terms beside each other, against the capacity where it is known.

    Args:
        plan: from `estimate_memory`.
        path: the picture to write; its ending, .png or .svg, says the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    terms = {name: size for name, size in plan.terms.items() if size > 0}
    widest = max(sum(terms.values()), plan.capacity or 0.0)
    left = 0.0
    for (name, size), colour in zip(terms.items(), _colours(plan), strict=True):
        axes.barh(0, size, left=left, height=0.6, color=colour, label=f"{name}  {size:.1f}", edgecolor="white")
        if size / widest > _ROOM_FOR_TEXT:
            ink = _INK if name == RESERVE else "white"
            axes.text(left + size / 2, 0, f"{size:.1f}", ha="center", va="center", color=ink, fontsize=10)
        left += size
    headline = f"{plan.shape.name}: {plan.total:.1f} GB"
    if plan.capacity is not None:
        axes.axvline(plan.capacity, color="#c0392b", linewidth=2)
        headline += f" of {plan.capacity:g}, " + ("fits" if plan.fits else "does not fit")
    axes.set_title(headline, loc="left", color=_INK, fontsize=12, fontweight="bold")
    axes.set_xlim(0, 1.04 * widest)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.set_xlabel("GB on each device" + (", red: its capacity" if plan.capacity is not None else ""))
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)


def _colours(plan: MemoryPlan) -> list[str]:
    return [colour for (_, size), colour in zip(plan.terms.items(), _COLOURS, strict=True) if size > 0]
