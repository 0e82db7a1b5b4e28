"""A 4-bit base under LoRA on a CUDA device, patched beside stock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from bitsandbytes.nn import Linear4bit
from tiny import tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from twins import twins_in_16_bit

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
    _, patched = twins_in_16_bit(
        tmp_path, lambda: quantised(tmp_path / "saved"), bf16=True, gradient_checkpointing=checkpointing
    )
    base = patched.model.get_base_model()
    assert any(isinstance(module, Linear4bit) for module in base.modules())
