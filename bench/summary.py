"""`python -m bench summary`: runs that `--json` wrote, as one Markdown table a run, beside stored runs of the same kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import report


def summarise(files: Sequence[Path], stored: Sequence[Path]) -> tuple[str, list[str]]:
    """
    The tables.

    Args:
        files: written with `--json`.
        stored: runs to compare with; the last of a run's kind counts.

    Returns:
        Markdown, and what could not be read.
    """
    unreadable: list[str] = []
    before = {run["kind"]: run for run in _load(stored, report.load_baseline, unreadable)}
    parts = ["\n".join(_table(run, before.get(run["kind"]))) for run in _load(files, report.load, unreadable)]
    return "\n\n".join(parts), unreadable


def _load(files: Sequence[Path], load: Callable[[Path, str], dict], unreadable: list[str]) -> Iterator[dict]:
    for path in files:
        try:
            run = json.loads(path.read_text())
            yield load(path, run["kind"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            unreadable.append(f"{path}: {error}")


def _table(run: dict, stored: dict | None) -> Iterator[str]:
    yield f"### {run['kind']}{_mark(run)}\n"
    yield f"{report.describe(run)}\n"
    yield "| ratio, lower is better | now |" + (f" {stored['date'][:10]}{_mark(stored)} | change |" if stored else "")
    yield "|---|---|" + ("---|---|" if stored else "")
    _, worse = report.regressions(run, stored) if stored else ([], [])
    for name, now in run["ratios"].items():
        line = f"| {name} | {now:.3f} |"
        if stored:
            then = stored["ratios"].get(name)
            mark = " **worse**" if name in worse else ""
            line += f" {then:.3f} | {now / then - 1:+.1%}{mark} |" if then else " | |"
        yield line
    for name in report.vanished(run, stored) if stored else ():
        yield f"| {name} | not measured | {stored['ratios'][name]:.3f} | |"


def _mark(run: dict) -> str:
    return ", unfinished" if run.get("unfinished") else ""
