"""From a TRL trainer to `log.jsonl`: what a run is, a callback that writes a line per step, and a `train` that logs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer

from fastgrpo.runlog import RunLog
from fastgrpo.trl.clock import StepClock
from fastgrpo.trl.compat import Standing
from fastgrpo.trl.config import Options
from fastgrpo.trl.start import rollout_path
from fastgrpo.versions import installed_version

logger = logging.getLogger("fastgrpo")

_PACKAGES = ("fastgrpo", "torch", "transformers", "trl", "peft", "vllm")
_NO_SETTINGS = {"output_dir", "run_name", "hub_token", "accelerator_config", "debug", "disable_tqdm", "report_to"}
"""Places, secrets, what only changes the output, and what its class rewrites even where it is the default."""
_FROM_TRL = ("reward", "reward_std", "loss", "kl", "entropy", "grad_norm")
_PLANNED_ON = ("cuda",)
_TIMES = ("generation", "reward", "sync", "update")


def describe_run(
    config: TrainingArguments,
    *,
    model: str,
    rollout_path: str,
    device: torch.device | str,
    options: Any = None,
    plan: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """
    The values of a log's `run` line.

    Args:
        config: a `GRPOConfig`; its fields that differ from their defaults, but for places, secrets and output, become
            `settings`. Twins of `Options` stand under `options`.
        model: name of the model.
        rollout_path: who generates, `"transformers"` for TRL's own generation.
        device: where the policy is trained.
        options: `fastgrpo.Options` in force; None for an unpatched trainer.
        plan: memory that is expected.

    Returns:
        keyword arguments of `RunLog`.
    """
    values = config.to_dict()
    defaults = {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}
    settings = {
        name: values[name]
        for name, default in defaults.items()
        if name in values and name not in _NO_SETTINGS and not name.startswith("fastgrpo_") and values[name] != default
    }
    return {
        "versions": _versions(),
        "device": _device_line(torch.device(device)),
        "model": model,
        "options": dataclasses.asdict(options) if options is not None else None,
        "settings": settings,
        "rollout_path": rollout_path,
        "seed": config.seed,
        "plan": plan,
    }


class RunLogCallback(TrainerCallback):
    """
    Turns what a GRPO trainer logs into `step` lines; use it with `logging_steps=1` for a line per optimizer step.

    With more, a line's values are means over the steps since the line before; the policy version is their oldest, its lag
    their worst. A step that replays a generation has no reward of its own: null there, with 0 tokens and 0 s of generation.
    Steps after TRL's last entry are in its summary, and in a line without a loss. Times and tokens come from the trainer's own
    `time/*` and `rollout/*` entries where it logs any, as a patched one does, else from `clock`, and real tokens from TRL's
    count; without them they are null. They and the memory are those of the first process.

    Args:
        log: where the lines go.
        clock: what measured generation and reward.
        on_step: called after every line with its values and `seconds`, the wall clock of a step.
    """

    def __init__(
        self,
        log: RunLog,
        clock: StepClock | None = None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._log, self._clock, self._on_step = log, clock, on_step
        self._step_began: float | None = None
        self._seconds: list[float] = []
        self._tokens_seen = 0.0
        self._since: dict[str, Any] = {}  # what entries that are no steps' took out of the trainer's metrics

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts tokens from here."""
        self._tokens_seen = float(state.num_input_tokens_seen)
        self._seconds.clear()
        self._since.clear()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the step's time; its rollouts are generated after this."""
        self._step_began = time.perf_counter()
        if self._clock is not None and not self._seconds:
            self._clock.reset()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stops the step's time."""
        if self._step_began is not None:
            self._seconds.append(time.perf_counter() - self._step_began)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes a line for the entry of a training step; evaluations and summaries are no steps."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" not in logs and not ("train_runtime" in logs and self._seconds):
            self._since |= logs
            return
        logs = self._since | logs
        self._since = {}
        steps = len(self._seconds)
        seconds = sum(self._seconds) / steps if steps else None
        self._seconds.clear()
        values = {key: logs.get(key) for key in _FROM_TRL}
        tokens = self._tokens(logs, args, state, steps)
        values |= tokens | self._times(logs, seconds, steps, tokens["tokens_real"] == 0) | _freshness(logs)
        values["peak_memory_gb"] = peak_memory_gb(args.device)
        self._log.step(state.global_step, seconds=seconds, steps=steps, **values)
        if self._on_step is not None:
            self._on_step({"step": state.global_step, "seconds": seconds, **values})

    def _tokens(
        self, logs: dict[str, Any], args: TrainingArguments, state: TrainerState, steps: int
    ) -> dict[str, float | None]:
        seen, self._tokens_seen = self._tokens_seen, float(state.num_input_tokens_seen)
        real, padded = (logs.get(f"rollout/tokens_{name}") for name in ("real", "padded"))
        if real is None and args.world_size == 1:  # TRL counts those of all processes
            real = _mean(self._tokens_seen - seen, steps)
        if padded is None and self._clock is not None:
            padded = 0.0 if real == 0 else _mean(self._clock.tokens_padded, steps)
        return {"tokens_real": real, "tokens_padded": padded}

    def _times(
        self, logs: dict[str, Any], seconds: float | None, steps: int, replayed: bool
    ) -> dict[str, float | None]:
        times = {f"time_{name}": logs.get(f"time/{name}") for name in _TIMES}
        if self._clock is not None and all(value is None for value in times.values()):
            generation, reward = (
                0.0 if replayed and spent is None else _mean(spent, steps)
                for spent in (self._clock.generation, self._clock.reward)
            )
            sync = _mean(self._clock.sync, steps)
            times |= {"time_generation": generation, "time_reward": reward, "time_sync": sync}
            if seconds is not None and generation is not None and reward is not None:
                times["time_update"] = seconds - generation - reward - (sync or 0.0)
        return times


class LoggedTrain(Standing):
    """
    Stands for a trainer's `train`: the same, with a run log of its own for every call, on the first process.

    Args:
        trainer: a `GRPOTrainer`.
        options: `fastgrpo.Options` in force; `run_log` says where the log goes.
    """

    replaces = "train"

    def __init__(self, trainer: GRPOTrainer, options: Options) -> None:
        self.trainer, self._options = trainer, options
        self._train = trainer.train
        functools.update_wrapper(self, self._train)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as `trainer.train` does, with the same arguments and result."""
        log = self._open() if self.trainer.is_world_process_zero() else None
        if log is None:
            return self._train(*args, **kwargs)
        callback = RunLogCallback(log)
        self.trainer.add_callback(callback)
        try:
            with log:
                return self._train(*args, **kwargs)
        finally:
            self.trainer.remove_callback(callback)

    def _open(self) -> RunLog | None:
        trainer, chosen = self.trainer, self._options.run_log
        path = Path(trainer.args.output_dir if chosen is True else chosen)
        if path.suffix != ".jsonl":
            path = path / "log.jsonl"
        run = describe_run(
            trainer.args,
            model=getattr(trainer.model.config, "name_or_path", "") or type(trainer.model).__name__,
            rollout_path=rollout_path(trainer),
            device=trainer.accelerator.device,
            options=self._options,
            plan=planned_memory(trainer),
        )
        try:
            return open_numbered(path, **run)
        except OSError as error:
            if chosen is not True:
                raise OSError(
                    f"run_log is {str(chosen)!r}, which cannot be written: {error}; give a file or folder that can be, or "
                    "run_log=False."
                ) from error
            logger.warning("fastgrpo: training without a run log: %s.", error)
            return None


def planned_memory(trainer: GRPOTrainer) -> dict[str, Any] | None:
    """
    What the plan says about a trainer, for its log.

    Args:
        trainer: built.

    Returns:
        terms, peaks, total and capacity in GB; None off CUDA, where nothing measures what a plan is about, and where there is
        no plan for it.
    """
    if trainer.accelerator.device.type not in _PLANNED_ON:
        return None
    # The one thing here that the layer above knows.
    from fastgrpo.tools.plan.trainer import plan_trainer

    try:
        plan = plan_trainer(trainer)
    except Exception as error:  # a plan is no reason not to train
        logger.info("fastgrpo: no memory plan in the run log: %s", error)
        return None
    return {
        "terms_gb": dict(plan.terms),
        "peaks_gb": dict(plan.peaks),
        "total_gb": plan.total,
        "capacity_gb": plan.capacity,
        "notes": list(plan.notes),
    }


def open_numbered(path: Path, **run: Any) -> RunLog:
    """
    A new log at `path`, or beside it as `NAME-2.jsonl`, `NAME-3.jsonl`, ... where there are others.

    Args:
        path: the file.
        run: values of the `run` line.
    """
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            return RunLog(candidate, **run)
        except FileExistsError:
            if not candidate.exists():  # it is the folder that is a file
                raise
    raise AssertionError


def _freshness(logs: dict[str, Any]) -> dict[str, Any]:
    version, lag, stale = (logs.get(f"rollout/{name}") for name in ("policy_version", "policy_lag", "stale"))
    whole = {"policy_version": version, "policy_lag": lag}
    return {
        **{key: int(value) if value is not None else None for key, value in whole.items()},
        "stale": bool(stale) if stale is not None else None,
    }


def _mean(total: float | None, count: int) -> float | None:
    return total / count if total is not None and count else None


def peak_memory_gb(device: torch.device) -> float | None:
    """
    Peak memory in GB (10^9 bytes).

    Args:
        device: on CUDA and HIP the allocator's peak; on a CPU the largest resident size of this process so far.

    Returns:
        None where nothing reports it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _versions() -> dict[str, str | None]:
    return {"python": platform.python_version()} | {package: installed_version(package) for package in _PACKAGES}


def _device_line(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu, {platform.machine()}, {torch.get_num_threads()} threads"
    return device.type
