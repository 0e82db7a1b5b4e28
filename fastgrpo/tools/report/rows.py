"""The table of a report, as text: the same in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastgrpo.tools.report.summary import PHASES, RunSummary

NOTHING = "-"


def rows_of(summaries: Sequence[RunSummary]) -> list[list[str]]:
    """
    Label and one cell a run, row by row; rows that no run has anything for are left out.

    Args:
        summaries: the runs, in the order of the columns.
    """
    kinds: list[tuple[str, Callable[[RunSummary], str]]] = [
        ("model", lambda run: run.model or NOTHING),
        ("device", lambda run: run.device or NOTHING),
        ("started", lambda run: (run.started or NOTHING).replace("T", " ").replace("+00:00", " UTC")),
        ("patched", lambda run: "yes" if run.patched else "no, stock TRL"),
        ("rollouts", lambda run: run.rollout_path or NOTHING),
        ("ended", lambda run: run.exit),
        ("steps", lambda run: str(run.steps)),
        ("wall clock", lambda run: duration(run.wall_s)),
        ("seconds per step", lambda run: number(run.seconds_per_step, ".2f")),
        ("most of a step", _dominant),
        *((f"  {phase}, s", _phase(phase)) for phase in PHASES),
        ("reward, start to end", lambda run: arrow(run.reward_first, run.reward_last, ".3f")),
        ("pass@1", lambda run: arrow(run.pass_at_1_before, run.pass_at_1_after, ".1%")),
        ("pass@1, sampled", lambda run: arrow(run.sampled_before, run.sampled_after, ".1%")),
        ("KL at the end", lambda run: number(run.kl_last, ".2g")),
        ("entropy at the end", lambda run: number(run.entropy_last, ".3f")),
        ("real tokens per step", lambda run: number(run.tokens_per_step, ",.0f")),
        ("padding", lambda run: number(run.padding_share, ".0%")),
        ("peak memory", lambda run: number(run.peak_memory_gb, ".2f", " GB")),
        ("peak against plan", _against_plan),
        ("stale lines", lambda run: str(run.stale) if run.stale else NOTHING),
    ]
    table = [[label, *(cell(run) for run in summaries)] for label, cell in kinds]
    return [row for row in table if any(cell != NOTHING for cell in row[1:])]


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number, or `-`."""
    return NOTHING if value is None else f"{value:{form}}{unit}"


def arrow(before: float | None, after: float | None, form: str) -> str:
    """Before and after, or whichever is known."""
    if before is None or after is None:
        return number(before if after is None else after, form)
    return f"{before:{form}} -> {after:{form}}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds."""
    if seconds is None:
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def _dominant(run: RunSummary) -> str:
    return NOTHING if run.dominant_phase is None else f"{run.dominant_phase}, {run.dominant_share or 0:.0%}"


def _phase(phase: str) -> Callable[[RunSummary], str]:
    return lambda run: number(run.phase_seconds.get(phase), ".3g")


def _against_plan(run: RunSummary) -> str:
    if run.peak_memory_gb is None or not run.plan_gb:
        return NOTHING
    return f"{run.peak_memory_gb / run.plan_gb:.0%} of {run.plan_gb:.1f} GB"
