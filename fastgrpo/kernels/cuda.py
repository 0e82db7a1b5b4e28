"""The head's building blocks on CUDA: torch's products around the row kernels of the library. See `reference` for each.

A chunk of fp32 products lives in one buffer that every chunk of a call reuses. The row kernel turns it into statistics and,
over the same memory, into 16-bit gradients, which the next product reads where they lie.

`prepare` hands a call that `fused_head` serves to that: its operands are `FusedOperands`, and its gradients `UnroundedTargets`,
which every function here passes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo.kernels import fused_head
from fastgrpo.kernels.fused_head import FusedOperands
from fastgrpo.kernels.library import row_is_read_once
from fastgrpo.kernels.reference import HeadCall, Operands, RoundingProduct, RowPass, RowStatistics, TokenObjective
from fastgrpo.kernels.rows import (
    Gradients,
    ScaledRows,
    UnroundedTargets,
    add_sum_over_rows,
    contiguous,
    cut_lists,
    objective_arguments,
    pitch_of,
    rows_a_batch,
    statistics,
    sum_over_words,
    word_products,
)
from fastgrpo.kernels.sums import grpo_sums

HANDLES_IGNORED = True
"""Whether `row_pass` gives zeros for a target outside `[0, V)`."""
# A chunk's gradients take half the bytes of its logits.
MOST_CHUNKS_A_BATCH = 8
# Float16 holds small probabilities only after a factor; |d logprob| <= 1, |d entropy| < 8 and a row without its power of two,
# below 2 (csrc/math/row_power.h), leave room for this one.
_FLOAT16_SCALE = 4096.0
# Blocks that sum a loss whose sequences do not matter.
_PARTS = 64


@dataclass(frozen=True)
class CudaOperands(Operands):
    """
    `Operands` with the buffers of a call.

    Attributes:
        products: `[chunk_rows, pitch]` fp32; a chunk of products, then of their gradients.
        gradients: `[batch_rows, pitch]` 16 bit, where gradients of several chunks are collected; None: in `products`.
        padded_bias: `[pitch]` fp32 or None.
        scale: what gradients are multiplied by before they are rounded.
        factors: `[batch_rows]` fp32 of `ScaledRows`, for float16; else None.
    """

    products: Tensor
    gradients: Tensor | None
    padded_bias: Tensor | None
    scale: float
    factors: Tensor | None


def prepare(
    call: HeadCall, accumulate: torch.dtype, chunk_rows: int, rows: int, collect: bool
) -> CudaOperands | FusedOperands:
    """As `reference.prepare`, buffers included."""
    if fused_head.serves(call):
        return fused_head.prepare(call, accumulate, chunk_rows, rows, collect)
    weight, bias, transform, compute_dtype, *_ = call
    vocabulary = weight.shape[0]
    pitch = pitch_of(vocabulary)
    chunk_rows = max(1, min(chunk_rows, rows))
    batch_rows = max(1, min(rows_a_batch(chunk_rows, MOST_CHUNKS_A_BATCH) if collect else chunk_rows, rows))
    gradients = None
    if batch_rows > chunk_rows:
        gradients = weight.new_empty(batch_rows, pitch, dtype=compute_dtype)
    return CudaOperands(
        weight.to(compute_dtype),
        bias,
        transform,
        compute_dtype,
        accumulate,
        chunk_rows,
        batch_rows,
        weight.new_empty(chunk_rows, pitch, dtype=torch.float32),
        gradients,
        None if bias is None else torch.nn.functional.pad(bias.float(), (0, pitch - vocabulary)),
        _FLOAT16_SCALE if compute_dtype == torch.float16 else 1.0,
        weight.new_empty(batch_rows, dtype=torch.float32) if compute_dtype == torch.float16 else None,
    )


def prefers_given(call: HeadCall) -> bool:
    """As `reference.prefers_given`: where only given coefficients let the fused kernel serve."""
    return fused_head.serves(call)


def bytes_a_row(call: HeadCall, with_entropy: bool) -> int:
    """As `reference.bytes_a_row`: fp32 products, and everything else happens in their place."""
    return fused_head.bytes_a_row(call) if fused_head.serves(call) else 4 * call.weight.shape[0]


def gradient_buffer(operands: CudaOperands | FusedOperands, rows: int) -> Gradients | None:
    """As `reference.gradient_buffer`."""
    if isinstance(operands, FusedOperands) or operands.gradients is None:
        return None
    return _with_factors(operands.gradients[:rows, : operands.weight.shape[0]], operands)


def computed_rows(
    targets: Tensor, vocabulary: int, first: Tensor | None, second: Tensor | None, partition: bool
) -> tuple[Tensor, Tensor | None]:
    """As `reference.computed_rows`; the counts are the only host sync of a call."""
    targets = targets.contiguous()
    wanted = torch.empty_like(targets, dtype=torch.int64)
    others = torch.empty_like(wanted) if partition else None
    counts = wanted.new_empty(1)
    factors = (None if x is None else x.float().contiguous() for x in (first, second))
    torch.ops.fastgrpo.compact_rows(targets, vocabulary, *factors, wanted, others, counts)
    return cut_lists(wanted, others, counts.item())


def head_pass(
    hidden: Tensor,
    targets: Tensor,
    operands: CudaOperands | FusedOperands,
    *,
    with_entropy: bool = False,
    with_logprob_grad: bool = False,
    with_entropy_grad: bool = False,
    out: RowStatistics | None = None,
) -> RowPass:
    """As `reference.head_pass`."""
    if isinstance(operands, FusedOperands):
        return fused_head.head_pass(hidden, targets, operands, with_entropy, with_logprob_grad, out)
    return row_pass(
        project(hidden, operands),
        targets,
        operands,
        with_entropy=with_entropy,
        with_logprob_grad=with_logprob_grad,
        with_entropy_grad=with_entropy_grad,
        out=out,
    )


def head_objective(
    hidden: Tensor,
    targets: Tensor,
    operands: CudaOperands | FusedOperands,
    objective: TokenObjective,
    with_entropy: bool,
    grad_out: Gradients | None,
    out: RowStatistics | None = None,
) -> RowPass:
    """As `reference.head_objective`."""
    if isinstance(operands, FusedOperands):
        return fused_head.head_objective(hidden, targets, operands, objective, with_entropy, out)
    return row_objective(project(hidden, operands), targets, operands, objective, with_entropy, grad_out, out)


def head_grad(
    hidden: Tensor,
    targets: Tensor,
    operands: CudaOperands | FusedOperands,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    out: Gradients | None,
) -> Gradients:
    """As `reference.head_grad`."""
    saved_and_given = logprobs, lse, grad_logprobs, entropy, grad_entropy
    if isinstance(operands, FusedOperands):
        return fused_head.head_grad(hidden, targets, operands, *saved_and_given)
    return row_grad(project(hidden, operands), targets, operands, *saved_and_given, out)


def project(hidden: Tensor, operands: CudaOperands) -> Tensor:
    """As `reference.project`, into the buffer, and without the bias, which the row kernel adds."""
    products = operands.products[: hidden.shape[0], : operands.weight.shape[0]]
    return word_products(hidden.to(operands.compute_dtype), operands.weight, products)


def row_pass(
    products: Tensor,
    targets: Tensor,
    operands: CudaOperands,
    *,
    with_entropy: bool = False,
    with_logprob_grad: bool = False,
    with_entropy_grad: bool = False,
    out: RowStatistics | None = None,
) -> RowPass:
    """As `reference.row_pass`; the gradients are 16 bit, times `operands.scale`, and in the memory of `products`."""
    logprobs, entropy, lse = statistics(len(products), products, with_entropy, out)
    first = _over(products, operands, 0) if with_logprob_grad or with_entropy_grad else None
    second = None
    if with_entropy_grad:
        if row_is_read_once(products.device, products.shape[1]):
            second = _over(products, operands, 1)
        else:
            second = torch.empty_like(operands.products[: len(products)], dtype=operands.compute_dtype)
            second = second[:, : products.shape[1]]
    torch.ops.fastgrpo.row_pass(
        products, targets.contiguous(), *_head(operands), logprobs, lse, entropy, first, second, operands.scale
    )
    return RowPass(logprobs, entropy, lse, first if with_logprob_grad else None, second)


def row_objective(
    products: Tensor,
    targets: Tensor,
    operands: CudaOperands,
    objective: TokenObjective,
    with_entropy: bool,
    grad_out: Tensor | ScaledRows | None,
    out: RowStatistics | None = None,
) -> RowPass:
    """As `reference.row_objective`; the kernel evaluates the objective itself."""
    logprobs, entropy, lse = statistics(len(products), products, with_entropy, out)
    grad = _in_place(products, operands) if grad_out is None else grad_out
    values, factors = _parts(grad)
    rows, constants = objective_arguments(objective)
    torch.ops.fastgrpo.row_objective(
        products,
        targets.contiguous(),
        *_head(operands),
        logprobs,
        lse,
        entropy,
        *rows,
        contiguous(objective.entropy_weights),
        *constants,
        values,
        operands.scale,
        factors,
    )
    return RowPass(logprobs, entropy, lse, grad, None)


def row_grad(
    products: Tensor,
    targets: Tensor,
    operands: CudaOperands,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor | ScaledRows | None,
) -> Tensor | ScaledRows:
    """As `reference.row_grad`; 16 bit, times `operands.scale`."""
    grad = _in_place(products, operands) if out is None else out
    values, factors = _parts(grad)
    torch.ops.fastgrpo.row_grad(
        products,
        targets.contiguous(),
        *_head(operands),
        logprobs,
        lse,
        entropy,
        contiguous(grad_logprobs),
        contiguous(grad_entropy),
        values,
        operands.scale,
        factors,
    )
    return grad


def total_loss(objective: TokenObjective, targets: Tensor, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """As `reference.total_loss`."""
    sums, _ = grpo_sums(
        objective.loss_type,
        objective.constants,
        None,
        _PARTS,
        targets,
        logprobs,
        objective.advantages,
        objective.token_weights,
        entropy,
        objective.old_logprobs,
        objective.ref_logprobs,
        objective.multiplier,
        objective.phi,
        objective.entropy_weights,
    )
    return sums[0, 0]


def back_project(grad: Gradients, operands: CudaOperands | FusedOperands, out: Tensor | None = None) -> Tensor:
    """As `reference.back_project`, from the kernel's gradients."""
    if isinstance(grad, UnroundedTargets):
        return fused_head.back_project(grad, operands, out)
    values, factors = _parts(grad)
    out = sum_over_words(values, operands.weight, out)
    if factors is not None:
        return out.mul_((operands.transform.outer * factors).unsqueeze(1))
    factor = operands.transform.outer / operands.scale
    return out if factor == 1.0 else out.mul_(factor)


def add_weight_grad(
    total: Tensor | None, grad: Gradients, hidden: Tensor, operands: CudaOperands | FusedOperands
) -> Tensor:
    """As `reference.add_weight_grad`; the first product writes the total, so that nothing clears it before."""
    if isinstance(grad, UnroundedTargets):
        return fused_head.add_weight_grad(total, grad, hidden, operands)
    values, factors = _parts(grad)
    hidden, alpha = hidden.to(operands.compute_dtype), operands.transform.outer
    if factors is not None:
        largest, shares = grad.shares
        hidden, alpha = hidden * shares.unsqueeze(1), alpha * largest
    return add_sum_over_rows(total, values, hidden, alpha)


def rounding_product(grad: Gradients, width: int) -> RoundingProduct | None:
    """As `reference.rounding_product`."""
    if not isinstance(grad, UnroundedTargets):
        return None
    kept = grad.values.untyped_storage().nbytes()
    return fused_head.rounded_weight_grad if fused_head.rounds_at_once(kept, grad.values.shape[1], width) else None


def bias_grad(grad: Tensor | ScaledRows, operands: CudaOperands) -> Tensor:
    """As `reference.bias_grad`."""
    if isinstance(grad, Tensor):
        return grad.sum(0, dtype=operands.accumulate)
    largest, shares = grad.shares
    return torch.mm(shares.unsqueeze(0), grad.values, out_dtype=operands.accumulate).squeeze(0).mul_(largest)


def scale(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `reference.scale`, to 16 bit."""
    out = torch.empty_like(grad, dtype=dtype)
    torch.ops.fastgrpo.scale_round(grad, factor.to(grad.dtype), out)
    return out


def weigh_slopes(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    targets: Tensor,
    logprob_slope: Tensor,
    entropy_slope: Tensor,
    vocabulary: int,
    dtype: torch.dtype,
) -> Tensor:
    """As `reference.weigh_slopes`, to 16 bit."""
    grads = (
        None if grad is None else grad.to(logprob_slope.dtype).contiguous() for grad in (grad_logprobs, grad_entropy)
    )
    first, second = grads
    out = torch.empty_like(logprob_slope, dtype=dtype)
    torch.ops.fastgrpo.weigh_slopes(
        first, logprob_slope, second, None if second is None else entropy_slope, targets.contiguous(), vocabulary, out
    )
    return out


def _over(products: Tensor, operands: CudaOperands, half: int) -> Tensor:
    """16-bit `[R, V]` over the first or second half of the rows of `products`."""
    pitch = operands.products.shape[1]
    halves = operands.products[: len(products)].view(operands.compute_dtype)
    return halves[:, half * pitch : half * pitch + products.shape[1]]


def _in_place(products: Tensor, operands: CudaOperands) -> Tensor | ScaledRows:
    return _with_factors(_over(products, operands, 0), operands)


def _with_factors(values: Tensor, operands: CudaOperands) -> Tensor | ScaledRows:
    return values if operands.factors is None else ScaledRows(values, operands.factors[: len(values)])


def _parts(grad: Tensor | ScaledRows) -> tuple[Tensor, Tensor | None]:
    return (grad, None) if isinstance(grad, Tensor) else (grad.values, grad.factors)


def _head(operands: CudaOperands) -> tuple[Tensor | None, float, float, float | None]:
    transform = operands.transform
    return operands.padded_bias, transform.temperature, transform.logit_scale, transform.softcap
