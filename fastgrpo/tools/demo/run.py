"""A demo from start to end: model, pass@1, training, pass@1, picture."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import fastgrpo
from fastgrpo.runlog import RunLog, read_run_log
from fastgrpo.tools.demo.display import Display
from fastgrpo.tools.demo.errors import Stopped
from fastgrpo.tools.demo.interrupt import Interrupts
from fastgrpo.tools.demo.loading import load
from fastgrpo.tools.demo.quiet import quiet_libraries
from fastgrpo.tools.demo.recipe import SMOLLM2, TOY, Recipe
from fastgrpo.tools.demo.smollm import fetch_gguf, find_gguf
from fastgrpo.tools.demo.summary import print_summary
from fastgrpo.tools.demo.tasks import Sum, all_sums, is_correct
from fastgrpo.tools.demo.toy import LOSS_GOAL, MAX_STEPS, pretrain, toy_model, toy_tokenizer
from fastgrpo.tools.demo.training import build_trainer, grpo_config
from fastgrpo.tools.evaluate import PassAt1, evaluate_pass_at_1
from fastgrpo.tools.plot import missing_matplotlib, plot_reward
from fastgrpo.tools.process import INTERRUPTED, USAGE
from fastgrpo.trl.clock import StepClock
from fastgrpo.trl.compat import check_installation
from fastgrpo.trl.runlog import RunLogCallback, describe_run

PATCH = fastgrpo.Options(run_log=False)
"""The demo's log holds its evaluations too, so it writes it itself."""

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@dataclass(frozen=True)
class DemoOptions:
    """
    What a user chose; see `fastgrpo demo --help`.

    Attributes:
        toy: the toy instead of SmolLM2.
        model: a local model instead of SmolLM2.
        steps: optimizer steps; None = the recipe's.
        pretrain_steps: steps of the toy's pre-training at most; None = as many as it takes.
        held_out: problems for pass@1; None = the recipe's.
        device: "cpu", or "cuda" for the first GPU.
        seed: of everything random.
        name: of the run's folder; None = "demo" or "demo-toy".
        runs_dir: where that folder is made.
        stock: leave TRL unpatched.
    """

    toy: bool = False
    model: Path | None = None
    steps: int | None = None
    pretrain_steps: int | None = None
    held_out: int | None = None
    device: str = "cpu"
    seed: int = 0
    name: str | None = None
    runs_dir: Path = Path("runs")
    stock: bool = False

    @property
    def recipe(self) -> Recipe:
        """The numbers of the chosen demo."""
        return TOY if self.toy else SMOLLM2


def run_demo(options: DemoOptions, console: Console, began: float | None = None) -> int:
    """
    Runs a demo.

    Args:
        options: what to run.
        console: where to show it.
        began: `time.perf_counter()` when the user's wait began; None = now.

    Returns:
        exit status: 0, or 130 after Ctrl-C, with a valid log in both cases.

    Raises:
        Stopped: something its user can mend.
    """
    began = time.perf_counter() if began is None else began
    no_picture = missing_matplotlib()
    if no_picture:
        say(console, f"There will be no picture: {no_picture}.")
    if not options.stock:
        _refuse_unsupported(check_installation)
    _check_device(options.device)
    check_writable(options.runs_dir)
    source = None if options.toy else _find_model(options, console)
    folder = make_run_folder(options.runs_dir, options.name or ("demo-toy" if options.toy else "demo"))
    with Interrupts() as interrupts:
        status = 0
        outcome = None
        try:
            with quiet_libraries():
                outcome = _train(options, source, folder, console, interrupts)
        except KeyboardInterrupt:
            status = INTERRUPTED
        record = read_run_log(folder)
        if outcome is None:
            say(console, f"Interrupted after {len(record.steps)} training steps.")
        else:
            print_summary(console, record, time.perf_counter() - began, *outcome)
        picture = folder / "reward.png"
        if record.rewards and not no_picture:
            with quiet_libraries():
                plot_reward(
                    record, picture, f"{record.run['model']} on two-digit sums, GRPO on {_place(options.device)}"
                )
        for path in filter(Path.exists, (record.path, picture)):
            say(console, str(path))
    return status


def say(console: Console, text: str) -> None:
    """A plain line: no markup, no colours, not broken where the terminal ends."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def check_writable(runs_dir: Path) -> None:
    """Makes the folder of all runs; raises `Stopped` unless files can be made in it."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=runs_dir).close()
    except (FileExistsError, NotADirectoryError) as error:
        raise Stopped(f"{runs_dir} is, or lies in, a file that is no folder; choose another --runs-dir.") from error
    except OSError as error:
        raise Stopped(f"{runs_dir} cannot be written to: {error.strerror}; choose another --runs-dir.") from error


def make_run_folder(runs_dir: Path, name: str) -> Path:
    """A new folder `runs_dir/name`, or `name-2`, `name-3`, ... where there is one already."""
    for number in itertools.count(1):
        folder = runs_dir / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise Stopped(
                f"the folder {name!r} cannot be made in {runs_dir}: {error.strerror}; choose another --name."
            ) from error
    raise AssertionError


def _place(device: str) -> str:
    return "a CPU" if device == "cpu" else torch.cuda.get_device_name(device)


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise Stopped(
            "--device cuda: torch finds no GPU here. `fastgrpo doctor` tells why; leave --device out for the CPU.",
            USAGE,
        )


def _find_model(options: DemoOptions, console: Console) -> Path:
    if options.model is not None:
        if not options.model.exists():
            raise Stopped(
                f"there is no {options.model}; --model takes a folder as save_pretrained writes it, or a .gguf.", USAGE
            )
        source = options.model
    else:
        source = find_gguf()
    if (source is None or source.is_file()) and find_spec("gguf") is None:
        raise Stopped(
            'The model is a GGUF file; reading it needs gguf: pip install "fastgrpo[demo]". `fastgrpo demo --toy` runs without.'
        )
    return source or fetch_gguf(lambda text: say(console, text))


def _train(
    options: DemoOptions, source: Path | None, folder: Path, console: Console, interrupts: Interrupts
) -> tuple[list[Sum], PassAt1, PassAt1]:
    """The run itself; returns the held-out sums and how they went before and after."""
    recipe = options.recipe
    steps = options.steps or recipe.steps
    torch.manual_seed(options.seed)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    sums = all_sums(recipe.template, options.seed)
    split = options.held_out or recipe.held_out
    held_out, training = sums[:split], sums[split:]
    config = grpo_config(recipe, steps, options.seed, folder, options.device)
    header = describe_run(
        config,
        model=str(options.model) if options.model else recipe.model,
        rollout_path="transformers",
        device=options.device,
        options=None if options.stock else PATCH,
    )
    clock = StepClock()
    with RunLog(folder / "log.jsonl", **header) as log, Display(console) as display:

        def on_step(values: dict[str, Any]) -> None:
            interrupts.check()
            display.step(values)

        model, tokenizer = _pretrained_toy(options, training, display) if source is None else _loaded(source, display)
        callback = RunLogCallback(log, clock, on_step)
        trainer = build_trainer(
            model, tokenizer, training, recipe, config, clock.timed_reward(recipe.reward), [callback]
        )
        if not options.stock:
            _refuse_unsupported(lambda: fastgrpo.patch(trainer, PATCH))

        def evaluate(when: str, step: int) -> PassAt1:
            display.begin(f"pass@1 {when} training", len(held_out))
            outcome = evaluate_pass_at_1(
                trainer.model,
                tokenizer,
                held_out,
                is_correct,
                max_new_tokens=recipe.max_completion_length,
                progress=lambda done, _: display.advance(done),
            )
            log.eval(step, outcome.rate, outcome.n)
            display.end(f"{outcome.rate:.1%}")
            return outcome

        before = evaluate("before", 0)
        display.begin("training" + (", stock TRL" if options.stock else ""), steps)
        with clock.watch(trainer.model):
            trainer.train()
        display.end()
        return held_out, before, evaluate("after", steps)


def _loaded(source: Path, display: Display) -> Loaded:
    display.begin("loading")
    model, tokenizer = load(source)
    display.end(f"{source.name}, {model.num_parameters() / 1e6:.0f} M parameters")
    return model, tokenizer


def _pretrained_toy(options: DemoOptions, training: list[Sum], display: Display) -> Loaded:
    tokenizer = toy_tokenizer()
    model = toy_model(tokenizer).to(options.device)
    display.begin("pre-training the toy")
    last = 0.0

    def progress(step: int, loss: float) -> None:
        nonlocal last
        last = loss
        display.advance(step, f"loss {loss:.2f}, until {LOSS_GOAL}")

    pretrain(model, tokenizer, training, options.seed, options.pretrain_steps or MAX_STEPS, progress)
    display.end(f"{model.num_parameters() / 1e6:.2f} M parameters, loss {last:.2f}")
    return model, tokenizer


def _refuse_unsupported(check: Callable[[], object]) -> None:
    try:
        check()
    except fastgrpo.UnsupportedError as error:
        raise Stopped(f"{error} (`fastgrpo demo --stock` trains with TRL unpatched.)") from error
