"""Problems from a file, and when an answer solves one."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgrpo.tools.doctor.case import read_rows
from fastgrpo.tools.doctor.rewards import TRUTHS

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
        ValueError: no such file, no row, a row without a prompt, or a prompt that is neither text nor conversation.
    """
    rows = read_rows(path)[:limit]
    for number, row in enumerate(rows, 1):
        if not isinstance(row["prompt"], str) and not _is_conversation(row["prompt"]):
            raise ValueError(
                f"{path}, row {number}: its prompt is neither a text nor a list of messages with `role` and `content`."
            )
    return [Problem(row["prompt"], {name: value for name, value in row.items() if name != "prompt"}) for row in rows]


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)


def matcher(match: str | None, problems: Sequence[Problem]) -> Callable[[Problem, str], bool]:
    """
    When a text solves a problem that has an answer.

    Args:
        match: of `MATCHES`: the text's last number is the answer's last number; the text is the answer, spaces around it
            left out; or it contains the answer. None = `number` where all answers hold one, else `exact`.
        problems: all of them.

    Raises:
        ValueError: a problem without an answer.
    """
    missing = [number for number, problem in enumerate(problems, 1) if problem.answer is None]
    if missing:
        raise ValueError(
            f"row {missing[0]} has no right answer; give rows with one of the columns {', '.join(TRUTHS)}, or a --reward "
            "function."
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


class Rewarded:
    """
    Solved where a reward function gives enough.

    Args:
        function: as TRL calls it: with `prompts`, `completions`, `completion_ids` and the dataset's columns.
        solved_at: least reward of a right answer.

    Attributes:
        rewards: given so far.
    """

    def __init__(self, function: Callable[..., Any], solved_at: float) -> None:
        self._function, self._solved_at = function, solved_at
        self.rewards: list[float] = []

    def __call__(self, problem: Problem, text: str) -> bool:
        """Whether a text solves a problem; raises ValueError where the function gives no number."""
        conversation = not isinstance(problem.prompt, str)
        completion = [{"role": "assistant", "content": text}] if conversation else text
        columns = {name: [value] for name, value in problem.columns.items()}
        result = self._function(prompts=[problem.prompt], completions=[completion], completion_ids=[[]], **columns)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        try:
            (value,) = result
            reward = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"the reward function returns {result!r} for one completion; it must be one number."
            ) from None
        self.rewards.append(reward)
        return reward >= self._solved_at


async def _awaited(value: Any) -> Any:
    return await value
