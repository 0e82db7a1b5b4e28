"""Claims about `linear_logprob`: exact against float64, whatever the shape, dtype, transform or mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from head_cases import (
    ODD_16_BIT,
    SMALL_CHUNK,
    check_against_float64,
    check_autocast,
    check_odd_16_bit,
    errors_beside_eager,
    make,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from truth import logits_float64, logprobs_float64, relative_error

import fastgrpo.kernels.reference as reference
import fastgrpo.ops as ops
from fastgrpo import linear_logprob

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "width", "vocabulary"),
    [(0, 64, 257), (1, 72, 7), (7, 100, 1), (129, 64, 50257), (127, 72, 257), (7, 896, 32000), (1, 2048, 8009)],
)
def test_equals_float64_at_awkward_shapes(count, width, vocabulary, dtype, frozen):
    check_against_float64(*make(count, width, vocabulary, dtype), frozen=frozen)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.05},
        {"temperature": 10.0},
        {"softcap": 3.0},
        {"logit_scale": 0.0625},
        {"logit_scale": 8.0, "softcap": 30.0, "temperature": 0.7},
    ],
)
def test_scale_softcap_and_temperature_apply_in_this_order(options, dtype, frozen):
    check_against_float64(*make(33, 64, 1001, dtype, with_bias=True), frozen=frozen, **options)


@settings(max_examples=60)
@given(
    count=st.integers(0, 40),
    width=st.integers(1, 80),
    vocabulary=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    frozen=st.booleans(),
    with_bias=st.booleans(),
    entropy_gradient=st.booleans(),
    temperature=st.floats(0.3, 3.0),
    softcap=st.one_of(st.none(), st.floats(1.0, 50.0)),
    seed=st.integers(0, 2**31),
)
def test_equals_float64_at_any_shape(
    count, width, vocabulary, dtype, frozen, with_bias, entropy_gradient, temperature, softcap, seed
):
    torch.manual_seed(seed)
    check_against_float64(
        *make(count, width, vocabulary, dtype, spread=1.0, with_bias=with_bias),
        frozen=frozen,
        gradient_of="both" if entropy_gradient else "logprobs",
        odd=dtype != torch.float32,
        temperature=temperature,
        softcap=softcap,
    )


@settings(max_examples=25)
@given(**ODD_16_BIT)
def test_16_bit_equals_float64_at_odd_shapes(**case):
    check_odd_16_bit(**case, device="cpu")


@pytest.mark.parametrize("frozen", [True, False])
def test_ignored_rows_are_zero_and_never_computed(frozen, monkeypatch):
    hidden, weight, targets, _ = make(20, 64, 257, torch.float32)
    targets[[0, 3]] = -100
    targets[[5, 19]] = 257
    ignored = [0, 3, 5, 19]
    hidden[ignored] = float("nan")
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    rows_projected = []
    project = reference.project
    monkeypatch.setattr(reference, "project", lambda h, *rest: rows_projected.append(len(h)) or project(h, *rest))
    out = linear_logprob(hidden, weight, targets, return_entropy=True)
    upstream = torch.ones(20)
    upstream[ignored] = float("nan")
    torch.autograd.backward([out.logprobs, out.entropy], [upstream, upstream])
    assert rows_projected == [16] if frozen else [16, 16]
    for value in (out.logprobs, out.entropy, hidden.grad):
        assert value[ignored].eq(0).all() and value.isfinite().all()
    if not frozen:
        assert weight.grad.isfinite().all()


def test_rows_whose_coefficient_is_zero_are_not_recomputed(monkeypatch):
    hidden, weight, targets, _ = make(20, 64, 257, torch.float32)
    out = linear_logprob(hidden.requires_grad_(), weight.requires_grad_(), targets)
    rows_projected = []
    project = reference.project
    monkeypatch.setattr(reference, "project", lambda h, *rest: rows_projected.append(len(h)) or project(h, *rest))
    coefficient = torch.randn(20)
    coefficient[4:] = 0.0
    out.logprobs.backward(coefficient)
    assert rows_projected == [4]
    assert hidden.grad[4:].eq(0).all() and hidden.grad[:4].ne(0).any()


@pytest.mark.parametrize("frozen", [True, False])
def test_nan_in_one_row_stays_in_that_row(frozen):
    hidden, weight, targets, _ = make(9, 64, 257, torch.float32)
    clean = hidden.clone().requires_grad_()
    hidden[4, 10] = float("nan")
    hidden.requires_grad_()
    for leaf in (clean, hidden):
        out = linear_logprob(leaf, weight.detach().requires_grad_(not frozen), targets, return_entropy=True)
        (out.logprobs.sum() + out.entropy.sum()).backward()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert out.logprobs[4].isnan() and hidden.grad[4].isnan().all()
    assert out.logprobs[others].isfinite().all()
    assert torch.equal(hidden.grad[others], clean.grad[others])


@pytest.mark.parametrize("frozen", [True, False])
def test_a_bias_of_minus_infinity_takes_words_out(frozen):
    hidden, weight, targets, bias = make(11, 64, 257, torch.float32, with_bias=True)
    bias[100:] = float("-inf")
    targets = targets % 100
    targets[3] = 200
    leaf = hidden.clone().requires_grad_()
    head = weight.clone().requires_grad_(not frozen)
    out = linear_logprob(leaf, head, targets, bias, return_entropy=True)
    logprobs, entropy = logprobs_float64(logits_float64(hidden, weight, bias), targets)
    assert out.logprobs[3] == float("-inf")
    others = [i for i in range(11) if i != 3]
    assert (out.logprobs - logprobs)[others].abs().max() < 1e-5
    assert (out.entropy - entropy).abs().max() < 1e-5
    (out.logprobs[others].sum() + out.entropy[others].sum()).backward()
    assert leaf.grad.isfinite().all()
    if not frozen:
        assert head.grad[100:].eq(0).all() and head.grad.isfinite().all()


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_logits_neither_overflow_nor_lose_the_gap(size):
    weight = torch.eye(5) * size
    hidden = torch.eye(5)[:3].clone().requires_grad_()
    targets = torch.tensor([0, 0, 2])
    out = linear_logprob(hidden, weight, targets, return_entropy=True)
    logprobs, entropy = logprobs_float64(logits_float64(hidden.detach(), weight), targets)
    assert (out.logprobs - logprobs).abs().max() <= 1e-5 + 8 * 2**-24 * 1e4
    assert (out.entropy - entropy).abs().max() <= 1e-5
    out.logprobs.sum().backward()
    assert hidden.grad.isfinite().all()


def test_a_confident_token_keeps_its_relative_precision():
    """p -> 1: log p and 1 - p come out to float32 relative precision, not rounded to 0."""
    gap = torch.tensor([5.0, 20.0, 40.0, 80.0])
    hidden = torch.stack([gap, torch.zeros(4)], 1).requires_grad_()
    out = linear_logprob(hidden, torch.eye(2), torch.zeros(4, dtype=torch.long))
    exact = -torch.log1p(torch.exp(-gap.double()))
    assert ((out.logprobs - exact) / exact).abs().max() < 1e-5
    out.logprobs.sum().backward()
    complement = -torch.expm1(exact)
    assert ((hidden.grad[:, 0] - complement) / complement).abs().max() < 1e-5


@pytest.mark.parametrize(("frozen", "one_pass"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_never_less_exact_than_eager_16_bit(dtype, frozen, one_pass):
    hidden, weight, targets, _ = make(64, 256, 5003, dtype)
    for name, (ours, eager) in errors_beside_eager(hidden, weight, targets, frozen=frozen, one_pass=one_pass).items():
        assert ours <= eager, f"{name}: {ours:.2e}, eager {eager:.2e}"


@pytest.mark.parametrize(
    ("frozen", "softcap", "with_bias"), list(itertools.product([True, False], [None, 2.0], [True, False]))
)
def test_gradcheck_in_float64(frozen, softcap, with_bias):
    hidden = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=not frozen)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=not frozen) if with_bias else None
    targets = torch.tensor([0, 8, -1, 3, 3])

    def run(hidden, weight, bias):
        return tuple(
            linear_logprob(
                hidden, weight, targets, bias, temperature=0.7, softcap=softcap, return_entropy=True, num_chunks=2
            )
        )

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.parametrize("frozen", [True, False])
def test_the_frozen_head_needs_two_products_and_three_with_an_entropy_gradient(frozen, monkeypatch):
    hidden, weight, targets, _ = make(12, 64, 257, torch.float32)
    weight.requires_grad_(not frozen)
    calls = []
    for name in ("project", "back_project"):
        original = getattr(reference, name)
        monkeypatch.setattr(
            reference, name, lambda *a, _name=name, _original=original: calls.append(_name) or _original(*a)
        )
    out = linear_logprob(hidden.requires_grad_(), weight, targets)
    out.logprobs.sum().backward()
    assert calls == (["project", "back_project"] if frozen else ["project", "project", "back_project"])
    calls.clear()
    out = linear_logprob(hidden, weight, targets, return_entropy=True, entropy_requires_grad=False)
    assert not out.entropy.requires_grad
    out.logprobs.sum().backward()
    assert len(calls) == (2 if frozen else 3)
    calls.clear()
    out = linear_logprob(hidden, weight, targets, return_entropy=True)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert len(calls) == 3
    calls.clear()
    with torch.no_grad():
        assert not linear_logprob(hidden, weight, targets, return_entropy=True).logprobs.requires_grad
    assert calls == ["project"]


@pytest.mark.parametrize("frozen", [True, False])
def test_results_do_not_depend_on_the_number_of_chunks(frozen):
    hidden, weight, targets, _ = make(37, 64, 1001, torch.float32)
    results = []
    for num_chunks in (1, 2, 5, 37, 100):
        leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        out = linear_logprob(leaf, head, targets, return_entropy=True, num_chunks=num_chunks)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        results.append((out.logprobs, leaf.grad))
    for logprobs, grad in results[1:]:
        assert (logprobs - results[0][0]).abs().max() <= 1e-5
        assert relative_error(grad, results[0][1]) <= 5e-4


def test_three_runs_give_the_same_bits():
    hidden, weight, targets, _ = make(37, 64, 1001, torch.float32)
    runs = []
    for _ in range(3):
        leaf = hidden.clone().requires_grad_()
        out = linear_logprob(leaf, weight, targets, return_entropy=True, chunk_bytes=SMALL_CHUNK)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        runs.append((out.logprobs, out.entropy, leaf.grad))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_row_s_bits_do_not_depend_on_its_place(frozen):
    hidden, weight, targets, _ = make(37, 64, 1001, torch.float32)
    order = torch.randperm(37)
    grad_logprobs = torch.randn(37)
    results = []
    for index in (torch.arange(37), order):
        leaf = hidden[index].clone().requires_grad_()
        out = linear_logprob(leaf, weight.clone().requires_grad_(not frozen), targets[index], return_entropy=True)
        out.logprobs.backward(grad_logprobs[index])
        results.append((out.logprobs, out.entropy, leaf.grad))
    for straight, permuted in zip(*results, strict=True):
        assert torch.equal(straight[order], permuted)


@pytest.mark.slow
def test_more_than_two_to_the_31_logits():
    count, vocabulary = 8200, 262144
    hidden, weight = torch.randn(count, 4).requires_grad_(), torch.randn(vocabulary, 4)
    targets = torch.randint(0, vocabulary, (count,))
    out = linear_logprob(hidden, weight, targets)
    out.logprobs[-3:].sum().backward()
    exact = hidden.detach()[-3:].double().requires_grad_()
    logprobs, _ = logprobs_float64(logits_float64(exact, weight), targets[-3:])
    logprobs.sum().backward()
    assert count * vocabulary > 2**31
    assert (out.logprobs[-3:] - logprobs).abs().max() < 1e-4
    assert relative_error(hidden.grad[-3:], exact.grad) < 1e-4 and hidden.grad[:-3].eq(0).all()


def test_non_contiguous_inputs_and_int32_targets():
    hidden, weight, targets, _ = make(10, 64, 257, torch.float32)
    wide = torch.randn(10, 128)
    wide[:, ::2] = hidden
    out = linear_logprob(wide[:, ::2], weight.t().contiguous().t(), targets.int())
    assert (out.logprobs - linear_logprob(hidden, weight, targets).logprobs).abs().max() < 1e-5


@pytest.mark.parametrize("frozen", [True, False])
def test_autocast_rounds_operands_but_not_logits_and_fp32_masters_get_fp32_gradients(frozen):
    hidden, weight, targets, _ = make(16, 64, 1001, torch.float32)
    check_autocast(hidden, weight, targets, frozen=frozen, device="cpu", bound=1e-5)


def test_compute_dtype_wins_over_autocast_and_over_hidden():
    hidden, weight, targets, _ = make(16, 64, 1001, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_logprob(hidden, weight, targets, compute_dtype=torch.float32)
    logprobs, _ = logprobs_float64(logits_float64(hidden, weight), targets)
    assert (out.logprobs - logprobs).abs().max() <= 1e-5
    rounded = linear_logprob(hidden, weight, targets, compute_dtype=torch.bfloat16)
    logprobs, _ = logprobs_float64(logits_float64(hidden.bfloat16(), weight.bfloat16()), targets)
    assert (rounded.logprobs - logprobs).abs().max() <= 1e-5


@pytest.mark.parametrize("frozen", [True, False])
def test_compiles_without_a_graph_break(frozen):
    hidden, weight, targets, bias = make(16, 64, 257, torch.float32, with_bias=True)

    def loss(hidden, weight, targets, bias):
        out = linear_logprob(hidden, weight, targets, bias, 0.9, 1.1, 20.0, True)
        return (out.logprobs.sum() - 0.1 * out.entropy.sum()) * 2

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        value = function(leaves[0], leaves[1], targets, bias)
        value.backward()
        results.append((value, leaves[0].grad, leaves[1].grad))
    for eager, compiled in zip(*results, strict=True):
        assert (eager is None and compiled is None) or torch.allclose(eager, compiled, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_pass_opcheck(frozen, dtype):
    hidden, weight, targets, bias = make(6, 8, 11, dtype, with_bias=True)
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    bias.requires_grad_(not frozen)
    head = (0.9, 1.0, None, 4, dtype)
    torch.library.opcheck(ops.linear_logprob_op, (hidden, weight, targets, bias, *head, True, frozen, frozen))
    logprobs, entropy, lse, *_ = (
        x.detach() for x in ops.linear_logprob_op(hidden, weight, targets, bias, *head, True, False, False)
    )
    plain = [x.detach() for x in (hidden, weight)]
    torch.library.opcheck(
        ops.linear_logprob_backward_op,
        (
            torch.ones(6),
            None,
            *plain,
            targets,
            bias.detach(),
            logprobs,
            entropy,
            lse,
            *head,
            True,
            not frozen,
            not frozen,
        ),
    )
    per_token = torch.rand(6)
    torch.library.opcheck(
        ops.linear_grpo_op,
        (
            hidden, weight, targets, bias, per_token - 0.5, None, None, None, None, per_token, None, *head,
            "dapo", [0.2, 0.2, float("inf"), 0.0, 1.0, 1.0, 1.05], True, True, not frozen, not frozen,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("frozen", [True, False])
def test_a_second_derivative_is_refused_not_silently_wrong(frozen):
    hidden, weight, targets, _ = make(5, 8, 11, torch.float32)
    hidden.requires_grad_()
    out = linear_logprob(hidden, weight.requires_grad_(not frozen), targets)
    (grad,) = torch.autograd.grad(out.logprobs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_nan_row_that_the_loss_leaves_out_gets_no_gradient(frozen):
    hidden, weight, targets, _ = make(5, 8, 11, torch.float32)
    hidden[2] = float("nan")
    hidden.requires_grad_()
    out = linear_logprob(hidden, weight.requires_grad_(not frozen), targets)
    out.logprobs[[0, 1, 3, 4]].sum().backward()
    assert hidden.grad[2].eq(0).all() and hidden.grad[[0, 1, 3, 4]].ne(0).any()


def test_hidden_states_from_inference_mode_train_a_head():
    with torch.inference_mode():
        hidden, weight, targets, _ = make(5, 8, 11, torch.float32)
    results = []
    for states, words in ((hidden, targets), (hidden.clone(), targets.clone())):
        leaf = weight.clone().requires_grad_()
        linear_logprob(states, leaf, words).logprobs.sum().backward()
        results.append(leaf.grad)
    assert torch.equal(*results)


def test_a_softcap_that_nothing_reaches_is_none():
    hidden, weight, targets, _ = make(5, 8, 11, torch.float32)
    capped, plain = (linear_logprob(hidden, weight, targets, softcap=softcap).logprobs for softcap in (1e30, None))
    assert (capped - plain).abs().max() <= 1e-5


BAD_INPUT = {
    "hidden 3d": ({"hidden": torch.randn(2, 3, 8)}, ValueError, r"hidden has shape \(2, 3, 8\).*\[N, H\].*reshape"),
    "weight width": ({"weight": torch.randn(5, 7)}, ValueError, r"weight has shape \(5, 7\).*\[V, 8\]"),
    "empty vocabulary": ({"weight": torch.randn(0, 8)}, ValueError, "V >= 1"),
    "targets length": ({"targets": torch.zeros(3, dtype=torch.long)}, ValueError, r"targets has shape \(3,\).*\[4\]"),
    "targets float": ({"targets": torch.zeros(4)}, TypeError, "targets is torch.float32.*int64"),
    "bias length": ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\).*\[5\]"),
    "hidden integer": ({"hidden": torch.zeros(4, 8, dtype=torch.long)}, TypeError, "hidden is torch.int64.*float32"),
    "weight integer": ({"weight": torch.zeros(5, 8, dtype=torch.int8)}, TypeError, "weight is torch.int8"),
    "not a tensor": ({"weight": [[1.0]]}, TypeError, "weight is a list.*Tensor"),
    "weight elsewhere": ({"weight": torch.empty(5, 8, device="meta")}, ValueError, "weight is on meta and hidden on cpu"),
    "targets elsewhere": (
        {"targets": torch.empty(4, dtype=torch.long, device="meta")}, ValueError, "targets is on meta.*one device",
    ),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature is 0.0.*above 0"),
    "temperature of almost nothing": ({"temperature": 1e-40}, ValueError, "temperature is 1e-40, less than float32 can"),
    "scale of too many digits": ({"logit_scale": 10**400}, TypeError, "logit_scale is a whole number of 401 digits"),
    "sparse weight": ({"weight": torch.eye(5, 8).to_sparse()}, TypeError, "weight is torch.sparse_coo; give an ordinary"),
    "nested hidden": ({"hidden": torch.nested.nested_tensor([torch.ones(4, 8)])}, TypeError, "hidden is nested; give an"),
    "everything elsewhere": (
        {
            "hidden": torch.empty(4, 8, device="meta"),
            "weight": torch.empty(5, 8, device="meta"),
            "targets": torch.empty(4, dtype=torch.long, device="meta"),
        },
        ValueError, "hidden is on meta and has no values",
    ),
    "temperature nan": ({"temperature": float("nan")}, ValueError, "temperature is nan"),
    "temperature a tensor": ({"temperature": torch.ones(4)}, TypeError, "temperature is a Tensor; give a Python number"),
    "softcap inf": ({"softcap": float("inf")}, ValueError, "softcap is inf.*finite"),
    "chunk_bytes float": ({"chunk_bytes": 1e6}, TypeError, "chunk_bytes is 1000000.0; give a whole number or None"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap is 0.0.*None"),
    "scale inf": ({"logit_scale": float("inf")}, ValueError, "logit_scale is inf.*finite"),
    "chunk_bytes 0": ({"chunk_bytes": 0}, ValueError, "chunk_bytes is 0.*at least 1"),
    "num_chunks 0": ({"num_chunks": 0}, ValueError, "num_chunks is 0.*-1"),
    "num_chunks -2": ({"num_chunks": -2}, ValueError, "num_chunks is -2"),
    "multiplier 0": ({"logit_chunk_multiplier": 0.0}, ValueError, "logit_chunk_multiplier is 0.0"),
    "both": ({"logit_chunk_multiplier": 2.0, "num_chunks": 3}, ValueError, "give one of the two"),
    "compute_dtype": ({"compute_dtype": torch.int8}, TypeError, "compute_dtype is torch.int8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_says_what_was_given_and_what_is_allowed(case):
    change, error, message = BAD_INPUT[case]
    arguments = {
        "hidden": torch.randn(4, 8),
        "weight": torch.randn(5, 8),
        "targets": torch.zeros(4, dtype=torch.long),
        **change,
    }
    with pytest.raises(error, match=message):
        linear_logprob(**arguments)


@pytest.mark.parametrize("frozen", [True, False])
def test_several_gradients_at_once_are_refused_in_words(frozen):
    hidden, weight, targets, _ = make(3, 5, 17, torch.float32)
    leaves = [hidden.requires_grad_()] if frozen else [hidden.requires_grad_(), weight.requires_grad_()]
    logprobs = linear_logprob(hidden, weight, targets).logprobs
    with pytest.raises(RuntimeError, match=r"takes one gradient at a time.*with retain_graph=True"):
        torch.autograd.grad(logprobs, leaves, torch.eye(3), is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"takes one gradient at a time"):
        torch.autograd.functional.jacobian(
            lambda h: linear_logprob(h, weight, targets).logprobs, hidden, vectorize=True
        )
    one_by_one = [torch.autograd.grad(x, hidden, retain_graph=True)[0][i] for i, x in enumerate(logprobs)]
    logprobs.sum().backward()
    torch.testing.assert_close(torch.stack(one_by_one), hidden.grad)


@pytest.mark.parametrize("trains", [(True, False), (False, True), (True, True)])
def test_targets_may_come_from_inference_mode(trains):
    hidden, weight, targets, _ = make(9, 16, 33, torch.float32)
    with torch.inference_mode():
        inferred = targets.clone()
    grads = []
    for ids in (targets, inferred):
        leaves = [x.clone().requires_grad_(wanted) for x, wanted in zip((hidden, weight), trains, strict=True)]
        linear_logprob(*leaves, ids).logprobs.sum().backward()
        grads.append([x.grad for x in leaves])
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "constants", [{"softcap": 1e40}, {"softcap": 1e-45}, {"logit_scale": -1e39}, {"temperature": 1e-40}]
)
def test_constants_that_float32_cannot_hold_are_refused(constants):
    hidden, weight, targets, _ = make(3, 5, 17, torch.float32)
    (name,) = constants
    with pytest.raises(ValueError, match=f"{name} is .*float32"):
        linear_logprob(hidden, weight, targets, **constants)
    assert linear_logprob(hidden.double(), weight.double(), targets, **constants).logprobs.isfinite().all()


def test_functional_gradients_are_refused_in_words():
    weight, targets, hidden = torch.randn(7, 4), torch.zeros(3, dtype=torch.long), torch.randn(3, 4)
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: lambda h: torch.func.vjp(f, h)):
        with pytest.raises(
            RuntimeError, match=r"no derivatives under torch.func .*Use torch.autograd.grad or backward"
        ):
            transform(lambda h: linear_logprob(h, weight, targets).logprobs.sum())(hidden)


def test_forward_mode_derivatives_are_refused_not_zero():
    hidden, weight, targets = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([1, 2, 3])
    with pytest.raises(RuntimeError, match="reverse-mode derivatives only"):
        torch.func.jvp(lambda h: linear_logprob(h, weight, targets).logprobs, (hidden,), (hidden,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="reverse-mode derivatives only"):
        linear_logprob(forward_ad.make_dual(hidden, hidden), weight, targets)


@pytest.mark.parametrize("name", ["return_entropy", "entropy_requires_grad"])
def test_flags_are_true_or_false(name):
    with pytest.raises(TypeError, match=f"{name} is 'yes'; it must be True or False"):
        linear_logprob(torch.randn(3, 4), torch.randn(7, 4), torch.tensor([1, 2, 3]), **{name: "yes"})
