"""What a patched trainer logs beside TRL's own metrics: where a step's time went, and how old its rollouts were."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback
from trl import GRPOTrainer

from fastgrpo.trl.clock import StepClock
from fastgrpo.trl.freshness import WORST, Freshness

_TIMES = ("time/generation", "time/reward", "time/sync", "time/update")
_TOKENS = ("rollout/tokens_padded", "rollout/tokens_real")


class StepMetrics(TrainerCallback):
    """
    Adds `time/*` and `rollout/*` to a trainer's metrics at the end of every optimizer step.

    They are those of the process itself; TRL logs the first one's.

    Args:
        trainer: a `GRPOTrainer`; None = a deep copy's, which adds nothing.
        clock: what measures the step.
        freshness: what knows the versions of its batches.
    """

    def __init__(self, trainer: GRPOTrainer | None, clock: StepClock, freshness: Freshness | None) -> None:
        self._trainer, self._clock, self._freshness = trainer, clock, freshness
        self._began: float | None = None  # a step whose beginning was not seen has no times

    def __deepcopy__(self, memo: dict[int, Any]) -> StepMetrics:
        return StepMetrics(None, StepClock(), None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is not None:
            self._freshness.train_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is None:
            return
        self._freshness.step_begins()
        self._clock.reset()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is None:
            return
        metrics = self._trainer._metrics["train"]
        if self._began is not None:
            for name, seconds in self._clock.phases(time.perf_counter() - self._began).items():
                metrics[f"time/{name}"].append(seconds)
            for name, tokens in zip(_TOKENS, self._clock.tokens(), strict=True):
                if tokens is not None:
                    metrics[name].append(float(tokens))
        for name, value in self._freshness.step_ends().items():
            metrics[name] = [WORST[name]([*metrics[name], value])]

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is not None:
            self._freshness.train_ends(args.load_best_model_at_end and state.best_model_checkpoint is not None)

    def withdraw(self) -> None:
        """Takes what has not been logged yet out of the trainer's metrics, and the versions off its batches."""
        for name in (*_TIMES, *_TOKENS, *WORST):
            self._trainer._metrics["train"].pop(name, None)
        self._freshness.detach()
