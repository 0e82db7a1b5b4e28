"""Rows with pictures without padding on a CUDA device, patched beside stock."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from tiny_images import vision_settings
from twins import twins_in_16_bit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", ["qwen2.5 vl", "qwen3 vl"])
def test_pictures_train_and_start_as_stock_does(family, lora, checkpointing, tmp_path):
    settings = vision_settings([1, 3, 1, 2], family)
    twins_in_16_bit(tmp_path, lora=lora, bf16=True, num_generations=4, gradient_checkpointing=checkpointing, **settings)
