"""Gated MLPs of transformers as one function each: which, and from which matrices.

An MLP is taken whose three layers are plain frozen linear layers or plain LoRA layers, and whose activation is SiLU, in models
that have LoRA layers somewhere. Elsewhere weights train, or the model is a reference of one whose weights train, and rounds
as that one does. A disabled adapter leaves the frozen layer under it, so that a policy at its start and its reference agree
bit for bit.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from fastgrpo.mlp import Frozen, GatedMlp, gated_mlp
from fastgrpo.trl.lora_layers import Adapters, Fused
from fastgrpo.trl.plain_layers import PlainLora, compute_dtype, is_plain_linear, plain_lora, runs_only_its_forward

_SILU = (nn.SiLU, ACT2CLS["silu"])
_beside_adapters: WeakSet[nn.Module] = WeakSet()


def remember_adapters(model: nn.Module) -> None:
    """From here on MLPs of this model are taken, if it has LoRA layers."""
    modules = list(model.modules())
    if any(type(module) is LoraLinear for module in modules):
        _beside_adapters.update(module for module in modules if hasattr(module, "act_fn"))


def fused_mlp(layer: Any, x: Tensor, adapters: Adapters) -> Fused | None:
    """
    What computes the output of an MLP with the forward of Llama's.

    Args:
        layer: the MLP.
        x: its input.
        adapters: of the trainer.

    Returns:
        None where the MLP is not made of plain layers only, or its forward would mix dtypes.
    """
    if layer not in _beside_adapters or type(layer.act_fn) not in _SILU or not runs_only_its_forward(layer.act_fn):
        return None
    linears = layer.gate_proj, layer.up_proj, layer.down_proj
    plain = [_plain(linear) for linear in linears]
    if None in plain or nn.modules.module._has_any_global_hook():
        return None
    adapted = [one for one in plain if isinstance(one, PlainLora)]
    dtype = compute_dtype(x, *(one.weight for one in plain), *(part for one in adapted for part in (one.down, one.up)))
    if dtype is None:
        return None
    parts, trained = [], []
    for linear, one in zip(linears, plain, strict=True):
        if isinstance(one, Frozen):
            parts.append(one)
            trained += [None, None]
        else:
            copy = adapters.copied(linear, (one,), dtype)
            parts += copy.shared.layers
            trained += copy.trained
    mlp = GatedMlp(*parts, dtype)
    return lambda x: gated_mlp(x, mlp, trained)


def _plain(layer: nn.Module) -> PlainLora | Frozen | None:
    """None where the layer is more than its matrices, or the frozen ones train."""
    if type(layer) is LoraLinear:
        found = plain_lora(layer) if runs_only_its_forward(layer) else None
        return Frozen(found.weight, found.bias) if found is not None and layer.disable_adapters else found
    if not is_plain_linear(layer):
        return None
    weight, bias = layer.weight, layer.bias
    return None if weight.requires_grad or (bias is not None and bias.requires_grad) else Frozen(weight, bias)
