"""What one pass over the problems found, for a table, for programs, for the log and for a file of answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastgrpo.tools.evaluate import PassAt1
from fastgrpo.tools.evaluation.problems import Problem, says_nothing
from fastgrpo.tools.reward_functions import RewardError


def name_of(temperature: float | None, samples: int) -> str:
    """What a pass is called."""
    if temperature is None:
        return "greedy"
    return f"{f'{samples} samples' if samples > 1 else 'sampled'}, temperature {temperature:g}"


@dataclass(frozen=True)
class Result:
    """
    One pass.

    Attributes:
        found: answers, and which are right.
        temperature: of the sampling; None = greedy.
        rewards: one for every answer, where a reward function judged; empty where none did.

    Raises:
        RewardError: no answer was judged.
    """

    found: PassAt1
    temperature: float | None
    rewards: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        if not self.found.n:
            raise RewardError(
                f"the reward function judged no answer at all: {self._kinds}",
                "give problems that it applies to (None says that it does not), or correct it",
            )

    @property
    def name(self) -> str:
        """For people."""
        return name_of(self.temperature, self.found.samples)

    @property
    def unjudged(self) -> int:
        """Answers whose reward says nothing about them."""
        return sum(correct is None for correct in self.found.correct)

    @property
    def unjudged_text(self) -> str:
        """How many, and why."""
        return f"{self.unjudged} of {len(self.found.correct)} answers have no reward ({self._kinds})"

    @property
    def _kinds(self) -> str:
        kinds = Counter(filter(None, map(says_nothing, self.rewards)))
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))

    @property
    def logged(self) -> dict[str, Any]:
        """Values of an `eval` line of the run log."""
        return {
            "pass_at_1": self.found.rate,
            "n": self.found.n,
            "temperature": self.temperature,
            "samples": self.found.samples,
        }

    @property
    def values(self) -> dict[str, Any]:
        """For programs."""
        known = [reward for reward in self.rewards if not says_nothing(reward)]
        return {
            **self.logged,
            "standard_error": None if math.isnan(self.found.error) else self.found.error,
            "mean_reward": sum(known) / len(known) if known else None,
            "unjudged": self.unjudged,
        }

    def answers(self, problems: Sequence[Problem]) -> Iterator[dict[str, Any]]:
        """Every answer with its problem, in their order."""
        for index, (text, correct) in enumerate(zip(self.found.answers, self.found.correct, strict=True)):
            line = {"prompt": problems[index // self.found.samples].prompt, "completion": text, "solved": correct}
            if self.rewards:
                reward = self.rewards[index]
                line["reward"] = reward if reward is None or math.isfinite(reward) else str(reward)
            yield line | {"temperature": self.temperature}
