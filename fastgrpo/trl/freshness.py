"""Which weights sampled the batches of a trainer: attached to each, checked where it is used."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from trl import GRPOTrainer

from fastgrpo.rollout.policy_version import (
    UNKNOWN,
    VERSION_KEY,
    Rollout,
    StaleRolloutError,
    allowed_lag,
    in_words,
    rollout_of,
    worst_lag,
)
from fastgrpo.trl.compat import overrides

logger = logging.getLogger("fastgrpo")

# What of several steps a log entry shows: the worst.
WORST: dict[str, Callable[..., float]] = {
    "rollout/policy_version": min,
    "rollout/policy_lag": worst_lag,
    "rollout/stale": max,
}

_SAMPLING_METHODS = ("_generate", "_generate_single_turn")


class Freshness:
    """
    Follows the weights from the optimizer to the sampler, and the batches back.

    Every batch gets an int64 `[B]` tensor `policy_version` on the CPU. Nothing is gathered: each process judges its own rows.

    Args:
        trainer: a `GRPOTrainer`.
        on_stale: what happens at a batch whose weights are not those the algorithm expects: `"warn"`, `"error"`, `"ignore"`.
    """

    def __init__(self, trainer: GRPOTrainer, on_stale: str) -> None:
        self._trainer, self._on_stale = trainer, on_stale
        # An own sampler may hold any weights; only TRL's own is known to take the present ones.
        self._own_sampler = next((name for name in _SAMPLING_METHODS if overrides(trainer, name)), None)
        self._engine_version = self._loaded_step()
        self._sampled: Rollout | None = None  # by the last `_generate`
        self._generated: Rollout | None = None  # by the present `_prepare_inputs`
        self._buffered = Rollout(None, source="a generation before fastgrpo.patch")  # what training steps use
        self._phase = 0  # of the buffered batch, see `allowed_lag`
        self._used = 0  # micro-batches of this optimizer step
        self._lags: list[tuple[Rollout, int | None, bool]] = []
        self._last_step = trainer.state.global_step
        self._best_loaded = False
        self._renumbered = 0  # what was step 0 of the first train() here is now this step
        self._static = (getattr(trainer, "rollout_func", None), 0)  # and what that was when the function was first seen
        self._reported: Rollout | None = None
        self._reported_unknown = False

    def around(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Object, method's name and what follows it, see `Around`."""
        trainer, engine = self._trainer, getattr(self._trainer, "vllm_generation", None)
        return [
            (trainer, "_generate", self._generate),
            (trainer, "_generate_and_score_completions", self._attach),
            (trainer, "_prepare_inputs", self._use),
            *([(engine, "sync_weights", self._hand_over)] if engine is not None else []),
        ]

    def train_begins(self) -> None:
        """Renumbers what an earlier `train()` left in buffer and engine: this one counts its steps from 0 again."""
        start = self._trainer.state.global_step
        if start == 0:  # a resumed run goes on with its checkpoint's numbers
            self._renumbered -= self._last_step
        if start > 0 or self._best_loaded:  # the weights are a checkpoint's now
            self._engine_version = None
            self._buffered = Rollout(None, source="a generation before a checkpoint was loaded")
            self._write_versions(lambda versions: torch.full_like(versions, UNKNOWN))
        else:
            shift = start - self._last_step
            self._engine_version = None if self._engine_version is None else self._engine_version + shift
            self._buffered = _shifted(self._buffered, shift)
            self._write_versions(lambda versions: torch.where(versions == UNKNOWN, versions, versions + shift))
        self._last_step, self._best_loaded = start, False
        self._lags, self._used = [], 0

    def step_begins(self) -> None:
        """Counts the micro-batches of an optimizer step from here."""
        accumulation = self._trainer.args.gradient_accumulation_steps
        if (
            self._used
        ):  # an epoch's last step may have fewer, as if the batch had been generated so much later in its step
            self._phase += max(accumulation - self._used, 0)
        self._lags, self._used = [], 0

    def step_ends(self) -> dict[str, float]:
        """The step's metrics: its oldest version, largest lag, and whether a batch was stale; what is unknown is left out."""
        self._last_step = self._trainer.state.global_step
        stale = any(rollout.static or late for rollout, _, late in self._lags)
        known = [(rollout.oldest, lag) for rollout, lag, _ in self._lags if rollout.oldest is not None]
        if not known or len(known) < len(self._lags):
            return {"rollout/stale": 1.0} if stale else {}
        return {
            "rollout/policy_version": float(min(version for version, _ in known)),
            "rollout/policy_lag": float(worst_lag([lag for _, lag in known])),
            "rollout/stale": float(stale),
        }

    def train_ends(self, best_loaded: bool) -> None:
        """Remembers whether the best checkpoint's weights took the place of the last step's."""
        self._best_loaded = best_loaded
        if best_loaded and self._trainer.state.best_global_step is not None:
            self._last_step = self._trainer.state.best_global_step

    def detach(self) -> None:
        """Takes the versions off the batches that are buffered."""
        for batch in self._trainer._buffered_inputs or ():
            batch.pop(VERSION_KEY, None)

    def _hand_over(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._engine_version = None  # of no step, if this fails in the middle
        result = method(*args, **kwargs)
        self._engine_version = self._trainer.state.global_step
        return result

    def _loaded_step(self) -> int | None:
        """The step whose weights TRL says the engine has."""
        step = getattr(self._trainer, "_last_loaded_step", -1)
        return step if step >= 0 else None

    def _generate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step, loaded = self._trainer.state.global_step, self._loaded_step()
        result = method(*args, **kwargs)
        if self._loaded_step() != loaded:  # by another way than `sync_weights`
            self._engine_version = self._loaded_step()
        self._sampled = self._rollout(step, result)
        return result

    def _rollout(self, step: int, result: Any) -> Rollout:
        trainer = self._trainer
        if getattr(trainer, "rollout_func", None) is not None:
            fields = next((part for part in result if isinstance(part, dict)), {})
            rollout = rollout_of(fields, len(result[0]), getattr(trainer.rollout_func, "rollout_path", "rollout_func"))
            if self._static[0] is not trainer.rollout_func:
                self._static = (trainer.rollout_func, self._renumbered)
            # One that cannot take new weights still says what it said in an earlier train().
            return _shifted(rollout, self._renumbered - self._static[1]) if rollout.static else rollout
        if self._own_sampler is not None:
            return Rollout(None, source=f"{type(trainer).__name__}.{self._own_sampler}")
        if trainer.use_vllm:
            return Rollout(self._engine_version, source="vLLM")
        return Rollout(step, source="generate")

    def _attach(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._sampled = None
        batch = method(*args, **kwargs)
        rows = len(batch["completion_ids"])
        source = f"{type(self._trainer).__name__}._generate_and_score_completions"
        if VERSION_KEY in batch:  # a subclass knows better
            given = batch[VERSION_KEY]
            versions = given.tolist() if isinstance(given, torch.Tensor) else given
            rollout = rollout_of({VERSION_KEY: versions}, rows, source)
        else:
            rollout = self._sampled or Rollout(None, source=source)
        versions = rollout.versions
        if not isinstance(versions, tuple) or len(versions) != rows:
            versions = (UNKNOWN if rollout.oldest is None else rollout.oldest,) * rows
        batch[VERSION_KEY] = torch.tensor(versions, dtype=torch.int64)
        self._generated = rollout
        return batch

    def _use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        self._generated = None
        inputs = method(*args, **kwargs)
        if not trainer.model.training:
            if self._generated is not None:
                self._judge(self._generated, allowed=0)
            return inputs
        if self._generated is not None:
            self._buffered, self._phase = self._generated, self._used
        self._used += 1
        uses = trainer.num_iterations * trainer.args.steps_per_generation
        allowed = allowed_lag(self._phase, uses, trainer.args.gradient_accumulation_steps)
        lag, late = self._judge(self._buffered, allowed)
        self._lags.append((self._buffered, lag, late))
        return inputs

    def _judge(self, rollout: Rollout, allowed: int) -> tuple[int | None, bool]:
        """Lag and whether it is none the algorithm expects, which is reported once for a batch."""
        step = self._trainer.state.global_step
        if rollout.oldest is None:
            if self._on_stale == "error":
                raise StaleRolloutError(self._unknown(rollout))
            if self._on_stale == "warn" and not self._reported_unknown:
                logger.warning("fastgrpo: %s", self._unknown(rollout))
            self._reported_unknown = True
            return None, False
        lag = worst_lag([step - rollout.newest, step - rollout.oldest])
        late = not 0 <= lag <= allowed
        if late and self._on_stale == "error":
            raise StaleRolloutError(self._late(rollout, step, lag, allowed))
        if late and self._on_stale == "warn" and self._reported is not rollout:
            logger.warning("fastgrpo: %s", self._late(rollout, step, lag, allowed))
            self._reported = rollout
        return lag, late

    def _late(self, rollout: Rollout, step: int, lag: int, allowed: int) -> str:
        args = self._trainer.args
        if self._trainer.model.training:
            use = f"a batch is used at optimizer step {step}"
            rule = (
                f"the algorithm allows {allowed} (num_iterations={self._trainer.num_iterations}, "
                f"steps_per_generation={args.steps_per_generation}, "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps})"
            )
        else:
            use, rule = (
                f"an evaluation batch is judged at optimizer step {step}",
                "an evaluation expects the present weights",
            )
        why = (
            f"{rollout.source} cannot take new weights"
            if rollout.static
            else f"{rollout.source} did not get the present weights"
        )
        return (
            f"{use} that was sampled with the weights of {in_words(step - lag)}: a lag of {lag}, where "
            f"{rule}; {why}. Options.on_stale is {self._on_stale!r}."
        )

    def _unknown(self, rollout: Rollout) -> str:
        return (
            f"nobody knows which weights sampled a batch used at optimizer step {self._trainer.state.global_step}: it comes "
            f"from {rollout.source}. A rollout_func says it by returning {VERSION_KEY!r}, a subclass by putting it into the "
            "batch: trainer.state.global_step when the sampler got its weights, one integer or one a row. Options.on_stale is "
            f"{self._on_stale!r}."
        )

    def _write_versions(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for batch in self._trainer._buffered_inputs or ():
            if VERSION_KEY in batch:
                batch[VERSION_KEY] = change(batch[VERSION_KEY])


def _shifted(rollout: Rollout, shift: int) -> Rollout:
    versions = rollout.versions
    if isinstance(versions, tuple):
        versions = tuple(version if version == UNKNOWN else version + shift for version in versions)
    elif versions is not None:
        versions += shift
    return dataclasses.replace(rollout, versions=versions)
