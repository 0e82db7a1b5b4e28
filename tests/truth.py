"""Float64 truths that tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrpo.attention import Segment

COEFFICIENT_SIZES = {
    "1 / tokens": (1e-5, 1e-4),
    "times 2^16": (1.0, 10.0),
    "times 2^30": (1e4, 1e5),
    "tiny": (1e-25, 1e-24),
    "huge": (1e20, 1e21),
    "of every size": (1e-9, 1e3),
}
"""Smallest and largest of the coefficients that float16 gradients are tested with."""


def logits_float64(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """`[N, V]` logits of the same inputs, in float64; `bias` `[V]`, or `[N, V]` to learn what the products' gradients are."""
    z = hidden.double() @ weight.double().t()
    if bias is not None:
        z = z + bias.double()
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def logprobs_float64(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`[N]` log-prob and entropy of float64 logits, 0 for targets outside `[0, V)`."""
    log_p = torch.log_softmax(logits, -1)
    inside = (targets >= 0) & (targets < logits.shape[1])
    column = torch.where(inside, targets, 0).long().unsqueeze(1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0)).sum(-1)
    return torch.where(inside, log_p.gather(1, column).squeeze(1), 0.0), torch.where(inside, entropy, 0.0)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error; 0 where both are 0."""
    return ((value.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-300)).item()


def worst_row_error(value: Tensor, truth: Tensor) -> float:
    """The largest relative error of a row, against rows that are not negligible in the whole."""
    value, truth = value.double(), truth.double()
    scale = truth.norm(dim=1)
    if scale.numel() == 0:
        return 0.0
    large = scale > 1e-3 * scale.max()
    return ((value - truth).norm(dim=1) / scale.clamp(min=1e-300))[large].max().item() if large.any() else 0.0


def every_row_error(value: Tensor, truth: Tensor) -> float:
    """The largest relative error of a row, however small; rows that are 0 must be."""
    value, truth = value.double(), truth.double()
    norm = truth.norm(dim=1)
    assert value[norm == 0].eq(0).all() and value.isfinite().all()
    rows = (value - truth).norm(dim=1)[norm > 0] / norm[norm > 0]
    return rows.max().item() if len(rows) else 0.0


def attention_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: list[Segment],
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Every segment with its prefix as one sequence, dense; `[N, A, E]`."""
    heads, tokens, _ = query.shape
    key = key.repeat_interleave(heads // key.shape[0], 0)
    value = value.repeat_interleave(heads // value.shape[0], 0)
    rows = [value.new_zeros(heads, value.shape[2])] * tokens
    for segment in segments:
        seen = [*range(segment.prefix_start, segment.prefix_stop), *range(segment.start, segment.stop)]
        prefix = segment.prefix_stop - segment.prefix_start
        for position, token in enumerate(range(segment.start, segment.stop), prefix):
            oldest = 0 if window is None else max(0, position - window + 1)
            keys = seen[oldest : position + 1]
            scores = torch.einsum("ad,akd->ak", query[:, token], key[:, keys]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            rows[token] = torch.einsum("ak,ake->ae", scores.softmax(-1), value[:, keys])
    return torch.stack(rows) if rows else value.new_zeros(0, heads, value.shape[2])
