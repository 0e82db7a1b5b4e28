"""The kinds of lines, their keys, and what JSON can hold of a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SCHEMA = 1

KEYS: dict[str, tuple[str, ...]] = {
    "run": (
        "schema",
        "started",
        "versions",
        "device",
        "model",
        "options",
        "settings",
        "rollout_path",
        "seed",
        "plan",
    ),
    "step": (
        "step",
        "steps",
        "reward",
        "reward_std",
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "tokens_real",
        "tokens_padded",
        "time_generation",
        "time_reward",
        "time_sync",
        "time_update",
        "peak_memory_gb",
        "policy_version",
        "policy_lag",
        "stale",
    ),
    "eval": ("step", "pass_at_1", "n", "temperature", "samples"),
    "end": ("wall_s", "seconds_per_step", "peak_memory_gb", "exit"),
}
"""The keys of every kind of line. All are always there; a value nobody measured is null."""


def strict(value: Any) -> Any:
    """The value as strict JSON can hold it: NaN and infinities become null, what JSON does not know its text."""
    if isinstance(value, bool | str | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [strict(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), None):  # a scalar of torch or numpy
        return strict(value.item())
    return str(value)
