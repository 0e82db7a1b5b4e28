"""The loss of a row-local objective and the sums of its metrics, in the kernels of csrc/cuda/grpo.cu."""

from __future__ import annotations

import torch
from torch import Tensor

SUMS = ("loss", "policy_loss", "kl", "entropy", "low", "high", "region", "capped", "phi")
"""The columns, as GrpoSum in csrc/cuda/grpo.h has them."""


def grpo_sums(
    loss_type: int,
    constants: list[float],
    segments: Tensor | None,
    sequences: int,
    targets: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    entropy: Tensor | None,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    multiplier: Tensor | None,
    phi: Tensor | None,
    entropy_weights: Tensor | None,
    sequence_advantages: Tensor | None = None,
    phi_of_sequence: Tensor | None = None,
    policy_scale: float = 1.0,
    sequence_level: bool = False,
) -> tuple[Tensor, Tensor]:
    """
    Sums over the rows of a micro-batch, added in double in a fixed order.

    Args:
        loss_type, constants, advantages, token_weights, old_logprobs, ref_logprobs, multiplier, phi, entropy_weights: see
            `reference.TokenObjective`, `[N]`.
        segments: `[sequences + 1]` int32 or int64; None: parts of about one size.
        targets: `[N]` int64, negative for a row that counts for nothing.
        logprobs, entropy: `[N]` fp32.
        sequence_advantages, phi_of_sequence: `[sequences]`, where the clip flags and phi are one a sequence.
        policy_scale: factor of the sum without the entropy's part.
        sequence_level: count clip flags a sequence.

    Returns:
        `[len(SUMS), 2]` sums and counts, and `[2, sequences]` clipped fractions.
    """
    epsilon_low, epsilon_high, delta, beta, bias_correction, tau_pos, tau_neg = constants
    sums, clips = logprobs.new_empty(len(SUMS), 2), logprobs.new_empty(2, sequences)
    per_row = (
        logprobs,
        advantages,
        token_weights,
        entropy,
        old_logprobs,
        ref_logprobs,
        multiplier,
        phi,
        entropy_weights,
    )
    torch.ops.fastgrpo.grpo_sums(
        segments,
        targets.contiguous(),
        *(None if x is None else x.float().contiguous() for x in per_row),
        sequence_advantages,
        phi_of_sequence,
        loss_type,
        epsilon_low,
        epsilon_high,
        delta,
        beta,
        bool(bias_correction),
        tau_pos,
        tau_neg,
        policy_scale,
        sequence_level,
        logprobs.new_empty(sequences, len(SUMS) + 1, dtype=torch.float64),
        sums,
        clips,
    )
    return sums, clips
