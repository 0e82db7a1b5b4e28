"""What a training start says: one line a layer, so that a wrong one is seen before the first step is paid for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from fastgrpo.kernels.backends import backends
from fastgrpo.trl.compat import base_model
from fastgrpo.versions import installed_version

if TYPE_CHECKING:
    from fastgrpo.trl.patch import Patch


class StartLines(TrainerCallback):
    """Prints `start_lines` to stderr when training starts, on the first process only; tells the weight sync that it does."""

    def __init__(self, handle: Patch | None) -> None:
        self.handle = handle

    def __deepcopy__(self, memo: dict[int, Any]) -> StartLines:
        return StartLines(None)  # the copy's trainer is not patched

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.handle is not None and self.handle.sync is not None:
            self.handle.sync.begin()
        if state.is_world_process_zero and self.handle is not None:
            print(*start_lines(self.handle), sep="\n", file=sys.stderr, flush=True)


def start_lines(handle: Patch) -> list[str]:
    """
    Device and versions, what trains, what computes it, rewards with their weights, and where completions come from.

    Args:
        handle: of a patched trainer.

    Returns:
        One line for each.
    """
    trainer = handle.trainer
    lines = (_device(trainer), _parameters(trainer), _kernels(handle), _rewards(trainer), _rollouts(handle))
    return [f"fastgrpo | {line}" for line in lines]


def _device(trainer: GRPOTrainer) -> str:
    device = trainer.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"threads: {torch.get_num_threads()}"
    precision = {"no": "", "bf16": ", bf16 autocast", "fp16": ", fp16 autocast"}.get(
        trainer.accelerator.mixed_precision, f", {trainer.accelerator.mixed_precision}"
    )
    processes = trainer.accelerator.num_processes
    count = f"{processes} x " if processes > 1 else ""
    packages = ("fastgrpo", "trl", "transformers", "torch")
    versions = ", ".join(f"{package} {installed_version(package) or '(checkout)'}" for package in packages)
    return f"device: {count}{device.type} ({name}), weights in {_weight_dtype(trainer)}{precision}; {versions}"


def _weight_dtype(trainer: GRPOTrainer) -> str:
    dtypes = {str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters()}
    return " and ".join(sorted(dtypes))


def _parameters(trainer: GRPOTrainer) -> str:
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = model.num_parameters() if hasattr(model, "num_parameters") else sum(p.numel() for p in model.parameters())
    if not trained:
        return "trained: 0 parameters. Nothing will be learned; did the adapter's target_modules match no layer?"
    how = "all of the model"
    if hasattr(model, "peft_config"):
        how = ", ".join(f"{config.peft_type.value} {name!r}" for name, config in model.peft_config.items())
    elif trained < total:
        how = "part of the model"
    head = base_model(model).get_output_embeddings()
    state = "trained" if any(parameter.requires_grad for parameter in head.parameters()) else "frozen"
    return f"trained: {_count(trained)} of {_count(total)} parameters ({how}), output head {state}"


def _kernels(handle: Patch) -> str:
    serving = backends()
    head = serving["trainer head"]
    because = f" ({handle.not_varlen_because})" if handle.not_varlen_because else ""
    slow = f" ({head.reason})" if head.reason else ""
    finding = handle.finding
    checked = (
        f"not checked against the model's own forward: {finding.skipped}"
        if finding.skipped
        else f"agrees with the model's own forward within {finding.difference:.1g} nats"
    )
    return f"head: {head.implementation}{slow}; rows: {serving['packing'].implementation}{because}; {checked}"


def _rewards(trainer: GRPOTrainer) -> str:
    weights = trainer.reward_weights.tolist()
    terms = [f"{name} x {weight:g}" for name, weight in zip(trainer.reward_func_names, weights, strict=False)]
    return f"rewards: {', '.join(terms)}"


def _rollouts(handle: Patch) -> str:
    trainer = handle.trainer
    weights = f", weights: {handle.sync.words}" if handle.sync is not None else ""
    size = f"{trainer.num_generations} completions of up to {trainer.max_completion_length} tokens a prompt"
    return f"rollouts: {rollout_path(trainer)}{weights}; {size}"


def rollout_path(trainer: GRPOTrainer) -> str:
    """Who generates the completions, in words."""
    if getattr(trainer, "rollout_func", None) is not None:
        return getattr(trainer.rollout_func, "rollout_path", "rollout_func of this script")
    if trainer.use_vllm:
        return f"vLLM, {trainer.vllm_mode}"
    names = ("use_transformers_continuous_batching", "use_transformers_paged")
    if any(getattr(trainer, name, False) for name in names):
        return "transformers, continuous batching"
    return "transformers generate, in this process"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
