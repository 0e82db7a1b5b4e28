"""`fastgrpo eval`: arguments, what is said, exit status."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgrpo.tools.arguments import DONE, FAILED, USAGE, console, integer, number, positive, print_json, seed

if TYPE_CHECKING:
    from fastgrpo.tools.evaluation.problems import Problem
    from fastgrpo.tools.evaluation.result import Result

_DESCRIPTION = (
    "Measures pass@1 of a saved model, a checkpoint or an adapter on held-out problems: greedy, and with --samples also the "
    "mean over sampled answers. It needs no trainer, so it serves for a model before training and after, whoever trained it; "
    "--log writes what it finds into the run's log, where `fastgrpo report` shows it."
)
_EXIT_STATUS = """\
exit status:
  0    done
  1    generating or judging answers failed
  2    wrong usage, or a file that cannot be used: model, problems, log, answers
  130  interrupted with Ctrl-C; nothing is written

examples:
  fastgrpo eval ./Qwen3-1.7B --problems test.jsonl --log runs/a --step 0
  fastgrpo eval runs/a/checkpoint-200 --problems test.jsonl --log runs/a \\
      --reward my_rewards:exact --samples 8 --temperature 1.0
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `eval` to the command line."""
    parser = commands.add_parser(
        "eval",
        help="measure pass@1 of a saved model or adapter, greedy and sampled",
        description=textwrap.fill(_DESCRIPTION, 78),
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="a folder with a model or an adapter, or a .gguf file"
    )
    parser.add_argument("--base", metavar="PATH", help="base of the adapter (default: what the adapter says)")
    parser.add_argument(
        "--problems",
        type=Path,
        required=True,
        metavar="PATH",
        help=".jsonl with `prompt` (a text or messages) and `answer` or the columns that the reward needs",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N problems")
    judged = parser.add_mutually_exclusive_group()
    judged.add_argument(
        "--match",
        choices=["number", "exact", "contains"],
        help="how the answer is found in the text (default: the last number, where answers are numbers, else exact)",
    )
    judged.add_argument(
        "--reward", metavar="MODULE:NAME", help="a reward function, as TRL calls it, judges instead; or FILE.py:NAME"
    )
    parser.add_argument(
        "--solved-at",
        type=_real,
        default=1.0,
        metavar="R",
        help="least reward of a right answer (default: %(default)s)",
    )
    parser.add_argument("--samples", type=positive, metavar="K", help="also K sampled answers to each problem")
    parser.add_argument(
        "--temperature",
        type=_above_zero,
        metavar="T",
        help="of the sampling (default: 1.0); without --samples, one answer each",
    )
    parser.add_argument("--no-greedy", action="store_true", help="sampled answers only")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=256, metavar="N", help="tokens of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help="answers at once (default: %(default)s)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"], help="default: cuda where there is one, else cpu")
    parser.add_argument("--log", type=Path, metavar="RUN", help="write the result into the log of this run")
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="optimizer steps the model has seen, for the log (default: the checkpoint's, else the log's last)",
    )
    parser.add_argument("--answers", type=Path, metavar="PATH", help="write every answer, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs `fastgrpo eval`."""
    ways = _ways(arguments)
    if arguments.step is not None and arguments.log is None:
        arguments.error("argument --step: only allowed with --log")
    errors = console(stderr=True)
    with errors.status("importing torch and transformers"):
        from fastgrpo.tools.checkpoint import context_of
        from fastgrpo.tools.demo.display import Display
        from fastgrpo.tools.demo.quiet import quiet_libraries
        from fastgrpo.tools.evaluate import evaluate_pass_at_1, tokenised
        from fastgrpo.tools.evaluation.loading import load_policy
        from fastgrpo.tools.evaluation.problems import check_room, read_problems
        from fastgrpo.tools.evaluation.result import Result, name_of
        from fastgrpo.tools.reward_functions import RewardError
        from fastgrpo.tools.wording import ToolError
    try:
        problems = read_problems(arguments.problems, arguments.limit)
        judge = _judge(arguments, problems)
        step = _step_of(arguments) if arguments.log else None
        _check_outputs(arguments)
        with errors.status(f"loading {arguments.model}"), quiet_libraries():
            model, tokenizer = load_policy(arguments.model, arguments.base, _device(arguments.device))
        lengths = [len(ids) for ids in tokenised(tokenizer, [problem.prompt for problem in problems], None)]
        check_room(lengths, arguments.max_new_tokens, context_of(model.config))
    except ValueError as error:
        return _complain(error, USAGE)
    except Exception as error:  # a model too large for the device, say
        return _complain(error, FAILED)
    results = []
    try:
        if arguments.reward:
            judge.try_out(problems[0])
        with Display(errors) as display:
            for temperature, samples in ways:
                display.begin(f"pass@1, {name_of(temperature, samples)}", len(problems))
                with quiet_libraries():
                    found = evaluate_pass_at_1(
                        model,
                        tokenizer,
                        problems,
                        judge,
                        max_new_tokens=arguments.max_new_tokens,
                        batch_size=arguments.batch_size,
                        samples=samples,
                        temperature=temperature,
                        seed=arguments.seed,
                        progress=lambda done, _: display.advance(done),
                    )
                rewards = getattr(judge, "rewards", [])
                results.append(Result(found, temperature, rewards[-len(found.correct) :]))
                display.end(f"{found.rate:.1%}")
        _write(arguments, problems, results, step)
    except ToolError as error:
        return _complain(error, FAILED if isinstance(error, RewardError) else USAGE)
    except Exception as error:  # a user's model, reward and disk raise what they like
        return _complain(error, FAILED)
    if arguments.json:
        print_json(
            {
                "model": str(arguments.model),
                "problems": str(arguments.problems),
                "step": step,
                "results": [result.values for result in results],
            }
        )
    else:
        _show(results)
    for result in results:
        if result.unjudged:
            print(f"fastgrpo eval: {result.name}: {result.unjudged_text}; they are in no figure", file=sys.stderr)
    return DONE


def _complain(error: Exception, status: int) -> int:
    from fastgrpo.tools.wording import ToolError, named, reason

    own = status == USAGE or isinstance(error, ToolError)
    text = str(error) if own else reason(error) if isinstance(error, ValueError) else named(error)
    print(f"fastgrpo eval: {text}", file=sys.stderr)
    remedy = getattr(error, "remedy", "")
    if remedy:
        print(f"  -> {remedy}", file=sys.stderr)
    return status


def _ways(arguments: argparse.Namespace) -> list[tuple[float | None, int]]:
    """(temperature, samples) of each pass."""
    sampled = arguments.samples is not None or arguments.temperature is not None
    if arguments.no_greedy and not sampled:
        arguments.error("argument --no-greedy: leaves nothing to do without --samples")
    ways: list[tuple[float | None, int]] = [] if arguments.no_greedy else [(None, 1)]
    if sampled:
        ways.append((1.0 if arguments.temperature is None else arguments.temperature, arguments.samples or 1))
    return ways


def _judge(arguments: argparse.Namespace, problems: Sequence[Problem]) -> Callable[[Problem, str], bool]:
    from fastgrpo.tools.evaluation.problems import Rewarded, matcher
    from fastgrpo.tools.reward_functions import load_function

    if arguments.reward is None:
        return matcher(arguments.match, problems)
    return Rewarded(arguments.reward, load_function(arguments.reward), arguments.solved_at)


def _step_of(arguments: argparse.Namespace) -> int:
    from fastgrpo.runlog import read_run_log
    from fastgrpo.tools.evaluation.loading import steps_of

    try:
        record = read_run_log(arguments.log)
    except OSError as error:
        raise ValueError(str(error)) from error
    if arguments.step is not None:
        return arguments.step
    saved = steps_of(arguments.model)
    if saved is not None:
        return saved
    return record.steps[-1]["step"] if record.steps else 0


def _device(name: str | None) -> Any:
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if chosen in there and not there[chosen]():
        raise ValueError(f"--device {chosen}: torch finds no such device here; leave it out.")
    return torch.device(chosen)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Whether what is found can be written, before it is found; leaves nothing behind."""
    from fastgrpo.tools.wording import ToolError

    path = arguments.answers
    if path is not None:
        if path.exists() and path.samefile(arguments.problems):
            raise ToolError(f"--answers {path} is the file of the problems, and would overwrite it", "name another")
        new = not path.exists()
        try:
            path.open("a").close()
        except OSError as error:
            raise ToolError(
                f"--answers {path} cannot be written: {error.strerror}", "name a file in a folder that is there"
            ) from error
        if new:
            path.unlink()
    if arguments.log is not None:
        from fastgrpo.runlog import read_run_log

        file = read_run_log(arguments.log).path
        try:
            file.open("r+b").close()
        except OSError as error:
            raise ToolError(f"--log {file} cannot be written: {error.strerror}", "mend its permissions") from error


def _write(
    arguments: argparse.Namespace, problems: Sequence[Problem], results: Sequence[Result], step: int | None
) -> None:
    from fastgrpo.runlog import append_eval

    if arguments.answers:
        with arguments.answers.open("w", encoding="utf-8") as file:
            for line in (line for result in results for line in result.answers(problems)):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    for result in results if arguments.log else ():
        append_eval(arguments.log, step, **result.logged)


def _show(results: Sequence[Result]) -> None:
    from rich.table import Table

    columns = ["answers", "pass@1", "standard error", "problems", "mean reward"]
    unjudged = any(result.unjudged for result in results)
    table = Table()
    for name in columns + ["not judged"] * unjudged:
        table.add_column(name, justify="left" if name == "answers" else "right")
    for result in results:
        values = result.values
        error, mean = values["standard_error"], values["mean_reward"]
        cells = [
            result.name,
            f"{values['pass_at_1']:.1%}",
            "-" if error is None else f"{error:.1%}",
            str(values["n"]),
            "-" if mean is None else f"{mean:.3f}",
        ]
        table.add_row(*cells, *[str(result.unjudged)] * unjudged)
    console().print(table)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is out of range; give a finite number")
    return value


def _above_zero(text: str) -> float:
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is greedy; leave it out, or give a number above 0")
    return value


def _step(text: str) -> int:
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is too small; give 0 or more")
    return value
