"""Old log-probs that are the loss forward's own: where the policy cannot move in between, TRL's pass for them is left out.

TRL scores every generation batch once more without gradient where its arithmetic cannot rule out that the policy moves
before the batch is used up, and always for the correction of a sampler's log-probs (vLLM). Where all micro-batches of a
generation batch lie in the optimizer step under way, or in an evaluation, that pass computes what the loss computes
anyway. Then the sampler's ratio and the `sampling/*` metrics come from the loss's log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import nanmax, nanmin

from fastgrpo.objective import sampler_importance_ratio
from fastgrpo.trl.compat import GENERATE_METHOD, LOSS_METHOD, SCORING_METHOD, has_known_source, loss_mask, overrides

if TYPE_CHECKING:
    from fastgrpo.trl.scoring import ScoringMethod

_OLD, _RATIO, _SAMPLING = "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps"


def old_pass_obstacle(trainer: GRPOTrainer) -> str:
    """Why the pass for old log-probs cannot be left out whatever the batch; empty where it can."""
    if not has_known_source(GENERATE_METHOD):
        return f"the source of GRPOTrainer.{GENERATE_METHOD} is of a release that was not tested"
    for method in (GENERATE_METHOD, "_prepare_inputs", LOSS_METHOD, SCORING_METHOD):
        if overrides(trainer, method):
            return f"{type(trainer).__name__} brings its own {method}, which may read old log-probs"
    return ""


def corrects_sampler(trainer: GRPOTrainer) -> bool:
    """Whether TRL's loss multiplies by the ratio of the trainer's policy to the sampler's."""
    return trainer.use_vllm and trainer.vllm_importance_sampling_correction


class OldLogProbs:
    """
    What generation, scoring and loss of one trainer know of the pass that is left out.

    Args:
        trainer: whose.
        method: its scoring.
    """

    def __init__(self, trainer: GRPOTrainer, method: ScoringMethod) -> None:
        self.trainer, self.method = trainer, method
        self.window = StepWindow(trainer)
        self._tallies: dict[bool, SamplerTally] = {}  # of training and of evaluation
        self._adapters: list[tuple[torch.nn.Module, Any]] | None = None
        self._left_out = False

    def generate(self, generate: Callable[[Any], dict[str, Any]], inputs: Any) -> dict[str, Any]:
        """A generation batch as TRL makes it, without the pass for old log-probs where the loss has them; see `Around`."""
        trainer = self.trainer
        if trainer.__dict__.get(SCORING_METHOD) is not self.method or LOSS_METHOD not in trainer.__dict__:
            return generate(inputs)  # what was put over them later may score old log-probs, and no ratios
        training = trainer.model.training
        steps = trainer.args.steps_per_generation
        uses = steps * trainer.num_iterations
        wanted = corrects_sampler(trainer) or trainer.args.gradient_accumulation_steps % uses != 0
        uses -= trainer._step % uses
        if not wanted or (training and uses > self.window.left()):
            return generate(inputs)
        correction = trainer.vllm_importance_sampling_correction
        self._adapters, self._left_out = adapters_in_force(trainer.model), False
        try:
            output = generate(inputs)
        finally:
            self._adapters = None
            trainer.vllm_importance_sampling_correction = correction
        if self._left_out:
            del output[_OLD]
            self._tallies.pop(training, None)
            if corrects_sampler(trainer):
                self._tallies[training] = SamplerTally(min(steps, uses) if training else 1)
        return output

    def leave_out(self, model: torch.nn.Module) -> bool:
        """
        Whether a scoring call is the one that is left out.

        TRL asks for the reference in the same way: with another model, or with other adapters in force. From here on TRL
        takes the correction for switched off, so that it makes no ratio and no metrics of log-probs that nobody computed.
        """
        if self._adapters is None or self._left_out or torch.is_grad_enabled() or model is not self.trainer.model:
            return False
        if any(adapter_in_force(layer) != before for layer, before in self._adapters):
            return False
        self._left_out = True
        self.trainer.vllm_importance_sampling_correction = False
        return True

    @torch.no_grad()
    def complete(
        self, inputs: dict[str, Any], logprobs: Tensor, rows: Tensor | None = None, counts: bool = True
    ) -> None:
        """
        Gives a micro-batch the sampler's ratio that TRL's loss reads, if it has none.

        Args:
            inputs: the micro-batch, changed in place.
            logprobs: `[B, T]` of the loss.
            rows: `[K]` of them that were computed; the others get a ratio of 1. None = all.
            counts: whether the metrics count it.
        """
        trainer = self.trainer
        if not corrects_sampler(trainer) or _RATIO in inputs or _OLD in inputs:
            return
        mask = loss_mask(inputs)
        computed = torch.ones_like(mask[:, :1])
        if rows is not None:
            computed = torch.zeros_like(computed).index_fill_(0, rows, 1)
        mask = mask * computed
        sampling = inputs[_SAMPLING]
        inputs[_RATIO] = ratio = sampler_importance_ratio(
            logprobs,
            sampling,
            mask,
            trainer.vllm_importance_sampling_mode,
            trainer.vllm_importance_sampling_clip_min,
            trainer.vllm_importance_sampling_clip_max,
        )
        tally = self._tallies.get(trainer.model.training)
        if tally is not None and counts:
            tally.add(ratio, (logprobs - sampling).abs(), mask.bool(), computed.bool())

    def log(self) -> None:
        """Appends the `sampling/*` metrics once all micro-batches of a generation batch were seen."""
        training = self.trainer.model.training
        if training in self._tallies and self._tallies[training].left == 0:
            self._tallies.pop(training).log(self.trainer)

    def settle(self, score: Callable[..., tuple[Tensor, Any, Any]]) -> None:
        """Gives buffered micro-batches that TRL is still to use what TRL alone would have given them; see `complete`."""
        trainer = self.trainer
        uses = trainer.args.steps_per_generation * trainer.num_iterations
        if trainer._step % uses == 0 or not corrects_sampler(trainer):
            return
        for inputs in trainer._buffered_inputs or ():
            if _RATIO not in inputs:
                with torch.no_grad():
                    self.complete(inputs, score_again(score, trainer.model, inputs))


_IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def score_again(score: Callable[..., Any], model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Log-probs, `[B, T]`, of a micro-batch outside TRL's `_compute_loss`, by a scoring method."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    images = {name: inputs[name] for name in _IMAGES if name in inputs}
    return score(model, ids, mask, inputs["completion_ids"].shape[1], **images)[0]


class StepWindow:
    """
    Counts the micro-batches of the optimizer step under way.

    Args:
        trainer: whose.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self._state, self._step, self._begun = trainer.state, trainer.state.global_step, 0
        # In the middle of a training, nobody knows how many there were.
        self._known = not trainer.is_in_train

    def left(self) -> int:
        """Micro-batches of this optimizer step that have not begun."""
        self._look()
        steps = getattr(
            self.trainer, "current_gradient_accumulation_steps", self.trainer.args.gradient_accumulation_steps
        )
        return steps - self._begun if self._known else 0

    def begin(self) -> None:
        """A micro-batch begins."""
        self._look()
        self._begun += 1

    def _look(self) -> None:
        # Every `train()` makes a state of its own.
        state = self.trainer.state
        if state is not self._state or state.global_step != self._step:
            self._state, self._step, self._begun, self._known = state, state.global_step, 0, True


class SamplerTally:
    """
    Sums and extremes of a generation batch for TRL's `sampling/*` metrics, collected over its micro-batches.

    Args:
        micro_batches: how many there will be.
    """

    def __init__(self, micro_batches: int) -> None:
        self.left = micro_batches
        self._gap: list[Tensor] = []
        self._ratio: list[Tensor] = []

    def add(self, ratio: Tensor, gap: Tensor, mask: Tensor, computed: Tensor) -> None:
        """
        A micro-batch.

        Args:
            ratio: `[B, T]` or `[B, 1]` of policy to sampler.
            gap: `[B, T]` absolute difference of their log-probs, NaN where the sampler has none.
            mask: `[B, T]` bool.
            computed: `[B, 1]` bool, rows that were.
        """
        self.left -= 1
        self._gap.append(_summary(gap, mask & ~gap.isnan()))
        self._ratio.append(_summary(ratio, computed if ratio.shape[1] == 1 else mask))

    def log(self, trainer: GRPOTrainer) -> None:
        """Appends the metrics, with TRL's own reductions over processes in TRL's order."""
        gather = trainer.accelerator.gather
        gap_mean, _, gap_max = _merged(self._gap)
        mean, low, high = _merged(self._ratio)
        values = {
            "sampling_logp_difference/mean": lambda: gather(gap_mean).mean(),
            "sampling_logp_difference/max": lambda: gather(gap_max).max(),
            "importance_sampling_ratio/min": lambda: nanmin(gather(low)),
            "importance_sampling_ratio/mean": lambda: gather(mean).nanmean(),
            "importance_sampling_ratio/max": lambda: nanmax(gather(high)),
        }
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        for name, value in values.items():
            metrics[f"sampling/{name}"].append(value().item())


def _summary(values: Tensor, counted: Tensor) -> Tensor:
    """(sum, count, min, max) of the counted values, `[4]`."""
    # One more value, so that there is something to take the extremes of.
    flat, counted = (torch.nn.functional.pad(x.flatten(), (0, 1)) for x in (values, counted))
    return torch.stack(
        [
            flat.masked_fill(~counted, 0.0).sum(),
            counted.sum().to(flat.dtype),
            flat.masked_fill(~counted, float("inf")).amin(),
            flat.masked_fill(~counted, float("-inf")).amax(),
        ]
    )


def _merged(parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, min and max of what the parts are summaries of, each 0 where nothing was counted."""
    sums, counts, lows, highs = torch.stack(parts).unbind(1)
    total = counts.sum()
    nothing = total == 0
    mean = sums.sum() / total.clamp(min=1)
    return mean, lows.amin().masked_fill(nothing, 0.0), highs.amax().masked_fill(nothing, 0.0)


def adapters_in_force(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Any]]:
    """Which adapters a model computes with, layer by layer; empty without PEFT."""
    return [
        (module, adapter_in_force(module))
        for module in model.modules()
        # By the class first: an attribute that a module does not have costs as much as a small kernel.
        if hasattr(type(module), "active_adapters") and hasattr(module, "_disable_adapters")
    ]


def adapter_in_force(layer: torch.nn.Module) -> tuple[bool, tuple[str, ...]]:
    """Whether a layer's adapters are disabled, and which are active."""
    return layer._disable_adapters, tuple(layer.active_adapters)
