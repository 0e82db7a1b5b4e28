"""Random heads and what `linear_logprob` must give for them, on any device; drawn on the CPU, the same everywhere."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor
from truth import logits_float64, logprobs_float64, relative_error, worst_row_error

from fastgrpo import Objective, linear_grpo_loss, linear_logprob

SMALL_CHUNK = 1 << 16
ODD_16_BIT: dict[str, st.SearchStrategy] = {
    "count": st.integers(0, 300),
    "width": st.integers(8, 130),
    "vocabulary": st.integers(2, 3000),
    "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
    "frozen": st.booleans(),
    "with_bias": st.booleans(),
    # One at a time: where the two nearly cancel, little of a row is left to compare with.
    "gradient_of": st.sampled_from(["logprobs", "entropy"]),
    "temperature": st.floats(0.3, 3.0),
    "softcap": st.one_of(st.none(), st.floats(5.0, 50.0)),
    "seed": st.integers(0, 2**31),
}
"""Arguments of `check_odd_16_bit`."""


def make(count: int, width: int, vocabulary: int, dtype: torch.dtype, spread: float = 2.0, with_bias: bool = False):
    hidden = torch.randn(count, width).to(dtype)
    weight = (torch.randn(vocabulary, width) * spread / width**0.5).to(dtype)
    bias = torch.randn(vocabulary).to(dtype) if with_bias else None
    targets = torch.randint(0, vocabulary, (count,))
    # A model that has learnt something puts much of its mass on the target.
    peaked = torch.rand(count) < 0.5
    if count and vocabulary > 1:
        hidden[peaked] += 4 * weight[targets[peaked]] / max(spread, 1e-3)
    return hidden, weight, targets, bias


def tolerance(logits: Tensor, dtype: torch.dtype) -> float:
    finite = logits[logits.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return (1e-5 if dtype == torch.float32 else 1e-3) + 8 * 2**-24 * largest


def check_against_float64(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    frozen: bool,
    gradient_of: str = "both",
    device: str = "cpu",
    odd: bool = False,
    **options: float | None,
) -> None:
    """
    Log-probs, entropies and gradients within the bounds that a kernel must keep.

    Args:
        hidden, weight, targets, bias: from `make`.
        frozen: only hidden has a gradient.
        gradient_of: `"logprobs"`, `"entropy"` or `"both"`.
        device: where `linear_logprob` runs; the float64 truth is the CPU's.
        odd: bounds of gradients are those of `roundings`, for shapes with few rows or words.
        options: temperature, logit_scale, softcap.
    """
    dtype = hidden.dtype
    leaves = [
        None if x is None else x.detach().to(device, copy=True).requires_grad_(not frozen or x is hidden)
        for x in (hidden, weight, bias)
    ]
    exact = [
        None if x is None else x.double().requires_grad_(not frozen or x is hidden) for x in (hidden, weight, bias)
    ]
    grad_logprobs = torch.randn(len(targets)) * (gradient_of != "entropy")
    grad_entropy = torch.randn(len(targets)) * (gradient_of != "logprobs")
    out = linear_logprob(
        leaves[0], leaves[1], targets.to(device), leaves[2], return_entropy=True, chunk_bytes=SMALL_CHUNK, **options
    )
    products = torch.zeros(len(targets), len(weight)).double().requires_grad_()
    logits = logits_float64(exact[0], exact[1], products if exact[2] is None else products + exact[2], **options)
    logprobs, entropy = logprobs_float64(logits, targets)

    limit = tolerance(logits.detach(), dtype)
    error = (out.logprobs.cpu().double() - logprobs).abs().max().item() if len(targets) else 0.0
    assert error <= limit, f"log-prob error {error:.2e} > {limit:.2e}"
    error = (out.entropy.cpu().double() - entropy).abs().max().item() if len(targets) else 0.0
    assert error <= limit + 1e-5, f"entropy error {error:.2e} > {limit:.2e}"
    assert out.logprobs.dtype == torch.float32

    (out.logprobs @ grad_logprobs.to(device) + out.entropy @ grad_entropy.to(device)).backward()
    (logprobs @ grad_logprobs.double() + entropy @ grad_entropy.double()).backward()
    truths = [None if x is None else x.grad for x in exact]
    limits = roundings(products.grad, truths, hidden, weight) if odd else [None] * 3
    for ours, truth, rounding in zip(leaves, truths, limits, strict=True):
        if ours is None or not ours.requires_grad:
            assert ours is None or ours.grad is None
            continue
        assert ours.grad.dtype == dtype
        check_gradient(ours.grad.cpu(), truth, rounding)


def check_odd_16_bit(count, width, vocabulary, dtype, with_bias, seed, *, device: str, **options) -> None:
    """`check_against_float64` of a head of that shape, drawn from `seed`."""
    torch.manual_seed(seed)
    check_against_float64(
        *make(count, width, vocabulary, dtype, spread=1.0, with_bias=with_bias), device=device, odd=True, **options
    )


def check_gradient(ours: Tensor, truth: Tensor, rounding: float | None = None) -> None:
    """
    Within 3e-3 as a whole, and 2e-2 in the worst row.

    `rounding`: of `roundings`, instead of both (a row's sum, too, may nearly cancel); what rounding to the dtype of `ours`
    alone costs, more where float16 ends, comes on top.
    """
    error = relative_error(ours, truth)
    if rounding is not None:
        limit = rounding + 2 * relative_error(truth.to(ours.dtype), truth)
        assert error <= limit, f"relative gradient error {error:.2e} > {limit:.2e}"
        return
    # Of a handful of numbers, both 16-bit roundings (of logits' gradients, of the result) can be at their worst.
    limit = 3e-3 if ours.numel() >= 64 else 2**-8
    assert error <= limit, f"relative gradient error {error:.2e} > {limit:.2e}"
    if ours.dim() == 2:
        error = worst_row_error(ours, truth)
        assert error <= 2e-2, f"relative gradient error of the worst row {error:.2e}"


def roundings(slopes: Tensor, truths: list[Tensor | None], hidden: Tensor, weight: Tensor) -> list[float | None]:
    """
    What two roundings to bfloat16 can do to the gradients of hidden, weight and bias, relative to their size.

    The sums over logits' gradients may nearly cancel where there are few, and few errors need not average out: of many, the
    errors are half of this.

    Args:
        slopes: `[N, V]` gradients of the logits' products in float64.
        truths: the three gradients in float64; None = not asked for.
        hidden, weight: what the products are made of.
    """
    h, w = (x.double().square().sum(1) for x in (hidden, weight))
    squares = slopes.double().square()
    summands = (squares @ w).sum(), (squares.t() @ h).sum(), squares.sum()
    count = squares.sum().square() / squares.square().sum().clamp(min=1e-300)
    unit, spread = 2**-9, 1 + 3 / count.clamp(min=1).sqrt().item()
    return [
        None
        if truth is None
        else 1e-4 + unit + unit * spread * (2 * total).sqrt().item() / max(truth.norm().item(), 1e-300)
        for truth, total in zip(truths, summands, strict=True)
    ]


def check_autocast(hidden: Tensor, weight: Tensor, targets: Tensor, *, frozen: bool, device: str, bound: float) -> None:
    """fp32 inputs under bf16 autocast: operands are rounded, logits are not, and gradients are fp32, within `bound`."""
    leaf = hidden.to(device, copy=True).requires_grad_()
    head = weight.to(device, copy=True).requires_grad_(not frozen)
    with torch.autocast(device, torch.bfloat16):
        out = linear_logprob(leaf, head, targets.to(device))
        out.logprobs.sum().backward()
    rounded = [x.bfloat16().double().requires_grad_() for x in (hidden, weight)]
    logits = logits_float64(*rounded)
    logprobs, _ = logprobs_float64(logits, targets)
    limit = tolerance(logits.detach(), torch.float32 if device == "cpu" else torch.bfloat16)
    assert (out.logprobs.cpu() - logprobs).abs().max() <= limit
    logprobs.sum().backward()
    assert leaf.grad.dtype == torch.float32 and relative_error(leaf.grad.cpu(), rounded[0].grad) <= bound
    if not frozen:
        assert head.grad.dtype == torch.float32 and relative_error(head.grad.cpu(), rounded[1].grad) <= bound


def errors_beside_eager(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, frozen: bool, one_pass: bool = False
) -> dict[str, tuple[float, float]]:
    """
    Errors against float64, ours and those of 16-bit logits in eager torch.

    Args:
        hidden, weight, targets: from `make`, on any device.
        frozen: only hidden has a gradient.
        one_pass: the loss of `linear_grpo_loss` instead of the sum of log-probs.

    Returns:
        `"logprobs"`: largest errors; `"hidden"` and, trained, `"weight"`: relative errors of the gradients.
    """
    count = len(targets)
    advantages = torch.where(torch.arange(count, device=hidden.device) % 2 == 0, 1.0, -0.5)
    leaves = [
        [x.detach().clone().requires_grad_(not frozen or x is hidden) for x in (hidden, weight)] for _ in range(2)
    ]
    leaves.append([x.detach().double().requires_grad_(not frozen or x is hidden) for x in (hidden, weight)])
    values = []
    for which, (states, head) in enumerate(leaves):
        if which == 0 and one_pass:
            segments = torch.tensor([0, count], device=hidden.device)
            objective = Objective(loss_type="dapo", num_items_in_batch=1.0)
            loss, stats = linear_grpo_loss(states, head, targets, segments, advantages, objective)
            loss.backward()
            values.append(stats.logprobs)
            continue
        if which == 0:
            logprobs = linear_logprob(states, head, targets).logprobs
        elif which == 1:
            logprobs = torch.log_softmax((states @ head.t()).float(), -1).gather(1, targets[:, None])[:, 0]
        else:
            logprobs, _ = logprobs_float64(logits_float64(states, head), targets)
        # On-policy: a ratio of 1, and its gradient.
        (-(advantages * logprobs).sum() if one_pass else logprobs.sum()).backward()
        values.append(logprobs.detach())
    errors = {"logprobs": tuple((value - values[2]).abs().max().item() for value in values[:2])}
    for name, place in (("hidden", 0), *(() if frozen else (("weight", 1),))):
        truth = leaves[2][place].grad
        errors[name] = tuple(relative_error(pair[place].grad, truth) for pair in leaves[:2])
    return errors
