"""A linear layer with a low-rank adapter (LoRA, Hu et al. 2021, eq. 3) as one function: `y = x W^T + b + s (x A^T) B^T`.

The products run in one dtype and are summed in fp32 by the matrix units; y is rounded after `x W^T` and after the sum. The
factor s rides on products that are there anyway. The backward pass has five products:

    h = s x A^T                 saved, [N, r]
    g = s dy B                  [N, r]
    dx = dy W + g A             dA = g^T x            dB = dy^T h

dA and dB keep their fp32 sums where the adapter is in fp32. Where W is not in the products' dtype, its cast is made again, not
kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastgrpo.checks import refuse_second_derivatives


class Adapted(NamedTuple):
    """A frozen linear layer and its low-rank adapter. A and B, which may be copies, decide the products' dtype."""

    weight: Tensor
    """W, `[M, K]`."""
    bias: Tensor | None
    """b, `[M]`."""
    down: Tensor
    """A, `[r, K]`, in the products' dtype."""
    up: Tensor
    """B, `[M, r]`, in the products' dtype."""
    scale: float
    """s."""


def lora_linear(x: Tensor, layer: Adapted, down: Tensor, up: Tensor) -> Tensor:
    """
    A linear layer and its adapter.

    Args:
        x: `[..., K]`.
        layer: the tensors of the products; they get no gradient.
        down, up: A and B as they are trained, in any floating-point dtype; what `layer` holds are copies of them, or they
            themselves.

    Returns:
        `[..., M]` in the products' dtype. Differentiable once in x, down and up, whose gradients have their dtypes.

    Raises:
        RuntimeError: in the backward pass, where a second derivative is asked for, or a weight was changed since.
    """
    if torch.is_grad_enabled():
        return _LoraLinear.apply(x, down, up, layer)
    return _forward(x, layer)[0]


def _forward(x: Tensor, layer: Adapted) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias, down, up, scale = layer
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if x.dtype != down.dtype:
        rows = rows.to(down.dtype)
    if weight.dtype != down.dtype:
        weight = weight.to(down.dtype)
    out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias.to(down.dtype), rows, weight.t())
    hidden = _scaled_product(rows, down.t(), scale)
    out.addmm_(hidden, up.t())
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1]), rows, hidden


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, down, up, layer):
        out, rows, hidden = _forward(x, layer)
        ctx.save_for_backward(rows, hidden)
        # Not saved as the two above: whoever hooks into saved tensors, gradient checkpointing for one, would pay for each.
        ctx.layer, ctx.trained = layer, (down, up)
        ctx.versions = layer.weight._version, down._version, up._version
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return out

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivatives("fastgrpo's LoRA layer, there because of Options(fused_layers=True),")
        weight, _, down, up, scale = ctx.layer
        trained_down, trained_up = ctx.trained
        if ctx.versions != (weight._version, trained_down._version, trained_up._version):
            raise RuntimeError(
                "a weight of a LoRA layer was changed between its forward and its backward pass, so there is no gradient; "
                "step the optimizer, merge or load adapters after backward()"
            )
        rows, hidden = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        narrow = _scaled_product(grad, up, scale)
        grad_x = grad_down = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(narrow, down).addmm_(
                grad, weight if weight.dtype == grad.dtype else weight.to(grad.dtype)
            )
            grad_x = grad_x.view(ctx.shape)
            if grad_x.dtype != ctx.dtype:
                grad_x = grad_x.to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_down = _product(narrow.t(), rows, trained_down.dtype)
        if ctx.needs_input_grad[2]:
            grad_up = _product(grad.t(), hidden, trained_up.dtype)
        return grad_x, grad_down, grad_up, None


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`scale * (a @ b)`, rounded once."""
    # Kept from call to call, but not a fake one, which only its own mode can use.
    nothing = a.new_zeros(()) if isinstance(a, FakeTensor) else _nothing(a.dtype, a.device)
    return torch.addmm(nothing, a, b, beta=0, alpha=scale)


@lru_cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to a product and multiplied by 0, which means that it is not read."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` in a dtype that may be wider than theirs."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if (a.is_cuda or isinstance(a, FakeTensor)) and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
