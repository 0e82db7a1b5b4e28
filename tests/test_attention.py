"""Attention over one row of many sequences equals attention over each of them alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from truth import attention_alone

import fastgrpo.attention as attention_module
from fastgrpo.attention import Segment, segment_attention, segment_attention_op


@st.composite
def layouts(draw) -> tuple[int, list[Segment]]:
    """Groups of a prompt and its completions, with gaps that belong to nobody."""
    end, segments = 0, []
    for _ in range(draw(st.integers(0, 3))):
        end += draw(st.integers(0, 2))
        prompt = draw(st.integers(0, 6))
        segments.append(Segment(end, end + prompt))
        prefix = (end, end + prompt)
        end += prompt
        for _ in range(draw(st.integers(0, 4))):
            length = draw(st.integers(0, 9))
            segments.append(Segment(end, end + length, *prefix))
            end += length
    return end + draw(st.integers(0, 2)), segments


@settings(max_examples=80)
@given(
    layout=layouts(),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    softcap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, 1, 3, 50]),
    score_bytes=st.sampled_from([1, 4096, 32 * 2**20]),
)
def test_output_and_gradients_equal_those_of_separate_sequences(layout, heads, softcap, window, score_bytes):
    tokens, segments = layout
    torch.manual_seed(tokens)
    query, key, value = (
        torch.randn(count, tokens, width, dtype=torch.float64).requires_grad_()
        for count, width in ((heads[0], 5), (heads[1], 5), (heads[1], 3))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "_SCORE_BYTES", score_bytes)
        attention_module._tiles.cache_clear()
        ours = segment_attention(query, key, value, segments, 0.7, softcap, window)
        grad = torch.randn_like(ours)
        found = torch.autograd.grad(ours, (query, key, value), grad)
        attention_module._tiles.cache_clear()
    truth = attention_alone(query, key, value, segments, 0.7, softcap, window)
    expected = torch.autograd.grad(truth, (query, key, value), grad) if truth.requires_grad else [0 * x for x in found]
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    for ours_grad, true_grad in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_grad, true_grad, rtol=1e-11, atol=1e-11)


def test_sixteen_bit_inputs_are_computed_in_fp32_and_rounded_once():
    segments = [Segment(0, 40), Segment(40, 90, 0, 40), Segment(90, 200, 0, 40)]
    query, key, value = (torch.randn(heads, 200, 32).bfloat16().requires_grad_() for heads in (8, 2, 2))
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    ours, truth = (
        segment_attention(query, key, value, segments, 0.2),
        attention_alone(*exact, segments, 0.2, None, None),
    )
    grad = torch.randn_like(ours)
    found = torch.autograd.grad(ours, (query, key, value), grad)
    expected = torch.autograd.grad(truth, exact, grad.double())
    assert ours.dtype == torch.bfloat16
    for a, b in zip((ours, *found), (truth, *expected), strict=True):
        assert (a.double() - b).norm() <= 3e-3 * b.norm()


def test_nan_in_one_sequence_stays_there():
    segments = [Segment(0, 3), Segment(3, 8, 0, 3), Segment(8, 20), Segment(20, 22)]
    query, key, value = (torch.randn(2, 22, 4) for _ in range(3))
    for x in (query, key, value):
        x[:, 8:20] = float("nan")
    out, lse = segment_attention_op(query, key, value, [b for s in segments for b in s], 0.5, None, None)
    assert out[8:20].isnan().all() and not out[:8].isnan().any() and not out[20:].isnan().any()
    assert not lse[:, 20:].isnan().any()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    (segment_attention(*leaves, segments, 0.5)[20:]).sum().backward()
    assert not value.grad[:, 20:].isnan().any() and not key.grad[:, 20:].isnan().any()


def test_scores_far_apart_do_not_overflow():
    query = torch.tensor([[[100.0], [100.0]]])
    key = torch.tensor([[[100.0], [-100.0]]])
    out = segment_attention(query, key, torch.tensor([[[1.0], [2.0]]]), [Segment(0, 2)], 1.0)
    assert out.flatten().tolist() == [1.0, 1.0]


def test_log_sum_exps_are_those_of_the_scores():
    query, key, value = (torch.randn(1, 3, 2, dtype=torch.float64) for _ in range(3))
    _, lse = segment_attention_op(query, key, value, [0, 3, 0, 0], 1.0, None, None)
    scores = query[0] @ key[0].T
    expected = [math.log(sum(math.exp(float(scores[i, j])) for j in range(i + 1))) for i in range(3)]
    torch.testing.assert_close(lse[0], torch.tensor(expected, dtype=torch.float64))


def test_the_op_is_a_well_formed_custom_op():
    query, key, value = (torch.randn(heads, 9, 4).requires_grad_() for heads in (4, 2, 2))
    torch.library.opcheck(segment_attention_op, (query, key, value, [0, 3, 0, 0, 3, 9, 0, 3], 0.5, 3.0, 4))


def test_second_derivatives_are_refused():
    query, key, value = (torch.randn(1, 3, 2).requires_grad_() for _ in range(3))
    out = segment_attention(query, key, value, [Segment(0, 3)], 1.0)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out.sum(), query, create_graph=True)


@pytest.mark.parametrize(
    ("shapes", "segments", "message"),
    [
        (((3, 5, 4), (2, 5, 4), (2, 5, 4)), [], "do not fit"),
        (((2, 5, 4), (2, 6, 4), (2, 6, 4)), [], "do not fit"),
        (((2, 5, 4), (2, 5, 4), (1, 5, 4)), [], "do not fit"),
        (((2, 5, 4),) * 3, [Segment(0, 6)], "does not lie in 5 tokens"),
        (((2, 5, 4),) * 3, [Segment(0, 2), Segment(2, 4, 1, 3)], "its prefix before it"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, segments, message):
    with pytest.raises(ValueError, match=message):
        segment_attention(*(torch.zeros(shape) for shape in shapes), segments, 1.0)
