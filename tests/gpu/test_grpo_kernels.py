"""Compaction, coefficients and sums on the device against the torch code that defines them, at hard shapes, run to run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings

import pytest
import torch

import fastgrpo.kernels.select as select
from fastgrpo import Objective, grpo_loss, linear_grpo_loss, linear_logprob
from fastgrpo.head import linear_grpo_rows
from fastgrpo.kernels import cuda, reference
from fastgrpo.kernels.library import library_info, load_library
from fastgrpo.kernels.rows import cut_lists
from fastgrpo.objective import LOSS_TYPES, RowTerms
from fastgrpo.row_local import row_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(load_library() is None, reason=library_info().reason),
]
NAN = float("nan")


@pytest.mark.parametrize("count", [0, 1, 7, 127, 128, 129, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("factors", [0, 1, 2])
def test_compaction_lists_the_rows_in_order(count, id_dtype, factors):
    targets = torch.randint(-2, 13, (count,), device="cuda").to(id_dtype)
    values = [torch.randn(count, device="cuda") * (torch.rand(count, device="cuda") > 0.6) for _ in range(factors)]
    if count and factors:
        values[0][count // 2] = NAN
    first, second = [*values, None, None][:2]
    for partition in (True, False):
        found = cuda.computed_rows(targets, 11, first, second, partition)
        wanted = reference.computed_rows(targets, 11, first, second, partition)
        assert torch.equal(found[0], wanted[0])
        assert found[1] is wanted[1] is None or torch.equal(found[1], wanted[1])


def test_compaction_takes_strided_and_other_dtypes():
    targets = torch.randint(0, 9, (300, 2), device="cuda")
    grads = torch.randn(300, 3, device="cuda").bfloat16() * (torch.rand(300, 3, device="cuda") > 0.5)
    found = cuda.computed_rows(targets[:, 1], 7, grads[:, 2], grads[:, 0], True)
    wanted = reference.computed_rows(targets[:, 1], 7, grads[:, 2], grads[:, 0], True)
    assert all(map(torch.equal, found, wanted))


LENGTHS = {
    "usual": [50, 0, 130, 1, 20],
    "one": [1],
    "one long": [3000],
    "many": [3] * 700,
    "empty ones at the ends": [0, 0, 128, 129, 0],
}
OPTIONS = {
    "plain": {},
    "clipped often": {"epsilon": 0.01, "delta": 1.02},
    "KL and bonus": {"beta": 0.04, "entropy_coef": 0.02},
    "accumulation": {"gradient_accumulation_steps": 4, "steps_per_generation": 8, "num_processes": 2},
    "evaluation": {"training": False, "gradient_accumulation_steps": 4},
    "items": {"num_items_in_batch": 300.0, "num_processes": 2, "gradient_accumulation_steps": 3},
    "items on the device": {"num_items_in_batch": torch.tensor(123), "gradient_accumulation_steps": 2},
}


def both(monkeypatch, objective, lengths, level="token", on_policy=False, per_row=(), leave_out=(), mask=True):
    """Loss, gradients and statistics from the kernels and from the torch code around the same kernels of the head."""
    torch.manual_seed(0)
    count, batch, vocabulary, width = sum(lengths), len(lengths), 257, 64
    hidden = torch.randn(count, width, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary, width, device="cuda") / 8).bfloat16()
    targets = torch.randint(-1, vocabulary, (count,), device="cuda")
    segments = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)

    def values(name):
        return torch.randn(count if name in per_row else batch, device="cuda")

    advantages, ratio = values("advantages"), values("ratio").exp()
    if not per_row:
        advantages[0] = 0.0
    noise = torch.randn(count, device="cuda") * 0.05
    ref = -5.5 + torch.randn(count, device="cuda")
    loss_mask = torch.rand(count, device="cuda") > 0.3 if mask else None
    if isinstance(objective.num_items_in_batch, torch.Tensor):
        objective = dataclasses.replace(objective, num_items_in_batch=objective.num_items_in_batch.cuda())
    results = []
    for serves in (True, False):
        monkeypatch.setattr("fastgrpo.head.has_row_kernels", lambda *_, serves=serves: serves)
        monkeypatch.setattr(cuda, "total_loss", cuda.total_loss if serves else reference.total_loss)
        leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        base = linear_logprob(hidden, weight, targets).logprobs
        loss, stats = linear_grpo_loss(
            leaf, head, targets, segments, advantages, objective,
            old_logprobs=None if on_policy else (base + noise).where(targets >= 0, NAN),
            ref_logprobs=ref if objective.beta else None,
            sampler_ratio=None if "ratio" in leave_out else ratio,
            loss_mask=loss_mask,
        )  # fmt: skip
        (3 * loss).backward()
        results.append((loss, leaf.grad, head.grad, stats))
    monkeypatch.undo()
    return results


def assert_same(results):
    (loss, grad, head_grad, stats), (wanted, wanted_grad, wanted_head_grad, wanted_stats) = results
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
    for found, expected in ((grad, wanted_grad), (head_grad, wanted_head_grad)):
        # Coefficients differ in their last bit, gradients then by a rounding to bfloat16 here and there.
        assert (found.double() - expected.double()).norm() <= 2e-3 * expected.double().norm() + 1e-12
    assert torch.equal(stats.logprobs, wanted_stats.logprobs) and torch.equal(stats.entropy, wanted_stats.entropy)
    assert stats.policy_loss.item() == pytest.approx(wanted_stats.policy_loss.item(), rel=1e-5, abs=1e-6)
    assert stats.sums.keys() == wanted_stats.sums.keys()
    for name, total in wanted_stats.sums.items():
        torch.testing.assert_close(stats.sums[name], total, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(stats.entropy_bonus, wanted_stats.entropy_bonus, rtol=1e-5, atol=1e-5)
    for name in ("low_clip", "high_clip"):
        found, expected = getattr(stats, name), getattr(wanted_stats, name)
        assert found is expected is None or torch.allclose(found, expected, rtol=1e-5, equal_nan=True), name


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_coefficients_and_sums_equal_the_torch_code(monkeypatch, loss_type, options):
    objective = Objective(loss_type=loss_type, max_completion_length=64, **OPTIONS[options])
    assert_same(both(monkeypatch, objective, LENGTHS["usual"], on_policy=loss_type == "vespo"))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "vespo"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("per_row", [(), ("advantages",), ("ratio",), ("advantages", "ratio")])
def test_sequences_of_any_length_and_values_a_row_or_a_sequence(monkeypatch, loss_type, lengths, per_row):
    objective = Objective(loss_type=loss_type)
    on_policy = loss_type == "vespo"
    assert_same(both(monkeypatch, objective, LENGTHS[lengths], on_policy=on_policy, per_row=per_row, mask=False))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "cispo", "sapo", "vespo"])
def test_the_sequence_level_on_policy(monkeypatch, loss_type):
    objective = Objective(
        loss_type=loss_type, importance_sampling_level="sequence", delta=0.7, epsilon_high=0.9, max_completion_length=9
    )
    assert_same(both(monkeypatch, objective, LENGTHS["usual"], on_policy=True))
    assert_same(both(monkeypatch, objective, LENGTHS["usual"], on_policy=True, leave_out=("ratio",)))


def test_all_rows_masked_give_a_differentiable_zero():
    leaf = torch.randn(6, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(33, 64, device="cuda").bfloat16().requires_grad_()
    loss, stats = linear_grpo_loss(
        leaf, weight, torch.zeros(6, dtype=torch.long, device="cuda"), torch.tensor([0, 2, 6], device="cuda"),
        torch.ones(2, device="cuda"), Objective(), loss_mask=torch.zeros(6, device="cuda"),
    )  # fmt: skip
    loss.backward()
    assert loss.item() == 0 and leaf.grad.eq(0).all() and weight.grad.eq(0).all()
    assert stats.low_clip.isnan().all() and math.isnan(stats.metrics()["clip_ratio/low_min"])


@pytest.mark.parametrize("target", [-1, 33, 5])
def test_a_row_of_weight_zero_adds_nothing_whatever_its_log_probs_are(target):
    hidden = torch.randn(6, 64, device="cuda").bfloat16()
    weight, targets = torch.randn(33, 64, device="cuda").bfloat16(), torch.arange(6, device="cuda")
    targets[4] = target
    advantages, old = torch.ones(6, device="cuda"), torch.full((6,), -4.0, device="cuda")
    token_weights = advantages / 6
    # An infinite ratio, and so an infinite loss times 0.
    advantages[4], token_weights[4], old[4] = -1.0, 0.0, -1e4
    terms, kept = RowTerms(advantages, token_weights, old), [0, 1, 2, 3, 5]
    with torch.no_grad():
        loss, _ = linear_grpo_rows(hidden, weight, targets, terms, Objective())
        wanted, _ = linear_grpo_rows(hidden[kept], weight, targets[kept], terms.map(lambda x: x[kept]), Objective())
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_three_runs_give_the_same_bits(monkeypatch):
    objective = Objective(beta=0.04, entropy_coef=0.01)
    runs = [both(monkeypatch, objective, LENGTHS["one long"])[0] for _ in range(3)]
    for loss, grad, head_grad, stats in runs[1:]:
        assert torch.equal(loss, runs[0][0]) and torch.equal(grad, runs[0][1]) and torch.equal(head_grad, runs[0][2])
        assert all(torch.equal(stats.sums[name], runs[0][3].sums[name]) for name in stats.sums)


@pytest.mark.parametrize("by_advantage", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_rows_to_compute_come_with_the_coefficients(lengths, by_advantage):
    count, batch = sum(LENGTHS[lengths]), len(LENGTHS[lengths])
    segments = torch.tensor([0, *itertools.accumulate(LENGTHS[lengths])], device="cuda")
    targets, mask = torch.randint(-2, 40, (count,), device="cuda"), torch.rand(count, device="cuda") > 0.3
    advantages = torch.randint(-1, 2, (batch,), device="cuda").float()
    inputs = row_inputs(Objective(), segments, targets, 33, mask, advantages, None, by_advantage)
    first = inputs.terms.advantages if by_advantage else None
    expected = reference.computed_rows(torch.where(mask, targets, -1), 33, first, None, partition=True)
    found = cut_lists(inputs.wanted, inputs.others, inputs.counts.item())
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_coefficients_of_int32_targets_are_those_of_int64(lengths, loss_type):
    count, batch = sum(LENGTHS[lengths]), len(LENGTHS[lengths])
    segments = torch.tensor([0, *itertools.accumulate(LENGTHS[lengths])], device="cuda")
    targets, mask = torch.randint(-2, 40, (count,), device="cuda"), torch.rand(count, device="cuda") > 0.3
    targets[0], targets[-1] = -(2**31), 2**31 - 1
    advantages, ratio = torch.randn(batch, device="cuda"), torch.rand(batch, device="cuda") + 0.5
    objective = Objective(loss_type=loss_type, entropy_coef=0.01)
    found, wanted = (
        row_inputs(objective, segments, ids, 33, mask, advantages, ratio, False) for ids in (targets.int(), targets)
    )
    assert found.targets.dtype == torch.int64 and torch.equal(found.targets, wanted.targets)
    lists = [cut_lists(x.wanted, x.others, x.counts.item()) for x in (found, wanted)]
    assert all(map(torch.equal, *lists)) and torch.equal(found.sizes, wanted.sizes)
    for ours, theirs in zip(found.terms, wanted.terms, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    assert found.phi_of_sequence is wanted.phi_of_sequence or torch.equal(found.phi_of_sequence, wanted.phi_of_sequence)


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_grad", [True, False])
def test_targets_and_segments_of_either_width_give_the_same_loss(id_dtype, with_grad):
    hidden, weight = torch.randn(60, 64, device="cuda").bfloat16(), torch.randn(257, 64, device="cuda").bfloat16() / 8
    targets, segments = torch.randint(-1, 260, (60,), device="cuda"), torch.tensor([0, 20, 45, 60], device="cuda")
    advantages, mask = torch.tensor([1.0, 0.0, -0.5], device="cuda"), torch.rand(60, device="cuda") > 0.3

    def step(ids, offsets):
        leaves = [x.clone().requires_grad_(with_grad) for x in (hidden, weight)]
        loss, stats = linear_grpo_loss(*leaves, ids, offsets, advantages, Objective(), loss_mask=mask)
        grads = torch.autograd.grad(loss, leaves) if with_grad else ()
        return loss.detach(), stats.logprobs, stats.entropy, stats.policy_loss, *grads

    wanted = step(targets, segments)
    for offsets in (segments, segments.int()):
        assert all(map(torch.equal, step(targets.to(id_dtype), offsets), wanted))


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("trains", ["hidden", "weight", "nothing"])
def test_what_is_not_asked_for_changes_nothing_else(trains):
    """Rows without an advantage, masked ones and ignored ones among them."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(60, 64, device="cuda").bfloat16(), torch.randn(257, 64, device="cuda").bfloat16() / 8
    targets, segments = torch.randint(-1, 257, (60,), device="cuda"), torch.tensor([0, 20, 45, 60], device="cuda")
    advantages, mask = torch.tensor([1.0, 0.0, -0.5], device="cuda"), torch.rand(60, device="cuda") > 0.3

    def step(of_hidden, of_weight):
        leaves = hidden.clone().requires_grad_(of_hidden), weight.clone().requires_grad_(of_weight)
        loss, stats = linear_grpo_loss(*leaves, targets, segments, advantages, Objective(), loss_mask=mask)
        if of_hidden or of_weight:
            loss.backward()
        return loss.detach(), stats.logprobs, stats.entropy, *(leaf.grad for leaf in leaves)

    every = step(True, True)
    some = step(trains == "hidden", trains == "weight")
    for ours, wanted in zip(some, every, strict=True):
        # Without a gradient, another kernel of the row kernels gives the statistics.
        assert ours is None or torch.allclose(ours, wanted, rtol=2**-7, atol=1e-5)
    assert [grad is None for grad in some[3:]] == [trains != "hidden", trains != "weight"]


def test_a_compiled_loss_is_not_traced_anew_for_another_number_of_computed_rows():
    torch._dynamo.reset()
    hidden = torch.randn(24, 64, device="cuda").bfloat16().requires_grad_()
    weight, targets = torch.randn(33, 64, device="cuda").bfloat16(), torch.arange(24, device="cuda")
    advantages, objective = torch.tensor([0.0, -1.0], device="cuda"), Objective()

    def loss(segments):
        return linear_grpo_loss(hidden, weight, targets, segments, advantages, objective)[0] * 2

    compiled = torch.compile(loss, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in range(24):
            segments = torch.tensor([0, length, 24], device="cuda")
            assert torch.equal(compiled(segments), loss(segments))


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("segments", [[0, 3, 5], [1, 3, 6], [0, 4, 2, 6], [0, 9, 6], [-5, 3, 6], [0]])
def test_segments_that_do_not_fit_are_an_error_and_harm_nothing(segments, with_grad):
    hidden, weight = torch.randn(6, 64, device="cuda").bfloat16(), torch.randn(33, 64, device="cuda").bfloat16()
    targets = torch.zeros(6, dtype=torch.long, device="cuda")
    offsets = torch.tensor(segments, device="cuda")
    advantages = torch.ones(len(segments) - 1, device="cuda")
    if len(segments) == 4 and segments[1] == 4:
        offsets = torch.tensor([0, 4, 2, 6], device="cuda")
    with pytest.raises(ValueError, match="segments runs from"):
        linear_grpo_loss(hidden.requires_grad_(with_grad), weight, targets, offsets, advantages, Objective())
    torch.cuda.synchronize()


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_loss_syncs_once(beta):
    """For the sizes of the sequences, and for how many rows are computed, together."""
    hidden = torch.randn(600, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(5003, 64, device="cuda").bfloat16().requires_grad_()
    targets, segments = torch.zeros(600, dtype=torch.long, device="cuda"), torch.tensor([0, 300, 600], device="cuda")
    advantages = torch.ones(2, device="cuda")

    def step():
        linear_grpo_loss(hidden, weight, targets, segments, advantages, Objective(beta=beta), ref_logprobs=ref)[
            0
        ].backward()

    ref = torch.zeros(600, device="cuda")
    step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(syncs) == 1, syncs


def test_all_metrics_come_in_one_copy():
    logprobs, advantages = torch.randn(3, 5, device="cuda"), torch.randn(3, device="cuda")
    _, stats = grpo_loss(logprobs, advantages, torch.ones(3, 5, device="cuda"), Objective())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metrics = stats.metrics()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(metrics) == 6 and sum("synchroniz" in str(warning.message) for warning in caught) == 1


def test_bad_arguments_say_what_was_given():
    targets, counts = torch.zeros(4, dtype=torch.long, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
    with pytest.raises(RuntimeError, match=r"compact_rows: first is torch\.float64.*torch\.float32 with 4"):
        torch.ops.fastgrpo.compact_rows(targets, 9, torch.zeros(4, device="cuda").double(), None, targets, None, counts)
    with pytest.raises(RuntimeError, match="compact_rows: targets is not on a CUDA device"):
        torch.ops.fastgrpo.compact_rows(targets.cpu(), 9, None, None, targets, None, counts)


def test_the_kernels_are_what_a_16_bit_head_on_cuda_gets():
    assert select.has_row_kernels(torch.device("cuda"), torch.bfloat16)
    assert not select.has_row_kernels(torch.device("cuda"), torch.float32)
