"""The head as torch custom ops: `fastgrpo::linear_logprob`, its backward, and `fastgrpo::linear_grpo`.

An op's forward cannot see what needs a gradient, so callers pass flags; every op always returns the same number of
tensors, empty where unused. Chunks own whole vocabulary rows. Rows whose target lies outside `[0, V)` are never computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrpo.direct import with_autograd, without_autograd
from fastgrpo.kernels.reference import (
    HeadCall,
    Operands,
    RoundingProduct,
    RowPass,
    RowStatistics,
    TokenObjective,
    Transform,
    Use,
)
from fastgrpo.kernels.rows import cut_lists
from fastgrpo.kernels.select import head_kernels
from fastgrpo.objective import LOSS_TYPES, Objective, token_grad, token_terms


def accumulation_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: fp32, or fp64 for fp64 products."""
    return torch.float64 if compute_dtype == torch.float64 else torch.float32


@torch.library.custom_op("fastgrpo::linear_logprob", mutates_args=())
def linear_logprob_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    chunk_rows: int,
    compute_dtype: torch.dtype,
    with_entropy: bool,
    with_logprob_slope: bool,
    with_entropy_slope: bool,
    skip_ignored: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """
    Log-probs, entropies and log-sum-exps of `hidden @ weight.T`, and what `hidden` receives from the first two.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        targets: `[N]` int64.
        bias: `[V]` or None.
        temperature, logit_scale, softcap: see `fastgrpo.kernels.reference.Transform`.
        chunk_rows: rows of logits alive at once.
        compute_dtype: dtype of the operands of the products.
        with_entropy: fill `entropy`.
        with_logprob_slope, with_entropy_slope: fill the slopes, for a head that needs no gradient itself.
        skip_ignored: find the rows that count first, and compute no others; False: kernels compute all rows, and the host
            waits for nothing.

    Returns:
        logprobs `[N]`, entropy `[N]`, lse `[N]`, dlogprob/dhidden `[N, H]`, dentropy/dhidden `[N, H]`, in fp32 (fp64).
    """
    transform = Transform(temperature, logit_scale, softcap)
    dtype = accumulation_dtype(compute_dtype)
    kernels = head_kernels(hidden.device, compute_dtype)
    count = hidden.shape[0]
    if skip_ignored or not kernels.HANDLES_IGNORED:
        rows, _ = kernels.computed_rows(targets, weight.shape[0], None, None, partition=False)
    else:
        rows = slice(0, count)
    statistics = _Statistics(hidden, dtype, with_entropy, all_rows=_length(rows) == count)
    slopes = [
        _results(wanted, hidden, hidden.shape, dtype, statistics.all_rows)
        for wanted in (with_logprob_slope, with_entropy_slope)
    ]
    with _no_autocast(hidden):
        use = Use.SLOPES if with_logprob_slope or with_entropy_slope else Use.STATISTICS
        call = HeadCall(weight, bias, transform, compute_dtype, use, with_entropy_slope)
        operands = kernels.prepare(call, dtype, chunk_rows, _length(rows), collect=False)
        for index in _split(rows, count, operands.chunk_rows):
            result = kernels.head_pass(
                _take(hidden, index),
                _take(targets, index),
                operands,
                with_entropy=with_entropy,
                with_logprob_grad=with_logprob_slope,
                with_entropy_grad=with_entropy_slope,
                out=statistics.part(index),
            )
            statistics.keep(result)
            for slope, grad in zip(slopes, (result.logprob_grad, result.entropy_grad), strict=True):
                if grad is not None:
                    part = _part(slope, index)
                    _put(slope, index, kernels.back_project(grad, operands, part), part)
    statistics.finish(rows)
    return statistics.logprobs, statistics.entropy, statistics.lse, *slopes


@linear_logprob_op.register_fake
def _(
    hidden,
    weight,
    targets,
    bias,
    temperature,
    logit_scale,
    softcap,
    chunk_rows,
    compute_dtype,
    with_entropy,
    with_logprob_slope,
    with_entropy_slope,
    skip_ignored=True,
):
    dtype = accumulation_dtype(compute_dtype)
    count, width = hidden.shape
    return (
        hidden.new_empty(count, dtype=dtype),
        hidden.new_empty(count if with_entropy else 0, dtype=dtype),
        hidden.new_empty(count, dtype=dtype),
        hidden.new_empty((count, width) if with_logprob_slope else 0, dtype=dtype),
        hidden.new_empty((count, width) if with_entropy_slope else 0, dtype=dtype),
    )


def _logprob_context(ctx, inputs, output) -> None:
    hidden, weight, targets, bias, *ctx.head_options, _, ctx.with_logprob_slope, ctx.with_entropy_slope, _ = inputs
    logprobs, entropy, lse, logprob_slope, entropy_slope = output
    ctx.set_materialize_grads(False)
    ctx.hidden_dtype, ctx.vocabulary = hidden.dtype, weight.shape[0]
    if ctx.with_logprob_slope:
        ctx.save_for_backward(targets, logprob_slope, entropy_slope)
    else:
        ctx.save_for_backward(hidden, weight, targets, bias, logprobs, entropy, lse)


def _logprob_backward(ctx, grad_logprobs, grad_entropy, *_):
    no_options = (None,) * (len(ctx.head_options) + 4)
    if grad_logprobs is None and grad_entropy is None:
        return None, None, None, None, *no_options
    if ctx.with_logprob_slope:
        targets, logprob_slope, entropy_slope = ctx.saved_tensors
        if not ctx.with_entropy_slope:
            grad_entropy = None
        grad_hidden = _scale_slopes(
            grad_logprobs, grad_entropy, targets, logprob_slope, entropy_slope, ctx.vocabulary, ctx.hidden_dtype
        )
        return grad_hidden, None, None, None, *no_options
    hidden, weight, targets, bias, logprobs, entropy, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grads = _linear_logprob_backward(
        grad_logprobs,
        grad_entropy,
        hidden,
        weight,
        targets,
        bias,
        logprobs,
        entropy,
        lse,
        *ctx.head_options,
        needs[0],
        needs[1],
        needs[3],
    )
    grad_hidden, grad_weight, grad_bias = (
        grad if grad.numel() or need else None for grad, need in zip(grads, (needs[0], needs[1], needs[3]), strict=True)
    )
    return grad_hidden, grad_weight, None, grad_bias, *no_options


run_linear_logprob = with_autograd(linear_logprob_op, _logprob_context, _logprob_backward, one_gradient=True)
"""`fastgrpo::linear_logprob` with the least work around it."""


def _refuse_second_derivatives(ctx, *grads):
    raise RuntimeError(
        "fastgrpo's head is differentiable once, and a second derivative was asked for (create_graph=True, or a hessian). "
        "For that, compute the log-probs with torch.log_softmax over full logits."
    )


@torch.library.custom_op("fastgrpo::scale_slopes", mutates_args=())
def scale_slopes_op(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    targets: Tensor,
    logprob_slope: Tensor,
    entropy_slope: Tensor,
    vocabulary: int,
    dtype: torch.dtype,
) -> Tensor:
    """
    Gradient of hidden with a frozen head: the slopes times the incoming gradients, exactly 0 where those are.

    Args:
        grad_logprobs, grad_entropy: `[N]` or None.
        targets: `[N]`; rows outside `[0, vocabulary)` get 0.
        logprob_slope, entropy_slope: `[N, H]` as `fastgrpo::linear_logprob` returned them.
        vocabulary: V.
        dtype: of the result.

    Returns:
        `[N, H]`.
    """
    return _rounding_kernels(logprob_slope, dtype).weigh_slopes(
        grad_logprobs, grad_entropy, targets, logprob_slope, entropy_slope, vocabulary, dtype
    )


@scale_slopes_op.register_fake
def _(grad_logprobs, grad_entropy, targets, logprob_slope, entropy_slope, vocabulary, dtype):
    return torch.empty_like(logprob_slope, dtype=dtype)


scale_slopes_op.register_autograd(_refuse_second_derivatives)
_scale_slopes = without_autograd(scale_slopes_op)


@torch.library.custom_op("fastgrpo::linear_logprob_backward", mutates_args=())
def linear_logprob_backward_op(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    logprobs: Tensor,
    entropy: Tensor,
    lse: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    chunk_rows: int,
    compute_dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Gradients of `fastgrpo::linear_logprob` for a head that trains: every chunk of logits is computed once more.

    Args:
        grad_logprobs, grad_entropy: `[N]` or None. Rows where both are 0 are not computed.
        logprobs, entropy, lse: what the forward returned.
        need_hidden, need_weight, need_bias: which gradients to compute.
        The others as in the forward.

    Returns:
        Gradients of hidden, weight and bias in their dtypes, summed in fp32 (fp64); empty where not needed.
    """
    transform = Transform(temperature, logit_scale, softcap)
    dtype = accumulation_dtype(compute_dtype)
    kernels = head_kernels(hidden.device, compute_dtype)
    rows, _ = kernels.computed_rows(targets, weight.shape[0], grad_logprobs, grad_entropy, partition=False)
    with _no_autocast(hidden):
        call = HeadCall(weight, bias, transform, compute_dtype, Use.GIVEN, grad_entropy is not None)
        operands = kernels.prepare(call, dtype, chunk_rows, rows.numel(), collect=need_weight)
        needs = need_hidden, need_weight, need_bias
        gradients = _HeadGradients(hidden, weight, bias, operands, *needs, rows.numel(), rounded=True)
        for batch in _split(rows, hidden.shape[0], operands.batch_rows):
            collected = kernels.gradient_buffer(operands, _length(batch))
            for index, out in _chunks(batch, operands, collected):
                grad = kernels.head_grad(
                    _take(hidden, index),
                    _take(targets, index),
                    operands,
                    _take(logprobs, index),
                    _take(lse, index),
                    None if grad_logprobs is None else _take(grad_logprobs, index).to(dtype),
                    None if grad_entropy is None else _take(entropy, index),
                    None if grad_entropy is None else _take(grad_entropy, index).to(dtype),
                    out,
                )
            gradients.add(kernels, batch, grad if collected is None else collected)
    return gradients.result()


@linear_logprob_backward_op.register_fake
def _(
    grad_logprobs,
    grad_entropy,
    hidden,
    weight,
    targets,
    bias,
    logprobs,
    entropy,
    lse,
    temperature,
    logit_scale,
    softcap,
    chunk_rows,
    compute_dtype,
    need_hidden,
    need_weight,
    need_bias,
):
    return (
        hidden.new_empty(hidden.shape if need_hidden else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        (weight if bias is None else bias).new_empty(weight.shape[0] if need_bias else 0),
    )


linear_logprob_backward_op.register_autograd(_refuse_second_derivatives)
_linear_logprob_backward = without_autograd(linear_logprob_backward_op)


@torch.library.custom_op("fastgrpo::scale_gradient", mutates_args=())
def scale_gradient_op(grad_loss: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad_loss * grad` in `dtype`: what an input of `fastgrpo::linear_grpo` receives."""
    return _rounding_kernels(grad, dtype).scale(grad, grad_loss, dtype)


@scale_gradient_op.register_fake
def _(grad_loss, grad, dtype):
    return torch.empty_like(grad, dtype=dtype)


scale_gradient_op.register_autograd(_refuse_second_derivatives)
_scale_gradient = without_autograd(scale_gradient_op)


@torch.library.custom_op("fastgrpo::linear_grpo", mutates_args=())
def linear_grpo_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    advantages: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    multiplier: Tensor | None,
    phi: Tensor | None,
    token_weights: Tensor,
    entropy_weights: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    chunk_rows: int,
    compute_dtype: torch.dtype,
    loss_type: str,
    constants: list[float],
    with_entropy: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    rows: Tensor | None = None,
    others: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """
    The loss of a row-local objective and all its gradients in one pass over the logits, nothing recomputed.

    Args:
        hidden, weight, targets, bias, temperature, logit_scale, softcap, chunk_rows, compute_dtype: as `linear_logprob`.
        advantages, old_logprobs, ref_logprobs, multiplier, phi: `[N]`, see `fastgrpo.objective.token_terms`.
        token_weights: `[N]` what each token's loss counts, see `Objective.token_weights`.
        entropy_weights: `[N]` what each token's entropy takes off the loss, or None.
        loss_type, constants: see `objective_constants`.
        with_entropy: fill `entropy`.
        need_hidden, need_weight, need_bias: which gradients to compute.
        rows, others: `[R]`, `[S]` int64, ascending: which rows have a gradient where any is wanted, and which others count,
            where a caller knows (see `skips_zero_advantages`); None: they are found here.
        counts: `[1]` int64, how much of `rows` and `others` counts, as a kernel left it (see `cut_lists`); None: all.

    Returns:
        loss (0-d), logprobs `[N]`, entropy `[N]`, and d loss / d hidden, weight, bias, all in fp32 (fp64); empty where
        unused.
    """
    loss, statistics, gradients = _one_pass(
        hidden, weight, targets, bias, advantages, old_logprobs, ref_logprobs, multiplier, phi, token_weights,
        entropy_weights, temperature, logit_scale, softcap, chunk_rows, compute_dtype, loss_type, constants, with_entropy,
        need_hidden, need_weight, need_bias, rows, others, counts,
    )  # fmt: skip
    return loss, statistics.logprobs, statistics.entropy, *gradients.result()


def _one_pass(*inputs) -> tuple[Tensor, _Statistics, _HeadGradients]:
    """What `fastgrpo::linear_grpo` does with its arguments, up to what its gradients are returned as."""
    (
        hidden, weight, targets, bias, advantages, old_logprobs, ref_logprobs, multiplier, phi, token_weights,
        entropy_weights, temperature, logit_scale, softcap, chunk_rows, compute_dtype, loss_type, constants, with_entropy,
        need_hidden, need_weight, need_bias, rows, others, counts,
    ) = inputs  # fmt: skip
    transform = Transform(temperature, logit_scale, softcap)
    dtype = accumulation_dtype(compute_dtype)

    def tokens(index: Rows) -> TokenObjective:
        advantage, *others, weights, entropy_weight = (
            None if x is None else _take(x, index)
            for x in (advantages, old_logprobs, ref_logprobs, multiplier, phi, token_weights, entropy_weights)
        )

        def loss(logprobs: Tensor) -> Tensor:
            objective, (old, *rest) = _known_objective(loss_type, *constants), others
            log_ratio = logprobs - (logprobs if old is None else old)
            return weights * token_terms(objective, logprobs, advantage, log_ratio, *rest).loss

        def coefficient(logprobs: Tensor) -> Tensor:
            return weights * token_grad(_known_objective(loss_type, *constants), logprobs, advantage, *others)

        return TokenObjective(
            LOSS_TYPES.index(loss_type),
            constants,
            advantage,
            *others,
            weights,
            entropy_weight,
            loss,
            coefficient,
        )

    kernels = head_kernels(hidden.device, compute_dtype)
    with_grad = need_hidden or need_weight or need_bias
    if (rows is None) != (others is None) or (rows is None and counts is not None):
        raise ValueError("rows and others go together, and counts with them; give both, or none.")
    if rows is None:
        objective = _known_objective(loss_type, *constants)
        by_advantage = with_grad and skips_zero_advantages(objective, entropy_weights is not None)
        coefficients = advantages if by_advantage else None
        rows, others = kernels.computed_rows(targets, weight.shape[0], coefficients, None, partition=True)
    elif counts is not None:
        # As late as it can be: the device may still be at what came before the head.
        rows, others = cut_lists(rows, others, counts.item())
    if not with_grad:
        # Statistics are enough.
        rows, others = others, rows
    statistics = _Statistics(hidden, dtype, with_entropy, all_rows=rows.numel() + others.numel() == hidden.shape[0])
    with _no_autocast(hidden):
        use = Use.OBJECTIVE if with_grad else Use.STATISTICS
        call = HeadCall(weight, bias, transform, compute_dtype, use, with_grad and entropy_weights is not None)
        most = max(rows.numel(), others.numel())
        operands = kernels.prepare(call, dtype, chunk_rows, most, collect=need_weight)
        needs = need_hidden, need_weight, need_bias
        gradients = _HeadGradients(hidden, weight, bias, operands, *needs, rows.numel(), rounded=False)
        for batch in _split(rows, hidden.shape[0], operands.batch_rows):
            collected = kernels.gradient_buffer(operands, _length(batch))
            for index, out in _chunks(batch, operands, collected):
                result = kernels.head_objective(
                    _take(hidden, index),
                    _take(targets, index),
                    operands,
                    tokens(index),
                    with_entropy,
                    out,
                    statistics.part(index),
                )
                statistics.keep(result)
            gradients.add(kernels, batch, result.logprob_grad if collected is None else collected)
        for index in _split(others, hidden.shape[0], operands.chunk_rows):
            result = kernels.head_pass(
                _take(hidden, index),
                _take(targets, index),
                operands,
                with_entropy=with_entropy,
                out=statistics.part(index),
            )
            statistics.keep(result)
    statistics.finish(rows, others)
    entropy = statistics.entropy if with_entropy else None
    loss = kernels.total_loss(tokens(slice(0, hidden.shape[0])), targets, statistics.logprobs, entropy)
    return loss, statistics, gradients


@linear_grpo_op.register_fake
def _(
    hidden,
    weight,
    targets,
    bias,
    advantages,
    old_logprobs,
    ref_logprobs,
    multiplier,
    phi,
    token_weights,
    entropy_weights,
    temperature,
    logit_scale,
    softcap,
    chunk_rows,
    compute_dtype,
    loss_type,
    constants,
    with_entropy,
    need_hidden,
    need_weight,
    need_bias,
    rows=None,
    others=None,
    counts=None,
):
    dtype = accumulation_dtype(compute_dtype)
    count = hidden.shape[0]
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(count, dtype=dtype),
        hidden.new_empty(count if with_entropy else 0, dtype=dtype),
        hidden.new_empty(hidden.shape if need_hidden else 0, dtype=dtype),
        hidden.new_empty(weight.shape if need_weight else 0, dtype=dtype),
        hidden.new_empty(weight.shape[0] if need_bias else 0, dtype=dtype),
    )


def _grpo_context(ctx, inputs, output) -> None:
    ctx.needs = inputs[-6:-3]
    ctx.inputs = len(inputs)
    ctx.dtypes = [None if x is None else x.dtype for x in (inputs[0], inputs[1], inputs[3])]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[3:])


def _grpo_backward(ctx, grad_loss, *_):
    return tuple(_scaled_sums(ctx, grad_loss, ctx.saved_tensors))


def _scaled_sums(ctx, grad_loss: Tensor | None, sums: tuple[Tensor, ...]) -> list[Tensor | None]:
    grads = [None] * ctx.inputs
    if grad_loss is not None:
        # hidden, weight and bias are inputs 0, 1 and 3.
        for position, need, grad, dtype in zip((0, 1, 3), ctx.needs, sums, ctx.dtypes, strict=True):
            if need:
                grads[position] = _scale_gradient(grad_loss, grad, dtype)
    return grads


def _postponing_forward(ctx, *inputs):
    """Where nothing traces, the weight's product may wait for the factor that the backward brings."""
    loss, statistics, gradients = _one_pass(*inputs)
    sums, product = gradients.sums(), gradients.product
    outputs = loss, statistics.logprobs, statistics.entropy, *sums
    _grpo_context(ctx, inputs, outputs)
    ctx.product = product
    if product is not None:
        need_hidden, _, need_bias = ctx.needs
        ctx.needs = need_hidden, False, need_bias
        # What autograd saves goes when the backward has used it, and must not change until then.
        ctx.save_for_backward(*sums, product.hidden, *product.grad)
        ctx.product = product._replace(hidden=None, grad=())
    return outputs


def _postponing_backward(ctx, grad_loss, *_):
    saved = ctx.saved_tensors
    sums, waiting = saved[:3], saved[3:]
    grads = _scaled_sums(ctx, grad_loss, sums)
    if waiting and grad_loss is not None:
        hidden, *grad = waiting
        with torch.no_grad():
            grad_weight = ctx.product._replace(hidden=hidden, grad=tuple(grad)).run(grad_loss, ctx.dtypes[1])
        grads[1] = _DifferentiableOnce.apply(grad_weight, sums[0]) if torch.is_grad_enabled() else grad_weight
    return tuple(grads)


class _DifferentiableOnce(torch.autograd.Function):
    """A gradient that says so where it is differentiated; `anchor`: an output of what it is the gradient of."""

    @staticmethod
    def forward(ctx, grad, anchor):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *grads):
        _refuse_second_derivatives(ctx)


run_linear_grpo = with_autograd(
    linear_grpo_op, _grpo_context, _grpo_backward, direct=(_postponing_forward, _postponing_backward)
)
"""`fastgrpo::linear_grpo` with the least work around it. Loss, log-probs and entropy are the same everywhere; behind them the
weight's gradient is empty where it waits for the backward."""


def skips_zero_advantages(objective: Objective, entropy_bonus: bool) -> bool:
    """Whether a row of advantage 0 has no gradient, so that its statistics are enough."""
    return objective.beta == 0.0 and not entropy_bonus


def objective_constants(objective: Objective) -> list[float]:
    """The numbers of a token-level objective in the order of `ObjectiveParams` in `csrc/math/objective.h`."""
    return [
        objective.epsilon,
        objective.upper_epsilon,
        float("inf") if objective.delta is None else objective.delta,
        objective.beta,
        float(objective.use_bias_correction_kl),
        objective.sapo_temperature_pos,
        objective.sapo_temperature_neg,
    ]


def objective_from_constants(loss_type: str, constants: list[float]) -> Objective:
    """The token-level objective that `objective_constants` came from; normalisers are no part of it."""
    epsilon, epsilon_high, delta, beta, bias_correction, tau_pos, tau_neg = constants
    return Objective(
        loss_type=loss_type,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=None if delta == float("inf") else delta,
        beta=beta,
        use_bias_correction_kl=bool(bias_correction),
        sapo_temperature_pos=tau_pos,
        sapo_temperature_neg=tau_neg,
        max_completion_length=1,
    )


@lru_cache(maxsize=16)
def _known_objective(loss_type: str, *constants: float) -> Objective:
    return objective_from_constants(loss_type, list(constants))


class _WeightProduct(NamedTuple):
    """A weight's gradient but for its last factor and its dtype; what `function` takes of the one batch that it comes from."""

    function: RoundingProduct
    outer: float
    hidden: Tensor | None
    grad: tuple[Tensor | None, ...]

    def run(self, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The gradient."""
        return self.function(self.grad, self.hidden, self.outer, factor, dtype)


class _HeadGradients:
    """
    Sums of the head's gradients over chunks, in fp32 (fp64). `rows`: how many are computed.

    `rounded`: give them in the dtypes of the inputs. Where a loss scale is still to come, a 16-bit gradient would
    underflow, so they stay in fp32. The weight's may be a `product` instead, which is not formed before its scale is known.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Operands,
        need_hidden: bool,
        need_weight: bool,
        need_bias: bool,
        rows: int,
        rounded: bool,
    ) -> None:
        self.hidden, self.weight, self.bias, self.rows, self.rounded = hidden, weight, bias, rows, rounded
        self.operands = operands
        self.needs = need_hidden, need_weight, need_bias
        self._grad_hidden: Tensor | None = None
        self.grad_weight: Tensor | None = None
        self.product: _WeightProduct | None = None
        self.grad_bias: Tensor | None = None

    def add(self, kernels: ModuleType, index: Rows, grad: Tensor) -> None:
        """Adds a batch of rows, whose products receive `grad` (`[R, V]`, as `kernels` gave it)."""
        need_hidden, need_weight, need_bias = self.needs
        operands = self.operands
        if need_hidden:
            total = self.grad_hidden
            part = _part(total, index) if total.dtype == operands.accumulate else None
            grad_hidden = kernels.back_project(grad, operands, part)
            _put(total, index, grad_hidden.to(total.dtype), part)
        if need_weight:
            hidden, is_only = _take(self.hidden, index), _length(index) == self.rows
            product = kernels.rounding_product(grad, self.weight.shape[1]) if is_only else None
            if product is None:
                self.grad_weight = kernels.add_weight_grad(self.grad_weight, grad, hidden, operands)
            else:
                self.product = _WeightProduct(product, operands.transform.outer, hidden, grad)
        if need_bias:
            grad_bias = kernels.bias_grad(grad, operands).mul_(operands.transform.outer)
            self.grad_bias = grad_bias if self.grad_bias is None else self.grad_bias.add_(grad_bias)

    @property
    def grad_hidden(self) -> Tensor:
        """Of all rows; its memory is there when the device has its first work."""
        if self._grad_hidden is None:
            hidden, dtype = self.hidden, self.hidden.dtype if self.rounded else self.operands.accumulate
            self._grad_hidden = _results(self.needs[0], hidden, hidden.shape, dtype, self.rows == hidden.shape[0])
        return self._grad_hidden

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of hidden, weight and bias as they were summed; empty where not needed, or where `product` is to come."""
        grad_weight = self.grad_weight
        if grad_weight is None:
            wanted = self.needs[1] and self.product is None
            grad_weight = _zeros_if(wanted, self.weight, self.weight.shape, self.operands.accumulate)
        grad_bias = self.grad_bias
        if grad_bias is None:
            grad_bias = _zeros_if(self.needs[2], self.weight, self.weight.shape[:1], self.operands.accumulate)
        return self.grad_hidden, grad_weight, grad_bias

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of hidden, weight and bias; empty where not needed."""
        grad_hidden, grad_weight, grad_bias = self.sums()
        weight_dtype = bias_dtype = self.operands.accumulate
        if self.rounded:
            weight_dtype, bias_dtype = self.weight.dtype, (self.weight if self.bias is None else self.bias).dtype
        if self.product is not None:
            grad_weight = self.product.run(None, weight_dtype)
        return grad_hidden, grad_weight.to(weight_dtype), grad_bias.to(bias_dtype)


def _rounding_kernels(values: Tensor, dtype: torch.dtype) -> ModuleType:
    """What rounds fp32 `values` to `dtype`."""
    return head_kernels(values.device, dtype if values.dtype == torch.float32 else values.dtype)


def _no_autocast(like: Tensor) -> AbstractContextManager:
    """Autocast off on the device of a tensor; building its context takes a while, so only where it is on."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _zeros_if(wanted: bool, like: Tensor, shape, dtype: torch.dtype) -> Tensor:
    return like.new_zeros(shape, dtype=dtype) if wanted else like.new_empty(0, dtype=dtype)


def _results(wanted: bool, like: Tensor, shape, dtype: torch.dtype, all_rows: bool) -> Tensor:
    """Memory for results of every row; cleared where not all of them are computed."""
    return like.new_empty(shape, dtype=dtype) if wanted and all_rows else _zeros_if(wanted, like, shape, dtype)


Rows = Tensor | slice
"""Some rows of a call: their indices, or on CUDA a slice where a call computes all of its rows."""


def _split(rows: Rows, count: int, size: int) -> Iterator[Rows]:
    """`rows`, of `count` in all, `size` at a time."""
    total = _length(rows)
    are_all = isinstance(rows, slice) or _can_be_a_slice(rows, count)
    for start in range(0, total, size):
        part = slice(start, min(start + size, total))
        yield part if are_all else rows[part]


def _can_be_a_slice(rows: Tensor, count: int) -> bool:
    return rows.is_cuda and rows.numel() == count


def _length(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else rows.numel()


def _take(values: Tensor, rows: Rows) -> Tensor:
    """`values[rows]`; where that is all of them, without the view, which takes the host microseconds."""
    if isinstance(rows, slice) and rows.start == 0 and rows.stop == values.shape[0]:
        return values
    return values[rows]


def _part(target: Tensor, rows: Rows) -> Tensor | None:
    """`target[rows]` where that is memory of `target`."""
    return _take(target, rows) if isinstance(rows, slice) else None


def _put(target: Tensor, rows: Rows, values: Tensor, part: Tensor | None = None) -> None:
    """Stores values, unless they are `part` of the target already."""
    if values is part:
        return
    if isinstance(rows, slice):
        target[rows] = values
    else:
        target.index_copy_(0, rows, values)


class _Statistics:
    """Log-probs, entropies and log-sum-exps of all rows of a call, 0 for rows that it does not compute."""

    def __init__(self, hidden: Tensor, dtype: torch.dtype, with_entropy: bool, all_rows: bool) -> None:
        count = hidden.shape[0]
        self.all_rows = all_rows
        self.logprobs = _results(True, hidden, (count,), dtype, all_rows)
        self.lse = _results(True, hidden, (count,), dtype, all_rows)
        self.entropy = _results(with_entropy, hidden, (count,), dtype, all_rows)
        self.with_entropy = with_entropy
        # `[3, N]`: of rows that are listed, one after the other, until `finish` stores all of them at once.
        self._listed: Tensor | None = None
        self._length = 0
        self._part: RowStatistics | None = None

    def part(self, rows: Rows) -> RowStatistics:
        """Where a kernel may write the statistics of these rows."""
        if isinstance(rows, slice):
            logprobs, entropy, lse, here = self.logprobs, self.entropy, self.lse, rows
        else:
            if self._listed is None:
                self._listed = self.logprobs.new_empty(3, len(self.logprobs))
            logprobs, entropy, lse = self._listed
            here = slice(self._length, self._length + len(rows))
            self._length = here.stop
        self._part = RowStatistics(
            _take(logprobs, here), _take(entropy, here) if self.with_entropy else None, _take(lse, here)
        )
        return self._part

    def keep(self, result: RowPass) -> None:
        """Copies what a pass gave into the last `part`, where it is not there already."""
        for part, found in zip(self._part, (result.logprobs, result.entropy, result.lse), strict=True):
            if part is not None and found is not part:
                part.copy_(found)

    def finish(self, *lists: Tensor) -> None:
        """Stores the statistics of listed rows where they belong; `lists`: all of them, in the order of their passes."""
        if self._listed is None:
            return
        rows = lists[0] if len(lists) == 1 else torch.cat(lists)
        logprobs, entropy, lse = self._listed[:, : self._length]
        self.logprobs.index_copy_(0, rows, logprobs)
        self.lse.index_copy_(0, rows, lse)
        if self.with_entropy:
            self.entropy.index_copy_(0, rows, entropy)


def _chunks(batch: Rows, operands: Operands, collected: Tensor | None) -> Iterator[tuple[Rows, Tensor | None]]:
    """The chunks of a batch, each with its part of the buffer where gradients are collected."""
    size, total = operands.chunk_rows, _length(batch)
    for start in range(0, total, size):
        stop = min(start + size, total)
        index = slice(batch.start + start, batch.start + stop) if isinstance(batch, slice) else batch[start:stop]
        yield index, None if collected is None else collected[start:stop]
