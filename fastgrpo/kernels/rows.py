"""What passes over rows on a CUDA device leave: statistics where they belong, and 16-bit gradients with a factor a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrpo.kernels.reference import RowStatistics, TokenObjective

_ALIGNMENT = 64
_ALIGNED_WORDS = 8
# A product that adds to the [V, H] fp32 gradient of the weight reads and writes all of it: give it this many rows, as far as
# memory goes.
_ROWS_A_BATCH = 4096


@dataclass(frozen=True)
class ScaledRows:
    """
    float16 gradients of rows whose coefficients had a power of two taken out, each row its own; csrc/math/row_power.h has why.

    Attributes:
        values: `[R, V]`.
        factors: `[R]` fp32: row i of the gradient is `factors[i] * values[i]`; powers of two, 0 for a row of zeros.
    """

    values: Tensor
    factors: Tensor

    def __getitem__(self, rows: slice) -> ScaledRows:
        return ScaledRows(self.values[rows], self.factors[rows])

    @cached_property
    def shares(self) -> tuple[float, Tensor]:
        """
        The largest factor, known to the host, and `[R]` in 16 bit what each is of it, at most 1.

        A sum over rows must take the factors before its product, and in 16 bit; what is below 2^-24 of the largest row is 0.
        """
        largest = self.factors.amax().item() or 1.0
        return largest, (self.factors / largest).to(self.values.dtype)


class UnroundedTargets(NamedTuple):
    """
    bfloat16 gradients of rows without their targets, and those in fp32; csrc/cuda/fused_head.cu has why.

    Attributes:
        values: `[R, V]`, 0 at a row's target.
        factors: `[R]` fp32: row i of the gradient is `factors[i] * values[i]` but for the target; None = 1 each.
        at_target: `[R]` fp32: the gradient there.
        targets: `[R]` int64.
    """

    values: Tensor
    factors: Tensor | None
    at_target: Tensor
    targets: Tensor


Gradients = Tensor | ScaledRows | UnroundedTargets


def statistics(count: int, like: Tensor, with_entropy: bool, out: RowStatistics | None) -> RowStatistics:
    """`out`, or fp32 memory on the device of a tensor for that many rows."""
    if out is not None:
        return out
    logprobs, lse = like.new_empty(2, count, dtype=torch.float32)
    return RowStatistics(logprobs, torch.empty_like(lse) if with_entropy else None, lse)


def pitch_of(vocabulary: int) -> int:
    """Elements from row to row of `[R, V]`, such that every product has aligned rows."""
    return -(-vocabulary // _ALIGNMENT) * _ALIGNMENT


class NoLists(ValueError):
    """Which rows a call computes is not known, for its sequences are not those of its rows."""


def cut_lists(wanted: Tensor, others: Tensor | None, counts: int) -> tuple[Tensor, Tensor | None]:
    """
    Lists of rows to the lengths that the compaction's kernel packed into a number, see csrc/cuda/compact.h.

    Other rows are counted whether they are listed or not. Raises `NoLists` where the kernel made none.
    """
    if counts < 0:
        raise NoLists("segments do not cover the rows, so that nothing is known of what each counts.")
    other_count, wanted_count = divmod(counts, 1 << 32)
    return wanted.narrow(0, 0, wanted_count), None if others is None else others.narrow(0, 0, other_count)


def rows_a_batch(chunk_rows: int, most_chunks: int) -> int:
    """Rows whose 16-bit gradients are collected for one product, where the weight gets a gradient: at most so many chunks'."""
    return min(-(-_ROWS_A_BATCH // chunk_rows), most_chunks) * chunk_rows


def word_products(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """`hidden @ weight.T`, `[R, H]` by `[V, H]`, into `out`, `[R, V]` fp32."""
    for products, words in _word_parts(out, weight):
        torch.mm(hidden, words.t(), out_dtype=out.dtype, out=products)
    return out


def sum_over_words(values: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """`values @ weight`, `[R, V]` by `[V, H]`, in fp32 into `out`; None = new memory."""
    if out is None:
        out = values.new_empty(len(values), weight.shape[1], dtype=torch.float32)
    beta = 0.0
    for part, words in _word_parts(values, weight):
        torch.addmm(out, part, words, beta=beta, out_dtype=out.dtype, out=out)
        beta = 1.0
    return out


def add_sum_over_rows(total: Tensor | None, values: Tensor, hidden: Tensor, by: float) -> Tensor:
    """
    `total + by * values.T @ hidden`, `[R, V]` and `[R, H]` to `[V, H]`, in fp32 in place of `total`.

    None = 0, and nothing clears the memory before.
    """
    beta = 1.0
    if total is None:
        total, beta = hidden.new_empty(values.shape[1], hidden.shape[1], dtype=torch.float32), 0.0
    for part, words in _word_parts(values, total):
        torch.addmm(words, part.t(), hidden, beta=beta, alpha=by, out_dtype=total.dtype, out=words)
    return total


def rounded_sum_over_rows(values: Tensor, hidden: Tensor, by: float) -> Tensor:
    """`by * values.T @ hidden` in their dtype, rounded once."""
    total = hidden.new_empty(values.shape[1], hidden.shape[1])
    for part, words in _word_parts(values, total):
        if len(words) < _ALIGNMENT:
            # A product of so small a result may be cut along its sum, and the parts be added up in 16 bit.
            words.copy_(add_sum_over_rows(None, part, hidden, by))
        else:
            torch.addmm(words, part.t(), hidden, beta=0.0, alpha=by, out=words)
    return total


def _word_parts(columns: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """
    `[R, V]` and `[V, H]` in the parts that a product each is for.

    Where V is no multiple of 16 bytes, cuBLAS has a kernel that is several times as slow, whatever the rows' pitch. So that one
    gets the last few words alone.
    """
    vocabulary = len(rows)
    whole = vocabulary // _ALIGNMENT * _ALIGNMENT
    if vocabulary % _ALIGNED_WORDS == 0 or whole == 0:
        yield columns, rows
        return
    for words in (slice(0, whole), slice(whole, vocabulary)):
        yield columns[:, words], rows[words]


def objective_arguments(objective: TokenObjective) -> tuple[list[Tensor | None], list[float]]:
    """What the ops take of every row, but the weights of entropies, and the objective's place and constants."""
    rows = [
        objective.advantages,
        objective.token_weights,
        objective.old_logprobs,
        objective.ref_logprobs,
        objective.multiplier,
        objective.phi,
    ]
    epsilon_low, epsilon_high, delta, beta, bias_correction, tau_pos, tau_neg = objective.constants
    constants = [epsilon_low, epsilon_high, delta, beta, bool(bias_correction), tau_pos, tau_neg]
    return [contiguous(values) for values in rows], [objective.loss_type, *constants]


def contiguous(values: Tensor | None) -> Tensor | None:
    """A gradient may be expanded, an input of the user's strided."""
    return None if values is None else values.contiguous()
