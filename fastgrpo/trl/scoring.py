"""Log-probs and entropies of a micro-batch, in place of `GRPOTrainer._get_per_token_logps_and_entropies`.

The model runs as TRL runs it, through accelerate's wrapper, DDP's hooks and the model's own forward. Two things differ:
rows are left-packed first, and the output head is fastgrpo's (`fastgrpo.trl.heads`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from fastgrpo.chunking import ChunkPlan
from fastgrpo.packing import left_pack
from fastgrpo.trl.compat import LOSS_METHOD, SCORING_METHOD, has_fused_head, overrides
from fastgrpo.trl.heads import Entropy, HeadCall, head_call, score_with_head

_IGNORE = -100


class ScoringMethod:
    """
    The instance attribute that replaces a trainer's `_get_per_token_logps_and_entropies`.

    Args:
        trainer: whose method it replaces.
        plan: chunk options of the head.
        packed: left-pack the rows; False = leave them as TRL pads them.
        explicit_positions: pass `position_ids`, for models that take them.
    """

    def __init__(self, trainer: GRPOTrainer, plan: ChunkPlan, packed: bool, explicit_positions: bool) -> None:
        self.trainer, self.plan, self.packed, self.explicit_positions = trainer, plan, packed, explicit_positions
        self.handle: object | None = None
        self._own_method = overrides(trainer, SCORING_METHOD)
        self._own_loss = overrides(trainer, LOSS_METHOD)

    def __call__(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **model_inputs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """
        Log-probs and entropies of the last `logits_to_keep` columns.

        Args:
            model: policy or reference, as accelerate wrapped it.
            input_ids, attention_mask: `[B, L]`, prompts left-padded and completions right-padded.
            logits_to_keep: T, columns to score.
            batch_size: rows a forward; None = all.
            compute_entropy: also return entropies.
            compute_aux_loss: also return the mean load-balancing loss.
            model_inputs: images and what belongs to them.

        Returns:
            log-probs `[B, T]`, entropies `[B, T]` or None, auxiliary loss (0-d) or None; 0 outside the mask.
        """
        entropy = self._entropy_mode(compute_entropy)
        if self._own_method or any(value is not None for value in model_inputs.values()):
            method = getattr(type(self.trainer), SCORING_METHOD)
            with head_call(HeadCall(self.plan, entropy)):
                return method(
                    self.trainer,
                    model,
                    input_ids,
                    attention_mask,
                    logits_to_keep,
                    batch_size=batch_size,
                    compute_entropy=compute_entropy,
                    compute_aux_loss=compute_aux_loss,
                    **model_inputs,
                )
        with profiling_context(self.trainer, SCORING_METHOD):
            rows = batch_size or max(input_ids.shape[0], 1)
            parts = [
                self._score(model, ids, mask, logits_to_keep, entropy, compute_aux_loss, self.packed)
                for ids, mask in zip(input_ids.split(rows), attention_mask.split(rows), strict=True)
            ]
            logprobs, entropies, aux_losses = zip(*parts, strict=True)
            return (
                torch.cat(logprobs),
                torch.cat(entropies) if compute_entropy else None,
                torch.stack(aux_losses).mean() if compute_aux_loss else None,
            )

    def score(
        self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, packed: bool
    ) -> tuple[Tensor, Tensor]:
        """The policy's log-probs and entropies as a loss forward gets them, `[B, logits_to_keep]`; for the probe."""
        logprobs, entropy, _ = self._score(
            self.trainer.model, input_ids, attention_mask, logits_to_keep, "detached", False, packed
        )
        return logprobs, entropy

    def _entropy_mode(self, compute_entropy: bool) -> Entropy:
        if not compute_entropy:
            return "none"
        # TRL's loss differentiates the entropy for the bonus only, but a subclass's may wherever TRL lets it: from 1.15.
        needed = self.trainer._entropy_bonus_enabled or (self._own_loss and has_fused_head())
        return "differentiable" if needed else "detached"

    def _score(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        entropy: Entropy,
        compute_aux_loss: bool,
        pack: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        labels = input_ids.masked_fill(attention_mask == 0, _IGNORE)
        first_scored = input_ids.shape[1] - logits_to_keep
        labels[:, :first_scored] = _IGNORE
        inputs: dict[str, Tensor | bool] = {"input_ids": input_ids, "attention_mask": attention_mask}
        packed = None
        if pack and not _scores_a_first_token(attention_mask, labels):
            packed = left_pack(input_ids, attention_mask)
            labels = packed.take(labels)
            inputs = {"input_ids": packed.input_ids}
            if self.explicit_positions:
                inputs["position_ids"] = packed.position_ids
            if compute_aux_loss:
                # Causal rows that start at their first token need no mask, but the router counts tokens by it.
                inputs["attention_mask"] = packed.attention_mask
        if compute_aux_loss:
            inputs["output_router_logits"] = True
        scores = score_with_head(self.trainer, model, inputs, labels, HeadCall(self.plan, entropy))

        def scored(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            beside_tokens = torch.nn.functional.pad(values, (1, 0))
            if packed is not None:
                beside_tokens = packed.restore(beside_tokens)
            return beside_tokens[:, first_scored:]

        return scored(scores.logprobs), scored(scores.entropy), scores.aux_loss if compute_aux_loss else None


def _scores_a_first_token(attention_mask: Tensor, labels: Tensor) -> bool:
    """Whether some row's first real token is to be scored: there is nothing before it but the padding that TRL uses."""
    first = (attention_mask != 0).cumsum(1) == 1
    return bool((first & (labels != _IGNORE)).any())
