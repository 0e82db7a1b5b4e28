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
    from fastgrpo.tools.evaluate import PassAt1
    from fastgrpo.tools.evaluation.problems import Problem

_DESCRIPTION = (
    "Measures pass@1 of a saved model, a checkpoint or an adapter on held-out problems: greedy, and with --samples also the "
    "mean over sampled answers. It needs no trainer, so it serves for a model before training and after, whoever trained it; "
    "--log writes what it finds into the run's log, where `fastgrpo report` shows it."
)
_EXIT_STATUS = """\
exit status:
  0    done
  1    generating or judging answers failed, or something cannot be written
  2    wrong usage, or a model, problems or a log that cannot be read
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
    judged.add_argument("--reward", metavar="MODULE:NAME", help="a reward function, as TRL calls it, judges instead")
    parser.add_argument(
        "--solved-at",
        type=_real,
        default=1.0,
        metavar="R",
        help="least reward of a right answer (default: %(default)s)",
    )
    parser.add_argument("--samples", type=positive, metavar="K", help="also K sampled answers to each problem")
    parser.add_argument(
        "--temperature", type=_above_zero, metavar="T", help="of the sampling (default: 1.0); with it, --samples is 1"
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
    try:
        with errors.status("importing torch and transformers"):
            from fastgrpo.runlog import append_eval
            from fastgrpo.tools.demo.display import Display
            from fastgrpo.tools.demo.quiet import quiet_libraries
            from fastgrpo.tools.evaluate import evaluate_pass_at_1
            from fastgrpo.tools.evaluation.loading import load_policy
            from fastgrpo.tools.evaluation.problems import read_problems

        problems = read_problems(arguments.problems, arguments.limit)
        judge = _judge(arguments, problems)
        step = _step_of(arguments) if arguments.log else None
        with errors.status(f"loading {arguments.model}"), quiet_libraries():
            model, tokenizer = load_policy(arguments.model, arguments.base, _device(arguments.device))
    except ValueError as error:
        print(f"fastgrpo eval: {error}", file=sys.stderr)
        return USAGE
    results = []
    try:
        with Display(errors) as display:
            for temperature, samples in ways:
                name = "greedy" if temperature is None else f"{samples} samples, temperature {temperature:g}"
                display.begin(f"pass@1, {name}", len(problems))
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
                display.end(f"{found.rate:.1%}")
                results.append(_result(found, temperature, judge))
                if arguments.answers:
                    _write_answers(arguments.answers, problems, found, temperature, new=len(results) == 1)
        for result in results if arguments.log else ():
            values = {name: result[name] for name in ("pass_at_1", "n", "temperature", "samples")}
            append_eval(arguments.log, step, **values)
    except Exception as error:  # a user's model, reward and disk raise what they like
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"fastgrpo eval: {type(error).__name__}: {text}", file=sys.stderr)
        return FAILED
    if arguments.json:
        print_json(
            {"model": str(arguments.model), "problems": str(arguments.problems), "step": step, "results": results}
        )
    else:
        _show(results)
    return DONE


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
    from fastgrpo.tools.doctor.rewards import load_function
    from fastgrpo.tools.evaluation.problems import Rewarded, matcher

    if arguments.reward is None:
        return matcher(arguments.match, problems)
    return Rewarded(load_function(arguments.reward), arguments.solved_at)


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


def _result(found: PassAt1, temperature: float | None, judge: Any) -> dict[str, Any]:
    rewards = getattr(judge, "rewards", [])
    known = [reward for reward in rewards if math.isfinite(reward)]
    mean = sum(known) / len(known) if known else None
    rewards.clear()
    error = None if math.isnan(found.error) else found.error
    return {
        "pass_at_1": found.rate,
        "standard_error": error,
        "n": found.n,
        "temperature": temperature,
        "samples": found.samples,
        "mean_reward": mean,
    }


def _write_answers(
    path: Path, problems: Sequence[Problem], found: PassAt1, temperature: float | None, new: bool
) -> None:
    with path.open("w" if new else "a", encoding="utf-8") as file:
        for index, (text, correct) in enumerate(zip(found.answers, found.correct, strict=True)):
            problem = problems[index // found.samples]
            line = {"prompt": problem.prompt, "completion": text, "solved": correct, "temperature": temperature}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _show(results: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table()
    for name in ("answers", "pass@1", "standard error", "problems", "mean reward"):
        table.add_column(name, justify="left" if name == "answers" else "right")
    for result in results:
        greedy = result["temperature"] is None
        name = "greedy" if greedy else f"{result['samples']} sampled each, temperature {result['temperature']:g}"
        error, mean = result["standard_error"], result["mean_reward"]
        table.add_row(
            name,
            f"{result['pass_at_1']:.1%}",
            "-" if error is None else f"{error:.1%}",
            str(result["n"]),
            "-" if mean is None else f"{mean:.3f}",
        )
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
