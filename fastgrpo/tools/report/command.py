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
_NARROWEST = 24


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `report` to the command line."""
    parser = commands.add_parser(
        "report",
        help="show and compare runs from their logs",
        description=textwrap.fill(_DESCRIPTION, 78),
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path, help="a folder, with all logs in it, or a .jsonl file"
    )
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
    from fastgrpo.tools.report.names import names_of
    from fastgrpo.tools.report.rows import sentences_of
    from fastgrpo.tools.report.summary import different_settings, plan_peak, summarise
    from fastgrpo.tools.report.verdict import verdict

    if arguments.output is not None:
        _check_output(arguments)
    try:
        records = _read(arguments.runs)
        plan_gb = plan_peak(arguments.plan) if arguments.plan else None
    except (OSError, ValueError) as error:
        print(f"fastgrpo report: {_words(error)}", file=sys.stderr)
        return USAGE
    summaries = [summarise(record, name, plan_gb) for record, name in zip(records, names_of(records), strict=True)]
    differing = different_settings(records)
    best = verdict(summaries)
    if arguments.json:
        runs = [summary.to_dict() for summary in summaries]
        print_json({"runs": runs, "verdict": best, "different_settings": differing})
        return DONE
    sentences = [*filter(None, [best]), *(sentence for summary in summaries for sentence in sentences_of(summary))]
    to = console()
    _show(to, summaries, sentences, differing)
    return _write(arguments.output or records[0].path.parent, records, summaries, sentences, differing)


def _check_output(arguments: argparse.Namespace) -> None:
    if arguments.json:
        arguments.error("argument --output: not allowed with --json, which writes no files")
    if arguments.output.suffix in (".html", ".png") and not arguments.output.is_dir():
        arguments.error("argument --output: give a folder; the files in it are report.html and report.png")


def _read(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs of all logs, each log once; what of a folder with several is none is left out, and said."""
    from fastgrpo.runlog import find_run_logs, read_run_logs

    records: dict[Path, list[RunRecord]] = {}
    for path in paths:
        files = find_run_logs(path)
        unread = []
        for file in files:
            try:
                records.setdefault(file.resolve(), []) or records.update({file.resolve(): read_run_logs(file)})
            except (OSError, ValueError) as error:
                unread.append(error)
        if len(unread) == len(files):
            raise unread[0]
        for error in unread:
            print(f"fastgrpo report: left out: {_words(error)}", file=sys.stderr)
    return [record for runs in records.values() for record in runs]


def _words(error: Exception) -> str:
    """What the system says about a file without its number; an error's text else."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename} cannot be read: {error.strerror}"
    return str(error)


def _show(
    to: Console, summaries: Sequence[RunSummary], sentences: Sequence[str], differing: dict[str, list[object]]
) -> None:
    from rich.table import Table
    from rich.text import Text

    from fastgrpo.tools.report.rows import rows_of, settings_of

    rows = rows_of(summaries)
    for columns in _side_by_side(summaries, rows, to.width):
        table = Table()
        table.add_column("", no_wrap=True)
        for column in columns:
            table.add_column(Text(summaries[column].name), overflow="fold")
        for row in rows:
            table.add_row(Text(row[0]), *(Text(row[1 + column]) for column in columns))
        to.print(table)
    for sentence in sentences:
        to.print(Text(sentence), soft_wrap=True)
    for name, *told in settings_of(summaries, differing):
        to.print(Text(f"different: {name}: {' | '.join(told)}"), soft_wrap=True)


def _side_by_side(summaries: Sequence[RunSummary], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """The runs of each table: as many as have room, none narrower than `_NARROWEST` unless it needs no more."""
    left = width - max(len(row[0]) for row in rows) - 4
    tables: list[list[int]] = []
    room = 0
    for column, summary in enumerate(summaries):
        needed = max(len(text) for text in (summary.name, *(row[1 + column] for row in rows)))
        taken = min(needed, _NARROWEST) + 3
        if not tables or taken > room:
            tables.append([])
            room = left
        tables[-1].append(column)
        room -= taken
    return tables


def _write(
    folder: Path,
    records: Sequence[RunRecord],
    summaries: Sequence[RunSummary],
    sentences: Sequence[str],
    differing: dict[str, list[object]],
) -> int:
    from fastgrpo.tools.plot import missing_matplotlib
    from fastgrpo.tools.report.page import render_page
    from fastgrpo.tools.report.rows import rows_of, settings_of

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
    page = render_page(names, rows_of(summaries), sentences, settings_of(summaries, differing), picture, version)
    files = {"report.html": page.encode(errors="replace")} | ({"report.png": picture} if picture else {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
            print(folder / name)
    except OSError as error:
        print(
            f"fastgrpo report: {error.filename or folder} cannot be written: {error.strerror}; choose another --output.",
            file=sys.stderr,
        )
        return FAILED
    return DONE
