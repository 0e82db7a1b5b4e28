"""Seconds of generation and of reward functions, measured from outside the trainer."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepClock:
    """
    What a step spent, since the last `reset`.

    Attributes:
        generation: seconds inside the watched model's `generate`; None if it was not called.
        reward: seconds inside timed reward functions; None if none was called.
        tokens_padded: entries of the id tensors that `generate` returned, padding included; None if it was not called.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything, for a new step."""
        self.generation: float | None = None
        self.reward: float | None = None
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
