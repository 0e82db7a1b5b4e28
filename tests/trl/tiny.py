"""Tiny models, a character tokenizer and trainers, built in-process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

CHARACTERS = "0123456789+-= abcdefghijklmnopqrstuvwxyz?."
PROMPTS = ["1+1=", "what is 23 plus 4?", "a", "7-3=", "hello there.", "12 + 13 ="]

_DECODER = {
    "vocab_size": 61,  # odd, and more than the tokenizer has
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def _decoder(model_class, config_class, **changes: Any) -> PreTrainedModel:
    return model_class(config_class(**{**_DECODER, **changes}))


MODELS = {
    "llama": lambda: _decoder(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False),
    "square head": lambda: _decoder(
        LlamaForCausalLM, LlamaConfig, hidden_size=64, vocab_size=64, tie_word_embeddings=False
    ),
    "qwen2 tied": lambda: _decoder(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True),
    "qwen3": lambda: _decoder(Qwen3ForCausalLM, Qwen3Config, head_dim=8, tie_word_embeddings=False),
    "gemma2 softcap": lambda: _decoder(Gemma2ForCausalLM, Gemma2Config, head_dim=8, final_logit_softcapping=5.0),
    "mistral window": lambda: _decoder(MistralForCausalLM, MistralConfig, sliding_window=5, tie_word_embeddings=False),
    "cohere scale": lambda: _decoder(CohereForCausalLM, CohereConfig, logit_scale=0.25),
    "granite divide": lambda: _decoder(GraniteForCausalLM, GraniteConfig, logits_scaling=3.0),
    "phi bias": lambda: _decoder(PhiForCausalLM, PhiConfig, num_key_value_heads=4),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            eos_token_id=1,
            bos_token_id=None,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    ),
}


def tiny_model(name: str = "llama") -> PreTrainedModel:
    """A model whose distributions are far from uniform, the same at every call."""
    torch.manual_seed(1)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
        head_bias = getattr(model.get_output_embeddings(), "bias", None)
        if head_bias is not None:
            head_bias.normal_()
    return model


def tiny_tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """One token a character."""
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<eos>" if pad_is_eos else "<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def many_letters(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions: more different characters, and some a."""
    return [len(set(text)) / 5 + (0.3 if "a" in text else 0.0) for text in completions]


def tiny_trainer(
    output_dir: Path,
    model: str | PreTrainedModel = "llama",
    lora: bool | LoraConfig = True,
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    pad_is_eos: bool = False,
    eval_dataset: Dataset | None = None,
    **config: Any,
) -> GRPOTrainer:
    """A float32 CPU trainer that does six optimizer steps with rows of very different lengths."""
    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
        "max_steps": 6,
        # Adam divides gradients that are pure rounding (a key bias, say) by their own size; SGD shows them as they are.
        "optim": "sgd",
        "learning_rate": 0.5,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "temperature": 0.9,
        "seed": 3,
        **config,
    }
    if lora is True:
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    return trainer_class(
        model=tiny_model(model) if isinstance(model, str) else model,
        reward_funcs=many_letters,
        args=GRPOConfig(output_dir=str(output_dir), **settings),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=eval_dataset,
        processing_class=tiny_tokenizer(pad_is_eos),
        peft_config=lora or None,
    )
