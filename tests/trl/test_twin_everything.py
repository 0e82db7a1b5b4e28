"""Every option that leaves a loss as it is, switched on at once: training is stock's."""

from __future__ import annotations

from typing import Any

import pytest
from sampler import SampledTrainer
from tiny_images import vision_settings
from twins import assert_same_parameters, run, without_ours

import fastgrpo
from fastgrpo.trl import compat

EVERYTHING = {
    "chunk_bytes": 4000,
    "mini_batch_size": 2,
    "max_tokens_per_microbatch": 40,
    "skip_zero_advantage": True,
    "offload_activations": True,
    "run_log": True,
    "on_stale": "error",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"lora": False},
    "grpo": {"loss_type": "grpo"},
    "full, two-sided clipping, replayed": {"lora": False, "delta": 1.5, "num_iterations": 2},
    "micro-batches smaller than a group": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "tied": {"model": "qwen2 tied", "lora": False},
    "window": {"model": "mistral window"},
    "a sampler's correction": {"trainer_class": SampledTrainer, "vllm_importance_sampling_mode": "token_truncate"},
    "pictures": vision_settings([1, 3, 1, 2]) if compat.has_fused_head() else {"model": "qwen3"},
}


def every_other_group_is_equal(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rows of four completions a prompt: half of them have no advantage."""
    return [len(set(ids)) / 4 if row // 4 % 2 else 1.0 for row, ids in enumerate(completion_ids)]


@pytest.mark.parametrize("case", SETTINGS)
def test_with_everything_switched_on_training_is_stock_s(case, tmp_path):
    settings = {"reward": every_other_group_is_equal, "gradient_checkpointing": True, **SETTINGS[case]}
    stock, before = run(tmp_path / "stock", patched=False, **settings)
    patched, _ = run(tmp_path / "patched", patched=True, options=EVERYTHING, **settings)
    assert fastgrpo.patch(patched).layout == "varlen"
    assert list(stock._logs["completion"]) == list(patched._logs["completion"])
    shares = [line["frac_reward_zero_std"] for line in stock.state.log_history if "frac_reward_zero_std" in line]
    assert 0.5 in shares, shares
    for ours, theirs in zip(patched.state.log_history, stock.state.log_history, strict=True):
        assert without_ours(ours).keys() == theirs.keys()
        for key in theirs.keys() & {"loss", "reward", "grad_norm", "clip_ratio/region_mean", "num_tokens"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
    assert_same_parameters(stock, patched, before)
