"""`python -m bench long`: an update of eight long sequences: stock one at a time, patched as mini-batches with offload."""

from __future__ import annotations

import gc
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

import fastgrpo
from bench import report
from bench.measure import interleave
from bench.update import PATCHED, QUICK, STOCK, Workload, build_trainer, one_update, synthetic_batch

GB = 1e9
_COLUMNS = ("", "sequences a micro-batch", "peak GB, model included", "s", "s a sequence", "time / ours")

LLAMA_8B = Workload(
    "Llama-3.1-8B, 480 + 20,000 tokens",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    intermediate=14336,
    vocabulary=128256,
    prompts=1,
    completions=8,
    micro_batch=8,
    prompt_tokens=(480, 480),
    completion_median=20000,
    completion_spread=0.0,
    completion_max=20000,
)
QUICK_LONG = replace(QUICK, prompts=1, completions=4, micro_batch=4, completion_median=60, completion_max=60)


def run(device: torch.device, rounds: int, quick: bool) -> dict[str, Any]:
    """
    Measures peak memory and time with LoRA, gradient checkpointing and bf16, and prints the table.

    Args:
        device: where to run.
        rounds: updates that are timed, after one that counts memory.
        quick: a tiny model, to see that everything works; without offload, which is for CUDA.

    Returns:
        The run, see `report.record`.
    """
    for name in ("transformers", "trl", "accelerate", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    workload = QUICK_LONG if quick else LLAMA_8B
    offload = device.type == "cuda"
    cases = {
        STOCK: (replace(workload, micro_batch=1), None),
        PATCHED: (
            workload,
            fastgrpo.Options(mini_batch_size=1, offload_activations=offload, run_log=False, on_stale="ignore"),
        ),
    }
    lines = [_measure(name, *case, device, rounds) for name, case in cases.items()]
    stock, patched = lines
    report.table(f"One update of {workload.name}, LoRA, bf16, gradient checkpointing", _COLUMNS, _cells(lines))
    ratios = {f"{workload.name}/time: fastgrpo over TRL": patched["median_s"] / stock["median_s"]}
    if stock["peak_gb"] is not None:
        ratios[f"{workload.name}/peak memory: fastgrpo over TRL"] = patched["peak_gb"] / stock["peak_gb"]
    return report.record("long", device, {"workload": asdict(workload), "rounds": rounds}, lines, ratios)


def _measure(
    name: str, workload: Workload, options: fastgrpo.Options | None, device: torch.device, rounds: int
) -> dict[str, Any]:
    batch = synthetic_batch(workload, device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(workload, batch, device, "bfloat16", "lora", True, False, folder)
        if options is not None:
            fastgrpo.patch(trainer, options)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        loss = one_update(trainer)
        peak = torch.cuda.max_memory_allocated(device) / GB if device.type == "cuda" else None
        timing = interleave({name: partial(one_update, trainer)}, rounds, 0, device)[name]
        fastgrpo.unpatch(trainer)
        del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "path": name,
        "micro_batch": workload.micro_batch,
        "options": None if options is None else asdict(options),
        "loss": loss,
        "peak_gb": peak,
        "seconds": timing.seconds,
        "median_s": timing.median,
        "sequences": workload.prompts * workload.completions,
    }


def _cells(lines: list[dict[str, Any]]) -> Iterator[list[str]]:
    ours = lines[-1]["median_s"]
    for line in lines:
        yield [
            line["path"],
            str(line["micro_batch"]),
            "" if line["peak_gb"] is None else f"{line['peak_gb']:.1f}",
            f"{line['median_s']:.2f}",
            f"{line['median_s'] / line['sequences']:.2f}",
            f"{line['median_s'] / ours:.2f}",
        ]
