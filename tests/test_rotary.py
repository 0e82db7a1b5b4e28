"""Fused rotary embeddings against transformers' own, and against float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fastgrpo.rotary import rotary


def angles(batch=1, tokens=5, width=8, dtype=torch.float32):
    # Not the same in both halves, as they are in practice, so that a mistake between them shows.
    return (torch.randn(batch, tokens, width, dtype=torch.float64).to(dtype) for _ in range(2))


@pytest.mark.parametrize("batch", [1, 3])
def test_rotated_heads_and_their_gradients_are_transformers(batch):
    cos, sin = angles(batch)
    query, key = (torch.randn(batch, heads, 5, 8, requires_grad=True) for heads in (4, 2))
    ours, theirs = (f(query, key, cos, sin) for f in (rotary, apply_rotary_pos_emb))
    grads = [torch.randn_like(x) for x in ours]
    found, expected = (torch.autograd.grad(rotated, (query, key), grads) for rotated in (ours, theirs))
    for a, b in zip((*ours, *found), (*theirs, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_rotating_in_bf16_errs_less_than_transformers_do():
    cos, sin = angles(tokens=50, dtype=torch.bfloat16)
    query, key = (torch.randn(1, 4, 50, 8).bfloat16() for _ in range(2))
    truth = apply_rotary_pos_emb(query.double(), key.double(), cos.double(), sin.double())
    ours, theirs = (f(query, key, cos, sin) for f in (rotary, apply_rotary_pos_emb))
    for a, b, t in zip(ours, theirs, truth, strict=True):
        assert (a - t).norm() < (b - t).norm()


def test_a_second_derivative_of_the_rotation_is_refused():
    cos, sin = angles()
    query, key = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(rotary(query, key, cos, sin)[0].sum(), query, create_graph=True)
