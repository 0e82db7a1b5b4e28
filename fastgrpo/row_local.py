"""A row-local GRPO objective on a CUDA device: coefficients of every row before the head, sums for the metrics after it.

The kernels of csrc/cuda/grpo.cu; what they compute is `Objective.token_weights`, `vespo_weights` and the sums of `grpo_loss`
over rows instead of padded sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo.kernels.sums import SUMS, grpo_sums
from fastgrpo.objective import (
    BATCH_NORMALISED_LOSS_TYPES,
    CLIPPED_LOSS_TYPES,
    LOSS_TYPES,
    GRPOStats,
    Objective,
    RowTerms,
)
from fastgrpo.ops import objective_constants

# The places of Normaliser in csrc/cuda/grpo.h.
_ITEMS, _TOKENS, _CONSTANT, _SEQUENCE = range(4)


@dataclass(frozen=True)
class RowInputs:
    """
    What the head needs of every row.

    Attributes:
        targets: `[N]` int64, -1 for a row that counts for nothing.
        wanted, others: `[N]` int64 each: which rows are computed with gradients and which without, ascending, as many as
            `counts` says.
        terms: `[N]` fp32 each, without old and reference log-probs.
        phi_of_sequence: `[B]`, where `phi` is one a sequence.
        sizes: `[5]` int64: first and last of the segments, shortest and longest sequence; 1 where they cover the rows.
        counts: `[1]` int64: how many are wanted and, from bit 32 on, others; -1 where segments do not cover the rows.
    """

    targets: Tensor
    wanted: Tensor
    others: Tensor
    terms: RowTerms
    phi_of_sequence: Tensor | None
    sizes: Tensor
    counts: Tensor


def row_inputs(
    objective: Objective,
    segments: Tensor,
    targets: Tensor,
    vocabulary: int,
    mask: Tensor | None,
    advantages: Tensor,
    sampler_ratio: Tensor | None,
    by_advantage: bool,
) -> RowInputs:
    """
    Coefficients of every row, and which rows are computed, without a host sync.

    Args:
        objective: a row-local one.
        segments: `[B + 1]` int32 or int64, B >= 1.
        targets: `[N]` int32 or int64.
        vocabulary: V.
        mask: `[N]` or None, 0 where a row counts for nothing.
        advantages: `[B]` or `[N]` float.
        sampler_ratio: `[B]`, `[N]` or None.
        by_advantage: a row whose advantage is 0 is none of the wanted.

    Returns:
        RowInputs.
    """
    count, batch = targets.shape[0], segments.shape[0] - 1
    advantages, sampler_ratio = _float(advantages), _float(sampler_ratio)
    is_vespo = objective.loss_type == "vespo"
    takes = {
        "multiplier": sampler_ratio is not None and not is_vespo,
        "phi": is_vespo,
        "entropy_weights": objective.entropy_coef != 0.0,
    }
    values = iter(targets.new_empty((2 + sum(takes.values()), count), dtype=torch.float32).unbind())
    row_advantages, weights = next(values), next(values)
    optional = {name: next(values) if is_taken else None for name, is_taken in takes.items()}
    counted, wanted, others = targets.new_empty((3, count), dtype=torch.int64).unbind()
    sizes, counts = targets.new_empty(5, dtype=torch.int64), targets.new_empty(1, dtype=torch.int64)
    per_sequence = is_vespo and advantages.shape[0] == batch
    phi_of_sequence = weights.new_empty(batch) if per_sequence else None
    kind, factor, accumulation, items, items_factor = _normaliser(objective, batch, targets.device)
    torch.ops.fastgrpo.grpo_rows(
        segments.contiguous(),
        targets.contiguous(),
        vocabulary,
        None if mask is None else mask.bool().contiguous(),
        advantages,
        sampler_ratio,
        kind,
        factor,
        accumulation,
        items,
        items_factor,
        objective.entropy_coef,
        objective.vespo_k_pos,
        objective.vespo_lambda_pos,
        objective.vespo_k_neg,
        objective.vespo_lambda_neg,
        by_advantage,
        counted,
        wanted,
        others,
        row_advantages,
        weights,
        *optional.values(),
        phi_of_sequence,
        sizes,
        counts,
    )
    terms = RowTerms(row_advantages, weights, **optional)
    return RowInputs(counted, wanted, others, terms, phi_of_sequence, sizes, counts)


def row_stats(
    objective: Objective,
    segments: Tensor,
    rows: RowInputs,
    terms: RowTerms,
    advantages: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
) -> GRPOStats:
    """
    What the metrics are made of, from the statistics of every row, without a host sync.

    Args:
        objective, segments, advantages: as in `row_inputs`.
        rows: from it.
        terms: its terms, with old and reference log-probs.
        logprobs, entropy: `[N]` fp32.

    Returns:
        GRPOStats; its sums are parts of one tensor.
    """
    at_sequence_level = objective.importance_sampling_level == "sequence"
    sums, clips = grpo_sums(
        LOSS_TYPES.index(objective.loss_type),
        objective_constants(objective),
        segments.contiguous(),
        segments.shape[0] - 1,
        rows.targets,
        logprobs,
        terms.advantages,
        terms.token_weights,
        entropy,
        terms.old_logprobs,
        terms.ref_logprobs,
        terms.multiplier,
        terms.phi,
        terms.entropy_weights,
        _float(advantages) if at_sequence_level else None,
        rows.phi_of_sequence,
        1.0 if objective.loss_type in BATCH_NORMALISED_LOSS_TYPES else objective.accumulation,
        at_sequence_level,
    )
    part = dict(zip(SUMS, sums.unbind(), strict=True))
    named = {"entropy": part["entropy"]}
    if objective.beta != 0.0:
        named["kl"] = part["kl"]
    low_clip = high_clip = None
    if objective.loss_type in CLIPPED_LOSS_TYPES:
        named |= {f"clip_ratio/{name}_mean": part[name] for name in ("low", "high", "region")}
        low_clip, high_clip = clips.unbind()
    elif objective.loss_type == "cispo":
        named["cispo_clip_ratio"] = part["capped"]
    elif objective.loss_type == "vespo":
        named["vespo/phi_seq_mean"] = part["phi"]
    return GRPOStats(
        logprobs=logprobs,
        entropy=entropy,
        policy_loss=part["policy_loss"][0],
        sums=named,
        low_clip=low_clip,
        high_clip=high_clip,
        entropy_bonus=part["entropy"],
    )


def _normaliser(
    objective: Objective, batch: int, device: torch.device
) -> tuple[int, float, float, Tensor | None, float]:
    """The place of the normaliser, its factor, the accumulation, given items, and what counted tokens are items times."""
    if objective.loss_type not in BATCH_NORMALISED_LOSS_TYPES:
        constant = {"dr_grpo": batch * (objective.max_completion_length or 1), "luspo": batch}
        kind = _TOKENS if objective.loss_type == "bnpo" else _CONSTANT if objective.loss_type in constant else _SEQUENCE
        return kind, float(constant.get(objective.loss_type, 1)), objective.accumulation, None, 0.0
    steps = objective.steps_per_generation or objective.gradient_accumulation_steps
    factor = 1.0 / objective.num_processes
    if objective.training:
        factor *= objective.gradient_accumulation_steps / steps
    items = objective.num_items_in_batch
    if items is None:
        return _ITEMS, factor, 1.0, None, float(objective.num_processes * (steps if objective.training else 1))
    if isinstance(items, Tensor):
        return _ITEMS, factor, 1.0, items.to(device, torch.float32).reshape(1), 0.0
    return _CONSTANT, max(float(items), 1.0) * factor, 1.0, None, 0.0


def _float(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    if values.requires_grad:
        values = values.detach()
    return values.float().contiguous()
