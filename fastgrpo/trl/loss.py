"""One micro-batch's loss: TRL's own `_compute_loss`, with the scoring told what the loss knows and TRL does not pass on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.trl.compat import LOSS_METHOD, stock_method
from fastgrpo.trl.onpolicy import OldLogProbs
from fastgrpo.trl.scoring import ScoringMethod
from fastgrpo.trl.skipping import Kept, kept_rows


class LossPass:
    """
    One call of `_compute_loss`, for the scoring method that is called inside.

    Args:
        inputs: the micro-batch.
        old: of its trainer.
        kept: rows that are computed; None = all.
    """

    def __init__(self, inputs: dict[str, Any], old: OldLogProbs, kept: Kept | None) -> None:
        self.inputs, self.old, self.kept = inputs, old, kept

    def scored(self, logprobs: Tensor) -> None:
        """The log-probs, `[B, T]`, before TRL's loss reads anything but them."""
        self.old.complete(self.inputs, logprobs, None if self.kept is None else self.kept.rows)


class LossMethod:
    """
    The instance attribute that replaces a trainer's `_compute_loss`: TRL's own, in a `LossPass`.

    Args:
        trainer: whose method it replaces.
        method: its scoring.
        old: its.
        skip_zero_advantage: see `Options`.
    """

    def __init__(
        self, trainer: GRPOTrainer, method: ScoringMethod, old: OldLogProbs, skip_zero_advantage: bool
    ) -> None:
        self.trainer, self.method, self.old = trainer, method, old
        self.skip_zero_advantage = skip_zero_advantage

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return stock_method(self.trainer, memo, LOSS_METHOD)

    def __call__(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        own = getattr(type(self.trainer), LOSS_METHOD)
        if not self.method.handle.active:
            # Somebody kept the method, wrapped for example, beyond `unpatch`.
            return own(self.trainer, model, inputs)
        if self.trainer.model.training:
            self.old.window.begin()
        kept = kept_rows(inputs) if self.skip_zero_advantage and torch.is_grad_enabled() else None
        self.method.loss = LossPass(inputs, self.old, kept)
        try:
            loss = own(self.trainer, model, inputs)
        finally:
            self.method.loss = None
        self.old.log()
        return loss
