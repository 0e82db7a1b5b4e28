"""Rows picked by an index, and their gradients: `fastgrpo::take_rows` and `fastgrpo::sum_rows`, each the other's gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.types import Number

from fastgrpo.direct import with_autograd, without_autograd
from fastgrpo.kernels.select import pack_reason

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("fastgrpo::take_rows", mutates_args=())
def take_rows_op(values: Tensor, rows: Tensor, fill: Number) -> Tensor:
    """
    `values[rows]`, differentiable in the values, without a host sync.

    Args:
        values: `[N, ...]`, any dtype.
        rows: `[S]` int64 below N; negative: a row of the fill value.
        fill: what those rows hold; a whole number stays one, so int64 gets all of its digits.

    Returns:
        `[S, ...]`.
    """
    # The kernel fills by 8 bytes at most, less than an entry of complex128.
    if _has_kernels(values) and values.dtype.itemsize <= 8:
        out = values.new_empty(rows.shape[0], *values.shape[1:])
        torch.ops.fastgrpo.take_rows_into(values.contiguous(), rows.contiguous(), _pattern(fill, values.dtype), out)
        return out
    if values.shape[0] == 0:
        return values.new_full((rows.shape[0], *values.shape[1:]), fill)
    taken = values.index_select(0, rows.clamp(min=0))
    return taken.masked_fill_((rows < 0).view(-1, *(1,) * (values.dim() - 1)), fill)


@take_rows_op.register_fake
def _(values, rows, fill):
    return values.new_empty(rows.shape[0], *values.shape[1:])


def _take_context(ctx, inputs, output) -> None:
    values, rows, _ = inputs
    ctx.count = values.shape[0]
    ctx.save_for_backward(rows)


def _take_backward(ctx, grad):
    (rows,) = ctx.saved_tensors
    return sum_rows(grad, rows, ctx.count), None, None


@torch.library.custom_op("fastgrpo::sum_rows", mutates_args=())
def sum_rows_op(grads: Tensor, rows: Tensor, count: int) -> Tensor:
    """
    The sum of the `grads` of each row, in fp32 (fp64) in ascending order, rounded once; without a host sync.

    Args:
        grads: `[S, ...]` float.
        rows: `[S]` int64 below `count`: the row that each belongs to; negative: none.
        count: N.

    Returns:
        `[N, ...]` in the dtype of `grads`.
    """
    order = rows.argsort(stable=True)
    start = torch.searchsorted(rows[order], torch.arange(count + 1, device=rows.device))
    flat = grads.reshape(grads.shape[0], math.prod(grads.shape[1:]))
    out = flat.new_empty(count, flat.shape[1])
    if _has_kernels(grads) and grads.dtype in _SUMMED:
        torch.ops.fastgrpo.sum_rows_into(flat.contiguous(), order, start, out)
        return out.view(count, *grads.shape[1:])
    times = start.diff()
    total = flat.new_zeros(count, flat.shape[1], dtype=torch.promote_types(grads.dtype, torch.float32))
    for turn in range(int(times.max()) if count else 0):
        more = (times > turn).nonzero().squeeze(1)
        total[more] += flat[order[start[more] + turn]]
    return out.copy_(total).view(count, *grads.shape[1:])


@sum_rows_op.register_fake
def _(grads, rows, count):
    return grads.new_empty(count, *grads.shape[1:])


def _sum_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])


def _sum_backward(ctx, grad):
    (rows,) = ctx.saved_tensors
    return take_rows(grad, rows, 0.0), None, None


take_rows = with_autograd(take_rows_op, _take_context, _take_backward)
"""`fastgrpo::take_rows` with the least work around it."""
sum_rows = with_autograd(sum_rows_op, _sum_context, _sum_backward)
"""`fastgrpo::sum_rows` with the least work around it."""


@torch.library.custom_op("fastgrpo::left_pack_index", mutates_args=())
def left_pack_index_op(mask: Tensor) -> tuple[Tensor, Tensor]:
    """
    Where the entries of every row go when its real ones move to the left.

    Args:
        mask: `[B, L]` bool or integer, not 0 on real entries.

    Returns:
        `[B, L]` int64: the column that comes to stand at each place, real ones first, both kinds in order; and `[B]` int64,
        how many are real.
    """
    if _has_kernels(mask):
        index, counts = (mask.new_empty(shape, dtype=torch.int64) for shape in (mask.shape, mask.shape[:1]))
        torch.ops.fastgrpo.left_pack_into(mask.contiguous(), index, counts)
        return index, counts
    real = mask.bool()
    count = real.sum(1, keepdim=True)
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    place = torch.where(real, real.cumsum(1) - 1, count + (~real).cumsum(1) - 1)
    return torch.empty_like(place).scatter_(1, place, columns), count.squeeze(1)


@left_pack_index_op.register_fake
def _(mask):
    return mask.new_empty(mask.shape, dtype=torch.int64), mask.new_empty(mask.shape[0], dtype=torch.int64)


left_pack_index = without_autograd(left_pack_index_op)
"""`fastgrpo::left_pack_index` with the least work around it."""


def _has_kernels(values: Tensor) -> bool:
    return values.is_cuda and not pack_reason(values.device.type)


def _pattern(fill: Number, dtype: torch.dtype) -> int:
    """The bytes of a value, repeated to 8, as a signed number."""
    if fill == 0:
        return 0
    # In the dtype from the start, as torch's own fill is: by way of fp32, digits of wider ones are lost.
    value = bytes(torch.full((1,), fill, dtype=dtype, device="cpu").view(torch.uint8).tolist())
    return int.from_bytes(value * (8 // len(value)), "little", signed=True)
