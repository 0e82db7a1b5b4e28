"""The demo's trainer: stock TRL with the recipe's numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from fastgrpo.tools.demo.recipe import Recipe
from fastgrpo.tools.demo.tasks import Sum


def grpo_config(recipe: Recipe, steps: int, seed: int, folder: Path, device: str = "cpu") -> GRPOConfig:
    """TRL's configuration for a silent run: float32 on the CPU, on a GPU with bfloat16 autocast where it has that."""
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        seed=seed,
        per_device_train_batch_size=recipe.prompts_per_step * recipe.generations,
        num_generations=recipe.generations,
        max_completion_length=recipe.max_completion_length,
        learning_rate=recipe.learning_rate,
        warmup_steps=min(recipe.warmup_steps, steps // 2),
        use_cpu=device == "cpu",
        bf16=device != "cpu" and torch.cuda.is_bf16_supported(including_emulation=False),
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    if config.n_gpu > 1:
        # Without this transformers takes every GPU it sees for its DataParallel, which TRL refuses.
        config._n_gpu = 1
    return config


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sums: Sequence[Sum],
    recipe: Recipe,
    config: GRPOConfig,
    reward: Callable[..., list[float]],
    callbacks: Sequence[TrainerCallback],
) -> GRPOTrainer:
    """A trainer on `sums`; what it prints of its own is taken off."""
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [s.prompt for s in sums], "answer": [s.answer for s in sums]}),
        processing_class=tokenizer,
        peft_config=_lora(model, recipe.lora_rank) if recipe.lora_rank else None,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _lora(model: PreTrainedModel, rank: int) -> LoraConfig:
    # Adapters in the upper half of the layers learn these tasks as well as in all, and backward ends there.
    layers = getattr(model.get_decoder(), "layers", [])
    upper = {
        module for layer in layers[len(layers) // 2 :] for module in layer.modules() if isinstance(module, nn.Linear)
    }
    names = [name for name, module in model.named_modules() if module in upper]
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names or "all-linear")
