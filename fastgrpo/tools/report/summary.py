"""What a run log says about its run, in numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgrpo.runlog import RunRecord, first_and_last

PHASES = ("generation", "reward", "sync", "update")
UNFINISHED = "no end line: killed, or still running"
_WINDOW = 10


@dataclass(frozen=True)
class RunSummary:
    """
    One run; what its log does not know is None.

    Attributes:
        name: its folder, or its file where that has an own name.
        model, device, started, rollout_path: from the `run` line.
        patched: whether options of a patch are in it.
        exit: "done", "interrupted", an error text, or `UNFINISHED`.
        steps: of the last line.
        wall_s, seconds_per_step: of the `end` line; for a run without one, seconds_per_step is the sum of its phases.
        reward_first, reward_last: means over the first and last `reward_window` lines that have a reward.
        pass_at_1_before, pass_at_1_after: first and last evaluation with greedy answers; the second is None where there is only
            one.
        sampled_before, sampled_after: the same with sampled answers.
        kl_last, entropy_last, tokens_per_step, padding_share: means over the last `reward_window` lines with a reward and those
            that replay their rollouts; share of padded tokens that are no real ones.
        peak_memory_gb: the largest of all lines.
        plan_gb: what the plan had predicted as its peak.
        phase_seconds: mean of a step by phase, those that were measured.
        stale: lines marked stale.
    """

    name: str
    model: str | None
    device: str | None
    started: str | None
    rollout_path: str | None
    patched: bool
    exit: str
    steps: int
    wall_s: float | None
    seconds_per_step: float | None
    reward_window: int
    reward_first: float | None
    reward_last: float | None
    pass_at_1_before: float | None
    pass_at_1_after: float | None
    pass_at_1_problems: int | None
    sampled_before: float | None
    sampled_after: float | None
    kl_last: float | None
    entropy_last: float | None
    tokens_per_step: float | None
    padding_share: float | None
    peak_memory_gb: float | None
    plan_gb: float | None
    phase_seconds: dict[str, float]
    stale: int

    @property
    def dominant_phase(self) -> str | None:
        """The phase that most of a step goes into; None where none was measured."""
        return max(self.phase_seconds, key=self.phase_seconds.__getitem__) if self.phase_seconds else None

    @property
    def dominant_share(self) -> float | None:
        """Its share of the measured time, 0 to 1."""
        total = sum(self.phase_seconds.values())
        return self.phase_seconds[self.dominant_phase] / total if total > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            **dataclasses.asdict(self),
            "dominant_phase": self.dominant_phase,
            "dominant_share": self.dominant_share,
        }


def summarise(record: RunRecord, name: str, plan_gb: float | None = None) -> RunSummary:
    """
    The numbers of one run.

    Args:
        record: from `read_run_log`.
        name: what to call it.
        plan_gb: predicted peak; None = what the log's own plan says, if it has one.
    """
    window, first, last = first_and_last(record.rewards) if record.rewards else (0, None, None)
    rewarded = [index for index, line in enumerate(record.steps) if line["reward"] is not None]
    recent = record.steps[rewarded[-window] if rewarded else -1 :]
    end = record.end or {}
    phases = {phase: mean(values(record.steps, f"time_{phase}")) for phase in PHASES}
    measured = {phase: seconds for phase, seconds in phases.items() if seconds is not None}
    padded, real = mean(values(recent, "tokens_padded")), mean(values(recent, "tokens_real"))
    evals = sorted(record.evals, key=lambda line: line["step"] or 0)
    greedy = [line for line in evals if line["temperature"] is None]
    sampled = [line for line in evals if line["temperature"] is not None]
    own_plan = ((record.run.get("plan") or {}).get("peaks_gb") or {}).values()
    return RunSummary(
        name=name,
        model=record.run["model"],
        device=record.run["device"],
        started=record.run["started"],
        rollout_path=record.run["rollout_path"],
        patched=record.run["options"] is not None,
        exit=record.exit or UNFINISHED,
        steps=record.steps[-1]["step"] if record.steps else 0,
        wall_s=end.get("wall_s"),
        seconds_per_step=end.get("seconds_per_step") or (sum(measured.values()) if measured else None),
        reward_window=window,
        reward_first=first,
        reward_last=last,
        pass_at_1_before=greedy[0]["pass_at_1"] if greedy else None,
        pass_at_1_after=greedy[-1]["pass_at_1"] if len(greedy) > 1 else None,
        pass_at_1_problems=greedy[-1]["n"] if greedy else None,
        sampled_before=sampled[0]["pass_at_1"] if sampled else None,
        sampled_after=sampled[-1]["pass_at_1"] if len(sampled) > 1 else None,
        kl_last=mean(values(recent, "kl")),
        entropy_last=mean(values(recent, "entropy")),
        tokens_per_step=real,
        padding_share=1 - real / padded if real is not None and padded else None,
        peak_memory_gb=max(values(record.steps, "peak_memory_gb"), default=None),
        plan_gb=plan_gb if plan_gb is not None else max(own_plan, default=None),
        phase_seconds=measured,
        stale=sum(bool(line["stale"]) for line in record.steps),
    )


def values(lines: Iterable[dict[str, Any]], key: str) -> list[float]:
    """What lines have under a key, nulls left out."""
    return [line[key] for line in lines if line[key] is not None]


def mean(numbers: Sequence[float]) -> float | None:
    """Mean, None of nothing."""
    return sum(numbers) / len(numbers) if numbers else None


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """A short name for every run, each once."""
    names: list[str] = []
    for record in records:
        path = record.path.resolve()
        name = path.parent.name if path.name == "log.jsonl" else f"{path.parent.name}/{path.stem}"
        number = 2
        candidate = name
        while candidate in names:
            candidate, number = f"{name} ({number})", number + 1
        names.append(candidate)
    return names


def different_settings(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """
    What the runs were told differently.

    Returns:
        name -> value of each run, None where it had its default; seed, model and options of the patch included.
    """
    flat = []
    for record in records:
        told = dict(record.run["settings"] or {}) | {"model": record.run["model"], "seed": record.run["seed"]}
        options = record.run["options"]
        told["patch"] = options is not None
        told |= {f"options.{name}": value for name, value in (options or {}).items() if name != "run_log"}
        flat.append(told)
    names = sorted(set().union(*flat))
    table = {name: [told.get(name) for told in flat] for name in names}
    return {name: row for name, row in table.items() if any(value != row[0] for value in row)}


def verdict(summaries: Sequence[RunSummary]) -> str:
    """Which of several runs ended better, and by what measure; empty for one run, or where nothing can be compared."""
    if len(summaries) < 2:
        return ""
    measures = (("pass_at_1_after", "pass@1 after training", ".1%"), ("reward_last", "mean reward at the end", ".3f"))
    for attribute, words, form in measures:
        ends = {summary.name: getattr(summary, attribute) for summary in summaries}
        if any(value is None for value in ends.values()):
            continue
        problems = {summary.pass_at_1_problems for summary in summaries}
        if attribute == "pass_at_1_after" and len(problems) > 1:
            continue
        best = max(ends, key=ends.__getitem__)
        others = ", ".join(f"{name} {value:{form}}" for name, value in ends.items() if name != best)
        if all(value == ends[best] for value in ends.values()):
            return f"{words}: all {ends[best]:{form}}"
        note = " (comparable only if the reward functions are the same)"
        if attribute == "pass_at_1_after":
            note = _noise(ends, problems.pop())
        return f"best by {words}: {best} with {ends[best]:{form}}; {others}{note}"
    return ""


def _noise(rates: dict[str, float], problems: int | None) -> str:
    """Said where the best is no further from the next than two standard errors of the difference of two shares."""
    best, second, *_ = sorted(rates.values(), reverse=True)
    error = math.sqrt((best * (1 - best) + second * (1 - second)) / problems) if problems else 0.0
    if best - second > 2 * error:
        return ""
    return (
        f" (within the noise of {problems} problems: the standard error of the difference is {error:.1%})"
        if error
        else ""
    )


def plan_peak(path: Path) -> float:
    """
    The peak that a plan predicts, from a file that `fastgrpo plan --json` wrote.

    Raises:
        ValueError: another file.
    """
    import json

    try:
        peaks = json.loads(path.read_text())["peaks_gb"]
        return float(max(peaks.values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no plan ({error}); write one with `fastgrpo plan ... --json > {path}`.") from error
