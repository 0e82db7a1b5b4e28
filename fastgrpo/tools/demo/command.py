"""`fastgrpo demo`: arguments, exit status."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
import time
from pathlib import Path

from fastgrpo.tools.arguments import console, positive, seed
from fastgrpo.tools.demo.recipe import SMOLLM2, TOY

MOST_HELD_OUT = 4000

_EXIT_STATUS = """\
exit status:
  0    done
  1    failed, or something is missing that it needs
  2    wrong usage, or a model that cannot be read
  130  interrupted with Ctrl-C; the log is complete up to there
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `demo` to the command line."""
    description = (
        f"Trains {SMOLLM2.model} on two-digit sums with GRPO on the CPU, in about five minutes on two cores, and measures "
        "greedy pass@1 on held-out sums before and after. With --toy it is a model of 0.6 M parameters, pre-trained in the "
        "demo with nothing downloaded, in under two minutes. --device cuda does the same on a GPU, in bfloat16. Writes "
        "RUNS_DIR/NAME/log.jsonl and reward.png."
    )
    demo = commands.add_parser(
        "demo",
        help="train a small model with GRPO on the CPU, in minutes, and look at its reward",
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
    demo.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (default: %(default)s)")
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
    demo.set_defaults(run=run, error=demo.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs `fastgrpo demo`."""
    if arguments.pretrain_steps and not arguments.toy:
        arguments.error("argument --pretrain-steps: only allowed with --toy")
    to, began = console(), time.perf_counter()
    # torch, transformers and TRL take seconds to import; what needs none of them has been checked by now.
    with to.status("importing torch, transformers and TRL"):
        from fastgrpo.tools.demo.errors import Stopped
        from fastgrpo.tools.demo.run import DemoOptions, run_demo

    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(DemoOptions)}
    try:
        return run_demo(DemoOptions(**given), to, began)
    except Stopped as error:
        print(f"fastgrpo demo: {error}", file=sys.stderr)
        return error.status


def _held_out(text: str) -> int:
    value = positive(text)
    if value > MOST_HELD_OUT:
        raise argparse.ArgumentTypeError(f"{value} leaves too few sums for training; give {MOST_HELD_OUT} or less")
    return value


def _folder_name(text: str) -> str:
    if not text.strip() or text in (".", "..") or set(text) & set("/\\\0"):
        raise argparse.ArgumentTypeError(f"{text!r} is no name for a folder; leave out / and \\")
    return text
