"""`python -m bench train`: a few steps of real GRPO training, generation included, stock and patched from one seed.

Both learn from the completions that stock drew, so that metrics can be compared where two runs draw different ones.
"""

from __future__ import annotations

import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastgrpo
from bench import report
from bench.measure import MIB
from bench.text import end_bias, odd_tokens, prompts, word_tokenizer
from bench.update import LORA_LAYERS, PATCHED, STOCK
from bench.workloads import QUICK, QWEN3_512, Workload

# Of the metrics that TRL logs, those that the first step's forward decides; the others are times, counts or learning rates.
_COMPARED = ("loss", "reward", "reward_std", "grad_norm", "entropy", "kl", "clip_ratio/region_mean")
# All that torch chooses from, without CUDNN_ATTENTION.
_REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_COLUMNS = (
    "",
    "step s",
    "generation s",
    "rest s",
    "rest / ours",
    "peak MiB",
    "beside the model",
    "first step as stock's",
)

TRAINED = replace(QWEN3_512, name="Qwen3-1.7B", completion_median=100, completion_max=256)
QUICK_TRAINED = replace(QUICK, completion_max=24)


@dataclass
class Training:
    """What a run of `train_once` left."""

    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    generation_seconds: list[float] = field(default_factory=list)
    drawn: list[Any] = field(default_factory=list)
    """What each step's generation returned: token ids of its completions, first of all."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """TRL's `log_history`."""
    loss_backend: str | None = None
    """How a head that trains got its loss, `fastgrpo.backends()["trainer loss"]`; None where it is TRL's or none trains."""
    peak_mib: float | None = None
    """Beside the model and what was there before; None on a CPU."""
    model_mib: float | None = None
    """All that was there before; most of it the model, in float32 where it trains."""

    @property
    def rest_seconds(self) -> list[float]:
        """Of each step, without generation."""
        return [step - generation for step, generation in zip(self.seconds, self.generation_seconds, strict=True)]


def run(
    device: torch.device,
    precision: str,
    train: list[str],
    steps: int,
    quick: bool,
    repeatable: bool = False,
    so_far: Callable[[dict], None] = lambda run: None,
) -> dict[str, Any]:
    """
    Trains stock and patched from one seed with LoRA and in full, and prints times, memory and whether the first steps agree:
    which completions each drew, and the metrics on those of stock.

    Args:
        device: where to run.
        precision: `"float32"`, or `"bfloat16"` for autocast (TRL's own default).
        train: of `"lora"` (rank 16 on all linear layers) and `"full"`.
        steps: optimizer steps of each run; times are those after the first.
        quick: a tiny model, to see that everything works.
        repeatable: without cuDNN's attention. Torch chooses it for generation on a GPU, and what it gives differs in its last
            bits from one call to the next, so that two runs of stock TRL draw other completions, too.
        so_far: given what there is of the run after each kind of training.

    Returns:
        The run, see `report.record`.
    """
    report.quiet()
    workload = QUICK_TRAINED if quick else TRAINED
    settings = {"workload": asdict(workload), "precision": precision, "train": train, "steps": steps}
    settings |= {"repeatable": repeatable}
    lines: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for kind in train:
        with sdpa_kernel(_REPEATABLE) if repeatable else nullcontext():
            stock = train_once(workload, device, precision, kind, steps, patched=False)
            patched = train_once(workload, device, precision, kind, steps, patched=True, replayed=stock.drawn)
        trainings = {STOCK: stock, PATCHED: patched}
        rest = {name: statistics.median(training.rest_seconds[1:]) for name, training in trainings.items()}
        key = f"{workload.name}/{precision}/{kind}"
        ratios[f"{key}/time without generation: fastgrpo over TRL"] = rest[PATCHED] / rest[STOCK]
        for name, training in trainings.items():
            lines.append(
                {
                    "case": kind,
                    "path": name,
                    "rest_seconds": rest[name],
                    "rest_over_fastgrpo": rest[name] / rest[PATCHED],
                    "same_completions": training.drawn[0] == stock.drawn[0],
                    "first_step": {metric: training.history[0].get(metric) for metric in _COMPARED},
                    **asdict(training),
                }
            )
            del lines[-1]["drawn"]
        if stock.peak_mib is not None and patched.peak_mib is not None:
            ratios[f"{key}/memory beside the model: fastgrpo over TRL"] = patched.peak_mib / stock.peak_mib
        so_far(report.record("train", device, settings, lines, ratios))
    report.table(f"GRPO steps of {workload.name}, random weights, {precision}", _COLUMNS, _cells(lines))
    for line in lines:
        report.say(f"{line['case']}, {line['path']}, first step: {line['first_step']}")
        if line["loss_backend"]:
            report.say(f"{line['case']}, {line['path']}, loss: {line['loss_backend']}")
    return report.record("train", device, settings, lines, ratios)


def train_once(
    workload: Workload,
    device: torch.device,
    precision: str,
    kind: str,
    steps: int,
    patched: bool,
    replayed: list[Any] | None = None,
) -> Training:
    """
    Trains a fresh model with TRL's own `train()`.

    Args:
        workload, device, precision, kind, steps: see `run`.
        patched: after `fastgrpo.patch`.
        replayed: what another run drew (`Training.drawn`): each step generates as always, and learns from these; None = from
            its own.

    Returns:
        What it left.
    """
    result = Training()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _build_trainer(workload, device, precision, kind, steps, folder)
        if patched:
            fastgrpo.patch(trainer, fastgrpo.Options(run_log=False))
        trainer._generate_single_turn = _recorded(trainer._generate_single_turn, result.drawn, replayed)
        trainer._generate = _timed(trainer._generate, result.generation_seconds, device)
        trainer.add_callback(_StepClock(result.seconds, device))
        before = 0
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
        if patched and "trainer loss" in fastgrpo.backends():
            entry = fastgrpo.backends()["trainer loss"]
            result.loss_backend = entry.implementation + (f": {entry.reason}" if entry.reason else "")
        if device.type == "cuda":
            result.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
            result.model_mib = before / MIB
        result.history = [dict(entry) for entry in trainer.state.log_history]
        del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


class _StepClock(transformers.TrainerCallback):
    def __init__(self, seconds: list[float], device: torch.device) -> None:
        self.seconds, self.device = seconds, device

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = _now(self.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(_now(self.device) - self.start)


def _timed(function: Callable[..., Any], seconds: list[float], device: torch.device) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = _now(device)
        result = function(*args, **kwargs)
        seconds.append(_now(device) - start)
        return result

    return timed


def _recorded(function: Callable[..., Any], drawn: list[Any], replayed: list[Any] | None) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        drawn.append(copy.deepcopy(function(*args, **kwargs)))
        return copy.deepcopy((replayed or drawn)[len(drawn) - 1])

    return recorded


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _build_trainer(
    workload: Workload,
    device: torch.device,
    precision: str,
    kind: str,
    steps: int,
    folder: str,
) -> trl.GRPOTrainer:
    torch.manual_seed(0)
    # TRL loads a base that is not trained in 16 bits; the adapters, and the model's rotary frequencies, stay in float32.
    frozen_in_16 = precision == "bfloat16" and device.type == "cuda" and kind == "lora"
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            workload.config(), dtype=torch.bfloat16 if frozen_in_16 else torch.float32
        )

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return odd_tokens(completion_ids)

    arguments = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=workload.micro_batch,
        gradient_accumulation_steps=workload.prompts * workload.completions // workload.micro_batch,
        num_generations=workload.completions,
        max_completion_length=workload.completion_max,
        generation_kwargs={"sequence_bias": [[[1], end_bias(workload)]]},
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=True,
        bf16=precision == "bfloat16",
        use_cpu=device.type == "cpu",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": list(prompts(workload, steps))}),
        processing_class=word_tokenizer(workload),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS) if kind == "lora" else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _cells(lines: list[dict[str, Any]]) -> Iterator[list[str]]:
    for stock, patched in zip(lines[::2], lines[1::2], strict=True):
        yield [patched["case"], *[""] * (len(_COLUMNS) - 1)]
        for line in (stock, patched):
            yield [
                f"  {line['path']}",
                f"{statistics.median(line['seconds'][1:]):.2f}",
                f"{statistics.median(line['generation_seconds'][1:]):.2f}",
                f"{line['rest_seconds']:.2f}",
                f"{line['rest_over_fastgrpo']:.2f}",
                "" if line["peak_mib"] is None else f"{line['model_mib'] + line['peak_mib']:.0f}",
                "" if line["peak_mib"] is None else f"{line['peak_mib']:.0f}",
                "" if line is stock else _agreement(stock, patched),
            ]
        yield []


def _agreement(stock: dict[str, Any], patched: dict[str, Any]) -> str:
    differences = [
        abs(value - patched["first_step"][name]) / max(abs(value), 1e-3)
        for name, value in stock["first_step"].items()
        if value is not None
    ]
    completions = "same completions" if patched["same_completions"] else "OTHER completions"
    return f"{completions} drawn; metrics on stock's within {max(differences):.1e}"
