"""`fastgrpo doctor`: arguments, lines, exit status."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgrpo.tools.arguments import DONE, FAILED, USAGE, console, positive, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from fastgrpo.tools.doctor.case import Line

_DESCRIPTION = (
    "Checks what a GRPO run stands on, layer by layer: device, versions, kernels, configuration, model, trained parameters and "
    "tokenizer, reward functions, rollout path, one tiny step. One line each; stops at the first that is wrong and says what "
    "to do."
)
_EXIT_STATUS = """\
exit status:
  0    nothing is wrong (there may be hints)
  1    a layer is wrong
  2    wrong usage, or a file that cannot be read
  130  interrupted with Ctrl-C

example:
  fastgrpo doctor --model ./Qwen3-1.7B --config grpo.yaml \\
      --rewards my_rewards:exact --prompts train.jsonl
"""
_SIGNS = {"ok": ("ok", "green"), "hint": ("hint", "yellow"), "wrong": ("WRONG", "bold red"), "skipped": ("-", "dim")}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check what a run stands on, up to the first layer that is wrong",
        description=textwrap.fill(_DESCRIPTION, 78),
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="local folder of the policy")
    parser.add_argument(
        "--rewards",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="a reward function, or FILE.py:NAME; may be given again (default: the configuration's)",
    )
    parser.add_argument("--config", type=Path, metavar="PATH", help="YAML or JSON, as `trl grpo --config` takes it")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="PATH",
        help="rows of the dataset: .jsonl with `prompt` and columns, or plain lines",
    )
    parser.add_argument("--server", metavar="URL", help="address of a rollout server")
    parser.add_argument("--lora-rank", type=positive, metavar="N", help="rank of the adapter, over the configuration's")
    parser.add_argument(
        "--lora-targets",
        type=_targets,
        metavar="TARGETS",
        help="layers with an adapter: all-linear, or names with commas",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="processes that the run is started in, one a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="also ten steps of four rollouts on the run's own rollout path: seconds per step, wall clock, memory",
    )
    parser.add_argument("--no-step", action="store_true", help="leave the tiny step out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs `fastgrpo doctor`."""
    from fastgrpo.tools.rows import read_rows
    from fastgrpo.tools.wording import ToolError

    try:
        settings = _settings(arguments)
        rows = read_rows(arguments.prompts) if arguments.prompts else []
    except ToolError as error:
        print(f"fastgrpo doctor: {error}\n  -> {error.remedy}", file=sys.stderr)
        return USAGE
    errors = console(stderr=True)
    with errors.status("importing torch, transformers and TRL"):
        from fastgrpo.rollout.vllm import VLLMVersionError
        from fastgrpo.tools.doctor.case import Case, Line, rewards_of

        try:
            from fastgrpo.tools.doctor.layers import examine, layers
        except VLLMVersionError as error:
            lines = iter((Line("versions", "wrong", str(error), "install that, or remove vLLM"),))
        else:
            model = arguments.model or settings.get("model_name_or_path")
            rewards = tuple(arguments.rewards) or rewards_of(settings)
            path = Path(str(model)) if model else None
            case = Case(path, rewards, rows, settings, arguments.server, arguments.processes)
            lines = examine(case, layers(not arguments.no_step, arguments.smoke), errors.status)
    to = None if arguments.json else console()
    found = []
    for line in lines:
        found.append(line)
        if to is not None:
            _show(line, to)
    healthy = found[-1].status != "wrong"
    if arguments.json:
        print_json({"healthy": healthy, "lines": [dataclasses.asdict(line) for line in found]})
    return DONE if healthy else FAILED


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    from fastgrpo.tools.doctor.case import read_settings

    settings = read_settings(arguments.config) if arguments.config else {}
    for name, value in settings.pop("env", {}).items():  # as TRL's parser does
        os.environ[str(name)] = str(value)
    if arguments.lora_rank:
        settings |= {"lora_r": arguments.lora_rank, "use_peft": True}
        settings.setdefault("lora_target_modules", "all-linear")
    if arguments.lora_targets:
        settings |= {"lora_target_modules": arguments.lora_targets, "use_peft": True}
    return settings


def _targets(text: str) -> str | list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no layer; give all-linear, or names with commas")
    return names if len(names) > 1 else names[0]


def _show(line: Line, to: Console) -> None:
    from rich.text import Text

    sign, style = _SIGNS[line.status]
    to.print(Text.assemble((f"{sign:<6}", style), f"{line.layer}: {line.text}"), soft_wrap=True)
    if line.remedy:
        to.print(Text(f"       -> {line.remedy}"), soft_wrap=True)
    to.file.flush()  # a pipe's reader sees it now, too
