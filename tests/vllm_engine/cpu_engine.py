"""Trainers with a real vLLM engine beside them, and what that engine's weights say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl.generation.vllm_generation as engines
from datasets import Dataset
from peft import LoraConfig
from tiny import CHARACTERS, PROMPTS, many_letters, tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM, SamplingParams

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Every row of a rollout the tests score: characters, so that no special token stops anything.
ROW = [3 + (11 * index) % len(CHARACTERS) for index in range(24)]
_engines: dict[str, LLM] = {}


def save_tiny_model(folder: Path, seed: int = 1, tied: bool = True) -> Path:
    """A Qwen3 of two layers whose distributions are far from uniform: tied embeddings, fused q, k, v and gate, up in vLLM."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
            tie_word_embeddings=tied,
            max_position_embeddings=512,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def share_engines(monkeypatch: Any) -> None:
    """One engine a model and kind of it, in float32: a trainer that comes later writes its own weights into it."""

    def build(**arguments: Any) -> LLM:
        key = f"{arguments['model']} {arguments.get('enable_lora', False)}"
        if key not in _engines:
            _engines[key] = LLM(**{**arguments, "enforce_eager": True, "dtype": "float32", "max_num_seqs": 8})
        return _engines[key]

    monkeypatch.setattr(engines, "LLM", build)


def vllm_trainer(
    model: Path,
    output: Path,
    lora: LoraConfig | None = None,
    prompts: list[str] = PROMPTS,
    **config: Any,
) -> GRPOTrainer:
    """A float32 CPU trainer of ten steps, rates high enough for every step to show; without `lora`, trained in full."""
    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 8,
        "max_steps": 10,
        "optim": "sgd",
        "learning_rate": 0.5 if lora else 0.02,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 400,
        "model_init_kwargs": {"dtype": "float32"},
        "seed": 3,
        **config,
    }
    return GRPOTrainer(
        model=str(model),
        reward_funcs=many_letters,
        args=GRPOConfig(output_dir=str(output), **settings),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tiny_tokenizer(),
        peft_config=lora,
    )


def lora(**changes: Any) -> LoraConfig:
    """LoRA whose every matrix acts from the first step."""
    return LoraConfig(**{"r": 4, "target_modules": TARGETS, "init_lora_weights": False, "lora_alpha": 2, **changes})


def engine_logprobs(trainer: GRPOTrainer, row: list[int] = ROW) -> torch.Tensor:
    """What the engine says of a row's tokens but the first, as generation would run it."""
    sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    (output,) = trainer.vllm_generation.llm.generate([{"prompt_token_ids": row}], sampling, use_tqdm=False)
    return torch.tensor([output.prompt_logprobs[at][token].logprob for at, token in enumerate(row) if at])


@torch.no_grad()
def trainer_logprobs(trainer: GRPOTrainer, row: list[int] = ROW) -> torch.Tensor:
    """What the trainer's own model says of them."""
    ids = torch.tensor([row])
    logits = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, ids[0, 1:, None]).squeeze(1)


def worst_difference(trainer: GRPOTrainer) -> float:
    """Largest difference of a log-prob between engine and trainer (nats)."""
    return (engine_logprobs(trainer) - trainer_logprobs(trainer)).abs().max().item()


def base_weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """Copies of everything that is not an adapter."""
    prefix = getattr(trainer.model, "prefix", None)
    named = trainer.model.named_parameters()
    return {name: weight.detach().clone() for name, weight in named if prefix is None or prefix not in name}


def after_every_sync(trainer: GRPOTrainer, look: Callable[[], Any]) -> list[Any]:
    """Calls `look` after each hand-over of weights; its results."""
    seen: list[Any] = []
    sync = trainer.vllm_generation.sync_weights

    @functools.wraps(sync)
    def synced() -> None:
        sync()
        seen.append(look())

    trainer.vllm_generation.sync_weights = synced
    return seen
