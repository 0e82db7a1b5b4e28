"""A float16 head on a CUDA device, frozen or trained: exact at any coefficient, and infinite where float16 ends."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from row_kernels import launch, over, padded
from torch import Tensor
from truth import COEFFICIENT_SIZES, every_row_error, logits_float64, logprobs_float64, relative_error

from fastgrpo import Objective, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import cuda
from fastgrpo.kernels.library import library_info, load_library
from fastgrpo.kernels.select import head_kernels

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(load_library() is None, reason=library_info().reason),
]
FP16 = torch.float16
CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
KERNELS = pytest.mark.parametrize("kernel", ["streamed", *(["cluster"] if CLUSTERS else [])])
SCALE = 4096.0


def coefficients(count: int, low: float, high: float) -> Tensor:
    size = torch.empty(count, device=DEVICE).uniform_(math.log(low), math.log(high)).exp()
    return size * torch.randn(count, device=DEVICE).sign()


def kernel_case(rows: int, vocabulary: int, size: str) -> dict[str, Tensor]:
    products = torch.randn(rows, vocabulary, device=DEVICE)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    products[torch.arange(0, rows, 2), targets[::2]] += 3.0
    advantages, entropy_weights = (coefficients(rows, *COEFFICIENT_SIZES[size]) for _ in range(2))
    advantages[5] = entropy_weights[5] = 0.0
    return {"products": products, "targets": targets, "advantages": advantages, "entropy_weights": entropy_weights}


def run_kernel(kernel: str, products: Tensor, targets: Tensor, **values: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients over the logits, and what undoes the powers that were taken out of them."""
    logits, factors = padded(products), torch.full((len(targets),), math.nan, device=DEVICE)
    grad = over(logits, FP16)
    launch(
        kernel, logits, targets, grad, weights=torch.ones_like(factors), factors=factors, scale=SCALE, **values
    )  # fmt: skip
    return grad.clone(), factors


@KERNELS
@pytest.mark.parametrize("vocabulary", [7, 5003, 151936])
@pytest.mark.parametrize("size", COEFFICIENT_SIZES)
@pytest.mark.parametrize("bonus", [False, True])
def test_the_kernels_take_a_power_of_two_out_of_every_row(kernel, vocabulary, size, bonus):
    case = kernel_case(40, vocabulary, size)
    if not bonus:
        case["entropy_weights"] = None
    case["targets"][3] = -100
    grad, factors = run_kernel(kernel, **case)
    log_p = torch.log_softmax(case["products"].double(), -1)
    p, column = log_p.exp(), case["targets"].clamp(min=0)[:, None]
    entropy = -(p * log_p).sum(-1, keepdim=True)
    # On-policy the objective's derivative in a log-prob is minus the advantage.
    wanted = -case["advantages"].double()[:, None] * (torch.zeros_like(p).scatter_(1, column, 1.0) - p)
    if bonus:
        wanted += case["entropy_weights"].double()[:, None] * p * (log_p + entropy)
    wanted[3] = 0.0
    assert factors[[3, 5]].eq(0).all()
    mantissas = torch.frexp(factors[factors != 0]).mantissa
    assert mantissas.eq(0.5).all() and factors.ge(0).all()
    assert grad.abs().max() < 2 * SCALE
    error = every_row_error(grad.double() * factors.double()[:, None], wanted)
    assert error <= 2e-3, error


@KERNELS
def test_a_row_does_not_depend_on_its_neighbours_coefficients(kernel):
    case = kernel_case(40, 5003, "of every size")
    grad, factors = run_kernel(kernel, **case)
    order = torch.randperm(40, device=DEVICE)
    mixed = {name: values[order].contiguous() for name, values in case.items()}
    mixed["advantages"][order < 20] *= 1e6
    mixed_grad, mixed_factors = run_kernel(kernel, **mixed)
    kept = order >= 20
    assert torch.equal(mixed_grad[kept], grad[order[kept]]) and torch.equal(mixed_factors[kept], factors[order[kept]])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@KERNELS
def test_a_coefficient_that_is_not_finite_stays_so_in_its_row(kernel, bad):
    case = kernel_case(40, 5003, "1 / tokens")
    clean, _ = run_kernel(kernel, **case)
    case["advantages"][7] = bad
    grad, factors = run_kernel(kernel, **case)
    others = [row for row in range(40) if row != 7]
    assert not grad[7].isfinite().all() and factors[7] == 1 / SCALE
    assert torch.equal(grad[others], clean[others])


@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16])
def test_words_at_minus_infinity_get_no_gradient_at_any_coefficient(dtype):
    logits = torch.randn(6, 128, device=DEVICE)
    logits[:, 64:] = -math.inf
    targets = torch.arange(6, device=DEVICE)
    statistics = [torch.empty(6, device=DEVICE) for _ in range(3)]
    torch.ops.fastgrpo.row_pass(logits, targets, None, 1.0, 1.0, None, *statistics, None, None, 1.0)
    grad, g = torch.empty(6, 128, device=DEVICE, dtype=dtype), torch.full((6,), 1e12, device=DEVICE)
    factors = torch.empty(6, device=DEVICE) if dtype == FP16 else None
    torch.ops.fastgrpo.row_grad(
        logits, targets, None, 1.0, 1.0, None, *statistics, g, g, grad, SCALE if factors is not None else 1.0, factors
    )
    assert grad.isfinite().all() and grad[:, 64:].eq(0).all() and grad.abs().max() > 1


def test_factors_are_for_float16_alone():
    logits, targets = torch.zeros(4, 128, device=DEVICE), torch.zeros(4, dtype=torch.long, device=DEVICE)
    row, grad = torch.zeros(4, device=DEVICE), torch.zeros(4, 128, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"row_factors is given and the gradient is torch\.bfloat16"):
        torch.ops.fastgrpo.row_grad(logits, targets, None, 1.0, 1.0, None, row, row, None, row, None, grad, 1.0, row)


COUNT, WIDTH, WORDS = 1000, 128, 5003


def head(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Hidden states, weight and bias whose values float16 holds, half of the targets likely."""
    weight = (torch.randn(WORDS, WIDTH, device=DEVICE) * 2 / WIDTH**0.5).half()
    hidden, targets = torch.randn(COUNT, WIDTH, device=DEVICE).half(), torch.randint(WORDS, (COUNT,), device=DEVICE)
    hidden[::2] += 2 * weight[targets[::2]]
    return [hidden.to(dtype), weight.to(dtype), torch.randn(WORDS, device=DEVICE).half().to(dtype), targets]


def leaves(values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [value.to(dtype, copy=True).requires_grad_() for value in values]


@pytest.mark.parametrize("size", COEFFICIENT_SIZES)
@pytest.mark.parametrize("bonus", [False, True])
def test_log_probs_with_float32_masters_equal_float64(size, bonus):
    assert head_kernels(DEVICE, FP16) is cuda
    *values, targets = head()
    g, h = coefficients(COUNT, *COEFFICIENT_SIZES[size]), 0.1 * coefficients(COUNT, *COEFFICIENT_SIZES[size])
    g[COUNT // 2 :] *= 1e-4  # batches of rows whose largest differ
    targets[::7] = -100
    ours, exact = leaves(values, torch.float32), leaves(values, torch.float64)
    # Several chunks, and several batches of chunks.
    out = linear_logprob(
        *ours[:2], targets, ours[2], return_entropy=True, chunk_bytes=1 << 20, compute_dtype=FP16, temperature=0.9
    )
    logprobs, entropy = logprobs_float64(logits_float64(*exact, temperature=0.9), targets)
    torch.autograd.backward((out.logprobs, out.entropy), (g, h * bonus))
    torch.autograd.backward((logprobs, entropy), (g.double(), h.double() * bonus))
    assert relative_error(ours[1].grad, exact[1].grad) <= 3e-3
    assert relative_error(ours[2].grad, exact[2].grad) <= 3e-3
    assert every_row_error(ours[0].grad, exact[0].grad) <= 2e-2


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(("size", "loss_scale"), [(1e-9, 1.0), (1.0, 2.0**16), (1.0, 2.0**30), (1e9, 1.0)])
def test_the_loss_in_one_pass_with_float32_masters_equals_float64(frozen, size, loss_scale):
    *values, targets = head()
    values[2] = values[2] * 0
    segments = torch.tensor([0, 300, 300, 400, COUNT], device=DEVICE)
    advantages = size * torch.tensor([1.0, -1.0, 0.3, -1e-4], device=DEVICE)
    mask = torch.rand(COUNT, device=DEVICE) > 0.3
    base = linear_logprob(*values[:2], targets, compute_dtype=torch.float32).logprobs
    old, ref = base + 0.3 * torch.randn(COUNT, device=DEVICE), base + torch.randn(COUNT, device=DEVICE)
    # A ratio within a few roundings of a clip bound may fall on its other side.
    old = old.where(((base - old).exp()[:, None] - torch.tensor([0.8, 1.2], device=DEVICE)).abs().amin(1) > 1e-3, base)
    objective = Objective(loss_type="dapo", beta=0.04 * size, entropy_coef=0.01 * size)
    results = []
    for dtype, compute_dtype in ((torch.float32, FP16), (torch.float64, torch.float64)):
        inputs = leaves(values[:2], dtype)
        inputs[1].requires_grad_(not frozen)
        loss, _ = linear_grpo_loss(
            *inputs, targets, segments, advantages, objective, old_logprobs=old, ref_logprobs=ref, loss_mask=mask,
            compute_dtype=compute_dtype, chunk_bytes=1 << 20,
        )  # fmt: skip
        (loss * loss_scale).backward()
        results.append((loss, *(x.grad for x in inputs)))
    (loss, hidden, weight), (exact, exact_hidden, exact_weight) = results
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4)
    assert every_row_error(hidden, exact_hidden) <= 2e-2 and relative_error(hidden, exact_hidden) <= 3e-3
    assert frozen or relative_error(weight, exact_weight) <= 3e-3


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("loss_scale", [2.0**16, 2.0**40])
def test_what_float16_cannot_hold_is_infinite_and_never_clipped(one_pass, loss_scale):
    *values, targets = head(FP16)
    hidden, weight = leaves(values[:2], FP16)
    exact, exact_weight = leaves(values[:2], torch.float64)
    segments, ones = torch.tensor([0, COUNT], device=DEVICE), torch.ones(1, device=DEVICE)
    for x, w, factor in ((hidden, weight, loss_scale), (exact, exact_weight, 1.0)):
        if one_pass:
            loss, _ = linear_grpo_loss(x, w, targets, segments, ones, Objective(loss_type="grpo"))
        else:
            loss = -linear_logprob(x, w, targets).logprobs.mean()
        (factor * loss).backward()
    for found, wanted in ((hidden.grad, exact.grad), (weight.grad, exact_weight.grad)):
        wanted = wanted * loss_scale
        margin = (1e-2 * wanted.abs().amax(1, keepdim=True)).expand_as(wanted)
        outside, inside = wanted.abs() > 65520 + margin, wanted.abs() < 65504 - margin
        assert found[outside].isinf().all() and outside.any() == (loss_scale == 2.0**40)
        assert ((found - wanted).abs() <= margin)[inside].all()


def test_three_runs_give_the_same_bits():
    *values, targets = head(FP16)
    segments, advantages = torch.tensor([0, 400, COUNT], device=DEVICE), torch.tensor([1.0, -0.5], device=DEVICE)
    results = []
    for _ in range(3):
        hidden, weight, bias = leaves(values, FP16)
        loss, _ = linear_grpo_loss(
            hidden, weight, targets, segments, advantages, Objective(), bias=bias, chunk_bytes=1 << 20
        )
        linear_logprob(hidden, weight, targets, bias, chunk_bytes=1 << 20).logprobs.mean().backward()
        (loss * 1000).backward()
        results.append((loss, hidden.grad, weight.grad, bias.grad))
    for again in results[1:]:
        assert all(map(torch.equal, again, results[0]))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("bonus", [False, True])
def test_a_row_s_bits_depend_on_neither_its_place_nor_its_neighbours(frozen, bonus):
    count, words = 600, 50257
    hidden, targets = torch.randn(count, WIDTH, device=DEVICE).half(), torch.randint(words, (count,), device=DEVICE)
    weight = (torch.randn(words, WIDTH, device=DEVICE) * 2 / WIDTH**0.5).half()
    hidden[::2] += 2 * weight[targets[::2]]
    g, h = coefficients(count, 1e-3, 1e3), coefficients(count, 1e-3, 1e3)
    everywhere, others = torch.arange(count, device=DEVICE), torch.arange(count, device=DEVICE) != 8

    def per_row(hidden: Tensor, index: Tensor, g: Tensor = g) -> tuple[Tensor, ...]:
        # Float32 masters: their gradients are not rounded, and hold any of these.
        leaf, lm_head = hidden[index].float().requires_grad_(), weight.float().requires_grad_(not frozen)
        out = linear_logprob(
            leaf, lm_head, targets[index], return_entropy=True, compute_dtype=FP16, num_chunks=1,
            entropy_requires_grad=bonus,
        )  # fmt: skip
        outputs, upstream = ([*out], [g[index], h[index]]) if bonus else ([out.logprobs], [g[index]])
        torch.autograd.backward(outputs, upstream)
        return (*(x.detach() for x in out), leaf.grad)

    alone = per_row(hidden, everywhere)
    order = torch.randperm(count, device=DEVICE)
    assert all(torch.equal(found, wanted[order]) for found, wanted in zip(per_row(hidden, order), alone, strict=True))
    far, much = hidden.clone(), g.clone()
    far[8] *= 100
    much[8] *= 1e6
    for found, wanted in zip(per_row(far, everywhere, much), alone, strict=True):
        assert torch.equal(found[others], wanted[others])


def test_the_host_waits_for_the_rows_that_count_and_once_a_batch():
    *values, targets = head(FP16)
    hidden, weight, bias = leaves(values, FP16)
    chunk = (1 << 20) // (4 * WORDS)
    batches = -(-COUNT // cuda.rows_a_batch(chunk, cuda.MOST_CHUNKS_A_BATCH))
    linear_logprob(hidden, weight, targets, bias).logprobs.sum().backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            linear_logprob(hidden, weight, targets, bias, chunk_bytes=1 << 20).logprobs.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert batches > 1 and len(syncs) == 2 + batches, syncs


def trained(one_pass: bool, init_scale: float | None) -> tuple[list[Tensor], int]:
    """How far four updates move the parameters, in float16 with a gradient scaler or in float32, and how many were skipped."""
    torch.manual_seed(0)
    body = torch.nn.Linear(32, 64, device=DEVICE)
    lm_head = torch.nn.Linear(64, WORDS, device=DEVICE)
    parameters = [*body.parameters(), *lm_head.parameters()]
    start = [x.detach().clone() for x in parameters]
    inputs, targets = torch.randn(200, 32, device=DEVICE), torch.randint(WORDS, (200,), device=DEVICE)
    segments, advantages = torch.tensor([0, 90, 200], device=DEVICE), torch.tensor([1.0, -0.7], device=DEVICE)
    per_row = torch.repeat_interleave(advantages, torch.tensor([90, 110], device=DEVICE))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler(
        DEVICE.type,
        init_scale=init_scale or 1.0,
        backoff_factor=2.0**-12,
        growth_interval=10**6,
        enabled=init_scale is not None,
    )
    updates = skipped = 0
    while updates < 4 and skipped < 10:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, FP16, enabled=init_scale is not None):
            hidden = body(inputs)
            if one_pass:
                objective = Objective(loss_type="bnpo", entropy_coef=0.01)
                loss, _ = linear_grpo_loss(
                    hidden, lm_head.weight, targets, segments, advantages, objective, bias=lm_head.bias
                )
            else:
                out = linear_logprob(hidden, lm_head.weight, targets, lm_head.bias, return_entropy=True)
                loss = -(out.logprobs * per_row).mean() - 0.01 * out.entropy.mean()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() == before:
            updates += 1
        else:
            skipped += 1
            assert updates == 0 and all(map(torch.equal, parameters, start)), "an overflow reached the parameters"
    return [x.detach() - y for x, y in zip(parameters, start, strict=True)], skipped


@pytest.mark.parametrize(
    ("one_pass", "init_scale"), list(itertools.product([True, False], [2.0**10, 2.0**16, 2.0**60]))
)
def test_a_gradient_scaler_trains_as_float32_does_and_recovers_from_an_overflow(one_pass, init_scale):
    moved, skipped = trained(one_pass, init_scale)
    wanted, _ = trained(one_pass, None)
    assert (skipped > 0) == (init_scale == 2.0**60), f"{skipped} updates were skipped"
    for found, exact in zip(moved, wanted, strict=True):
        assert relative_error(found, exact) <= 2e-2
