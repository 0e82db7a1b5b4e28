"""`python -m bench host`: what one update asks of the processor, counted on a CPU: torch ops, autograd nodes, Python calls.

What has a kernel of its own on a card, and is many ops on a CPU, counts as one op here, and nothing inside it counts: attention
over segments (about six launches on a card), rotary embeddings, the gate of an MLP, an RMS norm.
"""

from __future__ import annotations

import cProfile
import importlib
import pstats
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import trl
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import fastgrpo
from bench import report
from bench.update import PATCHED, STOCK, build_trainer, one_update, synthetic_batch
from bench.workloads import QUICK

DEEP = replace(QUICK, name="28 layers of Qwen3", layers=28, micro_batch=4, family="qwen3", reference=False)
_NODE = "autograd::engine::evaluate_function: "
_KERNEL = "bench::kernel"
_KERNELS = {
    "fastgrpo.attention": ("_attend", "_attend_backward"),
    "fastgrpo.rotary": ("_rotate",),
    "fastgrpo.mlp": ("swiglu", "swiglu_grad"),
}
# Ops without a kernel, and ops that have one only where they copy.
_VIEWS = {
    *(
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "expand",
        "lift_fresh",
        "narrow",
        "permute",
        "select",
        "slice",
        "split",
    ),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
    *("empty", "empty_like", "empty_strided", "new_empty", "resolve_conj", "resolve_neg"),
}
_COPIES = {"contiguous", "flatten", "reshape", "to"}
_COUNTS = ("torch ops", "with a kernel", "autograd nodes", "Python calls")


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
                trainer._get_per_token_logps_and_entropies.fused.rms_norm = _norm_as_on_a_card
            with _kernels_counted_as_one() as paused:
                rows.append({"path": name, **counts(lambda trainer=trainer: one_update(trainer), paused)})
            fastgrpo.unpatch(trainer)
    report.table(
        "One update, counted", ["", *_COUNTS], [[row["path"], *(str(row[c]) for c in _COUNTS)] for row in rows]
    )
    ratios = {f"{count}: fastgrpo over TRL": rows[1][count] / rows[0][count] for count in _COUNTS}
    return report.record("host", device, {"old_pass": old_pass, "layers": workload.layers}, rows, ratios)


def counts(function: Callable[[], Any], paused: list[cProfile.Profile]) -> dict[str, int]:
    """
    What a call does, after two to warm up.

    Args:
        function: the call.
        paused: profiles in this list are switched off inside a kernel.

    Returns:
        Torch ops that Python or an autograd node called (those inside other ops left out), those of them that are more than
        views, autograd nodes that ran, and calls of Python functions, built-in ones included.
    """
    for _ in range(2):
        function()
    calls = cProfile.Profile()
    paused.append(calls)
    calls.runcall(function)
    paused.clear()
    ops, kernels, nodes = torch_counts(function)
    numbers = (ops.total(), kernels.total(), nodes.total(), pstats.Stats(calls).total_calls)
    return dict(zip(_COUNTS, numbers, strict=True))


def torch_counts(function: Callable[[], Any]) -> tuple[Counter, Counter, Counter]:
    """Torch ops, those of them with a kernel, and autograd nodes that a call runs, by name."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    ops, kernels, nodes = Counter(), Counter(), Counter()
    for event in profiled.events():
        if event.name.startswith(_NODE):
            nodes[event.name.removeprefix(_NODE)] += 1
        elif _is_op(event) and not (event.cpu_parent is not None and _is_op(event.cpu_parent)):
            name = event.name.removeprefix("aten::")
            ops[name] += 1
            if name not in _VIEWS and (name not in _COPIES or any(_copies(child) for child in event.cpu_children)):
                kernels[name] += 1
    return ops, kernels, nodes


def _copies(event: Any) -> bool:
    return event.name in ("aten::_to_copy", "aten::clone", "aten::copy_")


def _is_op(event: Any) -> bool:
    return event.name.startswith("aten::") or event.name == _KERNEL


@contextmanager
def _kernels_counted_as_one() -> Iterator[list[cProfile.Profile]]:
    """While this is open, what has a kernel on a card is one op; profiles in the list are switched off inside."""
    paused: list[cProfile.Profile] = []
    before = []
    for module, names in _KERNELS.items():
        home = importlib.import_module(module)
        for name in names:
            before.append((home, name, getattr(home, name)))
            setattr(home, name, _as_one(getattr(home, name), paused))
    try:
        yield paused
    finally:
        for home, name, function in before:
            setattr(home, name, function)


def _as_one(function: Callable[..., Any], paused: list[cProfile.Profile]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        for calls in paused:
            calls.disable()
        try:
            with record_function(_KERNEL):
                return function(*args, **kwargs)
        finally:
            for calls in paused:
                calls.enable()

    return kernel


def _norm_as_on_a_card(x: Tensor, shape: Any, weight: Tensor, epsilon: float) -> tuple[Tensor]:
    """One op and one node, as torch's kernel, which a CPU has not; without the norm."""
    return (torch.mul(x, weight),)


def _as_on_a_card(trainer: trl.GRPOTrainer) -> None:
    """What is frozen in bf16, as TRL loads it there, and as `bench update` builds it on CUDA."""
    for parameter in trainer.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
