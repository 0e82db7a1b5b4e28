"""The GRPO objective in torch: every formula once, for any device, as `GRPOTrainer._compute_loss` of TRL 1.16 computes it.

Shapes: `B` sequences of at most `T` scored tokens, right-padded, with `mask` 1 on the tokens that count. Everything here
works on log-probs; where they come from (`fastgrpo.linear_logprob`, a full softmax, a server) does not matter. Tensors of 16
bit are raised to float32 before anything is summed up, and nothing follows `torch.get_default_dtype()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrpo.checks import (
    LARGEST_FLOAT32,
    require_count,
    require_dense,
    require_device_of,
    require_finite,
    require_flag,
    require_float,
    require_function,
    require_number,
    require_real,
    require_tensor,
)

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BATCH_NORMALISED_LOSS_TYPES = ("dapo", "cispo", "vespo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
SAMPLER_RATIO_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

_OPTIONAL_NUMBERS = ("epsilon_high", "delta", "off_policy_mask_threshold")
_VESPO_NUMBERS = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
_TEMPERATURES = ("sapo_temperature_pos", "sapo_temperature_neg")
# The temperatures have a check of their own.
_ANY_SIGN = ("off_policy_mask_threshold", "entropy_coef", *_TEMPERATURES, *_VESPO_NUMBERS)
# Infinite, a bound is none.
_BOUNDS = ("epsilon", *_OPTIONAL_NUMBERS)
_NUMBERS = (*_BOUNDS, "beta", "entropy_coef", "top_entropy_quantile", *_TEMPERATURES, *_VESPO_NUMBERS)

_MOST_ITEMS = 2.0**63
_LOG_MIN_RATIO = math.log(1e-8)
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Objective:
    """
    What is minimised, in the names of TRL's `GRPOConfig`, together with the normalisers of one micro-batch.

    Args:
        loss_type: one of `LOSS_TYPES`.
        importance_sampling_level: `"token"`, or `"sequence"` (GSPO, arXiv:2507.18071).
        epsilon: lower clip range; also the upper one where `epsilon_high` is None.
        epsilon_high: upper clip range; for cispo the cap on the ratio itself.
        delta: upper bound of the ratio in two-sided clipping (INTELLECT-2, arXiv:2505.07291), or None.
        beta: weight of the KL term (k3 estimator); 0 means that no reference log-probs are needed.
        use_bias_correction_kl: multiply the KL estimate by the importance ratio (DeepSeek-V3.2).
        off_policy_mask_threshold: drop sequences with a negative advantage and a mean KL above it, or None.
        top_entropy_quantile: fraction of tokens, by entropy, that the policy term acts on (arXiv:2506.01939).
        entropy_coef: weight of the entropy bonus in force now; see `AdaptiveEntropy` for how an adaptive one moves.
        sapo_temperature_pos, sapo_temperature_neg: SAPO's gate for advantages above / not above 0.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: VESPO's gamma weights.
        max_completion_length: tokens; dr_grpo divides by it.
        num_items_in_batch: counted tokens of the whole generation batch over all processes (dapo, cispo, vespo); None
            stands for a batch that is this micro-batch on each process.
        gradient_accumulation_steps: micro-batches in the current optimizer step.
        steps_per_generation: micro-batches in a generation batch; None means as many as `gradient_accumulation_steps`.
        num_processes: data-parallel processes.
        training: False in evaluation, where nothing is divided by accumulation.

    Raises:
        TypeError: no number, or no True or False, where one is needed.
        ValueError: a value outside what TRL allows. Clip ranges, `delta` and the off-policy threshold may be infinite; that
            of `num_items_in_batch` on another device than the CPU is not looked at.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int | None = None
    num_items_in_batch: float | Tensor | None = None
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    num_processes: int = 1
    training: bool = True

    def __post_init__(self) -> None:
        _require_choice("loss_type", self.loss_type, LOSS_TYPES)
        _require_choice("importance_sampling_level", self.importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS)
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL_NUMBERS:
                _require_option(name, value)
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise ValueError(f"top_entropy_quantile is {self.top_entropy_quantile}; give a fraction in [0, 1].")
        for name in _TEMPERATURES:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0.")
        for name in ("gradient_accumulation_steps", "num_processes"):
            require_count(name, getattr(self, name))
        for name in ("steps_per_generation", "max_completion_length"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), or_none=True)
        for name in ("use_bias_correction_kl", "training"):
            require_flag(name, getattr(self, name))
        if self.num_items_in_batch is not None:
            _require_items(self.num_items_in_batch)
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError(
                "loss_type='dr_grpo' divides by max_completion_length, which is None; give the number of tokens that "
                "generation may produce."
            )

    @property
    def upper_epsilon(self) -> float:
        """The upper clip range: `epsilon_high`, or `epsilon` where it is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def accumulation(self) -> float:
        """What a per-micro-batch mean is divided by: the accumulation steps in training, 1 in evaluation."""
        return float(self.gradient_accumulation_steps) if self.training else 1.0

    def batch_normaliser(self, mask: Tensor) -> Tensor:
        """
        Denominator of dapo, cispo and vespo: one process's share of the counted tokens of an optimizer step.

        Args:
            mask: `[B, T]` of any real dtype, 1 on counted tokens.

        Returns:
            0-d, fp32 (fp64 for an fp64 mask).
        """
        mask = at_least_float32(mask)
        if self.num_items_in_batch is None:
            items = mask.sum() * self.num_processes
            if self.training:
                items = items * (self.steps_per_generation or self.gradient_accumulation_steps)
        elif isinstance(self.num_items_in_batch, Tensor):
            items = self.num_items_in_batch.reshape(()).to(mask.device, mask.dtype)
        else:
            items = mask.new_full((), self.num_items_in_batch)
        normaliser = items.clamp(min=1.0) / self.num_processes
        if self.training:
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            normaliser = normaliser * self.gradient_accumulation_steps / steps
        return normaliser

    def token_weights(self, mask: Tensor) -> Tensor:
        """
        What each token's loss is multiplied by before everything is summed: the mask over the loss type's normaliser.

        Args:
            mask: `[B, T]` of any real dtype, 1 on counted tokens.

        Returns:
            `[B, T]`, fp32 (fp64 for an fp64 mask), such that `loss = (per_token_loss * weights).sum()`.
        """
        mask = at_least_float32(mask)
        batch = max(mask.shape[0], 1)
        if self.loss_type in BATCH_NORMALISED_LOSS_TYPES:
            return mask / self.batch_normaliser(mask)
        if self.loss_type == "bnpo":
            denominator = mask.sum().clamp(min=1.0)
        elif self.loss_type == "dr_grpo":
            denominator = batch * self.max_completion_length
        elif self.loss_type == "luspo":
            denominator = batch
        else:
            denominator = mask.sum(-1, keepdim=True).clamp(min=1.0) * batch
        return mask / denominator / self.accumulation


def at_least_float32(values: Tensor) -> Tensor:
    """16 bit floats, whole numbers and truth values in float32, float64 as it is."""
    return values.to(summing_dtype(values.dtype))


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are summed up and counted in."""
    return torch.promote_types(dtype, torch.float32)


class TokenTerms(NamedTuple):
    """Per-token values of the objective, before mask and normaliser; shapes and dtypes as the arguments broadcast."""

    loss: Tensor
    """`multiplier * policy term + beta * kl`."""
    ratio: Tensor
    """Importance ratio after the `delta` clamp, as the clip metrics see it."""
    kl: Tensor | None
    """KL estimate with its bias correction; None where `beta` is 0."""


def token_terms(
    objective: Objective,
    logprobs: Tensor,
    advantages: Tensor,
    log_ratio: Tensor,
    ref_logprobs: Tensor | None = None,
    multiplier: Tensor | None = None,
    phi: Tensor | None = None,
) -> TokenTerms:
    """
    The loss of each token, elementwise, differentiable in `logprobs` and `log_ratio`.

    Args:
        objective: which loss.
        logprobs: log-probs under the policy, any shape `S`.
        advantages: broadcastable to `S`.
        log_ratio: log of the importance ratio: `logprobs - old_logprobs` at token level, its sequence mean (`[B, 1]`)
            at sequence level. On-policy it is 0 by value and still carries the gradient.
        ref_logprobs: `S`; needed where `beta` is not 0.
        multiplier: multiplies the policy term, never the KL term: off-policy mask, entropy mask, sampler ratio.
        phi: vespo's detached weight; needed for that loss type.

    Returns:
        TokenTerms.

    Raises:
        ValueError: `ref_logprobs` or `phi` missing.

    The formulas are those of TRL 1.16 `GRPOTrainer._compute_loss`; the KL estimator is k3 of
    http://joschu.net/blog/kl-approx.html.
    """
    ratio = torch.exp(log_ratio)
    kl = None
    if objective.beta != 0.0:
        if ref_logprobs is None:
            raise ValueError(f"beta is {objective.beta}, so the KL term needs ref_logprobs; give them, or set beta=0.")
        gap = ref_logprobs - logprobs
        kl = torch.exp(gap) - gap - 1
        if objective.use_bias_correction_kl:
            kl = kl * ratio

    if objective.loss_type == "cispo":
        policy = -torch.clamp(ratio, max=objective.upper_epsilon).detach() * advantages * logprobs
    elif objective.loss_type == "sapo":
        positive = advantages > 0
        tau = _choose(positive, objective.sapo_temperature_pos, objective.sapo_temperature_neg, logprobs.dtype)
        policy = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    elif objective.loss_type == "vespo":
        if phi is None:
            raise ValueError("loss_type='vespo' needs phi, the sequence weights of vespo_weights(...).")
        policy = -phi * advantages * logprobs
    else:
        clipped = torch.clamp(ratio, 1 - objective.epsilon, 1 + objective.upper_epsilon)
        if objective.delta is not None:
            ratio = torch.clamp(ratio, max=objective.delta)
        policy = -torch.min(ratio * advantages, clipped * advantages)

    if multiplier is not None:
        policy = policy * multiplier
    loss = policy if kl is None else policy + objective.beta * kl
    return TokenTerms(loss, ratio, kl)


@torch.no_grad()
def token_grad(
    objective: Objective,
    logprobs: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    multiplier: Tensor | None = None,
    phi: Tensor | None = None,
) -> Tensor:
    """
    d `token_terms(...).loss` / d logprob for a token-level ratio, in closed form, for a fused head that needs it at once.

    Args:
        objective, logprobs, advantages, ref_logprobs, multiplier, phi: as in `token_terms`, all of one shape.
        old_logprobs: None on-policy.

    Returns:
        Coefficients in the shape of `logprobs`; what autograd gives for `token_terms`, at ties and clip bounds too.
    """
    ratio = torch.ones_like(logprobs) if old_logprobs is None else torch.exp(logprobs - old_logprobs)
    if objective.loss_type == "cispo":
        grad = -ratio.clamp(max=objective.upper_epsilon) * advantages
    elif objective.loss_type == "sapo":
        positive = advantages > 0
        tau = _choose(positive, objective.sapo_temperature_pos, objective.sapo_temperature_neg, logprobs.dtype)
        gate = torch.sigmoid(tau * (ratio - 1))
        grad = -4 * gate * (1 - gate) * ratio * advantages
    elif objective.loss_type == "vespo":
        grad = -phi * advantages
    else:
        low, high = 1 - objective.epsilon, 1 + objective.upper_epsilon
        bound = math.inf if objective.delta is None else objective.delta
        free, clipped = ratio.clamp(max=bound) * advantages, ratio.clamp(low, high) * advantages
        # torch.min splits its gradient at a tie, clamp passes it on at its bounds.
        share = (free < clipped) + 0.5 * (free == clipped).to(free.dtype)
        alive = share * (ratio <= bound) + (1 - share) * ((ratio >= low) & (ratio <= high))
        grad = -ratio * advantages * alive
    if multiplier is not None:
        grad = grad * multiplier
    if objective.beta != 0.0:
        gap = ref_logprobs - logprobs
        kl_grad = -torch.expm1(gap)
        if objective.use_bias_correction_kl:
            kl_grad = ratio * (kl_grad + torch.expm1(gap) - gap)
        grad = grad + objective.beta * kl_grad
    return grad


@torch.no_grad()
def vespo_weights(
    objective: Objective, log_ratio: Tensor, advantages: Tensor, mask: Tensor, sampler_ratio: Tensor | None = None
) -> Tensor:
    """
    VESPO's detached sequence weights `phi = exp(lambda + k log w - lambda w)`, 0 where that is not finite.

    Args:
        objective: `vespo_*`.
        log_ratio: `[B, T]`, `logprobs - old_logprobs`.
        advantages: `[B, 1]` or `[B, T]`.
        mask: `[B, T]`.
        sampler_ratio: `[B, T]` ratio of old policy to sampler, or None.

    Returns:
        `[B, 1]` (`[B, T]` with per-token advantages), fp32 (fp64 for an fp64 log-ratio).

    Source: TRL 1.16 `GRPOTrainer.get_gamma_weights`.
    """
    log_ratio = at_least_float32(log_ratio)
    log_weight = (log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO) * mask).sum(-1, keepdim=True)
    if sampler_ratio is not None:
        log_sampler = sampler_ratio.to(log_ratio.dtype).log().clamp(_LOG_MIN_RATIO, _MAX_LOG_RATIO)
        if log_sampler.shape == mask.shape:
            log_sampler = torch.where(mask.bool(), log_sampler, 0.0)
        log_weight = log_weight + log_sampler.sum(-1, keepdim=True)
    log_weight = log_weight.clamp(_LOG_MIN_RATIO, _MAX_LOG_RATIO)
    gain = advantages >= 0
    k = _choose(gain, objective.vespo_k_pos, objective.vespo_k_neg, log_ratio.dtype)
    lam = _choose(gain, objective.vespo_lambda_pos, objective.vespo_lambda_neg, log_ratio.dtype).clamp(min=1e-4)
    return torch.exp(lam + k * log_weight - lam * log_weight.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """
    Which sequences stay: those with `advantages >= 0` or a mean `sampling - policy` log-prob of at most `threshold`.

    Args:
        logprobs, sampling_logprobs: `[B, T]`; a NaN difference counts as 0.
        advantages: `[B, 1]` or `[B, T]`.
        mask: `[B, T]`.
        threshold: nats a token.

    Returns:
        `[B, 1]` (`[B, T]` with per-token advantages), 1 = keep, in `mask`'s dtype.

    Source: DeepSeek-V3.2; TRL 1.16 `GRPOTrainer.get_off_policy_mask`.
    """
    gap = (at_least_float32(sampling_logprobs) - at_least_float32(logprobs)).nan_to_num(nan=0.0)
    counts = at_least_float32(mask)
    mean_gap = (gap * counts).sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1.0)
    return ((advantages >= 0) | (mean_gap <= threshold)).to(mask.dtype)


@torch.no_grad()
def high_entropy_mask(
    entropy: Tensor, mask: Tensor, quantile: float, gather: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """
    Which tokens have an entropy of at least the given quantile of all counted tokens.

    Args:
        entropy: `[B, T]` nats.
        mask: `[B, T]`; any value but 0 is a 1.
        quantile: in [0, 1]; TRL passes `1 - top_entropy_quantile`.
        gather: collects a 1-d fp32 tensor of any length from all processes; None = this process only.

    Returns:
        `[B, T]` bool.

    Source: arXiv:2506.01939; TRL 1.16 `GRPOTrainer.get_high_entropy_mask`.
    """
    counted = mask.bool()
    # Ranked and compared in one dtype, or the largest would be less than themselves.
    entropy = entropy.float()
    values = entropy[counted]
    if gather is not None:
        values = gather(values)
    if values.numel() == 0:
        return torch.zeros_like(counted)
    return (entropy >= torch.quantile(values, quantile)) & counted


def sampler_importance_ratio(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """
    Ratio of the trainer's old policy to the sampler's, which corrects for a rollout engine with other numerics.

    Args:
        old_logprobs, sampling_logprobs: `[B, T]` float; a NaN difference counts as 0 (ratio 1).
        mask: `[B, T]` of any real dtype, 0 where a token counts for nothing (ratio 1); any other value is a 1.
        mode: one of `SAMPLER_RATIO_MODES`: per token or per sequence; clamp to the range, or zero what is outside.
        clip_min, clip_max: the range; None = open.

    Returns:
        `[B, T]` for token modes, `[B, 1]` for sequence modes; fp32 (fp64 where one of the log-probs is).

    Raises:
        TypeError: not tensors, or of a dtype or layout that is not computed in; bounds that are no numbers.
        ValueError: unknown mode; shapes or devices that differ; NaN for a bound, or `clip_min` above `clip_max`.

    Source: TRL 1.16 `GRPOTrainer._generate_and_score_completions`.
    """
    _require_choice("mode", mode, SAMPLER_RATIO_MODES)
    _require_matrix("old_logprobs", old_logprobs)
    for name, value in (("sampling_logprobs", sampling_logprobs), ("mask", mask)):
        _require_beside("old_logprobs", old_logprobs, name, value, {tuple(old_logprobs.shape)})
    _require_range(clip_min, clip_max)
    gap = at_least_float32(old_logprobs) - at_least_float32(sampling_logprobs)
    gap = torch.where(mask.bool(), gap, 0.0).nan_to_num(nan=0.0)
    level, action = mode.split("_")
    if level == "sequence":
        gap = gap.sum(-1, keepdim=True)
    ratio = gap.exp()
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if action == "truncate":
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@dataclass(frozen=True)
class AdaptiveEntropy:
    """
    The adaptive entropy bonus: its coefficient after every optimizer step.

    Args:
        coef: coefficient now.
        target: entropy in nats; the bonus acts only while the last step's mean entropy is at most this.
        delta: how far the coefficient moves a step.
        coef_min, coef_max: its bounds, for the side that it moves to.
        last_entropy: mean entropy over all processes of the last optimizer step, nats; TRL starts at infinity.

    Raises:
        TypeError: what is no number.
        ValueError: `coef` or `delta` not finite, `delta` below 0, NaN for `target` or a bound, `coef_min` above `coef_max`.

    Source: Skywork-OR1 (arXiv:2505.22312); TRL 1.16 `GRPOTrainer._compute_loss`.
    """

    coef: float
    target: float = 0.2
    delta: float = 0.005
    coef_min: float = 0.0
    coef_max: float = 1.0
    last_entropy: float = math.inf

    def __post_init__(self) -> None:
        require_finite("coef", self.coef)
        require_finite("delta", self.delta)
        if self.delta < 0:
            raise ValueError(f"delta is {self.delta}; give a number of at least 0.")
        for name in ("target", "coef_min", "coef_max"):
            _require_not_nan(name, getattr(self, name))
        _require_ascending("coef_min", self.coef_min, "coef_max", self.coef_max)
        # NaN after a step whose entropies were: as in TRL it counts as above the target.
        require_number("last_entropy", self.last_entropy)

    @property
    def applied(self) -> float:
        """The coefficient to put into `Objective.entropy_coef` for every micro-batch of this optimizer step."""
        return self.coef if self.last_entropy <= self.target else 0.0

    def after_step(self, entropy_sum: float, tokens: float) -> AdaptiveEntropy:
        """
        The state for the next step.

        Args:
            entropy_sum, tokens: sum (nats) and count over all processes and micro-batches of this step, as
                `GRPOStats.entropy_bonus` has them, as Python numbers.

        Raises:
            TypeError: what is no Python number.
        """
        require_number("entropy_sum", entropy_sum)
        require_number("tokens", tokens)
        entropy = entropy_sum / max(tokens, 1.0)
        if entropy <= self.target:
            coef = min(self.coef + self.delta, self.coef_max)
        else:
            coef = max(self.coef - self.delta, self.coef_min)
        return replace(self, coef=coef, last_entropy=entropy)


@dataclass(frozen=True)
class GRPOStats:
    """
    What TRL's metrics are made of; every tensor is detached, and fp32 (fp64 where the log-probs of the loss are).

    Attributes:
        logprobs: `[B, T]`, or `[N]` from `linear_grpo_loss`.
        entropy: the same shape, nats, or None.
        policy_loss: 0-d, the loss without entropy bonus and auxiliary loss, as TRL logs it (before the division by
            accumulation steps where the loss type has one).
        sums: metric name -> `[2]` (sum, count). Add over processes, then divide: a global masked mean.
        low_clip, high_clip: `[B]` clipped fraction of every sequence, NaN where it has no token; for min and max.
        entropy_bonus: `[2]` (sum, count) over the tokens the bonus acts on; feeds `AdaptiveEntropy`. None without entropy.
    """

    logprobs: Tensor
    entropy: Tensor | None
    policy_loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    low_clip: Tensor | None = None
    high_clip: Tensor | None = None
    entropy_bonus: Tensor | None = None

    def metrics(self, gather: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """
        Metrics under TRL's names, with one copy to the host.

        Args:
            gather: collects a `[1, K]` tensor of every process into `[processes, K]`, as accelerate's `Accelerator.gather`
                does; called once, on the tensors' device. None = this process alone.

        Returns:
            Masked means over the tokens of all processes, the least and the largest clipped fraction of a sequence (NaN where
            none has a token), and the mean of the policy losses.

        Raises:
            TypeError: `gather` cannot be called.
        """
        require_function("gather", gather)
        none = self.policy_loss.new_empty(0)
        low, high = (none if clips is None else clips for clips in (self.low_clip, self.high_clip))
        ends = _least(low), _least(-high), self.policy_loss.reshape(1)
        own = torch.cat([*(total.reshape(-1) for total in self.sums.values()), *ends])[None]
        every = own if gather is None else gather(own)
        totals = every[:, : -len(ends)].sum(0).view(-1, 2)
        lows, highs, losses = every[:, -len(ends) :].unbind(1)
        overall = torch.stack([lows.amin(), -highs.amin(), losses.nanmean()])
        *means, low_min, high_max, policy_loss = torch.cat(
            [totals[:, 0] / totals[:, 1].clamp(min=1.0), overall]
        ).tolist()
        values = dict(zip(self.sums, means, strict=True))
        if self.low_clip is not None and self.high_clip is not None:
            values["clip_ratio/low_min"] = low_min if low_min < math.inf else math.nan
            values["clip_ratio/high_max"] = high_max if high_max > -math.inf else math.nan
        values["policy_loss"] = policy_loss
        return values


def grpo_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: Objective,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_ratio: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    aux_loss: Tensor | float | None = None,
    router_aux_loss_coef: float = 0.0,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, GRPOStats]:
    """
    GRPO loss of one micro-batch from per-token log-probs.

    Args:
        logprobs: `[B, T]` log-probs under the policy, with gradient. All tensors may be bf16, fp16, fp32 or fp64, each of its
            own: everything is computed in fp32, in fp64 where the log-probs are, and gradients have their inputs' dtypes.
        advantages: `[B]`, `[B, 1]` or `[B, T]`.
        mask: `[B, T]` bool, int or float: completion mask times tool mask; any value but 0 is a 1. What other tensors hold
            where it is 0 has no effect, NaN included.
        objective: loss type, options and normalisers.
        old_logprobs: `[B, T]`; None on-policy, where they are the detached `logprobs`.
        ref_logprobs: `[B, T]`; needed where `objective.beta` is not 0.
        sampler_ratio: `[B, T]` or `[B, 1]`, see `sampler_importance_ratio`; None = no correction.
        sampling_logprobs: `[B, T]` the sampler's own, for the off-policy mask; None = `old_logprobs`.
        entropy: `[B, T]` nats; needed for an entropy bonus or quantile mask. Carries a gradient where the bonus shall.
        aux_loss: 0-d load-balancing loss of a mixture of experts, or a number, or None.
        router_aux_loss_coef: its weight, a finite number.
        gather: collects a 1-d fp32 tensor from all processes, for the entropy quantile; None = this process only.

    Returns:
        0-d loss, fp32 (fp64 for fp64 log-probs), and GRPOStats.

    Raises:
        TypeError: what is no dense tensor of such a dtype where one is needed, no number, or no function.
        ValueError: a tensor of the wrong shape or device, or one that `objective` needs is missing.

    Source: TRL 1.16 `GRPOTrainer._compute_loss`.
    """
    require_objective(objective)
    _check_tensors(logprobs, advantages, mask, old_logprobs, ref_logprobs, sampler_ratio, sampling_logprobs, entropy)
    _check_auxiliary(logprobs, aux_loss, router_aux_loss_coef)
    require_function("gather", gather)
    if entropy is None and (objective.entropy_coef != 0.0 or objective.top_entropy_quantile < 1.0):
        raise ValueError(
            f"entropy_coef={objective.entropy_coef} and top_entropy_quantile={objective.top_entropy_quantile} need the "
            "entropy of every token; give entropy=[B, T], or leave both at their defaults."
        )
    counted = mask.bool()
    mask = counted.to(summing_dtype(logprobs.dtype))

    def clean(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(counted, x.to(mask.dtype), 0.0)

    def clean_either(x: Tensor, neutral: float) -> Tensor:
        x = x.to(mask.dtype)
        # As in TRL, a finite value of a row without tokens counts in metrics that have one value a row.
        kept = counted if x.shape == counted.shape else counted.any(1, keepdim=True) | x.isfinite()
        return torch.where(kept, x, neutral)

    logprobs, old_logprobs, ref_logprobs, entropy = map(clean, (logprobs, old_logprobs, ref_logprobs, entropy))
    sampling_logprobs = clean(sampling_logprobs)
    advantages = clean_either(advantages if advantages.dim() == 2 else advantages.unsqueeze(1), 0.0)
    if sampler_ratio is not None:
        sampler_ratio = clean_either(sampler_ratio, 1.0)
    if old_logprobs is None:
        old_logprobs = logprobs.detach()

    token_log_ratio = logprobs - old_logprobs
    log_ratio = token_log_ratio
    if objective.importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)

    entropy_mask = None
    if objective.top_entropy_quantile < 1.0:
        entropy_mask = high_entropy_mask(entropy, mask, 1 - objective.top_entropy_quantile, gather).to(mask.dtype)
    factors = []
    if objective.off_policy_mask_threshold is not None:
        sampling = old_logprobs if sampling_logprobs is None else sampling_logprobs
        factors.append(
            off_policy_mask(logprobs, sampling, advantages, mask, threshold=objective.off_policy_mask_threshold)
        )
    if entropy_mask is not None:
        factors.append(entropy_mask)
    if sampler_ratio is not None and objective.loss_type != "vespo":
        factors.append(sampler_ratio)
    multiplier = math.prod(factors[1:], start=factors[0]) if factors else None
    phi = None
    if objective.loss_type == "vespo":
        phi = vespo_weights(objective, token_log_ratio, advantages, mask, sampler_ratio)

    terms = token_terms(objective, logprobs, advantages, log_ratio, ref_logprobs, multiplier, phi)
    loss = (terms.loss * objective.token_weights(mask)).sum()
    rescale = 1.0 if objective.loss_type in BATCH_NORMALISED_LOSS_TYPES else objective.accumulation
    policy_loss = loss.detach() * rescale

    entropy_bonus = None
    if entropy is not None:
        acting = mask if entropy_mask is None else mask * entropy_mask
        entropy_sum, tokens = (entropy * acting).sum(), acting.sum()
        entropy_bonus = torch.stack([entropy_sum, tokens]).detach()
        if objective.entropy_coef != 0.0:
            loss = loss - objective.entropy_coef * entropy_sum / tokens.clamp(min=1.0) / objective.accumulation
    if aux_loss is not None:
        if isinstance(aux_loss, Tensor):
            aux_loss = aux_loss.to(loss.dtype)
        loss = loss + router_aux_loss_coef * aux_loss / objective.accumulation

    sums, low_clip, high_clip = _metric_sums(objective, terms, phi, entropy, advantages, mask)
    stats = GRPOStats(
        logprobs=logprobs.detach(),
        entropy=None if entropy is None else entropy.detach(),
        policy_loss=policy_loss,
        sums=sums,
        low_clip=low_clip,
        high_clip=high_clip,
        entropy_bonus=entropy_bonus,
    )
    return loss, stats


class RowTerms(NamedTuple):
    """What a row-local objective takes of every token besides its log-prob, see `token_terms`; all of one shape."""

    advantages: Tensor
    token_weights: Tensor
    """See `Objective.token_weights`."""
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    multiplier: Tensor | None = None
    phi: Tensor | None = None
    entropy_weights: Tensor | None = None
    """What each token's entropy takes off the loss."""

    def map(self, function: Callable[[Tensor], Tensor]) -> RowTerms:
        """Applies a function to all that are there."""
        return RowTerms(*(None if x is None else function(x) for x in self))


def row_terms(objective: Objective, advantages: Tensor, mask: Tensor, sampler_ratio: Tensor | None = None) -> RowTerms:
    """
    What the tokens of a micro-batch count in a row-local objective; old and reference log-probs are left to the caller.

    Args:
        objective: for which `row_local_terms_exist`.
        advantages: `[B, 1]` or `[B, T]`.
        mask: `[B, T]` float, 1 on counted tokens.
        sampler_ratio: `[B, 1]` or `[B, T]` or None.

    Returns:
        RowTerms, `[B, T]` in `mask`'s dtype.
    """
    phi = entropy_weights = None
    if objective.loss_type == "vespo":
        phi = vespo_weights(objective, torch.zeros_like(mask), advantages, mask, sampler_ratio)
        sampler_ratio = None
    if objective.entropy_coef != 0.0:
        entropy_weights = objective.entropy_coef * mask / mask.sum().clamp(min=1.0) / objective.accumulation
    terms = RowTerms(
        advantages, objective.token_weights(mask), multiplier=sampler_ratio, phi=phi, entropy_weights=entropy_weights
    )
    return terms.map(lambda x: x.to(mask.dtype).expand_as(mask))


def row_local_terms_exist(
    objective: Objective, *, on_policy: bool, per_token_advantages: bool, per_token_sampler_ratio: bool
) -> bool:
    """
    Whether d loss / d logprob of a token follows from that token's own log-prob (and what is known beforehand).

    True for a token-level ratio, and on-policy for a sequence-level one too: there every ratio is 1, and a mean of equal
    per-token coefficients is that coefficient. Whatever sums log-probs over a sequence off-policy, or ranks entropies,
    is not row-local: it needs the statistics of all rows before the first gradient.
    """
    if objective.off_policy_mask_threshold is not None or objective.top_entropy_quantile < 1.0:
        return False
    if objective.loss_type == "vespo" and not on_policy:
        return False
    if objective.importance_sampling_level == "token":
        return True
    mixes_kl = objective.beta != 0.0 and objective.use_bias_correction_kl
    return on_policy and not (per_token_advantages or per_token_sampler_ratio or mixes_kl)


def _metric_sums(
    objective: Objective,
    terms: TokenTerms,
    phi: Tensor | None,
    entropy: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    def masked_sum(x: Tensor) -> Tensor:
        # As in TRL, a tensor of width 1 holds one value a sequence and is not masked.
        if x.shape[1] == 1:
            return torch.stack([x.sum(), x.new_tensor(float(x.shape[0]))])
        return torch.stack([(x * mask).sum(), mask.sum()])

    def sequence_mean(x: Tensor) -> Tensor:
        return x.squeeze(1) if x.shape[1] == 1 else (x * mask).sum(-1) / mask.sum(-1)

    sums: dict[str, Tensor] = {}
    low_clip = high_clip = None
    with torch.no_grad():
        if terms.kl is not None:
            sums["kl"] = masked_sum(terms.kl)
        if entropy is not None:
            sums["entropy"] = masked_sum(entropy)
        if objective.loss_type in CLIPPED_LOSS_TYPES:
            low = (terms.ratio < 1 - objective.epsilon) & (advantages < 0)
            high = (terms.ratio > 1 + objective.upper_epsilon) & (advantages > 0)
            region = low | high
            low, high, region = (x.to(mask.dtype) for x in (low, high, region))
            sums["clip_ratio/low_mean"] = masked_sum(low)
            sums["clip_ratio/high_mean"] = masked_sum(high)
            sums["clip_ratio/region_mean"] = masked_sum(region)
            low_clip, high_clip = sequence_mean(low), sequence_mean(high)
        elif objective.loss_type == "cispo":
            capped = (terms.ratio > objective.upper_epsilon) & (advantages > 0)
            sums["cispo_clip_ratio"] = masked_sum(capped.to(mask.dtype))
        elif objective.loss_type == "vespo":
            sums["vespo/phi_seq_mean"] = masked_sum(phi)
    return sums, low_clip, high_clip


def _least(values: Tensor) -> Tensor:
    """`[1]`, NaN left out; infinite where there is nothing else."""
    return torch.nn.functional.pad(values.nan_to_num(nan=math.inf), (0, 1), value=math.inf).amin(0, keepdim=True)


def require_objective(objective: object) -> None:
    """Raises `TypeError` unless it is an `Objective`."""
    if not isinstance(objective, Objective):
        raise TypeError(f"objective is a {type(objective).__name__}; give fastgrpo.Objective(loss_type=..., ...).")


def _choose(condition: Tensor, where: float, elsewhere: float, dtype: torch.dtype) -> Tensor:
    """One of two numbers for each element. As in TRL they are rounded to float32, in float64 too."""
    options = (torch.full((), x, dtype=torch.float32, device=condition.device) for x in (where, elsewhere))
    return torch.where(condition, *options).to(dtype)


def _require_option(name: str, value: float) -> None:
    require_number(name, value)
    if value < 0 and name not in _ANY_SIGN:
        raise ValueError(f"{name} is {value}; give a number of at least 0.")
    if not abs(value) <= LARGEST_FLOAT32 and not (name in _BOUNDS and math.isinf(value)):
        raise ValueError(f"{name} is {value}; give a finite number, at most {LARGEST_FLOAT32:.4g}.")


def _require_items(items: float | Tensor) -> None:
    if isinstance(items, Tensor):
        require_dense("num_items_in_batch", items)
        require_real("num_items_in_batch", items)
        if items.numel() != 1:
            raise ValueError(f"num_items_in_batch has shape {tuple(items.shape)}; it must be one number.")
        if items.device.type != "cpu" or type(items) is not Tensor or torch._C._are_functorch_transforms_active():
            # Its value is on its way, and waiting for it takes longer than all else that the host does; or there is none.
            return
        items = items.item()
    else:
        require_number("num_items_in_batch", items)
    if not 0 <= items <= _MOST_ITEMS:
        raise ValueError(f"num_items_in_batch is {items}; give a count of tokens, or None.")


def _require_not_nan(name: str, value: float) -> None:
    require_number(name, value)
    if math.isnan(value):
        raise ValueError(f"{name} is nan; give a number.")


def _require_ascending(low_name: str, low: float, high_name: str, high: float) -> None:
    if low > high:
        raise ValueError(f"{low_name} is {low} and {high_name} is {high}; {low_name} may be at most {high_name}.")


def _require_range(clip_min: float | None, clip_max: float | None) -> None:
    given = {name: bound for name, bound in (("clip_min", clip_min), ("clip_max", clip_max)) if bound is not None}
    for name, bound in given.items():
        _require_not_nan(name, bound)
    if len(given) == 2:
        _require_ascending("clip_min", clip_min, "clip_max", clip_max)


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}.")


def _check_tensors(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    sampler_ratio: Tensor | None,
    sampling_logprobs: Tensor | None,
    entropy: Tensor | None,
) -> None:
    _require_matrix("logprobs", logprobs)
    batch, width = logprobs.shape
    full, allowed = (batch, width), {(batch, width)}
    for name, value, shapes in (
        ("mask", mask, allowed),
        ("advantages", advantages, {(batch,), (batch, 1), full}),
    ):
        _require_beside("logprobs", logprobs, name, value, shapes)
    for name, value, shapes in (
        ("old_logprobs", old_logprobs, allowed),
        ("ref_logprobs", ref_logprobs, allowed),
        ("sampling_logprobs", sampling_logprobs, allowed),
        ("entropy", entropy, allowed),
        ("sampler_ratio", sampler_ratio, {full, (batch, 1)}),
    ):
        if value is not None:
            _require_beside("logprobs", logprobs, name, value, shapes)


def _check_auxiliary(logprobs: Tensor, aux_loss: Tensor | float | None, coefficient: float) -> None:
    if aux_loss is None:
        return
    # Models without experts give the number 0.
    for name, value in (("aux_loss", aux_loss), ("router_aux_loss_coef", coefficient)):
        if isinstance(value, Tensor):
            require_dense(name, value)
            require_real(name, value)
            if value.device.type != "cpu":
                require_device_of("logprobs", logprobs, name, value)
            if value.dim() != 0:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be 0-d, such as {name}.sum().")
        else:
            require_finite(name, value)


def _require_matrix(name: str, value: Tensor) -> None:
    require_tensor(name, value)
    require_dense(name, value)
    if value.dim() != 2 or not value.is_floating_point():
        raise ValueError(
            f"{name} is {value.dtype} of shape {tuple(value.shape)}; give a float tensor [B, T]: sequences by tokens."
        )
    require_float(name, value)


def _require_beside(other_name: str, other: Tensor, name: str, value: Tensor, shapes: set[tuple[int, ...]]) -> None:
    require_tensor(name, value)
    require_dense(name, value)
    require_device_of(other_name, other, name, value)
    (require_real if name == "mask" else require_float)(name, value)
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in sorted(shapes, key=len))
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; with {other_name} {tuple(other.shape)} it must be {wanted}."
        )
