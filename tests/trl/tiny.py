"""Tiny models, a character tokenizer and trainers, built in-process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from trl import GRPOConfig, GRPOTrainer

CHARACTERS = "0123456789+-= abcdefghijklmnopqrstuvwxyz?."
PROMPTS = ["1+1=", "what is 23 plus 4?", "a", "7-3=", "hello there.", "12 + 13 ="]

# The whole message by its role's first letter; an assistant's tool calls stand behind its words.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }} "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in m['tool_calls'] or [] %} {{ call['function']['name'] }} {{ call['function']['arguments'] }}{% endfor %}"
    ".{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)

_SPECIAL = ["<pad>", "<eos>", "<unk>"]
_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VISION_IDS = {token: len(_SPECIAL) + len(CHARACTERS) + index for index, token in enumerate(_VISION)}

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


def _vision_language(model_class, config_class, tower: dict[str, Any], **text: Any) -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    return model_class(
        config_class(
            text_config={**_DECODER, "rope_parameters": rope, **text},
            vision_config={"depth": 2, "num_heads": 2, **tower},
            image_token_id=VISION_IDS["<|image_pad|>"],
            video_token_id=VISION_IDS["<|video_pad|>"],
            vision_start_token_id=VISION_IDS["<|vision_start|>"],
            vision_end_token_id=VISION_IDS["<|vision_end|>"],
        )
    )


_TOWER = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
_DEEP_TOWER = {**_TOWER, "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


MODELS = {
    "llama": lambda: _decoder(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False),
    "square head": lambda: _decoder(
        LlamaForCausalLM, LlamaConfig, hidden_size=64, vocab_size=64, tie_word_embeddings=False
    ),
    # A number of words that is no other size of it, for who counts products with the head.
    "wide head": lambda: _decoder(
        LlamaForCausalLM, LlamaConfig, hidden_size=64, vocab_size=1984, tie_word_embeddings=False
    ),
    "qwen2 tied": lambda: _decoder(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True),
    "qwen3": lambda: _decoder(Qwen3ForCausalLM, Qwen3Config, head_dim=8, tie_word_embeddings=False),
    "gemma2 softcap": lambda: _decoder(Gemma2ForCausalLM, Gemma2Config, head_dim=8, final_logit_softcapping=5.0),
    "mistral window": lambda: _decoder(MistralForCausalLM, MistralConfig, sliding_window=5, tie_word_embeddings=False),
    "cohere scale": lambda: _decoder(CohereForCausalLM, CohereConfig, logit_scale=0.25),
    "granite divide": lambda: _decoder(GraniteForCausalLM, GraniteConfig, logits_scaling=3.0),
    "phi bias": lambda: _decoder(PhiForCausalLM, PhiConfig, num_key_value_heads=4),
    "hyperclova x scale": lambda: _decoder(
        HyperCLOVAXForCausalLM, HyperCLOVAXConfig, logits_scaling=0.3, tie_word_embeddings=False
    ),
    "falcon h1 scale": lambda: _decoder(
        FalconH1ForCausalLM,
        FalconH1Config,
        lm_head_multiplier=0.3,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    "qwen3 moe": lambda: _decoder(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        head_dim=8,
        **_EXPERTS,
    ),
    "qwen2 vl": lambda: _vision_language(
        Qwen2VLForConditionalGeneration, Qwen2VLConfig, {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    ),
    "qwen2.5 vl": lambda: _vision_language(
        Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, {**_TOWER, "fullatt_block_indexes": [1]}
    ),
    "qwen3 vl": lambda: _vision_language(Qwen3VLForConditionalGeneration, Qwen3VLConfig, _DEEP_TOWER, head_dim=8),
    "qwen3 vl moe": lambda: _vision_language(
        Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, _DEEP_TOWER, head_dim=8, **_EXPERTS
    ),
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


def tiny_tokenizer(
    pad_is_eos: bool = False,
    vision: bool = False,
    tokenizer_class: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast,
) -> PreTrainedTokenizerFast:
    """One token a character."""
    words = [*_SPECIAL, *CHARACTERS, *(_VISION if vision else [])]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*_SPECIAL, *(_VISION if vision else [])])
    return tokenizer_class(
        tokenizer_object=tokenizer,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def many_letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between completions: more different characters, and some a."""
    texts = [
        text if isinstance(text, str) else "".join(m["content"] for m in text if m["role"] == "assistant")
        for text in completions
    ]
    return [len(set(text)) / 5 + (0.3 if "a" in text else 0.0) for text in texts]


def no_two_equal(completions: list[str], **_: Any) -> list[float]:
    """No advantage is 0: such a row is computed apart, without a gradient."""
    return [len(set(text)) / 5 + 0.01 * index + 0.003 * index**2 for index, text in enumerate(completions)]


def tiny_trainer(
    output_dir: Path,
    model: str | PreTrainedModel = "llama",
    lora: bool | LoraConfig = True,
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    pad_is_eos: bool = False,
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | None = None,
    reward: Callable[..., list[float]] = many_letters,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    tools: list[Callable] | None = None,
    environment_factory: Callable | None = None,
    rollout_func: Callable | None = None,
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
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(output_dir), **settings),
        train_dataset=train_dataset or Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=eval_dataset,
        processing_class=processing_class or tiny_tokenizer(pad_is_eos),
        peft_config=lora or None,
        tools=tools,
        environment_factory=environment_factory,
        rollout_func=rollout_func,
    )


def checkpointed(output_dir: Path, **config: Any) -> GRPOTrainer:
    """A tiny trainer whose model checkpoints already, as it would once training has begun."""
    trainer = tiny_trainer(output_dir, gradient_checkpointing=True, **config)
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return trainer
