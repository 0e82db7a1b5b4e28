"""GRPO training with TRL, faster, leaner and more exact on the machine you have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastgrpo.head import LogProbs, linear_grpo_loss, linear_logprob
    from fastgrpo.kernels.backends import Backend, Backends, backends
    from fastgrpo.objective import AdaptiveEntropy, GRPOStats, Objective, grpo_loss, sampler_importance_ratio
    from fastgrpo.packing import LeftPacked, Packed, left_pack, pack, unpack
    from fastgrpo.tools.plan.estimate import estimate_memory
    from fastgrpo.tools.plan.memory import MemoryPlan
    from fastgrpo.tools.plan.settings import PlanSettings
    from fastgrpo.trl import Options, Patch, UnsupportedError, patch, unpatch
    from fastgrpo.trl.names import patch_trl, unpatch_trl

__all__ = [
    "AdaptiveEntropy",
    "Backend",
    "Backends",
    "GRPOStats",
    "LeftPacked",
    "LogProbs",
    "MemoryPlan",
    "Objective",
    "Options",
    "Packed",
    "Patch",
    "PlanSettings",
    "UnsupportedError",
    "backends",
    "estimate_memory",
    "grpo_loss",
    "left_pack",
    "linear_grpo_loss",
    "linear_logprob",
    "pack",
    "patch",
    "patch_trl",
    "sampler_importance_ratio",
    "unpack",
    "unpatch",
    "unpatch_trl",
]

_MODULES = {
    "fastgrpo.head": ("LogProbs", "linear_grpo_loss", "linear_logprob"),
    "fastgrpo.kernels.backends": ("Backend", "Backends", "backends"),
    "fastgrpo.objective": ("AdaptiveEntropy", "GRPOStats", "Objective", "grpo_loss", "sampler_importance_ratio"),
    "fastgrpo.packing": ("LeftPacked", "Packed", "left_pack", "pack", "unpack"),
    "fastgrpo.tools.plan.estimate": ("estimate_memory",),
    "fastgrpo.tools.plan.memory": ("MemoryPlan",),
    "fastgrpo.tools.plan.settings": ("PlanSettings",),
    "fastgrpo.trl": ("Options", "Patch", "UnsupportedError", "patch", "unpatch"),
    "fastgrpo.trl.names": ("patch_trl", "unpatch_trl"),
}
"""Modules by the public names in them, each imported when one is first asked for: the command line starts without torch, and
someone with an own training loop need not have TRL."""
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'fastgrpo' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
