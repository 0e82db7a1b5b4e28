"""Problems from a file, and when an answer solves one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgrpo.tools.reward_functions import RewardError, call, is_number
from fastgrpo.tools.rows import TRUTHS, read_rows
from fastgrpo.tools.wording import ToolError, short

MATCHES = ("number", "exact", "contains")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


@dataclass(frozen=True)
class Problem:
    """
    A row of a dataset.

    Attributes:
        prompt: a text or a conversation.
        columns: the row's others.
    """

    prompt: Any
    columns: Mapping[str, Any]

    @property
    def answer(self) -> str | None:
        """The right answer, where a column holds one."""
        found = next((self.columns[name] for name in TRUTHS if self.columns.get(name) is not None), None)
        return None if found is None else str(found)


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """
    Problems of a .jsonl file.

    Args:
        path: one JSON object with a `prompt` a line.
        limit: use the first so many.

    Raises:
        ToolError: no such file, no row, or a row without a prompt.
    """
    rows = read_rows(path)[:limit]
    return [Problem(row["prompt"], {name: value for name, value in row.items() if name != "prompt"}) for row in rows]


def matcher(match: str | None, problems: Sequence[Problem]) -> Callable[[Problem, str], bool]:
    """
    When a text solves a problem that has an answer.

    Args:
        match: of `MATCHES`: the text's last number is the answer's last number; the text is the answer, spaces around it
            left out; or it contains the answer. None = `number` where all answers hold one, else `exact`.
        problems: all of them.

    Raises:
        ToolError: a problem without an answer.
    """
    missing = [number for number, problem in enumerate(problems, 1) if problem.answer is None]
    if missing:
        raise ToolError(
            f"row {missing[0]} has no right answer",
            f"give rows with one of the columns {', '.join(TRUTHS)}, or a --reward",
        )
    if match is None:
        match = "number" if all(last_number(problem.answer or "") is not None for problem in problems) else "exact"
    tests: dict[str, Callable[[str, str], bool]] = {
        "number": lambda text, answer: last_number(text) is not None and last_number(text) == last_number(answer),
        "exact": lambda text, answer: text.strip() == answer.strip(),
        "contains": lambda text, answer: answer.strip() in text,
    }
    test = tests[match]
    return lambda problem, text: test(text, problem.answer or "")


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separated by commas or not; None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def check_room(lengths: Sequence[int], max_new_tokens: int, context: int | None) -> None:
    """
    Whether answers fit behind prompts.

    Args:
        lengths: of the prompts, in tokens.
        max_new_tokens: of an answer.
        context: of the model; None = unknown.

    Raises:
        ToolError: not so.
    """
    too_long = sum(length + max_new_tokens > (context or math.inf) for length in lengths)
    if not too_long:
        return
    longest = max(lengths)
    room = context - longest
    raise ToolError(
        f"{too_long} of {len(lengths)} prompts leave no room for an answer of {max_new_tokens} tokens in the model's "
        f"context of {context}: the longest, row {1 + lengths.index(longest)}, has {longest}",
        f"give answers {room} tokens or fewer (--max-new-tokens), or shorten it" if room > 0 else "shorten or drop it",
    )


class Rewarded:
    """
    Solved where a reward function gives enough.

    Args:
        spec: name of the function, for people.
        function: as TRL calls it: with `prompts`, `completions`, `completion_ids`, the dataset's columns, and what TRL adds.
        solved_at: least reward of a right answer.

    Attributes:
        rewards: given so far, one for every answer; None and what is not finite included.
    """

    def __init__(self, spec: str, function: Callable[..., Any], solved_at: float) -> None:
        self._spec, self._function, self._solved_at = spec, function, solved_at
        self.rewards: list[float | None] = []

    def try_out(self, problem: Problem) -> None:
        """Judges one answer before any is generated; raises RewardError where that fails."""
        self._reward(problem, problem.answer or "")

    def __call__(self, problem: Problem, text: str) -> bool | None:
        """Whether a text solves a problem; None where the reward is None or not finite, so says nothing."""
        reward = self._reward(problem, text)
        self.rewards.append(reward)
        return None if says_nothing(reward) else reward >= self._solved_at

    def _reward(self, problem: Problem, text: str) -> float | None:
        conversation = not isinstance(problem.prompt, str)
        completion = [{"role": "assistant", "content": text}] if conversation else text
        columns = {
            name: [value] for name, value in problem.columns.items() if name not in ("completion", "completion_ids")
        }
        arguments = {"prompts": [problem.prompt], "completions": [completion], "completion_ids": [[]], **columns}
        result = call(self._spec, self._function, arguments)
        values = list(result) if isinstance(result, Iterable) and not isinstance(result, str | bytes) else []
        if len(values) != 1 or not (values[0] is None or is_number(values[0])):
            raise RewardError(
                f"{self._spec} returns {short(result)} for one completion; it must be a list of one number, or of None",
                "return one number for every completion",
            )
        return None if values[0] is None else float(values[0])


def says_nothing(reward: float | None) -> str:
    """Why a reward does not judge an answer; empty where it does."""
    if reward is None:
        return "None"
    return "" if math.isfinite(reward) else "NaN" if math.isnan(reward) else "infinite"
