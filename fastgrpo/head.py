"""`linear_logprob` and `linear_grpo_loss`: from hidden states to log-probs and to the GRPO loss without `[N, V]` logits.

Which gradients are computed, and when, follows from what needs one in this very call:

* a frozen head: d logprob / d hidden is computed beside the log-prob; two products of `[N, H]` by `[H, V]` in all, three
  with the gradient of the entropy, and nothing is recomputed, whatever loss is built on top (but with the fused kernel and
  the gradient of an entropy: one product forward, and two backward);
* a head that trains: statistics first, then a backward that computes each chunk of logits once more;
* `linear_grpo_loss` with a row-local objective: one pass, two products for a frozen head and three for one that trains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrpo.checks import (
    COMPUTED_FLOATS,
    LARGEST_FLOAT32,
    refuse_forward_mode,
    require_dense,
    require_device_of,
    require_flag,
    require_float,
    require_number,
    require_real,
    require_tensor,
    require_values,
)
from fastgrpo.chunking import CUDA_ROWS, ChunkPlan
from fastgrpo.kernels.reference import HeadCall, Transform, Use
from fastgrpo.kernels.rows import NoLists
from fastgrpo.kernels.select import has_row_kernels, head_kernels
from fastgrpo.objective import (
    GRPOStats,
    Objective,
    RowTerms,
    grpo_loss,
    require_objective,
    row_local_terms_exist,
    row_terms,
)
from fastgrpo.ops import (
    accumulation_dtype,
    objective_constants,
    run_linear_grpo,
    run_linear_logprob,
    skips_zero_advantages,
)
from fastgrpo.row_local import row_inputs, row_stats

_LEAST_FLOAT32 = torch.finfo(torch.float32).tiny
# A logit over a larger one loses digits, or is 0.
_LARGEST_SOFTCAP = 1e30
_IGNORED = -1


class LogProbs(NamedTuple):
    """Result of `linear_logprob`."""

    logprobs: Tensor
    """`[N]` fp32 (fp64 for fp64 products), 0 for ignored rows."""
    entropy: Tensor | None
    """`[N]` nats, the same dtype, 0 for ignored rows; None where not asked for."""


class _Head(NamedTuple):
    """Checked arguments that both entry points share."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    logit_scale: float
    softcap: float | None
    compute_dtype: torch.dtype
    need_hidden: bool
    need_weight: bool
    need_bias: bool

    @property
    def trains(self) -> bool:
        return self.need_weight or self.need_bias

    def call(self, use: Use, entropy_gradient: bool) -> HeadCall:
        transform = Transform(self.temperature, self.logit_scale, self.softcap)
        return HeadCall(self.weight, self.bias, transform, self.compute_dtype, use, entropy_gradient)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    chunk_bytes: int | None = None,
    compute_dtype: torch.dtype | None = None,
    *,
    num_chunks: int = -1,
    logit_chunk_multiplier: float | None = None,
    entropy_requires_grad: bool = True,
    skip_ignored: bool = True,
) -> LogProbs:
    """
    Log-probs of `targets` under `softmax(softcap(logit_scale * (hidden @ weight.T + bias)) / temperature)`.

    Args:
        hidden: `[N, H]` bf16, fp16 or fp32 (fp64 to verify).
        weight: `[V, H]`, any of these dtypes.
        targets: `[N]` int32 or int64. Outside `[0, V)`: the row is ignored and not computed, log-prob and gradient are 0.
        bias: `[V]` or None.
        temperature: above 0.
        logit_scale: factor on the products, before softcap and temperature.
        softcap: above 0, in logits: `softcap * tanh(z / softcap)`; None = none.
        return_entropy: also return the entropy of every row.
        chunk_bytes: bytes for the logits alive at once, or for what stands in for them; None = 512 MiB, on a CPU 128 MiB.
        compute_dtype: dtype of the operands of the products; None = the autocast dtype where autocast is on, else
            hidden's. Products are summed, and logits kept, in fp32 in any case.
        num_chunks: -1, or exactly this many chunks; wins over `chunk_bytes`.
        logit_chunk_multiplier: multiplies the automatic number of chunks.
        entropy_requires_grad: False returns the entropy without gradient, which with a frozen head saves a third of the
            work where it is only logged.
        skip_ignored: False where (nearly) all rows count: on CUDA ignored rows are then computed too, with the same result,
            but with a frozen head the host need not wait for the device to learn which they are. (A backward that computes
            logits again does wait.)

    Returns:
        LogProbs, differentiable in hidden, weight and bias, once and in reverse mode.

    Raises:
        TypeError, ValueError: shapes, dtypes, devices or options that do not fit; before any work.
    """
    plan = ChunkPlan(chunk_bytes, num_chunks, logit_chunk_multiplier)
    require_flag("return_entropy", return_entropy)
    require_flag("entropy_requires_grad", entropy_requires_grad)
    require_flag("skip_ignored", skip_ignored)
    head = _check_head(hidden, weight, targets, bias, temperature, logit_scale, softcap, compute_dtype)
    hidden, targets = _savable(head, hidden, targets)
    entropy_gradient = return_entropy and entropy_requires_grad
    use = _use_of_scoring(hidden, head, entropy_gradient)
    chunk_rows = _chunk_rows(plan, hidden, head, use, return_entropy, entropy_gradient)
    return _score(hidden, targets.long(), head, use, chunk_rows, return_entropy, entropy_requires_grad, skip_ignored)


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    segments: Tensor,
    advantages: Tensor,
    objective: Objective,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_ratio: Tensor | None = None,
    loss_mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
    compute_dtype: torch.dtype | None = None,
    *,
    sampling_logprobs: Tensor | None = None,
    num_chunks: int = -1,
    logit_chunk_multiplier: float | None = None,
) -> tuple[Tensor, GRPOStats]:
    """
    GRPO loss of one micro-batch straight from hidden states.

    Args:
        hidden, weight, targets, bias, temperature, logit_scale, softcap, chunk_bytes, compute_dtype, num_chunks,
            logit_chunk_multiplier: as in `linear_logprob`; rows are the scored tokens, sequence after sequence.
        segments: `[B + 1]` int32 or int64: rows of sequence i are `segments[i]:segments[i + 1]`.
        advantages: `[B]` or `[N]` float (`[B]` where both are the same).
        objective: loss type, options and normalisers.
        old_logprobs: `[N]`; None on-policy.
        ref_logprobs: `[N]`; needed where `objective.beta` is not 0.
        sampler_ratio: `[B]` or `[N]`, see `sampler_importance_ratio`.
        loss_mask: `[N]`, 0 where a row counts for nothing; such rows are not computed. Any other value is a 1; None = all
            count.
        sampling_logprobs: `[N]` the sampler's own, for the off-policy mask; None = `old_logprobs`.

    Returns:
        0-d fp32 loss, differentiable in hidden, weight and bias, and GRPOStats with `[N]` logprobs and entropy. Until the
        backward hidden may not be changed in place; autograd says so where that matters. `torch.compile` breaks its graph
        here, where the values of segments are read; of the two, `linear_logprob` takes `fullgraph=True`.

    Raises:
        TypeError, ValueError: what does not fit; before any work.
    """
    require_objective(objective)
    plan = ChunkPlan(chunk_bytes, num_chunks, logit_chunk_multiplier)
    head = _check_head(hidden, weight, targets, bias, temperature, logit_scale, softcap, compute_dtype)
    hidden, targets = _savable(head, hidden, targets)
    count, batch = hidden.shape[0], _check_segments(segments, hidden)
    per_row = {
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "sampling_logprobs": sampling_logprobs,
        "loss_mask": loss_mask,
    }
    _check_values(hidden, per_row, {count})
    require_tensor("advantages", advantages)
    either = {"advantages": advantages, "sampler_ratio": sampler_ratio}
    _check_values(hidden, either, {batch, count})
    if objective.beta != 0.0 and ref_logprobs is None:
        raise ValueError(f"beta is {objective.beta}, so the KL term needs ref_logprobs=[N]; give them, or set beta=0.")

    row_local = row_local_terms_exist(
        objective,
        on_policy=old_logprobs is None,
        per_token_advantages=advantages.shape[0] != batch,
        per_token_sampler_ratio=sampler_ratio is not None and sampler_ratio.shape[0] != batch,
    )
    entropy_gradient = objective.entropy_coef != 0.0
    if row_local:
        _refuse_gradients(per_row | either)
    if row_local and count and batch and has_row_kernels(hidden.device, head.compute_dtype):
        return _row_local_on_device(
            hidden, targets, head, objective, segments, advantages, old_logprobs, ref_logprobs, sampler_ratio, loss_mask,
            plan,
        )  # fmt: skip

    use = Use.OBJECTIVE if row_local else _use_of_scoring(hidden, head, entropy_gradient)
    chunk_rows = _chunk_rows(plan, hidden, head, use, True, entropy_gradient)
    layout = _Segments(segments, hidden)
    counted = (targets >= 0) & (targets < weight.shape[0])
    if loss_mask is not None:
        counted = counted & loss_mask.bool()
    targets = torch.where(counted, targets.long(), _IGNORED)
    dtype = accumulation_dtype(head.compute_dtype)
    mask = layout.pad(counted.to(dtype))
    old_logprobs, ref_logprobs, sampling_logprobs, sampler_ratio, advantages = (
        None if x is None else x.to(dtype)
        for x in (old_logprobs, ref_logprobs, sampling_logprobs, sampler_ratio, advantages)
    )
    padded = {
        "old_logprobs": layout.pad(old_logprobs),
        "ref_logprobs": layout.pad(ref_logprobs),
        "sampling_logprobs": layout.pad(sampling_logprobs),
        "sampler_ratio": layout.pad_or_keep(sampler_ratio),
    }
    padded_advantages = layout.pad_or_keep(advantages)
    if not row_local:
        logprobs, entropy = _score(hidden, targets, head, use, chunk_rows, True, entropy_gradient)
        loss, stats = grpo_loss(
            layout.pad(logprobs), padded_advantages, mask, objective, entropy=layout.pad(entropy), **padded
        )
        return loss, _flat_stats(stats, logprobs, entropy)

    terms = row_terms(objective, padded_advantages, mask, padded["sampler_ratio"]).map(layout.unpad)
    terms = terms._replace(old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    loss, (logprobs, entropy) = _row_local_loss(hidden, targets, head, objective, terms, chunk_rows)
    with torch.no_grad():
        _, stats = grpo_loss(
            layout.pad(logprobs), padded_advantages, mask, objective, entropy=layout.pad(entropy), **padded
        )
    return loss, _flat_stats(stats, logprobs, entropy)


def _score(
    hidden: Tensor,
    targets: Tensor,
    head: _Head,
    use: Use,
    chunk_rows: int,
    return_entropy: bool,
    entropy_requires_grad: bool,
    skip_ignored: bool = True,
) -> LogProbs:
    with_slope = head.need_hidden and use is Use.SLOPES
    logprobs, entropy, *_ = run_linear_logprob(
        hidden,
        head.weight,
        targets,
        head.bias,
        head.temperature,
        head.logit_scale,
        head.softcap,
        chunk_rows,
        head.compute_dtype,
        return_entropy,
        with_slope,
        with_slope and return_entropy and entropy_requires_grad,
        skip_ignored,
    )
    if not return_entropy:
        return LogProbs(logprobs, None)
    return LogProbs(logprobs, entropy if entropy_requires_grad else entropy.detach())


def linear_grpo_rows(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    terms: RowTerms,
    objective: Objective,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
    compute_dtype: torch.dtype | None = None,
    *,
    num_chunks: int = -1,
    logit_chunk_multiplier: float | None = None,
) -> tuple[Tensor, LogProbs]:
    """
    The loss of a row-local objective, for a caller that knows what each row counts; `linear_grpo_loss` is made of it.

    Args:
        hidden, weight, targets, bias, temperature, logit_scale, softcap, chunk_bytes, compute_dtype, num_chunks,
            logit_chunk_multiplier: as in `linear_logprob`.
        terms: `[N]` each, in fp32 (fp64 for fp64 products); `token_weights` is 0 where a target is ignored.
        objective: one that is row-local, see `fastgrpo.objective.row_local_terms_exist`.

    Returns:
        0-d fp32 loss, differentiable in hidden, weight and bias, and detached LogProbs.

    Raises:
        TypeError, ValueError: what does not fit; before any work.
    """
    require_objective(objective)
    plan = ChunkPlan(chunk_bytes, num_chunks, logit_chunk_multiplier)
    head = _check_head(hidden, weight, targets, bias, temperature, logit_scale, softcap, compute_dtype)
    hidden, targets = _savable(head, hidden, targets)
    _check_values(hidden, terms._asdict(), {hidden.shape[0]})
    _refuse_gradients(terms._asdict())
    chunk_rows = _chunk_rows(plan, hidden, head, Use.OBJECTIVE, True, terms.entropy_weights is not None)
    return _row_local_loss(hidden, targets.long(), head, objective, terms, chunk_rows)


def _row_local_loss(
    hidden: Tensor,
    targets: Tensor,
    head: _Head,
    objective: Objective,
    terms: RowTerms,
    chunk_rows: int,
    rows: Tensor | None = None,
    others: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, LogProbs]:
    loss, logprobs, entropy, *_ = run_linear_grpo(
        hidden,
        head.weight,
        targets,
        head.bias,
        terms.advantages,
        terms.old_logprobs,
        terms.ref_logprobs,
        terms.multiplier,
        terms.phi,
        terms.token_weights,
        terms.entropy_weights,
        head.temperature,
        head.logit_scale,
        head.softcap,
        chunk_rows,
        head.compute_dtype,
        objective.loss_type,
        objective_constants(objective),
        True,
        head.need_hidden,
        head.need_weight,
        head.need_bias,
        rows,
        others,
        counts,
    )
    return loss, LogProbs(logprobs.detach(), entropy.detach())


def _row_local_on_device(
    hidden: Tensor,
    targets: Tensor,
    head: _Head,
    objective: Objective,
    segments: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    sampler_ratio: Tensor | None,
    loss_mask: Tensor | None,
    plan: ChunkPlan,
) -> tuple[Tensor, GRPOStats]:
    """`_row_local_loss` and its statistics from rows as they are, in the library's kernels."""
    bonus, with_grad = objective.entropy_coef != 0.0, head.need_hidden or head.trains
    by_advantage = with_grad and skips_zero_advantages(objective, bonus)
    inputs = row_inputs(
        objective, segments, targets, head.weight.shape[0], loss_mask, advantages, sampler_ratio, by_advantage
    )
    chunk_rows = _chunk_rows(plan, hidden, head, Use.OBJECTIVE, True, bonus)
    terms = inputs.terms
    if old_logprobs is not None:
        terms = terms._replace(old_logprobs=old_logprobs.float())
    if ref_logprobs is not None:
        terms = terms._replace(ref_logprobs=ref_logprobs.float())
    listed = inputs.wanted, inputs.others, inputs.counts
    if torch.compiler.is_compiling():
        # Lists of another length would be traced anew; the op finds them itself.
        listed = ()
        if not inputs.sizes[4].item():
            _require_segments(hidden.shape[0], *inputs.sizes[:4].tolist())
    try:
        result = _row_local_loss(hidden, inputs.targets, head, objective, terms, chunk_rows, *listed)
    except NoLists:
        result = None
    if result is None:
        # Behind the handler, so that what is wrong is said alone.
        _require_segments(hidden.shape[0], *inputs.sizes[:4].tolist())
    loss, (logprobs, entropy) = result
    return loss, row_stats(objective, segments, inputs, terms, advantages, logprobs, entropy)


def _check_segments(segments: Tensor, hidden: Tensor) -> int:
    """The number of sequences; raises `ValueError` for what can be seen without the values."""
    require_tensor("segments", segments)
    require_dense("segments", segments)
    require_device_of("hidden", hidden, "segments", segments)
    if segments.dim() != 1 or segments.dtype not in (torch.int32, torch.int64) or segments.numel() == 0:
        raise ValueError(
            f"segments is {segments.dtype} of shape {tuple(segments.shape)}; give [B + 1] int32 or int64 offsets."
        )
    return segments.numel() - 1


def _require_segments(count: int, first: int, last: int, shortest: int, longest: int) -> None:
    if [first, last] != [0, count] or shortest < 0:
        raise ValueError(
            f"segments runs from {first} to {last}; it must start at 0, never fall, and end at the {count} rows of hidden."
        )


class _Segments:
    """Between rows one after the other, `[N]`, and sequences side by side, `[B, T]`."""

    def __init__(self, segments: Tensor, hidden: Tensor) -> None:
        count = hidden.shape[0]
        offsets = segments.long().contiguous()
        lengths = offsets.diff()
        self.count, self.batch = count, lengths.numel()
        # One copy to the host for all that must be known there.
        sizes = torch.stack(
            [offsets[0], offsets[-1], *((lengths.min(), lengths.max()) if self.batch else (offsets[0], offsets[0]))]
        ).tolist()
        _require_segments(count, *sizes)
        width = sizes[-1]
        columns = torch.arange(width, device=segments.device)
        self._inside = columns < lengths.unsqueeze(1)
        self._index = (offsets[:-1].unsqueeze(1) + columns).clamp(max=max(count - 1, 0))
        rows = torch.arange(count, device=segments.device)
        sequence = torch.bucketize(rows, offsets[1:], right=True)
        self._place = sequence * width + rows - offsets[sequence]

    def pad(self, values: Tensor | None) -> Tensor | None:
        """`[N]` to `[B, T]`, 0 behind the end of a sequence."""
        if values is None:
            return None
        if self.count == 0:
            return values.new_zeros(self._inside.shape) + values.sum()
        return torch.where(self._inside, values[self._index], torch.zeros((), dtype=values.dtype, device=values.device))

    def unpad(self, values: Tensor) -> Tensor:
        """`[B, T]` to `[N]`."""
        return values.reshape(-1)[self._place]

    def is_per_row(self, values: Tensor) -> bool:
        """Whether `values` is `[N]`; where B == N it is one value a sequence."""
        return values.shape[0] != self.batch

    def pad_or_keep(self, values: Tensor | None) -> Tensor | None:
        """`[B]` to `[B, 1]`, `[N]` to `[B, T]`."""
        if values is None:
            return None
        return self.pad(values) if self.is_per_row(values) else values.unsqueeze(1)


def _flat_stats(stats: GRPOStats, logprobs: Tensor, entropy: Tensor) -> GRPOStats:
    return replace(stats, logprobs=logprobs.detach(), entropy=entropy.detach())


def _use_of_scoring(hidden: Tensor, head: _Head, entropy_gradient: bool) -> Use:
    """Whether slopes are computed beside log-probs and entropies, or gradients in the backward, from logits computed again."""
    if head.trains:
        return Use.GIVEN
    # With an entropy's slope, either way takes three products.
    kernels = head_kernels(hidden.device, head.compute_dtype)
    given = entropy_gradient and kernels.prefers_given(head.call(Use.GIVEN, entropy_gradient))
    return Use.GIVEN if given else Use.SLOPES


def _chunk_rows(
    plan: ChunkPlan, hidden: Tensor, head: _Head, use: Use, with_entropy: bool, entropy_gradient: bool
) -> int:
    """Rows in a chunk. `use`, `entropy_gradient`: where a gradient is wanted."""
    if not (head.need_hidden or head.trains):
        use, entropy_gradient = Use.STATISTICS, False
    kernels = head_kernels(hidden.device, head.compute_dtype)
    bytes_a_row = kernels.bytes_a_row(head.call(use, entropy_gradient), with_entropy)
    liked = CUDA_ROWS if hidden.device.type == "cuda" else ()
    return plan.rows(hidden.shape[0], bytes_a_row, hidden.device, liked)


def _check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    compute_dtype: torch.dtype | None,
) -> _Head:
    for name, value in (("hidden", hidden), ("weight", weight), ("targets", targets), ("bias", bias)):
        if name != "bias" or value is not None:
            require_tensor(name, value)
            require_dense(name, value)
    refuse_forward_mode(hidden, weight, bias)
    if hidden.dim() != 2:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}; it must be [N, H]: one row a scored token. "
            "Flatten batch and time with hidden.reshape(-1, hidden.shape[-1])."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; with hidden {tuple(hidden.shape)} it must be [V, {hidden.shape[1]}] "
            "with V >= 1, as the weight of an lm_head is."
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)}; it must be [{hidden.shape[0]}], one id a row.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [{weight.shape[0]}], one entry a word.")
    if targets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"targets is {targets.dtype}; it must be torch.int32 or torch.int64 token ids.")
    for name, value in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if value is not None and value.dtype not in COMPUTED_FLOATS:
            raise TypeError(f"{name} is {value.dtype}; it must be bfloat16, float16 or float32 (float64 to verify).")
        if value is not None:
            require_device_of("hidden", hidden, name, value)
    require_device_of("hidden", hidden, "targets", targets)
    require_values("hidden", hidden)
    for name, value in (("temperature", temperature), ("logit_scale", logit_scale), ("softcap", softcap)):
        if name != "softcap" or value is not None:
            require_number(name, value)
    if not temperature > 0 or temperature == float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be a finite number above 0.")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap is {softcap}; it must be finite and above 0, or None for no softcap.")
    if not abs(logit_scale) < float("inf"):
        raise ValueError(f"logit_scale is {logit_scale}; it must be finite.")
    compute_dtype = _resolve_compute_dtype(hidden, compute_dtype)
    if compute_dtype != torch.float64:
        _require_float32(temperature, logit_scale, softcap)
    recording = torch.is_grad_enabled()
    return _Head(
        weight,
        bias,
        float(temperature),
        float(logit_scale),
        None if softcap is None else float(softcap),
        compute_dtype,
        recording and hidden.requires_grad,
        recording and weight.requires_grad,
        recording and bias is not None and bias.requires_grad,
    )


def _require_float32(temperature: float, logit_scale: float, softcap: float | None) -> None:
    if temperature < _LEAST_FLOAT32:
        raise ValueError(
            f"temperature is {temperature}, less than float32 can divide by; give at least {_LEAST_FLOAT32:.1e}."
        )
    if abs(logit_scale) > LARGEST_FLOAT32:
        raise ValueError(f"logit_scale is {logit_scale}, more than float32 holds; give at most {LARGEST_FLOAT32:.1e}.")
    if softcap is not None and not _LEAST_FLOAT32 <= softcap <= _LARGEST_SOFTCAP:
        raise ValueError(
            f"softcap is {softcap}, which float32 cannot work with; give {_LEAST_FLOAT32:.1e} to {_LARGEST_SOFTCAP:.0e}, or "
            "None for no softcap."
        )


def _savable(head: _Head, *values: Tensor) -> tuple[Tensor, ...]:
    """Autograd saves no tensor that was made in inference mode, as targets may be, or hidden below a head that trains."""
    if torch.compiler.is_compiling() or not (head.trains or head.need_hidden):
        return values
    return tuple(x.clone() if x.is_inference() else x for x in values)


def _resolve_compute_dtype(hidden: Tensor, compute_dtype: torch.dtype | None) -> torch.dtype:
    if compute_dtype is None:
        device = hidden.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if compute_dtype not in COMPUTED_FLOATS:
        raise TypeError(
            f"compute_dtype is {compute_dtype}; it must be torch.bfloat16, float16 or float32 (float64 to verify), or "
            "None to follow autocast or hidden."
        )
    return compute_dtype


def _refuse_gradients(values: dict[str, Tensor | None]) -> None:
    """Raises `ValueError` for a value that waits for a gradient, which a loss in one pass has for the head's inputs alone."""
    if not torch.is_grad_enabled():
        return
    for name, value in values.items():
        if value is not None and value.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and this loss gives one to hidden, weight and bias alone. Give "
                f"{name}.detach(), or compute the log-probs with linear_logprob and the loss with grpo_loss."
            )


def _check_values(hidden: Tensor, values: dict[str, Tensor | None], lengths: set[int]) -> None:
    for name, value in values.items():
        if value is None:
            continue
        require_tensor(name, value)
        require_dense(name, value)
        if value.dim() != 1 or value.shape[0] not in lengths:
            wanted = " or ".join(f"[{length}]" for length in sorted(lengths))
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {wanted}.")
        require_device_of("hidden", hidden, name, value)
        (require_real if name == "loss_mask" else require_float)(name, value)
