"""The head with its passes inside the product, csrc/cuda/fused_head.cu: logits never leave the chip.

For compute capability 9.0 and bfloat16. What it leaves of a row of logits, where a gradient is wanted, is 16 bit wide and goes
straight into the next product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo.kernels.library import answer_of_device
from fastgrpo.kernels.reference import HeadCall, Operands, RowPass, RowStatistics, TokenObjective, Use
from fastgrpo.kernels.rows import (
    UnroundedTargets,
    add_sum_over_rows,
    contiguous,
    objective_arguments,
    pitch_of,
    rounded_sum_over_rows,
    rows_a_batch,
    statistics,
    sum_over_words,
)

# Columns of one tile: see csrc/cuda/fused_head.cu.
_STRIP = 256
# The copies' pitch must be a multiple of 16 bytes.
_WIDTH = 8
# Within these, a logit that stands for none (kNoLogit in csrc/cuda/row.h) stays one whatever it is multiplied by.
_LEAST_SCALE, _LARGEST_SCALE = 1e-6, 1e6
# The kernel's tanh has an absolute error of 2^-22, which a logit has times this.
_LARGEST_SOFTCAP = 128.0
# Tiles of a call are counted in 32 bits.
_MOST_ROWS = 1 << 20
# A chunk holds gradients alone.
MOST_CHUNKS_A_BATCH = 4
# A product of a smaller result may be cut along its sum, and the parts be added up in 16 bit.
_LEAST_WEIGHT = 1 << 23


@dataclass(frozen=True)
class FusedOperands(Operands):
    """
    `Operands` with the buffers of a call.

    Attributes:
        values, factors, at_target: `[batch_rows, V]` and `[batch_rows]` twice, of `UnroundedTargets`; None where none are
            wanted. A row of values is a multiple of 64 elements from the next, and written a little behind its V.
        scratch: fp32, of the kernel's own; None where statistics are given.
    """

    values: Tensor | None
    factors: Tensor | None
    at_target: Tensor | None
    scratch: Tensor | None


def serves(call: HeadCall) -> bool:
    """Whether this kernel serves a call."""
    weight, bias, transform, compute_dtype, use, entropy_gradient = call
    width = weight.shape[1]
    return (
        weight.is_cuda
        and compute_dtype == torch.bfloat16
        and bias is None
        and serves_width(width)
        and weight.is_contiguous()
        and _LEAST_SCALE <= transform.outer <= _LARGEST_SCALE
        and (transform.softcap is None or transform.softcap <= _LARGEST_SOFTCAP * transform.temperature)
        # An entropy's gradient is p (log p + H): H is known when a row is complete, and log p no longer is.
        and not (entropy_gradient and use in (Use.SLOPES, Use.OBJECTIVE))
        and device_serves(weight.device)
    )


def serves_width(width: int) -> bool:
    """Whether this kernel serves a weight of that H."""
    return width % _WIDTH == 0 and width > 0


@torch.compiler.assume_constant_result
def device_serves(device: torch.device) -> bool:
    """Whether a CUDA device runs the kernel."""
    return answer_of_device(device, "fastgrpo_fused_head_serves")


def scratch_a_row(vocabulary: int) -> int:
    """fp32 numbers of the kernel's own: four a strip, a shift and the target's product."""
    return 4 * -(-vocabulary // _STRIP) + 2


def bytes_a_row(call: HeadCall) -> int:
    """
    Bytes that a row of a chunk takes: 16-bit values where a gradient is wanted.

    Else scratch, and hidden states that are picked out and rounded, which is little beside logits but all there is then.
    """
    vocabulary, width = call.weight.shape
    return 4 * scratch_a_row(vocabulary) + 6 * width if call.use is Use.STATISTICS else 2 * vocabulary


def prepare(call: HeadCall, accumulate: torch.dtype, chunk_rows: int, rows: int, collect: bool) -> FusedOperands:
    """As `reference.prepare`, buffers included. Nothing but gradients is as large as a chunk, so a batch is one."""
    weight, use, vocabulary = call.weight, call.use, call.weight.shape[0]
    if collect:
        chunk_rows = rows_a_batch(chunk_rows, MOST_CHUNKS_A_BATCH)
    chunk_rows = max(1, min(chunk_rows, rows, _MOST_ROWS))
    values = factors = at_target = scratch = None
    if use is not Use.STATISTICS:
        values = _without_padding(weight.new_empty(chunk_rows, pitch_of(vocabulary), dtype=torch.bfloat16), vocabulary)
        at_target = weight.new_empty(chunk_rows, dtype=torch.float32)
        factors = None if use is Use.GIVEN else torch.empty_like(at_target)
    if use is not Use.GIVEN:
        scratch = weight.new_empty(chunk_rows * scratch_a_row(vocabulary) + 1, dtype=torch.float32)
    head = _operand(weight), None, call.transform, torch.bfloat16, accumulate
    return FusedOperands(*head, chunk_rows, chunk_rows, values, factors, at_target, scratch)


def head_pass(
    hidden: Tensor,
    targets: Tensor,
    operands: FusedOperands,
    with_entropy: bool,
    with_grad: bool,
    out: RowStatistics | None,
) -> RowPass:
    """As `reference.head_pass`, without an entropy's gradient."""
    logprobs, entropy, lse = statistics(len(hidden), hidden, with_entropy, out)
    grad = _gradients(operands, targets) if with_grad else None
    parts = (None, None, None) if grad is None else (grad.values, grad.at_target, grad.factors)
    torch.ops.fastgrpo.fused_pass(*_head(hidden, targets, operands), logprobs, lse, entropy, *parts, operands.scratch)
    return RowPass(logprobs, entropy, lse, grad, None)


def head_objective(
    hidden: Tensor,
    targets: Tensor,
    operands: FusedOperands,
    objective: TokenObjective,
    with_entropy: bool,
    out: RowStatistics | None,
) -> RowPass:
    """As `reference.head_objective`, without weights of entropies."""
    logprobs, entropy, lse = statistics(len(hidden), hidden, with_entropy, out)
    grad = _gradients(operands, targets)
    rows, constants = objective_arguments(objective)
    torch.ops.fastgrpo.fused_objective(
        *_head(hidden, targets, operands),
        logprobs,
        lse,
        entropy,
        *rows,
        *constants,
        grad.values,
        grad.at_target,
        grad.factors,
        operands.scratch,
    )
    return RowPass(logprobs, entropy, lse, grad, None)


def head_grad(
    hidden: Tensor,
    targets: Tensor,
    operands: FusedOperands,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
) -> UnroundedTargets:
    """As `reference.head_grad`."""
    grad = _gradients(operands, targets)
    torch.ops.fastgrpo.fused_grad(
        *_head(hidden, targets, operands),
        logprobs,
        lse,
        entropy,
        contiguous(grad_logprobs),
        contiguous(grad_entropy),
        grad.values,
        grad.at_target,
    )
    return grad


def back_project(grad: UnroundedTargets, operands: FusedOperands, out: Tensor | None) -> Tensor:
    """As `reference.back_project`."""
    out = sum_over_words(grad.values, operands.weight, out)
    torch.ops.fastgrpo.finish_hidden_grad(
        out, grad.factors, grad.at_target, grad.targets, operands.weight, operands.transform.outer
    )
    return out


def add_weight_grad(total: Tensor | None, grad: UnroundedTargets, hidden: Tensor, operands: FusedOperands) -> Tensor:
    """As `reference.add_weight_grad`."""
    return _add_weight_grad(total, grad, _operand(hidden), operands.transform.outer)


def rounds_at_once(value_bytes: int, vocabulary: int, width: int) -> bool:
    """Whether `rounded_weight_grad` serves: where values that wait for it take no more memory than a sum in fp32."""
    return value_bytes <= 4 * vocabulary * width and vocabulary * width >= _LEAST_WEIGHT


def rounded_weight_grad(
    parts: tuple[Tensor | None, ...], hidden: Tensor, outer: float, factor: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A `reference.RoundingProduct` of `UnroundedTargets`; those that wait for a factor have factors of their own."""
    grad, hidden = UnroundedTargets(*parts), _operand(hidden)
    if factor is not None:
        grad = grad._replace(factors=grad.factors * factor, at_target=grad.at_target * factor)
    if dtype != torch.bfloat16:
        return _add_weight_grad(None, grad, hidden, outer).to(dtype)
    weighted = _weighted(hidden, grad)
    total = rounded_sum_over_rows(grad.values, weighted, outer)
    # The words that are targets have terms in fp32, and so need their sums in fp32 too.
    rows = len(hidden)
    at_targets = hidden.new_empty(rows, pitch_of(rows))
    torch.ops.fastgrpo.take_targets(grad.values, grad.targets, at_targets)
    # Of all columns, for the sake of aligned rows; those behind the last are dropped.
    sums = add_sum_over_rows(None, at_targets, weighted, outer)[:rows]
    torch.ops.fastgrpo.round_at_targets(total, sums, grad.at_target, grad.targets, hidden, outer)
    return total


def _add_weight_grad(total: Tensor | None, grad: UnroundedTargets, hidden: Tensor, outer: float) -> Tensor:
    """`total`, in fp32, and what the weight receives from these rows, in place; None = 0."""
    total = add_sum_over_rows(total, grad.values, _weighted(hidden, grad), outer)
    torch.ops.fastgrpo.add_to_targets(total, grad.at_target, grad.targets, hidden, outer)
    return total


def _weighted(hidden: Tensor, grad: UnroundedTargets) -> Tensor:
    """Hidden states times their rows' factors, which a sum over rows must take before its product: in fp32, rounded once."""
    if grad.factors is None:
        return hidden
    weighted = torch.empty_like(hidden)
    torch.ops.fastgrpo.scale_rows(hidden, grad.factors, weighted)
    return weighted


def _gradients(operands: FusedOperands, targets: Tensor) -> UnroundedTargets:
    """Memory for the gradients of rows with these targets."""
    rows = len(targets)
    parts = operands.values, operands.factors, operands.at_target
    if rows < operands.chunk_rows:
        parts = (None if x is None else x[:rows] for x in parts)
    return UnroundedTargets(*parts, targets.contiguous())


def _head(
    hidden: Tensor, targets: Tensor, operands: FusedOperands
) -> tuple[Tensor, Tensor, Tensor, float, float, float | None]:
    transform = operands.transform
    head = transform.temperature, transform.logit_scale, transform.softcap
    return _operand(hidden), operands.weight, targets.contiguous(), *head


def _without_padding(values: Tensor, vocabulary: int) -> Tensor:
    return values if values.shape[1] == vocabulary else values[:, :vocabulary]


def _operand(values: Tensor) -> Tensor:
    """In bf16, contiguous, and at a multiple of 16 bytes, as the copies want it."""
    values = values.to(torch.bfloat16).contiguous()
    return values.clone() if values.data_ptr() % 16 else values
