"""Log-probs and entropies of a micro-batch, in place of `GRPOTrainer._get_per_token_logps_and_entropies`.

The model runs as TRL runs it, through accelerate's wrapper, DDP's hooks and the model's own forward. Two things differ:
the layout of the rows (no padding, shared prompts once; or left-packed), and the output head, which is fastgrpo's
(`fastgrpo.trl.heads`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from fastgrpo.chunking import ChunkPlan
from fastgrpo.packing import Packed, left_pack, pack
from fastgrpo.trl.attention import LAYOUT_ARGUMENT, Layout, is_installed, without_masks
from fastgrpo.trl.compat import (
    LOSS_METHOD,
    SCORING_METHOD,
    Standing,
    attention_of,
    has_attention_window,
    has_fused_head,
    overrides,
    unwrapped,
)
from fastgrpo.trl.embeddings import embedded_without_gradient
from fastgrpo.trl.heads import Entropy, HeadCall, Scores, head_call, score_with_head
from fastgrpo.trl.images import ImagesByRow, LeftPackedForward, PackedImages
from fastgrpo.trl.layers import FusedLayers
from fastgrpo.trl.offload import Offload
from fastgrpo.trl.parts import Limits, score_in_parts
from fastgrpo.trl.rows import Rows

if TYPE_CHECKING:
    from fastgrpo.trl.loss import LossPass
    from fastgrpo.trl.onpolicy import OldLogProbs
    from fastgrpo.trl.patch import Patch

logger = logging.getLogger("fastgrpo")
Layouts = Literal["varlen", "left", "none"]
Result = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probs and entropies, `[B, T]`, and the auxiliary loss."""


class ScoringMethod(Standing):
    """
    The instance attribute that replaces a trainer's `_get_per_token_logps_and_entropies`.

    Args:
        trainer: whose method it replaces.
        plan: chunk options of the head.
        layout: how rows reach the model, see `Options.packing`.
        share_prefix: with `"varlen"`, compute a prompt once for its completions.
        explicit_positions: pass `position_ids`, for models that take them.
        limits: what may be alive at once.
        fuse: run LoRA layers, MLPs, norms and rotary embeddings as one function each.
    """

    replaces = SCORING_METHOD

    def __init__(
        self,
        trainer: GRPOTrainer,
        plan: ChunkPlan,
        layout: Layouts,
        share_prefix: bool,
        explicit_positions: bool,
        limits: Limits,
        fuse: bool,
    ) -> None:
        self.trainer, self.plan, self.explicit_positions, self.limits = trainer, plan, explicit_positions, limits
        self.layout, self.share_prefix, self.fused = layout, share_prefix, FusedLayers(fuse)
        self.handle: Patch | None = None
        self.old: OldLogProbs | None = None
        self.loss: LossPass | None = None
        self.offload: Offload | None = None
        self._said = False
        self._own_method = overrides(trainer, SCORING_METHOD)
        self._windowed = has_attention_window(trainer)
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
    ) -> Result:
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

        def trainer_s_own(model: Any) -> Result:
            return getattr(type(self.trainer), SCORING_METHOD)(
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

        if self.handle is not None and not self.handle.active:
            # Somebody kept the method, wrapped for example, beyond `unpatch`.
            return trainer_s_own(model)
        if self.old is not None and self.old.leave_out(model):
            return input_ids.new_zeros(input_ids.shape[0], logits_to_keep, dtype=torch.float32), None, None
        if self.loss is not None and self.loss.given is not None:
            self.loss.scored(*self.loss.given)
            return *self.loss.given, None
        entropy = self._entropy_mode(compute_entropy)
        # TRL never asks for a row's first token, or for no token; what it would make of that is its own business.
        odd = not 0 < logits_to_keep < input_ids.shape[1]
        as_they_are = odd or self._own_method
        pictured = any(value is not None for value in model_inputs.values())
        rows = Rows(input_ids, attention_mask, logits_to_keep)
        if self.loss is not None:
            rows = replace(rows, counted=self.loss.counted, fused_loss=self.loss.fused)
        if pictured and not as_they_are:
            rows = replace(rows, images=self._images_for_packed_rows(model, rows, model_inputs))
        if not as_they_are and (rows.images is not None or not pictured):
            score = partial(self._score, entropy=entropy, compute_aux_loss=compute_aux_loss, layout=self.layout)
            result = self._score_all(model, rows, batch_size, score)
        elif pictured and not odd and self._takes_rows_apart:
            rows = replace(rows, images=ImagesByRow(model_inputs, len(rows)), fused_loss=None)
            result = self._score_all(model, rows, batch_size, partial(self._score_with_trl, entropy=entropy))
        else:
            left_packed = pictured and self.layout != "none" and not as_they_are
            with head_call(HeadCall(self.plan, entropy)), self._running(model), self._saving(model):
                result = trainer_s_own(LeftPackedForward(model) if left_packed else model)
        return result if self.loss is None else (*self.loss.scored(result[0], result[1]), result[2])

    def score(
        self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, layout: Layouts
    ) -> tuple[Tensor, Tensor]:
        """The policy's log-probs and entropies as a loss forward gets them, `[B, logits_to_keep]`; for the probe."""
        rows = Rows(input_ids, attention_mask, logits_to_keep)
        logprobs, entropy, _ = self._score(self.trainer.model, rows, "detached", False, layout)
        return logprobs, entropy

    def _possible(self, model: torch.nn.Module, rows: Rows, layout: Layouts) -> Layouts:
        """The layout, or the one that rows which it is not possible for get."""
        if layout == "varlen" and not is_installed(attention_of(model, self.trainer)):
            layout = self._without_varlen(model)
        return "none" if layout != "none" and rows.cannot_be_packed() else layout

    def _without_varlen(self, model: torch.nn.Module) -> Layouts:
        """The layout for a model whose attention was exchanged since the patch; said once."""
        if not self._said:
            self._said = True
            logger.warning(
                "fastgrpo: attn_implementation is %r now, and was another one when the trainer was patched; its rows are "
                "left-packed. Call fastgrpo.unpatch and fastgrpo.patch again to choose anew.",
                attention_of(model, self.trainer),
            )
        return "left"

    def _entropy_mode(self, compute_entropy: bool) -> Entropy:
        if not compute_entropy:
            return "none"
        # TRL's loss differentiates the entropy for the bonus only, but a subclass's may wherever TRL lets it: from 1.15.
        needed = self.trainer._entropy_bonus_enabled or (self._own_loss and has_fused_head())
        return "differentiable" if needed else "detached"

    @contextmanager
    def _running(self, model: torch.nn.Module) -> Iterator[None]:
        """While this is open, a forward of the model runs in fewer functions, and without a gradient that nobody reads."""
        with self.fused.in_use(), embedded_without_gradient(unwrapped(self.trainer, model)):
            yield

    def _saving(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """While this is open, what is kept for the backward pass goes where the options say."""
        return nullcontext() if self.offload is None else self.offload.saving(model)

    def _images_for_packed_rows(
        self, model: torch.nn.Module, rows: Rows, model_inputs: dict[str, Any]
    ) -> PackedImages | None:
        """The rows' images, where such rows reach the model without padding; None = they go through TRL's own method."""
        if self.layout != "varlen" or not self.trainer._is_vlm:
            return None
        if self._possible(model, rows, self.layout) != "varlen":
            return None
        return PackedImages.of(model_inputs, len(rows))

    @property
    def _takes_rows_apart(self) -> bool:
        """Whether some of a micro-batch's rows may be computed, or some after others."""
        return bool(self.limits) or (self.loss is not None and self.loss.kept is not None)

    @property
    def _recompute(self) -> bool:
        # What is kept of a part in host memory is not alive on the device.
        return self.offload is None

    def _score_all(
        self, model: torch.nn.Module, rows: Rows, batch_size: int | None, score: Callable[..., Result]
    ) -> Result:
        """
        The results of all rows, of which those with a gradient are computed.

        Args:
            model: as accelerate wrapped it.
            rows: of the micro-batch.
            batch_size: rows a forward; None = all.
            score: of a model and of some rows.
        """
        kept = None if self.loss is None else self.loss.kept
        with profiling_context(self.trainer, SCORING_METHOD):
            some = rows if kept is None else rows.take(kept.rows)
            batches = some.split(batch_size or len(rows))
            with self._saving(model):
                results = [self._score_within_limits(model, batch, score) for batch in batches]
            all_logprobs, all_entropies, aux_losses = zip(*results, strict=True)
            logprobs = torch.cat(all_logprobs)
            entropies = None if all_entropies[0] is None else torch.cat(all_entropies)
            if kept is not None:
                logprobs, entropies = kept.spread_both(logprobs, entropies, some.last(some.computed), len(rows))
            return logprobs, entropies, None if aux_losses[0] is None else torch.stack(aux_losses).mean()

    def _score_within_limits(self, model: torch.nn.Module, rows: Rows, score: Callable[..., Result]) -> Result:
        parts = self._split(model, rows) if self.limits else []
        if len(parts) < 2:
            return score(model, rows)
        # The loss sees all rows together, once each part has its log-probs.
        rows = replace(rows, fused_loss=None)

        def score_part(model: torch.nn.Module, part: Tensor) -> tuple[Tensor, Tensor | None]:
            return score(model, rows.take(part))[:2]

        return *score_in_parts(model, score_part, parts, self._recompute), None

    def _split(self, model: torch.nn.Module, rows: Rows) -> list[Tensor]:
        """Row numbers of parts within the limits, see `Limits.split`."""
        layout = self._possible(model, rows, self.layout)
        names = rows.images.names(rows.width) if isinstance(rows.images, PackedImages) else None
        return self.limits.split(rows.input_ids, rows.attention_mask, rows.scored, layout, self.share_prefix, names)

    def _score_with_trl(self, model: torch.nn.Module, rows: Rows, entropy: Entropy) -> Result:
        """Of rows with images by TRL's own method, which makes a model's inputs of them."""
        trl_s_own = inspect.unwrap(getattr(GRPOTrainer, SCORING_METHOD))  # timed once, not once a part
        with head_call(HeadCall(self.plan, entropy)), self._running(model):
            return trl_s_own(
                self.trainer,
                model if self.layout == "none" else LeftPackedForward(model),
                rows.input_ids,
                rows.attention_mask,
                rows.width,
                compute_entropy=entropy != "none",
                **rows.images.arguments(),
            )

    def _score(
        self, model: torch.nn.Module, rows: Rows, entropy: Entropy, compute_aux_loss: bool, layout: Layouts
    ) -> Result:
        """Of rows in a layout, or in the one that is possible for them."""
        rows = replace(rows, attention_mask=(rows.attention_mask != 0).to(rows.input_ids.dtype))
        layouts = {"varlen": self._score_varlen, "left": self._score_left, "none": self._score_padded}
        score = layouts[self._possible(model, rows, layout)]
        inputs = {"output_router_logits": True} if compute_aux_loss else {}
        with self._running(model):
            scores = score(model, rows, entropy, inputs).map(rows.last)
        return scores.logprobs, scores.entropy, scores.aux_loss if compute_aux_loss else None

    def _score_padded(self, model: torch.nn.Module, rows: Rows, entropy: Entropy, inputs: dict[str, Any]) -> Scores:
        inputs |= {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}
        loss = rows.laid_out_loss(lambda values: values[:, 1:].reshape(-1))
        call = HeadCall(self.plan, entropy, rows.labels()[:, 1:], fused=loss)
        scores = score_with_head(self.trainer, model, inputs, call)
        return scores.map(lambda values: torch.nn.functional.pad(values, (1, 0)))

    def _score_left(self, model: torch.nn.Module, rows: Rows, entropy: Entropy, inputs: dict[str, Any]) -> Scores:
        packed = left_pack(rows.input_ids, rows.attention_mask)
        if inputs:
            # Causal rows that start at their first token need no mask, but the router counts tokens by it.
            inputs["attention_mask"] = packed.attention_mask
        inputs["input_ids"] = packed.input_ids
        if self.explicit_positions:
            inputs["position_ids"] = packed.position_ids
        loss = rows.laid_out_loss(lambda values: packed.take(values)[:, 1:].reshape(-1))
        call = HeadCall(self.plan, entropy, packed.take(rows.labels())[:, 1:], fused=loss)
        scores = score_with_head(self.trainer, model, inputs, call)
        return scores.map(lambda values: packed.restore(torch.nn.functional.pad(values, (1, 0))))

    def _score_varlen(self, model: torch.nn.Module, rows: Rows, entropy: Entropy, inputs: dict[str, Any]) -> Scores:
        prompts = ((rows.attention_mask != 0) & ~rows.scored).sum(1)
        # The router's loss counts every token of every row, so a shared prompt would count once instead of G times.
        share = self.share_prefix and not inputs
        names = rows.images.names(rows.width) if share and rows.images is not None else None
        packed = pack(rows.input_ids, rows.attention_mask, prompts, share, names)
        layout = Layout(tuple(packed.segments))
        inputs |= {"input_ids": packed.tokens, "position_ids": packed.position_ids, LAYOUT_ARGUMENT: layout}
        if rows.images is not None:
            inputs |= self._images_and_positions(model, rows, packed)
        place = rows.computed.flatten().nonzero().squeeze(1)
        loss = rows.laid_out_loss(lambda values: values.flatten()[place])
        labels, source = (values.flatten()[place] for values in (rows.input_ids, packed.previous()))
        with without_masks():
            scores = score_with_head(self.trainer, model, inputs, HeadCall(self.plan, entropy, labels, source, loss))
        if not layout.windows:
            raise NotImplementedError("the model's attention layers do not pass on the arguments of its forward")
        if self._windowed and not any(layout.windows):
            raise NotImplementedError("the model's attention layers keep their window to themselves")

        def beside_tokens(values: Tensor) -> Tensor:
            return values.new_zeros(rows.computed.shape).masked_scatter(rows.computed, values[0, : labels.shape[0]])

        return scores.map(beside_tokens)

    def _images_and_positions(self, model: torch.nn.Module, rows: Rows, packed: Packed) -> dict[str, Tensor]:
        """What a model gets beside rows without padding that have images."""
        inputs = rows.images.part(torch.tensor(packed.rows, device=rows.input_ids.device)).inputs()
        positions = rows.images.positions(unwrapped(self.trainer, model), rows.input_ids, rows.attention_mask)
        if positions is not None:
            positions = positions.to(rows.input_ids.device)
            inputs["position_ids"] = torch.stack([packed.take(values) for values in positions]).unsqueeze(1)
        return inputs
