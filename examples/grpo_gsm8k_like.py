"""GRPO on word problems of the kind that GSM8K has, made on the spot. `import fastgrpo.auto` is all that is not TRL's.

python examples/grpo_gsm8k_like.py                                 # Qwen2.5-0.5B with LoRA; wants a GPU
python examples/grpo_gsm8k_like.py --tiny                          # an untrained toy, 20 steps on a CPU, nothing downloaded
python examples/grpo_gsm8k_like.py --fastgrpo_packing left --beta 0.0
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from offline import TINY_STEPS, tiny_model, tiny_tokenizer
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, TrlParser

import fastgrpo.auto  # noqa: F401

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "marbles", "stamps")
ASK = " Think, then give the number alone after ####."


@dataclass
class Script:
    """What is not TRL's."""

    model: str = field(default="Qwen/Qwen2.5-0.5B-Instruct", metadata={"help": "Name or path of the model."})
    tiny: bool = field(default=False, metadata={"help": "Train a toy model that is made on the spot, on a CPU."})
    problems: int = field(default=500, metadata={"help": "Number of word problems."})


def problem(random_: random.Random) -> dict[str, str]:
    """A question of two or three steps, and its answer."""
    name, thing = random_.choice(NAMES), random_.choice(THINGS)
    have, bags, each, gone = (random_.randint(2, 20) for _ in range(4))
    total = have + bags * each
    text = f"{name} has {have} {thing} and buys {bags} bags with {each} {thing} each."
    if gone < total:
        text += f" Then {name} gives {gone} away."
        total -= gone
    return {"prompt": f"{text} How many {thing} does {name} have now?{ASK}", "answer": str(total)}


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the number after #### is the answer."""
    found = [re.search(r"####\s*(-?[\d,]+)", text(completion)) for completion in completions]
    return [
        float(hit is not None and hit[1].replace(",", "") == right) for hit, right in zip(found, answer, strict=True)
    ]


def has_form(completions: list[Any], **_: Any) -> list[float]:
    """0.2 for an answer that can be read, less for digits anywhere: something to climb at the start."""
    texts = [text(completion) for completion in completions]
    return [
        0.2 if re.search(r"####\s*-?\d", words) else 0.1 * sum(map(str.isdigit, words)) / max(1, len(words))
        for words in texts
    ]


def text(completion: Any) -> str:
    """What was said, in a conversation or as plain text."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Trains; returns the trainer."""
    parser = TrlParser((Script, GRPOConfig))
    parser.set_defaults(
        output_dir="grpo_gsm8k_like",
        max_steps=0,  # not given
        num_generations=8,
        per_device_train_batch_size=8,
        max_completion_length=256,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    script, config = parser.parse_args_and_config(arguments)
    config.max_steps = config.max_steps or (TINY_STEPS if script.tiny else 200)
    source = random.Random(0)
    rows = [problem(source) for _ in range(script.problems)]
    model, tokenizer, lora = script.model, None, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    if script.tiny:
        tokenizer, lora = tiny_tokenizer(), None
        model = tiny_model(tokenizer)
    else:
        rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[correct, has_form],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
