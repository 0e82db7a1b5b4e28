"""A TRL script of one's own with fastgrpo: a tiny model, a rule reward, a CPU, nothing downloaded, under a minute.

python examples/grpo_arithmetic.py            # with fastgrpo
python examples/grpo_arithmetic.py --stock    # the same run with TRL alone
"""

from __future__ import annotations

import argparse
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import fastgrpo


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Small and untrained: it has to find out by itself that digits pay."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def one_digit_then_stop(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the answer, 0.3 for any single digit, 0 otherwise."""
    return [
        1.0 if text == right else 0.3 if text.isdigit() and len(text) == 1 else 0.0
        for text, right in zip(completions, answer, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="leave TRL unpatched")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    arguments = parser.parse_args()

    pairs = [(a, b) for a in range(5) for b in range(5)]
    random.Random(0).shuffle(pairs)
    tokenizer = make_tokenizer()
    trainer = GRPOTrainer(
        model=make_model(tokenizer),
        reward_funcs=one_digit_then_stop,
        args=GRPOConfig(
            output_dir="grpo_arithmetic",
            max_steps=arguments.steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=4,
            learning_rate=2e-3,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=10,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]}
        ),
        processing_class=tokenizer,
    )
    if not arguments.stock:
        fastgrpo.patch(trainer)
        print(fastgrpo.backends())
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    print(f"reward: {rewards[0]:.2f} in the first ten steps, {rewards[-1]:.2f} in the last ten")


if __name__ == "__main__":
    main()
