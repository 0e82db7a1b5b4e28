"""Precision that `patch_trl` chooses, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from tiny import tiny_model, tiny_trainer
from twins import trained_parameters

import fastgrpo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def _patched_trl(monkeypatch):
    for variable in ("FASTGRPO_FORCE_FLOAT32", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(variable, raising=False)
    fastgrpo.patch_trl(tuned_defaults=False)
    yield
    fastgrpo.unpatch_trl()


def train(tmp_path, **settings):
    trainer = tiny_trainer(tmp_path, use_cpu=False, max_steps=3, learning_rate=0.05, **{"bf16": None, **settings})
    before = trained_parameters(trainer)
    trainer.train()
    after = trained_parameters(trainer)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    return trainer


@pytest.mark.parametrize("lora", [True, False])
def test_a_run_that_chose_nothing_trains_in_what_the_device_is_best_at(lora, tmp_path):
    trainer = train(tmp_path, model="qwen3", lora=lora)
    best = "bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp16"
    assert trainer.accelerator.mixed_precision == best
    assert (trainer.accelerator.scaler is not None) == (best == "fp16")


@pytest.mark.parametrize("lora", [True, False])
def test_a_model_in_float16_trains_with_a_gradient_scaler(lora, tmp_path):
    trainer = train(tmp_path, model=tiny_model("qwen3").half(), lora=lora, fp16=True)
    assert trainer.accelerator.scaler is not None
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}


def test_forced_float32_trains_without_autocast(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGRPO_FORCE_FLOAT32", "1")
    trainer = train(tmp_path, model=tiny_model("qwen3").bfloat16(), lora=False, bf16=True)
    assert trainer.accelerator.mixed_precision == "no"
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
