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
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything, for a new step."""
        self.generation: float | None = None
        self.reward: float | None = None
        self.sync: float | None = None
        self.tokens_padded: int | None = None

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

    @contextmanager
    def watch_trainer(self, trainer: GRPOTrainer) -> Iterator[None]:
        """While inside, what a GRPO trainer generates and scores for training is timed; afterwards it is as it was."""
        engine = getattr(trainer, "vllm_generation", None)
        targets = [
            (trainer, "_generate", "generation"),
            (trainer, "_calculate_rewards", "reward"),
            (trainer, "_generate_and_score_completions", None),
            *([(engine, "sync_weights", "sync")] if engine is not None else []),
        ]
        ours = []
        for owner, name, attribute in targets:
            before = owner.__dict__.get(name)
            timed = self._timed(trainer, getattr(owner, name), attribute)
            setattr(owner, name, timed)
            ours.append((owner, name, before, timed))
        try:
            yield
        finally:
            for owner, name, before, timed in reversed(ours):
                if owner.__dict__.get(name) is not timed:
                    continue  # someone put another over it, and keeps it
                if before is None or getattr(before, "retired", False):  # what a patch put there and has taken back
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)

    def _timed(self, trainer: GRPOTrainer, method: Callable[..., Any], attribute: str | None) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, synced = time.perf_counter(), self.sync or 0.0
            result = method(*args, **kwargs)
            if not trainer.model.training:  # an evaluation is no step
                return result
            if attribute is not None:
                seconds = time.perf_counter() - began
                if attribute == "generation":  # which hands the weights over first
                    seconds -= (self.sync or 0.0) - synced
                setattr(self, attribute, (getattr(self, attribute) or 0.0) + seconds)
            else:
                ids = result["prompt_ids"].numel() + result["completion_ids"].numel()
                self.tokens_padded = (self.tokens_padded or 0) + ids
            return result

        return timed
