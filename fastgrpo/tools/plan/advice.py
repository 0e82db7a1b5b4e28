"""Which one changed setting would free most."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastgrpo.tools.plan.settings import PlanSettings

if TYPE_CHECKING:
    from fastgrpo.tools.plan.memory import MemoryPlan

_WORTH_SAYING = 0.05
"""GB."""


@dataclass(frozen=True)
class Alternative:
    """
    One setting changed.

    Attributes:
        setting: what to set, as on the command line.
        frees_gb: by how much the total shrinks.
        fits: whether the run fits then; None where no capacity is known.
    """

    setting: str
    frees_gb: float
    fits: bool | None


def find_alternatives(plan: MemoryPlan) -> tuple[Alternative, ...]:
    """
    Plans again with one setting changed at a time.

    Args:
        plan: with `plan_with`.

    Returns:
        Those that free something, the largest first.
    """
    found = []
    for setting, changes in _candidates(plan.settings):
        try:
            other = plan.plan_with(dataclasses.replace(plan.settings, **changes))
        except ValueError:  # does not go with the other settings
            continue
        if other.engine_starts and plan.total - other.total >= _WORTH_SAYING:
            found.append(Alternative(setting, plan.total - other.total, other.fits))
    return tuple(sorted(found, key=lambda alternative: -alternative.frees_gb))


def _candidates(settings: PlanSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    """One changed setting at a time, as it is written on the command line; only what works today."""
    if settings.full:
        yield "--lora-rank 16 (an adapter instead of full fine-tuning)", {"lora_rank": 16}
        if settings.optimizer != "adamw_8bit":
            yield "--optimizer adamw_8bit", {"optimizer": "adamw_8bit"}
        if settings.optimizer != "paged_adamw_8bit":
            yield "--optimizer paged_adamw_8bit", {"optimizer": "paged_adamw_8bit"}
    elif settings.quantization is None:
        yield "--quantization 4bit (QLoRA)", {"quantization": "4bit"}
    if settings.separate_reference and not settings.full:
        yield "--reference auto (the disabled adapter is the reference)", {"reference": "auto"}
    if settings.separate_reference:
        yield "--beta 0 (no reference, no KL term)", {"beta": 0.0}
    if settings.dtype == "float32":
        yield "--dtype bfloat16", {"dtype": "bfloat16"}
    if settings.checkpointing and not settings.offload_activations and settings.head == "fastgrpo":
        yield "--offload-activations (to host memory)", {"offload_activations": True}
    if not settings.checkpointing:
        yield "--checkpointing", {"checkpointing": True}
    if settings.packing in ("left", "none"):
        yield "--packing auto (no padding, a prompt once)", {"packing": "auto", "share_prefix": True}
    elif not settings.share_prefix:
        yield "--share-prefix", {"share_prefix": True}
    if settings.micro_batch > 1:
        half = settings.micro_batch // 2
        changes = {"micro_batch": half, "accumulation": -(-settings.micro_batch * settings.accumulation // half)}
        if settings.steps_per_generation is not None:
            changes["steps_per_generation"] = -(-settings.rollouts // half)
        yield " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items()), changes
    if settings.rollout == "transformers" and settings.together > settings.accumulation:
        yield (
            f"--steps-per-generation {settings.accumulation} (fewer sequences generated at once)",
            {"steps_per_generation": settings.accumulation},
        )
    if settings.sequences > 1 and settings.head == "fastgrpo":
        half = settings.sequences // 2
        yield f"--mini-batch {half} (activations recomputed)", {"mini_batch": half}
    if settings.head == "full":
        yield "--head fastgrpo (logits in chunks)", {"head": "fastgrpo"}
    if settings.completion_length > 1:
        half = settings.completion_length // 2
        yield f"--completion-length {half}", {"completion_length": half, "longest_row": None}
    if settings.rollout == "vllm":
        if not settings.vllm_sleep:
            yield "--vllm-sleep", {"vllm_sleep": True}
        half_share = round(settings.vllm_fraction / 2, 3)
        yield f"--vllm-fraction {half_share:g}", {"vllm_fraction": half_share}
    if settings.world_size > 1 and settings.sharding in ("ddp", "zero1"):
        yield "--sharding zero2", {"sharding": "zero2"}
