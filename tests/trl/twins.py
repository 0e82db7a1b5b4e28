"""Training the same thing stock and patched, and comparing what came out.

Metrics within rtol 1e-4 + atol 1e-6, parameters within 1e-4 of their largest change; within 5e-3 of it for full
fine-tuning with Adam, which amplifies the rounding of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import many_letters, tiny_model, tiny_trainer
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import GRPOTrainer

import fastgrpo

TIMINGS = ("time", "runtime", "per_second")
OURS = ("rollout/", "time/", "fastgrpo/")


def trained_parameters(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """Copies of everything that has a gradient, by name."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def run(
    output_dir: Path,
    patched: bool,
    options: dict[str, Any] | None = None,
    then: Callable[[], None] | None = None,
    **settings: Any,
) -> tuple[GRPOTrainer, dict[str, torch.Tensor]]:
    """A tiny trainer after `train()`, and its parameters before; `then` is called once it is patched."""
    if settings.get("model") == "saved":
        # TRL builds the reference from the folder the policy came from.
        folder = output_dir / "saved"
        tiny_model().save_pretrained(folder)
        settings["model"] = AutoModelForCausalLM.from_pretrained(folder)
    trainer = tiny_trainer(output_dir, **settings)
    before = trained_parameters(trainer)
    if patched:
        fastgrpo.patch(trainer, fastgrpo.Options(**(options or {})))
    if then is not None:
        then()
    trainer.train()
    return trainer, before


def twins(
    output_dir: Path, limit: float = 1e-4, options: dict[str, Any] | None = None, **settings: Any
) -> tuple[GRPOTrainer, GRPOTrainer]:
    """A stock and a patched trainer after the same training, compared."""
    stock, before = run(output_dir, patched=False, **settings)
    patched, _ = run(output_dir, patched=True, options=options, **settings)
    assert_twins(stock, patched, before, limit)
    return stock, patched


def twins_in_16_bit(
    output_dir: Path, build: Callable[[], PreTrainedModel] | None = None, **settings: Any
) -> tuple[GRPOTrainer, GRPOTrainer]:
    """
    A stock and a patched trainer after three steps on the device: rounding soon parts them, but they start alike, and train.

    Args:
        output_dir: of both trainers.
        build: the model, once for each; None = the one that `settings` names.
        settings: of `tiny_trainer`, with `bf16=True` or `fp16=True`; on a CPU with `use_cpu=True`.
    """
    runs, rewarded = [], []
    reward = settings.pop("reward", many_letters)

    def remember(completions: list[Any], **columns: Any) -> list[float]:
        rewarded[-1].append(list(completions))
        return reward(completions=completions, **columns)

    settings = {"use_cpu": False, "max_steps": 3, "learning_rate": 0.05, "reward": remember, **settings}
    for patch in (False, True):
        rewarded.append([])
        model = {} if build is None else {"model": build()}
        runs.append(run(output_dir, patch, **model, **settings))
    (stock, _), (patched, before) = runs
    assert fastgrpo.patch(patched).layout == "varlen"
    # Those of the first step: weights that differ by a rounding draw other tokens sooner or later.
    assert rewarded[0][0] == rewarded[1][0] and len(rewarded[0][0]) == 8
    first, ours = stock.state.log_history[0], patched.state.log_history[0]
    # On a CPU in bf16, norms of tiny models differed by at most 1.4e-3, entropies by 1.1e-5.
    for name, limit in {"reward": 1e-6, "entropy": 2e-2, "loss": 2e-2, "grad_norm": 2e-2}.items():
        overflowed = settings.get("fp16") and not math.isfinite(first[name])  # as the scaler's first steps do
        assert overflowed or ours[name] == pytest.approx(first[name], rel=limit, abs=limit), name
    after = trained_parameters(patched)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    return stock, patched


def assert_twins(
    stock: GRPOTrainer, patched: GRPOTrainer, before: dict[str, torch.Tensor], limit: float = 1e-4
) -> None:
    """Same completions, metrics and parameters."""
    assert list(stock._logs["completion"]) == list(patched._logs["completion"])
    assert_same_metrics(stock.state.log_history, patched.state.log_history)
    assert_same_parameters(stock, patched, before, limit)


def assert_same_metrics(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """The same lines with the same keys and numbers, but for what the patch adds; what is a time may differ."""
    assert len(stock) == len(ours)
    for our_line, stock_line in zip(map(without_ours, ours), map(without_ours, stock), strict=True):
        assert our_line.keys() == stock_line.keys()
        for key, value in stock_line.items():
            if isinstance(value, float) and not any(word in key for word in TIMINGS):
                assert our_line[key] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), key


def without_ours(line: dict[str, Any]) -> dict[str, Any]:
    """An entry without what a patched trainer adds."""
    return {key: value for key, value in line.items() if not key.startswith(OURS)}


def assert_same_parameters(
    stock: GRPOTrainer, patched: GRPOTrainer, before: dict[str, torch.Tensor], limit: float = 1e-4
) -> None:
    """Every parameter within `limit` of its largest change."""
    stock_parameters, patched_parameters = (dict(t.model.named_parameters()) for t in (stock, patched))
    for name, start in before.items():
        change = (stock_parameters[name] - start).abs().max()
        difference = (stock_parameters[name] - patched_parameters[name]).abs().max()
        one_rounding = torch.finfo(torch.float32).eps * start.abs().max()
        assert difference <= limit * change + one_rounding, f"{name}: {difference:.2e} of {change:.2e}"
