"""csrc/cuda/row.h, which both row kernels inline, compiled for the CPU: against float64, in float16 at any coefficient."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import pytest
import torch
from row_kernels import GIVEN, OBJECTIVE, Params, RowArgs, pitch_of
from torch import Tensor
from truth import COEFFICIENT_SIZES

BF16, FP16 = torch.bfloat16, torch.float16
SCALE = 4096.0
ROWS = 40


class Case:
    """Rows, their coefficients g of the log-prob and h of the entropy, the float64 truth, and what the functions give."""

    def __init__(
        self,
        row_twin: ctypes.CDLL,
        products: Tensor,
        targets: Tensor,
        g: Tensor,
        h: Tensor | None = None,
        dtype: torch.dtype = FP16,
        objective: bool = False,
        **head: float,
    ) -> None:
        rows, words = products.shape
        self.factors = torch.full((rows,), math.nan)
        self.statistics = {name: torch.full((rows,), math.nan) for name in ("logprobs", "lse", "entropy")}
        stored = torch.full((rows, pitch_of(words)), math.nan, dtype=dtype)
        logits = torch.full(stored.shape, math.nan)
        logits[:, :words] = products
        self.exact = self.truth(products, targets, g, h, **head)
        if not objective:
            for name, values in self.statistics.items():
                values.copy_(self.exact[name])
        # On-policy GRPO's derivative in a log-prob is minus the advantage, and a bonus of the entropy leaves the loss.
        bonus = None if h is None else -h
        inputs: dict[str, Any] = {"advantages": -g, "token_weights": torch.ones(rows), "entropy_weights": bonus}
        if not objective:
            inputs = {"grad_logprobs": g, "grad_entropy": h}
        args = RowArgs(
            logits=logits.data_ptr(),
            logits_pitch=logits.stride(0),
            targets=targets.data_ptr(),
            targets_are_64_bit=True,
            rows=rows,
            columns=words,
            temperature=head.get("temperature", 1.0),
            logit_scale=head.get("logit_scale", 1.0),
            softcap=head.get("softcap", 0.0),
            coefficients=OBJECTIVE if objective else GIVEN,
            grad_dtype=int(dtype == FP16),
            grad_scale=SCALE if dtype == FP16 else 1.0,
            grad=stored.data_ptr(),
            grad_pitch=stored.stride(0),
            params=Params(0, 0.2, 0.2, math.inf, 0.0, True, 1.0, 1.05),
            row_factors=self.factors.data_ptr(),
            **{name: values.data_ptr() for name, values in self.statistics.items()},
            **{name: None if values is None else values.data_ptr() for name, values in inputs.items()},
        )
        row_twin.row_twin(ctypes.byref(args))
        self.stored = stored[:, :words]
        self.gradient = self.stored.double() * (self.factors.double()[:, None] if dtype == FP16 else 1.0)

    @staticmethod
    def truth(
        products: Tensor,
        targets: Tensor,
        g: Tensor,
        h: Tensor | None,
        temperature: float = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
    ) -> dict[str, Tensor]:
        z, slope = products.double() * logit_scale, torch.ones(())
        if softcap is not None:
            capped = torch.tanh(z / softcap)
            z, slope = softcap * capped, 1 - capped.square()
        z = z / temperature
        log_p = torch.log_softmax(z, -1).clamp(min=-1e9)
        p, column, counts = log_p.exp(), targets.clamp(0, products.shape[1] - 1)[:, None], (targets >= 0).double()
        entropy = -(p * log_p).sum(-1)
        gradient = g.double()[:, None] * -p.scatter(1, column, torch.expm1(log_p.gather(1, column)))
        if h is not None:
            gradient -= h.double()[:, None] * p * (log_p + entropy[:, None])
        return {
            "logprobs": log_p.gather(1, column)[:, 0] * counts,
            "lse": torch.logsumexp(z, -1) * counts,
            "entropy": entropy * counts,
            "gradient": gradient * slope * counts[:, None],
        }

    def worst_row(self) -> float:
        """The largest relative error of a row's gradient; rows that are 0 must be."""
        wanted, norm = self.exact["gradient"], self.exact["gradient"].norm(dim=1)
        assert self.gradient.isfinite().all() and self.gradient[norm == 0].eq(0).all()
        rows = ((self.gradient - wanted).norm(dim=1) / norm)[norm > 0]
        return rows.max().item() if len(rows) else 0.0


def rows_of(words: int) -> tuple[Tensor, Tensor]:
    products, targets = torch.randn(ROWS, words), torch.randint(words, (ROWS,))
    products[torch.arange(0, ROWS, 2), targets[::2]] += 3.0
    targets[3] = -100
    return products, targets


def coefficients(low: float, high: float) -> Tensor:
    size = torch.empty(ROWS).uniform_(math.log(low), math.log(high)).exp() * torch.randn(ROWS).sign()
    size[5] = 0.0
    return size


HEADS = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 1.3},
    "softcap": {"softcap": 3.0, "temperature": 0.9},
}


@pytest.mark.parametrize("size", COEFFICIENT_SIZES)
@pytest.mark.parametrize("head", HEADS)
def test_float16_rows_lose_no_digit_to_their_coefficients(row_twin, size, head):
    for words, objective, bonus in itertools.product((7, 1000), (True, False), (True, False)):
        h = coefficients(*COEFFICIENT_SIZES[size]) if bonus else None
        case = Case(
            row_twin, *rows_of(words), coefficients(*COEFFICIENT_SIZES[size]), h, objective=objective, **HEADS[head]
        )
        assert case.worst_row() <= 1e-3
        assert case.stored.abs().max() < 2 * SCALE
        assert torch.frexp(case.factors[case.factors != 0]).mantissa.eq(0.5).all()
        assert case.factors[3] == 0 == case.factors[5]


@pytest.mark.parametrize("words", [2, 3, 4, 5, 7, 100, 257, 2047])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head", HEADS)
def test_statistics_and_gradients_equal_float64_at_every_length(row_twin, words, dtype, head):
    g, h = coefficients(0.1, 1.0), coefficients(0.01, 0.1)
    case = Case(row_twin, *rows_of(words), g, h, dtype, objective=True, **HEADS[head])
    for name, values in case.statistics.items():
        assert (values - case.exact[name]).abs().max() <= 1e-5, name
    # Words share a row's error: two of them may have all of a rounding.
    assert case.worst_row() <= (2**-8 if dtype == BF16 else 2**-11) + 1e-4


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("objective", [True, False])
def test_words_at_minus_infinity_have_no_gradient_at_any_coefficient(row_twin, dtype, objective):
    products, targets = rows_of(128)
    products[:, 64:], targets = -math.inf, targets % 64
    large = torch.full((ROWS,), 1e12)
    case = Case(row_twin, products, targets, large, large, dtype, objective)
    assert case.stored.isfinite().all() and case.stored[:, 64:].eq(0).all() and case.worst_row() <= 2**-8


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_in_its_row(row_twin, dtype, bad):
    products, targets = rows_of(300)
    g = coefficients(1e-5, 1e-4)
    clean = Case(row_twin, products, targets, g, dtype=dtype, objective=True)
    g[7] = bad
    products = products.clone()
    products[9, 20] = math.nan
    case = Case(row_twin, products, targets, g, dtype=dtype, objective=True)
    others = [row for row in range(ROWS) if row not in (7, 9)]
    assert not case.stored[7].isfinite().all() and case.stored[9].isnan().all()
    assert torch.equal(case.stored[others], clean.stored[others])


def test_bfloat16_has_no_factors(row_twin):
    case = Case(row_twin, *rows_of(100), coefficients(1e-5, 1e-4), dtype=BF16)
    assert case.factors.isnan().all()
