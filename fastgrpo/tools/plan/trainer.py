"""The plan of a trainer that is built: what its settings, model and data say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from trl import GRPOTrainer

from fastgrpo.kernels.select import has_fused_head
from fastgrpo.tools.evaluate import tokenised
from fastgrpo.tools.plan.estimate import estimate_memory
from fastgrpo.tools.plan.memory import MemoryPlan
from fastgrpo.tools.plan.settings import PlanSettings
from fastgrpo.trl.patch import find_patch

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw",
    "paged_adamw_32bit": "paged_adamw",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "sgd": "sgd",
}
_LOOKED_AT = 256
"""Prompts of the dataset whose lengths count."""


def plan_trainer(trainer: GRPOTrainer) -> MemoryPlan:
    """
    Plans the memory of a trainer's device.

    Args:
        trainer: patched or not.

    Raises:
        ValueError: an optimizer, an adapter or sharding that the plan does not know.
    """
    return estimate_memory(trainer.accelerator.unwrap_model(trainer.model).config, settings=settings_of(trainer))


def settings_of(trainer: GRPOTrainer) -> PlanSettings:
    """
    The settings of a trainer as a plan takes them.

    Args:
        trainer: patched or not; the longest of the first prompts of its dataset counts.

    Raises:
        ValueError: see `plan_trainer`.
    """
    arguments, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    optimizer = getattr(arguments.optim, "value", arguments.optim)
    if optimizer not in _OPTIMIZERS:
        raise ValueError(f"optim is {optimizer!r}; the plan knows {', '.join(_OPTIMIZERS)}.")
    device = trainer.accelerator.device
    capacity = torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else None
    rollout = "transformers"
    if trainer.use_vllm:
        rollout = "vllm" if trainer.vllm_mode == "colocate" else "server"
    elif getattr(trainer, "rollout_func", None) is not None:
        rollout = "server"
    quantization = "4bit" if getattr(model, "is_loaded_in_4bit", False) else None
    if getattr(model, "is_loaded_in_8bit", False):
        quantization = "8bit"
    return PlanSettings(
        capacity_gb=capacity,
        **_adapter(model),
        **_patch(trainer),
        quantization=quantization,
        dtype=_dtype(model),
        mixed_precision=trainer.accelerator.mixed_precision,
        optimizer=_OPTIMIZERS[optimizer],
        beta=trainer.beta,
        reference="auto" if trainer.ref_model is None else "separate",
        num_generations=trainer.num_generations,
        prompt_length=_longest_prompt(trainer),
        completion_length=trainer.max_completion_length,
        micro_batch=arguments.per_device_train_batch_size,
        accumulation=arguments.gradient_accumulation_steps,
        steps_per_generation=arguments.steps_per_generation,
        checkpointing=bool(arguments.gradient_checkpointing),
        rollout=rollout,
        vllm_fraction=arguments.vllm_gpu_memory_utilization,
        vllm_sleep=bool(arguments.vllm_enable_sleep_mode),
        world_size=trainer.accelerator.num_processes,
    )


def _adapter(model: Any) -> dict[str, Any]:
    if not hasattr(model, "peft_config"):
        return {}
    configs = list(model.peft_config.values())
    if len(configs) != 1 or not hasattr(configs[0], "r"):
        raise ValueError("the plan knows one LoRA adapter, or none.")
    unknown = [name for name in ("modules_to_save", "use_dora", "rank_pattern") if getattr(configs[0], name, None)]
    if unknown:
        raise ValueError(f"the plan does not know what {' and '.join(unknown)} of an adapter need.")
    targets = configs[0].target_modules
    return {"lora_rank": configs[0].r, "lora_targets": targets if isinstance(targets, str) else tuple(sorted(targets))}


def _patch(trainer: GRPOTrainer) -> dict[str, Any]:
    handle = find_patch(trainer)
    if handle is None:
        return {"head": "full", "packing": "none", "share_prefix": False, "fused_layers": False}
    options = handle.options
    same = ("share_prefix", "chunk_bytes", "logit_chunk_multiplier", "max_tokens_per_microbatch", "offload_activations")
    return {name: getattr(options, name) for name in same} | {
        "packing": handle.layout,
        "num_chunks": None if options.num_chunks == -1 else options.num_chunks,
        "mini_batch": options.mini_batch_size,
        "fused_layers": options.fused_layers and not trainer.args.torch_compile,
        "fused_head": has_fused_head(trainer.accelerator.device),
    }


def _dtype(model: Any) -> str:
    """Of most of the weights."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            sizes[parameter.dtype] += parameter.numel()
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.")


def _longest_prompt(trainer: GRPOTrainer) -> int:
    rows = trainer.train_dataset
    tokenizer = getattr(trainer, "_tokenizer", trainer.processing_class)
    prompts = [row["prompt"] for row, _ in zip(rows, range(_LOOKED_AT), strict=False)]
    return max(map(len, tokenised(tokenizer, prompts, None)))
