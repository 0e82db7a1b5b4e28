"""Claims about `linear_grpo_loss`: what a full softmax and `grpo_loss` give, in fewer products and without the logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    HEADS,
    LENGTHS,
    VOCABULARY,
    WIDTH,
    Result,
    Rows,
    cases_of_16_bit,
    check_16_bit,
    full_softmax,
    fused,
    make,
    objective,
)
from torch import Tensor
from truth import relative_error

import fastgrpo.kernels.reference as reference
import fastgrpo.ops as ops
from fastgrpo import GRPOStats, Objective, linear_grpo_loss, linear_logprob
from fastgrpo.objective import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES

every_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)
every_level = pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
policy = pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])


def assert_equal(found: Result, truth: Result, tolerance: float) -> None:
    error = (found.loss - truth.loss).abs().item() / (1 + truth.loss.abs().item())
    assert error <= tolerance, f"loss error {error:.2e}"
    for name, ours, exact in zip(("hidden", "weight", "bias"), found.grads, truth.grads, strict=True):
        if exact is None:
            assert ours is None, f"an unwanted gradient of {name}"
            continue
        error = ((ours.double() - exact).abs() / (1 + exact.abs())).max().item() if exact.numel() else 0.0
        assert ours.shape == exact.shape and error <= tolerance, f"gradient of {name}: worst error {error:.2e}"
    assert_equal_stats(found.stats, truth.stats, tolerance)


def assert_equal_stats(found: GRPOStats, truth: GRPOStats, tolerance: float) -> None:
    assert set(found.sums) == set(truth.sums)
    pairs = {
        **{f"sum {name}": (found.sums[name], truth.sums[name]) for name in truth.sums},
        **{
            name: (getattr(found, name), getattr(truth, name))
            for name in ("logprobs", "entropy", "policy_loss", "low_clip", "high_clip", "entropy_bonus")
        },
    }
    for name, (ours, exact) in pairs.items():
        if exact is None:
            assert ours is None, name
            continue
        assert not ours.requires_grad, name
        torch.testing.assert_close(
            ours.double(),
            exact.double(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def products(run: Callable[[], object], rows: Rows) -> float:
    """Products of a row with all of the weight that `run` does: `[R, H] @ [H, V]`, `[R, V] @ [V, H]`, `[V, R] @ [R, H]`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run()
    total = 0
    for event in profile.events():
        # mm(a, b, out), addmm_(sum, a, b)
        operands = {"aten::mm": slice(0, 2), "aten::addmm_": slice(1, 3), "aten::addmm": slice(1, 3)}.get(event.name)
        if operands is not None:
            (m, k), (k_again, n) = event.input_shapes[operands]
            assert k == k_again
            total += m * k * n
    return total / rows.weight.numel()


# Exactness.


@pytest.mark.parametrize("head", HEADS)
@policy
@every_level
@every_loss_type
def test_equals_full_softmax(loss_type, level, on_policy, head):
    rows = make(on_policy=on_policy, **HEADS[head])
    for beta in (0.0, 0.04):
        options = objective(loss_type, level, beta=beta)
        assert_equal(fused(rows, options, num_chunks=3), full_softmax(rows, options), 1e-10)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "KL without bias correction": ({"beta": 0.04, "use_bias_correction_kl": False}, {}),
    "delta": ({"delta": 1.1}, {}),
    "entropy bonus": ({"entropy_coef": 0.03, "beta": 0.04}, {}),
    "entropy bonus alone": ({"entropy_coef": 0.03}, {}),
    "off-policy mask": ({"off_policy_mask_threshold": 0.05}, {}),
    "off-policy mask by the sampler": ({"off_policy_mask_threshold": 0.05}, {"leave_out": ("sampler_ratio", "loss_mask")}),
    "entropy quantile": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.03}, {}),
    "sampler ratio a sequence": ({}, {"leave_out": ("loss_mask",)}),
    "sampler ratio a row": ({}, {"leave_out": ("loss_mask",), "per_row": ("sampler_ratio",)}),
    "advantages a row": ({}, {"per_row": ("advantages",)}),
    "loss mask": ({"beta": 0.04}, {"leave_out": ("sampler_ratio",)}),
    "loss mask, sampler ratio and advantages a row": (
        {"beta": 0.04, "entropy_coef": 0.03}, {"leave_out": (), "per_row": ("sampler_ratio", "advantages")},
    ),
    "accumulation": ({"gradient_accumulation_steps": 4, "steps_per_generation": 8, "entropy_coef": 0.03}, {}),
    "items of the whole batch": ({"num_items_in_batch": 100, "num_processes": 2, "gradient_accumulation_steps": 4}, {}),
    "evaluation": ({"gradient_accumulation_steps": 4, "entropy_coef": 0.03, "training": False}, {}),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@every_loss_type
def test_every_option_equals_full_softmax(loss_type, option):
    options, data = OPTIONS[option]
    for level, on_policy in itertools.product(IMPORTANCE_SAMPLING_LEVELS, (True, False)):
        trains = (level == "token") == on_policy
        rows = make(on_policy=on_policy, trains=(trains, False), **data)
        built = objective(loss_type, level, **options)
        assert_equal(fused(rows, built), full_softmax(rows, built), 1e-10)


@settings(max_examples=100)
@given(data=st.data())
def test_any_combination_equals_full_softmax(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31), label="seed"))
    optional = ("sampler_ratio", "sampling_logprobs", "loss_mask")
    rows = make(
        lengths=tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=5), label="lengths")),
        vocabulary=draw(st.sampled_from([1, 2, 33]), label="vocabulary"),
        on_policy=draw(st.booleans(), label="on-policy"),
        per_row=tuple(name for name in ("advantages", "sampler_ratio") if draw(st.booleans(), label=name)),
        leave_out=tuple(name for name in optional if draw(st.booleans(), label=f"no {name}")),
        **HEADS[draw(st.sampled_from(list(HEADS)), label="head")],
    )
    outside = torch.rand(len(rows.targets)) < draw(st.sampled_from([0.0, 0.3]), label="outside")
    rows.targets[outside] = -100
    options = objective(
        draw(st.sampled_from(LOSS_TYPES)),
        draw(st.sampled_from(IMPORTANCE_SAMPLING_LEVELS)),
        beta=draw(st.sampled_from([0.0, 0.04])),
        use_bias_correction_kl=draw(st.booleans()),
        delta=draw(st.sampled_from([None, 1.1])),
        epsilon_high=draw(st.sampled_from([None, 0.28, 5.0])),
        entropy_coef=draw(st.sampled_from([0.0, 0.03])),
        off_policy_mask_threshold=draw(st.sampled_from([None, None, 0.05])),
        top_entropy_quantile=draw(st.sampled_from([1.0, 1.0, 0.4])),
        gradient_accumulation_steps=draw(st.sampled_from([1, 4])),
    )
    num_chunks = draw(st.sampled_from([-1, 1, 3]), label="num_chunks")
    assert_equal(fused(rows, options, num_chunks=num_chunks), full_softmax(rows, options), 1e-10)


@pytest.mark.parametrize("head", ["frozen", "trained, bias", "trained, softcap, temperature"])
@policy
@every_level
@every_loss_type
def test_float32_is_exact_to_rounding(loss_type, level, on_policy, head):
    rows = make(dtype=torch.float32, vocabulary=257, on_policy=on_policy, **HEADS[head])
    options = objective(loss_type, level, beta=0.04)
    found, truth = fused(rows, options), full_softmax(rows, options)
    assert found.loss.dtype == torch.float32
    assert_equal(found, truth, 1e-5)


@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_loss_type
def test_16_bit_inputs_lose_nothing_but_the_last_rounding(loss_type, dtype, head):
    """Against float64 of the same 16-bit inputs, with the bounds that a kernel must keep."""
    rows = make(dtype=dtype, vocabulary=257, on_policy=True, **HEADS[head])
    check_16_bit(rows, objective(loss_type, beta=0.04), "cpu", bound=1e-5)


@settings(max_examples=25)
@given(cases_of_16_bit())
def test_16_bit_equals_float64_at_odd_shapes(case):
    rows, options, scale = case
    check_16_bit(rows, options, "cpu", scale, odd=True)


def test_compiled_it_breaks_where_segments_are_read_and_gives_the_same():
    """What segments hold decides shapes and what is refused, so `fullgraph=True` cannot be, as it can for `linear_logprob`."""
    rows = make(dtype=torch.float32, on_policy=True, trains=(True, False))

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_grpo_loss(
            hidden, weight, rows.targets, rows.segments, objective=objective("dapo"), **rows.values
        )[0]

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (rows.hidden, rows.weight)]
        value = function(*leaves)
        value.backward()
        results.append((value, *(leaf.grad for leaf in leaves)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
@pytest.mark.parametrize(("level", "on_policy"), [("token", True), ("sequence", False)])
def test_a_loss_scaler_keeps_small_fp16_gradients_alive(level, on_policy, head):
    """Gradients below what fp16 resolves are ordinary ones once scaled, if nothing rounds them before."""
    rows = make(dtype=torch.float16, vocabulary=257, on_policy=on_policy, **HEADS[head])
    options = objective("dapo", level, beta=0.04, num_items_in_batch=10**7)
    found, truth = fused(rows, options, scale=2.0**16), full_softmax(rows, options)
    for ours, exact in zip(found.grads, truth.grads, strict=True):
        if exact is not None:
            error = relative_error(ours, exact * 2.0**16)
            assert error <= 3e-3, f"relative gradient error {error:.2e}"


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("level", "on_policy"), [("token", True), ("sequence", False)])
@every_loss_type
def test_autocast_rounds_operands_and_fp32_masters_get_fp32_gradients(loss_type, level, on_policy, trains):
    rows = make(dtype=torch.float32, on_policy=on_policy, trains=(trains, False))
    rounded = replace(rows, hidden=rows.hidden.bfloat16(), weight=rows.weight.bfloat16())
    options = objective(loss_type, level, beta=0.04)
    with torch.autocast("cpu", torch.bfloat16):
        found = fused(rows, options)
    assert all(grad.dtype == torch.float32 for grad in found.grads if grad is not None)
    assert_equal(found, full_softmax(rounded, options), 1e-5)


@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
@policy
@every_level
@every_loss_type
def test_three_times_the_loss_gives_three_times_the_gradient(loss_type, level, on_policy, head):
    rows = make(on_policy=on_policy, **HEADS[head])
    options = objective(loss_type, level, beta=0.04, entropy_coef=0.03)
    once, thrice = fused(rows, options), fused(rows, options, scale=3.0)
    for one, three in zip(once.grads, thrice.grads, strict=True):
        if one is not None:
            assert one.abs().max() > 0
            torch.testing.assert_close(three, 3 * one, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
@every_loss_type
def test_on_policy_a_sequence_level_ratio_equals_a_token_level_one(loss_type, head):
    rows = make(on_policy=True, **HEADS[head])
    token, sequence = (
        fused(rows, objective(loss_type, level, epsilon_high=1.0 if loss_type == "cispo" else None))
        for level in ("token", "sequence")
    )
    assert torch.equal(sequence.loss, token.loss)
    for one, other in zip(sequence.grads, token.grads, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@every_level
@every_loss_type
def test_old_log_probs_from_the_same_head_give_a_ratio_of_exactly_one(loss_type, level):
    """Scored by `linear_logprob` with the same chunks: a clip range of width 0 clips nothing."""
    rows = make(dtype=torch.float32, on_policy=True)
    with torch.no_grad():
        old, _ = linear_logprob(rows.hidden, rows.weight, rows.targets, num_chunks=1, return_entropy=True)
        plain, _ = linear_logprob(rows.hidden, rows.weight, rows.targets, num_chunks=1)
    assert torch.equal(old, plain)
    rows.values["old_logprobs"] = old
    options = objective(loss_type, level, epsilon=0.0, epsilon_high=1.0 if loss_type == "cispo" else 0.0)
    found = fused(rows, options, num_chunks=1)
    assert torch.equal(found.stats.logprobs, old)
    assert all(value == 0.0 for name, value in found.stats.metrics().items() if "clip" in name)


@policy
@every_level
def test_results_do_not_depend_on_the_number_of_chunks(level, on_policy):
    rows = make(dtype=torch.float32, on_policy=on_policy, trains=(True, False))
    options = objective("grpo", level, beta=0.04)
    first = fused(rows, options, num_chunks=1)
    for num_chunks in (2, 5, 17, 100):
        found = fused(rows, options, num_chunks=num_chunks)
        assert (found.stats.logprobs - first.stats.logprobs).abs().max() <= 1e-5
        for ours, once in zip(found.grads[:2], first.grads[:2], strict=True):
            assert relative_error(ours, once) <= 5e-4


@pytest.mark.parametrize("trains", [False, True])
@policy
@every_level
def test_three_runs_give_the_same_bits(level, on_policy, trains):
    rows = make(dtype=torch.float32, on_policy=on_policy, trains=(trains, False))
    runs = [fused(rows, objective("dapo", level, beta=0.04), num_chunks=3) for _ in range(3)]
    for run in runs[1:]:
        assert torch.equal(run.loss, runs[0].loss)
        for grad, first in zip(run.grads, runs[0].grads, strict=True):
            assert (grad is None and first is None) or torch.equal(grad, first)


# Which route is taken, counted in products.

COUNT = sum(LENGTHS)

ROUTES = {
    # (on-policy, options, what else): products a row of a frozen head, of a trained one
    "token level on-policy": (True, {}, {}, 2, 3),
    "token level off-policy": (False, {}, {}, 2, 3),
    "token level with KL and entropy bonus": (False, {"beta": 0.04, "entropy_coef": 0.03}, {}, 2, 3),
    "sequence level on-policy": (True, {"importance_sampling_level": "sequence"}, {}, 2, 3),
    "vespo on-policy": (True, {"loss_type": "vespo"}, {}, 2, 3),
    "sequence level off-policy": (False, {"importance_sampling_level": "sequence"}, {}, 2, 4),
    "sequence level on-policy, advantages a row": (
        True, {"importance_sampling_level": "sequence"}, {"per_row": ("advantages",)}, 2, 4,
    ),
    "sequence level on-policy, KL corrected": (True, {"importance_sampling_level": "sequence", "beta": 0.04}, {}, 2, 4),
    "sequence level on-policy, KL not corrected": (
        True, {"importance_sampling_level": "sequence", "beta": 0.04, "use_bias_correction_kl": False}, {}, 2, 3,
    ),
    "vespo off-policy": (False, {"loss_type": "vespo"}, {}, 2, 4),
    "entropy quantile": (True, {"top_entropy_quantile": 1e-9, "beta": 0.04}, {}, 2, 4),
    "off-policy mask": (True, {"off_policy_mask_threshold": 9.0}, {}, 2, 4),
    "sequence level off-policy, entropy bonus": (
        False, {"importance_sampling_level": "sequence", "entropy_coef": 0.03}, {}, 3, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_a_row_local_objective_takes_one_pass_and_another_recomputes(route, num_chunks):
    on_policy, options, data, frozen, trained = ROUTES[route]
    # A ratio inside the clip range everywhere: a clipped row has no gradient, and is not recomputed.
    built = Objective(**{"loss_type": "grpo", "epsilon": 0.9, "epsilon_high": 9.0, **options})
    for trains, expected in ((False, frozen), (True, trained)):
        rows = make(on_policy=on_policy, trains=(trains, False), **data)
        run = partial(fused, rows, built, num_chunks=num_chunks)
        assert products(run, rows) == expected * COUNT


@pytest.mark.parametrize(("trains", "gradients"), [(False, 1), (True, 2)])
@every_loss_type
def test_rows_of_zero_advantage_cost_no_gradient_product(loss_type, trains, gradients):
    rows, dead = with_dead_rows(loss_type, trains)
    alive = COUNT - int(dead.sum())
    built = objective(loss_type)
    found = []
    assert products(lambda: found.append(fused(rows, built, num_chunks=4)), rows) == COUNT + gradients * alive
    assert_equal(found[0], full_softmax(rows, built), 1e-10)
    assert found[0].grads[0][dead].eq(0).all()


@pytest.mark.parametrize("options", [{"beta": 0.04}, {"entropy_coef": 0.03}], ids=["KL", "entropy bonus"])
@pytest.mark.parametrize(("trains", "gradients"), [(False, 1), (True, 2)])
def test_rows_of_zero_advantage_have_their_gradient_where_kl_or_bonus_need_it(trains, gradients, options):
    rows, dead = with_dead_rows("grpo", trains)
    found = []
    run = partial(fused, rows, objective("grpo", **options))
    assert products(lambda: found.append(run()), rows) == (1 + gradients) * COUNT
    assert found[0].grads[0][dead].abs().max() > 0


def with_dead_rows(loss_type: str, trains: bool) -> tuple[Rows, Tensor]:
    rows = make(trains=(trains, False), per_row=("advantages",), on_policy=loss_type == "vespo")
    dead = torch.arange(COUNT) % 3 == 0
    rows.values["advantages"][dead] = 0.0
    return rows, dead


def test_a_batch_of_zero_advantage_is_only_scored():
    rows = make(trains=(True, False))
    rows.values["advantages"].zero_()
    found = []
    assert products(lambda: found.append(fused(rows, objective("dapo"))), rows) == COUNT
    assert all(grad.eq(0).all() for grad in found[0].grads[:2])


@pytest.mark.parametrize("trains", [False, True])
@policy
@every_level
def test_rows_that_do_not_count_are_never_computed(level, on_policy, trains):
    rows = make(on_policy=on_policy, trains=(trains, False), leave_out=("sampler_ratio", "sampling_logprobs"))
    rows.values["loss_mask"][:] = True
    rows.values["loss_mask"][[0, 5]] = False
    rows.targets[[7, 8]] = torch.tensor([-100, VOCABULARY])
    built = objective("grpo", level, epsilon=0.9, epsilon_high=9.0)
    per_row = (3 if level == "token" or on_policy else 4) if trains else 2
    assert products(partial(fused, rows, built), rows) == per_row * (COUNT - 4)


@policy
@every_level
@every_loss_type
def test_without_grad_there_is_one_product_a_row(loss_type, level, on_policy):
    rows = make(on_policy=on_policy, trains=(True, False))
    built = objective(loss_type, level, beta=0.04)
    truth = full_softmax(rows, built)

    def score() -> None:
        with torch.no_grad():
            loss, stats = linear_grpo_loss(
                rows.hidden, rows.weight, rows.targets, rows.segments, objective=built, **rows.values
            )
        assert not loss.requires_grad
        torch.testing.assert_close(loss, truth.loss, rtol=1e-10, atol=1e-12)
        assert_equal_stats(stats, truth.stats, 1e-10)

    assert products(score, rows) == COUNT


def test_a_frozen_backbone_pays_for_the_weight_only():
    rows = make()
    weight = rows.weight.clone().requires_grad_()

    def run() -> None:
        loss, _ = linear_grpo_loss(
            rows.hidden, weight, rows.targets, rows.segments, objective=objective("dapo"), **rows.values
        )
        loss.backward()

    assert products(run, rows) == 2 * COUNT
    exact = full_softmax(replace(rows, trains=(True, False)), objective("dapo"))
    torch.testing.assert_close(weight.grad, exact.grads[1], rtol=1e-10, atol=1e-12)


# Edges.


@policy
@every_level
@every_loss_type
def test_what_a_sequence_without_rows_that_count_holds_does_no_harm(loss_type, level, on_policy):
    """Its advantage and its sampler ratio."""
    rows = make(on_policy=on_policy, leave_out=())
    sequence = max(range(len(LENGTHS)), key=LENGTHS.__getitem__)
    first, end = rows.segments[sequence : sequence + 2].tolist()
    rows.values["loss_mask"][first:end] = False
    clean = fused(rows, objective(loss_type, level, beta=0.04))
    assert clean.loss.isfinite()
    for name, poison in itertools.product(("advantages", "sampler_ratio"), (math.nan, math.inf, -math.inf)):
        value = rows.values[name].clone()
        value[sequence] = poison
        found = fused(replace(rows, values={**rows.values, name: value}), objective(loss_type, level, beta=0.04))
        assert torch.equal(found.loss, clean.loss), (name, poison)
        assert torch.equal(found.grads[0], clean.grads[0]), (name, poison)


@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
@policy
@every_level
@every_loss_type
def test_what_a_masked_row_holds_does_no_harm(loss_type, level, on_policy, head):
    rows = make(on_policy=on_policy, per_row=("advantages", "sampler_ratio"), leave_out=(), **HEADS[head])
    masked = ~rows.values["loss_mask"]
    assert masked.any() and not masked.all()
    options = objective(
        loss_type, level, beta=0.04, entropy_coef=0.03, off_policy_mask_threshold=None if level == "token" else 0.05
    )
    clean = fused(rows, options)
    for poison in (math.nan, 1e4, -1e4, math.inf):
        values = {
            name: value if value is None or name == "loss_mask" else value.masked_fill(masked, poison)
            for name, value in rows.values.items()
        }
        targets = rows.targets.masked_fill(masked, 10**9)
        hidden = rows.hidden.masked_fill(masked.unsqueeze(1), poison)
        found = fused(replace(rows, hidden=hidden, targets=targets, values=values), options)
        assert torch.equal(found.loss, clean.loss)
        assert found.stats.metrics() == clean.stats.metrics()
        for ours, exact in zip(found.grads, clean.grads, strict=True):
            assert (ours is None and exact is None) or torch.equal(ours, exact)
        assert found.grads[0][masked].eq(0).all()


@pytest.mark.parametrize("trains", [False, True])
@every_loss_type
def test_a_nan_row_that_counts_stays_alone_in_the_gradient_of_hidden(loss_type, trains):
    rows = make(trains=(trains, False), on_policy=loss_type == "vespo")
    clean = fused(rows, objective(loss_type))
    rows.hidden[6, 2] = math.nan
    found = fused(rows, objective(loss_type))
    assert found.loss.isnan() and found.stats.logprobs[6].isnan()
    others = torch.arange(COUNT) != 6
    assert torch.equal(found.stats.logprobs[others], clean.stats.logprobs[others])
    assert torch.equal(found.grads[0][others], clean.grads[0][others])
    assert found.grads[0][6].isnan().all()


@policy
@every_level
@every_loss_type
def test_targets_out_of_range_do_not_count(loss_type, level, on_policy):
    rows = make(on_policy=on_policy, trains=(True, False))
    rows.targets[[0, 4, 10, 11]] = torch.tensor([-1, -100, VOCABULARY, 10**12])
    options = objective(loss_type, level, beta=0.04)
    found = fused(rows, options)
    assert_equal(found, full_softmax(rows, options), 1e-10)
    assert found.stats.logprobs[[0, 4, 10, 11]].eq(0).all() and found.grads[0][[0, 4, 10, 11]].eq(0).all()


@pytest.mark.parametrize("lengths", [(3, 5, 2), (0, 3, 5, 2), (3, 5, 2, 0), (3, 0, 0, 5, 2), (0, 10), (10,)])
@policy
@every_level
@every_loss_type
def test_segments_may_be_empty_anywhere(loss_type, level, on_policy, lengths):
    rows = make(lengths, on_policy=on_policy, trains=(True, False))
    options = objective(loss_type, level, beta=0.04)
    assert_equal(fused(rows, options), full_softmax(rows, options), 1e-10)


@every_loss_type
def test_the_advantage_of_an_empty_sequence_does_no_harm(loss_type):
    for level, on_policy in itertools.product(IMPORTANCE_SAMPLING_LEVELS, (True, False)):
        rows = make(on_policy=on_policy)
        options = objective(loss_type, level, beta=0.04)
        clean = fused(rows, options)
        rows.values["advantages"][[1, 5]] = torch.tensor([1e4, -1e4], dtype=torch.float64)
        found = fused(rows, options)
        assert torch.equal(found.loss, clean.loss) and torch.equal(found.grads[0], clean.grads[0])
        assert found.stats.policy_loss == clean.stats.policy_loss


@policy
@every_level
@every_loss_type
def test_sequences_of_one_token_take_values_a_row_or_a_sequence_alike(loss_type, level, on_policy):
    rows = make((1,) * 9, on_policy=on_policy, trains=(True, False), leave_out=("sampling_logprobs", "loss_mask"))
    options = objective(loss_type, level, beta=0.04)
    assert_equal(fused(rows, options), full_softmax(rows, options), 1e-10)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 257])
@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
def test_any_vocabulary_size_is_taken(vocabulary, head):
    rows = make(vocabulary=vocabulary, **HEADS[head])
    assert_equal(fused(rows, objective("dapo", beta=0.04)), full_softmax(rows, objective("dapo", beta=0.04)), 1e-10)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
@policy
@every_level
@every_loss_type
def test_no_row_at_all_gives_a_differentiable_zero(loss_type, level, on_policy, head, lengths):
    rows = make(lengths, on_policy=on_policy, **HEADS[head])
    for options in (objective(loss_type, level, beta=0.04), objective(loss_type, level, entropy_coef=0.03)):
        found = fused(rows, options)
        assert found.loss == 0
        assert found.grads[0].shape == (0, WIDTH)
        assert all(grad is None or grad.eq(0).all() for grad in found.grads)
        assert found.stats.metrics()["policy_loss"] == 0


@pytest.mark.parametrize("head", ["frozen", "trained, bias"])
@policy
@every_level
@every_loss_type
def test_a_micro_batch_whose_rows_are_all_masked_gives_a_differentiable_zero(loss_type, level, on_policy, head):
    rows = make(on_policy=on_policy, leave_out=("sampler_ratio", "sampling_logprobs"), **HEADS[head])
    rows.values["loss_mask"][:] = False
    rows.hidden[:] = math.nan
    found = fused(rows, objective(loss_type, level, beta=0.04, entropy_coef=0.03))
    assert found.loss == 0
    assert all(grad is None or grad.eq(0).all() for grad in found.grads)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_the_loss_mask_may_have_any_dtype(dtype):
    rows = make(leave_out=("sampler_ratio", "sampling_logprobs"))
    options = objective("dapo")
    expected = fused(rows, options)
    rows.values["loss_mask"] = rows.values["loss_mask"].to(dtype)
    assert fused(rows, options).loss == expected.loss


def test_int32_targets_int64_segments_and_strided_hidden_are_taken():
    rows = make()
    options = objective("dapo")
    expected = fused(rows, options).loss
    wide = torch.zeros(COUNT, 2 * WIDTH, dtype=torch.float64)
    wide[:, ::2] = rows.hidden
    loss, _ = linear_grpo_loss(
        wide[:, ::2], rows.weight, rows.targets.int(), rows.segments.long(), objective=options, **rows.values
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@every_level
def test_hidden_states_from_inference_mode_train_a_head(level):
    with torch.inference_mode():
        rows = make(LENGTHS, torch.float32, on_policy=False, trains=(True, False))
    results = []
    for of in (lambda x: x, torch.clone):
        weight, values = (
            rows.weight.clone().requires_grad_(),
            {k: v if v is None else v.clone() for k, v in rows.values.items()},
        )
        offsets = torch.tensor([0, *itertools.accumulate(rows.lengths)])
        loss, _ = linear_grpo_loss(
            of(rows.hidden), weight, of(rows.targets), offsets, objective=objective("grpo", level), **values
        )
        loss.backward()
        results.append(weight.grad)
    assert torch.equal(*results)


def test_inputs_are_left_as_they_are():
    rows = make(on_policy=False, per_row=("advantages", "sampler_ratio"), leave_out=(), **HEADS["trained, bias"])
    before = [x.clone() for x in (rows.hidden, rows.weight, rows.targets, *rows.values.values())]
    fused(rows, objective("grpo", beta=0.04))
    fused(rows, objective("grpo", "sequence", beta=0.04))
    after = (rows.hidden, rows.weight, rows.targets, *rows.values.values())
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("trains", [False, True])
def test_the_one_pass_op_passes_opcheck(loss_type, trains):
    count, vocabulary, width = 6, 11, 4
    hidden = torch.randn(count, width, requires_grad=True)
    weight, bias = torch.randn(vocabulary, width, requires_grad=trains), torch.randn(vocabulary, requires_grad=trains)
    targets = torch.randint(-1, vocabulary, (count,))
    per_row = [torch.rand(count) for _ in range(7)]
    constants = ops.objective_constants(objective(loss_type, beta=0.04, delta=4.0))
    found = (targets >= 0).nonzero().squeeze(1)
    lists = (found, torch.empty(0, dtype=torch.long))
    for rows_and_others in ((), lists, (*lists, torch.tensor([len(found)]))):
        torch.library.opcheck(
            ops.linear_grpo_op,
            (
                hidden, weight, targets, bias, *per_row, 0.9, 1.1, 20.0, 4, torch.float32, loss_type, constants,
                True, True, trains, trains, *rows_and_others,
            ),
        )  # fmt: skip


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (False, False, False)])
def test_the_one_pass_op_takes_the_rows_it_would_find(needs):
    hidden, weight = torch.randn(6, 4), torch.randn(11, 4)
    targets, advantages = torch.tensor([3, -1, 5, 10, 0, 11]), torch.tensor([1.0, 2.0, 0.0, -1.0, 0.0, 1.0])
    head = hidden, weight, targets, None, advantages, None, None, None, None, torch.full((6,), 0.25), None
    options = 1.0, 1.0, None, 2, torch.float32, "grpo", ops.objective_constants(objective("grpo")), True, *needs
    found = ops.linear_grpo_op(*head, *options)
    wanted, others = ([0, 3], [2, 4]) if any(needs) else ([0, 2, 3, 4], [])
    lists = torch.tensor(wanted), torch.tensor(others, dtype=torch.long)
    given = ops.linear_grpo_op(*head, *options, *lists)
    assert found[0] != 0 and all(map(torch.equal, found, given))
    # As a kernel leaves them: what is behind the end of a list was never written.
    uncut = (torch.nn.functional.pad(x, (0, 6 - len(x)), value=1 << 40) for x in lists)
    counts = torch.tensor([len(wanted) | len(others) << 32])
    assert all(map(torch.equal, found, ops.linear_grpo_op(*head, *options, *uncut, counts)))
    for missing in ((lists[0],), (None, None, counts)):
        with pytest.raises(ValueError, match="rows and others go together"):
            ops.linear_grpo_op(*head, *options, *missing)
    with pytest.raises(ValueError, match="segments do not cover the rows"):
        ops.linear_grpo_op(*head, *options, *lists, torch.tensor([-1]))


@pytest.mark.filterwarnings("error")
def test_segments_may_have_gaps_in_memory():
    hidden, weight, targets = torch.randn(12, 4), torch.randn(7, 4), torch.arange(12) % 7
    segments, advantages = torch.tensor([0, 9, 4, 9, 12, 9])[::2], torch.tensor([1.0, -1.0])
    losses = (
        linear_grpo_loss(hidden, weight, targets, x, advantages, Objective())[0] for x in (segments, segments.clone())
    )
    assert torch.equal(*losses)


def test_the_objective_survives_the_way_through_the_op():
    """What the op rebuilds from numbers has every option that a token's loss depends on."""
    options = objective(
        "sapo",
        epsilon=0.1,
        epsilon_high=0.3,
        delta=2.0,
        beta=0.5,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.5,
        sapo_temperature_neg=0.5,
    )
    for before in (options, replace(options, delta=None, use_bias_correction_kl=True, loss_type="grpo")):
        after = ops.objective_from_constants(before.loss_type, ops.objective_constants(before))
        assert replace(after, max_completion_length=16) == before


# Bad input.

BAD_INPUT = {
    "hidden 3d": ({"hidden": torch.randn(2, 2, 8)}, ValueError, r"hidden has shape \(2, 2, 8\).*\[N, H\].*reshape"),
    "weight": ({"weight": torch.randn(5, 7)}, ValueError, r"weight has shape \(5, 7\).*\[V, 8\]"),
    "targets": ({"targets": torch.zeros(3, dtype=torch.long)}, ValueError, r"targets has shape \(3,\).*\[4\]"),
    "targets float": ({"targets": torch.zeros(4)}, TypeError, "targets is torch.float32.*int64"),
    "hidden integer": ({"hidden": torch.zeros(4, 8, dtype=torch.long)}, TypeError, "hidden is torch.int64.*float32"),
    "bias": ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\).*\[5\]"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature is 0.0.*above 0"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0.*None"),
    "chunk_bytes": ({"chunk_bytes": 0}, ValueError, "chunk_bytes is 0.*at least 1"),
    "num_chunks": ({"num_chunks": 0}, ValueError, "num_chunks is 0.*-1"),
    "segments float": ({"segments": torch.tensor([0.0, 4.0])}, ValueError, r"segments is torch.float32.*give \[B \+ 1\] int32"),
    "segments 2d": ({"segments": torch.tensor([[0, 4]])}, ValueError, r"segments is .* of shape \(1, 2\); give \[B \+ 1\]"),
    "segments empty": ({"segments": torch.zeros(0, dtype=torch.int32)}, ValueError, r"segments is .* of shape \(0,\); give"),
    "segments start": ({"segments": torch.tensor([1, 2, 4])}, ValueError, "segments runs from 1 to 4; it must start at 0"),
    "segments end": ({"segments": torch.tensor([0, 1, 3])}, ValueError, "segments runs from 0 to 3; .* end at the 4 rows"),
    "segments fall": (
        {"segments": torch.tensor([0, 3, 2, 4]), "advantages": torch.zeros(3)},
        ValueError,
        "must start at 0, never fall, and end at the 4",
    ),
    "advantages": ({"advantages": torch.zeros(3)}, ValueError, r"advantages has shape \(3,\); it must be \[2\] or \[4\]"),
    "advantages 2d": ({"advantages": torch.zeros(2, 2)}, ValueError, r"advantages has shape \(2, 2\); it must be \[2\] or"),
    "advantages integer": ({"advantages": torch.zeros(2, dtype=torch.long)}, TypeError, "advantages is torch.int64; .*float"),
    "sampler ratio": ({"sampler_ratio": torch.ones(5)}, ValueError, r"sampler_ratio has shape \(5,\); it must be \[2\] or"),
    "old": ({"old_logprobs": torch.zeros(2)}, ValueError, r"old_logprobs has shape \(2,\); it must be \[4\]"),
    "old integer": ({"old_logprobs": torch.zeros(4, dtype=torch.int32)}, TypeError, "old_logprobs is torch.int32; .*float"),
    "reference": ({"ref_logprobs": torch.zeros(4, 1)}, ValueError, r"ref_logprobs has shape \(4, 1\); it must be \[4\]"),
    "sampling": ({"sampling_logprobs": torch.zeros(2)}, ValueError, r"sampling_logprobs has shape \(2,\); it must be \[4\]"),
    "loss mask": ({"loss_mask": torch.ones(2)}, ValueError, r"loss_mask has shape \(2,\); it must be \[4\]"),
    "no reference": ({"ref_logprobs": None}, ValueError, r"beta is 0.1.*ref_logprobs=\[N\]; give them, or set beta=0"),
    "weight elsewhere": ({"weight": torch.empty(5, 8, device="meta")}, ValueError, "weight is on meta and hidden on cpu"),
    "old elsewhere": ({"old_logprobs": torch.empty(4, device="meta")}, ValueError, "old_logprobs is on meta.*one device"),
    "mask elsewhere": ({"loss_mask": torch.empty(4, device="meta")}, ValueError, "loss_mask is on meta.*one device"),
    "segments elsewhere": (
        {"segments": torch.empty(3, dtype=torch.int32, device="meta")}, ValueError, "segments is on meta.*one device",
    ),
    "advantages that train": (
        {"advantages": torch.ones(2, requires_grad=True)}, ValueError, r"advantages requires a gradient.*advantages.detach\(\)",
    ),
    "ratio that trains": (
        {"sampler_ratio": torch.ones(4, requires_grad=True)}, ValueError, r"sampler_ratio requires a gradient, and this loss",
    ),
    "segments a list": ({"segments": [0, 2, 4]}, TypeError, "segments is a list.*Tensor"),
    "advantages a list": ({"advantages": [1.0, -1.0]}, TypeError, "advantages is a list.*Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_says_what_was_given_and_what_is_allowed_before_any_work(case, monkeypatch):
    change, error, message = BAD_INPUT[case]
    arguments = {
        "hidden": torch.randn(4, 8),
        "weight": torch.randn(5, 8),
        "targets": torch.zeros(4, dtype=torch.long),
        "segments": torch.tensor([0, 1, 4]),
        "advantages": torch.ones(2),
        "objective": objective("dapo", beta=0.1),
        "ref_logprobs": torch.zeros(4),
        **change,
    }
    monkeypatch.setattr(reference, "project", lambda *args: pytest.fail("work was done before the check"))
    with pytest.raises(error, match=message):
        linear_grpo_loss(**arguments)


def test_a_loss_over_log_probs_with_a_graph_gives_other_values_their_gradients():
    """Where it is not row-local; and without recording, nobody waits for one."""
    rows = (
        torch.randn(4, 8, requires_grad=True),
        torch.randn(5, 8),
        torch.zeros(4, dtype=torch.long),
        torch.tensor([0, 1, 4]),
    )
    advantages = torch.ones(2, requires_grad=True)
    loss, _ = linear_grpo_loss(*rows, advantages, objective("grpo", "sequence"), old_logprobs=torch.full((4,), -1.6))
    loss.backward()
    assert advantages.grad.ne(0).all()
    with torch.no_grad():
        assert linear_grpo_loss(*rows, advantages, objective("dapo"))[0].isfinite()


@pytest.mark.parametrize("on_device", [False, True])
def test_rows_without_a_sequence_are_an_error_for_kernels_too(monkeypatch, on_device):
    # There is no sequence that would say so on a device.
    monkeypatch.setattr("fastgrpo.head.has_row_kernels", lambda *_: on_device)
    arguments = torch.randn(4, 8), torch.randn(5, 8), torch.zeros(4, dtype=torch.long), torch.tensor([0])
    with pytest.raises(ValueError, match=r"segments runs from 0 to 0; it must .* end at the 4 rows"):
        linear_grpo_loss(*arguments, torch.ones(0), objective("dapo"))


@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_is_float32_whatever_is_beside_the_rows(level, dtype):
    rows = make(LENGTHS, torch.float32)
    values = {name: None if x is None or name == "loss_mask" else x.to(dtype) for name, x in rows.values.items()}
    segments = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    options = objective("grpo", level, beta=0.04)
    given = partial(linear_grpo_loss, rows.hidden, rows.weight, rows.targets, segments, objective=options)
    loss, stats = given(**values)
    same, _ = given(**{name: None if x is None else x.float() for name, x in values.items()})
    assert loss.dtype == stats.policy_loss.dtype == torch.float32 and torch.equal(loss, same)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("advantages", None, "advantages is a NoneType; give a torch.Tensor"),
        ("advantages", torch.ones(2).to_sparse(), "advantages is torch.sparse_coo; give an ordinary, dense tensor"),
        ("loss_mask", torch.ones(6).to_sparse(), "loss_mask is torch.sparse_coo"),
        ("old_logprobs", torch.ones(6).to_sparse(), "old_logprobs is torch.sparse_coo"),
        ("segments", torch.tensor([0, 3, 6]).to_sparse(), "segments is torch.sparse_coo"),
    ],
)
def test_values_that_cannot_be_read_are_named(name, value, message):
    given = {"segments": torch.tensor([0, 3, 6]), "advantages": torch.ones(2), name: value}
    with pytest.raises(TypeError, match=message):
        linear_grpo_loss(
            torch.randn(6, 4), torch.randn(7, 4), torch.zeros(6, dtype=torch.long), objective=Objective(), **given
        )
