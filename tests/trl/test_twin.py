"""A patched trainer does what the stock one does: same seed, same completions, metrics and parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_trainer
from trl import GRPOTrainer
from twins import assert_twins, run

import fastgrpo

CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, adamw": {
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lora": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    },
    "full, adamw": {"optim": "adamw_torch", "learning_rate": 1e-2, "lora": False},
    "full": {"lora": False},
    "full, no chunk of more than a row": {"lora": False, "options": {"chunk_bytes": 1}},
    "lora, stock layout": {"options": {"packing": "none"}},
    "lora, left-packed": {"options": {"packing": "left"}},
    "lora, no padding, prompts not shared": {"options": {"packing": "varlen", "share_prefix": False}},
    "full, left-packed": {"lora": False, "options": {"packing": "left"}},
    "gradient checkpointing, left-packed": {"gradient_checkpointing": True, "options": {"packing": "left"}},
    "gradient checkpointing with reentrance": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "reference by disabled adapter": {"beta": 0.04},
    "reference model": {"beta": 0.04, "lora": False, "model": "saved"},
    "replayed batches": {"num_iterations": 2, "beta": 0.04},
    "steps_per_generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "vespo": {"loss_type": "vespo", "num_iterations": 2},
    "sequence level": {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
    "entropy bonus": {"entropy_coef": 0.05},
    "entropy bonus, full": {"entropy_coef": 0.05, "lora": False},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": 4.0},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "num_iterations": 2},
    "truncated completions masked": {"mask_truncated_completions": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "gradient checkpointing, full": {"gradient_checkpointing": True, "lora": False},
    "pad token is eos token": {"pad_is_eos": True},
    "completions of one token": {"max_completion_length": 1},
    "fp32 head": {"cast_lm_head_to_fp32": True, "lora": False},
    "trained copy of the head": {
        "lora": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "beta": 0.04,
    },
    "square head": {"model": "square head"},
    "qwen2 tied": {"model": "qwen2 tied", "lora": False},
    "qwen2 tied, lora": {"model": "qwen2 tied"},
    "qwen3": {"model": "qwen3"},
    "gemma2 softcap": {"model": "gemma2 softcap"},
    "gemma2 softcap, full": {"model": "gemma2 softcap", "lora": False},
    "mistral window": {"model": "mistral window"},
    "mistral window, full": {"model": "mistral window", "lora": False},
    "cohere scale": {"model": "cohere scale"},
    "granite divide": {"model": "granite divide"},
    "phi bias": {"model": "phi bias"},
    "phi bias, full": {"model": "phi bias", "lora": False},
}


@pytest.mark.parametrize("case", CASES)
def test_patched_training_equals_stock_training(case, tmp_path):
    settings = dict(CASES[case])
    stock, before = run(tmp_path, patched=False, **{k: v for k, v in settings.items() if k != "options"})
    patched, _ = run(tmp_path, patched=True, **settings)
    assert_twins(stock, patched, before, limit=5e-3 if case == "full, adamw" else 1e-4)
    assert any("loss" in line and line["grad_norm"] > 0 for line in stock.state.log_history if "grad_norm" in line)


@pytest.mark.parametrize("model", ["llama", "qwen2 tied", "gemma2 softcap", "phi bias"])
def test_first_step_gradients_of_full_fine_tuning_agree_to_rounding(model, tmp_path):
    gradients = []
    for patched in (False, True):
        trainer = tiny_trainer(tmp_path, model=model, lora=False, max_steps=1, learning_rate=0.0)
        if patched:
            fastgrpo.patch(trainer)
        seen: dict[str, torch.Tensor] = {}
        step = trainer.training_step

        def record(model, inputs, num_items_in_batch, step=step, seen=seen, trainer=trainer):
            loss = step(model, inputs, num_items_in_batch)
            seen.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
            return loss

        trainer.training_step = record
        trainer.train()
        gradients.append(seen)
    stock, ours = gradients
    assert stock.keys() == ours.keys() and stock
    for name, grad in stock.items():
        assert (grad - ours[name]).norm() <= 1e-4 * grad.norm() + 1e-9, name


def test_a_subclass_with_its_own_loss_may_differentiate_the_entropy(tmp_path):
    class Exploring(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True
            )
            weights = inputs["completion_mask"] * inputs["advantages"].unsqueeze(1)
            bonus = (entropies * inputs["completion_mask"]).sum()
            return -(logps * weights).sum() / 100 - 0.001 * bonus

    stock, before = run(tmp_path, patched=False, trainer_class=Exploring)
    patched, _ = run(tmp_path, patched=True, trainer_class=Exploring)
    assert_twins(stock, patched, before, limit=1e-4)


def test_a_subclass_that_wraps_the_scoring_method_is_still_called(tmp_path):
    calls = []

    class Counting(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            calls.append(1)
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    stock, before = run(tmp_path, patched=False, trainer_class=Counting)
    count = len(calls)
    patched, _ = run(tmp_path, patched=True, trainer_class=Counting)
    assert len(calls) == 2 * count
    assert_twins(stock, patched, before, limit=1e-4)


def test_gpt2_is_scored_at_its_real_positions(tmp_path):
    """TRL pads on the left and gives GPT-2 no positions; patched log-probs are those of the unpadded row."""
    trainer = tiny_trainer(tmp_path, model="gpt2")
    trainer.model.eval()
    prompt, completion = [5, 6, 7], [8, 9, 10, 11]
    padding = 4
    ids = torch.tensor([[0] * padding + prompt + completion])
    mask = torch.tensor([[0] * padding + [1] * 7])
    with torch.no_grad():
        logits = trainer.model(input_ids=ids[:, padding:]).logits[0, 2:-1] / 0.9
        truth = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        with fastgrpo.patch(trainer):
            ours, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)
        stock, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)
    assert (ours[0] - truth).abs().max() < 1e-5
    assert (stock[0] - truth).abs().max() > 1e-3


def test_training_can_be_patched_and_unpatched_in_between(tmp_path):
    stock, before = run(tmp_path, patched=False, max_steps=6)
    trainer = tiny_trainer(tmp_path, max_steps=6)

    class Toggle(__import__("transformers").TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (fastgrpo.unpatch if state.global_step % 2 == 0 else fastgrpo.patch)(trainer)

    trainer.add_callback(Toggle())
    trainer.train()
    assert_twins(stock, trainer, before, limit=1e-4)


def test_evaluation_before_and_a_second_training_after(tmp_path):
    from datasets import Dataset

    def both(patched: bool) -> tuple[GRPOTrainer, dict, list[dict]]:
        trainer = tiny_trainer(
            tmp_path,
            max_steps=2,
            gradient_accumulation_steps=4,
            per_device_eval_batch_size=4,
            eval_dataset=Dataset.from_dict({"prompt": ["1+1=", "what is 23 plus 4?"]}),
        )
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        if patched:
            fastgrpo.patch(trainer)
        metrics = [trainer.evaluate()]
        trainer.train()
        metrics.append(trainer.evaluate())
        trainer.train()
        return trainer, before, copy.deepcopy(metrics)

    stock, before, stock_metrics = both(False)
    patched, _, patched_metrics = both(True)
    assert_twins(stock, patched, before, limit=1e-4)
    for ours, theirs in zip(patched_metrics, stock_metrics, strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4, abs=1e-6)
