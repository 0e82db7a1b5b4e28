"""Which of several runs ended better, and by what measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fastgrpo.tools.report.rows import reward, share
from fastgrpo.tools.report.summary import RunSummary

Measure = tuple[str, str, Callable[[float | None], str]]

_PASS: Measure = ("pass_at_1_after", "pass@1 after training", share)
_REWARD: Measure = ("reward_last", "mean reward at the end", reward)
_NAMED = 4


def verdict(summaries: Sequence[RunSummary]) -> str:
    """
    One sentence: the best run by pass@1 on as many problems, else by reward; or why there is none. Empty for one run.

    Args:
        summaries: the runs.
    """
    if len(summaries) < 2:
        return ""
    for enough in (len(summaries), 2):
        for measure in (_PASS, _REWARD):
            compared = [summary for summary in summaries if getattr(summary, measure[0]) is not None]
            problems = {summary.pass_at_1_problems for summary in compared}
            if len(compared) >= enough and (measure is _REWARD or len(problems) == 1):
                without = [summary.name for summary in summaries if summary not in compared]
                left = f"; not compared, for want of it: {_listed(without)}" if without else ""
                return _best(compared, measure) + left
    return "; ".join(["no verdict: no measure is in the logs of two runs", *_missing(summaries)])


def _best(compared: Sequence[RunSummary], measure: Measure) -> str:
    attribute, words, show = measure
    ends = [(summary.name, getattr(summary, attribute)) for summary in compared]
    (name, best), *others = sorted(ends, key=lambda end: end[1], reverse=True)
    if all(value == best for _, value in others):
        return f"{words}: all {show(best)}"
    note = " (comparable only if the reward functions are the same)"
    if measure is _PASS:
        note = _noise(best, others[0][1], compared[0].pass_at_1_problems)
    beaten = _listed([f"{other} {show(value)}" for other, value in others])
    return f"best by {words}: {name} with {show(best)}; {beaten}{note}"


def _missing(summaries: Sequence[RunSummary]) -> list[str]:
    missing = []
    for attribute, words, _ in (_PASS, _REWARD):
        without = [summary.name for summary in summaries if getattr(summary, attribute) is None]
        if without:
            missing.append(f"no {words}: {_listed(without)}")
    return missing


def _noise(best: float, second: float, problems: int | None) -> str:
    """Said where the best is no further from the next than two standard errors of the difference of two shares."""
    error = math.sqrt((best * (1 - best) + second * (1 - second)) / problems) if problems else 0.0
    if not error or best - second > 2 * error:
        return ""
    return f" (within the noise of {problems} problems: the standard error of the difference is {error:.1%})"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
