"""Rotary position embeddings (Su et al. 2021) of queries and keys as one function.

transformers rotates with ten small ops and as many roundings, and about thirty in the backward pass. Here a number is rounded
once, and nothing is saved but the cosines and sines. One kernel on CUDA, six ops elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrpo.checks import refuse_second_derivatives
from fastgrpo.kernels.select import why_no_library

_ROUNDED = (torch.bfloat16, torch.float16)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """
    Rotates the two halves of every head by the angles of its position.

    Args:
        query, key: `[B, A, N, D]` and `[B, K, N, D]`, D even.
        cos, sin: `[B, N, D]`; they get no gradient. All four have one dtype.

    Returns:
        Both, rotated. Differentiable once.
    """
    if torch.is_grad_enabled():
        return _Rotary.apply(query, key, cos, sin)
    return _rotate(query, key, cos, sin, transposed=False)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, cos, sin):
        ctx.angles = cos, sin
        return _rotate(query, key, cos, sin, transposed=False)

    @staticmethod
    def backward(ctx, grad_query, grad_key):
        refuse_second_derivatives("fastgrpo's rotary embedding, there because of Options(fused_layers=True),")
        return *_rotate(grad_query, grad_key, *ctx.angles, transposed=True), None, None


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    if query.is_cuda and query.dtype in _ROUNDED and query.shape[3] % 16 == 0 and not why_no_library():
        # Heads of a token lie together already, where nobody has copied them.
        rows, key_rows = query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()
        out, key_out = torch.empty_like(rows), torch.empty_like(key_rows)
        torch.ops.fastgrpo.rotary.default(
            rows.flatten(0, 1),
            key_rows.flatten(0, 1),
            cos.contiguous(),
            sin.contiguous(),
            out.flatten(0, 1),
            key_out.flatten(0, 1),
            transposed,
        )
        return out.transpose(1, 2), key_out.transpose(1, 2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate_one(query, cos, sin, transposed), _rotate_one(key, cos, sin, transposed)


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    out = x * cos
    (a, b), (sin_a, sin_b), (new_a, new_b) = (t.chunk(2, -1) for t in (x, sin, out))
    if transposed:
        new_a.addcmul_(b, sin_b)
        new_b.addcmul_(a, sin_a, value=-1)
    else:
        new_a.addcmul_(b, sin_a, value=-1)
        new_b.addcmul_(a, sin_b)
    return out
