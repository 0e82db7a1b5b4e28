"""What passes over rows on a CUDA device leave: statistics where they belong, and 16-bit gradients with a factor a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrpo.kernels.reference import RowStatistics, TokenObjective

_ALIGNMENT = 64
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


def rows_a_batch(chunk_rows: int, most_chunks: int) -> int:
    """Rows whose 16-bit gradients are collected for one product, where the weight gets a gradient: at most so many chunks'."""
    return min(-(-_ROWS_A_BATCH // chunk_rows), most_chunks) * chunk_rows


def add_product(total: Tensor | None, a: Tensor, b: Tensor, by: float) -> Tensor:
    """`total + by * a @ b` in fp32, in place of `total`; None = 0, and nothing clears the memory before."""
    beta = 1.0
    if total is None:
        total, beta = b.new_empty(a.shape[0], b.shape[1], dtype=torch.float32), 0.0
    return torch.addmm(total, a, b, beta=beta, alpha=by, out_dtype=total.dtype, out=total)


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
