"""`fastgrpo doctor --smoke`: ten short steps on the user's own rollout path, and what they say about the whole run."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trl import GRPOConfig

import fastgrpo
from fastgrpo.runlog import RunRecord, read_run_log
from fastgrpo.tools.demo.quiet import quiet_libraries
from fastgrpo.tools.doctor.case import Case, Line, fault
from fastgrpo.tools.doctor.trainer import build_trainer
from fastgrpo.tools.report.rows import duration
from fastgrpo.tools.report.summary import RunSummary, summarise
from fastgrpo.trl.twins import PREFIX

STEPS, PROMPTS, ROLLOUTS = 10, 10, 4
_SMOKE = {
    "max_steps": STEPS,
    "per_device_train_batch_size": ROLLOUTS,
    "num_generations": ROLLOUTS,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "generation_batch_size": None,
    "num_iterations": 1,
    "log_completions": False,
}
_LAYER = "smoke"


def check_smoke(case: Case) -> Iterator[Line]:
    """Ten prompts, four rollouts each, ten steps: seconds, wall clock of the run, peak memory against the plan."""
    try:
        with quiet_libraries(), tempfile.TemporaryDirectory() as folder:
            trainer = build_trainer(case, Path(folder), rows=PROMPTS, own_settings=True, **_SMOKE)
            log = Path(folder) / "smoke.jsonl"
            with fastgrpo.patch(trainer, _options(case, log)):
                trainer.train()
            record = read_run_log(log)
    except Exception as error:  # anything may break in somebody's model, reward or engine
        yield fault(_LAYER, error)
        return
    summary = summarise(record, _LAYER)
    seconds = summary.seconds_per_step or 0.0
    phase = f"; {summary.dominant_phase} {summary.dominant_share:.0%}" if summary.dominant_share else ""
    yield Line(
        _LAYER,
        "ok",
        f"{summary.steps} steps of {ROLLOUTS} rollouts on {summary.rollout_path}: {seconds:.2f} s per step{phase}",
    )
    yield _policy_line(record)
    yield _wall_clock(case, seconds)
    yield _memory(summary)
    if all(not line["reward_std"] for line in record.steps):
        yield Line(
            _LAYER,
            "hint",
            "in every step, all rewards of the group were the same: nothing is learned from them",
            "easier prompts, a warmer temperature, or a reward with steps in between",
        )


def _options(case: Case, log: Path) -> fastgrpo.Options:
    """Those that the settings give, with a log to read."""
    names = {field.name for field in dataclasses.fields(fastgrpo.Options)}
    given = {name: value for name in names if (value := case.settings.get(PREFIX + name)) is not None}
    if "mini_batch_size" in given:
        given["mini_batch_size"] = min(given["mini_batch_size"], ROLLOUTS)
    return fastgrpo.Options(**{**given, "run_log": log, "on_stale": "ignore"})


def _policy_line(record: RunRecord) -> Line:
    """Whether the sampler had the weights of every step."""
    last = record.steps[-1]
    if any(line["stale"] for line in record.steps):
        text = f"after {STEPS} steps completions still came from the weights of step {last['policy_version']}"
        return Line(_LAYER, "wrong", text, "the sampler's weights are not updated: completions come from an old policy")
    if last["policy_version"] is None:
        text = "nobody knows which weights sampled the completions"
        return Line(_LAYER, "hint", text, "docs/rollouts.md says how a sampler of one's own can tell")
    text = f"every batch came from the weights of its step; the last one from those of step {last['policy_version']}"
    return Line(_LAYER, "ok", text)


def _wall_clock(case: Case, seconds: float) -> Line:
    steps = int(case.settings.get("max_steps") or 0)
    if steps < 1:
        return Line(_LAYER, "skipped", "wall clock: the configuration has no max_steps")
    per_device = int(case.settings.get("per_device_train_batch_size") or GRPOConfig.per_device_train_batch_size)
    sequences = per_device * int(case.settings.get("gradient_accumulation_steps") or 1)
    text = f"wall clock: {steps} steps x {seconds:.2f} s = {duration(steps * seconds)}"
    if sequences > ROLLOUTS:
        most = duration(steps * seconds * sequences / ROLLOUTS)
        text += f" with {ROLLOUTS} rollouts a step; with the {sequences} of the configuration at most {most}"
    return Line(_LAYER, "ok", text)


def _memory(summary: RunSummary) -> Line:
    """The measured peak against the plan of these very steps, which is in their log."""
    peak = summary.peak_memory_gb
    if peak is None or not summary.plan_gb:
        known = f"{peak:.2f} GB of this process" if peak is not None else "not measured"
        return Line(_LAYER, "skipped", f"peak memory: {known}; a plan is for a GPU")
    return Line(
        _LAYER, "ok", f"peak memory {peak:.2f} GB, planned {summary.plan_gb:.2f}: {peak / summary.plan_gb:.0%} of it"
    )
