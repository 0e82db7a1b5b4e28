"""Which layers are nothing but plain matrices, so that a function of the matrices alone gives what the layers give."""

from __future__ import annotations

from typing import NamedTuple

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

# A fake one stands for a parameter where the memory plan runs layers without values.
_PLAIN_WEIGHTS = (nn.Parameter, FakeTensor)
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


class PlainLora(NamedTuple):
    """A frozen linear layer under one LoRA adapter."""

    weight: Tensor
    bias: Tensor | None
    down: Tensor
    """A, as it is trained."""
    up: Tensor
    """B."""
    scale: float


def plain_lora(layer: LoraLinear) -> PlainLora | None:
    """
    The matrices of a LoRA layer of PEFT, whether or not its adapter is disabled.

    By the dictionaries: this is asked for every layer and pass, and a module's attributes cost as much as a small kernel.

    Returns:
        None where the layer is not one plain adapter on one plain frozen linear layer.
    """
    active = layer.active_adapters
    if layer.merged or len(active) != 1 or active[0] in layer.lora_variant:
        return None
    name, parts = active[0], layer._modules
    base, down, up = parts["base_layer"], parts["lora_A"]._modules.get(name), parts["lora_B"]._modules.get(name)
    if not (is_plain_linear(base) and is_plain_linear(down) and is_plain_linear(up)):
        return None
    if not _does_nothing(parts["lora_dropout"]._modules.get(name)) or nn.modules.module._has_any_global_hook():
        return None
    weight, bias, a, b = (
        base._parameters["weight"],
        base._parameters["bias"],
        *(x._parameters["weight"] for x in (down, up)),
    )
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return None
    if down._parameters["bias"] is not None or up._parameters["bias"] is not None:
        return None
    return PlainLora(weight, bias, a, b, layer.scaling[name])


def is_plain_linear(linear: nn.Module | None) -> bool:
    """Whether a module is torch's linear layer, with a weight of its own and nothing around it."""
    return (
        type(linear) is nn.Linear
        and type(linear._parameters.get("weight")) in _PLAIN_WEIGHTS
        and linear._parameters.keys() == {"weight", "bias"}
        and runs_only_its_forward(linear)
    )


def _does_nothing(dropout: nn.Module | None) -> bool:
    idle = type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and dropout.p == 0)
    return idle and runs_only_its_forward(dropout)


def runs_only_its_forward(module: nn.Module) -> bool:
    """Whether a call of a module is a call of its class's `forward`."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def compute_dtype(x: Tensor, *weights: Tensor) -> torch.dtype | None:
    """Of the products of x with these weights; None where layers would mix dtypes, or devices."""
    device, dtypes = x.device, {x.dtype}
    for weight in weights:
        if weight.device != device:
            return None
        dtypes.add(weight.dtype)
    device = device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device) if dtypes <= _FLOATS else None
    return x.dtype if len(dtypes) == 1 and x.is_floating_point() else None
