"""What a run log says about its run, in numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgrpo.runlog import RunRecord
from fastgrpo.tools.report.lines import mean, points, standing
from fastgrpo.tools.report.names import plain

PHASES = ("generation", "reward", "sync", "update")
UNFINISHED = "no end line: killed, or still running"
UNEXPLAINED = "over; its end line does not say how"
_WINDOW = 10


@dataclass(frozen=True)
class RunSummary:
    """
    One run; what its log does not know is None.

    Attributes:
        name: what to call it.
        path: its log.
        model, device, started, rollout_path: from the `run` line.
        patched: whether options of a patch are in it.
        exit: "done", "interrupted", an error text, `UNFINISHED` or `UNEXPLAINED`.
        steps: of the last line.
        wall_s, seconds_per_step: of the `end` line; for a run without one, seconds_per_step is the sum of its phases.
        reward_first, reward_last: means over the first and last `reward_window` lines that have a reward; the first is None
            where there is only one such line.
        pass_at_1_before, pass_at_1_after: first and last evaluation with greedy answers, by step; the first is None where there
            are none of two steps, the second where there is none after step 0.
        sampled_before, sampled_after: the same with sampled answers.
        kl_last, entropy_last, tokens_per_step, padding_share: means over the last `reward_window` lines with a reward and those
            that replay their rollouts; share of padded tokens that are no real ones.
        peak_memory_gb: the largest of all lines.
        plan_gb: what the plan had predicted as its peak.
        phase_seconds: mean of a step by phase, those that were measured.
        stale: lines marked stale.
        remarks: a sentence for all that is missing, or that could not be used.

    A mean over lines counts each as often as it has optimizer steps. Lines whose steps were taken again count for nothing.
    """

    name: str
    path: str
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
    remarks: list[str]

    @property
    def whole(self) -> bool:
        """Whether the phases are all of a step: the update is what the others left of it."""
        return "update" in self.phase_seconds and sum(self.phase_seconds.values()) > 0

    @property
    def dominant_phase(self) -> str | None:
        """The phase that most of a step goes into; None where only parts of a step were measured."""
        return max(self.phase_seconds, key=self.phase_seconds.__getitem__) if self.whole else None

    @property
    def dominant_share(self) -> float | None:
        """Its share of a step, 0 to 1."""
        return max(self.phase_seconds.values()) / sum(self.phase_seconds.values()) if self.whole else None

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
    lines = standing(record.steps)
    rewarded = [index for index, line in enumerate(lines) if line["reward"] is not None]
    window = min(_WINDOW, max(1, len(rewarded) // 2)) if rewarded else 0
    early = lines[: rewarded[window - 1] + 1] if len(rewarded) > 1 else []
    recent = lines[rewarded[-window] if rewarded else -1 :]
    end = record.end or {}
    phases = {phase: mean(lines, f"time_{phase}") for phase in PHASES}
    measured = {phase: seconds for phase, seconds in phases.items() if seconds is not None}
    both = [line for line in recent if line["tokens_padded"] is not None and line["tokens_real"] is not None]
    padded, real = mean(both, "tokens_padded"), mean(both, "tokens_real")
    greedy = _before_and_after([line for line in record.evals if line["temperature"] is None])
    sampled = _before_and_after([line for line in record.evals if line["temperature"] is not None])
    own_plan = record.run["plan"]
    return RunSummary(
        name=name,
        path=str(record.path),
        **{key: record.run[key] for key in ("model", "device", "started", "rollout_path")},
        patched=record.run["options"] is not None,
        exit=record.exit or (UNEXPLAINED if record.end else UNFINISHED),
        steps=lines[-1]["step"] if lines else 0,
        wall_s=end.get("wall_s"),
        seconds_per_step=end.get("seconds_per_step") or (sum(measured.values()) if "update" in measured else None),
        reward_window=window,
        reward_first=mean(early, "reward"),
        reward_last=mean(recent, "reward"),
        pass_at_1_before=greedy[0],
        pass_at_1_after=greedy[1],
        pass_at_1_problems=greedy[2],
        sampled_before=sampled[0],
        sampled_after=sampled[1],
        kl_last=mean(recent, "kl"),
        entropy_last=mean(recent, "entropy"),
        tokens_per_step=mean(recent, "tokens_real"),
        padding_share=1 - real / padded if real is not None and padded and real <= padded else None,
        peak_memory_gb=max((value for _, value in points(lines, "peak_memory_gb")), default=None),
        plan_gb=plan_gb if plan_gb is not None else _peak(own_plan),
        phase_seconds=measured,
        stale=sum(bool(line["stale"]) for line in lines),
        remarks=[*_missing(lines, record), *map(plain, record.remarks)],
    )


def _before_and_after(evals: Sequence[dict[str, Any]]) -> tuple[float | None, float | None, int | None]:
    """Pass@1 at the first step and at the last, and the problems of the last."""
    known = sorted((line for line in evals if line["pass_at_1"] is not None), key=lambda line: line["step"] or 0)
    if not known:
        return None, None, None
    first, last = known[0], known[-1]
    before = first["pass_at_1"] if not first["step"] or first["step"] != last["step"] else None
    return before, last["pass_at_1"] if last["step"] else None, last["n"]


def _missing(lines: Sequence[dict[str, Any]], record: RunRecord) -> list[str]:
    remarks = []
    rewards, losses = (sum(line[key] is not None for line in lines) for key in ("reward", "loss"))
    # A step that replays its rollouts has no reward, and the steps after TRL's last entry have no loss.
    unrewarded = sum(line["reward"] is None and bool(line["tokens_real"]) for line in lines)
    lossless = sum(line["loss"] is None for line in lines[:-1])
    if not lines:
        remarks.append("the log has no steps")
    elif not rewards:
        what = "its only step line" if len(lines) == 1 else f"none of its {len(lines)} step lines"
        remarks.append(f"there is no reward: {what} has {'no' if len(lines) == 1 else 'a'} finite one")
    elif unrewarded:
        remarks.append(f"in {unrewarded} of {len(lines)} step lines rollouts have no finite reward")
    if lossless and (losses or record.run["options"] is not None):
        remarks.append(f"in {lossless} of {len(lines)} step lines the loss is not finite")
    again = len(record.steps) - len(lines)
    if again:
        taken = "1 line was" if again == 1 else f"{again} lines were"
        remarks.append(f"steps go back, as after a checkpoint: {taken} replaced by later ones of the same steps")
    return remarks


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


def plan_peak(path: Path) -> float:
    """
    The peak that a plan predicts, from a file that `fastgrpo plan --json` wrote.

    Raises:
        ValueError: another file.
    """
    try:
        plan = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"the plan {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError):
        plan = None
    peak = _peak(plan)
    if peak is None:
        raise ValueError(f"{path} is no plan: it has no peaks_gb; write one with `fastgrpo plan ... --json > {path}`.")
    return peak


def _peak(plan: Any) -> float | None:
    """The largest of a plan's peaks."""
    peaks = plan.get("peaks_gb") if isinstance(plan, dict) else None
    known = [peak for peak in peaks.values() if isinstance(peak, int | float)] if isinstance(peaks, dict) else []
    return max((float(peak) for peak in known if 0 < peak < 1e9), default=None)
