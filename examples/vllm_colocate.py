"""GRPO with vLLM generating in the same process, on the same GPU.

Needs a GPU and vLLM: pip install "fastgrpo[vllm]".

python examples/vllm_colocate.py                       # Qwen2.5-1.5B with LoRA
python examples/vllm_colocate.py --vllm_gpu_memory_utilization 0.5 --max_steps 50
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from offline import TINY_STEPS, tiny_model, tiny_tokenizer
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, TrlParser

import fastgrpo.auto  # noqa: F401


@dataclass
class Script:
    """What is not TRL's."""

    model: str = field(default="Qwen/Qwen2.5-1.5B-Instruct", metadata={"help": "Name or path of the model."})
    tiny: bool = field(default=False, metadata={"help": "Train a toy model that is made on the spot."})


def parse(arguments: list[str] | None = None) -> tuple[Script, GRPOConfig]:
    """The settings of the run; a command line changes any of them."""
    parser = TrlParser((Script, GRPOConfig))
    parser.set_defaults(
        output_dir="vllm_colocate",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        # For vLLM's sampler; the temperature is also the one that completions are scored with.
        vllm_sampling_params={"temperature": 0.9, "min_p": 0.02, "repetition_penalty": 1.0},
        max_steps=0,  # not given
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=512,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    script, config = parser.parse_args_and_config(arguments)
    config.max_steps = config.max_steps or (TINY_STEPS if script.tiny else 200)
    return script, config


def few_words(completions: list[Any], **_: Any) -> list[float]:
    """Whether an answer keeps to fifty words."""
    return [1.0 if len(str(completion).split()) <= 50 else 0.0 for completion in completions]


def names_the_place(completions: list[Any], place: list[str], **_: Any) -> list[float]:
    """Whether an answer names what it was asked about."""
    return [float(name.lower() in str(completion).lower()) for completion, name in zip(completions, place, strict=True)]


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Trains; returns the trainer."""
    script, config = parse(arguments)
    places = ["the Alps", "Lake Victoria", "the Gobi", "the Danube", "Iceland", "the Amazon", "Java", "the Nile"]
    random.Random(0).shuffle(places)
    prompts = [
        [{"role": "user", "content": f"What would a child like to know about {place}? In at most fifty words."}]
        for place in places
    ]
    model, tokenizer, lora = script.model, None, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    if script.tiny:
        tokenizer = tiny_tokenizer()
        model = tiny_model(tokenizer)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[few_words, names_the_place],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts, "place": places}),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
