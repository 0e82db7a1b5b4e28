"""How many products with the output head's weight a micro-batch takes, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from trl import GRPOTrainer

# The library's own ops that have a product inside, and torch's.
_FUSED = {"fastgrpo::fused_pass", "fastgrpo::fused_objective", "fastgrpo::fused_grad"}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}


@contextmanager
def head_products(trainer: GRPOTrainer, words: int) -> Iterator[list[int]]:
    """
    Products with a head of that many words in each micro-batch's loss and backward, one number a micro-batch, as they come.

    Counted by torch's profiler from the shapes of what is multiplied, so nothing else may have a side of `words`. Generation
    and scoring are not counted.
    """
    counts: list[int] = []
    loss, backward = trainer.compute_loss, trainer.accelerator.backward

    def counting(function: Callable[..., Any], opens: bool) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
                result = function(*args, **kwargs)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            found = sum(_is_head_product(event, words) for event in seen.events())
            if opens:
                counts.append(found)
            else:
                counts[-1] += found
            return result

        return counted

    trainer.compute_loss, trainer.accelerator.backward = counting(loss, True), counting(backward, False)
    try:
        yield counts
    finally:
        del trainer.compute_loss, trainer.accelerator.backward


def _is_head_product(event: Any, words: int) -> bool:
    if event.name in _FUSED:
        return True
    return event.name in _PRODUCTS and any(words in shape for shape in event.input_shapes if isinstance(shape, list))
