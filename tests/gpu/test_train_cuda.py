"""Whole training runs under TRL on a CUDA device, patched beside stock."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from products import head_products
from tiny import no_two_equal, tiny_trainer
from twins import twins_in_16_bit

import fastgrpo
from fastgrpo.kernels.backends import Backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(
    ("precision", "model"),
    [("bf16", "qwen3"), ("fp16", "qwen3"), ("bf16", "square head")],
    ids=["bf16", "fp16", "bf16, a vocabulary that the fused head serves"],
)
def test_mixed_precision_trains_and_starts_as_stock_does(precision, model, lora, checkpointing, tmp_path):
    settings = {"bf16": False, precision: True, "gradient_checkpointing": checkpointing}
    twins_in_16_bit(tmp_path, model=model, lora=lora, **settings)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_full_fine_tuning_takes_three_products_of_the_head_a_micro_batch(precision, tmp_path):
    settings = {"bf16": False, precision: True, "use_cpu": False, "lora": False, "reward": no_two_equal}
    trainer = tiny_trainer(tmp_path, model="wide head", max_steps=3, **settings)
    with fastgrpo.patch(trainer), head_products(trainer, words=1984) as counts:
        trainer.train()
        assert fastgrpo.backends()["trainer loss"] == Backend("in one pass with its gradients", "cuda", "")
    assert counts == [3] * 6


def test_backends_name_the_kernels_while_a_trainer_is_patched(tmp_path):
    with fastgrpo.patch(tiny_trainer(tmp_path, model="qwen3", use_cpu=False, bf16=True)):
        backends = fastgrpo.backends()
        assert backends["packing"].device == "cuda"
        assert backends["trainer head"].device == "cuda"


def test_an_out_of_memory_error_is_survived_with_a_smaller_budget():
    hidden = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 64, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 32000, (4096,), device="cuda")
    expected = fastgrpo.linear_logprob(hidden, weight, targets, chunk_bytes=16 << 20).logprobs.detach()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    # Leaves room for a chunk of 16 MiB and not for one of 512.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (128 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            fastgrpo.linear_logprob(hidden, weight, targets, chunk_bytes=512 << 20)
        result = fastgrpo.linear_logprob(hidden, weight, targets, chunk_bytes=16 << 20)
        result.logprobs.sum().backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(result.logprobs, expected)
    assert bool(hidden.grad.isfinite().all())
