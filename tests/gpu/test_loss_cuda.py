"""The head's ops and its loss on a CUDA device where input is unusual: opcheck, NaN, no rows, no memory; and where rows lie."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from head_cases import make as make_head
from loss_cases import HEADS, LENGTHS, fused, make, objective
from torch import Tensor

import fastgrpo.ops as ops
from fastgrpo import Objective, linear_grpo_loss, linear_logprob
from fastgrpo.kernels.library import library_info, load_library
from fastgrpo.objective import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(load_library() is None, reason=library_info().reason),
]
# With a bias, or where 8 does not divide the width, no card has the head's passes inside the product.
SHAPES = pytest.mark.parametrize(
    ("width", "vocabulary", "with_bias"),
    [(24, 33, False), (13, 31, True)],
    ids=["fused where it can be", "row kernels"],
)


def small_head(width: int, vocabulary: int, with_bias: bool, dtype: torch.dtype, frozen: bool) -> list[Tensor | None]:
    """hidden, weight, targets, two of which are ignored, and bias."""
    hidden, weight, targets, bias = (
        None if x is None else x.to(DEVICE) for x in make_head(7, width, vocabulary, dtype, with_bias=with_bias)
    )
    targets[2], targets[5] = -100, vocabulary
    for x in (weight, bias):
        if x is not None:
            x.requires_grad_(not frozen)
    return [hidden.requires_grad_(), weight, targets, bias]


@SHAPES
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_log_prob_ops_pass_opcheck(width, vocabulary, with_bias, frozen, dtype):
    hidden, weight, targets, bias = small_head(width, vocabulary, with_bias, dtype, frozen)
    head = (0.9, 1.1, None, 4, dtype)
    # The fused head gives no slopes of entropies.
    slopes = frozen, frozen and with_bias
    torch.library.opcheck(ops.linear_logprob_op, (hidden, weight, targets, bias, *head, True, *slopes))
    plain = [None if x is None else x.detach() for x in (hidden, weight, targets, bias)]
    logprobs, entropy, lse, *_ = ops.linear_logprob_op(*plain, *head, True, False, False)
    grads, needs = torch.randn(2, 7, device=DEVICE), (True, not frozen, not frozen and with_bias)
    for grad_entropy in (None, grads[1]):
        torch.library.opcheck(
            ops.linear_logprob_backward_op,
            (grads[0], grad_entropy, *plain, logprobs, entropy, lse, *head, *needs),
        )


@SHAPES
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo", "vespo"])
def test_the_one_pass_op_passes_opcheck(width, vocabulary, with_bias, trains, dtype, loss_type):
    hidden, weight, targets, bias = small_head(width, vocabulary, with_bias, dtype, not trains)
    *per_row, entropy_weights = (torch.rand(7, device=DEVICE) for _ in range(7))
    constants = ops.objective_constants(objective(loss_type, beta=0.04, delta=4.0))
    counted = (targets >= 0) & (targets < vocabulary)
    lists = (counted.nonzero().squeeze(1), targets.new_empty(0))
    for rows_and_others in ((), lists, (*lists, counted.sum().reshape(1))):
        torch.library.opcheck(
            ops.linear_grpo_op,
            (
                hidden, weight, targets, bias, *per_row, entropy_weights if with_bias else None, 0.9, 1.1, 20.0, 4, dtype,
                loss_type, constants, True, True, trains, trains and with_bias, *rows_and_others,
            ),
        )  # fmt: skip


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_nan_row_that_counts_stays_alone_in_the_gradient_of_hidden(loss_type, dtype, trains):
    rows = make(LENGTHS, dtype, 257, 16, on_policy=loss_type == "vespo", trains=(trains, False)).to(DEVICE)
    clean = fused(rows, objective(loss_type))
    rows.hidden[6, 2] = torch.nan
    found = fused(rows, objective(loss_type))
    assert found.loss.isnan() and found.stats.logprobs[6].isnan()
    others = torch.arange(sum(LENGTHS), device=DEVICE) != 6
    assert clean.loss.isfinite() and clean.grads[0].isfinite().all() and clean.grads[0].abs().max() > 0
    assert torch.equal(found.stats.logprobs[others], clean.stats.logprobs[others])
    assert torch.equal(found.stats.entropy[others], clean.stats.entropy[others])
    assert torch.equal(found.grads[0][others], clean.grads[0][others])
    assert found.grads[0][6].isnan().all()


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_a_row_of_the_loss_depends_on_neither_its_place_nor_its_neighbours(dtype, trains, entropy_coef):
    """Bit for bit, but for the gradient of the weight, a sum over rows."""
    count, vocabulary = 600, 50257
    hidden, weight, targets, _ = (None if x is None else x.to(DEVICE) for x in make_head(count, 128, vocabulary, dtype))
    advantages = torch.randn(count, device=DEVICE)
    base = linear_logprob(hidden, weight, targets).logprobs
    old, ref = (base + 0.3 * torch.randn(count, device=DEVICE) for _ in range(2))
    segments = torch.tensor([0, count], device=DEVICE)
    options = Objective(loss_type="dapo", beta=0.04, entropy_coef=entropy_coef, num_items_in_batch=5.0)

    def per_row(hidden: Tensor, index: Tensor | slice) -> tuple[Tensor, ...]:
        leaf, head = hidden[index].clone().requires_grad_(), weight.clone().requires_grad_(trains)
        loss, stats = linear_grpo_loss(
            leaf, head, targets[index], segments, advantages[index], options, old_logprobs=old[index],
            ref_logprobs=ref[index], num_chunks=1,
        )  # fmt: skip
        loss.backward()
        return stats.logprobs, stats.entropy, leaf.grad

    alone = per_row(hidden, slice(None))
    order = torch.randperm(count, device=DEVICE)
    for found, wanted in zip(per_row(hidden, order), alone, strict=True):
        assert torch.equal(found, wanted[order])
    far, others = hidden.clone(), torch.arange(count, device=DEVICE) != 7
    far[7] *= 100
    for found, wanted in zip(per_row(far, slice(None)), alone, strict=True):
        assert torch.equal(found[others], wanted[others]) and not torch.equal(found[7], wanted[7])


# Bad input.


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("skip_ignored", [True, False])
def test_log_probs_of_ignored_rows_alone_are_zeros_with_zero_gradients(dtype, frozen, with_bias, skip_ignored):
    hidden, weight, targets, bias = make_head(9, 24, 257, dtype, with_bias=with_bias)
    targets[:5], targets[5:] = -100, 257
    leaves = [
        None if x is None else x.to(DEVICE).requires_grad_(x is hidden or not frozen) for x in (hidden, weight, bias)
    ]
    out = linear_logprob(
        *leaves[:2], targets.to(DEVICE), leaves[2], return_entropy=True, skip_ignored=skip_ignored, num_chunks=2
    )
    assert out.logprobs.shape == out.entropy.shape == (9,) and out.logprobs.dtype == FP32
    assert out.logprobs.eq(0).all() and out.entropy.eq(0).all()
    (out.logprobs.sum() + out.entropy.sum()).backward()
    for leaf in leaves:
        if leaf is not None and leaf.requires_grad:
            assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == dtype and leaf.grad.eq(0).all()
        else:
            assert leaf is None or leaf.grad is None


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_row_at_all_gives_what_the_cpu_gives(loss_type, level, dtype, head, lengths):
    for on_policy in (True, False):
        rows = make(lengths, dtype, on_policy=on_policy, **HEADS[head])
        for options in (objective(loss_type, level, beta=0.04), objective(loss_type, level, entropy_coef=0.03)):
            found, wanted = fused(rows.to(DEVICE), options), fused(rows, options)
            assert found.loss == wanted.loss == 0 and found.loss.dtype == wanted.loss.dtype
            assert found.stats.metrics() == pytest.approx(wanted.stats.metrics(), nan_ok=True)
            assert found.stats.logprobs.shape == found.stats.entropy.shape == (0,)
            for ours, theirs in zip(found.grads, wanted.grads, strict=True):
                assert ours is theirs is None or torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("offsets", [[0, 2], [3], [0, 0, -1]])
def test_segments_of_no_rows_that_do_not_fit_are_an_error(offsets):
    rows = make((0,) * (len(offsets) - 1), BF16)
    for where in (rows, rows.to(DEVICE)):
        segments = torch.tensor(offsets, device=where.hidden.device)
        with pytest.raises(ValueError, match=f"segments runs from {offsets[0]} to {offsets[-1]}.*the 0 rows of hidden"):
            linear_grpo_loss(where.hidden, where.weight, where.targets, segments, objective=Objective(), **where.values)


MIB = 1 << 20
SMALL, LARGE = 8 * MIB, 512 * MIB


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Lets this process, and no other of the card's, take that many bytes more than it holds."""
    # What goes within the block would make more room.
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def large_head() -> tuple[Tensor, ...]:
    """hidden, weight and targets: a chunk of `LARGE` takes 250 MiB or more, and a whole step of `SMALL` about 60."""
    hidden = torch.randn(4096, 64, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(32000, 64, device=DEVICE) / 8).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(0, 32000, (4096,), device=DEVICE)


def step(head: tuple[Tensor, ...], chunk_bytes: int) -> tuple[Tensor, ...]:
    hidden, weight, targets = head
    segments = torch.tensor([0, 1000, 4096], device=DEVICE)
    advantages = torch.tensor([1.0, -0.5], device=DEVICE)
    loss, stats = linear_grpo_loss(hidden, weight, targets, segments, advantages, Objective(), chunk_bytes=chunk_bytes)
    return loss.detach(), stats.logprobs, *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.usefixtures("either_head")
def test_an_out_of_memory_error_of_the_loss_is_survived_with_a_smaller_budget(large_head):
    # The first call also leaves what cuBLAS keeps.
    wanted = step(large_head, SMALL)
    with room_for(160 * MIB):
        with pytest.raises(torch.OutOfMemoryError):
            step(large_head, LARGE)
        found = step(large_head, SMALL)
    assert all(map(torch.equal, found, wanted))
    assert all(x.isfinite().all() for x in found)


@pytest.mark.usefixtures("either_head")
def test_an_out_of_memory_error_of_a_trained_backward_is_survived_with_a_smaller_budget(large_head):
    *leaves, targets = large_head

    def logprobs(chunk_bytes: int) -> Tensor:
        return linear_logprob(*leaves, targets, chunk_bytes=chunk_bytes).logprobs

    wanted = torch.autograd.grad(logprobs(SMALL).sum(), leaves)
    total = logprobs(LARGE).sum()
    with room_for(160 * MIB):
        with pytest.raises(torch.OutOfMemoryError):
            total.backward()
        assert all(leaf.grad is None for leaf in leaves)
        logprobs(SMALL).sum().backward()
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, wanted, strict=True))
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in wanted)
