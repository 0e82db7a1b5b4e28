"""Products over a vocabulary, which are cut where its length would give all of them a slow kernel."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu import serve_on_the_cpu
from torch import Tensor
from truth import relative_error

from fastgrpo.kernels.rows import add_sum_over_rows, pitch_of, rounded_sum_over_rows, sum_over_words, word_products

ROWS, WIDTH = 11, 24


@pytest.fixture(params=[1, 63, 64, 72, 101, 128, 1000, 1001])
def operands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight, and values whose rows have a pitch, and nothing that is a number behind their ends."""
    serve_on_the_cpu(monkeypatch, {})
    values = torch.full((ROWS, pitch_of(request.param)), torch.nan, dtype=torch.bfloat16)[:, : request.param]
    values.copy_(torch.randn(ROWS, request.param))
    return torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(request.param, WIDTH).bfloat16(), values


def close(found: Tensor, exact: Tensor, limit: float = 1e-6) -> bool:
    return relative_error(found, exact) <= limit


def test_they_equal_float64(operands):
    hidden, weight, values = operands
    buffer = torch.full((ROWS, pitch_of(len(weight))), torch.nan)
    products = word_products(hidden, weight, buffer[:, : len(weight)])
    assert close(products, hidden.double() @ weight.double().t()) and products.data_ptr() == buffer.data_ptr()
    assert buffer[:, len(weight) :].isnan().all()

    into, exact = torch.full((ROWS, WIDTH), torch.nan), values.double() @ weight.double()
    assert sum_over_words(values, weight, into) is into and close(into, exact)
    assert close(sum_over_words(values, weight, None), exact)

    exact = 0.3 * values.double().t() @ hidden.double()
    total = add_sum_over_rows(None, values, hidden, 0.3)
    assert total.dtype == torch.float32 and close(total, exact)
    assert add_sum_over_rows(total, values, hidden, 0.3) is total and close(total, 2 * exact)
    rounded = rounded_sum_over_rows(values, hidden, 0.3)
    assert rounded.dtype == torch.bfloat16 and close(rounded, exact, 2e-3)


def test_no_large_product_is_over_words_whose_rows_are_not_aligned(operands, monkeypatch):
    _, weight, values = operands
    lengths, addmm = [], torch.addmm

    def recorded(*given: Tensor, **options: object) -> Tensor:
        lengths.append(given[1].shape[1])
        return addmm(*given, **options)

    monkeypatch.setattr(torch, "addmm", recorded)
    sum_over_words(values, weight, None)
    assert sum(lengths) == len(weight) and all(length % 8 == 0 or length < 64 for length in lengths)
    assert len(lengths) == (2 if len(weight) in (101, 1001) else 1)
