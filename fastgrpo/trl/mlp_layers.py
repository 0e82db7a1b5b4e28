"""Gated MLPs of transformers as one function each: which, and from which matrices.

An MLP is taken whose three layers are plain frozen linear layers or plain LoRA layers, and whose activation is SiLU, in models
that have LoRA layers somewhere. Elsewhere weights train, or the model is a reference of one whose weights train, and rounds
as that one does. A disabled adapter leaves the frozen layer under it, so that a policy at its start and its reference agree
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from fastgrpo.lora import Adapted
from fastgrpo.mlp import Frozen, GatedMlp, gated_mlp
from fastgrpo.trl.plain_layers import compute_dtype, is_plain_linear, plain_lora, runs_only_its_forward

_SILU = (nn.SiLU, ACT2CLS["silu"])
_beside_adapters: WeakSet[nn.Module] = WeakSet()
Copied = Callable[[nn.Module, tuple[Tensor, Tensor], torch.dtype], tuple[Tensor, Tensor]]


def remember_adapters(model: nn.Module) -> None:
    """From here on MLPs of this model are taken, if it has LoRA layers."""
    modules = list(model.modules())
    if any(type(module) is LoraLinear for module in modules):
        _beside_adapters.update(module for module in modules if hasattr(module, "act_fn"))


def fused_mlp(layer: Any, x: Tensor, copied: Copied) -> Callable[[Tensor], Tensor] | None:
    """
    What computes the output of an MLP with the forward of Llama's.

    Args:
        layer: the MLP.
        x: its input.
        copied: A and B of a LoRA layer in a dtype.

    Returns:
        None where the MLP is not made of plain layers only, or its forward would mix dtypes.
    """
    if layer not in _beside_adapters or type(layer.act_fn) not in _SILU or not runs_only_its_forward(layer.act_fn):
        return None
    found = [_matrices(linear) for linear in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    if None in found or nn.modules.module._has_any_global_hook():
        return None
    trained = [part for linear in found for part in linear.adapter or (None, None)]
    dtype = compute_dtype(x, *(linear.weight for linear in found), *(part for part in trained if part is not None))
    if dtype is None:
        return None
    mlp = GatedMlp(*(linear.in_dtype(dtype, copied) for linear in found), dtype)
    return lambda x: gated_mlp(x, mlp, trained)


class _Matrices(NamedTuple):
    """Of a linear layer, and of its adapter unless that is disabled."""

    layer: nn.Module
    weight: Tensor
    bias: Tensor | None
    adapter: tuple[Tensor, Tensor] | None
    scale: float

    def in_dtype(self, dtype: torch.dtype, copied: Copied) -> Adapted | Frozen:
        if self.adapter is None:
            return Frozen(self.weight, self.bias)
        return Adapted(self.weight, self.bias, *copied(self.layer, self.adapter, dtype), self.scale)


def _matrices(layer: nn.Module) -> _Matrices | None:
    """None where the layer is more than they are, or the frozen ones train."""
    if type(layer) is LoraLinear:
        lora = plain_lora(layer) if runs_only_its_forward(layer) else None
        if lora is None:
            return None
        weight, bias, down, up, scale = lora
        return _Matrices(layer, weight, bias, None if layer.disable_adapters else (down, up), scale)
    if not is_plain_linear(layer):
        return None
    weight, bias = layer.weight, layer.bias
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return None
    return _Matrices(layer, weight, bias, None, 1.0)
