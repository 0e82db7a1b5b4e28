"""Linear layers with low-rank adapters (LoRA, Hu et al. 2021, eq. 3) as one function: `y = x W^T + b + s (x A^T) B^T`.

The products run in one dtype and are summed in fp32 by the matrix units; y is rounded after `x W^T` and after the sum. The
factor s rides on products that are there anyway. The backward pass has five products:

    h = s x A^T                 saved, [N, r]
    g = s dy B                  [N, r]
    dx = dy W + g A             dA = g^T x            dB = dy^T h

Layers that are given the same x are one function together. Their A stand one below the other, [R, K] with R the sum of
their ranks, so that h, dA and the part `g A` of dx are one product each for all of them, and x is saved once:

    h = s x A^T                 [N, R], a range of columns a layer, and so is g
    dx = g A + dy_1 W_1 + ...   rounded after each product

dA and dB keep their fp32 sums where the adapter is in fp32. Where W is not in the products' dtype, its cast is made again, not
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class SharedInput(NamedTuple):
    """Layers of one input, with one scale, whose A stand one below the other in one matrix."""

    layers: Sequence[Adapted]
    """Each with its own rows of `down`."""
    down: Tensor
    """`[R, K]`, in the products' dtype."""
    ranks: Sequence[int]
    """Rows of `down` that belong to each; their sum is R."""
    scale: float
    """s."""

    @classmethod
    def of(cls, layers: Sequence[Adapted], down: Tensor) -> SharedInput:
        """Layers whose A are the rows of `down` in their order."""
        return cls(layers, down, [layer.up.shape[1] for layer in layers], layers[0].scale)

    def parts(self, x: Tensor, dim: int) -> Sequence[Tensor]:
        """Each layer's own of R rows or columns."""
        return (x,) if len(self.ranks) == 1 else x.split(self.ranks, dim)


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
    return lora_linears(x, SharedInput.of((layer,), layer.down), (down, up))[0]


def lora_linears(x: Tensor, shared: SharedInput, trained: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """
    Linear layers of one input, and their adapters.

    Args:
        x: `[..., K]`.
        shared: the tensors of the products; they get no gradient.
        trained: A and B of each layer as they are trained, one after the other; all A have one dtype, and so have all B.

    Returns:
        `[..., M]` of each layer, in the products' dtype. Differentiable once in x and what is trained.

    Raises:
        RuntimeError: as `lora_linear`.
    """
    if torch.is_grad_enabled():
        return _LoraLinears.apply(x, shared, *trained)
    outs, _ = forward_shared(rows_of(x, shared.down.dtype), shared)
    return tuple(outs) if x.dim() == 2 else tuple(out.view(*x.shape[:-1], out.shape[1]) for out in outs)


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., K]` as `[N, K]` in the products' dtype."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if x.dtype == dtype else rows.to(dtype)


def forward_shared(rows: Tensor, shared: SharedInput) -> tuple[list[Tensor], Tensor]:
    """
    The forward pass of layers of one input.

    Args:
        rows: x, `[N, K]`, in the products' dtype.
        shared: the layers.

    Returns:
        y of each layer, `[N, M]`, and h, `[N, R]`, for the backward pass.
    """
    dtype = rows.dtype
    hidden = _scaled_product(rows, shared.down.t(), shared.scale)
    outs = []
    for (weight, bias, _, up, _), part in zip(shared.layers, shared.parts(hidden, 1), strict=True):
        if weight.dtype != dtype:
            weight = weight.to(dtype)
        out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias.to(dtype), rows, weight.t())
        outs.append(out.addmm_(part, up.t()))
    return outs, hidden


def backward_shared(
    grads: Sequence[Tensor | None],
    rows: Tensor,
    hidden: Tensor,
    shared: SharedInput,
    down_dtype: torch.dtype | None,
    up_dtype: torch.dtype | None,
    to_rows: bool = True,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """
    The backward pass of layers of one input.

    Args:
        grads: dy of each layer, `[N, M]`, in the products' dtype; None = its y was not used. At least one is there.
        rows, hidden, shared: as the forward pass had and returned them.
        down_dtype, up_dtype: of dA and dB; None = not needed.
        to_rows: whether dx is needed.

    Returns:
        dx `[N, K]`, dA and dB of each layer; None where not needed, or not used.
    """
    grad_rows, narrow = None, hidden
    if to_rows or down_dtype is not None:
        narrow = _narrow(grads, hidden, shared)
    if to_rows:
        grad_rows = torch.mm(narrow, shared.down)
        for grad, layer in zip(grads, shared.layers, strict=True):
            if grad is not None:
                weight = layer.weight
                grad_rows.addmm_(grad, weight if weight.dtype == grad.dtype else weight.to(grad.dtype))
    downs: list[Tensor | None] = [None] * len(grads)
    if down_dtype is not None:
        stacked = _product(narrow.t(), rows, down_dtype)
        downs = [part if grad is not None else None for part, grad in zip(shared.parts(stacked, 0), grads, strict=True)]
    ups: list[Tensor | None] = [None] * len(grads)
    if up_dtype is not None:
        parts = shared.parts(hidden, 1)
        ups = [
            None if grad is None else _product(grad.t(), part, up_dtype)
            for grad, part in zip(grads, parts, strict=True)
        ]
    return grad_rows, downs, ups


def require_unchanged(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raises `RuntimeError` where a weight is not what it was when the forward pass took its version."""
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(
                "a weight of a layer was changed between its forward and its backward pass, so there is no gradient; "
                "step the optimizer, merge or load adapters after backward()"
            )


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shared, *trained):
        rows = rows_of(x, shared.down.dtype)
        outs, hidden = forward_shared(rows, shared)
        ctx.save_for_backward(rows, hidden)
        # Not saved as the two above: whoever hooks into saved tensors, gradient checkpointing for one, would pay for each.
        ctx.shared, ctx.weights = shared, (*trained, *(layer.weight for layer in shared.layers))
        ctx.versions = [weight._version for weight in ctx.weights]
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        return tuple(outs) if x.dim() == 2 else tuple(out.view(*x.shape[:-1], out.shape[1]) for out in outs)

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivatives("fastgrpo's LoRA layer, there because of Options(fused_layers=True),")
        require_unchanged(ctx.weights, ctx.versions)
        if not any(grad is not None for grad in grads):
            return None, None, *(None for _ in ctx.needs_input_grad[2:])
        rows, hidden = ctx.saved_tensors
        to_x, _, *to_trained = ctx.needs_input_grad
        grad_x, downs, ups = backward_shared(
            [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads],
            rows,
            hidden,
            ctx.shared,
            ctx.weights[0].dtype if any(to_trained[::2]) else None,
            ctx.weights[1].dtype if any(to_trained[1::2]) else None,
            to_x,
        )
        if grad_x is not None:
            grad_x = grad_x.view(ctx.shape)
            if grad_x.dtype != ctx.dtype:
                grad_x = grad_x.to(ctx.dtype)
        return grad_x, None, *(grad for pair in zip(downs, ups, strict=True) for grad in pair)


def _narrow(grads: Sequence[Tensor | None], hidden: Tensor, shared: SharedInput) -> Tensor:
    """g, `[N, R]`; 0 where a layer's y was not used."""
    if len(grads) == 1:
        return _scaled_product(grads[0], shared.layers[0].up, shared.scale)
    narrow = torch.empty_like(hidden)
    for grad, layer, part in zip(grads, shared.layers, shared.parts(narrow, 1), strict=True):
        if grad is None:
            part.zero_()
        else:
            _scaled_product(grad, layer.up, shared.scale, part)
    return narrow


def _scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """`scale * (a @ b)`, rounded once."""
    # Kept from call to call, but not a fake one, which only its own mode can use.
    nothing = a.new_zeros(()) if isinstance(a, FakeTensor) else _nothing(a.dtype, a.device)
    return torch.addmm(nothing, a, b, beta=0, alpha=scale, out=out)


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
