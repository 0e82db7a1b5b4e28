"""`python -m bench log`: what the run log costs of a step, measured inside a real run of the demo's toy."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fastgrpo
from bench import report
from fastgrpo.runlog import read_run_log
from fastgrpo.tools.demo.quiet import quiet_libraries
from fastgrpo.tools.demo.recipe import TOY
from fastgrpo.tools.demo.tasks import all_sums
from fastgrpo.tools.demo.toy import toy_model, toy_tokenizer
from fastgrpo.tools.demo.training import build_trainer, grpo_config
from fastgrpo.trl.clock import StepClock
from fastgrpo.trl.metrics import StepMetrics
from fastgrpo.trl.runlog import RunLogCallback

_COLUMNS = ("CPU ms of a step", "the log's ms", "share", "lines", "bytes a line")


def run(device: torch.device, steps: int, quick: bool) -> dict[str, Any]:
    """
    Trains the toy, patched, a line for every step, and prints the log's share of the processor time.

    Args:
        device: the toy's own, a CPU.
        steps: optimizer steps.
        quick: two rollouts of two prompts, to see that everything works.

    Returns:
        The run, see `report.record`.
    """
    recipe = replace(TOY, prompts_per_step=2, generations=2) if quick else TOY
    torch.manual_seed(0)
    tokenizer = toy_tokenizer()
    spent = [0.0]
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        config = grpo_config(recipe, steps, 0, Path(folder))
        sums = all_sums(recipe.template, 0)
        trainer = build_trainer(toy_model(tokenizer), tokenizer, sums, recipe, config, recipe.reward, [])
        with _watched(spent), fastgrpo.patch(trainer):
            began = time.process_time()
            trainer.train()
            whole = time.process_time() - began
        record = read_run_log(Path(folder))
        size = record.path.stat().st_size
    row = {
        "step_cpu_s": whole / steps,
        "log_cpu_s": spent[0] / steps,
        "share": spent[0] / whole,
        "lines": len(record.steps),
        "bytes_a_line": size / max(len(record.steps), 1),
    }
    cells = [
        f"{1e3 * row['step_cpu_s']:.1f}",
        f"{1e3 * row['log_cpu_s']:.3f}",
        f"{row['share']:.3%}",
        str(row["lines"]),
        f"{row['bytes_a_line']:.0f}",
    ]
    report.table("The run log inside a run of the toy", _COLUMNS, [cells])
    return report.record("log", device, {"steps": steps, "quick": quick}, [row], {"run log / step": row["share"]})


@contextmanager
def _watched(spent: list[float]) -> Iterator[None]:
    """While inside, the processor time of the callbacks, of lines and their writing, and of the clock's own work is counted."""
    hooks = ("on_train_begin", "on_step_begin", "on_step_end", "on_log")
    own = [
        (kind, name, kind.__dict__[name])
        for kind in (RunLogCallback, StepMetrics)
        for name in hooks
        if name in kind.__dict__
    ]
    timed = StepClock._timed

    def with_its_own_cost(
        self: StepClock, trainer: Any, attribute: str | None, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        began, inside = time.process_time(), [0.0]
        result = timed(self, trainer, attribute, _counted(method, inside), *args, **kwargs)
        spent[0] += time.process_time() - began - inside[0]
        return result

    for kind, name, method in own:
        setattr(kind, name, _counted(method, spent))
    StepClock._timed = with_its_own_cost
    try:
        yield
    finally:
        StepClock._timed = timed
        for kind, name, method in own:
            setattr(kind, name, method)


def _counted(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[0] += time.process_time() - began

    return counted
