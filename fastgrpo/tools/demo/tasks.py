"""The demo's problems, sums of two numbers, and the rules that reward an answer."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LOW, HIGH = 10, 99

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Sum:
    """`a + b`, put to the model as `prompt`; its answer should go on from there."""

    a: int
    b: int
    prompt: str

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.a + self.b

    def __str__(self) -> str:
        return f"{self.a} + {self.b}"


def all_sums(template: str, seed: int) -> list[Sum]:
    """
    Every sum of two two-digit numbers, in an order that depends on the seed alone.

    Args:
        template: the prompt with `{a}` and `{b}` in it.
        seed: of the order.
    """
    numbers = range(LOW, HIGH + 1)
    sums = [Sum(a, b, template.format(a=a, b=b)) for a in numbers for b in numbers]
    random.Random(seed).shuffle(sums)
    return sums


def is_correct(problem: Sum, text: str) -> bool:
    """Whether the first number in a text is the right answer."""
    number = _NUMBER.search(text)
    return number is not None and int(number[0]) == problem.answer


def reward_of(text: str, answer: int) -> float:
    """
    The rule reward of a completion.

    Returns:
        1.0 for the right number and nothing else, 0.6 for the right number with something around it, 0.2 for another number
        and nothing else, 0.0 for the rest.
    """
    number = _NUMBER.search(text)
    if number is None:
        return 0.0
    alone = text.strip() == number[0]
    if int(number[0]) == answer:
        return 1.0 if alone else 0.6
    return 0.2 if alone else 0.0


def rule_reward(completions: Sequence[str], answer: Iterable[int], **_: Any) -> list[float]:
    """`reward_of` as TRL calls a reward function: a list of completions beside the dataset's `answer` column."""
    return [reward_of(text, value) for text, value in zip(completions, answer, strict=True)]


def exact_reward(completions: Sequence[str], answer: Iterable[int], **_: Any) -> list[float]:
    """1.0 for the right number and nothing else, else 0.0; called as `rule_reward`."""
    return [float(text == str(value)) for text, value in zip(completions, answer, strict=True)]
