"""Segment attention through torch's flash kernels, against float64 from the same inputs."""

from __future__ import annotations

import pytest
import torch
from truth import attention_alone

from fastgrpo.attention import Segment, segment_attention
from fastgrpo.kernels.flash import flash_obstacle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SHARED = [Segment(0, 37), Segment(37, 60, 0, 37), Segment(60, 61, 0, 37), Segment(61, 150, 0, 37)]
TWO_GROUPS = [
    *SHARED,
    Segment(150, 151),
    Segment(151, 160, 150, 151),
    Segment(160, 300, 150, 151),
    Segment(300, 333),
]
LAYOUTS = {
    "one sequence": [Segment(0, 200)],
    "apart": [Segment(0, 37), Segment(37, 38), Segment(38, 200)],
    "one group": SHARED,
    "two groups and a row alone": TWO_GROUPS,
}


def inputs(segments, dtype, heads=(8, 2), width=64):
    tokens = segments[-1].stop
    return [torch.randn(count, tokens, width, device="cuda").to(dtype).requires_grad_() for count in (*heads, heads[1])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [((8, 2), 64), ((4, 4), 128), ((6, 1), 96), ((2, 2), 256)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_gradients_are_float64_s_up_to_one_rounding(layout, heads, width, dtype):
    segments = LAYOUTS[layout]
    leaves = inputs(segments, dtype, heads, width)
    flat = tuple(bound for segment in segments for bound in segment)
    assert flash_obstacle(leaves[0], leaves[2], flat, None, None) == ""
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    ours = segment_attention(*leaves, segments, width**-0.5)
    truth = attention_alone(*exact, segments, width**-0.5, None, None)
    grad = torch.randn_like(ours)
    found = torch.autograd.grad(ours, leaves, grad)
    expected = torch.autograd.grad(truth, exact, grad.double().cpu())
    for name, a, b in zip(("out", "query", "key", "value"), (ours, *found), (truth, *expected), strict=True):
        error = (a.double().cpu() - b).norm() / b.norm()
        assert error <= (6e-3 if dtype == torch.bfloat16 else 1.5e-3), f"{name}: {error:.2e}"


def test_a_window_over_rows_without_prefixes():
    segments = LAYOUTS["apart"]
    leaves = inputs(segments, torch.bfloat16)
    flat = tuple(bound for segment in segments for bound in segment)
    assert flash_obstacle(leaves[0], leaves[2], flat, None, 16) == ""
    truth = attention_alone(*(x.detach().double().cpu() for x in leaves), segments, 0.1, None, 16)
    ours = segment_attention(*leaves, segments, 0.1, window=16)
    assert (ours.double().cpu() - truth).norm() <= 6e-3 * truth.norm()


@pytest.mark.parametrize(("softcap", "window"), [(5.0, None), (None, 16)])
def test_what_the_flash_kernels_cannot_do_is_done_in_blocks(softcap, window):
    leaves = inputs(SHARED, torch.bfloat16)
    flat = tuple(bound for segment in SHARED for bound in segment)
    assert flash_obstacle(leaves[0], leaves[2], flat, softcap, window)
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    ours = segment_attention(*leaves, SHARED, 0.1, softcap, window)
    truth = attention_alone(*exact, SHARED, 0.1, softcap, window)
    grad = torch.randn_like(ours)
    found = torch.autograd.grad(ours, leaves, grad)
    expected = torch.autograd.grad(truth, exact, grad.double().cpu())
    for a, b in zip((ours, *found), (truth, *expected), strict=True):
        assert (a.double().cpu() - b).norm() <= 6e-3 * b.norm()
