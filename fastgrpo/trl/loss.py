"""One micro-batch's loss: TRL's own `_compute_loss`, with the scoring told what the loss knows and TRL does not pass on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.trl.compat import LOSS_METHOD, stock_method
from fastgrpo.trl.onpolicy import OldLogProbs
from fastgrpo.trl.ordering import RowOrder, unseen
from fastgrpo.trl.scoring import ScoringMethod
from fastgrpo.trl.skipping import Kept, kept_rows


class LossPass:
    """
    One call of `_compute_loss`, for the scoring method that is called inside.

    Args:
        inputs: the micro-batch.
        old: of its trainer.
        kept: rows that are computed; None = all.
        given: log-probs and entropies, where they are known already.
        counts: whether its metrics count.
    """

    def __init__(
        self,
        inputs: dict[str, Any],
        old: OldLogProbs,
        kept: Kept | None,
        given: tuple[Tensor, Tensor] | None = None,
        counts: bool = True,
    ) -> None:
        self.inputs, self.old, self.kept, self.given, self.counts = inputs, old, kept, given, counts
        self.found: tuple[Tensor, Tensor | None] | None = None

    def scored(self, logprobs: Tensor, entropies: Tensor | None) -> None:
        """Log-probs and entropies, `[B, T]`, before TRL's loss reads anything but them."""
        self.found = (logprobs, entropies)
        self.old.complete(self.inputs, logprobs, None if self.kept is None else self.kept.rows, self.counts)


class LossMethod:
    """
    The instance attribute that replaces a trainer's `_compute_loss`: TRL's own, in a `LossPass`.

    Args:
        trainer: whose method it replaces.
        method: its scoring.
        old: its.
        skip_zero_advantage: see `Options`.
        order: of the rows of an optimizer step; None = as TRL has them.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        method: ScoringMethod,
        old: OldLogProbs,
        skip_zero_advantage: bool,
        order: RowOrder | None,
    ) -> None:
        self.trainer, self.method, self.old, self.order = trainer, method, old, order
        self.skip_zero_advantage = skip_zero_advantage

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return stock_method(self.trainer, memo, LOSS_METHOD)

    def __call__(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.method.handle.active:
            # Somebody kept the method, wrapped for example, beyond `unpatch`.
            return getattr(type(self.trainer), LOSS_METHOD)(self.trainer, model, inputs)
        if self.trainer.model.training:
            self.old.window.begin()
        exchange = self.order.find(inputs) if self.order is not None and torch.is_grad_enabled() else None
        if exchange is None:
            return self._loss(model, inputs)[0]
        with unseen(self.trainer):
            loss, scores = self._loss(model, exchange.micro_batch, counts=False)
        for micro_batch, given in exchange.finish(*scores):
            with torch.no_grad():
                self._loss(model, micro_batch, given)
        return loss

    def _loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        given: tuple[Tensor, Tensor] | None = None,
        counts: bool = True,
    ) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        """A micro-batch's loss, and the log-probs and entropies it is made of."""
        in_training = torch.is_grad_enabled() or given is not None
        kept = kept_rows(inputs) if self.skip_zero_advantage and in_training else None
        self.method.loss = LossPass(inputs, self.old, kept, given, counts)
        try:
            loss = getattr(type(self.trainer), LOSS_METHOD)(self.trainer, model, inputs)
            found = self.method.loss.found
        finally:
            self.method.loss = None
        self.old.log()
        return loss, found
