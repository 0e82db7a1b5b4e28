"""The table at the end of a demo."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastgrpo.runlog import RunRecord, first_and_last
from fastgrpo.tools.demo.display import clock_text
from fastgrpo.tools.demo.tasks import Sum
from fastgrpo.tools.evaluate import PassAt1

_SAMPLES = 5


def print_summary(
    console: Console, record: RunRecord, seconds: float, sums: Sequence[Sum], before: PassAt1, after: PassAt1
) -> None:
    """
    Prints what training changed, and some answers of both models.

    Args:
        console: where to.
        record: the finished run.
        seconds: wall clock of the whole demo.
        sums: the held-out problems.
        before, after: their evaluations.
    """
    window, first, last = first_and_last(record.rewards)
    table = Table(title=f"{record.run['model']}: before and after", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("before", "after", "ratio"):
        table.add_column(name, justify="right")
    table.add_row(f"reward, mean of {window} steps", f"{first:.3f}", f"{last:.3f}", _ratio(first, last))
    table.add_row(
        f"greedy pass@1, {after.n} held-out", f"{before.rate:.1%}", f"{after.rate:.1%}", _ratio(before.rate, after.rate)
    )
    console.print()
    console.print(table)

    changed = [i for i in range(len(sums)) if before.correct[i] != after.correct[i]]
    title = "Held-out sums that changed" if changed else "The first held-out sums"
    answers = Table(title=title, title_justify="left", title_style="bold")
    for name in ("sum", "answer before", "answer after"):
        answers.add_column(name, no_wrap=True)
    for index in (changed or range(len(sums)))[:_SAMPLES]:
        answers.add_row(str(sums[index]), _answer(before, index), _answer(after, index))
    console.print(answers)
    end = record.end
    facts = [f"{clock_text(seconds)} in all, with imports", f"{end['seconds_per_step']:.2f} s per training step"]
    if end["peak_memory_gb"] is not None:
        facts.append(f"peak memory {end['peak_memory_gb']:.1f} GB")
    console.print(", ".join(facts), highlight=False)


def _ratio(before: float, after: float) -> str:
    return f"{after / before:.2f}x" if before else "-"


def _answer(outcome: PassAt1, index: int) -> Text:
    text = " ".join(outcome.answers[index].split())
    return Text.assemble(("✓ ", "green") if outcome.correct[index] else ("✗ ", "red"), text)
