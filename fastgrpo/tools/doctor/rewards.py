"""The layer of the reward functions: each is called twice on a sample."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastgrpo.tools.doctor.case import Case, Line

_COMPLETIONS = ("", "42", "The answer is 42.", "<think>6 times 7</think>\n\\boxed{42}")
TRUTHS = ("answer", "solution", "ground_truth", "target", "label")
"""Columns that may hold the right answer."""
_MOST_ROWS = 4


def check_rewards(case: Case) -> Iterator[Line]:
    """Type, finiteness, spread and determinism of every reward function."""
    if not case.rewards:
        yield Line("rewards", "skipped", "no --rewards given")
        return
    for spec in case.rewards:
        try:
            function = load_function(spec)
        except ValueError as error:
            yield Line("rewards", "wrong", str(error), "give MODULE:NAME or FILE.py:NAME")
            return
        line = examine(spec, function, case.rows)
        yield line
        if line.status == "wrong":
            return


def load_function(spec: str) -> Callable[..., Any]:
    """
    The function that `MODULE:NAME` or `FILE.py:NAME` names; the current folder can be imported from.

    Raises:
        ValueError: no such module, file or function, or one that raises when imported.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{spec!r} names no function")
    try:
        if module_name.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        else:
            if str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(module_name)
    except Exception as error:  # a user's module raises what it likes
        raise ValueError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {name}")
    return function


def examine(spec: str, function: Callable[..., Any], rows: Sequence[Mapping[str, Any]]) -> Line:
    """
    Calls a reward function twice on a sample, as TRL calls it.

    Args:
        spec: its name, for people.
        function: takes `prompts`, `completions`, `completion_ids` and the dataset's columns.
        rows: of the dataset; completions are a row's own `completion` where it has one, else a few texts and the row's answer.
    """
    arguments = sample(rows)
    count = len(arguments["prompts"])

    def wrong(text: str, remedy: str) -> Line:
        return Line("rewards", "wrong", f"{spec} {text}", remedy)

    results = []
    for _ in range(2):
        try:
            result = function(**arguments)
            results.append(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
        except Exception as error:  # a user's function raises what it likes
            where = (
                "give the columns it needs with --prompts FILE.jsonl" if isinstance(error, TypeError | KeyError) else ""
            )
            return wrong(f"raises {type(error).__name__}: {error}", where or "make it survive any completion")
    first, second = results
    if isinstance(first, str) or not hasattr(first, "__len__") or not hasattr(first, "__iter__"):
        return wrong(f"returns a {type(first).__name__}", "return a list with one number for every completion")
    if len(first) != count:
        return wrong(f"returns {len(first)} rewards for {count} completions", "return one number for every completion")
    bad = next((value for value in first if value is not None and not _is_number(value)), None)
    if bad is not None:
        return wrong(f"returns {bad!r}, a {type(bad).__name__}", "return numbers, or None where it does not apply")
    numbers = [None if value is None else float(value) for value in first]
    infinite = [value for value in numbers if value is not None and not math.isfinite(value)]
    if infinite:
        return wrong(f"returns {infinite[0]} for {len(infinite)} of {count} completions", "return finite numbers")
    known = [value for value in numbers if value is not None]
    if not known:
        return wrong("returns None for every completion", "return a number for at least some")
    again = [None if value is None else float(value) for value in second]
    if again != numbers:
        return Line(
            "rewards", "hint", f"{spec} gives other rewards at the second call", "fix its seed if that is not meant"
        )
    if len(set(known)) == 1:
        return Line(
            "rewards",
            "hint" if not any("completion" in row for row in rows) else "wrong",
            f"{spec} gives {known[0]:g} to all {count} completions; a group of equal rewards teaches nothing",
            "give rows with a `completion` column that should differ (--prompts FILE.jsonl), or soften the reward",
        )
    return Line("rewards", "ok", f"{spec}: {min(known):g} to {max(known):g} on {count} completions, the same twice")


def sample(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments of a reward function: every prompt with several completions, columns repeated beside them."""
    rows = list(rows[:_MOST_ROWS]) or [{"prompt": "What is 6 times 7?"}]
    expanded = []
    for row in rows:
        if "completion" in row:
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


async def _awaited(value: Any) -> Any:
    return await value


def _is_number(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
