"""`python -m bench host`: what one update asks of the processor, counted on a CPU: torch ops, autograd nodes, Python calls."""

from __future__ import annotations

import cProfile
import pstats
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import trl
from torch.profiler import ProfilerActivity, profile

import fastgrpo
from bench import report
from bench.update import PATCHED, STOCK, Workload, build_trainer, one_update, synthetic_batch

DEEP = Workload(
    "28 layers of Qwen3",
    hidden=32,
    layers=28,
    heads=2,
    kv_heads=1,
    intermediate=64,
    vocabulary=503,
    prompts=2,
    completions=2,
    micro_batch=4,
    prompt_tokens=(4, 12),
    completion_median=8,
    completion_spread=0.8,
    completion_max=24,
    family="qwen3",
)
_NODE = "autograd::engine::evaluate_function: "
_COUNTS = ("torch ops", "autograd nodes", "Python calls")


def run(old_pass: bool, quick: bool) -> dict[str, Any]:
    """
    Counts one update, LoRA with gradient checkpointing under bf16 autocast, stock and patched.

    Args:
        old_pass: with the separate pass for old log-probs.
        quick: two layers.

    Returns:
        The run, see `report.record`.
    """
    report.quiet()
    device = torch.device("cpu")
    workload = replace(DEEP, layers=2) if quick else DEEP
    batch = synthetic_batch(workload, device)
    rows = []
    for name in (STOCK, PATCHED):
        with tempfile.TemporaryDirectory() as folder:
            trainer = build_trainer(workload, batch, device, "bfloat16", "lora", True, old_pass, folder)
            _as_on_a_card(trainer)
            if name == PATCHED:
                fastgrpo.patch(trainer, fastgrpo.Options(run_log=False))
            rows.append({"path": name, **counts(lambda trainer=trainer: one_update(trainer))})
            fastgrpo.unpatch(trainer)
    report.table(
        "One update, counted", ["", *_COUNTS], [[row["path"], *(str(row[c]) for c in _COUNTS)] for row in rows]
    )
    ratios = {f"{count}: fastgrpo over TRL": rows[1][count] / rows[0][count] for count in _COUNTS}
    return report.record("host", device, {"old_pass": old_pass, "layers": workload.layers}, rows, ratios)


def counts(function: Callable[[], Any]) -> dict[str, int]:
    """
    What a call does, after two to warm up.

    Returns:
        Torch ops that Python or an autograd node called (those inside other ops left out), autograd nodes that ran, and calls
        of Python functions, built-in ones included.
    """
    for _ in range(2):
        function()
    calls = cProfile.Profile()
    calls.runcall(function)
    ops, nodes = torch_counts(function)
    return dict(zip(_COUNTS, (ops.total(), nodes.total(), pstats.Stats(calls).total_calls), strict=True))


def torch_counts(function: Callable[[], Any]) -> tuple[Counter, Counter]:
    """Torch ops and autograd nodes that a call runs, by name."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    ops: Counter = Counter()
    nodes: Counter = Counter()
    for event in profiled.events():
        if event.name.startswith(_NODE):
            nodes[event.name.removeprefix(_NODE)] += 1
        elif event.name.startswith("aten::") and not _inside_an_op(event):
            ops[event.name.removeprefix("aten::")] += 1
    return ops, nodes


def _inside_an_op(event: Any) -> bool:
    return event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")


def _as_on_a_card(trainer: trl.GRPOTrainer) -> None:
    """What is frozen in bf16, as TRL loads it there, and as `bench update` builds it on CUDA."""
    for parameter in trainer.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
