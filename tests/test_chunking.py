"""Claims about the chunk plan: budgets are kept, counts are met."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.chunking import CUDA_ROWS, ChunkPlan
from fastgrpo.kernels import cuda, fused_head
from fastgrpo.kernels.rows import rows_a_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@given(st.integers(1, 1 << 32), st.integers(1, 300_000), st.integers(1, 3), st.sampled_from([4, 8]))
def test_the_buffers_of_a_chunk_fit_the_budget_or_hold_one_row(budget, vocabulary, buffers, itemsize):
    rows = ChunkPlan(chunk_bytes=budget).rows(10_000, vocabulary * buffers * itemsize, CPU)
    assert rows >= 1
    assert rows == 1 or rows * vocabulary * buffers * itemsize <= budget
    assert (rows + 1) * vocabulary * buffers * itemsize > budget


@given(st.integers(0, 5000), st.integers(1, 64))
def test_exactly_num_chunks_whatever_the_budget_says(count, num_chunks):
    rows = ChunkPlan(chunk_bytes=1, num_chunks=num_chunks).rows(count, 4000, CPU)
    chunks = -(-count // rows)
    assert chunks <= num_chunks
    assert rows * num_chunks >= count


def test_a_multiplier_makes_that_many_times_the_chunks():
    automatic = ChunkPlan(chunk_bytes=1 << 20).rows(4096, 4096, CPU)
    assert automatic == 256
    assert ChunkPlan(chunk_bytes=1 << 20, logit_chunk_multiplier=4.0).rows(4096, 4096, CPU) == 64
    assert ChunkPlan(chunk_bytes=1 << 20, logit_chunk_multiplier=0.5).rows(4096, 4096, CPU) == 512


def test_an_accelerator_gets_512_mib_by_default():
    assert ChunkPlan().rows(1 << 20, 4 << 17, CUDA) == 1024


@given(st.integers(1, 5000))
def test_automatic_numbers_are_multiples_of_what_products_like(rows):
    found = ChunkPlan(chunk_bytes=rows).rows(10_000, 1, CPU, (1000, 100))
    nearly = rows + rows // 256
    assert found == (rows if nearly < 100 else nearly - nearly % (100 if nearly < 1000 else 1000))
    assert found <= rows * (1 + 1 / 256)


@pytest.mark.parametrize("vocabulary", [32000, 49155, 128256, 128257, 151936, 152064, 256000, 262144, 262208])
@pytest.mark.parametrize(("kernels", "bytes_a_word"), [(fused_head, 2), (cuda, 4)])
def test_a_product_for_the_weight_s_gradient_has_4096_rows(kernels, bytes_a_word, vocabulary):
    rows = ChunkPlan().rows(1 << 20, vocabulary * bytes_a_word, CUDA, CUDA_ROWS)
    assert rows_a_batch(rows, kernels.MOST_CHUNKS_A_BATCH) >= 4096


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (True, TypeError),
        ("2", TypeError),
        (0, ValueError),
        (-1.0, ValueError),
        (math.inf, ValueError),
        (math.nan, ValueError),
    ],
)
def test_a_multiplier_is_a_finite_positive_number(value, error):
    with pytest.raises(error, match=f"logit_chunk_multiplier is {value!r}; give a "):
        ChunkPlan(logit_chunk_multiplier=value)
