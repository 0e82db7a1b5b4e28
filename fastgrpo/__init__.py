"""GRPO training with TRL, faster, leaner and more exact on the machine you have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastgrpo.head import LogProbs, linear_grpo_loss, linear_logprob
from fastgrpo.kernels.backends import Backend, Backends, backends
from fastgrpo.objective import AdaptiveEntropy, GRPOStats, Objective, grpo_loss, sampler_importance_ratio
from fastgrpo.packing import LeftPacked, Packed, left_pack, pack, unpack

if TYPE_CHECKING:
    from fastgrpo.trl import Options, Patch, UnsupportedError, patch, unpatch

__all__ = [
    "AdaptiveEntropy",
    "Backend",
    "Backends",
    "GRPOStats",
    "LeftPacked",
    "LogProbs",
    "Objective",
    "Options",
    "Packed",
    "Patch",
    "UnsupportedError",
    "backends",
    "grpo_loss",
    "left_pack",
    "linear_grpo_loss",
    "linear_logprob",
    "pack",
    "patch",
    "sampler_importance_ratio",
    "unpack",
    "unpatch",
]

_WIRED = {"Options", "Patch", "UnsupportedError", "patch", "unpatch"}


def __getattr__(name: str) -> object:
    # The wiring imports TRL; someone with an own training loop need not have it.
    if name in _WIRED:
        import fastgrpo.trl

        return getattr(fastgrpo.trl, name)
    raise AttributeError(f"module 'fastgrpo' has no attribute {name!r}")
