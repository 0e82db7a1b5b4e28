"""The two demos as numbers: what is trained, on how much, how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastgrpo.tools.demo.tasks import exact_reward, rule_reward


@dataclass(frozen=True)
class Recipe:
    """
    Settings of a demo.

    Attributes:
        model: its name in the log.
        template: prompt with `{a}` and `{b}`.
        reward: TRL reward function.
        steps: optimizer steps by default.
        prompts_per_step, generations: rollouts a step are their product.
        max_completion_length: tokens.
        learning_rate, warmup_steps: linear warm-up, then linear decay to zero.
        lora_rank: 0 trains all parameters.
        held_out: problems for pass@1, which training never sees.
        threads: of torch; None = as many as there are cores.
    """

    model: str
    template: str
    reward: Callable[..., list[float]]
    steps: int
    prompts_per_step: int
    generations: int
    max_completion_length: int
    learning_rate: float
    warmup_steps: int
    lora_rank: int
    held_out: int
    threads: int | None = None


SMOLLM2 = Recipe(
    model="SmolLM2-135M-Instruct",
    # Without the second "a + b =" the model talks about the question first; this costs fewer tokens than letting it.
    template="Question: {a} + {b}?\nAnswer: {a} + {b} =",
    reward=rule_reward,
    steps=36,
    prompts_per_step=6,
    generations=8,
    max_completion_length=6,
    learning_rate=6e-4,
    warmup_steps=0,
    lora_rank=16,
    held_out=96,
)

TOY = Recipe(
    model="toy, 0.6 M parameters",
    template="{a}+{b}=",
    reward=exact_reward,
    steps=120,
    prompts_per_step=32,
    generations=8,
    max_completion_length=4,
    learning_rate=4e-4,
    warmup_steps=20,
    lora_rank=0,
    held_out=512,
    threads=1,  # its tensors are too small to share: on a busy machine a second thread makes it slower
)
