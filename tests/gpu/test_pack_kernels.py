"""Pack kernels against the torch code that they replace: ids, masks and hidden states, gradients in fp32, no host syncs."""

from __future__ import annotations

import warnings

import pytest
import torch

from fastgrpo import left_pack, pack, unpack
from fastgrpo.kernels.library import library_info, load_library
from fastgrpo.pack_ops import (
    left_pack_index_op,
    sum_rows,
    sum_rows_op,
    take_rows,
    take_rows_op,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(load_library() is None, reason=library_info().reason),
]
IDS = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that an op forgets to write does not happen to hold zeros."""
    previous = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = previous


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 255), (4, 256), (2, 257), (7, 1000), (64, 33), (1, 5000)])
def test_left_packing_equals_the_cpu_s(shape, dtype):
    mask = (torch.rand(shape) > 0.5).to(dtype)
    mask[0], mask[-1, :] = 1, mask[-1, :] * (shape[0] > 2)
    ids = torch.randint(0, 99, shape)
    wanted, found = left_pack(ids, mask), left_pack(ids.cuda(), mask.cuda())
    for name in ("input_ids", "attention_mask", "position_ids", "index"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name
    values = torch.randn(found.input_ids.shape)
    assert torch.equal(found.restore(values.cuda(), fill=-3.0).cpu(), wanted.restore(values, fill=-3.0))


def test_left_packing_takes_a_transposed_mask():
    mask, ids = (torch.rand(9, 4) > 0.5).t(), torch.randint(0, 99, (4, 9))
    wanted, found = left_pack(ids, mask), left_pack(ids.cuda(), mask.cuda())
    assert not mask.cuda().is_contiguous()
    assert torch.equal(found.input_ids.cpu(), wanted.input_ids) and torch.equal(found.index.cpu(), wanted.index)


def test_left_packing_of_all_padding_and_of_nothing():
    packed = left_pack(torch.ones(2, 5, dtype=torch.long, device="cuda"), torch.zeros(2, 5, device="cuda").bool())
    assert packed.input_ids.shape == (2, 1)
    for shape in ((0, 4), (3, 0)):
        empty = torch.zeros(shape, dtype=torch.long, device="cuda")
        assert left_pack(empty, empty).input_ids.shape == (shape[0], 0)


@pytest.mark.parametrize("dtype", [*IDS, *FLOATS])
@pytest.mark.parametrize("trailing", [(), (1,), (3,), (7,), (64,), (100,), (5120,), (2, 5)])
def test_rows_of_every_dtype_and_width_are_taken_or_filled(dtype, trailing):
    values = torch.randint(0, 2, (9, *trailing), device="cuda").to(dtype)
    rows = torch.tensor([3, -1, 8, 0, 3, 3, -7, 1], device="cuda")
    fill = 1 if dtype in IDS else -2.5
    found = take_rows(values, rows, float(fill))
    wanted = values[rows.clamp(min=0)]
    wanted[rows < 0] = torch.tensor(fill).to(dtype).cuda()
    assert torch.equal(found, wanted)


def test_an_odd_address_is_served_too():
    wide = torch.randn(4000, device="cuda").bfloat16()
    values = wide[1:3841].view(60, 64)
    rows = torch.randint(0, 60, (200,), device="cuda")
    assert torch.equal(take_rows(values, rows, 0.0), values[rows])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("count", "taken"), [(1, 1), (5, 0), (7, 129), (129, 128), (1000, 4097), (40, 5000)])
def test_gradients_are_summed_in_fp32_in_order(dtype, count, taken):
    rows = torch.randint(-1, count, (taken,), device="cuda")
    grads = torch.randn(taken, 72, device="cuda").to(dtype)
    found = sum_rows(grads, rows, count)
    wide = torch.promote_types(dtype, torch.float32)
    exact = torch.zeros(count, 72, dtype=torch.float64)
    exact.index_add_(0, rows.cpu().clamp(min=0), grads.cpu().double() * (rows.cpu() >= 0).unsqueeze(1))
    in_order = torch.zeros(count, 72, dtype=wide)
    for place, row in enumerate(rows.tolist()):
        if row >= 0 and taken <= 4097:
            in_order[row] += grads[place].cpu().to(wide)
    assert found.isfinite().all()
    assert (found.cpu().double() - exact).abs().max() <= (2**-8 if dtype == torch.bfloat16 else 2**-10) * max(
        1.0, exact.abs().max().item()
    )
    if taken <= 4097:
        assert torch.equal(found.cpu(), in_order.to(dtype))
    assert all(torch.equal(found, sum_rows(grads, rows, count)) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_shared_prompt_collects_the_gradients_of_its_completions(dtype):
    values = torch.randn(50, 64, device="cuda").to(dtype).requires_grad_()
    rows = torch.cat([torch.arange(20), torch.arange(20).repeat(7), torch.arange(20, 50)]).cuda()
    grad = torch.randn(len(rows), 64, device="cuda").to(dtype)
    (found,) = torch.autograd.grad(take_rows(values, rows, 0.0), values, grad)
    exact = torch.zeros(50, 64, device="cuda", dtype=torch.float64).index_add_(0, rows, grad.double())
    error = ((found.double() - exact).norm() / exact.norm()).item()
    assert error <= {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}[dtype], error


def test_the_gradient_of_a_gradient_is_the_op_again():
    values = torch.randn(6, 8, device="cuda", requires_grad=True)
    rows = torch.tensor([0, 5, 5, -1], device="cuda")
    grad = torch.randn(4, 8, device="cuda", requires_grad=True)
    (first,) = torch.autograd.grad(take_rows(values, rows, 0.0), values, grad, create_graph=True)
    upstream = torch.randn_like(first)
    (second,) = torch.autograd.grad(first, grad, upstream)
    assert torch.equal(second, take_rows(upstream, rows, 0.0))


@pytest.mark.parametrize("share", [True, False])
def test_pack_and_unpack_equal_the_cpu_s(share):
    ids = torch.randint(1, 5, (6, 40))
    ids[:3, :9] = ids[0, :9]
    mask = torch.zeros(6, 40, dtype=torch.long)
    for row, (first, last) in enumerate([(0, 20), (0, 9), (0, 31), (5, 40), (39, 40), (0, 0)]):
        mask[row, first:last] = 1
    lengths = torch.tensor([9, 9, 9, 2, 1, 0])
    wanted = pack(ids, mask, lengths, share)
    found = pack(ids.cuda(), mask.cuda(), lengths.cuda(), share)
    for name in ("tokens", "position_ids", "index", "real"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name
    assert found.segments == wanted.segments
    values = torch.randn(wanted.tokens.shape[1])
    weights = torch.randn(6, 40)
    grads = []
    for packed, device in ((wanted, "cpu"), (found, "cuda")):
        leaf = values.clone().to(device).requires_grad_()
        spread = unpack(leaf, packed, fill=-1.0)
        (spread * weights.to(device)).sum().backward()
        grads.append((spread.detach().cpu(), leaf.grad.cpu(), packed.take(spread.detach()).cpu()))
    assert torch.equal(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[1][1])
    assert torch.equal(grads[1][2], values)


def test_only_sizes_are_read_by_the_host():
    """Left-packing needs the longest row and packing its ids, one copy each; nothing else waits."""
    torch.use_deterministic_algorithms(False)
    ids = torch.randint(1, 9, (6, 40), device="cuda")
    mask, lengths = (torch.rand(6, 40, device="cuda") > 0.3).long(), torch.zeros(6, dtype=torch.long, device="cuda")
    values = torch.randn(2000, 64, device="cuda", requires_grad=True)
    rows = torch.randint(-1, 2000, (3000,), device="cuda")

    def everything():
        packed = left_pack(ids, mask)
        packed.restore(torch.ones_like(packed.input_ids, dtype=torch.float32))
        row = pack(ids, mask, lengths, True)
        leaf = torch.ones(row.tokens.shape[1], device="cuda", requires_grad=True)
        spread = unpack(leaf, row)
        row.take(spread.detach())
        spread.sum().backward()
        take_rows(values, rows, 0.0).sum().backward()

    everything()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(syncs) == 2, syncs


def test_ops_pass_opcheck():
    rows = torch.tensor([0, 2, 2, -1], device="cuda")
    torch.library.opcheck(take_rows_op, (torch.randn(3, 5, device="cuda", requires_grad=True), rows, 0.5))
    torch.library.opcheck(sum_rows_op, (torch.randn(4, 5, device="cuda", requires_grad=True), rows, 3))
    torch.library.opcheck(left_pack_index_op, (torch.ones(3, 4, device="cuda").long(),))


def test_bad_arguments_say_what_was_given():
    values, rows = torch.zeros(3, 4, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
    with pytest.raises(RuntimeError, match=r"take_rows_into: values has shape \[3, 4\] and out \[2, 5\]"):
        torch.ops.fastgrpo.take_rows_into(values, rows, 0, torch.zeros(2, 5, device="cuda"))
    with pytest.raises(RuntimeError, match=r"sum_rows_into: grads is torch\.float64"):
        torch.ops.fastgrpo.sum_rows_into(values.double(), rows, rows, values.double())
    with pytest.raises(RuntimeError, match=r"left_pack_into: mask is torch\.float32"):
        torch.ops.fastgrpo.left_pack_into(values, rows, rows)
