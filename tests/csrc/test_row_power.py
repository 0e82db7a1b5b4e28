"""csrc/math/row_power.h, and float16 gradients with their powers of two taken out, against float64 at any coefficient."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from truth import relative_error

from fastgrpo.kernels import cuda
from fastgrpo.kernels.reference import HeadCall, Transform, Use

PRECISIONS = pytest.mark.parametrize("precision", ["f32", "f64"])
LEAST, HIGHEST = 2.0**-100, 65504.0
finite = st.floats(-(2.0**100), 2.0**100, width=32)


@given(g=finite, h=finite)
@PRECISIONS
def test_coefficients_without_their_power_are_below_two_and_lose_no_bit(csrc_math, precision, g, h):
    ops = getattr(csrc_math, precision)
    power, size = float(ops.row_power(g, h)), abs(g) + 8 * abs(h)
    if size == 0:
        assert power == 0
        return
    assert math.frexp(power)[0] == 0.5
    assert size / power < 2 * (1 + 2**-23)
    assert power == LEAST or size / power >= 1
    real = np.float32 if precision == "f32" else np.float64
    for value in (g, h):
        assert float(real(value) / real(power)) * power == value or abs(value) < 2.0**-126 * power


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
@PRECISIONS
def test_what_is_not_finite_is_left_as_it_is(csrc_math, precision, bad, place):
    pair = (bad, 1.0) if place == 0 else (1.0, bad)
    assert getattr(csrc_math, precision).row_power(*pair) == 1


@pytest.mark.parametrize("words", [2, 7, 1000, 151936, 2**29])
def test_no_entry_of_the_entropy_s_gradient_reaches_eight(words):
    # The entropy is largest where the other words share what is left equally.
    p = torch.logspace(-12, 0, 4001, dtype=torch.float64)[:-1]
    entropy = -(p * p.log() + (1 - p) * ((1 - p) / (words - 1)).log())
    assert (p * (p.log() + entropy)).abs().max() < 5.3


def products_with(out_dtype: Any, total: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float) -> Tensor:
    # As cuBLAS: 16-bit factors, exact products, sums in float32.
    result = alpha * (a.to(out_dtype) @ b.to(out_dtype))
    return result if not beta else result + beta * total


@pytest.fixture
def device_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.mm` and `torch.addmm` with `out_dtype`, which a CPU does not have."""

    def mm(a, b, *, out_dtype, out=None):
        result = products_with(out_dtype, None, a, b, 1.0, 0.0)
        return result if out is None else out.copy_(result)

    def addmm(total, a, b, *, beta, out_dtype, out, alpha=1.0):
        return out.copy_(products_with(out_dtype, total, a, b, alpha, beta))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)


ROWS, WIDTH, WORDS = 48, 24, 3000


class Twin:
    """Rows with a float16 head: what the row kernel stores, in float32 with its roundings, and the float64 truth."""

    def __init__(self, csrc_math: ModuleType, g: Tensor, h: Tensor, scale: float | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(ROWS, WIDTH, generator=generator).half()
        self.weight = (torch.randn(WORDS, WIDTH, generator=generator) * 0.4 + 0.1).half()
        targets = torch.randint(WORDS, (ROWS,), generator=generator)
        self.hidden[::2] += self.weight[targets[::2]] * 2
        call = HeadCall(self.weight, None, Transform(0.9), torch.float16, Use.GIVEN, True)
        self.operands = cuda.prepare(call, torch.float32, ROWS, ROWS, collect=True)
        power = torch.from_numpy(csrc_math.f32.row_power(g.numpy(), h.numpy()))
        divisor = torch.where(power == 0, 1.0, power)
        if scale is not None:
            divisor = power = torch.ones_like(g)
        stored = self.slopes((self.hidden.float() @ self.weight.float().t()) / 0.9, targets, g / divisor, h / divisor)
        values = (stored * (scale or self.operands.scale)).half()
        self.gradients = cuda.ScaledRows(values, power / (scale or self.operands.scale))
        logits = (self.hidden.double() @ self.weight.double().t()) / 0.9
        self.exact = self.slopes(logits, targets, g.double(), h.double()) / 0.9

    @staticmethod
    def slopes(logits: Tensor, targets: Tensor, g: Tensor, h: Tensor) -> Tensor:
        log_p = torch.log_softmax(logits, -1)
        p, column = log_p.exp(), targets[:, None]
        first = -p.scatter(1, column, torch.expm1(log_p.gather(1, column)))
        entropy = -(p * log_p).sum(-1, keepdim=True)
        return g[:, None] * first - h[:, None] * p * (log_p + entropy)

    def errors(self) -> tuple[float, float, float]:
        """Of the worst row of hidden's gradient, and of the weight's and the bias's."""
        hidden = cuda.back_project(self.gradients, self.operands).double()
        wanted = self.exact @ self.weight.double()
        counts = wanted.norm(dim=1) > 0
        rows = ((hidden - wanted).norm(dim=1) / wanted.norm(dim=1))[counts]
        assert hidden[~counts].eq(0).all()
        half = cuda.add_weight_grad(None, self.gradients[:20], self.hidden[:20], self.operands)
        weight = cuda.add_weight_grad(half, self.gradients[20:], self.hidden[20:], self.operands)
        bias = cuda.bias_grad(self.gradients, self.operands) * self.operands.transform.outer
        return (
            rows.max().item() if len(rows) else 0.0,
            relative_error(weight, self.exact.t() @ self.hidden.double()),
            relative_error(bias, self.exact.sum(0)),
        )


def coefficients(low: float, high: float, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(ROWS).uniform_(math.log(low), math.log(high), generator=generator).exp()
    return size * torch.randn(ROWS, generator=generator).sign()


SIZES = {
    "1 / tokens": (1e-5, 1e-4),
    "times 2^16": (1, 10),
    "times 2^30": (1e4, 1e5),
    "tiny": (1e-25, 1e-24),
    "huge": (1e24, 1e25),
    "of every size": (1e-9, 1e3),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_float16_rows_are_exact_at_any_coefficient(csrc_math, device_products, size, with_entropy):
    g = coefficients(*SIZES[size])
    h = coefficients(*SIZES[size], seed=2) if with_entropy else torch.zeros(ROWS)
    g[5] = h[5] = 0.0
    twin = Twin(csrc_math, g, h)
    assert twin.gradients.values.abs().max() < 2 * twin.operands.scale
    row, weight, bias = twin.errors()
    assert row <= 2e-3 and weight <= 1e-3 and bias <= 1e-3, (row, weight, bias)


@pytest.mark.parametrize("size", ["tiny", "times 2^30", "of every size"])
def test_one_factor_for_every_row_would_not_do(csrc_math, device_products, size):
    twin = Twin(csrc_math, coefficients(*SIZES[size]), torch.zeros(ROWS), scale=2048.0)
    row, weight, _ = twin.errors()
    assert not (row <= 1e-2 and weight <= 1e-2)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 3e38])
def test_a_coefficient_that_overflows_reaches_the_scaler_and_no_other_row(csrc_math, device_products, bad):
    g = coefficients(0.1, 1.0)
    clean = cuda.back_project(Twin(csrc_math, g, torch.zeros(ROWS)).gradients, Twin(csrc_math, g, g).operands)
    g[7] = bad
    twin = Twin(csrc_math, g, torch.zeros(ROWS))
    hidden = cuda.back_project(twin.gradients, twin.operands)
    others = [row for row in range(ROWS) if row != 7]
    assert torch.equal(hidden[others], clean[others])
    # A finite one is as large as float32 holds it; in 16 bit it is infinite.
    assert not hidden[7].half().isfinite().all()
    weight = cuda.add_weight_grad(None, twin.gradients, twin.hidden, twin.operands)
    assert not weight.half().isfinite().all()


def test_a_gradient_too_large_for_float16_is_infinite_never_clipped(csrc_math, device_products):
    twin = Twin(csrc_math, coefficients(1e4, 1e5), torch.zeros(ROWS))
    hidden = cuda.back_project(twin.gradients, twin.operands)
    assert hidden.isfinite().all() and hidden.abs().max() > HIGHEST
    rounded = hidden.half()
    too_large = hidden.abs() >= 65520
    assert torch.equal(rounded.isinf(), too_large) and too_large.any()
