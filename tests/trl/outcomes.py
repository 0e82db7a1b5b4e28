"""One generation batch through a trainer's scoring and loss, and comparing what came out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.trl.compat import SCORING_METHOD
from fastgrpo.trl.onpolicy import score_again


def generated(trainer: GRPOTrainer) -> dict[str, Any]:
    """A generation batch whose rows have different advantages, none of them 0."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    batch["advantages"] = torch.arange(1.0, len(batch["prompt_ids"]) + 1) - 3.5
    return batch


def outcome(trainer: GRPOTrainer, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Log-probs, loss and all gradients, with the random numbers of seed 0."""
    torch.manual_seed(0)
    trainer.model.zero_grad(set_to_none=True)
    logprobs = score_again(getattr(trainer, SCORING_METHOD), trainer.model, batch).detach()
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward()
    scores = {"log-probs": logprobs * batch["completion_mask"], "loss": loss.detach()}
    return scores | gradients_of(trainer.model)


def gradients(trainer: GRPOTrainer, batch: dict[str, Any]) -> dict[str, Tensor]:
    """All gradients of the loss."""
    trainer.model.zero_grad(set_to_none=True)
    trainer._compute_loss(trainer.model, dict(batch)).backward()
    return gradients_of(trainer.model)


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients a model has, by the name of their parameter."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def seen_by(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """The keyword arguments of every forward of the model from now on."""
    seen: list[dict[str, Any]] = []
    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    base.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    return seen


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], case: Any = "") -> None:
    """The same names with the same numbers, within 1e-5 of the largest, or of 1 where that is larger."""
    assert ours.keys() == expected.keys() and expected, case
    for name, value in expected.items():
        worst = float((ours[name] - value).abs().max())
        assert worst <= 1e-5 * max(1.0, float(value.abs().max())), (case, name, worst)
