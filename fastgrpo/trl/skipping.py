"""`Options.skip_zero_advantage`: rows whose loss has no gradient stay out of the gradient forward.

A row's loss is its advantage times something finite, summed over its loss mask. With an advantage of 0, or an empty
mask, its gradient is 0 exactly, and so is its share of the loss. TRL's own loss still sees the whole micro-batch, with
every normaliser as it was: the rows left out come back with the old log-probs (a ratio of 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.trl.compat import LOSS_METHOD, SCORING_METHOD, loss_mask, overrides


class Kept(NamedTuple):
    """Rows of a micro-batch that are computed."""

    rows: Tensor
    """`[K]` int64, in order, at least one: a forward without rows would leave DDP's hooks waiting."""
    old_logprobs: Tensor | None
    """`[B, T]`, what the other rows' log-probs are; None = 0."""

    def spread(self, values: Tensor, fill: Tensor) -> Tensor:
        """`[K, T]` values of the kept rows and `[B, T]` of the others to `[B, T]`."""
        return fill.to(values.dtype).index_copy(0, self.rows, values)

    def spread_logprobs(self, logprobs: Tensor, count: int) -> Tensor:
        """`[K, T]` to `[B, T]`."""
        fill = self.old_logprobs
        return self.spread(logprobs, logprobs.new_zeros(count, logprobs.shape[1]) if fill is None else fill)

    def spread_entropies(self, entropies: Tensor, attention: Tensor, count: int) -> Tensor:
        """`[K, T]` to `[B, T]`: rows left out get the mean of the others' tokens (`attention`, `[K, T]`), so means stay."""
        mean = (entropies * attention).sum() / attention.sum().clamp(min=1)
        return self.spread(entropies, mean.detach().expand(count, entropies.shape[1]))

    def spread_both(
        self, logprobs: Tensor, entropies: Tensor | None, attention: Tensor, count: int
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of the kept rows to those of all `count` rows."""
        spread = None if entropies is None else self.spread_entropies(entropies, attention, count)
        return self.spread_logprobs(logprobs, count), spread


def skipping_obstacle(trainer: GRPOTrainer) -> str:
    """What gives rows without an advantage a gradient, or hides whether they have one; empty where nothing does."""
    for method in (LOSS_METHOD, SCORING_METHOD):
        if overrides(trainer, method):
            return f"{type(trainer).__name__} brings its own {method}"
    return why_all_rows_count(trainer)


def why_all_rows_count(trainer: GRPOTrainer) -> str:
    """What in its loss gives rows without an advantage a gradient; a callback may change it."""
    if trainer.beta != 0.0:
        return f"beta={trainer.beta} pulls every row to the reference"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus has a gradient in every row"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile compares the entropies of all rows"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss counts the tokens of every row"
    return ""


def kept_rows(inputs: dict[str, Any]) -> Kept | None:
    """The rows of a micro-batch that have a gradient; None = all."""
    mask = loss_mask(inputs)
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    rows = ((advantages != 0) & (mask != 0)).any(1).nonzero().squeeze(1)
    if len(rows) == len(mask):
        return None
    if len(rows) == 0:
        rows = torch.zeros(1, dtype=torch.int64, device=mask.device)
    images = inputs.get("num_images")
    if images and any(images) and not any(images[row] for row in rows.tolist()):
        # DDP's hooks wait for the vision tower, too.
        pictured = next(row for row, number in enumerate(images) if number)
        rows = torch.cat([rows, rows.new_tensor([pictured])]).sort().values
    return Kept(rows, inputs.get("old_per_token_logps"))
