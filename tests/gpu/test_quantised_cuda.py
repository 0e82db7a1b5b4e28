"""A 4-bit base under LoRA on a CUDA device, patched beside stock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from bitsandbytes.nn import Linear4bit
from tiny import tiny_model, tiny_trainer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from trl import GRPOTrainer
from twins import trained_parameters

import fastgrpo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def quantised(folder: Path) -> PreTrainedModel:
    tiny_model("qwen3").save_pretrained(folder)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cuda"}
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_four_bit_base_trains_and_starts_as_stock_does(checkpointing, tmp_path):
    def train(patched: bool) -> tuple[GRPOTrainer, dict[str, torch.Tensor]]:
        trainer = tiny_trainer(
            tmp_path,
            model=quantised(tmp_path / "saved"),
            lora=True,
            use_cpu=False,
            bf16=True,
            max_steps=3,
            learning_rate=0.05,
            gradient_checkpointing=checkpointing,
        )
        before = trained_parameters(trainer)
        if patched:
            assert fastgrpo.patch(trainer).layout == "varlen"
        trainer.train()
        return trainer, before

    stock, _ = train(False)
    patched, before = train(True)
    base = patched.model.get_base_model()
    assert any(isinstance(module, Linear4bit) for module in base.modules())
    first, ours = stock.state.log_history[0], patched.state.log_history[0]
    assert list(stock._logs["completion"])[:8] == list(patched._logs["completion"])[:8]
    for name, limit in {"reward": 1e-6, "entropy": 2e-2, "loss": 2e-2, "grad_norm": 0.1}.items():
        assert ours[name] == pytest.approx(first[name], rel=limit, abs=limit), name
    after = trained_parameters(patched)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert any(not torch.equal(after[name], value) for name, value in before.items())
