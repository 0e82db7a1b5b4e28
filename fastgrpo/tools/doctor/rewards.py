"""The layer of the reward functions: each is called twice on a sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import trl.trainer.utils as trl_utils

from fastgrpo.tools.doctor.case import Case, Line
from fastgrpo.tools.reward_functions import Conduct, RewardError, call, is_async, is_number, load_function
from fastgrpo.tools.rows import TRUTHS
from fastgrpo.tools.wording import short

_COMPLETIONS = ("", "42", "The answer is 42.", "<think>6 times 7</think>\n\\boxed{42}")
_MOST_ROWS = 4
_LARGEST = 3.4028234663852886e38
"""Of float32, which TRL keeps rewards in; beyond it they are infinite."""


def check_rewards(case: Case) -> Iterator[Line]:
    """Type, finiteness, spread, determinism and manners of every reward function, and the number of their weights."""
    weights = case.settings.get("reward_weights")
    if not case.rewards:
        yield Line("rewards", "skipped", "no --rewards given")
        return
    for spec in case.rewards:
        try:
            function = load_function(spec)
        except RewardError as error:
            yield Line("rewards", "wrong", str(error), error.remedy)
            return
        for line in examine(spec, function, case.rows):
            yield line
            if line.status == "wrong":
                return
    if isinstance(weights, list) and len(weights) != len(case.rewards):
        yield Line(
            "rewards",
            "wrong",
            f"reward_weights has {len(weights)} numbers for {len(case.rewards)} reward functions",
            "give one weight for each, in the order of --rewards",
        )


def examine(spec: str, function: Callable[..., Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """
    Calls a reward function twice on a sample, as TRL calls it.

    Args:
        spec: its name, for people.
        function: takes `prompts`, `completions`, `completion_ids`, the dataset's columns, and what TRL's trainer adds.
        rows: of the dataset; completions are a row's own `completion` where it has one, else a few texts and the row's answer.
    """
    conduct: list[Conduct] = []
    try:
        given = sample(rows)
        first = call(spec, function, given, conduct)
        second = call(spec, function, sample(rows), conduct)
    except RewardError as error:
        yield Line("rewards", "wrong", str(error), error.remedy)
        return
    if is_async(function) and not _awaited_by_trl(function):
        text = f"{spec} is an object with an asynchronous __call__, which this TRL would not await"
        yield Line("rewards", "wrong", text, "make it an `async def`")
        return
    count = len(sample(rows)["prompts"])
    if given != sample(rows):
        yield Line(
            "rewards",
            "hint",
            f"{spec} changes the lists that it is given; functions after it, and the log, see them so",
            "work on a copy",
        )
    moved_to = next((one.moved_to for one in conduct if one.moved_to), None)
    if moved_to is not None:
        yield Line(
            "rewards",
            "hint",
            f"{spec} changes the working directory, to {moved_to}; output_dir and other relative paths move with it",
            "change it back, or use absolute paths",
        )
    yield _judge(spec, first, second, count, any("completion" in row for row in rows))


def _awaited_by_trl(function: Callable[..., Any]) -> bool:
    return getattr(trl_utils, "is_async_callable", inspect.iscoroutinefunction)(function)


def _judge(spec: str, first: Any, second: Any, count: int, own_completions: bool) -> Line:
    """What the results of two calls on the same `count` completions say."""

    def wrong(text: str, remedy: str) -> Line:
        return Line("rewards", "wrong", f"{spec} {text}", remedy)

    if isinstance(first, str | bytes) or not hasattr(first, "__len__") or not hasattr(first, "__iter__"):
        what = "None" if first is None else f"{short(first)}, of type {type(first).__name__},"
        return wrong(
            f"returns {what} instead of a list",
            "return a list with one number for every completion, None where it has none",
        )
    if len(first) != count:
        return wrong(f"returns {len(first)} rewards for {count} completions", "return one number for every completion")
    bad = next((value for value in first if value is not None and not is_number(value)), None)
    if bad is not None:
        return wrong(
            f"returns {short(bad)}, of type {type(bad).__name__}, which is no reward",
            "return numbers, or None where it does not apply",
        )
    numbers = [None if value is None else float(value) for value in first]
    infinite = [value for value in numbers if value is not None and not abs(value) <= _LARGEST]
    if infinite:
        remedy = "return finite numbers, or None where it does not apply"
        return wrong(f"returns {infinite[0]} for {len(infinite)} of {count} completions", remedy)
    known = [value for value in numbers if value is not None]
    if not known:
        return wrong("returns None for every completion", "return a number for at least some")
    try:
        again = [None if value is None else float(value) for value in second]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        again = None
    if again != numbers:
        return Line(
            "rewards", "hint", f"{spec} gives other rewards at the second call", "fix its seed if that is not meant"
        )
    if len(set(known)) == 1:
        return Line(
            "rewards",
            "wrong" if own_completions else "hint",
            f"{spec} gives {known[0]:g} to all {count} completions; a group of equal rewards teaches nothing",
            "give rows with a `completion` column that should differ (--prompts FILE.jsonl), or soften the reward",
        )
    return Line("rewards", "ok", f"{spec}: {min(known):g} to {max(known):g} on {count} completions, the same twice")


def sample(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """
    Arguments of a reward function: every prompt with several completions, columns repeated beside them.

    Raises:
        RewardError: a `completion` that is none.
    """
    rows = list(rows[:_MOST_ROWS]) or [{"prompt": "What is 6 times 7?"}]
    expanded = []
    for row in rows:
        if "completion" in row:
            if not isinstance(row["completion"], str | list):
                raise RewardError(
                    f"a row's completion is {short(row['completion'])}, neither a text nor messages", "correct the row"
                )
            expanded.append((row, row["completion"]))
            continue
        truths = [str(row[name]) for name in TRUTHS if name in row]
        expanded += [(row, text) for text in (*_COMPLETIONS, *truths)]
    prompts = [row["prompt"] for row, _ in expanded]
    completions = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) and isinstance(text, str) else text
        for prompt, (_, text) in zip(prompts, expanded, strict=True)
    ]
    names = set().union(*rows) - {"prompt", "completion"}
    columns = {name: [row.get(name) for row, _ in expanded] for name in sorted(names)}
    return {"prompts": prompts, "completions": completions, "completion_ids": [[0]] * len(prompts), **columns}
