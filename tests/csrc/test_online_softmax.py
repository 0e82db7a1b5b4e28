"""csrc/math/online_softmax.h against torch's float64 log_softmax."""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

INF = math.inf
EPS = {"f32": 2.0**-24, "f64": 2.0**-53}
PRECISIONS = pytest.mark.parametrize("precision", ["f32", "f64"])

ordinary = st.floats(-30, 30, width=32)
extreme = st.sampled_from([-INF, -1e4, -500.0, 0.0, 500.0, 1e4])
rows = st.lists(ordinary | extreme, min_size=1, max_size=24)


def finite_row(data: st.DataObject) -> tuple[list[float], int]:
    """A row of logits and a target whose own logit is finite."""
    row = data.draw(rows.filter(lambda z: max(z) > -INF))
    return row, data.draw(st.sampled_from([i for i, z in enumerate(row) if z > -INF]))


def others(row: list[float], target: int) -> np.ndarray:
    return np.array(row[:target] + row[target + 1 :])


def finalized(ops: Any, row: list[float], target: int) -> tuple[float, float, float]:
    return ops.finalize(ops.partial(others(row, target)), row[target])


def truth(row: list[float], target: int) -> tuple[float, float, float]:
    """Log-prob, log-sum-exp and entropy in float64."""
    z = torch.tensor(row, dtype=torch.float64)
    logp = torch.log_softmax(z, 0)
    entropy = -(logp.exp() * logp.masked_fill(logp == -INF, 0.0)).sum()
    return logp[target].item(), torch.logsumexp(z, 0).item(), entropy.item()


def tolerance(precision: str, *values: float) -> float:
    """Rounding of sums of a few dozen terms: in units of the largest finite value that takes part."""
    return 64 * EPS[precision] * max([1.0, *(abs(v) for v in values if math.isfinite(v))])


def assert_close(found: Any, expected: Any, bound: float, what: str = "") -> None:
    for name, a, b in zip(("logprob", "lse", "entropy"), found, expected, strict=True):
        assert a == b or abs(a - b) <= bound, (
            f"{name} {a!r}, expected {b!r}, off by {abs(a - b):.3g} > {bound:.3g} {what}"
        )


def fields(partial: Any) -> tuple[float, float, float]:
    return partial.max, partial.sum, partial.weighted


def assert_same_partial(a: Any, b: Any, precision: str) -> None:
    assert a.max == b.max
    for x, y in ((a.sum, b.sum), (a.weighted, b.weighted)):
        assert abs(x - y) <= 64 * EPS[precision] * max(1.0, abs(x)), f"{fields(a)} against {fields(b)}"


@PRECISIONS
@given(data=st.data())
def test_row_equals_the_float64_softmax(csrc_math: ModuleType, precision: str, data: st.DataObject) -> None:
    row, target = finite_row(data)
    found = finalized(getattr(csrc_math, precision), row, target)
    assert_close(found, truth(row, target), tolerance(precision, *row), f"for {row}, target {target}")


@PRECISIONS
@given(data=st.data())
def test_any_split_of_the_row_gives_the_same(csrc_math: ModuleType, precision: str, data: st.DataObject) -> None:
    ops = getattr(csrc_math, precision)
    row = np.array(data.draw(rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(row)), max_size=4)))
    joined = ops.SoftmaxPartial()
    for piece in np.split(row, cuts):
        joined = ops.combine(joined, ops.partial(piece))
    assert_same_partial(joined, ops.partial(row), precision)


@PRECISIONS
@given(data=st.data())
def test_any_order_of_the_row_gives_the_same(csrc_math: ModuleType, precision: str, data: st.DataObject) -> None:
    ops = getattr(csrc_math, precision)
    row = data.draw(rows)
    shuffled = data.draw(st.permutations(row))
    assert_same_partial(ops.partial(np.array(shuffled)), ops.partial(np.array(row)), precision)


@PRECISIONS
@given(a=rows, b=rows, c=rows)
def test_combine_is_associative(csrc_math: ModuleType, precision: str, a: list, b: list, c: list) -> None:
    ops = getattr(csrc_math, precision)
    a, b, c = (ops.partial(np.array(x)) for x in (a, b, c))
    left = ops.combine(ops.combine(a, b), c)
    assert_same_partial(left, ops.combine(a, ops.combine(b, c)), precision)


@PRECISIONS
@given(a=rows, b=rows)
def test_combine_commutes_and_the_empty_partial_is_neutral_to_the_bit(
    csrc_math: ModuleType, precision: str, a: list, b: list
) -> None:
    ops = getattr(csrc_math, precision)
    a, b, empty = ops.partial(np.array(a)), ops.partial(np.array(b)), ops.SoftmaxPartial()
    assert fields(ops.combine(a, b)) == fields(ops.combine(b, a))
    assert fields(ops.combine(a, empty)) == fields(ops.combine(empty, a)) == fields(a)
    assert fields(ops.combine(empty, empty)) == (-INF, 0.0, 0.0)


@PRECISIONS
@given(data=st.data())
def test_logits_of_minus_infinity_change_no_bit(csrc_math: ModuleType, precision: str, data: st.DataObject) -> None:
    ops = getattr(csrc_math, precision)
    row = data.draw(rows)
    positions = data.draw(st.lists(st.integers(0, len(row)), min_size=1, max_size=4))
    padded = list(row)
    for position in positions:
        padded.insert(position, -INF)
    assert fields(ops.partial(np.array(padded))) == fields(ops.partial(np.array(row)))


@PRECISIONS
@pytest.mark.parametrize("gap", [5.0, 20.0, 50.0, 80.0])
@pytest.mark.parametrize("shift", [0.0, -1e4, 1e4])
def test_confident_target_keeps_its_digits(csrc_math: ModuleType, precision: str, gap: float, shift: float) -> None:
    ops = getattr(csrc_math, precision)
    logprob, _, _ = finalized(ops, [shift - gap, shift, shift - gap], 1)
    expected = -math.log1p(2 * math.exp(-gap))
    assert logprob == pytest.approx(expected, rel=1e-5 if precision == "f32" else 1e-13)
    assert ops.target_complement(logprob) == pytest.approx(
        -math.expm1(expected), rel=1e-5 if precision == "f32" else 1e-13
    )


@PRECISIONS
@pytest.mark.parametrize("logit", [0.0, 3.25, -1e4, 1e4])
def test_vocabulary_of_one_has_no_doubt(csrc_math: ModuleType, precision: str, logit: float) -> None:
    assert finalized(getattr(csrc_math, precision), [logit], 0) == (0.0, logit, 0.0)


@PRECISIONS
def test_target_of_minus_infinity_is_impossible_and_the_rest_unharmed(csrc_math: ModuleType, precision: str) -> None:
    ops = getattr(csrc_math, precision)
    logprob, lse, entropy = finalized(ops, [1.0, -INF, 1.0], 1)
    assert logprob == -INF
    assert ops.target_complement(logprob) == 1.0
    assert_close((0.0, lse, entropy), (0.0, 1.0 + math.log(2), math.log(2)), tolerance(precision))


@PRECISIONS
@pytest.mark.parametrize(("target", "position"), list(itertools.product([0, 1, 2], repeat=2)))
@pytest.mark.parametrize("poison", [math.nan, INF])
def test_nan_or_plus_infinity_makes_the_row_nan(
    csrc_math: ModuleType, precision: str, target: int, position: int, poison: float
) -> None:
    row = [0.5, -INF, 2.0]
    row[position] = poison
    logprob, _, entropy = finalized(getattr(csrc_math, precision), row, target)
    assert math.isnan(logprob)
    assert math.isnan(entropy)
    assert math.isnan(truth(row, target)[0])


@PRECISIONS
@given(row=rows, position=st.integers(0, 24))
def test_nan_survives_every_combine(csrc_math: ModuleType, precision: str, row: list, position: int) -> None:
    ops = getattr(csrc_math, precision)
    clean, poisoned = ops.partial(np.array(row)), ops.partial(np.insert(row, min(position, len(row)), math.nan))
    for joined in (ops.combine(clean, poisoned), ops.combine(poisoned, clean)):
        assert math.isnan(joined.sum)
        assert math.isnan(joined.weighted)


@PRECISIONS
def test_row_without_a_finite_logit_is_nan(csrc_math: ModuleType, precision: str) -> None:
    logprob, _, entropy = finalized(getattr(csrc_math, precision), [-INF, -INF], 0)
    assert math.isnan(logprob)
    assert math.isnan(entropy)


@PRECISIONS
def test_ends_of_the_number_range_do_not_overflow(csrc_math: ModuleType, precision: str) -> None:
    largest = float(np.finfo(np.float32 if precision == "f32" else np.float64).max)
    ops = getattr(csrc_math, precision)
    assert finalized(ops, [-largest, largest, -largest], 1) == (0.0, largest, 0.0)
    assert finalized(ops, [-largest, largest], 0) == (-INF, largest, 0.0)
