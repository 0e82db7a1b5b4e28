"""Gradient checkpointing: switched off while TRL scores without gradients, and without a gradient that nobody reads.

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
from transformers import PreTrainedModel

_SWITCH, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_LIBRARIES = {"transformers", "peft", "trl"}


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
        self._switches[model] = _switches(model)

    def forget(self, model: torch.nn.Module) -> None:
        """From here on TRL's own function has this model."""
        self._switches.pop(model, None)

    def __call__(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """While what is returned is open, nothing of the model is checkpointed; afterwards what was."""
        switches = self._switches.get(model)
        return self.original(model, *args, **kwargs) if switches is None else _switched_off(switches)


@contextmanager
def embedded_without_gradient(model: torch.nn.Module) -> Iterator[None]:
    """
    While this is open, embedded tokens and patches of frozen embeddings take no gradient.

    PEFT and TRL let them take one, since reentrant checkpointing needs an input with a gradient. Nobody reads it, but each
    forward's embedded tokens stay on the device until the backward pass is over, with their gradient, and layers below the
    lowest adapter, a frozen vision tower's among them, run again for it. Embeddings that are trained, have hooks of somebody
    else's, or stand under checkpointing that is reentrant or not transformers' stay as they are.

    Args:
        model: unwrapped.
    """
    asked = [module for module in _embeddings(model) if _is_asked(module)] if torch.is_grad_enabled() else []
    if asked and not _checkpoints_without_inputs(model):
        asked = []
    handles = [module.register_forward_hook(_without_gradient) for module in asked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_known_embeddings: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref]] = weakref.WeakKeyDictionary()
_known_switches: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref]] = weakref.WeakKeyDictionary()


def _embeddings(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Of a model and of the models in it; looked for once."""
    if model not in _known_embeddings:
        found = {}
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                try:
                    embeddings = module.get_input_embeddings()
                except NotImplementedError:
                    continue
                if isinstance(embeddings, torch.nn.Module):
                    found[id(embeddings)] = weakref.ref(embeddings)
        _known_embeddings[model] = list(found.values())
    return [module for module in (ref() for ref in _known_embeddings[model]) if module is not None]


def _is_asked(module: torch.nn.Module) -> bool:
    """Whether a module's output is made to take a gradient, and nothing else is done with it."""
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    hooks = module._forward_hooks.values()
    names = {(getattr(hook, "__module__", "") or "").split(".")[0] for hook in hooks}
    return (
        bool(hooks) and names <= _LIBRARIES and all("make_inputs_require_grad" in hook.__qualname__ for hook in hooks)
    )


def _switches(model: torch.nn.Module) -> list[weakref.ref]:
    return [weakref.ref(module) for module in model.modules() if hasattr(module, _SWITCH)]


def _checkpoints_without_inputs(model: torch.nn.Module) -> bool:
    """Whether a model checkpoints, and no input needs a gradient for it; of functions of somebody else's nothing is known."""
    if model not in _known_switches:
        _known_switches[model] = _switches(model)
    modules = [module for module in (ref() for ref in _known_switches[model]) if module is not None]
    functions = [getattr(module, _FUNCTION, None) for module in modules if getattr(module, _SWITCH)]
    return bool(functions) and all(getattr(f, "keywords", {}).get("use_reentrant") is False for f in functions)


def _without_gradient(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return output.detach() if isinstance(output, torch.Tensor) and output.is_leaf else None


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
