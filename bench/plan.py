"""`python -m bench plan`: what `fastgrpo.estimate_memory` predicts beside what a patched `GRPOTrainer`'s update takes."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models

import fastgrpo
from bench import report
from bench.measure import extra_peak_bytes
from bench.update import LORA_LAYERS, synthetic_batch
from bench.workloads import Workload
from fastgrpo.kernels.select import has_fused_head

GB = 1e9
PHASES = ("forward", "head", "layers", "optimizer")
_STEPS = 2
"""The first makes the optimizer's states; what comes after it repeats."""
_COLUMNS = ("", "predicted GB", "measured GB", "predicted / measured", *PHASES, "before", "step s")


@dataclass(frozen=True)
class Setting:
    """
    A run that is planned and measured.

    Args:
        model: a name in `MODELS`.
        full: everything trains; else an adapter of rank 16 on all linear layers.
        dtype: of the weights.
        checkpointing: gradient checkpointing.
        prompt, completion: tokens of the one prompt, and of each of its eight completions, which are one micro-batch.
    """

    model: str
    full: bool
    dtype: str
    checkpointing: bool
    prompt: int
    completion: int

    @property
    def name(self) -> str:
        """As printed."""
        kind = "full" if self.full else "LoRA"
        tokens = self.prompt + _COMPLETIONS * self.completion
        checkpointing = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{self.model}, {kind}, {self.dtype}, {checkpointing}, {tokens} tokens"


_COMPLETIONS = 8
_SHORT, _LONG = (128, 112), (512, 2432)
SETTINGS = (
    Setting("Qwen3 0.6B", True, "float32", False, *_SHORT),
    Setting("Qwen3 0.6B", True, "bfloat16", True, *_LONG),
    Setting("Qwen3 1.7B", False, "bfloat16", True, *_SHORT),
    Setting("Qwen3 1.7B", False, "bfloat16", False, *_LONG),
    Setting("Qwen3 1.7B", True, "float32", True, *_LONG),
    Setting("Qwen3 1.7B", True, "bfloat16", False, *_SHORT),
    Setting("Llama 8B", False, "bfloat16", True, *_LONG),
    Setting("Llama 8B", True, "bfloat16", True, *_SHORT),
)


def _qwen(hidden: int, intermediate: int, heads: int = 16) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=28,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


MODELS = {
    "Qwen3 0.6B": lambda: _qwen(1024, 3072),
    "Qwen3 1.7B": lambda: _qwen(2048, 6144),
    "Llama 8B": lambda: transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        tie_word_embeddings=False,
        max_position_embeddings=32768,
    ),
}


def run(device: torch.device, only: list[str] | None, quick: bool) -> dict[str, Any]:
    """
    Plans and trains every setting, and prints both.

    Args:
        device: where to run. Without CUDA only `quick` makes sense: a CPU has no count of what is alive by phases.
        only: settings whose name holds one of these; None = all.
        quick: models shrunk to two layers of 64, to see that everything works.

    Returns:
        The run, see `report.record`.
    """
    report.quiet()
    chosen = [setting for setting in SETTINGS if not only or any(text in setting.name for text in only)]
    if not chosen:
        names = ", ".join(setting.name for setting in SETTINGS)
        raise SystemExit(f"no setting's name holds {' or '.join(only)}; they are {names}")
    rows = []
    for setting in chosen:
        try:
            row = compare(setting, device, quick)
        except Exception as error:  # the other settings are worth having
            report.say(f"{setting.name}: {type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()
            continue
        rows.append(row)
        report.say(f"{setting.name}: predicted / measured {row['ratio']:.3f}, {row['wall_s']:.0f} s")
    if not rows:
        raise SystemExit("no setting was measured")
    title = "Peak memory of an update: the plan against what torch's allocator counted"
    report.table(title, _COLUMNS, _cells(rows))
    ratios = [row["ratio"] for row in rows]
    near = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
    report.say(
        f"within 10 %: {near} of {len(ratios)}; lowest {min(ratios):.2f}, median {statistics.median(ratios):.2f}, highest "
        f"{max(ratios):.2f}"
    )
    # How far off, whichever way: lower is better, as everywhere.
    distances = {f"{row['setting']}/distance from 1": 1 + abs(row["ratio"] - 1) for row in rows}
    return report.record("plan", device, {"steps": _STEPS, "quick": quick}, rows, distances)


def compare(setting: Setting, device: torch.device, quick: bool) -> dict[str, Any]:
    """
    Plans and measures one setting.

    Args:
        setting, device, quick: see `run`.

    Returns:
        A row: predicted and measured GB, of the whole update and of its phases.
    """
    if quick:
        setting = replace(setting, prompt=setting.prompt // 16, completion=setting.completion // 16)
    config = _config(setting, quick)
    autocast = device.type == "cuda"
    plan = fastgrpo.estimate_memory(
        config,
        lora_rank=None if setting.full else 16,
        lora_targets=None if setting.full else tuple(LORA_LAYERS),
        dtype=setting.dtype,
        mixed_precision="bf16" if autocast else "no",
        checkpointing=setting.checkpointing,
        prompt_length=setting.prompt,
        completion_length=setting.completion,
        num_generations=_COMPLETIONS,
        micro_batch=_COMPLETIONS,
        rollout="server",
        fused_head=has_fused_head(device),
    )
    began = time.perf_counter()
    seen = _measure(setting, config, device, autocast)
    predicted = plan.peaks["update"]
    return {
        "setting": setting.name,
        **asdict(setting),
        "predicted_gb": predicted,
        "measured_gb": seen.peak / GB,
        "ratio": predicted * GB / seen.peak,
        "predicted_phases_gb": {name: plan.peaks[name] for name in PHASES},
        "measured_phases_gb": {name: size / GB for name, size in seen.peaks.items()},
        "predicted_before_gb": plan.peaks["held"],
        "measured_before_gb": seen.before / GB,
        "measured_after_gb": {name: size / GB for name, size in seen.after.items()},
        "details_gb": {name: dict(parts) for name, parts in plan.details.items()},
        "step_seconds": seen.seconds,
        "wall_s": time.perf_counter() - began,
    }


@dataclass
class Seen:
    """Bytes of the last step."""

    before: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Of the whole step."""
        return max(self.peaks.values())


class _Meter(transformers.TrainerCallback):
    """Reads torch's allocator between the phases of a step."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()
        self.seen.before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def ends(self, name: str) -> None:
        """A phase is over."""
        self.seen.peaks[name], self.seen.after[name] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def watch_head(self, decoder: torch.nn.Module) -> Any:
        """The head's backward is over when what it reads gets its gradient."""

        def after_decoder(_: Any, __: Any, output: Any) -> None:
            hidden = output.last_hidden_state
            if hidden.requires_grad:
                self.seen.after["decoder"] = torch.cuda.memory_allocated()
                hidden.register_hook(lambda _: self.ends("head"))

        return decoder.register_forward_hook(after_decoder)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.ends("layers")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.ends("optimizer")
        torch.cuda.synchronize()
        self.seen.seconds = time.perf_counter() - self.began


def _measure(setting: Setting, config: transformers.PretrainedConfig, device: torch.device, autocast: bool) -> Seen:
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(setting, config, device, autocast, folder)
        fastgrpo.patch(trainer, fastgrpo.Options(run_log=False))
        if device.type == "cuda":
            meter = _Meter(seen)
            trainer.add_callback(meter)
            model = trainer.accelerator.unwrap_model(trainer.model)
            hook = meter.watch_head((model if setting.full else model.get_base_model()).get_decoder())
            compute_loss = trainer.compute_loss

            def metered(*args: Any, **kwargs: Any) -> Any:
                loss = compute_loss(*args, **kwargs)
                meter.ends("forward")
                return loss

            trainer.compute_loss = metered
            trainer.train()
            del trainer.compute_loss
            hook.remove()
        else:
            before = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
            began = time.perf_counter()
            seen.peaks = {"layers": before + extra_peak_bytes(trainer.train, device)}
            seen.seconds = (time.perf_counter() - began) / _STEPS
        fastgrpo.unpatch(trainer)
        trainer.accelerator.free_memory()
        del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return seen


def _config(setting: Setting, quick: bool) -> transformers.PretrainedConfig:
    config = MODELS[setting.model]()
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 1
    if quick:
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = 2, 64, 160, 999
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
        config.layer_types = None if getattr(config, "layer_types", None) is None else config.layer_types[:2]
    return config


def build_trainer(
    setting: Setting, config: transformers.PretrainedConfig, device: torch.device, autocast: bool, folder: str
) -> trl.GRPOTrainer:
    """
    A trainer of random weights whose generation returns a batch of the setting's lengths.

    Args:
        setting, config: what to train.
        device: where to run.
        autocast: bf16.
        folder: that TRL wants.
    """
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setting.dtype))
    arguments = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=_COMPLETIONS,
        num_generations=_COMPLETIONS,
        max_completion_length=setting.completion,
        max_steps=_STEPS,
        gradient_checkpointing=setting.checkpointing,
        bf16=autocast,
        use_cpu=device.type == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * _STEPS}),
        processing_class=tokenizer,
        peft_config=None if setting.full else LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    batch = synthetic_batch(_workload(setting, config), device)
    trainer._generate_and_score_completions = lambda _: dict(batch)
    return trainer


def _workload(setting: Setting, config: transformers.PretrainedConfig) -> Workload:
    """All completions of one length."""
    return Workload(
        setting.name,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        prompts=1,
        completions=_COMPLETIONS,
        micro_batch=_COMPLETIONS,
        prompt_tokens=(setting.prompt, setting.prompt),
        completion_median=setting.completion,
        completion_spread=0.0,
        completion_max=setting.completion,
    )


def _cells(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        pairs = [
            f"{row['predicted_phases_gb'][name]:.2f} / {row['measured_phases_gb'][name]:.2f}"
            if name in row["measured_phases_gb"]
            else ""
            for name in PHASES
        ]
        yield [
            row["setting"],
            f"{row['predicted_gb']:.2f}",
            f"{row['measured_gb']:.2f}",
            f"{row['ratio']:.2f}",
            *pairs,
            f"{row['predicted_before_gb']:.2f} / {row['measured_before_gb']:.2f}",
            f"{row['step_seconds']:.2f}",
        ]
