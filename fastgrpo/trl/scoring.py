"""Log-probs and entropies of a micro-batch, in place of `GRPOTrainer._get_per_token_logps_and_entropies`.

The model runs as TRL runs it, through accelerate's wrapper, DDP's hooks and the model's own forward. Two things differ:
the layout of the rows (no padding, shared prompts once; or left-packed), and the output head, which is fastgrpo's
(`fastgrpo.trl.heads`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from fastgrpo.chunking import ChunkPlan
from fastgrpo.packing import left_pack, pack
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
from fastgrpo.trl.fused import FusedLoss
from fastgrpo.trl.heads import Entropy, HeadCall, Scores, head_call, score_with_head
from fastgrpo.trl.images import ImagesByRow, LeftPackedForward, PackedImages
from fastgrpo.trl.layers import FusedLayers
from fastgrpo.trl.offload import Offload
from fastgrpo.trl.parts import Limits, score_in_parts

if TYPE_CHECKING:
    from fastgrpo.trl.loss import LossPass
    from fastgrpo.trl.onpolicy import OldLogProbs
    from fastgrpo.trl.patch import Patch
    from fastgrpo.trl.skipping import Kept

logger = logging.getLogger("fastgrpo")
_IGNORE = -100
Layouts = Literal["varlen", "left", "none"]


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

        def trainer_s_own(model: Any = model) -> tuple[Tensor, Tensor | None, Tensor | None]:
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
            return trainer_s_own()
        if self.old is not None and self.old.leave_out(model):
            return input_ids.new_zeros(input_ids.shape[0], logits_to_keep, dtype=torch.float32), None, None
        if self.loss is not None and self.loss.given is not None:
            self.loss.scored(*self.loss.given)
            return *self.loss.given, None
        entropy = self._entropy_mode(compute_entropy)
        # TRL never asks for a row's first token, or for no token; what it would make of that is its own business.
        odd = not 0 < logits_to_keep < input_ids.shape[1]
        pictured = any(value is not None for value in model_inputs.values())
        kept = None if self.loss is None else self.loss.kept
        as_they_are = odd or self._own_method
        images = None
        if pictured and not as_they_are:
            images = self._images_for_packed_rows(model, input_ids, attention_mask, logits_to_keep, model_inputs)
        if as_they_are or (pictured and images is None):
            if pictured and not odd and (self.limits or kept is not None):
                by_row = ImagesByRow(model_inputs, input_ids.shape[0])
                with profiling_context(self.trainer, SCORING_METHOD), self._saving(model):
                    result = self._score_images_by_row(
                        model, input_ids, attention_mask, logits_to_keep, batch_size, entropy, by_row, kept
                    )
            else:
                left_packed = pictured and self.layout != "none" and not as_they_are
                with head_call(HeadCall(self.plan, entropy)), self._running(model), self._saving(model):
                    result = trainer_s_own(LeftPackedForward(model) if left_packed else model)
            if self.loss is not None:
                return *self.loss.scored(result[0], result[1]), result[2]
            return result
        with profiling_context(self.trainer, SCORING_METHOD):
            count = input_ids.shape[0]
            counted = fused_loss = None
            if self.loss is not None:
                counted, fused_loss = self.loss.counted, self.loss.fused
            if kept is not None:
                input_ids, attention_mask = input_ids[kept.rows], attention_mask[kept.rows]
                counted = None if counted is None else counted[kept.rows]
                fused_loss = None if fused_loss is None else fused_loss.map(lambda x: x[kept.rows])
                images = None if images is None else images.part(kept.rows)
            rows = batch_size or max(input_ids.shape[0], 1)
            some_images = [None] * -(-input_ids.shape[0] // rows) if images is None else images.split(rows)
            with self._saving(model):
                parts = [
                    self._score_within_limits(
                        model, ids, mask, logits_to_keep, entropy, compute_aux_loss, counted, fused_loss, some
                    )
                    for ids, mask, some in zip(
                        input_ids.split(rows), attention_mask.split(rows), some_images, strict=True
                    )
                ]
            all_logprobs, all_entropies, aux_losses = zip(*parts, strict=True)
            logprobs, entropies = torch.cat(all_logprobs), torch.cat(all_entropies) if compute_entropy else None
            if kept is not None:
                scored = attention_mask[:, attention_mask.shape[1] - logits_to_keep :]
                logprobs, entropies = kept.spread_both(
                    logprobs, entropies, scored if counted is None else scored * counted, count
                )
            if self.loss is not None:
                logprobs, entropies = self.loss.scored(logprobs, entropies)
            return logprobs, entropies, torch.stack(aux_losses).mean() if compute_aux_loss else None

    def score(
        self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, layout: Layouts
    ) -> tuple[Tensor, Tensor]:
        """The policy's log-probs and entropies as a loss forward gets them, `[B, logits_to_keep]`; for the probe."""
        logprobs, entropy, _ = self._score(
            self.trainer.model, input_ids, attention_mask, logits_to_keep, "detached", False, layout
        )
        return logprobs, entropy

    def _possible(self, model: torch.nn.Module, attention_mask: Tensor, scored: Tensor, layout: Layouts) -> Layouts:
        """The layout, or the one that rows which it is not possible for get."""
        if layout == "varlen" and not is_installed(attention_of(model, self.trainer)):
            layout = self._without_varlen(model)
        return "none" if layout != "none" and _cannot_be_packed(attention_mask, scored) else layout

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
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        model_inputs: dict[str, Any],
    ) -> PackedImages | None:
        """The rows' images, where such rows reach the model without padding; None = they go through TRL's own method."""
        if self.layout != "varlen" or not self.trainer._is_vlm:
            return None
        scored = _scored(attention_mask, logits_to_keep)
        if self._possible(model, attention_mask, scored, self.layout) != "varlen":
            return None
        return PackedImages.of(model_inputs, input_ids.shape[0])

    def _split(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        images: PackedImages | None = None,
    ) -> list[Tensor]:
        """Row numbers of parts within the limits, see `Limits.split`."""
        scored = _scored(attention_mask, logits_to_keep)
        layout = self._possible(model, attention_mask, scored, self.layout)
        names = None if images is None else images.names(logits_to_keep)
        return self.limits.split(input_ids, attention_mask, scored, layout, self.share_prefix, names)

    @property
    def _recompute(self) -> bool:
        # What is kept of a part in host memory is not alive on the device.
        return self.offload is None

    def _score_images_by_row(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        entropy: Entropy,
        images: ImagesByRow,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor | None, None]:
        trl_s_own = inspect.unwrap(getattr(GRPOTrainer, SCORING_METHOD))  # timed once, not once a part

        def score(model: torch.nn.Module, rows: Tensor) -> tuple[Tensor, Tensor | None]:
            with head_call(HeadCall(self.plan, entropy)), self._running(model):
                return trl_s_own(
                    self.trainer,
                    model if self.layout == "none" else LeftPackedForward(model),
                    input_ids[rows],
                    attention_mask[rows],
                    logits_to_keep,
                    compute_entropy=entropy != "none",
                    **images.part(rows).arguments(),
                )[:2]

        count = input_ids.shape[0]
        everything = torch.arange(count, device=input_ids.device)
        results = []
        for rows in (everything if kept is None else kept.rows).split(batch_size or count):
            parts = [rows[part] for part in self._split(model, input_ids[rows], attention_mask[rows], logits_to_keep)]
            results.append(score_in_parts(model, score, parts, self._recompute))
        all_logprobs, all_entropies = zip(*results, strict=True)
        logprobs, entropies = torch.cat(all_logprobs), None if entropy == "none" else torch.cat(all_entropies)
        if kept is not None:
            scored = attention_mask[kept.rows, -logits_to_keep:]
            if self.loss.counted is not None:
                scored = scored * self.loss.counted[kept.rows]
            logprobs, entropies = kept.spread_both(logprobs, entropies, scored, count)
        return logprobs, entropies, None

    def _score_within_limits(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        entropy: Entropy,
        compute_aux_loss: bool,
        counted: Tensor | None,
        fused_loss: FusedLoss | None,
        images: PackedImages | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.limits:
            parts = self._split(model, input_ids, attention_mask, logits_to_keep, images)
            if len(parts) > 1:

                def score(model: torch.nn.Module, rows: Tensor) -> tuple[Tensor, Tensor | None]:
                    ids, mask, shown = input_ids[rows], attention_mask[rows], None if counted is None else counted[rows]
                    seen = None if images is None else images.part(rows)
                    return self._score(
                        model, ids, mask, logits_to_keep, entropy, False, self.layout, shown, images=seen
                    )[:2]

                return *score_in_parts(model, score, parts, self._recompute), None
        return self._score(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            entropy,
            compute_aux_loss,
            self.layout,
            counted,
            fused_loss,
            images,
        )

    def _score(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        entropy: Entropy,
        compute_aux_loss: bool,
        layout: Layouts,
        counted: Tensor | None = None,
        fused_loss: FusedLoss | None = None,
        images: PackedImages | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        attention_mask = (attention_mask != 0).to(input_ids.dtype)
        scored = _scored(attention_mask, logits_to_keep)
        layout = self._possible(model, attention_mask, scored, layout)
        score = {"left": self._score_left, "none": self._score_padded}.get(layout) or partial(
            self._score_varlen, images=images, width=logits_to_keep
        )
        inputs = {"output_router_logits": True} if compute_aux_loss else {}

        def beside_prompts(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(values, (input_ids.shape[1] - logits_to_keep, 0))

        counted = scored if counted is None else scored & beside_prompts(counted)
        fused_loss = None if fused_loss is None else fused_loss.map(beside_prompts)
        with self._running(model):
            logprobs, entropies, aux_loss = score(
                model, input_ids, attention_mask, scored, counted, entropy, inputs, fused_loss
            )
        last = slice(input_ids.shape[1] - logits_to_keep, None)
        return (
            logprobs[:, last],
            None if entropies is None else entropies[:, last],
            aux_loss if compute_aux_loss else None,
        )

    def _score_padded(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        scored: Tensor,
        counted: Tensor,
        entropy: Entropy,
        inputs: dict,
        fused_loss: FusedLoss | None,
    ) -> Scores:
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        labels = input_ids.masked_fill(~counted, _IGNORE)[:, 1:]
        if fused_loss is not None:
            fused_loss = fused_loss.map(lambda x: x[:, 1:].reshape(-1))
        scores = score_with_head(self.trainer, model, inputs, HeadCall(self.plan, entropy, labels, fused=fused_loss))
        return scores.map(lambda values: torch.nn.functional.pad(values, (1, 0)))

    def _score_left(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        scored: Tensor,
        counted: Tensor,
        entropy: Entropy,
        inputs: dict,
        fused_loss: FusedLoss | None,
    ) -> Scores:
        packed = left_pack(input_ids, attention_mask)
        if inputs:
            # Causal rows that start at their first token need no mask, but the router counts tokens by it.
            inputs["attention_mask"] = packed.attention_mask
        inputs["input_ids"] = packed.input_ids
        if self.explicit_positions:
            inputs["position_ids"] = packed.position_ids
        labels = packed.take(input_ids.masked_fill(~counted, _IGNORE))[:, 1:]
        if fused_loss is not None:
            fused_loss = fused_loss.map(lambda x: packed.take(x)[:, 1:].reshape(-1))
        scores = score_with_head(self.trainer, model, inputs, HeadCall(self.plan, entropy, labels, fused=fused_loss))
        return scores.map(lambda values: packed.restore(torch.nn.functional.pad(values, (1, 0))))

    def _score_varlen(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        scored: Tensor,
        counted: Tensor,
        entropy: Entropy,
        inputs: dict,
        fused_loss: FusedLoss | None,
        images: PackedImages | None,
        width: int,
    ) -> Scores:
        prompts = ((attention_mask != 0) & ~scored).sum(1)
        # The router's loss counts every token of every row, so a shared prompt would count once instead of G times.
        share = self.share_prefix and not inputs
        names = images.names(width) if share and images is not None else None
        packed = pack(input_ids, attention_mask, prompts, share, names)
        layout = Layout(tuple(packed.segments))
        inputs |= {"input_ids": packed.tokens, "position_ids": packed.position_ids, LAYOUT_ARGUMENT: layout}
        if images is not None:
            inputs |= images.part(torch.tensor(packed.rows, device=input_ids.device)).inputs()
            positions = images.positions(unwrapped(self.trainer, model), input_ids, attention_mask)
            if positions is not None:
                positions = positions.to(input_ids.device)
                inputs["position_ids"] = torch.stack([packed.take(values) for values in positions]).unsqueeze(1)
        place = counted.flatten().nonzero().squeeze(1)
        if fused_loss is not None:
            fused_loss = fused_loss.map(lambda x: x.flatten()[place])
        labels, source = (values.flatten()[place] for values in (input_ids, packed.previous()))
        call = HeadCall(self.plan, entropy, labels, source, fused_loss)
        with without_masks():
            scores = score_with_head(self.trainer, model, inputs, call)
        if not layout.windows:
            raise NotImplementedError("the model's attention layers do not pass on the arguments of its forward")
        if self._windowed and not any(layout.windows):
            raise NotImplementedError("the model's attention layers keep their window to themselves")
        count = call.labels.shape[0]

        def beside_tokens(values: Tensor) -> Tensor:
            return values.new_zeros(counted.shape).masked_scatter(counted, values[0, :count])

        return scores.map(beside_tokens)


def _scored(attention_mask: Tensor, logits_to_keep: int) -> Tensor:
    """`[B, L]` bool, the real tokens of the last columns."""
    scored = attention_mask != 0
    scored[:, : scored.shape[1] - logits_to_keep] = False
    return scored


def _cannot_be_packed(attention_mask: Tensor, scored: Tensor) -> bool:
    """Whether a row's first real token is to be scored, with nothing before it but TRL's padding, or no token is real."""
    real = attention_mask != 0
    first = real & (real.cumsum(1) == 1)
    return bool((first & scored).any() | ~real.any())
