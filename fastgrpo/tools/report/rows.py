"""The table of a report, as text: the same in a terminal and on a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastgrpo.tools.report.names import plain
from fastgrpo.tools.report.summary import PHASES, RunSummary

NOTHING = "-"
NO_REWARD = "none in the log"
_LONGEST_END, _LONGEST_ERROR = 60, 4000


def rows_of(summaries: Sequence[RunSummary]) -> list[list[str]]:
    """
    Label and one cell a run, row by row; rows that no run has anything for are left out.

    Args:
        summaries: the runs, in the order of the columns.
    """
    kinds: list[tuple[str, Callable[[RunSummary], str]]] = [
        ("model", lambda run: plain(run.model or NOTHING)),
        ("device", lambda run: plain(run.device or NOTHING)),
        ("started", lambda run: plain((run.started or NOTHING).replace("T", " ").replace("+00:00", " UTC"))),
        ("patched", lambda run: "yes" if run.patched else "no, stock TRL"),
        ("rollouts", lambda run: plain(run.rollout_path or NOTHING)),
        ("ended", lambda run: plain(run.exit) if ends_in_a_cell(run) else "an error, see its text"),
        ("steps", lambda run: str(run.steps)),
        ("wall clock", lambda run: duration(run.wall_s)),
        ("seconds per step", lambda run: seconds(run.seconds_per_step)),
        ("most of a step", _dominant),
        *((f"  {phase}, s", _phase(phase)) for phase in PHASES),
        ("reward, start to end", _reward),
        ("pass@1", lambda run: arrow(run.pass_at_1_before, run.pass_at_1_after, share)),
        ("pass@1, sampled", lambda run: arrow(run.sampled_before, run.sampled_after, share)),
        ("KL at the end", lambda run: number(run.kl_last, ".2g")),
        ("entropy at the end", lambda run: number(run.entropy_last, ".3g")),
        ("real tokens per step", lambda run: number(run.tokens_per_step, ",.0f")),
        ("padding", lambda run: number(run.padding_share, ".0%")),
        ("peak memory", lambda run: number(run.peak_memory_gb, ".2f", " GB")),
        ("peak against plan", _against_plan),
        ("stale lines", lambda run: str(run.stale) if run.stale else NOTHING),
    ]
    table = [[label, *(cell(run) for run in summaries)] for label, cell in kinds]
    return [row for row in table if any(cell != NOTHING for cell in row[1:])]


def sentences_of(run: RunSummary) -> list[str]:
    """What there is to say about a run beside its cells: where its time goes, how it ended, what is missing."""
    said = [_time_sentence(run), *run.remarks]
    if not ends_in_a_cell(run):
        said.append(f"ended with an error: {plain(run.exit, _LONGEST_ERROR)}")
    return [f"{run.name}: {sentence}" for sentence in said]


def ends_in_a_cell(run: RunSummary) -> bool:
    """Whether the words of its end are few enough for a table."""
    return len(plain(run.exit)) <= _LONGEST_END


def settings_of(summaries: Sequence[RunSummary], differing: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """
    Name and one cell a run for the settings that differ.

    Args:
        summaries: the runs, in the order of the columns.
        differing: from `different_settings`.
    """
    return [
        [plain(name), *(_setting(name, value, run) for value, run in zip(row, summaries, strict=True))]
        for name, row in differing.items()
    ]


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number, or `-`; one that is too large for its form with an exponent."""
    if value is None:
        return NOTHING
    return f"{value:{form}}{unit}" if abs(value) < 1e9 else f"{value:.3g}{unit}"


def seconds(value: float | None) -> str:
    """Seconds, to three digits where they are less than one."""
    return number(value, ".3g" if value is not None and value < 1 else ".2f")


def reward(value: float | None) -> str:
    """A reward, to three digits where it is small."""
    return number(value, ".3g" if value and abs(value) < 0.1 else ".3f")


def share(value: float | None) -> str:
    """A share in per cent."""
    return number(value, ".1%")


def arrow(before: float | None, after: float | None, show: Callable[[float | None], str]) -> str:
    """Before and after, or whichever is known."""
    if before is None or after is None:
        return show(before if after is None else after)
    return f"{show(before)} -> {show(after)}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds."""
    if seconds is None:
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def _reward(run: RunSummary) -> str:
    if run.reward_last is None and run.steps:
        return NO_REWARD
    return arrow(run.reward_first, run.reward_last, reward)


def _setting(name: str, value: Any, run: RunSummary) -> str:
    if value is not None:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else plain(text)
    known = run.patched if name.startswith("options.") else name not in ("model", "seed")
    return "default" if known else NOTHING


def _time_sentence(run: RunSummary) -> str:
    phase = run.dominant_phase
    if phase is not None:
        return f"{phase} dominates, {run.dominant_share or 0:.0%} of a step ({seconds(run.phase_seconds[phase])} s)"
    if any(run.phase_seconds.values()):
        parts = " and ".join(f"{seconds(spent)} s of {phase}" for phase, spent in run.phase_seconds.items())
        return f"only a part of a step was measured, {parts}; nothing says which phase dominates"
    return "the log has no times of phases"


def _dominant(run: RunSummary) -> str:
    return NOTHING if run.dominant_phase is None else f"{run.dominant_phase}, {run.dominant_share or 0:.0%}"


def _phase(phase: str) -> Callable[[RunSummary], str]:
    return lambda run: seconds(run.phase_seconds.get(phase))


def _against_plan(run: RunSummary) -> str:
    if run.peak_memory_gb is None or not run.plan_gb:
        return NOTHING
    return f"{run.peak_memory_gb / run.plan_gb:.0%} of {run.plan_gb:.1f} GB"
