"""Embedded tokens and patches without a gradient that nobody reads.

PEFT and TRL let the output of frozen embeddings take a gradient, since reentrant checkpointing needs an input with one. Each
forward's embedded tokens then stay on the device until the backward pass is over, with their gradient, and layers below the
lowest adapter, a frozen vision tower's among them, run again for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from fastgrpo.trl.checkpointing import FUNCTION, SWITCH, References, alive, references, switches

_LIBRARIES = {"transformers", "peft", "trl"}
_known_embeddings: weakref.WeakKeyDictionary[torch.nn.Module, References] = weakref.WeakKeyDictionary()
_known_switches: weakref.WeakKeyDictionary[torch.nn.Module, References] = weakref.WeakKeyDictionary()


@contextmanager
def embedded_without_gradient(model: torch.nn.Module) -> Iterator[None]:
    """
    While this is open, embedded tokens and patches of frozen embeddings take no gradient.

    Embeddings that are trained, have hooks of somebody else's, or stand under checkpointing that is reentrant or not
    transformers' stay as they are.

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
                    found[id(embeddings)] = embeddings
        _known_embeddings[model] = references(found.values())
    return alive(_known_embeddings[model])


def _is_asked(module: torch.nn.Module) -> bool:
    """Whether a module's output is made to take a gradient, and nothing else is done with it."""
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    hooks = module._forward_hooks.values()
    names = {(getattr(hook, "__module__", "") or "").split(".")[0] for hook in hooks}
    # A hook may be an object, which has no name.
    asking = all("make_inputs_require_grad" in getattr(hook, "__qualname__", "") for hook in hooks)
    return bool(hooks) and names <= _LIBRARIES and asking


def _checkpoints_without_inputs(model: torch.nn.Module) -> bool:
    """Whether a model checkpoints, and no input needs a gradient for it; of functions of somebody else's nothing is known."""
    if model not in _known_switches:
        _known_switches[model] = switches(model)
    functions = [getattr(module, FUNCTION, None) for module in alive(_known_switches[model]) if getattr(module, SWITCH)]
    return bool(functions) and all(getattr(f, "keywords", {}).get("use_reentrant") is False for f in functions)


def _without_gradient(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return output.detach() if isinstance(output, torch.Tensor) and output.is_leaf else None
