"""Gradient checkpointing, switched off while TRL scores a generation batch without gradients.

TRL switches it off and on again for every generation batch, whether or not anything is scored, and transformers walks through
all modules of the model six times to do so, and adds one more hook to the embeddings each time. Which modules have the
switch does not change, so here they are found once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

_SWITCH = "gradient_checkpointing"


class CheckpointingDispatcher:
    """
    Stands for TRL's `disable_gradient_checkpointing`: the switches of a known model alone, TRL's own function for others.

    Args:
        original: TRL's.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self._switches: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref]] = weakref.WeakKeyDictionary()

    def know(self, model: torch.nn.Module) -> None:
        """Finds a model's switches."""
        self._switches[model] = [weakref.ref(module) for module in model.modules() if hasattr(module, _SWITCH)]

    def forget(self, model: torch.nn.Module) -> None:
        """From here on TRL's own function has this model."""
        self._switches.pop(model, None)

    def __call__(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """While what is returned is open, nothing of the model is checkpointed; afterwards what was."""
        switches = self._switches.get(model)
        return self.original(model, *args, **kwargs) if switches is None else _switched_off(switches)


@contextmanager
def _switched_off(switches: list[weakref.ref]) -> Iterator[None]:
    on = [module for module in (ref() for ref in switches) if module is not None and getattr(module, _SWITCH)]
    for module in on:
        setattr(module, _SWITCH, False)
    try:
        yield
    finally:
        for module in on:
            setattr(module, _SWITCH, True)
