"""`python -m bench rollout`: weights on their way to a vLLM engine of this process, and whole GRPO steps with it."""

from __future__ import annotations

import functools
import gc
import logging
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig

import fastgrpo
from bench import report
from bench.text import end_bias, odd_tokens, prompts, word_tokenizer
from bench.update import LORA_LAYERS, PATCHED, STOCK
from bench.workloads import QUICK, QWEN3_512, Workload

PARTS = ("sync", "steps", "large", "sleep")
# Generation batches of 32: TRL samples for two micro-batches at once.
SHORT = replace(QWEN3_512, name="1.7B, prompts to 512", prompts=4, completion_median=200, completion_max=512)
LONG = replace(SHORT, name="1.7B, prompts to 2048", prompt_tokens=(1536, 2048))
LARGE = replace(SHORT, name="8B", hidden=4096, layers=36, heads=32, kv_heads=8, intermediate=12288)
QUICK_SHORT = replace(QUICK, name="quick, short", family="qwen3")
QUICK_LONG = replace(QUICK_SHORT, name="quick, long", prompt_tokens=(12, 24))
_SYNC_COLUMNS = (
    "hand-over of weights",
    "median s",
    "/ TRL's",
    "samples s",
    "log-prob difference",
    "base weights changed",
)
_STEP_COLUMNS = (
    "GRPO steps",
    "step s",
    "TRL's / ours",
    "generation s",
    "ms a token",
    "sync s",
    "rest s",
    "first reward",
)


def run(device: torch.device, parts: list[str], rounds: int, steps: int, quick: bool) -> dict[str, Any]:
    """
    Stock TRL and patched, with one engine for both.

    `sync` and `large` (8B): seconds of a hand-over after the first, the largest difference of a log-prob between engine and
    trainer right after it, and how many base weights it changed. `sleep`: the same after the engine slept. `steps`: whole GRPO
    steps.

    Args:
        device: where to run; on a CPU only with `quick`.
        parts: of `PARTS`.
        rounds: hand-overs timed of each kind.
        steps: optimizer steps of each training; times are those after the first.
        quick: tiny models, to see that everything works.

    Returns:
        The run, see `report.record`.
    """
    for name in ("transformers", "trl", "accelerate", "datasets", "vllm"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    short, long, large = (QUICK_SHORT, QUICK_LONG, QUICK_SHORT) if quick else (SHORT, LONG, LARGE)
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(device, Path(folder), long.prompt_tokens[1] + long.completion_max + 8)
        jobs: dict[str, list[Callable[[], list[dict[str, Any]]]]] = {
            "sync": [functools.partial(measure_sync, bench, short, rounds)],
            "steps": [functools.partial(measure_steps, bench, workload, steps) for workload in (short, long)],
            "large": [functools.partial(measure_sync, bench, large, rounds)],
            "sleep": [functools.partial(measure_sync, bench, short, rounds, sleep=True)],
        }
        for part in parts:
            for job in jobs[part]:
                began = time.perf_counter()
                try:
                    lines = [{"part": part, **line} for line in job()]
                except Exception:  # what was measured before is not to be lost
                    report.say(f"{part} did not run:\n{traceback.format_exc()[-3000:]}")
                    lines = [{"part": part, "error": traceback.format_exc()[-3000:]}]
                else:
                    for key, ratio in _ratios(part, lines):
                        ratios[key] = ratio
                    _show(part, lines)
                report.say(f"{part}: {time.perf_counter() - began:.0f} s in all")
                rows += lines
    settings = {
        "workloads": [asdict(w) for w in (short, long, large)],
        "rounds": rounds,
        "steps": steps,
        "parts": parts,
    }
    return report.record("rollout", device, settings, rows, ratios)


class _Bench:
    """Engines and trainers: one engine a model, whose weights whoever comes next writes."""

    def __init__(self, device: torch.device, folder: Path, longest: int) -> None:
        self.device, self.folder, self.longest = device, folder, longest
        self.engines: dict[tuple[str, bool], Any] = {}
        os.environ.update(VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        if device.type == "cpu":
            os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
            _keep_cpu_weights_as_they_are()

    def trainer(self, workload: Workload, steps: int, sleep: bool = False) -> trl.GRPOTrainer:
        """LoRA of rank 16 on all linear layers, random weights."""
        import trl.generation.vllm_generation as engines

        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
        ):  # TRL sets them for vLLM; the next trainer would take them for DDP's
            os.environ.pop(name, None)
        torch.manual_seed(0)
        folder = self.folder / f"{workload.hidden}x{workload.layers}"
        tokenizer = word_tokenizer(workload)
        config = workload.config()
        config.architectures, config.dtype = ["Qwen3ForCausalLM"], self.dtype
        if not folder.exists():
            config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        config._name_or_path = str(folder)
        with self.device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        model.name_or_path = str(folder)
        stock = engines.LLM
        engines.LLM = functools.partial(self._engine, stock, str(folder), sleep)
        try:
            trainer = trl.GRPOTrainer(
                model=model,
                reward_funcs=odd_tokens,
                args=self._arguments(workload, steps, sleep),
                train_dataset=Dataset.from_dict({"prompt": list(prompts(workload, steps))}),
                processing_class=tokenizer,
                peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS),
            )
        finally:
            engines.LLM = stock
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def _engine(self, build: Callable[..., Any], folder: str, sleep: bool, **arguments: Any) -> Any:
        if (folder, sleep) not in self.engines:
            # No weights are read: the first hand-over brings all. CUDA graphs of decoding, without a compilation of minutes.
            extra: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": 32, "dtype": self.dtype}
            if self.device.type == "cpu" or sleep:
                extra["enforce_eager"] = True
            else:
                extra["compilation_config"] = {
                    "mode": 0,
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32],
                }
            began = time.perf_counter()
            self.engines[folder, sleep] = build(**{**arguments, **extra})
            report.say(f"engine of {Path(folder).name}: {time.perf_counter() - began:.0f} s")
        return self.engines[folder, sleep]

    def _arguments(self, workload: Workload, steps: int, sleep: bool) -> trl.GRPOConfig:
        return trl.GRPOConfig(
            output_dir=str(self.folder / "out"),
            per_device_train_batch_size=workload.micro_batch,
            gradient_accumulation_steps=workload.prompts * workload.completions // workload.micro_batch,
            num_generations=workload.completions,
            max_completion_length=workload.completion_max,
            generation_kwargs={"logit_bias": {1: end_bias(workload)}},
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            gradient_checkpointing=True,
            bf16=self.device.type == "cuda",
            use_cpu=self.device.type == "cpu",
            report_to="none",
            disable_tqdm=True,
            seed=0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.25,
            vllm_max_model_length=self.longest,
            vllm_enable_sleep_mode=sleep,
        )


def measure_sync(bench: _Bench, workload: Workload, rounds: int, sleep: bool = False) -> list[dict[str, Any]]:
    """
    Hand-overs, patched first, since stock TRL's change the base.

    Args:
        bench: engines.
        workload: the model.
        rounds: hand-overs of each kind.
        sleep: the engine sleeps before each, and with it the first is like every other.

    Returns:
        A line for each kind.
    """
    trainer = bench.trainer(workload, 1, sleep)
    _grow_adapter(trainer)
    base = {
        name: w.detach().clone() for name, w in trainer.model.named_parameters() if trainer.model.prefix not in name
    }
    lines = []
    for kind in (PATCHED, STOCK):
        handle = fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)) if kind == PATCHED else None
        seconds = []
        for _ in range(rounds + 1):
            if sleep and not trainer.vllm_generation._llm_weights_sleeping:
                trainer.vllm_generation.llm.wake_up(tags=["kv_cache"])  # as after a generation
                trainer.vllm_generation.llm.sleep(level=2)
                trainer.vllm_generation._llm_weights_sleeping = True
            seconds.append(_seconds(trainer.vllm_generation.sync_weights, bench.device))
        if sleep:
            trainer.vllm_generation.llm.wake_up(tags=["kv_cache"])
        difference = _difference(trainer, workload)
        changed = _changed(trainer, base)
        lines.append(
            {
                "model": workload.name,
                "path": kind,
                "first_seconds": seconds[0],
                "seconds": seconds[1:],
                "generation_seconds": _generation_seconds(trainer, workload, bench.device),
                **difference,
                "base_weights_changed": changed,
                "way": None if handle is None else handle.sync.words,
            }
        )
        if handle is not None:
            handle.unpatch()
    del trainer, base
    _free(bench.device)
    return lines


def measure_steps(bench: _Bench, workload: Workload, steps: int) -> list[dict[str, Any]]:
    """
    Whole GRPO steps, stock and patched, of one trainer and engine.

    Args:
        bench: engines.
        workload: the model and its rows.
        steps: optimizer steps of each.

    Returns:
        A line for each.
    """
    lines = []
    for kind in (STOCK, PATCHED):
        trainer = bench.trainer(workload, steps)
        if kind == PATCHED:
            fastgrpo.patch(trainer, fastgrpo.Options(run_log=False))
        seconds: dict[str, list[float]] = {"step": [], "generation": [], "sync": []}
        trainer.add_callback(_StepClock(seconds["step"], bench.device))
        torch.manual_seed(1)
        with (
            _watched(trainer, "_generate", seconds["generation"], bench.device),
            _watched(trainer.vllm_generation, "sync_weights", seconds["sync"], bench.device),
        ):
            trainer.train()
        history = trainer.state.log_history
        lines.append(
            {
                "model": workload.name,
                "path": kind,
                "step_seconds": seconds["step"],
                "generation_seconds": [g - s for g, s in zip(seconds["generation"], seconds["sync"], strict=True)],
                "sync_seconds": seconds["sync"],
                "history": [entry for entry in history if "loss" in entry],
            }
        )
        if kind == PATCHED:
            fastgrpo.unpatch(trainer)
        del trainer
        _free(bench.device)
    return lines


class _StepClock(transformers.TrainerCallback):
    def __init__(self, seconds: list[float], device: torch.device) -> None:
        self.seconds, self.device = seconds, device

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = _now(self.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(_now(self.device) - self.start)


@contextmanager
def _watched(owner: Any, name: str, seconds: list[float], device: torch.device) -> Iterator[None]:
    """While inside, calls of a method are timed; afterwards what stood on the object stands there again."""
    before, method = owner.__dict__.get(name), getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = _now(device)
        result = method(*args, **kwargs)
        seconds.append(_now(device) - began)
        return result

    setattr(owner, name, timed)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    began = _now(device)
    function()
    return _now(device) - began


def _generation_seconds(trainer: trl.GRPOTrainer, workload: Workload, device: torch.device) -> float:
    """Of one generation batch with short prompts, whose completions run to their full length."""
    prompts = [[2 + (7 * row + at) % (workload.vocabulary - 2) for at in range(16)] for row in range(32)]
    generation = trainer.vllm_generation
    kept, generation.generation_kwargs = generation.generation_kwargs, {"ignore_eos": True}
    length, generation.max_completion_length = generation.max_completion_length, min(256, workload.completion_max)
    try:
        generation.llm.reset_prefix_cache()
        asleep = generation.enable_sleep_mode
        generation.enable_sleep_mode = False  # awake, and to stay so
        _seconds(lambda: generation.generate(prompts, None, 1), device)
        return _seconds(lambda: generation.generate(prompts, None, 1), device)
    finally:
        generation.generation_kwargs, generation.max_completion_length = kept, length
        generation.enable_sleep_mode = asleep


@torch.no_grad()
def _difference(trainer: trl.GRPOTrainer, workload: Workload) -> dict[str, float]:
    """Of the log-probs of a row of random tokens, engine against trainer, as training runs it."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(5)
    row = torch.randint(2, workload.vocabulary, (min(256, workload.prompt_tokens[1]),), generator=generator)
    sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    (output,) = trainer.vllm_generation.llm.generate([{"prompt_token_ids": row.tolist()}], sampling, use_tqdm=False)
    engine = [output.prompt_logprobs[at][token].logprob for at, token in enumerate(row.tolist()) if at]
    ids = row[None].to(trainer.accelerator.device)
    trainer.model.eval()
    with trainer.accelerator.autocast():
        logits = trainer.model(input_ids=ids).logits[0, :-1].float()
    trainer.model.train()
    ours = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1).cpu()
    apart = (torch.tensor(engine) - ours).abs()
    return {"logprob_difference_max": apart.max().item(), "logprob_difference_mean": apart.mean().item()}


@torch.no_grad()
def _grow_adapter(trainer: trl.GRPOTrainer) -> None:
    """To where merging in 16 bit shows."""
    generator = torch.Generator(trainer.accelerator.device).manual_seed(3)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.01, generator=generator)


def _changed(trainer: trl.GRPOTrainer, base: dict[str, torch.Tensor]) -> int:
    return sum(int((w.detach() != base[name]).sum()) for name, w in trainer.model.named_parameters() if name in base)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _keep_cpu_weights_as_they_are() -> None:
    # The CPU backend packs weights once they are loaded, so that later ones would not reach it.
    import vllm.model_executor.layers.utils as layers

    def unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = unpacked


def _ratios(part: str, lines: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    by = {line["path"]: line for line in lines}
    key = "step_seconds" if part == "steps" else "seconds"
    skip = 1 if part == "steps" else 0
    ours, theirs = (statistics.median(by[path][key][skip:]) for path in (PATCHED, STOCK))
    yield f"{by[PATCHED]['model']}/{part}/time: fastgrpo over TRL", ours / theirs


def _show(part: str, lines: list[dict[str, Any]]) -> None:
    by = {line["path"]: line for line in lines}
    if part == "steps":
        median = {path: statistics.median(line["step_seconds"][1:]) for path, line in by.items()}
        cells = [
            [
                f"{line['model']}: {path}",
                f"{median[path]:.2f}",
                f"{median[STOCK] / median[path]:.2f}",
                f"{statistics.median(line['generation_seconds'][1:]):.2f}",
                f"{_per_token(line) * 1e3:.2f}",
                f"{statistics.median(line['sync_seconds'][1:]):.3f}",
                f"{_rest(line):.2f}",
                f"{line['history'][0]['reward']:.4f}",
            ]
            for path, line in by.items()
        ]
        report.table("Whole GRPO steps, vLLM colocate", _STEP_COLUMNS, cells)
        return
    median = {path: statistics.median(line["seconds"]) for path, line in by.items()}
    cells = [
        [
            f"{line['model']}{', after sleep' if part == 'sleep' else ''}: {path}",
            f"{median[path]:.3f}",
            f"{median[path] / median[STOCK]:.2f}",
            " ".join(f"{value:.3f}" for value in [line["first_seconds"], *line["seconds"]]),
            f"max {line['logprob_difference_max']:.1e}, mean {line['logprob_difference_mean']:.1e}",
            f"{line['base_weights_changed']}; generation {line['generation_seconds']:.2f} s",
        ]
        for path, line in by.items()
    ]
    report.table("Weights to vLLM, colocate", _SYNC_COLUMNS, cells)


def _rest(line: dict[str, Any]) -> float:
    spent = zip(line["step_seconds"], line["generation_seconds"], line["sync_seconds"], strict=True)
    return statistics.median([step - generation - sync for step, generation, sync in spent][1:])


def _per_token(line: dict[str, Any]) -> float:
    """Seconds of generation for each token of the longest completion, which the engine cannot shorten."""
    longest = [entry["completions/max_length"] for entry in line["history"]]
    return statistics.median(s / tokens for s, tokens in zip(line["generation_seconds"], longest, strict=True))
