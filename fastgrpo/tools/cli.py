"""The `fastgrpo` command."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from fastgrpo.tools.arguments import DONE, FAILED, INTERRUPTED, USAGE, console, positive, seed
from fastgrpo.tools.demo.recipe import SMOLLM2, TOY
from fastgrpo.tools.doctor import command as doctor_command
from fastgrpo.tools.evaluation import command as eval_command
from fastgrpo.tools.plan import command as plan_command
from fastgrpo.tools.report import command as report_command
from fastgrpo.versions import installed_version

MOST_HELD_OUT = 4000

_EXIT_STATUS = """\
exit status:
  0    done
  1    failed, or something is missing that it needs
  2    wrong usage
  130  interrupted with Ctrl-C; the log is complete up to there
"""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Args:
        argv: arguments without the program's name; None = those of the process.

    Returns:
        exit status: 0 done, 1 failed or bad environment, 2 wrong usage, 130 interrupted.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return USAGE
        return int(arguments.run(arguments))
    except SystemExit as leaving:  # argparse has printed help, version or what is wrong
        return int(leaving.code or DONE)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastgrpo",
        description="GRPO training of language models with TRL, faster, leaner and more exact.",
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"fastgrpo {installed_version('fastgrpo') or '(not installed)'}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_demo(commands)
    plan_command.add_parser(commands)
    doctor_command.add_parser(commands)
    eval_command.add_parser(commands)
    report_command.add_parser(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    description = (
        f"Trains {SMOLLM2.model} on two-digit sums with GRPO on the CPU, in about five minutes on two cores, and measures "
        "greedy pass@1 on held-out sums before and after. With --toy it is a model of 0.6 M parameters, pre-trained in the "
        "demo with nothing downloaded, in under two minutes. Writes RUNS_DIR/NAME/log.jsonl and reward.png."
    )
    demo = commands.add_parser(
        "demo",
        help="train a small model on the CPU with GRPO, in minutes, and look at its reward",
        description=textwrap.fill(description, 78),
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = demo.add_mutually_exclusive_group()
    which.add_argument("--toy", action="store_true", help="the model of 0.6 M parameters")
    which.add_argument("--model", type=Path, metavar="PATH", help="another local model: a folder, or a .gguf file")
    demo.add_argument(
        "--steps", type=positive, metavar="N", help=f"training steps (default: {SMOLLM2.steps}, toy {TOY.steps})"
    )
    demo.add_argument(
        "--pretrain-steps", type=positive, metavar="N", help="the toy's pre-training ends there at the latest"
    )
    demo.add_argument(
        "--held-out",
        type=_held_out,
        metavar="N",
        help=f"sums for pass@1 (default: {SMOLLM2.held_out}, toy {TOY.held_out})",
    )
    demo.add_argument("--seed", type=seed, default=0, metavar="N", help="of everything random (default: %(default)s)")
    demo.add_argument(
        "--name",
        type=_folder_name,
        help="of the run's folder (default: demo, toy demo-toy); a run that has it is kept, the new one gets a number",
    )
    demo.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), metavar="PATH", help="folder of all runs (default: %(default)s)"
    )
    demo.add_argument("--stock", action="store_true", help="leave TRL unpatched, to compare")
    demo.set_defaults(run=_demo, error=demo.error)


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.pretrain_steps and not arguments.toy:
        arguments.error("argument --pretrain-steps: only allowed with --toy")
    to, began = console(), time.perf_counter()
    # torch, transformers and TRL take seconds to import; what needs none of them has been checked by now.
    with to.status("importing torch, transformers and TRL"):
        from fastgrpo.tools.demo.errors import DemoError
        from fastgrpo.tools.demo.run import DemoOptions, run_demo

    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(DemoOptions)}
    try:
        return run_demo(DemoOptions(**given), to, began)
    except DemoError as error:
        print(f"fastgrpo demo: {error}", file=sys.stderr)
        return FAILED


def _held_out(text: str) -> int:
    value = positive(text)
    if value > MOST_HELD_OUT:
        raise argparse.ArgumentTypeError(f"{value} leaves too few sums for training; give {MOST_HELD_OUT} or less")
    return value


def _folder_name(text: str) -> str:
    if not text.strip() or text in (".", "..") or set(text) & set("/\\\0"):
        raise argparse.ArgumentTypeError(f"{text!r} is no name for a folder; leave out / and \\")
    return text


if __name__ == "__main__":
    sys.exit(main())
