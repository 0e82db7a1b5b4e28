"""Rows with pictures without padding on a CUDA device, patched beside stock."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from tiny import tiny_trainer
from tiny_images import vision_settings
from twins import trained_parameters

import fastgrpo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", ["qwen2.5 vl", "qwen3 vl"])
def test_pictures_train_and_start_as_stock_does(family, lora, checkpointing, tmp_path):
    def train(patched: bool):
        trainer = tiny_trainer(
            tmp_path,
            lora=lora,
            use_cpu=False,
            bf16=True,
            max_steps=3,
            num_generations=4,
            learning_rate=0.05,
            gradient_checkpointing=checkpointing,
            **vision_settings([1, 3, 1, 2], family),
        )
        before = trained_parameters(trainer)
        if patched:
            assert fastgrpo.patch(trainer).layout == "varlen"
        trainer.train()
        return trainer, before

    stock, _ = train(False)
    patched, before = train(True)
    first, ours = stock.state.log_history[0], patched.state.log_history[0]
    assert list(stock._logs["completion"])[:8] == list(patched._logs["completion"])[:8]
    for name, limit in {"reward": 1e-6, "entropy": 2e-2, "loss": 2e-2, "grad_norm": 0.1}.items():
        assert ours[name] == pytest.approx(first[name], rel=limit, abs=limit), name
    after = trained_parameters(patched)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert any(not torch.equal(after[name], value) for name, value in before.items())
