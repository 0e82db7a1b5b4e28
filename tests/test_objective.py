"""Claims about the GRPO objective. That its formulas are TRL's is tested in tests/trl/test_objective_parity.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fastgrpo import AdaptiveEntropy, Objective, grpo_loss, linear_grpo_loss, sampler_importance_ratio
from fastgrpo.objective import (
    BATCH_NORMALISED_LOSS_TYPES,
    CLIPPED_LOSS_TYPES,
    IMPORTANCE_SAMPLING_LEVELS,
    LOSS_TYPES,
    SAMPLER_RATIO_MODES,
    high_entropy_mask,
    off_policy_mask,
    row_local_terms_exist,
    row_terms,
    token_grad,
    token_terms,
    vespo_weights,
)

every_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)
every_level = pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)


def objective(loss_type: str, **options: Any) -> Objective:
    return Objective(loss_type=loss_type, max_completion_length=16, **options)


def ragged_mask(*lengths: int) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()


def make(rows: int, width: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Every per-token argument of `grpo_loss` at once, and a mask with short rows and holes."""
    logprobs = -torch.rand(rows, width, dtype=dtype) * 3 - 0.05
    lengths = torch.randint(1, width + 1, (rows, 1))
    lengths[:1] = width
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width) < 0.8)
    mask[:, :1] = True
    return {
        "logprobs": logprobs,
        "advantages": torch.randn(rows, width, dtype=dtype),
        "mask": mask,
        "old_logprobs": logprobs + 0.3 * torch.randn(rows, width, dtype=dtype),
        "ref_logprobs": logprobs + 0.5 * torch.randn(rows, width, dtype=dtype),
        "sampler_ratio": torch.rand(rows, width, dtype=dtype) + 0.5,
        "sampling_logprobs": logprobs + 0.5 * torch.randn(rows, width, dtype=dtype),
        "entropy": torch.rand(rows, width, dtype=dtype) * 2,
    }


def everything_on(loss_type: str, level: str = "token") -> Objective:
    return objective(
        loss_type,
        importance_sampling_level=level,
        beta=0.04,
        delta=1.5,
        off_policy_mask_threshold=0.05,
        top_entropy_quantile=0.6,
        entropy_coef=0.02,
    )


def run(options: Objective, tensors: dict[str, Tensor | None], scale: float = 1.0):
    """Loss, stats, and the gradients of log-probs and entropy."""
    tensors = dict(tensors)
    for name in ("logprobs", "entropy"):
        if tensors.get(name) is not None:
            tensors[name] = tensors[name].clone().requires_grad_()
    leaves = [tensors[name] for name in ("logprobs", "entropy") if tensors.get(name) is not None]
    arguments = (tensors.pop(name) for name in ("logprobs", "advantages", "mask"))
    loss, stats = grpo_loss(*arguments, options, **tensors)
    grads = torch.autograd.grad(loss * scale, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), stats, grads


# The exactness list.


@every_level
@every_loss_type
def test_three_times_the_loss_gives_three_times_the_gradient(loss_type, level):
    tensors = make(5, 7)
    _, _, once = run(everything_on(loss_type, level), tensors)
    _, _, thrice = run(everything_on(loss_type, level), tensors, scale=3.0)
    for one, three in zip(once, thrice, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(three, 3 * one, rtol=1e-13, atol=0)


@every_loss_type
def test_kl_is_not_clipped_its_gradient_is_alive_four_nats_away(loss_type):
    logprobs = torch.full((1, 1), -5.0, dtype=torch.float64)
    options = objective(loss_type, beta=1.0, use_bias_correction_kl=False)
    tensors = {
        "logprobs": logprobs,
        "advantages": torch.zeros(1),
        "mask": torch.ones(1, 1),
        "ref_logprobs": logprobs + 4,
    }
    loss, _, (grad,) = run(options, tensors)
    weight = 1 / 16 if loss_type == "dr_grpo" else 1.0
    assert loss.item() == pytest.approx(weight * (math.exp(4) - 5), rel=1e-12)
    assert grad.item() == pytest.approx(weight * (1 - math.exp(4)), rel=1e-12)


DROPPED = {
    "the off-policy mask": {"off_policy_mask_threshold": -1e9},
    "the entropy mask": {"top_entropy_quantile": 0.0},
    "the sampler ratio": {},
}


@every_level
@pytest.mark.parametrize(
    ("loss_type", "why"),
    # vespo takes the sampler ratio into its weights instead of multiplying by it.
    [case for case in itertools.product(LOSS_TYPES, DROPPED) if case != ("vespo", "the sampler ratio")],
)
def test_a_dropped_policy_term_keeps_its_kl(loss_type, why, level):
    """Off-policy mask, entropy mask and sampler ratio multiply the policy term only."""
    tensors = make(3, 6)
    tensors["advantages"] = -torch.rand(3, dtype=torch.float64) - 0.1
    tensors["sampler_ratio"] = torch.zeros(3, 6, dtype=torch.float64) if why == "the sampler ratio" else None
    if why == "the entropy mask":
        # Only the token of the highest entropy acts; what its policy term reaches is left out of the comparison below.
        tensors["entropy"][0, 0] = 9.0
    options = objective(loss_type, beta=0.5, importance_sampling_level=level, use_bias_correction_kl=False)
    loss, _, (grad, _) = run(replace(options, **DROPPED[why]), tensors)
    kl_only = {**tensors, "advantages": torch.zeros(3, dtype=torch.float64)}
    kl_loss, _, (kl_grad, _) = run(options, kl_only)
    if why == "the entropy mask":
        touched = torch.zeros(3, 6, dtype=torch.bool)
        touched[0, :] = level == "sequence"
        touched[0, 0] = True
        torch.testing.assert_close(grad[~touched], kl_grad[~touched], rtol=1e-12, atol=1e-15)
    else:
        torch.testing.assert_close(loss, kl_loss, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(grad, kl_grad, rtol=1e-12, atol=1e-15)
    assert kl_grad[tensors["mask"]].abs().min() > 0


@pytest.mark.parametrize("poison", [1e4, -1e4, math.nan, math.inf, -math.inf])
@every_level
@every_loss_type
def test_what_masked_columns_hold_does_no_harm(loss_type, level, poison):
    tensors = make(5, 7)
    masked = ~tensors["mask"]
    options = everything_on(loss_type, level)
    loss, stats, grads = run(options, tensors)
    per_token = [name for name in tensors if name != "mask"]
    for names in [per_token, *([name] for name in per_token)]:
        poisoned = dict(tensors)
        for name in names:
            poisoned[name] = tensors[name].masked_fill(masked, poison)
        poisoned_loss, poisoned_stats, poisoned_grads = run(options, poisoned)
        assert poisoned_loss == loss, names
        assert poisoned_stats.metrics() == stats.metrics(), names
        for grad, poisoned_grad in zip(grads, poisoned_grads, strict=True):
            assert torch.equal(poisoned_grad, grad), names
            assert poisoned_grad[masked].eq(0).all(), names


@every_loss_type
def test_what_a_row_without_tokens_holds_does_no_harm(loss_type):
    """Its advantage and its sequence-level sampler ratio, where these are one value a row."""
    tensors = make(4, 6) | {"advantages": torch.randn(4, dtype=torch.float64)}
    tensors["sampler_ratio"] = torch.rand(4, 1, dtype=torch.float64) + 0.5
    tensors["mask"][2] = False
    for level, name in itertools.product(IMPORTANCE_SAMPLING_LEVELS, ("advantages", "sampler_ratio")):
        options = everything_on(loss_type, level)
        loss, stats, grads = run(options, tensors)
        for poison in (math.nan, math.inf, 1e4, -1e4) if name == "advantages" else (math.nan, math.inf, 0.0, 1e4):
            poisoned = {**tensors, name: tensors[name].clone()}
            poisoned[name][2] = poison
            poisoned_loss, poisoned_stats, poisoned_grads = run(options, poisoned)
            assert poisoned_loss == loss, name
            assert all(torch.equal(a, b) for a, b in zip(poisoned_grads, grads, strict=True)), name
            assert poisoned_stats.policy_loss == stats.policy_loss, name


@every_loss_type
def test_a_hole_in_the_mask_is_a_token_that_is_not_there(loss_type):
    """Tool output inside a completion: the same as if the counted tokens stood side by side."""
    tensors = make(4, 8)
    mask = tensors["mask"]
    order = mask.long().argsort(dim=1, descending=True, stable=True)
    assert (mask.long().diff(dim=1) > 0).any(), "no hole in this mask"
    closed = {name: value.gather(1, order) for name, value in tensors.items()}
    for level in IMPORTANCE_SAMPLING_LEVELS:
        loss, stats, grads = run(everything_on(loss_type, level), tensors)
        closed_loss, closed_stats, closed_grads = run(everything_on(loss_type, level), closed)
        torch.testing.assert_close(loss, closed_loss, rtol=1e-12, atol=1e-14)
        for grad, closed_grad in zip(grads, closed_grads, strict=True):
            torch.testing.assert_close(grad.gather(1, order), closed_grad, rtol=1e-12, atol=1e-14)
        assert stats.metrics() == pytest.approx(closed_stats.metrics(), rel=1e-12)


@pytest.mark.parametrize("given_old", [False, True], ids=["old absent", "old given"])
@every_level
@every_loss_type
def test_the_ratio_is_exactly_one_on_the_first_on_policy_step(loss_type, level, given_old):
    """With a clip range of width 0 and a cap of 1 nothing counts as clipped, and the policy loss is minus the advantage."""
    tensors = make(4, 6, torch.float32)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0])
    options = objective(
        loss_type,
        importance_sampling_level=level,
        epsilon=0.0,
        epsilon_high=1.0 if loss_type == "cispo" else 0.0,
        num_items_in_batch=1.0,
    )
    old = tensors["logprobs"].clone() if given_old else None
    arguments = {
        "logprobs": tensors["logprobs"],
        "advantages": advantages,
        "mask": tensors["mask"],
        "old_logprobs": old,
    }
    loss, stats, (grad,) = run(options, arguments)
    clipped = [value for name, value in stats.metrics().items() if "clip" in name]
    assert all(value == 0.0 for value in clipped)
    weights = options.token_weights(tensors["mask"])
    per_token = -advantages.unsqueeze(1) * weights
    if loss_type in ("cispo", "vespo"):
        torch.testing.assert_close(loss, (per_token * tensors["logprobs"]).sum(), rtol=1e-6, atol=1e-6)
    elif loss_type == "sapo":
        taus = torch.where(advantages > 0, 1.0, 1.05).unsqueeze(1)
        torch.testing.assert_close(loss, (per_token * 2 / taus).sum(), rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(loss, per_token.sum(), rtol=1e-6, atol=1e-6)
    if loss_type in CLIPPED_LOSS_TYPES:
        return  # a clip range of width 0 is a tie of all terms; the next test has the gradient
    torch.testing.assert_close(grad, per_token, rtol=1e-5, atol=1e-7)


@every_level
@every_loss_type
def test_the_on_policy_gradient_is_minus_the_advantage_times_the_weight(loss_type, level):
    tensors = make(4, 6)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    options = objective(loss_type, importance_sampling_level=level, epsilon_high=1.0 if loss_type == "cispo" else None)
    _, _, (grad,) = run(options, {"logprobs": tensors["logprobs"], "advantages": advantages, "mask": tensors["mask"]})
    expected = -advantages.unsqueeze(1) * options.token_weights(tensors["mask"].double())
    # Numbers that are chosen by the sign of an advantage are rounded to float32, as in TRL; sapo's temperatures among them.
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("poison", [0.0, math.nan])
@every_level
@every_loss_type
def test_an_all_masked_micro_batch_gives_a_differentiable_zero(loss_type, level, poison):
    tensors = {name: torch.full((3, 4), poison) for name in make(3, 4)}
    tensors["mask"] = torch.zeros(3, 4)
    loss, stats, grads = run(everything_on(loss_type, level), tensors)
    assert loss == 0
    assert all(grad.eq(0).all() for grad in grads)
    metrics = stats.metrics()
    extremes = {metrics.pop(name, math.nan) for name in ("clip_ratio/low_min", "clip_ratio/high_max")}
    assert all(math.isnan(value) for value in extremes)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy_loss"] == 0


@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_metrics_of_several_processes_come_from_one_gather(loss_type):
    """Two processes, one of which has no token; compared with one that has all rows."""
    tensors = make(5, 7)
    tensors["mask"][3:] = 0
    options = objective(loss_type, beta=0.1)
    parts = [
        run(options, {name: value[rows] for name, value in tensors.items()})[1] for rows in (slice(3), slice(3, 5))
    ]
    sent = []

    def remember(own):
        sent.append(own)
        return own

    for part in parts:
        part.metrics(remember)
    assert len(sent) == 2 and sent[0].shape == sent[1].shape and sent[0].shape[0] == 1
    found = [part.metrics(lambda own: torch.cat(sent)) for part in parts]
    expected = run(options, tensors)[1].metrics()
    # A mean over processes, as TRL logs it.
    expected["policy_loss"] = sum(part.policy_loss.item() for part in parts) / 2
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (3, 0), (0, 0)])
@every_level
@every_loss_type
def test_an_empty_batch_gives_a_differentiable_zero(loss_type, level, rows, width):
    tensors = {name: torch.zeros(rows, width) for name in make(1, 1)}
    for advantages in (torch.zeros(rows), torch.zeros(rows, width)):
        loss, stats, grads = run(everything_on(loss_type, level), {**tensors, "advantages": advantages})
        assert loss == 0
        assert [tuple(grad.shape) for grad in grads] == [(rows, width)] * 2
        assert stats.metrics()["policy_loss"] == 0


def window_gradient(options: Objective, tensors: dict[str, Tensor], steps: int) -> Tensor:
    """Sum of the gradients of `steps` micro-batches of equally many sequences."""
    rows = tensors["mask"].shape[0]
    return torch.cat(
        [
            run(options, {name: value[part] for name, value in tensors.items()})[2][0]
            for part in torch.arange(rows).chunk(steps)
        ]
    )


def accumulated(loss_type: str, tensors: dict[str, Tensor], steps: int, **options: Any) -> Tensor:
    items = tensors["mask"].sum()
    return window_gradient(
        objective(loss_type, beta=0.04, gradient_accumulation_steps=steps, num_items_in_batch=items, **options),
        tensors,
        steps,
    )


def without_batch_statistics(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name not in ("entropy", "sampling_logprobs")}


@every_level
@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
def test_one_batch_and_four_accumulated_micro_batches_give_the_same_gradient(loss_type, level):
    """
    For every loss type but bnpo, given micro-batches of equally many sequences, however long these are.

    dapo, cispo and vespo divide by the tokens of the whole batch; dr_grpo, luspo, grpo and sapo by the sequences of the
    micro-batch and the number of micro-batches. bnpo divides by the tokens of the micro-batch: see the next test.
    """
    tensors = without_batch_statistics(make(8, 7))
    one = accumulated(loss_type, tensors, 1, importance_sampling_level=level)
    four = accumulated(loss_type, tensors, 4, importance_sampling_level=level)
    assert one.abs().max() > 0
    torch.testing.assert_close(four, one, rtol=1e-12, atol=1e-15)


def test_bnpo_agrees_across_accumulation_only_where_micro_batches_hold_equally_many_tokens():
    tensors = without_batch_statistics(make(8, 7))
    even = {**tensors, "mask": ragged_mask(7, 2, 2, 7, 4, 5, 5, 4)}
    torch.testing.assert_close(accumulated("bnpo", even, 4), accumulated("bnpo", even, 1), rtol=1e-12, atol=1e-15)
    uneven = {**tensors, "mask": ragged_mask(7, 7, 2, 2, 4, 5, 5, 4)}
    assert (accumulated("bnpo", uneven, 4) - accumulated("bnpo", uneven, 1)).abs().max() > 1e-3


@pytest.mark.parametrize("loss_type", BATCH_NORMALISED_LOSS_TYPES)
def test_batch_normalised_losses_agree_across_micro_batches_of_unequal_size(loss_type):
    tensors = without_batch_statistics(make(7, 7))  # chunks of 2, 2, 2 and 1
    torch.testing.assert_close(
        accumulated(loss_type, tensors, 4), accumulated(loss_type, tensors, 1), rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("loss_type", BATCH_NORMALISED_LOSS_TYPES)
def test_a_generation_batch_of_two_steps_weighs_every_token_twice_as_much_as_one_step_would(loss_type):
    """steps_per_generation 8 with 4 accumulated: each of the two steps averages over half of the generation batch."""
    tensors = without_batch_statistics(make(16, 7))
    items = tensors["mask"].sum()
    options = objective(
        loss_type, gradient_accumulation_steps=4, steps_per_generation=8, num_items_in_batch=items, beta=0.04
    )
    whole = accumulated(loss_type, tensors, 1)
    torch.testing.assert_close(window_gradient(options, tensors, 8), 2 * whole, rtol=1e-12, atol=1e-15)


@every_loss_type
def test_two_processes_average_to_the_gradient_of_one(loss_type):
    """Data-parallel training averages gradients over processes."""
    tensors = without_batch_statistics(make(8, 7))
    tensors["mask"] = ragged_mask(7, 6, 2, 3, 5, 5, 4, 4)  # 18 tokens each, as bnpo needs
    items = tensors["mask"].sum()
    single = run(objective(loss_type, beta=0.04, num_items_in_batch=items), tensors)[2][0]
    halves = window_gradient(objective(loss_type, beta=0.04, num_items_in_batch=items, num_processes=2), tensors, 2)
    torch.testing.assert_close(halves / 2, single, rtol=1e-12, atol=1e-15)


@every_loss_type
def test_evaluation_is_not_divided_by_accumulation(loss_type):
    tensors = make(4, 6)
    items = tensors["mask"].sum()
    once = replace(everything_on(loss_type), num_items_in_batch=items)
    evaluation = replace(once, training=False, gradient_accumulation_steps=4, steps_per_generation=8)
    assert run(evaluation, tensors)[0] == run(once, tensors)[0]


@every_loss_type
def test_a_micro_batch_that_is_alone_needs_no_item_count(loss_type):
    tensors = make(4, 6)
    for options in (
        everything_on(loss_type),
        replace(everything_on(loss_type), gradient_accumulation_steps=4, steps_per_generation=8, num_processes=3),
        replace(everything_on(loss_type), gradient_accumulation_steps=4),
        replace(everything_on(loss_type), gradient_accumulation_steps=4, training=False, num_processes=2),
    ):
        steps = (options.steps_per_generation or options.gradient_accumulation_steps) if options.training else 1
        items = int(tensors["mask"].sum()) * options.num_processes * steps
        expected = run(replace(options, num_items_in_batch=items), tensors)[0]
        torch.testing.assert_close(run(options, tensors)[0], expected, rtol=1e-6, atol=0)


@every_loss_type
def test_the_item_count_may_be_a_tensor_or_a_number(loss_type):
    tensors = make(4, 6)
    values = [
        run(replace(everything_on(loss_type), num_items_in_batch=items), tensors)[0]
        for items in (40, 40.0, torch.tensor(40), torch.tensor(40.0))
    ]
    assert all(value == values[0] for value in values)


def test_no_counted_item_in_the_batch_divides_by_one():
    options = objective("dapo", num_items_in_batch=torch.tensor(0))
    assert options.batch_normaliser(torch.zeros(2, 3)) == 1.0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64])
def test_the_mask_may_have_any_dtype(dtype):
    tensors = make(4, 6)
    expected = run(everything_on("dapo"), tensors)
    loss, _, grads = run(everything_on("dapo"), {**tensors, "mask": tensors["mask"].to(dtype)})
    assert loss == expected[0] and all(map(torch.equal, grads, expected[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_loss_type
def test_the_loss_keeps_the_dtype_of_the_log_probs(loss_type, dtype):
    tensors = make(4, 6, dtype)
    loss, stats, grads = run(everything_on(loss_type), tensors)
    assert loss.dtype == stats.policy_loss.dtype == dtype
    assert all(grad.dtype == dtype for grad in grads)


every_16_bit_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def raised(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of 16 bit in float32."""
    return {name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in tensors.items()}


@every_16_bit_dtype
@every_level
@every_loss_type
def test_tensors_of_16_bit_give_what_they_give_in_float32(loss_type, level, dtype):
    tensors = make(4, 6, dtype)
    loss, stats, grads = run(everything_on(loss_type, level), tensors)
    expected, expected_stats, expected_grads = run(everything_on(loss_type, level), raised(tensors))
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
    assert stats.metrics() == pytest.approx(expected_stats.metrics(), rel=0, abs=0, nan_ok=True)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype and torch.equal(grad, wanted.to(dtype))
    every = [stats.logprobs, stats.entropy, stats.policy_loss, stats.entropy_bonus, *stats.sums.values()]
    assert {x.dtype for x in every} == {torch.float32}


@every_16_bit_dtype
@every_loss_type
def test_each_tensor_beside_the_log_probs_may_have_a_dtype_of_its_own(loss_type, dtype):
    tensors = make(4, 6, torch.float32)
    for name in (name for name in tensors if name not in ("logprobs", "mask")):
        mixed = {**tensors, name: tensors[name].to(dtype)}
        found, expected = (run(everything_on(loss_type), given)[0] for given in (mixed, raised(mixed)))
        assert found.dtype == torch.float32 and torch.equal(found, expected), name
        assert run(everything_on(loss_type), {**tensors, name: tensors[name].double()})[0].dtype == torch.float32, name


def test_more_tokens_than_a_16_bit_number_can_count():
    """float16 ends at 65,504 and bfloat16 counts to 256; in float32 these counts are exact."""
    for dtype, rows, width in ((torch.float16, 16, 4096), (torch.bfloat16, 4, 3000)):
        ones = {"advantages": torch.ones(rows, dtype=dtype), "mask": torch.ones(rows, width, dtype=dtype)}
        logprobs = torch.full((rows, width), -1.0, dtype=dtype)
        for loss_type, items in (("dapo", None), ("dapo", 200_000), ("bnpo", None), ("grpo", None)):
            options = objective(loss_type, num_items_in_batch=items)
            loss, stats, (grad,) = run(options, {"logprobs": logprobs, **ones})
            assert loss.item() == pytest.approx(-rows * width / (items or rows * width), rel=1e-6)
            assert grad.count_nonzero() == rows * width
            assert stats.sums["clip_ratio/region_mean"][1] == rows * width


@every_16_bit_dtype
def test_masks_weights_and_ratios_of_16_bit_give_what_they_give_in_float32(dtype):
    tensors = make(3, 900, dtype)
    old, sampling, entropy = (tensors[name] for name in ("old_logprobs", "sampling_logprobs", "entropy"))
    mask, ratio, advantages = tensors["mask"].to(dtype), tensors["sampler_ratio"], tensors["advantages"]
    options = objective("vespo")
    functions: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = [
        *((sampler_importance_ratio, (old, sampling, mask, mode, 0.9, 1.1)) for mode in SAMPLER_RATIO_MODES),
        (high_entropy_mask, (entropy, mask, 0.3)),
        (off_policy_mask, (old, sampling, advantages[:, :1], mask, 0.01)),
        (vespo_weights, (options, old - sampling, advantages, mask, 1 + 0.001 * ratio)),
        (options.token_weights, (mask,)),
        (options.batch_normaliser, (mask,)),
    ]
    for function, arguments in functions:
        found = function(*arguments)
        expected = function(*raised(dict(enumerate(arguments))).values())
        assert torch.equal(found.to(expected.dtype), expected), function
        assert found.dtype != dtype or function is off_policy_mask, function


@every_16_bit_dtype
@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_the_fused_loss_takes_values_of_16_bit_as_what_they_are_in_float32(loss_type, dtype):
    mask = torch.ones(2, 700)
    values = {
        "advantages": torch.tensor([1.0, -1.0]).to(dtype),
        "sampler_ratio": (torch.rand(1400) * 0.01 + 1).to(dtype),
    }
    columns = {name: x.view(2, -1) for name, x in values.items()}
    found, expected = (row_terms(objective(loss_type), mask=mask, **x) for x in (columns, raised(columns)))
    assert all(map(torch.equal, *([x for x in terms if x is not None] for terms in (found, expected))))
    hidden, weight, targets = torch.randn(1400, 4), torch.randn(9, 4), torch.randint(9, (1400,))
    segments = torch.tensor([0, 700, 1400])
    losses = [
        linear_grpo_loss(hidden, weight, targets, segments, objective=objective(loss_type), old_logprobs=old, **x)[0]
        for old, x in itertools.product((None, torch.full((1400,), -2.0)), (values, raised(values)))
    ]
    assert {loss.dtype for loss in losses} == {torch.float32}
    assert torch.equal(*losses[:2]) and torch.equal(*losses[2:])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@every_level
@every_loss_type
def test_the_default_dtype_changes_no_bit(loss_type, level, dtype, default):
    tensors = make(4, 6, dtype)
    tensors["sampler_ratio"] = tensors["sampler_ratio"][:, :1]
    advantages = tensors["advantages"][:, 0].contiguous()
    counts = (None, 257, 257.0, torch.tensor(257))
    variants = [
        (replace(everything_on(loss_type, level), num_items_in_batch=items, num_processes=3), tensors | change)
        for items, change in itertools.product(counts, ({}, {"advantages": advantages}))
    ]

    def results() -> list[Tensor]:
        found = []
        for options, given_tensors in variants:
            loss, stats, grads = run(options, given_tensors)
            found += [loss, *grads, stats.policy_loss, stats.entropy_bonus, *stats.sums.values()]
            found += [torch.tensor(list(stats.metrics().values()), dtype=torch.float64)]
            found += [options.token_weights(mask) for mask in (tensors["mask"], tensors["mask"].long())]
            found += [options.batch_normaliser(mask) for mask in (tensors["mask"], tensors["mask"].long())]
            if level == "token":
                phi = torch.ones_like(tensors["logprobs"])
                per_token = (tensors[name] for name in ("logprobs", "advantages", "old_logprobs", "ref_logprobs"))
                found += [token_grad(options, *per_token, phi=phi)]
        old, sampling, mask = tensors["old_logprobs"], tensors["sampling_logprobs"], tensors["mask"]
        found += [sampler_importance_ratio(old, sampling, mask, mode) for mode in SAMPLER_RATIO_MODES]
        return [*found, off_policy_mask(old, sampling, advantages[:, None], mask, 0.05)]

    expected = results()
    with default_dtype(default):
        found = results()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=9.0), other.nan_to_num(nan=9.0))


@every_level
@every_loss_type
def test_inputs_are_left_as_they_are_and_statistics_are_detached(loss_type, level):
    tensors = make(4, 6)
    before = {name: value.clone() for name, value in tensors.items()}
    _, stats, _ = run(everything_on(loss_type, level), tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    found = [value for value in (*vars(stats).values(), *stats.sums.values()) if isinstance(value, Tensor)]
    assert len(found) > 5 and not any(value.requires_grad for value in found)


@every_level
@every_loss_type
def test_sums_of_two_processes_add_up_to_the_metrics_of_both(loss_type, level):
    tensors = make(6, 7)
    options = replace(everything_on(loss_type, level), top_entropy_quantile=1.0)
    _, whole, _ = run(options, tensors)
    parts = [
        run(options, {name: value[rows] for name, value in tensors.items()})[1] for rows in (slice(0, 2), slice(2, 6))
    ]
    assert set(whole.sums) == set(parts[0].sums) and whole.sums
    for name, total in whole.sums.items():
        torch.testing.assert_close(parts[0].sums[name] + parts[1].sums[name], total, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts[0].entropy_bonus + parts[1].entropy_bonus, whole.entropy_bonus)
    if loss_type in CLIPPED_LOSS_TYPES:
        assert torch.equal(torch.cat([part.low_clip for part in parts]), whole.low_clip)
        assert torch.equal(torch.cat([part.high_clip for part in parts]), whole.high_clip)


def test_clip_metrics_see_the_ratio_after_the_delta_clamp():
    """A ratio of 3 counts as clipped where delta is 2, and no more where delta lies inside the clip range."""
    logprobs = torch.full((1, 2), -1.0)
    tensors = {"advantages": torch.ones(1), "mask": torch.ones(1, 2), "old_logprobs": logprobs - math.log(3)}
    for delta, expected in ((None, 1.0), (2.0, 1.0), (1.2, 0.0), (1.1, 0.0)):
        _, stats, _ = run(objective("grpo", delta=delta), {"logprobs": logprobs, **tensors})
        assert stats.metrics()["clip_ratio/high_mean"] == expected, delta


def test_clip_extremes_ignore_rows_without_a_token():
    logprobs = torch.full((3, 2), -1.0)
    tensors = {
        "logprobs": logprobs,
        "advantages": torch.tensor([1.0, -1.0, 1.0]),
        "mask": ragged_mask(2, 1, 0),
        "old_logprobs": logprobs + torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-1.0, -1.0]]),
    }
    metrics = run(objective("grpo"), tensors)[1].metrics()
    assert metrics["clip_ratio/high_max"] == 0.5 and metrics["clip_ratio/low_min"] == 0.0
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(2 / 3)


def test_an_entropy_without_a_bonus_carries_no_gradient():
    tensors = make(4, 6)
    _, stats, (_, grad) = run(replace(everything_on("grpo"), entropy_coef=0.0), tensors)
    assert grad.eq(0).all() and stats.entropy_bonus is not None


@every_loss_type
def test_the_auxiliary_loss_is_added_once_per_step(loss_type):
    tensors = make(4, 6)
    options = replace(everything_on(loss_type), gradient_accumulation_steps=4)
    aux = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    arguments = (tensors.pop("logprobs"), tensors.pop("advantages"), tensors.pop("mask"))
    plain, _ = grpo_loss(*arguments, options, **tensors)
    loss, stats = grpo_loss(*arguments, options, aux_loss=aux, router_aux_loss_coef=0.1, **tensors)
    assert (loss - plain).item() == pytest.approx(0.05)
    assert torch.autograd.grad(loss, aux)[0].item() == pytest.approx(0.025)
    accumulation = 1 if loss_type in BATCH_NORMALISED_LOSS_TYPES else 4
    bonus = 0.02 * stats.entropy_bonus[0] / stats.entropy_bonus[1] / 4
    assert stats.policy_loss.item() == pytest.approx(accumulation * (plain + bonus).item(), rel=1e-6)


# The closed-form gradient.


@st.composite
def token_cases(draw: st.DrawFn) -> tuple[Objective, dict[str, Tensor | None]]:
    """Tokens whose ratios lie on the clip range's bounds, on `delta`, on both, or anywhere."""
    count = 8
    step = st.sampled_from([0.0, 0.0, 0.3, -0.3, 0.2]) | st.floats(-0.69, 0.69)

    def column(element: st.SearchStrategy[float]) -> Tensor:
        return torch.tensor(draw(st.lists(element, min_size=count, max_size=count)), dtype=torch.float64)

    on_policy = draw(st.booleans())
    logprobs = -column(st.floats(0.0, 5.0))
    old_logprobs = None
    ratio = torch.ones(count, dtype=torch.float64)
    if not on_policy:
        old_logprobs = logprobs - column(step)
        ratio = torch.exp(logprobs - old_logprobs)
    # For ratios in [0.5, 2], 1 - (1 - r) and 1 + (r - 1) are exactly r.
    bounds = [r for r in ratio.tolist() if 0.5 <= r <= 2.0]
    below, above = [1 - r for r in bounds if r <= 1], [r - 1 for r in bounds if r >= 1]
    loss_type = draw(st.sampled_from(LOSS_TYPES))
    options = objective(
        loss_type,
        epsilon=draw(st.sampled_from([0.2, 0.0, *below])),
        epsilon_high=draw(st.sampled_from([None, 0.28, *(bounds if loss_type == "cispo" else above)])),
        delta=draw(st.sampled_from([None, 0.9, 4.0, *bounds])),
        beta=draw(st.sampled_from([0.0, 0.04, 1.0])),
        use_bias_correction_kl=draw(st.booleans()),
        sapo_temperature_pos=draw(st.floats(0.5, 2.0)),
        sapo_temperature_neg=draw(st.floats(0.5, 2.0)),
    )
    return options, {
        "logprobs": logprobs,
        "advantages": column(st.sampled_from([1.0, -1.0, 0.0, -0.0]) | st.floats(-3.0, 3.0)),
        "old_logprobs": old_logprobs,
        "ref_logprobs": logprobs + column(st.floats(-4.0, 4.0)),
        "multiplier": column(st.sampled_from([0.0, 1.0, 0.7])) if draw(st.booleans()) else None,
        "phi": column(st.floats(0.0, 8.0)),
    }


@settings(max_examples=300)
@given(case=token_cases())
def test_the_closed_form_gradient_is_autograd_s_at_ties_and_bounds_too(case):
    options, tensors = case
    leaf = tensors["logprobs"].clone().requires_grad_()
    old = leaf.detach() if tensors["old_logprobs"] is None else tensors["old_logprobs"]
    terms = token_terms(
        options,
        leaf,
        tensors["advantages"],
        leaf - old,
        tensors["ref_logprobs"],
        tensors["multiplier"],
        tensors["phi"],
    )
    (expected,) = torch.autograd.grad(terms.loss.sum(), leaf)
    found = token_grad(options, **tensors)
    error = ((found - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= 1e-12, f"worst error {error:.2e}: {found} against {expected}"


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("log_ratio", "epsilon"), [(math.log(2.0), 1.0), (math.log(0.5), 0.5), (0.0, 0.0)])
def test_a_ratio_on_the_bound_takes_half_of_each_branch_as_torch_min_does(log_ratio, epsilon, advantage):
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    ratio = math.exp(log_ratio)
    options = objective("grpo", epsilon=epsilon)
    assert 1 - epsilon == ratio or 1 + epsilon == ratio
    old = torch.tensor([-1.0 - log_ratio], dtype=torch.float64)
    grad = token_grad(options, logprobs, torch.tensor([advantage], dtype=torch.float64), old)
    # Both branches are alive at the bound (clamp passes its gradient on there), so the halves add up.
    assert grad.item() == pytest.approx(-ratio * advantage, rel=1e-12)


@st.composite
def row_local_cases(draw: st.DrawFn) -> tuple[Objective, dict[str, Tensor | None]]:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    tensors = make(draw(st.integers(1, 4)), draw(st.integers(2, 6)))
    on_policy = draw(st.booleans())
    if on_policy:
        tensors["old_logprobs"] = None
    if draw(st.booleans()):
        tensors["advantages"] = tensors["advantages"][:, 0]
    sampler = draw(st.sampled_from(["none", "sequence", "token"]))
    tensors["sampler_ratio"] = {
        "none": None,
        "sequence": tensors["sampler_ratio"][:, :1],
        "token": tensors["sampler_ratio"],
    }[sampler]
    options = objective(
        draw(st.sampled_from(LOSS_TYPES)),
        importance_sampling_level=draw(st.sampled_from(IMPORTANCE_SAMPLING_LEVELS)),
        epsilon=draw(st.sampled_from([0.2, 0.0])),
        epsilon_high=draw(st.sampled_from([None, 1.2])),
        delta=draw(st.sampled_from([None, 1.1, 0.9])),
        beta=draw(st.sampled_from([0.0, 0.04])),
        use_bias_correction_kl=draw(st.booleans()),
        gradient_accumulation_steps=draw(st.sampled_from([1, 4])),
    )
    return options, tensors


def is_row_local(options: Objective, tensors: dict[str, Tensor | None]) -> bool:
    sampler_ratio = tensors["sampler_ratio"]
    return row_local_terms_exist(
        options,
        on_policy=tensors["old_logprobs"] is None,
        per_token_advantages=tensors["advantages"].dim() == 2,
        per_token_sampler_ratio=sampler_ratio is not None and sampler_ratio.shape[1] > 1,
    )


def closed_form(options: Objective, tensors: dict[str, Tensor | None]) -> Tensor:
    """`token_weights * token_grad`, from what is known of every token before any log-prob of this pass is."""
    mask = tensors["mask"].double()
    advantages = tensors["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    sampler_ratio, phi = tensors["sampler_ratio"], None
    if options.loss_type == "vespo":
        if sampler_ratio is not None and sampler_ratio.shape[1] > 1:
            sampler_ratio = torch.where(tensors["mask"], sampler_ratio, 1.0)
        phi = vespo_weights(options, torch.zeros_like(mask), advantages, mask, sampler_ratio)
        sampler_ratio = None
    grad = token_grad(
        options,
        tensors["logprobs"],
        advantages.expand_as(mask),
        tensors["old_logprobs"],
        tensors["ref_logprobs"],
        sampler_ratio,
        phi,
    )
    return grad * options.token_weights(mask)


@settings(max_examples=200)
@given(case=row_local_cases())
def test_where_the_objective_is_row_local_its_gradient_is_weight_times_closed_form(case):
    options, tensors = case
    if not is_row_local(options, tensors):
        return
    _, _, (expected, _) = run(options, tensors)
    found = closed_form(options, tensors)
    error = ((found - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= 1e-7, f"worst error {error:.2e}"  # float32, to which temperatures are rounded


NOT_ROW_LOCAL = {
    "sequence ratio off-policy": ({"importance_sampling_level": "sequence"}, {}),
    "sequence ratio with per-token advantages": (
        {"importance_sampling_level": "sequence"},
        {"old_logprobs": None, "advantages": torch.tensor([[1.0, -1.0, 2.0]], dtype=torch.float64)},
    ),
    "sequence ratio with a per-token sampler ratio": (
        {"importance_sampling_level": "sequence"},
        {"old_logprobs": None, "sampler_ratio": torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64)},
    ),
    "sequence ratio that corrects the KL": (
        {"importance_sampling_level": "sequence", "beta": 0.5},
        {"old_logprobs": None},
    ),
    "vespo off-policy": ({"loss_type": "vespo"}, {}),
    "off-policy mask": ({"off_policy_mask_threshold": -1.0}, {}),
    "entropy quantile": ({"top_entropy_quantile": 0.3}, {}),
}


@pytest.mark.parametrize("reason", NOT_ROW_LOCAL)
def test_what_is_not_row_local_is_told_apart_and_would_come_out_wrong(reason):
    options, change = NOT_ROW_LOCAL[reason]
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    tensors = {
        "logprobs": logprobs,
        "advantages": torch.tensor([-1.0], dtype=torch.float64),
        "mask": torch.ones(1, 3, dtype=torch.bool),
        "old_logprobs": logprobs + torch.tensor([[0.1, -0.1, 0.06]], dtype=torch.float64),
        "ref_logprobs": logprobs + torch.tensor([[0.5, -0.5, 1.0]], dtype=torch.float64),
        "sampler_ratio": None,
        "sampling_logprobs": None,
        "entropy": torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64),
        **change,
    }
    built = objective(**{"loss_type": "grpo", **options})
    assert not is_row_local(built, tensors)
    _, _, (expected, _) = run(built, tensors)
    assert (closed_form(built, tensors) - expected).abs().max() > 1e-3


# Masks, weights and ratios by themselves.


def test_the_off_policy_mask_drops_only_bad_sequences_that_drifted():
    logprobs = torch.tensor([[-2.0, -2.0]]).expand(5, 2)
    sampling = logprobs + torch.tensor([[1.0], [1.0], [0.1], [1.0], [1.0]])
    sampling[4, 0] = math.nan
    mask = torch.tensor([[1.0, 1.0]] * 3 + [[0.0, 0.0], [1.0, 1.0]])
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0], [-1.0]])
    keep = off_policy_mask(logprobs, sampling, advantages, mask, threshold=0.5)
    # The last row's token without a sampler's log-prob counts as no drift: (0 + 1) / 2 is not above 0.5.
    assert keep.squeeze(1).tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_the_entropy_mask_ranks_counted_tokens_of_all_processes():
    entropy, mask = torch.rand(6, 5), ragged_mask(5, 4, 3, 5, 0, 1)
    entropy[:2] += 1  # so that a process that ranks only its own tokens is wrong
    whole = high_entropy_mask(entropy, mask, 0.7)
    assert whole.sum() == math.ceil(0.3 * mask.sum().item())
    parts = slice(0, 2), slice(2, 6)
    values = [entropy[rows][mask[rows].bool()] for rows in parts]
    found = [
        high_entropy_mask(entropy[rows], mask[rows], 0.7, gather=lambda mine, other=other: torch.cat([mine, other]))
        for rows, other in zip(parts, reversed(values), strict=True)
    ]
    assert torch.equal(torch.cat(found), whole)
    assert not whole[2:].any() and high_entropy_mask(entropy[2:], mask[2:], 0.7).any()


def test_the_quantile_gathers_even_where_this_process_counts_no_token():
    """Every process takes part in a collective, or all wait for ever."""
    called = []
    tensors = make(2, 3) | {"mask": torch.zeros(2, 3)}
    arguments = (tensors.pop("logprobs"), tensors.pop("advantages"), tensors.pop("mask"))
    grpo_loss(*arguments, everything_on("dapo"), gather=lambda x: called.append(x.shape) or x, **tensors)
    assert called == [(0,)]


def test_any_mask_but_0_is_a_1_for_ratios_and_entropies():
    tensors, mask = make(4, 6), ragged_mask(6, 3, 1, 4)
    old, sampling, entropy = (tensors[name] for name in ("old_logprobs", "sampling_logprobs", "entropy"))
    for mode, factor in itertools.product(SAMPLER_RATIO_MODES, (2, -0.5)):
        found = sampler_importance_ratio(old, sampling, mask * factor, mode)
        assert torch.equal(found, sampler_importance_ratio(old, sampling, mask, mode))
    assert torch.equal(high_entropy_mask(entropy, 2 * mask, 0.7), high_entropy_mask(entropy, mask, 0.7))


@pytest.mark.parametrize("mode", SAMPLER_RATIO_MODES)
def test_a_token_that_the_sampler_could_not_score_or_that_does_not_count_has_ratio_one(mode):
    old = torch.tensor([[-1.0, -2.0, -0.5]])
    sampling = torch.tensor([[math.nan, -2.0, 7.0]])
    ratio = sampler_importance_ratio(old, sampling, torch.tensor([[1, 1, 0]]), mode)
    assert ratio.tolist() == ([[1.0]] if mode.startswith("sequence") else [[1.0, 1.0, 1.0]])


@every_level
def test_vespo_weighs_an_on_policy_sequence_with_one(level):
    mask = ragged_mask(4, 2).double()
    zeros, advantages = torch.zeros_like(mask), torch.tensor([[1.0], [-1.0]])
    phi = vespo_weights(objective("vespo", importance_sampling_level=level), zeros, advantages, mask)
    assert phi.tolist() == [[1.0], [1.0]]


def test_adaptive_entropy_waits_for_a_measurement_and_then_follows_the_target():
    state = AdaptiveEntropy(coef=0.1, target=0.5, delta=0.05, coef_max=0.18)
    assert state.applied == 0.0
    state = state.after_step(entropy_sum=4.0, tokens=10)
    assert (state.applied, state.last_entropy) == (pytest.approx(0.15), 0.4)
    state = state.after_step(entropy_sum=5.0, tokens=10)  # exactly on the target counts as below
    assert state.applied == pytest.approx(0.18)
    state = state.after_step(entropy_sum=9.0, tokens=10)
    assert state.applied == 0.0 and state.coef == pytest.approx(0.13)
    for _ in range(9):
        state = state.after_step(entropy_sum=9.0, tokens=10)
    assert state.coef == 0.0
    assert state.after_step(entropy_sum=0.0, tokens=0).last_entropy == 0.0


# Bad input.

BAD_OBJECTIVES = {
    "loss type": ({"loss_type": "ppo"}, r"loss_type is 'ppo'; choose one of 'grpo', .*'vespo'"),
    "loss type's case": ({"loss_type": "DAPO"}, r"loss_type is 'DAPO'; choose one of"),
    "level": (
        {"importance_sampling_level": "batch"},
        "importance_sampling_level is 'batch'; choose one of 'token', 'seq",
    ),
    "quantile above 1": ({"top_entropy_quantile": 1.5}, r"top_entropy_quantile is 1.5; give a fraction in \[0, 1\]"),
    "quantile below 0": ({"top_entropy_quantile": -0.1}, "top_entropy_quantile is -0.1; give"),
    "quantile nan": ({"top_entropy_quantile": math.nan}, "top_entropy_quantile is nan; give"),
    "temperature 0": ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos is 0.0; give a number above 0"),
    "temperature below 0": ({"sapo_temperature_neg": -1.0}, "sapo_temperature_neg is -1.0; give a number above 0"),
    "temperature nan": ({"sapo_temperature_neg": math.nan}, "sapo_temperature_neg is nan; give"),
    "accumulation": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0; give .* at least 1"),
    "negative items": ({"num_items_in_batch": -3}, "num_items_in_batch is -3; give a count of tokens, or None"),
    "nan items": ({"num_items_in_batch": float("nan")}, "num_items_in_batch is nan"),
    "two items": (
        {"num_items_in_batch": torch.tensor([12, 3])},
        r"num_items_in_batch has shape \(2,\); it must be one",
    ),
    "processes": ({"num_processes": 0}, "num_processes is 0; give .* at least 1"),
    "steps per generation": (
        {"steps_per_generation": 0},
        "steps_per_generation is 0; give a whole .* at least 1, or None",
    ),
    "dr_grpo without a length": ({"loss_type": "dr_grpo"}, "divides by max_completion_length, which is None; give"),
    "dr_grpo with length 0": (
        {"loss_type": "dr_grpo", "max_completion_length": 0},
        "max_completion_length is 0; give a whole number of at least 1, or None",
    ),
    **{
        f"{name} {value}": ({name: value}, f"{name} is {value}; give a .*number")
        for name in (
            *("beta", "entropy_coef", "sapo_temperature_pos", "sapo_temperature_neg"),
            *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        )
        for value in (math.inf, math.nan)
    },
    **{
        f"{name} nan": ({name: math.nan}, f"{name} is nan; give a .*number")
        for name in ("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold")
    },
    "more than float32 holds": ({"beta": 1e300}, r"beta is 1e\+300; give a finite number, at most 3\.403e\+38"),
    **{
        f"{name} {value}": ({name: value}, f"{name} is {value}; give a whole number of at least 1")
        for name in ("max_completion_length", "steps_per_generation", "gradient_accumulation_steps", "num_processes")
        for value in (math.nan, math.inf, 1.5, -5)
    },
    "a length of too many tokens": (
        {"max_completion_length": 1 << 40},
        "max_completion_length is 1099511627776; give .* at most 2,147,483,647, or None",
    ),
    "negative items in a tensor": (
        {"num_items_in_batch": torch.tensor(-3.0)},
        r"num_items_in_batch is -3\.0; give a count",
    ),
    "nan items in a tensor": (
        {"num_items_in_batch": torch.tensor(math.nan)},
        "num_items_in_batch is nan; give a count",
    ),
    "endless items": ({"num_items_in_batch": torch.tensor(math.inf)}, "num_items_in_batch is inf; give a count"),
    "too many items": ({"num_items_in_batch": 1e60}, r"num_items_in_batch is 1e\+60; give a count"),
}

OF_A_WRONG_TYPE = {
    "training": ({"training": "False"}, "training is 'False'; it must be True or False"),
    "bias correction": ({"use_bias_correction_kl": "no"}, "use_bias_correction_kl is 'no'; it must be True or False"),
    **{
        f"{name} {value!r}": ({name: value}, f"{name} is a {type(value).__name__}; give a Python number")
        for name in (
            "max_completion_length",
            "steps_per_generation",
            "gradient_accumulation_steps",
            "num_processes",
            "beta",
        )
        for value in (True, "3", torch.tensor(3))
    },
    "complex items": ({"num_items_in_batch": torch.tensor(3j)}, "num_items_in_batch is torch.complex64; it must be"),
    "complex items elsewhere": (
        {"num_items_in_batch": torch.empty((), dtype=torch.complex64, device="meta")},
        "num_items_in_batch is torch.complex64; it must be",
    ),
    "items of 8 bit": (
        {"num_items_in_batch": torch.zeros((), dtype=torch.float8_e5m2)},
        "num_items_in_batch is torch.float8_e5m2; it must be",
    ),
    "sparse items": ({"num_items_in_batch": torch.ones(1).to_sparse()}, "num_items_in_batch is torch.sparse_coo; give"),
}


@pytest.mark.parametrize("case", [*BAD_OBJECTIVES, *OF_A_WRONG_TYPE])
def test_a_bad_objective_says_what_was_given_and_what_is_allowed(case):
    error = ValueError if case in BAD_OBJECTIVES else TypeError
    options, message = (BAD_OBJECTIVES | OF_A_WRONG_TYPE)[case]
    with pytest.raises(error, match=message):
        Objective(**options)


def test_an_item_count_on_a_device_is_not_waited_for():
    """A tensor without values, as one on its way is for the host."""
    items = torch.empty((), device="meta")
    assert Objective(num_items_in_batch=items).num_items_in_batch is items


@every_loss_type
def test_a_bound_that_is_infinite_is_none(loss_type):
    tensors = make(4, 6)
    unbounded = {"delta": math.inf, "off_policy_mask_threshold": math.inf, "max_completion_length": 16.0}
    found, *_ = run(objective(loss_type, epsilon_high=math.inf), tensors)
    assert found.isfinite()
    found, _, grads = run(Objective(loss_type, **unbounded), tensors)
    expected, _, expected_grads = run(objective(loss_type), tensors)
    assert torch.equal(found, expected) and all(map(torch.equal, grads, expected_grads))


def test_an_unknown_option_of_the_objective_is_an_error():
    with pytest.raises(TypeError, match="epsilon_low"):
        Objective(epsilon_low=0.2)


BAD_INPUT = {
    "log-probs 1d": ({"logprobs": torch.zeros(12)}, ValueError, r"logprobs is torch.float32 of shape \(12,\); give .*\[B, T\]"),
    "log-probs integer": (
        {"logprobs": torch.zeros(3, 4, dtype=torch.long)}, ValueError, "logprobs is torch.int64 .*give a float tensor",
    ),
    "mask": ({"mask": torch.ones(3, 5)}, ValueError, r"mask has shape \(3, 5\); with logprobs \(3, 4\) it must be \[3, 4\]"),
    "mask a row": ({"mask": torch.ones(4)}, ValueError, r"mask has shape \(4,\).*must be \[3, 4\]"),
    "advantages": ({"advantages": torch.zeros(4)}, ValueError, r"advantages has shape \(4,\).*\[3\] or \[3, "),
    "advantages transposed": ({"advantages": torch.zeros(4, 3)}, ValueError, r"advantages has shape \(4, 3\).*\[3\] or"),
    "old": ({"old_logprobs": torch.zeros(3)}, ValueError, r"old_logprobs has shape \(3,\).*must be \[3, 4\]"),
    "reference": ({"ref_logprobs": torch.zeros(4, 3)}, ValueError, r"ref_logprobs has shape \(4, 3\).*must be \[3, 4\]"),
    "sampling": ({"sampling_logprobs": torch.zeros(3, 1)}, ValueError, r"sampling_logprobs has shape \(3, 1\)"),
    "entropy": ({"entropy": torch.zeros(1, 4)}, ValueError, r"entropy has shape \(1, 4\).*must be \[3, 4\]"),
    "sampler ratio": ({"sampler_ratio": torch.ones(3)}, ValueError, r"sampler_ratio has shape \(3,\).*\[3, [14]\] or \[3"),
    "no reference": ({"ref_logprobs": None}, ValueError, "beta is 0.04.* needs ref_logprobs; give them, or set beta=0"),
    "no entropy": ({"entropy": None}, ValueError, "entropy_coef=0.02 and top_entropy_quantile=0.6 need .*give entropy="),
    "not a tensor": ({"advantages": [1.0, 2.0, 3.0]}, TypeError, "advantages is a list.*Tensor"),
    "no mask": ({"mask": None}, TypeError, "mask is a NoneType.*Tensor"),
    "elsewhere": (
        {"old_logprobs": torch.empty(3, 4, device="meta")}, ValueError, "old_logprobs is on meta and logprobs on cpu",
    ),
    "advantages elsewhere": (
        {"advantages": torch.empty(3, device="meta")}, ValueError, "advantages is on meta and logprobs on cpu",
    ),
    "auxiliary loss of no number": ({"aux_loss": "1"}, TypeError, "aux_loss is a str; give a Python number"),
    "auxiliary losses": ({"aux_loss": torch.ones(3)}, ValueError, r"aux_loss has shape \(3,\); it must be 0-d"),
    "auxiliary loss elsewhere": ({"aux_loss": torch.empty((), device="meta")}, ValueError, "aux_loss is on meta"),
    "coefficient": ({"aux_loss": 0, "router_aux_loss_coef": None}, TypeError, "router_aux_loss_coef is a NoneType; give a"),
    "coefficient nan": ({"aux_loss": 0, "router_aux_loss_coef": math.nan}, ValueError, "router_aux_loss_coef is nan; give a"),
    "coefficient inf": ({"aux_loss": 0, "router_aux_loss_coef": math.inf}, ValueError, "router_aux_loss_coef is inf; give a"),
    "gather": ({"gather": True}, TypeError, "gather is a bool; give a function of a tensor, or None"),
    "sparse log-probs": ({"logprobs": torch.zeros(3, 4).to_sparse()}, TypeError, "logprobs is torch.sparse_coo; give .*dense"),
    **{
        f"sparse {name}": ({name: torch.ones(3, 4).to_sparse()}, TypeError, f"{name} is torch.sparse_coo; give .*dense")
        for name in ("mask", "advantages", "old_logprobs", "ref_logprobs", "sampling_logprobs", "sampler_ratio", "entropy")
    },
    **{
        f"{name} of 8 bit": (
            {name: torch.ones(3, 4).to(torch.float8_e4m3fn)}, TypeError,
            f"{name} is torch.float8_e4m3fn; it must be .*bfloat16, float16, float32 or float64",
        )
        for name in ("logprobs", "mask", "advantages", "old_logprobs", "sampling_logprobs", "sampler_ratio", "entropy")
    },
    "complex mask": ({"mask": torch.ones(3, 4) + 0j}, TypeError, "mask is torch.complex64; it must be bool, an integer"),
    "old integer": ({"old_logprobs": torch.zeros(3, 4, dtype=torch.long)}, TypeError, "old_logprobs is torch.int64.*float"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_says_what_was_given_and_what_is_allowed(case):
    change, error, message = BAD_INPUT[case]
    tensors = make(3, 4, torch.float32) | {"mask": torch.ones(3, 4)} | change
    arguments = (tensors.pop("logprobs"), tensors.pop("advantages"), tensors.pop("mask"))
    with pytest.raises(error, match=message):
        grpo_loss(*arguments, everything_on("dapo"), **tensors)


def test_an_entropy_bonus_alone_or_a_quantile_alone_needs_the_entropy():
    tensors = make(3, 4) | {"entropy": None}
    arguments = (tensors.pop("logprobs"), tensors.pop("advantages"), tensors.pop("mask"))
    for options in ({"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}):
        with pytest.raises(ValueError, match=r"give entropy=\[B, T\], or leave both at their defaults"):
            grpo_loss(*arguments, objective("dapo", **options), **tensors)


def test_token_terms_without_phi_or_reference_say_so():
    logprobs, advantages = torch.zeros(3), torch.ones(3)
    with pytest.raises(ValueError, match="loss_type='vespo' needs phi"):
        token_terms(objective("vespo"), logprobs, advantages, logprobs)
    with pytest.raises(ValueError, match=r"beta is 0\.1.* needs ref_logprobs"):
        token_terms(objective("dapo", beta=0.1), logprobs, advantages, logprobs)


@pytest.mark.parametrize("mode", ["token", "sequence_clip", ""])
def test_an_unknown_sampler_ratio_mode_names_the_modes(mode):
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=rf"mode is '{mode}'; choose one of 'token_truncate', .*'sequence_mask'"):
        sampler_importance_ratio(zeros, zeros, zeros, mode)


BAD_RATIOS = {
    "no log-probs": ({"old_logprobs": None}, TypeError, "old_logprobs is a NoneType; give a torch.Tensor"),
    "no sampler": ({"sampling_logprobs": None}, TypeError, "sampling_logprobs is a NoneType; give a torch.Tensor"),
    "no mask": ({"mask": None}, TypeError, "mask is a NoneType; give a torch.Tensor"),
    "one row": ({"old_logprobs": torch.zeros(3)}, ValueError, r"old_logprobs is .* of shape \(3,\); give .*\[B, T\]"),
    "widths": (
        {"sampling_logprobs": torch.zeros(2, 1)}, ValueError,
        r"sampling_logprobs has shape \(2, 1\); with old_logprobs \(2, 3\) it must be \[2, 3\]",
    ),
    "mask a column": ({"mask": torch.ones(2, 1)}, ValueError, r"mask has shape \(2, 1\); with old_logprobs \(2, 3\)"),
    "whole log-probs": ({"sampling_logprobs": torch.zeros(2, 3).long()}, TypeError, "sampling_logprobs is torch.int64"),
    "sparse": ({"sampling_logprobs": torch.zeros(2, 3).to_sparse()}, TypeError, "sampling_logprobs is torch.sparse_coo"),
    "8 bit": ({"old_logprobs": torch.zeros(2, 3).to(torch.float8_e5m2)}, TypeError, "old_logprobs is torch.float8_e5m2"),
    "elsewhere": ({"mask": torch.ones(2, 3, device="meta")}, ValueError, "mask is on meta and old_logprobs on cpu"),
    "range": (
        {"clip_min": 2.0, "clip_max": 1.0}, ValueError, r"clip_min is 2\.0 and clip_max is 1\.0; clip_min may be at most clip",
    ),
    "nan": ({"clip_min": math.nan}, ValueError, "clip_min is nan; give a number"),
    "nan above": ({"clip_max": math.nan}, ValueError, "clip_max is nan; give a number"),
    "text": ({"clip_max": "3"}, TypeError, "clip_max is a str; give a Python number"),
}  # fmt: skip


@pytest.mark.parametrize("mode", SAMPLER_RATIO_MODES)
@pytest.mark.parametrize("case", BAD_RATIOS)
def test_a_bad_sampler_ratio_says_what_was_given_and_what_is_allowed(case, mode):
    change, error, message = BAD_RATIOS[case]
    zeros = torch.zeros(2, 3)
    arguments = {"old_logprobs": zeros, "sampling_logprobs": zeros, "mask": zeros + 1, "mode": mode}
    with pytest.raises(error, match=message):
        sampler_importance_ratio(**(arguments | change))


BAD_ADAPTIVE = {
    "coef": ({"coef": math.nan}, ValueError, "coef is nan; give a finite number"),
    "coef a tensor": ({"coef": torch.tensor(0.1)}, TypeError, "coef is a Tensor; give a Python number"),
    "delta": ({"delta": math.inf}, ValueError, "delta is inf; give a finite number"),
    "delta below 0": ({"delta": -0.1}, ValueError, r"delta is -0\.1; give a number of at least 0"),
    "target": ({"target": math.nan}, ValueError, "target is nan; give a number"),
    "bounds": (
        {"coef_min": 2.0},
        ValueError,
        r"coef_min is 2\.0 and coef_max is 1\.0; coef_min may be at most coef_max",
    ),
    "last": ({"last_entropy": None}, TypeError, "last_entropy is a NoneType; give a Python number"),
}


@pytest.mark.parametrize("case", BAD_ADAPTIVE)
def test_a_bad_adaptive_entropy_says_what_was_given_and_what_is_allowed(case):
    change, error, message = BAD_ADAPTIVE[case]
    with pytest.raises(error, match=message):
        AdaptiveEntropy(**{"coef": 0.1, **change})


def test_a_step_s_entropy_and_tokens_are_python_numbers_and_may_be_nan():
    with pytest.raises(TypeError, match="entropy_sum is a Tensor; give a Python number"):
        AdaptiveEntropy(0.1).after_step(*torch.ones(2))
    state = AdaptiveEntropy(0.1).after_step(math.nan, 3.0)
    assert math.isnan(state.last_entropy) and state.applied == 0.0 and state.coef == pytest.approx(0.095)


def test_metrics_refuse_what_gathers_nothing():
    _, stats, _ = run(objective("grpo"), make(2, 3))
    with pytest.raises(TypeError, match="gather is a bool; give a function of a tensor, or None"):
        stats.metrics(True)


def test_every_combination_of_shapes_that_is_allowed_is_taken():
    tensors = make(3, 4)
    arguments = tensors.pop("logprobs"), tensors.pop("mask")
    advantages, ratio = tensors.pop("advantages"), tensors.pop("sampler_ratio")
    per_row = advantages[:, 0].contiguous()
    losses = {}
    for (name, value), (ratio_name, sampler) in itertools.product(
        {"[B]": per_row, "[B, 1]": per_row.unsqueeze(1), "[B, T]": per_row.unsqueeze(1).expand(3, 4)}.items(),
        {"[B, 1]": ratio[:, :1], "[B, T]": ratio[:, :1].expand(3, 4)}.items(),
    ):
        losses[name, ratio_name], _ = grpo_loss(
            arguments[0], value, arguments[1], everything_on("dapo"), sampler_ratio=sampler, **tensors
        )
    first = losses["[B]", "[B, 1]"]
    for name, loss in losses.items():
        torch.testing.assert_close(loss, first, rtol=1e-12, atol=0, msg=str(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_largest_entropy_is_of_the_top_whatever_its_dtype(dtype):
    entropy, mask = torch.tensor([[0.1, 0.2, 0.3]], dtype=dtype), torch.ones(1, 3)
    assert high_entropy_mask(entropy, mask, 1.0).tolist() == [[False, False, True]]
    assert high_entropy_mask(entropy, mask, 0.5).tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    "aux_loss", [0, 0.5, torch.tensor(0.5), torch.tensor(1), torch.tensor(0.5, dtype=torch.bfloat16)]
)
def test_an_auxiliary_loss_may_be_a_number(aux_loss):
    tensors = make(2, 3)
    arguments = [tensors[name] for name in ("logprobs", "advantages", "mask")]
    plain, _ = grpo_loss(*arguments, Objective())
    assert grpo_loss(*arguments, Objective(), router_aux_loss_coef=None)[0] == plain
    found, _ = grpo_loss(*arguments, Objective(), aux_loss=aux_loss, router_aux_loss_coef=0.5)
    assert found.item() == pytest.approx(plain.item() + 0.5 * float(aux_loss))


def test_counts_may_be_numpy_s():
    options = Objective(loss_type="dr_grpo", max_completion_length=np.int64(8), steps_per_generation=np.int32(4))
    assert options.max_completion_length == 8
    with pytest.raises(ValueError, match="steps_per_generation is 0"):
        Objective(steps_per_generation=np.int64(0))


def test_a_count_without_a_value_is_not_looked_at():
    with FakeTensorMode():
        Objective(num_items_in_batch=torch.ones(()))
    counts = torch.tensor([2.0, 4.0])
    mask = torch.ones(1, 8)
    found = torch.func.vmap(lambda items: Objective(num_items_in_batch=items).batch_normaliser(mask))(counts)
    assert torch.equal(found, counts)
