"""Claims about left packing: real tokens move together in order, nothing else changes, and it can be undone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fastgrpo import left_pack

masks = st.tuples(st.integers(0, 5), st.integers(0, 12)).flatmap(
    lambda shape: arrays("int64", shape, elements=st.integers(0, 1))
)


@settings(max_examples=200)
@given(masks)
def test_rows_keep_their_real_tokens_in_order_and_restoring_is_the_exact_inverse(mask):
    mask = torch.from_numpy(mask)
    ids = torch.arange(mask.numel()).view(mask.shape) + 7
    packed = left_pack(ids, mask)
    for row, row_mask, new_row, new_mask in zip(ids, mask, packed.input_ids, packed.attention_mask, strict=True):
        real = row[row_mask.bool()]
        assert torch.equal(new_row[: len(real)], real)
        assert new_mask[: len(real)].eq(1).all() and new_mask[len(real) :].eq(0).all()
    longest = int(mask.sum(1).max()) if mask.numel() else 0
    assert packed.input_ids.shape[1] == (max(longest, 1) if mask.numel() else 0)
    assert torch.equal(packed.position_ids, torch.arange(packed.input_ids.shape[1]).expand_as(packed.input_ids))

    values = torch.randn(mask.shape)
    restored = packed.restore(packed.take(values), fill=-5.0)
    assert torch.equal(restored, torch.where(mask.bool(), values, -5.0))


def test_padding_is_known_from_the_mask_not_from_token_ids():
    pad = 0
    ids = torch.tensor([[pad, pad, 5, pad, 6, pad]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0]])
    assert left_pack(ids, mask).input_ids.tolist() == [[5, pad, 6]]


def test_integers_come_back_as_they_were():
    ids, mask = torch.tensor([[0, 2**24 + 1, 3]]), torch.tensor([[0, 1, 1]])
    packed = left_pack(ids, mask)
    assert torch.equal(packed.restore(packed.input_ids), ids)


def test_gradients_flow_to_real_tokens_only():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    packed = left_pack(torch.zeros(2, 3, dtype=torch.long), mask)
    values = torch.randn(2, 2, requires_grad=True)
    weights = torch.arange(6.0).view(2, 3) + 1
    (packed.restore(values) * weights).sum().backward()
    assert values.grad.tolist() == [[2.0, 3.0], [6.0, 0.0]]


def test_what_the_model_computed_on_padding_does_no_harm():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    packed = left_pack(torch.zeros(2, 3, dtype=torch.long), mask)
    values = torch.tensor([[1.0, 2.0], [3.0, float("nan")]], requires_grad=True)
    restored = packed.restore(values)
    assert restored.tolist() == [[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]]
    restored.sum().backward()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_the_mask_keeps_its_dtype(dtype):
    mask = torch.tensor([[0, 1, 1]]).to(dtype)
    assert left_pack(torch.zeros(1, 3, dtype=torch.int32), mask).attention_mask.dtype == dtype


@pytest.mark.parametrize(
    ("ids", "mask", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.long), torch.ones(3), ValueError, r"input_ids has shape \(3,\).*\[B, L\]"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            torch.ones(2, 4, dtype=torch.long),
            ValueError,
            r"attention_mask \(2, 4\)",
        ),
        (torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.long), TypeError, "input_ids is torch.float32.*torch.int64"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            torch.ones(2, 3),
            TypeError,
            "attention_mask is torch.float32.*torch.bool",
        ),
    ],
)
def test_bad_input_says_what_was_given_and_what_is_allowed(ids, mask, error, message):
    with pytest.raises(error, match=message):
        left_pack(ids, mask)
