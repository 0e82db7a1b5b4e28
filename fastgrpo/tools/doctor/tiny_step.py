"""The last layer: one tiny step of GRPO, patched."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

import fastgrpo
from fastgrpo.tools.demo.quiet import quiet_libraries
from fastgrpo.tools.doctor.case import Case, Line, fault
from fastgrpo.tools.doctor.trainer import build_trainer

_ONE_SMALL_STEP = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
_RATIO_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


def check_step(case: Case) -> Iterator[Line]:
    """One optimizer step on the CPU or GPU at hand: reward 0 everywhere, NaN, and the ratio before the first update."""
    with quiet_libraries(), tempfile.TemporaryDirectory() as folder:
        try:
            lines = list(examine_step(build_trainer(case, Path(folder), **_ONE_SMALL_STEP)))
        except Exception as error:  # anything may break in somebody's model or reward
            lines = [fault("one step", error)]
    yield from lines


def examine_step(trainer: GRPOTrainer) -> Iterator[Line]:
    """
    Patches a trainer and takes its step.

    Args:
        trainer: built with `max_steps=1`.
    """
    ratios: list[float] = []
    compute_loss = trainer._compute_loss

    def watched(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        if not ratios:
            ratios.append(_largest_ratio(trainer, model, inputs))
        return compute_loss(model, inputs)

    trainer._compute_loss = watched
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)):
        trainer.train()
    logged = next((entry for entry in trainer.state.log_history if "reward" in entry), {})
    loss = logged.get("loss", math.nan)
    broken = [p for p in trainer.model.parameters() if not torch.isfinite(p).all()]
    if broken or not math.isfinite(loss) or not math.isfinite(logged.get("grad_norm") or 0.0):
        yield Line(
            "one step",
            "wrong",
            f"loss {loss}, gradient {logged.get('grad_norm')}: not finite",
            "look for infinite rewards, a learning rate that is too high, or fp16 without a scaler",
        )
        return
    bound = _RATIO_BOUND.get(next(trainer.model.parameters()).dtype, 1e-3)
    if trainer.accelerator.mixed_precision != "no":
        bound = max(bound, _RATIO_BOUND[torch.bfloat16])
    if ratios and not abs(ratios[0] - 1) <= bound:
        yield Line(
            "one step",
            "wrong",
            f"before any update the probability ratio is {ratios[0]:.4g}, not 1",
            "is dropout on, or does the model draw random numbers? The same weights must give the same log-probs",
        )
        return
    text = (
        f"loss {loss:.3g}, reward {logged['reward']:.3g} +- {logged.get('reward_std', 0.0):.3g}, ratio {ratios[0]:.6f}"
    )
    if logged.get("reward_std", 0.0) == 0.0:
        yield Line(
            "one step",
            "hint",
            f"{text}: all rewards of a group are the same, so nothing is learned from it",
            "easier prompts, a warmer temperature, or a reward with steps in between",
        )
        return
    yield Line("one step", "ok", text)


def _largest_ratio(trainer: GRPOTrainer, model: torch.nn.Module, inputs: dict[str, Any]) -> float:
    """exp(log p - log p again), the one farthest from 1, as the policy is scored for the loss and for the old log-probs."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    keep = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        pair = [trainer._get_per_token_logps_and_entropies(model, ids, mask, keep)[0] for _ in range(2)]
    difference = (pair[0] - pair[1])[inputs["completion_mask"].bool()]
    return float(difference[difference.abs().argmax()].exp()) if difference.numel() else 1.0
