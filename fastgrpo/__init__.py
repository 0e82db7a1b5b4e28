"""GRPO training with TRL, faster, leaner and more exact on the machine you have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fastgrpo.head import LogProbs, linear_grpo_loss, linear_logprob
from fastgrpo.kernels.backends import Backend, Backends, backends
from fastgrpo.objective import AdaptiveEntropy, GRPOStats, Objective, grpo_loss, sampler_importance_ratio
from fastgrpo.packing import LeftPacked, Packed, left_pack, pack, unpack

if TYPE_CHECKING:
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

# Where the wiring and the tools live. They import TRL or transformers; someone with an own training loop need not have them.
_WHERE = dict.fromkeys(("Options", "Patch", "UnsupportedError", "patch", "unpatch"), "fastgrpo.trl") | {
    "MemoryPlan": "fastgrpo.tools.plan.memory",
    "PlanSettings": "fastgrpo.tools.plan.settings",
    "estimate_memory": "fastgrpo.tools.plan.estimate",
    "patch_trl": "fastgrpo.trl.names",
    "unpatch_trl": "fastgrpo.trl.names",
}


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'fastgrpo' has no attribute {name!r}")
