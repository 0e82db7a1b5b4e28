"""One micro-batch's loss: TRL's own `_compute_loss`, with the scoring told what the loss knows and TRL does not pass on."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.trl.compat import LOSS_METHOD, Standing, loss_mask
from fastgrpo.trl.fused import FusedLoss, FusedRoute, attached
from fastgrpo.trl.onpolicy import OldLogProbs, score_again
from fastgrpo.trl.ordering import RowOrder, unseen
from fastgrpo.trl.scoring import ScoringMethod
from fastgrpo.trl.skipping import Kept, kept_rows, why_all_rows_count

logger = logging.getLogger("fastgrpo")


class LossPass:
    """
    One call of `_compute_loss`, for the scoring method that is called inside.

    Args:
        inputs: the micro-batch.
        old: of its trainer.
        kept: rows that are computed; None = all.
        given: log-probs and entropies, where they are known already.
        counts: whether its metrics count.
        fused: the loss in one pass with its gradients, where that may be.

    Attributes:
        counted: `[B, T]` bool, the tokens that the loss counts; None = all of the completions, with a graph.
        found: log-probs and entropies, `[B, T]`, as TRL's loss gets them.
        carried: `[B, T]` log-probs that lead to the fused loss; None where it was not computed.
        leaf: `[B, T]` what TRL's loss gets in their place.
    """

    def __init__(
        self,
        inputs: dict[str, Any],
        old: OldLogProbs,
        kept: Kept | None,
        given: tuple[Tensor, Tensor] | None = None,
        counts: bool = True,
        fused: FusedLoss | None = None,
    ) -> None:
        self.inputs, self.old, self.kept, self.given, self.counts = inputs, old, kept, given, counts
        self.fused = fused
        self.counted = None if fused is None else fused.counted
        if fused is None and "tool_mask" in inputs:
            self.counted = loss_mask(inputs).bool()
        self.found: tuple[Tensor, Tensor | None] | None = None
        self.carried: Tensor | None = None
        self.leaf: Tensor | None = None

    def scored(self, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """
        Takes the log-probs and entropies, `[B, T]`, before TRL's loss reads anything but them.

        Returns:
            Both, as TRL's loss is to have them.
        """
        self.old.complete(self.inputs, logprobs, None if self.kept is None else self.kept.rows, self.counts)
        if self.fused is not None and self.fused.found:
            self.carried, logprobs = logprobs, logprobs.detach()
        if self.counted is not None:
            # A ratio of 1 where nothing was computed: what the mask is multiplied by must be finite.
            old = self.inputs.get("old_per_token_logps")
            elsewhere = torch.zeros_like(logprobs) if old is None else old.to(logprobs.dtype)
            logprobs = torch.where(self.counted, logprobs, elsewhere)
        if self.carried is not None:
            self.leaf = logprobs = logprobs.detach().requires_grad_()
        self.found = (logprobs, entropies)
        return self.found

    def computed(self) -> Tensor:
        """`[B, T]` bool, where log-probs of the fused loss were computed."""
        counted = self.fused.counted
        if self.kept is None:
            return counted
        rows = torch.zeros_like(counted[:, 0]).index_fill(0, self.kept.rows, True)
        return counted & rows.unsqueeze(1)


class LossMethod(Standing):
    """
    The instance attribute that replaces a trainer's `_compute_loss`: TRL's own, in a `LossPass`.

    Args:
        trainer: whose method it replaces.
        method: its scoring.
        old: its.
        skip_zero_advantage: see `Options`.
        order: of the rows of an optimizer step; None = as TRL has them.
    """

    replaces = LOSS_METHOD

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
        self.route = FusedRoute(trainer)

    def __call__(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.method.handle.active:
            # Somebody kept the method, wrapped for example, beyond `unpatch`.
            return getattr(type(self.trainer), LOSS_METHOD)(self.trainer, model, inputs)
        if self.trainer.model.training:
            self.old.window.begin()
        if self.order is None or not torch.is_grad_enabled():
            return self._loss(model, inputs)[0]
        for micro_batch in self.order.broken_off(inputs):
            with torch.no_grad():
                self._loss(model, micro_batch)
        exchange = self.order.find(inputs)
        if exchange is None:
            return self._loss(model, inputs)[0]
        with unseen(self.trainer):
            loss, scores = self._loss(model, exchange.micro_batch, counts=False)
        for micro_batch, given in exchange.finish(*scores):
            with torch.no_grad():
                self._loss(model, micro_batch, given)
        return loss

    def settle(self) -> None:
        """In the middle of a step whose rows are in another order, TRL goes on with that order."""
        for micro_batch, given in [] if self.order is None else self.order.settle():
            with torch.no_grad():
                self._loss(self.trainer.model, micro_batch, given)

    def _loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        given: tuple[Tensor, Tensor] | None = None,
        counts: bool = True,
    ) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        """A micro-batch's loss, and the log-probs and entropies it is made of."""
        in_training = torch.is_grad_enabled() or given is not None
        kept = kept_rows(inputs) if in_training and self._skips() else None
        self.method.loss = loss_pass = LossPass(inputs, self.old, kept, given, counts, self.route.begin(inputs))
        try:
            loss = getattr(type(self.trainer), LOSS_METHOD)(self.trainer, model, inputs)
        finally:
            self.method.loss = None
        self.old.log()
        if loss_pass.carried is not None:
            loss = self._with_gradient(loss_pass, loss, model)
        return loss, loss_pass.found

    def _skips(self) -> bool:
        """Whether rows are left out; no longer where a callback has changed the trainer since it was patched."""
        obstacle = why_all_rows_count(self.trainer) if self.skip_zero_advantage else ""
        if obstacle:
            self.skip_zero_advantage = False
            logger.warning("fastgrpo: from here on rows without an advantage are computed: %s.", obstacle)
        return self.skip_zero_advantage

    def _with_gradient(self, loss_pass: LossPass, loss: Tensor, model: torch.nn.Module) -> Tensor:
        """A loss that TRL computed from a leaf, with its gradient."""
        disagreement = self.route.disagreement(loss_pass.fused, loss_pass.leaf, loss)
        if not disagreement:
            return attached(loss_pass.carried, loss_pass.computed(), loss_pass.fused.found[0].detach())
        self.route.give_up(
            f"the fused loss does not agree with TRL's: {disagreement}",
            "Something changed what TRL's _compute_loss computes; please report it if it was not you.",
        )
        (grad,) = torch.autograd.grad(loss, loss_pass.leaf)
        loss_pass.carried = None  # and with it the gradients of the fused loss
        loss_pass.fused.found.clear()
        self.method.loss = LossPass(loss_pass.inputs, self.old, loss_pass.kept)
        try:
            logprobs = score_again(self.method, model, loss_pass.inputs)
        finally:
            self.method.loss = None
        surrogate = (logprobs * grad).sum()
        return loss.detach() + (surrogate - surrogate.detach())
