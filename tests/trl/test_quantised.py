"""A 4-bit base under LoRA: its head stays a plain Linear and everything else holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_trainer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from trl import GRPOTrainer
from twins import assert_twins, trained_parameters

import fastgrpo

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def quantised(folder: Path, **options: Any) -> PreTrainedModel:
    tiny_model().save_pretrained(folder)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **options
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )


def trained(folder: Path, patched: bool, **config: Any) -> tuple[GRPOTrainer, dict[str, torch.Tensor]]:
    trainer = tiny_trainer(folder, model=quantised(folder / "saved"), **config)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL makes them bf16, which rounds far more than twins may differ
            parameter.data = parameter.data.float()
    before = trained_parameters(trainer)
    if patched:
        fastgrpo.patch(trainer)
    trainer.train()
    return trainer, before


@pytest.mark.parametrize("config", [{"beta": 0.04}, {"entropy_coef": 0.05, "gradient_checkpointing": True}])
def test_a_four_bit_base_trains_as_stock_does(config, tmp_path):
    stock, before = trained(tmp_path, False, **config)
    patched, _ = trained(tmp_path, True, **config)
    base = patched.model.get_base_model()
    assert any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in base.modules())
    assert type(base.get_output_embeddings()) is torch.nn.Linear
    assert_twins(stock, patched, before)


def test_adapters_in_bf16_as_trl_makes_them_train_as_stock_up_to_their_rounding(tmp_path):
    lines = []
    for patched in (False, True):
        trainer = tiny_trainer(tmp_path, model=quantised(tmp_path / "saved"), max_steps=1)
        assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.bfloat16}
        if patched:
            fastgrpo.patch(trainer)
        trainer.train()
        lines.append(trainer.state.log_history[0])
    stock, ours = lines
    for key in ("loss", "entropy", "grad_norm"):
        assert ours[key] == pytest.approx(stock[key], rel=1e-2, abs=1e-3), key


def test_a_four_bit_head_is_refused(tmp_path):
    model = quantised(tmp_path / "saved", llm_int8_skip_modules=["no such module"])
    assert isinstance(model.get_output_embeddings(), bitsandbytes.nn.Linear4bit)
    with pytest.raises(fastgrpo.UnsupportedError, match=r"Linear4bit.*quantisation"):
        fastgrpo.patch(tiny_trainer(tmp_path, model=model))
