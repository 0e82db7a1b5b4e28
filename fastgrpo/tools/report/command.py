"""`fastgrpo report`: arguments, table, files, exit status."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastgrpo.tools.arguments import DONE, FAILED, USAGE, console, print_json
from fastgrpo.versions import installed_version

if TYPE_CHECKING:
    from rich.console import Console

    from fastgrpo.runlog import RunRecord
    from fastgrpo.tools.report.summary import RunSummary

_DESCRIPTION = (
    "Shows one or several runs from their logs: how they ended, reward, pass@1, lengths, entropy, KL, memory, and which phase "
    "most of a step goes into. Prints a table, and writes report.html (one file, nothing loaded from elsewhere) and report.png "
    "into the folder of the first run. A run that still goes on, or was killed, can be read as well."
)
_EXIT_STATUS = """\
exit status:
  0    done
  1    the report cannot be written
  2    wrong usage, or a run that cannot be read
  130  interrupted with Ctrl-C
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `report` to the command line."""
    parser = commands.add_parser(
        "report",
        help="show and compare runs from their logs",
        description=textwrap.fill(_DESCRIPTION, 78),
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run's folder, or its .jsonl file")
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help="folder of the files (default: that of the first run)"
    )
    parser.add_argument(
        "--plan", type=Path, metavar="PATH", help="output of `fastgrpo plan --json`, to compare memory with"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table, and write no files")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs `fastgrpo report`."""
    from fastgrpo.runlog import read_run_log
    from fastgrpo.tools.report.summary import different_settings, names_of, plan_peak, summarise, verdict

    try:
        records = [read_run_log(path) for path in arguments.runs]
        plan_gb = plan_peak(arguments.plan) if arguments.plan else None
    except (OSError, ValueError) as error:
        print(f"fastgrpo report: {error}", file=sys.stderr)
        return USAGE
    summaries = [summarise(record, name, plan_gb) for record, name in zip(records, names_of(records), strict=True)]
    differing = different_settings(records)
    best = verdict(summaries)
    if arguments.json:
        runs = [summary.to_dict() for summary in summaries]
        print_json({"runs": runs, "verdict": best, "different_settings": differing})
        return DONE
    sentences = [*filter(None, [best]), *map(_time_sentence, summaries)]
    to = console()
    _show(to, summaries, sentences, differing)
    return _write(arguments.output or records[0].path.parent, records, summaries, sentences, differing)


def _time_sentence(summary: RunSummary) -> str:
    if summary.dominant_phase is None:
        return f"{summary.name}: the log has no times of phases."
    seconds = summary.phase_seconds[summary.dominant_phase]
    return f"{summary.name}: {summary.dominant_phase} dominates, {summary.dominant_share or 0:.0%} of a step ({seconds:.2f} s)."


def _show(
    to: Console, summaries: Sequence[RunSummary], sentences: Sequence[str], differing: dict[str, list[object]]
) -> None:
    from rich.table import Table
    from rich.text import Text

    from fastgrpo.tools.report.rows import rows_of

    table = Table()
    table.add_column("")
    for summary in summaries:
        table.add_column(Text(summary.name))
    for row in rows_of(summaries):
        table.add_row(*map(Text, row))
    to.print(table)
    for sentence in sentences:
        to.print(Text(sentence), soft_wrap=True)
    for name, values in differing.items() if len(summaries) > 1 else ():
        shown = " | ".join("default" if value is None else str(value) for value in values)
        to.print(Text(f"different: {name}: {shown}"), soft_wrap=True)


def _write(
    folder: Path,
    records: Sequence[RunRecord],
    summaries: Sequence[RunSummary],
    sentences: Sequence[str],
    differing: dict[str, list[object]],
) -> int:
    from fastgrpo.tools.plot import missing_matplotlib
    from fastgrpo.tools.report.page import render_page
    from fastgrpo.tools.report.rows import rows_of

    picture = None
    missing = missing_matplotlib()
    if missing:
        print(f"fastgrpo report: no picture: {missing}", file=sys.stderr)
    else:
        from fastgrpo.tools.report.figure import draw_runs

        with console(stderr=True).status("drawing"):
            picture = draw_runs(records, summaries)
    names = [summary.name for summary in summaries]
    version = installed_version("fastgrpo") or "(checkout)"
    page = render_page(names, rows_of(summaries), sentences, differing, picture, version)
    files = {"report.html": page.encode()} | ({"report.png": picture} if picture else {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
            print(folder / name)
    except OSError as error:
        print(
            f"fastgrpo report: {folder} cannot be written: {error.strerror}; choose another --output.", file=sys.stderr
        )
        return FAILED
    return DONE
