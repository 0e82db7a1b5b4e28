"""Seconds of generation, reward functions and weight sync, measured from outside the trainer."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer


class StepClock:
    """
    What a step spent, since the last `reset`.

    Attributes:
        generation: seconds inside the watched model's `generate`; None if it was not called.
        reward: seconds inside timed reward functions; None if none was called.
        sync: seconds in which weights were handed to a rollout engine; None if they were not.
        tokens_padded: entries of the id tensors of the rollouts, padding included; None if there were none.
        tokens_real: ids of their prompts and completions, what tools answered included; None if nobody saw them.
    """

    def __init__(self) -> None:
        self._has_engine = False
        self.reset()

    def reset(self) -> None:
        """Forgets everything, for a new step."""
        self.generation: float | None = None
        self.reward: float | None = None
        self.sync: float | None = None
        self.tokens_padded: int | None = None
        self.tokens_real: int | None = None

    def phases(self, seconds: float) -> dict[str, float]:
        """
        Where a step's time went.

        Args:
            seconds: wall clock of the step.

        Returns:
            Seconds by phase: `generation`, `reward`, `sync` where there is an engine to hand weights to, and `update` for the
            rest. A step that replays a batch generates for 0 s; what a step with rollouts did not show is left out, and
            `update` with it.
        """
        spent = {"generation": self.generation, "reward": self.reward}
        if self.tokens_padded is None:
            spent = {name: value or 0.0 for name, value in spent.items()}
        if self._has_engine:
            spent["sync"] = self.sync or 0.0
        known = {name: value for name, value in spent.items() if value is not None}
        if len(known) == len(spent):
            known["update"] = seconds - sum(known.values())
        return known

    def tokens(self) -> tuple[int, int | None]:
        """Padded and real tokens of a step: none where it replays a batch; the second is None where nobody saw the ids."""
        return (0, 0) if self.tokens_padded is None else (self.tokens_padded, self.tokens_real)

    def timed_reward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A reward function that does the same under the same name, with its seconds in `reward`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self.reward = (self.reward or 0.0) + time.perf_counter() - began
            return result

        return timed

    @contextmanager
    def watch(self, model: torch.nn.Module) -> Iterator[None]:
        """For a model of one's own: while inside, its `generate` is timed; afterwards it is as it was."""
        original = model.generate

        @functools.wraps(original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            output = original(*args, **kwargs)
            self.generation = (self.generation or 0.0) + time.perf_counter() - began
            ids = output if isinstance(output, torch.Tensor) else output.sequences
            self.tokens_padded = (self.tokens_padded or 0) + ids.numel()
            return output

        model.generate = generate
        try:
            yield
        finally:
            del model.generate

    def around(self, trainer: GRPOTrainer) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Object, method's name and what times it, see `Around`, for all that a GRPO trainer does for its rollouts."""
        engine = getattr(trainer, "vllm_generation", None)
        self._has_engine = engine is not None
        targets = [
            (trainer, "_generate", "generation"),
            (trainer, "_calculate_rewards", "reward"),
            (trainer, "_generate_and_score_completions", None),
            *([(engine, "sync_weights", "sync")] if engine is not None else []),
        ]
        return [(owner, name, functools.partial(self._timed, trainer, attribute)) for owner, name, attribute in targets]

    def _timed(
        self, trainer: GRPOTrainer, attribute: str | None, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        began, synced = time.perf_counter(), self.sync or 0.0
        result = method(*args, **kwargs)
        if not trainer.model.training:  # an evaluation is no step
            return result
        if attribute is not None:
            seconds = time.perf_counter() - began
            if attribute == "generation":  # which hands the weights over first
                seconds -= (self.sync or 0.0) - synced
                prompts, completions, *_ = result
                self.tokens_real = (self.tokens_real or 0) + sum(map(len, prompts)) + sum(map(len, completions))
            setattr(self, attribute, (getattr(self, attribute) or 0.0) + seconds)
        else:
            ids = result["prompt_ids"].numel() + result["completion_ids"].numel()
            self.tokens_padded = (self.tokens_padded or 0) + ids
        return result
