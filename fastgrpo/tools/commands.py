"""The command line: its parser, with all subcommands."""

from __future__ import annotations

import argparse
import sys

from fastgrpo.tools.arguments import USAGE, Parser
from fastgrpo.tools.demo import command as demo_command
from fastgrpo.tools.doctor import command as doctor_command
from fastgrpo.tools.evaluation import command as eval_command
from fastgrpo.tools.plan import command as plan_command
from fastgrpo.tools.report import command as report_command
from fastgrpo.versions import installed_version

_EXIT_STATUS = """\
exit status:
  0    done
  1    failed, or something is missing that it needs
  2    wrong usage, or an input that cannot be read
  130  interrupted with Ctrl-C; the log is complete up to there
  141  nobody reads the output any more (`fastgrpo ... | head`)
"""


def parser() -> argparse.ArgumentParser:
    """A parser whose namespace has `run`, what to call with it, and `error`, what to call with a message about it."""
    parser = Parser(
        prog="fastgrpo",
        description="GRPO training of language models with TRL, faster, leaner and more exact.",
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"fastgrpo {installed_version('fastgrpo') or '(not installed)'}"
    )
    parser.set_defaults(run=lambda _: _help_on_stderr(parser), error=parser.error)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for command in (demo_command, plan_command, doctor_command, eval_command, report_command):
        command.add_parser(commands)
    return parser


def _help_on_stderr(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return USAGE
