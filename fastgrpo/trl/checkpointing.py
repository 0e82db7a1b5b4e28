"""Gradient checkpointing, switched off while TRL scores without gradients.

TRL switches it off and on again for every generation batch, whether or not anything is scored, and transformers walks through
all modules of the model six times to do so, and adds one more hook to the embeddings each time. Which modules have the
switch does not change, so here they are found once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

SWITCH, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
"""Attributes of a module that transformers may checkpoint: whether it does, and by which function."""
References = list[weakref.ref[torch.nn.Module]]


class CheckpointingDispatcher:
    """
    Stands for TRL's `disable_gradient_checkpointing`: the switches of a known model alone, TRL's own function for others.

    Args:
        original: TRL's.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self._switches: weakref.WeakKeyDictionary[torch.nn.Module, References] = weakref.WeakKeyDictionary()

    def know(self, model: torch.nn.Module) -> None:
        """Finds a model's switches."""
        self._switches[model] = switches(model)

    def forget(self, model: torch.nn.Module) -> None:
        """From here on TRL's own function has this model."""
        self._switches.pop(model, None)

    def __call__(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """While what is returned is open, nothing of the model is checkpointed; afterwards what was."""
        known = self._switches.get(model)
        return self.original(model, *args, **kwargs) if known is None else _switched_off(known)


def switches(model: torch.nn.Module) -> References:
    """The modules of a model that have the switch."""
    return references(module for module in model.modules() if hasattr(module, SWITCH))


def references(modules: Iterable[torch.nn.Module]) -> References:
    """Modules that may be kept without keeping them alive."""
    return [weakref.ref(module) for module in modules]


def alive(modules: References) -> list[torch.nn.Module]:
    """Those that are still there."""
    return [module for module in (ref() for ref in modules) if module is not None]


@contextmanager
def _switched_off(known: References) -> Iterator[None]:
    on = [module for module in alive(known) if getattr(module, SWITCH)]
    for module in on:
        setattr(module, SWITCH, False)
    try:
        yield
    finally:
        for module in on:
            setattr(module, SWITCH, True)
