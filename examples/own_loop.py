"""A GRPO loop of one's own: a transformers model, fastgrpo's tensors functions, no TRL. On a CPU, offline, in seconds.

python examples/own_loop.py
"""

from __future__ import annotations

import argparse
import random

import torch
from offline import tiny_model, tiny_tokenizer

import fastgrpo


def reward(text: str, answer: str) -> float:
    """1 for the answer, 0.3 for any single digit."""
    return 1.0 if text == answer else 0.3 if len(text) == 1 and text.isdigit() else 0.0


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """`[B]` rewards, group after group, to `[B]` advantages: how much better than the group, in its standard deviations."""
    grouped = rewards.view(-1, group)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def completion_lengths(completions: torch.Tensor, end: int) -> torch.Tensor:
    """`[B, C]` ids to `[B]`: tokens up to and with the first end token."""
    ended = (completions == end).int()
    return torch.where(ended.any(1), ended.argmax(1) + 1, completions.shape[1])


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; returns the mean reward of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    options = parser.parse_args(arguments)
    if options.group < 2:
        parser.error(f"--group is {options.group}; advantages compare completions of a prompt, so give at least 2")

    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    source, history = random.Random(0), []
    for step in range(options.steps):
        # 1. Roll out: every prompt `group` times.
        pairs = [(source.randrange(5), source.randrange(5)) for _ in range(options.prompts)]
        prompts = tokenizer(
            [f"{a}+{b}=" for a, b in pairs for _ in range(options.group)], return_tensors="pt", padding=True
        )
        inputs = {"input_ids": prompts["input_ids"], "attention_mask": prompts["attention_mask"]}
        with torch.no_grad():
            rows = model.generate(**inputs, max_new_tokens=4, do_sample=True, top_k=0)
        completions = rows[:, inputs["input_ids"].shape[1] :]
        lengths = completion_lengths(completions, tokenizer.eos_token_id)
        inside = torch.arange(completions.shape[1]) < lengths[:, None]

        # 2. Reward, and compare within the group.
        texts = tokenizer.batch_decode(
            completions.masked_fill(~inside, tokenizer.pad_token_id), skip_special_tokens=True
        )
        answers = [str(a + b) for a, b in pairs for _ in range(options.group)]
        rewards = torch.tensor([reward(text, answer) for text, answer in zip(texts, answers, strict=True)])
        advantages = group_advantages(rewards, options.group)

        # 3. Hidden states at the positions that predict a completion's tokens; no logits.
        mask = torch.cat([inputs["attention_mask"], inside.long()], dim=1)
        packed = fastgrpo.left_pack(rows, mask)  # real tokens to the left, shared padding cut
        hidden = model.model(
            input_ids=packed.input_ids, attention_mask=packed.attention_mask, position_ids=packed.position_ids
        ).last_hidden_state
        first = inputs["attention_mask"].sum(1)
        columns = torch.arange(packed.input_ids.shape[1])
        scored = (columns >= first[:, None]) & (columns < (first + lengths)[:, None])
        sequence, column = scored.nonzero(as_tuple=True)

        # 4. Output layer, softmax, log-probs, the clipped objective and all gradients in one pass over chunks of logits.
        loss, stats = fastgrpo.linear_grpo_loss(
            hidden[sequence, column - 1],
            model.lm_head.weight,
            packed.input_ids[sequence, column],
            segments=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            advantages=advantages,
            objective=fastgrpo.Objective(loss_type="dapo"),
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(rewards.mean().item())
        if step % 10 == 9:
            print(f"step {step + 1}: reward {sum(history[-10:]) / 10:.2f}, entropy {stats.entropy.mean():.2f}")
    return history


if __name__ == "__main__":
    main()
