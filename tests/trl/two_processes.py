"""One of two gloo processes: trains every case stock and patched under DDP, compares, and says which cases are equal.

test_two_processes.py starts it, with the rank in the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from sampler import SampledTrainer
from tiny import tiny_trainer
from tiny_images import vision_settings
from trl import GRPOTrainer
from twins import assert_same_metrics, assert_same_parameters, trained_parameters

import fastgrpo
from fastgrpo.runlog import read_run_logs

EOS = 1


class NeverEndsOnTheSecondRank(GRPOTrainer):
    """With mask_truncated_completions all micro-batches of rank 1 are empty, and those of rank 0 are not."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        rows, logprobs = super()._generate_single_turn(*args, **kwargs)
        if self.accelerator.process_index == 1:
            return [[token if token != EOS else 5 for token in row] for row in rows], logprobs
        return [[*row[:-1], EOS] for row in rows], logprobs


class SampledOnTheFirstRank(SampledTrainer):
    """With mask_truncated_completions all of rank 1's completions are masked: no sampler's ratio, no difference there."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        rows, logprobs = super()._generate_single_turn(*args, **kwargs)
        last = 5 if self.accelerator.process_index == 1 else EOS
        return [[*row[:-1], last] for row in rows], logprobs


CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, checkpointing": {"gradient_checkpointing": True, "beta": 0.04},
    "full": {"lora": False, "entropy_coef": 0.05},
    "full, checkpointing": {"lora": False, "gradient_checkpointing": True, "loss_type": "grpo"},
    "an empty rank": {"trainer_class": NeverEndsOnTheSecondRank, "mask_truncated_completions": True},
    "an empty rank, full": {
        "trainer_class": NeverEndsOnTheSecondRank,
        "mask_truncated_completions": True,
        "lora": False,
        "model": "gemma2 softcap",
    },
    "a sampler, an empty rank": {
        "trainer_class": SampledOnTheFirstRank,
        "mask_truncated_completions": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "trained copy of the head": {
        "lora": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "beta": 0.04,
    },
    "mixture of experts": {"model": "qwen3 moe", "router_aux_loss_coef": 0.1},
    "in parts": {"options": {"max_tokens_per_microbatch": 25}},
    "in parts, full, checkpointing": {
        "options": {"mini_batch_size": 2},
        "lora": False,
        "gradient_checkpointing": True,
        "ddp_find_unused_parameters": True,
    },
    "images in parts, checkpointing": {
        "options": {"mini_batch_size": 1},
        "gradient_checkpointing": True,
        **vision_settings([0, 1, 3, 1, 3, 1]),
    },
}

# Whose head trains and whose loss is row-local.
FUSED = {"full, checkpointing", "an empty rank, full", "trained copy of the head"}


def train(folder: Path, patched: bool, case: dict[str, Any]) -> tuple[GRPOTrainer, dict[str, torch.Tensor]]:
    settings = dict(case)
    options = settings.pop("options", {})
    trainer = tiny_trainer(folder, max_steps=3, **settings)
    before = trained_parameters(trainer)
    if patched:
        fastgrpo.patch(trainer, fastgrpo.Options(**options))
    trainer.train()
    return trainer, before


def tokens(trainer: GRPOTrainer) -> list[list[int]]:
    """Counted completion tokens of both ranks in each of the last micro-batches."""
    counts = torch.stack([batch["completion_mask"].sum() for batch in trainer._buffered_inputs])
    return trainer.accelerator.gather(counts[:, None].T).T.tolist()


def assert_tokens_are_this_process_s(trainer: GRPOTrainer, folder: Path) -> None:
    """Real and padded tokens agree, on each rank and in the first one's log, and all ranks' real ones are what TRL counts."""
    steps = [line for line in trainer.state.log_history if "reward" in line]
    real, padded = ([line[f"rollout/tokens_{name}"] for line in steps] for name in ("real", "padded"))
    assert all(0 < own <= all_of_it for own, all_of_it in zip(real, padded, strict=True)), (real, padded)
    everybody = trainer.accelerator.gather(torch.tensor([sum(real)]))
    assert everybody.sum() == steps[-1]["num_tokens"] and len(everybody) == 2
    if trainer.accelerator.is_main_process:
        logged = read_run_logs(folder)[-1].steps
        assert [(line["tokens_real"], line["tokens_padded"]) for line in logged] == list(zip(real, padded, strict=True))


def main(folder: Path) -> None:
    for case, settings in CASES.items():
        stock, before = train(folder, False, settings)
        patched, _ = train(folder, True, settings)
        assert isinstance(patched.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        route = patched._compute_loss.route
        assert not route.because and bool(route.checked) == (case in FUSED)
        assert [b["completion_ids"].tolist() for b in stock._buffered_inputs] == [
            b["completion_ids"].tolist() for b in patched._buffered_inputs
        ]
        assert_same_metrics(stock.state.log_history, patched.state.log_history)
        assert_same_parameters(stock, patched, before)
        lags = {line.get("rollout/policy_lag") for line in patched.state.log_history if "reward" in line}
        assert lags == ({None} if "trainer_class" in settings else {0}), lags  # an own sampler is of no known version
        assert_tokens_are_this_process_s(patched, folder)
        for name, parameter in trained_parameters(patched).items():
            other = parameter.clone()
            dist.broadcast(other, src=0)
            assert torch.equal(parameter, other), f"{name} differs between the ranks"
        counts = tokens(patched)
        assert any(first != second for first, second in counts), counts
        assert all((second == 0) == ("empty" in case) for _, second in counts), counts
        fastgrpo.unpatch(patched)
        print(f"equal: {case}", flush=True)
    dist.barrier()
    # Taking gloo down in order can wait for ever for a process that has already gone.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
