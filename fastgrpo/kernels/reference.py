"""The head's building blocks in torch ops: what hand-written kernels replace, one block of `[R, V]` logits at a time.

Only ops that CPU, CUDA and MPS all have are used, and every row is independent of its neighbours. `fastgrpo.kernels.cuda`
has the same functions.

Numerics: `log p_t = -softplus(log(sum of the others) - z_t)` and `1 - p_t = -expm1(log p_t)`, so nothing is lost as
`p_t -> 1`. Logits keep the precision their products were summed in (32 or 64 bit); they are never rounded below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

HANDLES_IGNORED = False
"""Whether `row_pass` gives zeros for a target outside `[0, V)`."""
# exp() of this is 0 in float32 and float64, and its product with 0 is 0, which -inf's is not.
_EXP_IS_ZERO = -1.0e5
# Rows of a weight that are converted at a time where its dtype is not the one of the products.
_CONVERTED_ROWS = 8192


class Transform(NamedTuple):
    """
    From products to logits: `z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature`.

    Gradients of `z` are kept without the constant factor `outer`, which is applied to the small `[R, H]` results.
    """

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def outer(self) -> float:
        """The constant factor of dz / d product."""
        return self.logit_scale / self.temperature

    def apply_(self, products: Tensor) -> Tensor:
        """Turns products into logits in place."""
        if self.softcap is None:
            return products if self.outer == 1.0 else products.mul_(self.outer)
        return products.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """dz / d product without `outer`: `1 - tanh^2` of a softcap, None where it is 1."""
        if self.softcap is None:
            return None
        return logits.mul(self.temperature / self.softcap).square_().neg_().add_(1.0)


class Use(Enum):
    """What a call does with a head."""

    STATISTICS = auto()
    """Log-probs and entropies alone."""
    SLOPES = auto()
    """And what hidden states receive from them."""
    GIVEN = auto()
    """Gradients from statistics and coefficients that are given."""
    OBJECTIVE = auto()
    """Statistics and an objective's gradients."""


class HeadCall(NamedTuple):
    """
    A head, and what a call does with it.

    Attributes:
        weight: `[V, H]`.
        bias: `[V]` or None.
        transform: from products to logits.
        compute_dtype: what the operands of the products are rounded to.
        use: what the call does.
        entropy_gradient: entropies give a gradient, too.
    """

    weight: Tensor
    bias: Tensor | None
    transform: Transform
    compute_dtype: torch.dtype
    use: Use
    entropy_gradient: bool = False


RoundingProduct = Callable[[tuple[Tensor | None, ...], Tensor, float, Tensor | None, torch.dtype], Tensor]
"""
`(grad, hidden, outer, factor, dtype)` to `factor * outer * grad.T @ hidden` (`[R, V]`, `[R, H]` to `[V, H]`), rounded once to
the dtype; a 0-d factor, or None for 1. The gradient is a tuple of tensors, which autograd can save until then.
"""


@dataclass(frozen=True)
class Operands:
    """
    What all chunks of one call share.

    Attributes:
        weight: `[V, H]`, as the products want it.
        bias: `[V]` or None.
        transform: from products to logits.
        compute_dtype: what the operands of the products are rounded to.
        accumulate: the dtype that sums, products and statistics are kept in: fp32 or fp64.
        chunk_rows: rows of logits alive at once.
        batch_rows: rows whose gradients are collected for one product; a multiple of `chunk_rows`.
    """

    weight: Tensor
    bias: Tensor | None
    transform: Transform
    compute_dtype: torch.dtype
    accumulate: torch.dtype
    chunk_rows: int
    batch_rows: int


def prepare(call: HeadCall, accumulate: torch.dtype, chunk_rows: int, rows: int, collect: bool) -> Operands:
    """
    Operands of one call.

    Args:
        call: what is computed.
        accumulate, chunk_rows: see `Operands`.
        rows: rows that the call computes in all; not used here.
        collect: the weight gets a gradient, so that larger products may pay; not used here.

    Returns:
        Operands.
    """
    weight, bias, transform, compute_dtype, *_ = call
    if _sums_in_float32(weight, compute_dtype):
        weight = weight.to(compute_dtype)
    return Operands(weight, bias, transform, compute_dtype, accumulate, chunk_rows, chunk_rows)


def prefers_given(call: HeadCall) -> bool:
    """Whether a frozen head's entropies get their gradient better as `call` says, from logits again, than as a slope."""
    return False


def bytes_a_row(call: HeadCall, with_entropy: bool) -> int:
    """
    Bytes that a row of a chunk takes: logits; z beside exp(z) for an entropy; the slope of a softcap.

    Args:
        call: what is computed.
        with_entropy: entropies, too.

    Returns:
        Bytes.
    """
    slopes = call.transform.softcap is not None and call.use is not Use.STATISTICS
    itemsize = 8 if call.compute_dtype == torch.float64 else 4
    return (1 + with_entropy + slopes) * itemsize * call.weight.shape[0]


def gradient_buffer(operands: Operands, rows: int) -> Tensor | None:
    """Where the chunks of a batch of `rows` put their gradients; None: each in a buffer of its own."""
    return None


class RowStatistics(NamedTuple):
    """Where a kernel writes the statistics of R rows, each `[R]` and contiguous."""

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor


class RowPass(NamedTuple):
    """Statistics of R rows of logits, each `[R]`, and their `[R, V]` gradients up to `Transform.outer`, where wanted."""

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor
    logprob_grad: Tensor | None
    entropy_grad: Tensor | None


def row_pass(
    products: Tensor,
    targets: Tensor,
    operands: Operands,
    *,
    with_entropy: bool = False,
    with_logprob_grad: bool = False,
    with_entropy_grad: bool = False,
    out: RowStatistics | None = None,
) -> RowPass:
    """
    Log-prob of the target, entropy (nats) and log-sum-exp of every row, and what `hidden` and `weight` get from them.

    Args:
        products: `[R, V]` as `project` returned them, overwritten.
        targets: `[R]` int64 in `[0, V)`.
        operands: of the call.
        with_entropy: compute the entropy.
        with_logprob_grad: compute d logprob / d product: `onehot - p`.
        with_entropy_grad: compute d entropy / d product: `-p (log p + entropy)`; needs `with_entropy`.
        out: where kernels write the statistics; not used here.

    Returns:
        RowPass. A row that holds NaN, or only -inf, is NaN, alone.
    """
    logits = operands.transform.apply_(products)
    column = targets.unsqueeze(1)
    slope = operands.transform.slope(logits) if with_logprob_grad or with_entropy_grad else None
    target = logits.gather(1, column)
    peak = logits.amax(1, keepdim=True)
    shifted = logits.sub_(peak)
    if with_entropy:
        shifted.clamp_(min=_EXP_IS_ZERO)
        mass = shifted.exp()
        weighted = shifted.mul_(mass)
        weighted_sum = weighted.sum(1, keepdim=True)
    else:
        mass = shifted.exp_()
    target_mass = mass.gather(1, column)
    others = mass.scatter_(1, column, 0.0).sum(1, keepdim=True)
    total = others + target_mass
    log_total = total.log()
    logprobs = -_log1pexp(others.log() + (peak - target))

    entropy = entropy_grad = logprob_grad = None
    if with_entropy:
        entropy = log_total - weighted_sum / total
    if with_entropy_grad:
        mass.scatter_(1, column, target_mass)
        entropy_grad = weighted.addcmul_(mass, entropy - log_total).mul_(-total.reciprocal())
    if with_logprob_grad:
        logprob_grad = mass.mul_(-total.reciprocal())
        logprob_grad.scatter_(1, column, -torch.expm1(logprobs))
    if slope is not None:
        for grad in (entropy_grad, logprob_grad):
            if grad is not None:
                grad.mul_(slope)
    return RowPass(
        logprobs.squeeze(1),
        None if entropy is None else entropy.squeeze(1),
        (peak + log_total).squeeze(1),
        logprob_grad,
        entropy_grad,
    )


@dataclass(frozen=True)
class TokenObjective:
    """
    A row-local objective for R rows; a row counts for nothing else.

    Attributes:
        loss_type: its place in `fastgrpo.objective.LOSS_TYPES`.
        constants: as `fastgrpo.ops.objective_constants` gives them.
        advantages, old_logprobs, ref_logprobs, multiplier, phi: `[R]`, see `fastgrpo.objective.token_terms`.
        token_weights: `[R]` what each token's loss counts.
        entropy_weights: `[R]` what each token's entropy takes off the loss, or None.
        loss, coefficient: from `[R]` log-probs to the weighted loss and its derivative in them: the same objective in torch.
    """

    loss_type: int
    constants: list[float]
    advantages: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    multiplier: Tensor | None
    phi: Tensor | None
    token_weights: Tensor
    entropy_weights: Tensor | None
    loss: Callable[[Tensor], Tensor]
    coefficient: Callable[[Tensor], Tensor]


def row_objective(
    products: Tensor,
    targets: Tensor,
    operands: Operands,
    objective: TokenObjective,
    with_entropy: bool,
    grad_out: Tensor | None,
    out: RowStatistics | None = None,
) -> RowPass:
    """
    Statistics of every row, and the gradient of a row-local objective in the products, in `logprob_grad`.

    Args:
        products, targets, operands: as in `row_pass`.
        objective: of these rows.
        with_entropy: compute the entropy.
        grad_out: a part of `gradient_buffer`, or None.
        out: as in `row_pass`.

    Returns:
        RowPass; its `entropy_grad` is spent.
    """
    weights = objective.entropy_weights
    result = row_pass(
        products,
        targets,
        operands,
        with_entropy=with_entropy,
        with_logprob_grad=True,
        with_entropy_grad=weights is not None,
    )
    grad = result.logprob_grad.mul_(objective.coefficient(result.logprobs).unsqueeze(1))
    if weights is not None:
        grad.add_(result.entropy_grad.mul_(-weights.unsqueeze(1)))
    return result


def row_grad(
    products: Tensor,
    targets: Tensor,
    operands: Operands,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """
    The gradient that the products of R rows receive, up to `Transform.outer`, from recomputed logits and saved statistics.

    Args:
        products: `[R, V]`, bit for bit what `row_pass` saw; overwritten.
        targets: `[R]` int64 in `[0, V)`.
        operands: of the call.
        logprobs, lse, entropy: `[R]` as `row_pass` returned them.
        grad_logprobs, grad_entropy: `[R]` incoming gradients; None = none.
        out: a part of `gradient_buffer`, or None.

    Returns:
        `[R, V]`.
    """
    logits = operands.transform.apply_(products)
    slope = operands.transform.slope(logits)
    log_p = logits.sub_(lse.unsqueeze(1))
    at_target = None
    if grad_logprobs is not None:
        at_target = -torch.expm1(logprobs) * grad_logprobs
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-grad_logprobs.unsqueeze(1))
    else:
        log_p.clamp_(min=_EXP_IS_ZERO)
        offset = entropy * grad_entropy
        if grad_logprobs is not None:
            offset = offset + grad_logprobs
            target_log_p = logprobs.clamp(min=_EXP_IS_ZERO)
            at_target = at_target - grad_entropy * target_log_p.exp() * (target_log_p + entropy)
        mass = log_p.exp()
        grad = log_p.mul_(grad_entropy.unsqueeze(1)).add_(offset.unsqueeze(1)).mul_(mass).neg_()
    if at_target is not None:
        grad.scatter_(1, targets.unsqueeze(1), at_target.unsqueeze(1))
    return grad if slope is None else grad.mul_(slope)


def project(hidden: Tensor, operands: Operands) -> Tensor:
    """The products `hidden @ weight.T + bias`, `[R, H]` to `[R, V]`, summed and kept in `operands.accumulate`."""
    compute_dtype, accumulate, weight = operands.compute_dtype, operands.accumulate, operands.weight
    hidden = hidden.to(compute_dtype)
    if _sums_in_float32(weight, compute_dtype):
        products = torch.mm(hidden, weight.t(), out_dtype=accumulate)
    else:
        products = torch.empty(hidden.shape[0], weight.shape[0], dtype=accumulate, device=hidden.device)
        hidden = hidden.to(accumulate)
        for rows, block in _operand_blocks(weight, compute_dtype, accumulate):
            torch.mm(hidden, block.t(), out=products[:, rows])
    if operands.bias is not None:
        products.add_(operands.bias.to(accumulate))
    return products


def head_pass(hidden: Tensor, targets: Tensor, operands: Operands, **options) -> RowPass:
    """`row_pass`, with its options, of the products of `[R, H]` hidden states."""
    return row_pass(project(hidden, operands), targets, operands, **options)


def head_objective(hidden: Tensor, targets: Tensor, operands: Operands, *others, **options) -> RowPass:
    """`row_objective`, with its other arguments, of the products of `[R, H]` hidden states."""
    return row_objective(project(hidden, operands), targets, operands, *others, **options)


def head_grad(hidden: Tensor, targets: Tensor, operands: Operands, *others) -> Tensor:
    """`row_grad`, with its other arguments, of the products of `[R, H]` hidden states."""
    return row_grad(project(hidden, operands), targets, operands, *others)


def total_loss(objective: TokenObjective, targets: Tensor, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """The 0-d loss over all rows; those with a negative target, or a weight of 0, count for nothing."""
    loss = torch.where(objective.token_weights != 0, objective.loss(logprobs), 0.0).sum()
    if objective.entropy_weights is None:
        return loss
    return loss - (entropy * objective.entropy_weights).sum()


def computed_rows(
    targets: Tensor, vocabulary: int, first: Tensor | None, second: Tensor | None, partition: bool
) -> tuple[Tensor, Tensor | None]:
    """
    Which rows a call computes, in ascending order.

    Args:
        targets: `[N]`; rows outside `[0, vocabulary)` are in neither list.
        vocabulary: V.
        first, second: `[N]` or None; a row is wanted where one of them is not 0 (NaN is not), and every row without both.
        partition: also return the other rows.

    Returns:
        int64 indices of the wanted rows, and of the others or None.
    """
    inside = (targets >= 0) & (targets < vocabulary)
    factors = [x != 0 for x in (first, second) if x is not None]
    wanted = inside
    if factors:
        wanted = inside & (factors[0] if len(factors) == 1 else factors[0] | factors[1])
    others = (inside & ~wanted).nonzero().squeeze(1) if partition else None
    return wanted.nonzero().squeeze(1), others


def back_project(grad: Tensor, operands: Operands, out: Tensor | None = None) -> Tensor:
    """
    What hidden receives: `outer * grad @ weight`, `[R, V]` by `[V, H]` to `[R, H]` in `operands.accumulate`.

    `out`: where kernels write it; not used here.
    """
    weight, compute_dtype = operands.weight, operands.compute_dtype
    if _rounds_gradients(weight, compute_dtype):
        out = torch.mm(grad.to(compute_dtype), weight, out_dtype=grad.dtype)
    else:
        out = torch.zeros(grad.shape[0], weight.shape[1], dtype=grad.dtype, device=grad.device)
        for rows, block in _operand_blocks(weight, compute_dtype, grad.dtype):
            out.addmm_(grad[:, rows], block)
    return out.mul_(operands.transform.outer)


def add_weight_grad(total: Tensor | None, grad: Tensor, hidden: Tensor, operands: Operands) -> Tensor:
    """`total + outer * grad.T @ hidden` (`[R, V]`, `[R, H]` to `[V, H]`), in place of `total` where there is one."""
    scale = operands.transform.outer
    hidden = hidden.to(operands.compute_dtype)
    if total is None:
        total = torch.zeros(grad.shape[1], hidden.shape[1], dtype=operands.accumulate, device=grad.device)
    if _rounds_gradients(hidden, operands.compute_dtype):
        compute_dtype = operands.compute_dtype
        torch.addmm(total, grad.t().to(compute_dtype), hidden, alpha=scale, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(grad.t(), hidden.to(total.dtype), alpha=scale)
    return total


def rounding_product(grad: Tensor, width: int) -> RoundingProduct | None:
    """
    What gives the weight's gradient rounded once, where a sum in fp32 that is scaled and rounded later is not better.

    Args:
        grad: the only batch of a call.
        width: H.
    """
    return None


def bias_grad(grad: Tensor, operands: Operands) -> Tensor:
    """What the bias receives but for `outer`: `[V]` in `operands.accumulate`."""
    return grad.sum(0)


def scale(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`factor * grad` in `dtype`; `factor` is 0-d."""
    return (factor * grad).to(dtype, copy=True)


def weigh_slopes(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    targets: Tensor,
    logprob_slope: Tensor,
    entropy_slope: Tensor,
    vocabulary: int,
    dtype: torch.dtype,
) -> Tensor:
    """The slopes `[N, H]` times the incoming gradients `[N]`, exactly 0 where those are and for ignored targets."""
    ignored = (targets < 0) | (targets >= vocabulary)
    total = torch.zeros_like(logprob_slope)
    for grad, slope in ((grad_logprobs, logprob_slope), (grad_entropy, entropy_slope)):
        if grad is not None:
            nothing = (ignored | (grad == 0)).unsqueeze(1)
            total += (grad.unsqueeze(1) * slope).masked_fill_(nothing, 0.0)
    return total.to(dtype)


def _sums_in_float32(operand: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether torch multiplies these operands as they are and keeps the 32-bit sums."""
    return operand.is_cuda and compute_dtype in (torch.bfloat16, torch.float16)


def _rounds_gradients(operand: Tensor, compute_dtype: torch.dtype) -> bool:
    # float16 would lose the many small probabilities of a row.
    return operand.is_cuda and compute_dtype == torch.bfloat16


def _operand_blocks(
    weight: Tensor, compute_dtype: torch.dtype, accumulate: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    # A weight in another dtype is converted block by block, so that no second [V, H] copy exists.
    vocabulary = weight.shape[0]
    size = vocabulary if weight.dtype == compute_dtype == accumulate else _CONVERTED_ROWS
    for start in range(0, vocabulary, max(size, 1)):
        rows = slice(start, min(start + size, vocabulary))
        yield rows, weight[rows].to(compute_dtype).to(accumulate)


def _log1pexp(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))
