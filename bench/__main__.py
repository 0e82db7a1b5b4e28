"""Command line of the benchmarks; bench/README.md has the commands."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

# The profiler that counts memory on a CPU otherwise writes a line for every call.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from bench import report

_SELECTING = ("only", "task", "dtype", "data", "train", "part")
"""Options that choose what is measured; None where they are not given. Those that the stored run had too excuse nothing."""
_TRAINED, _PARTS = ("lora", "full"), ("sync", "steps", "large", "sleep")
_NAMED = 3


def main(arguments: list[str] | None = None) -> int:
    """
    Runs a benchmark.

    Args:
        arguments: as on the command line, without the program's name.

    Returns:
        Exit status: 0, or 1 where `--compare` finds a ratio that got worse by more than 5 %, is no number any more, or is not
        measured although nothing chosen leaves it out, or 2 where it cannot compare.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.bench == "summary":
        return _summarise(options.files, options.against)
    _check(options, parser)
    stored = None
    if options.compare:
        try:
            stored = report.load_baseline(options.compare, options.bench)
        except (OSError, ValueError) as error:
            report.say(f"cannot compare with {options.compare}: {error}")
            return 2
    # Before a build, a commit or --json changes what lies on the disk.
    report.source()
    device = torch.device(options.device)
    if device.type == "cpu" and options.threads:
        torch.set_num_threads(options.threads)
    trained = list(getattr(options, "train", None) or _TRAINED)
    rounds = options.rounds or (10 if device.type == "cuda" else 3)
    # On a CPU the calls that measure accuracy and memory are warm-up enough.
    warm_ups = 3 if device.type == "cuda" else 0
    so_far = report.keeper(options.json)
    if options.bench == "head":
        from bench import head

        names = options.dtype or (["bfloat16"] if device.type == "cuda" else ["float32", "bfloat16"])
        dtypes = [getattr(torch, name) for name in names]
        run = head.run(
            device,
            dtypes,
            rounds,
            warm_ups,
            options.quick,
            options.only,
            options.task,
            options.data,
            options.busy,
            so_far,
        )
    elif options.bench == "rows":
        from bench import rows

        run = rows.run(device, rounds, warm_ups, options.quick)
    elif options.bench == "train":
        from bench import train

        run = train.run(device, options.precision, trained, options.steps, options.quick, options.repeatable, so_far)
    elif options.bench == "log":
        from bench import log

        run = log.run(device, options.steps, options.quick)
    elif options.bench == "rollout":
        from bench import rollout

        run = rollout.run(device, list(options.part or _PARTS), options.rounds or 5, options.steps, options.quick)
    elif options.bench == "host":
        from bench import host

        run = host.run(options.old_pass, options.quick)
    elif options.bench == "plan":
        from bench import plan

        run = plan.run(device, options.only, options.quick)
    else:
        from bench import update

        run = update.run(
            device, options.precision, trained, options.old_pass, rounds, options.quick, options.only, so_far
        )
    report.say(report.describe(run))
    if options.json:
        report.write(options.json, run)
        report.say(f"written to {options.json}")
    if stored is None:
        return 0
    selects = any(getattr(options, name, None) is not None for name in _SELECTING)
    return _compare(run, stored, selects and not report.same_settings(run, stored))


def _summarise(files: list[Path], stored: list[Path]) -> int:
    from bench.summary import summarise

    text, unreadable = summarise(files, stored)
    print(text)
    for line in unreadable:
        print(f"cannot be read: {line}", file=sys.stderr)
    return 2 if unreadable else 0


def _compare(run: dict, stored: dict, selects: bool) -> int:
    common, worse = report.regressions(run, stored)
    for name in worse:
        before, now = stored["ratios"][name], run["ratios"][name]
        change = "no number" if math.isnan(now) else f"worse by {now / before - 1:.0%}"
        report.say(f"{change}: {name}: {before:.3f} -> {now:.3f}")
    vanished = report.vanished(run, stored)
    if vanished:
        why = "" if selects else ", and nothing chosen leaves them out"
        names = "; ".join(vanished[:_NAMED]) + "; ..." * (len(vanished) > _NAMED)
        report.say(f"{len(vanished)} of {len(stored['ratios'])} stored ratios were not measured{why}: {names}")
    new = len(run["ratios"]) - len(common)
    if new:
        report.say(f"{new} of {len(run['ratios'])} measured ratios are not in the stored run")
    report.say(
        f"{len(worse)} of {len(common)} ratios are more than {report.TOLERANCE:.0%} worse than on {stored['date']}"
    )
    if not common:
        report.say("the stored run measured something else: other shapes, data, dtypes or options")
        return 2
    return 1 if worse or (vanished and not selects) else 0


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program where options ask for what cannot be, before anything is measured."""
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device is {options.device}, and torch sees no CUDA device here; give cpu")
    if getattr(options, "busy", False) and options.device == "cpu":
        parser.error("--busy times calls behind other work of a device, and --device is cpu; leave it out")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads is {options.threads}; give at least 1")
    if options.json and (options.json.is_dir() or not _can_be_written(options.json)):
        parser.error(f"--json is {options.json}, which cannot be written; give the path of a file")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; give at least 1")
    least = 2 if options.bench == "train" else 1
    if getattr(options, "steps", least) < least:
        parser.error(
            f"--steps is {options.steps}; give at least {least}" + ", times are those after the first" * (least > 1)
        )


def _can_be_written(path: Path) -> bool:
    existing = path if path.exists() else next(folder for folder in path.absolute().parents if folder.exists())
    return os.access(existing, os.W_OK) and (existing is path or existing.is_dir())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="fastgrpo beside its peers, in one process.")
    benches = parser.add_subparsers(dest="bench", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    common.add_argument("--rounds", type=int, help="times that every case is timed (default: 3, on CUDA 10)")
    common.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: every core)")
    common.add_argument(
        "--quick", action="store_true", help="tiny shapes: shows that everything runs, measures nothing"
    )
    common.add_argument("--json", type=Path, metavar="PATH", help="write the run as JSON")
    common.add_argument(
        "--compare", type=Path, metavar="FILE", help="exit 1 where a ratio is over 5 %% worse than in FILE, or missing"
    )

    head = benches.add_parser("head", parents=[common], help="the head alone, against peers and the products it needs")
    head.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16", "float16"],
        help="default: float32 and bfloat16, on CUDA bfloat16",
    )
    head.add_argument("--only", nargs="+", metavar="TEXT", help="shapes whose name holds one of these")
    head.add_argument("--task", nargs="+", choices=["forward", "frozen", "trained", "entropy"], help="default: all")
    head.add_argument(
        "--data", choices=["mixed", "random", "peaked"], help="of every shape (default: as the shape says)"
    )
    head.add_argument("--busy", action="store_true", help="also behind other work of the device, as in a step (CUDA)")
    benches.add_parser("rows", parents=[common], help="the row kernels alone, against a copy (CUDA)")
    trained = argparse.ArgumentParser(add_help=False)
    trained.add_argument("--precision", default="float32", choices=["float32", "bfloat16"], help="bfloat16 = autocast")
    trained.add_argument("--train", nargs="+", choices=_TRAINED, help="default: both")
    train = benches.add_parser("train", parents=[common, trained], help="GRPO steps with generation, stock and patched")
    train.add_argument("--steps", type=int, default=4, help="optimizer steps of each run (default: 4)")
    train.add_argument("--repeatable", action="store_true", help="without cuDNN's attention, which is not")
    rollout = benches.add_parser("rollout", parents=[common], help="weights to vLLM and whole steps, stock and patched")
    rollout.add_argument("--part", nargs="+", choices=_PARTS, help="default: all")
    rollout.add_argument("--steps", type=int, default=3, help="optimizer steps of each run (default: 3)")
    log = benches.add_parser("log", parents=[common], help="what the run log costs of a step of the demo's toy (CPU)")
    log.add_argument("--steps", type=int, default=40, help="optimizer steps (default: 40)")
    plan = benches.add_parser("plan", parents=[common], help="the memory plan against what an update takes (CUDA)")
    plan.add_argument("--only", nargs="+", metavar="TEXT", help="settings whose name holds one of these")
    host = benches.add_parser("host", parents=[common], help="what one update asks of the processor, counted (CPU)")
    update = benches.add_parser("update", parents=[common, trained], help="a GRPOTrainer's update, stock and patched")
    for bench in (host, update):
        bench.add_argument(
            "--old-pass", action="store_true", help="num_iterations=2: with the separate pass for old log-probs"
        )
    update.add_argument("--only", nargs="+", metavar="TEXT", help="workloads whose name holds one of these")
    summary = benches.add_parser("summary", help="runs written with --json, as Markdown, beside stored ones")
    summary.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written with --json")
    summary.add_argument(
        "--against", nargs="+", type=Path, default=[], metavar="FILE", help="stored runs to compare with"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
