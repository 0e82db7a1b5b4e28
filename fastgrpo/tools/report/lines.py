"""The step lines of a run that count, and means over them in which every optimizer step weighs the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

Line = dict[str, Any]


def standing(lines: Iterable[Line]) -> list[Line]:
    """The lines without those whose steps were taken again: where steps go back, a run was resumed from there."""
    kept: list[Line] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def steps_of(lines: Sequence[Line]) -> list[int]:
    """
    Optimizer steps that each line is the mean of.

    Args:
        lines: of one run, steps rising.

    Returns:
        what a line says itself, else the steps since the line before; for a first line, which may follow a checkpoint, no more
        than for the second.
    """
    numbers = [line["step"] for line in lines]
    since = [after - before for before, after in itertools.pairwise(numbers)]
    first = min([max(numbers[0], 1), *since[:1]]) if numbers else 0
    return [line["steps"] or steps for line, steps in zip(lines, [first, *since], strict=False)]


def mean(lines: Sequence[Line], key: str) -> float | None:
    """Mean of a step over lines of one run, those without the value left out; None where none has it."""
    pairs = [(steps, line[key]) for line, steps in zip(lines, steps_of(lines), strict=True) if line[key] is not None]
    total = sum(steps for steps, _ in pairs)
    return sum(steps / total * value for steps, value in pairs) if pairs else None


def points(lines: Iterable[Line], key: str) -> list[tuple[int, float]]:
    """Step and value of the lines that have one."""
    return [(line["step"], line[key]) for line in lines if line[key] is not None]
