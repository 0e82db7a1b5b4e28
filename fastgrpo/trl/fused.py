"""The loss of a head that trains in one pass with its gradients: TRL's `_compute_loss` on log-probs that nobody differentiates.

For a row-local objective each token's coefficient is known as soon as its log-prob is, so log-probs, loss and gradients
take three products of the head instead of four. TRL's own loss then runs on a leaf with these log-probs, for its value and
its metrics. The two values must agree, and on first use the coefficients too: TRL's are the derivative of its loss in the
leaf. Where they do not, the log-probs are computed with a graph, and the fused loss is used no more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.head import LogProbs, linear_grpo_rows
from fastgrpo.kernels.backends import Backend, note_backend
from fastgrpo.objective import Objective, RowTerms, row_local_terms_exist, row_terms, token_grad
from fastgrpo.trl.compat import LOSS_METHOD, SCORING_METHOD, loss_mask, overrides, unwrapped
from fastgrpo.trl.onpolicy import corrects_sampler

logger = logging.getLogger("fastgrpo")
# Of the size of what is summed up; rounding of float32 sums is a thousandth of it.
_AGREEMENT = 1e-3


def loss_backend(device_type: str, reason: str) -> Backend:
    """How the loss of a head that trains comes to its gradient, and why not in one pass."""
    return Backend("log-probs with a graph" if reason else "in one pass with its gradients", device_type, reason)


def fused_obstacle(trainer: GRPOTrainer) -> str:
    """Why loss and gradients of this trainer's head cannot come from one pass; empty where they can."""
    for method in (LOSS_METHOD, SCORING_METHOD):
        if overrides(trainer, method):
            return f"{type(trainer).__name__} brings its own {method}"
    if trainer.args.torch_compile:
        return "torch_compile=True traces the model's forward"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus needs entropies with a gradient"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss needs a gradient of its own"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile ranks the entropies of all tokens first"
    if trainer.off_policy_mask_threshold is not None:
        return "off_policy_mask_threshold sums over sequences first"
    return ""


def why_with_a_graph(trainer: GRPOTrainer, packed: bool, in_parts: bool, old_pass_left_out: bool) -> str:
    """Why the head's log-probs get a graph in all micro-batches, or in some; empty where they do in none."""
    obstacle = fused_obstacle(trainer)
    if obstacle:
        return obstacle
    if trainer._is_vlm and not packed:
        return "rows with images that keep padding go through TRL's own scoring"
    if in_parts:
        return "a micro-batch in parts computes each part's log-probs first"
    uses = trainer.args.steps_per_generation * trainer.num_iterations
    if trainer.args.gradient_accumulation_steps % uses == 0:
        if corrects_sampler(trainer) and old_pass_left_out:
            return "the sampler's ratio is made of the log-probs of this pass, which saves a forward"
        return ""
    if trainer.importance_sampling_level == "sequence":
        return "importance_sampling_level='sequence' sums over sequences first where old log-probs are others"
    if trainer.loss_type == "vespo":
        return "loss_type='vespo' sums over sequences first where old log-probs are others"
    return ""


def head_trains(trainer: GRPOTrainer) -> bool:
    """Whether the output head of the policy has a gradient."""
    head = unwrapped(trainer, trainer.model).get_output_embeddings()
    return any(x is not None and x.requires_grad for x in (head.weight, getattr(head, "bias", None)))


@dataclass(frozen=True)
class FusedLoss:
    """
    The loss of one micro-batch, or of some of its tokens.

    Attributes:
        objective: with its normalisers.
        terms: `[B, T]` each.
        counted: `[B, T]` bool, the tokens that the loss counts; no others are computed.
        found: where `score` puts the loss.
    """

    objective: Objective
    terms: RowTerms
    counted: Tensor
    found: list[Tensor] = field(default_factory=list)

    def map(self, function: Callable[[Tensor], Tensor]) -> FusedLoss:
        """The same loss with its tokens laid out in another way."""
        return replace(self, terms=self.terms.map(function), counted=function(self.counted))

    def score(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, return_entropy: bool, **options: Any
    ) -> LogProbs:
        """As `linear_logprob`; the log-probs lead to the loss in the graph, see `attached`."""
        loss, result = linear_grpo_rows(hidden, weight, targets, self.terms, self.objective, bias, **options)
        self.found.append(loss)
        return result._replace(logprobs=_Carry.apply(loss, result.logprobs))

    def coefficients(self, logprobs: Tensor) -> Tensor:
        """`[B, T]`: the derivative of the loss in each log-prob."""
        terms = self.terms
        grad = token_grad(
            self.objective,
            logprobs,
            terms.advantages,
            terms.old_logprobs,
            terms.ref_logprobs,
            terms.multiplier,
            terms.phi,
        )
        return torch.where(self.counted, grad * terms.token_weights, 0.0)


class FusedRoute:
    """
    Which micro-batches of a trainer take the fused loss.

    Args:
        trainer: whose.

    Attributes:
        because: why none does any more; empty while the fused loss agrees with TRL's.
        checked: kinds of losses whose derivative was compared with that of TRL's.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.because = trainer, ""
        self.checked: set[tuple[Any, ...]] = set()

    def give_up(self, because: str, advice: str = "") -> None:
        """No micro-batch takes the fused loss from here on; says so once."""
        self.because = because
        logger.warning(
            "fastgrpo: %s. From here on the head computes log-probs with a graph, which takes four products instead of "
            "three.%s",
            because,
            advice and f" {advice}",
        )
        note_backend("trainer loss", loss_backend(self.trainer.args.device.type, because))

    def begin(self, inputs: dict[str, Any]) -> FusedLoss | None:
        """The fused loss of a micro-batch; None where log-probs with a graph are needed."""
        trainer = self.trainer
        if self.because or not torch.is_grad_enabled() or fused_obstacle(trainer) or not head_trains(trainer):
            return None
        old, ratio = inputs.get("old_per_token_logps"), inputs.get("importance_sampling_ratio")
        if corrects_sampler(trainer) and ratio is None:
            return None  # it is made of the log-probs that this very pass computes
        if not corrects_sampler(trainer) and trainer.loss_type != "vespo":
            ratio = None
        mask = loss_mask(inputs)
        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        ref = inputs["ref_per_token_logps"] if trainer.beta != 0.0 else None
        values = {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref, "the ratio": ratio}
        waiting = [name for name, x in values.items() if x is not None and x.requires_grad]
        if waiting:
            self.give_up(f"a gradient is wanted of {' and '.join(waiting)}, and the fused loss has none but the head's")
            return None
        try:
            objective = objective_of(trainer, inputs)
        except (TypeError, ValueError) as error:
            self.give_up(str(error).removesuffix("."))
            return None
        per_token = {
            "per_token_advantages": advantages.shape[1] != 1,
            "per_token_sampler_ratio": ratio is not None and ratio.shape[1] != 1,
        }
        if not row_local_terms_exist(objective, on_policy=old is None, **per_token):
            return None
        terms = row_terms(objective, advantages, mask.float(), ratio)
        old, ref = (None if x is None else x.to(terms.advantages.dtype) for x in (old, ref))
        return FusedLoss(objective, terms._replace(old_logprobs=old, ref_logprobs=ref), mask.bool())

    def disagreement(self, fused: FusedLoss, leaf: Tensor, loss: Tensor) -> str:
        """
        How the fused loss differs from TRL's; empty where it does not.

        Args:
            fused: of a micro-batch that was scored.
            leaf: `[B, T]` log-probs that TRL's loss was computed from.
            loss: TRL's.
        """
        terms = fused.terms
        sizes = terms.token_weights * terms.advantages.abs()
        if terms.multiplier is not None:
            sizes = torch.where(fused.counted, sizes * terms.multiplier.abs(), 0.0)
        # TRL has just copied its metrics to the host, so there is nothing to wait for.
        ours, theirs, size = torch.stack([fused.found[0].detach(), loss.detach(), sizes.sum()]).tolist()
        agree = abs(ours - theirs) <= _AGREEMENT * (size + abs(theirs))
        if not agree and (math.isfinite(ours) or math.isfinite(theirs)):
            return f"it is {ours:.6g}, TRL's {theirs:.6g}"
        kind = (fused.objective.loss_type, fused.objective.importance_sampling_level, *(x is None for x in terms))
        if kind in self.checked:
            return ""
        (expected,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        difference = (fused.coefficients(leaf.detach()) - expected).norm() / expected.norm()
        if difference > _AGREEMENT:
            return f"its derivative in the log-probs differs by {difference.item():.2g} of its size"
        self.checked.add(kind)
        return ""


def objective_of(trainer: GRPOTrainer, inputs: dict[str, Any]) -> Objective:
    """The objective that a trainer's `_compute_loss` computes for a micro-batch now, without an entropy bonus."""
    args, training = trainer.args, trainer.model.training
    return Objective(
        loss_type=trainer.loss_type,
        importance_sampling_level=trainer.importance_sampling_level,
        epsilon=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        delta=args.delta,
        beta=trainer.beta,
        use_bias_correction_kl=bool(args.use_bias_correction_kl),
        off_policy_mask_threshold=trainer.off_policy_mask_threshold,
        top_entropy_quantile=trainer.top_entropy_quantile,
        sapo_temperature_pos=args.sapo_temperature_pos,
        sapo_temperature_neg=args.sapo_temperature_neg,
        vespo_k_pos=args.vespo_k_pos,
        vespo_lambda_pos=args.vespo_lambda_pos,
        vespo_k_neg=args.vespo_k_neg,
        vespo_lambda_neg=args.vespo_lambda_neg,
        # What TRL divides by, and looks at for this loss alone.
        max_completion_length=trainer.max_completion_length if trainer.loss_type == "dr_grpo" else None,
        num_items_in_batch=inputs["num_items_in_batch"],
        gradient_accumulation_steps=trainer.current_gradient_accumulation_steps if training else 1,
        steps_per_generation=args.steps_per_generation,
        num_processes=trainer.accelerator.num_processes,
        training=training,
    )


def attached(carried: Tensor, counted: Tensor, loss: Tensor) -> Tensor:
    """
    The loss as a function of what a model's forward returned, so that whatever wraps that forward sees its gradient.

    Args:
        carried: `[B, T]` log-probs of `FusedLoss.score`, laid out by the scoring.
        counted: `[B, T]` bool, where they were computed.
        loss: `FusedLoss.found`, detached.

    Returns:
        0-d, the value of `loss`.
    """
    return _Attach.apply(carried, counted.flatten().to(torch.uint8).argmax().reshape(1), loss)


class _Carry(torch.autograd.Function):
    """Log-probs whose gradient, wherever it arrives, is the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logprobs: Tensor) -> Tensor:
        return logprobs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.sum(), None


class _Attach(torch.autograd.Function):
    """A loss that sends its gradient to one element of the log-probs."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, place: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.shape = carried.shape
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        elements = grad.new_zeros(ctx.shape.numel())
        if elements.numel():
            elements.index_copy_(0, place, grad.reshape(1))
        return elements.view(ctx.shape), None, None
