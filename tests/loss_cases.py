"""Random rows for `linear_grpo_loss`, and what a full softmax and `grpo_loss` give for them in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from head_cases import check_gradient, roundings
from hypothesis import strategies as st
from torch import Tensor
from truth import logits_float64, logprobs_float64

from fastgrpo import GRPOStats, Objective, grpo_loss, linear_grpo_loss
from fastgrpo.objective import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES

VOCABULARY = 33
WIDTH = 8
LENGTHS = (4, 0, 7, 1, 5, 0)


def objective(loss_type: str, level: str = "token", **options: Any) -> Objective:
    return Objective(loss_type=loss_type, importance_sampling_level=level, **{"max_completion_length": 16, **options})


@dataclass
class Rows:
    """Arguments of `linear_grpo_loss`, and which of weight and bias train."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    lengths: tuple[int, ...]
    values: dict[str, Tensor | None]
    """Everything that has one number a row or a sequence."""
    bias: Tensor | None = None
    trains: tuple[bool, bool] = (False, False)
    head: dict[str, Any] = field(default_factory=dict)

    @property
    def segments(self) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=self.hidden.device)

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        """hidden, weight and bias, each with the gradient it needs."""
        return [
            None if x is None else x.detach().clone().to(dtype or x.dtype).requires_grad_(trains)
            for x, trains in zip((self.hidden, self.weight, self.bias), (True, *self.trains), strict=True)
        ]

    def to(self, device: str) -> Rows:
        """The same on another device."""
        values = {name: None if value is None else value.to(device) for name, value in self.values.items()}
        bias = None if self.bias is None else self.bias.to(device)
        return replace(
            self, hidden=self.hidden.to(device), weight=self.weight.to(device), targets=self.targets.to(device),
            values=values, bias=bias,
        )  # fmt: skip


HEADS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"trains": (True, False)},
    "frozen, bias": {"with_bias": True},
    "trained, bias": {"with_bias": True, "trains": (True, True)},
    "only the bias trains": {"with_bias": True, "trains": (False, True)},
    "frozen, softcap, temperature": {"head": {"softcap": 3.0, "temperature": 0.7, "logit_scale": 1.3}},
    "trained, softcap, temperature": {
        "trains": (True, True), "with_bias": True, "head": {"softcap": 3.0, "temperature": 0.7, "logit_scale": 1.3},
    },
}  # fmt: skip


def make(
    lengths: tuple[int, ...] = LENGTHS,
    dtype: torch.dtype = torch.float64,
    vocabulary: int = VOCABULARY,
    width: int = WIDTH,
    on_policy: bool = False,
    per_row: tuple[str, ...] = (),
    leave_out: tuple[str, ...] = ("sampler_ratio", "sampling_logprobs", "loss_mask"),
    with_bias: bool = False,
    trains: tuple[bool, bool] = (False, False),
    head: dict[str, Any] | None = None,
) -> Rows:
    """Random rows; old and reference log-probs lie near those of the policy."""
    count, batch = sum(lengths), len(lengths)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = torch.randn(count, width).to(dtype)
    weight = (torch.randn(vocabulary, width) * 0.7 * (WIDTH / width) ** 0.5).to(dtype)
    bias = torch.randn(vocabulary).to(dtype) if with_bias else None
    targets = torch.randint(0, vocabulary, (count,))
    head = head or {}
    logprobs, _ = logprobs_float64(logits_float64(hidden, weight, bias, **head), targets)

    def shape(name: str) -> int:
        return count if name in per_row else batch

    values = {
        "advantages": torch.randn(shape("advantages")),
        "old_logprobs": None if on_policy else logprobs + 0.3 * torch.randn(count),
        "ref_logprobs": logprobs + 0.5 * torch.randn(count),
        "sampling_logprobs": logprobs + 0.5 * torch.randn(count),
        "sampler_ratio": torch.rand(shape("sampler_ratio")) + 0.5,
        "loss_mask": torch.rand(count) < 0.7,
    }
    values = {
        name: value if value is None or name == "loss_mask" else value.to(precise)
        for name, value in values.items()
        if name not in leave_out
    }
    return Rows(hidden, weight, targets, lengths, values, bias, trains, head)


@dataclass
class Result:
    loss: Tensor
    stats: GRPOStats
    grads: list[Tensor | None]
    slopes: Tensor | None = None
    """`[N, V]` gradients of the logits' products, of a full softmax."""


def fused(rows: Rows, options: Objective, scale: float = 1.0, **extra: Any) -> Result:
    hidden, weight, bias = rows.leaves()
    loss, stats = linear_grpo_loss(
        hidden, weight, rows.targets, rows.segments, objective=options, bias=bias, **rows.values, **rows.head, **extra
    )
    (loss * scale).backward()
    return Result(loss.detach(), stats, [None if x is None else x.grad for x in (hidden, weight, bias)])


def full_softmax(rows: Rows, options: Objective) -> Result:
    """All logits in float64, log-softmax, sequences padded one by one, `grpo_loss`, autograd."""
    hidden, weight, bias = rows.leaves(torch.float64)
    batch = len(rows.lengths)
    products = torch.zeros(len(hidden), len(weight)).double().requires_grad_()
    shift = products if bias is None else products + bias
    logprobs, entropy = logprobs_float64(logits_float64(hidden, weight, shift, **rows.head), rows.targets)
    counted = (rows.targets >= 0) & (rows.targets < rows.weight.shape[0])
    loss_mask = rows.values.get("loss_mask")
    if loss_mask is not None:
        counted = counted & loss_mask.bool()
    width = max(rows.lengths)

    def pad(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        sequences = values.split(list(rows.lengths))
        return torch.stack([torch.cat([x, x.new_zeros(width - len(x))]) for x in sequences])

    def pad_either(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        values = values.double()
        return values.unsqueeze(1) if len(values) == batch else pad(values)

    given = {name: rows.values.get(name) for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs")}
    loss, stats = grpo_loss(
        pad(logprobs),
        pad_either(rows.values["advantages"]),
        pad(counted.long()),
        options,
        sampler_ratio=pad_either(rows.values.get("sampler_ratio")),
        entropy=pad(entropy),
        **{name: pad(None if value is None else value.double()) for name, value in given.items()},
    )
    loss.backward()
    stats = replace(
        stats,
        logprobs=torch.where(counted, logprobs, 0.0).detach(),
        entropy=torch.where(counted, entropy, 0.0).detach(),
    )
    return Result(loss.detach(), stats, [None if x is None else x.grad for x in (hidden, weight, bias)], products.grad)


def check_16_bit(
    rows: Rows,
    options: Objective,
    device: str,
    scale: float = 1.0,
    bound: float = 1e-3,
    autocast: bool = False,
    odd: bool = False,
) -> None:
    """
    Loss, log-probs and gradients of 16-bit operands within the bounds that a kernel must keep.

    Args:
        rows: on the CPU, as the float64 truth is. Ratios must be off the edges of clipping by more than `bound`.
        options: the objective.
        device: where `linear_grpo_loss` runs.
        scale: what a gradient scaler multiplies the loss by.
        bound: of a log-prob, and the loss relative to one plus its size.
        autocast: `rows` are fp32 and reach the products through bf16 autocast.
        odd: bounds of gradients are those of `roundings`, for shapes with few rows or words.
    """
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        found = fused(rows.to(device), options, scale=scale, num_chunks=3)
    rounded = replace(rows, hidden=rows.hidden.bfloat16(), weight=rows.weight.bfloat16()) if autocast else rows
    truth = full_softmax(rounded, options)
    assert found.loss.dtype == found.stats.logprobs.dtype == torch.float32
    error = (found.loss.cpu() - truth.loss).abs().item() / (1 + truth.loss.abs().item())
    assert error <= bound, f"loss error {error:.2e}"
    if len(rows.targets):
        error = (found.stats.logprobs.cpu() - truth.stats.logprobs).abs().max().item()
        assert error <= bound, f"log-prob error {error:.2e}"
    limits = roundings(truth.slopes, truth.grads, rows.hidden, rows.weight) if odd else [None] * 3
    for ours, exact, rounding in zip(found.grads, truth.grads, limits, strict=True):
        if exact is None:
            assert ours is None
            continue
        assert ours.dtype == rows.hidden.dtype
        check_gradient(ours.cpu(), exact * scale, rounding)


@st.composite
def cases_of_16_bit(draw: st.DrawFn) -> tuple[Rows, Objective, float]:
    """Rows of odd shapes, an objective and a loss scale for `check_16_bit`."""
    torch.manual_seed(draw(st.integers(0, 2**31), label="seed"))
    level = draw(st.sampled_from(IMPORTANCE_SAMPLING_LEVELS), label="level")
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]), label="dtype")
    optional = ("sampler_ratio", "loss_mask")
    rows = make(
        lengths=tuple(draw(st.lists(st.integers(0, 45), min_size=1, max_size=5), label="lengths")),
        dtype=dtype,
        vocabulary=draw(st.integers(2, 1200), label="vocabulary"),
        width=draw(st.integers(8, 130), label="width"),
        per_row=tuple(name for name in ("advantages", "sampler_ratio") if draw(st.booleans(), label=name)),
        leave_out=(*(name for name in optional if draw(st.booleans(), label=f"no {name}")), "sampling_logprobs"),
        **HEADS[draw(st.sampled_from(list(HEADS)), label="head")],
    )
    if draw(st.booleans(), label="on-policy"):
        rows.values["old_logprobs"] = None
    else:
        # Logs of ratios far from the edges of clipping, log 0.8 and log 1.2; one a sequence, where its mean is what counts.
        logprobs, _ = logprobs_float64(logits_float64(rows.hidden, rows.weight, rows.bias, **rows.head), rows.targets)
        sizes = torch.tensor([-0.5, -0.1, 0.0, 0.1, 0.5])
        each = sizes[torch.randint(5, (len(rows.lengths),))].repeat_interleave(torch.tensor(rows.lengths))
        rows.values["old_logprobs"] = (
            logprobs - (each if level == "sequence" else sizes[torch.randint(5, logprobs.shape)])
        ).float()
    options = objective(
        draw(st.sampled_from(LOSS_TYPES), label="loss"),
        level,
        beta=draw(st.sampled_from([0.0, 0.04]), label="beta"),
        entropy_coef=draw(st.sampled_from([0.0, 0.03]), label="entropy_coef"),
    )
    return rows, options, 1024.0 if dtype == torch.float16 else 1.0
