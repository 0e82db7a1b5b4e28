"""Which weights sampled a rollout batch, and whether the algorithm expects them where the batch is used.

A policy version is `trainer.state.global_step` at the moment the weights were handed to the sampler. Weights from before
the present `train()` are negative: -2 is two optimizer steps before it began.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VERSION_KEY = "policy_version"
STATIC_KEY = "stale"
UNKNOWN = -(2**63)
"""Stands for a version nobody knows in a batch's int64 `policy_version`."""


class StaleRolloutError(RuntimeError):
    """A batch whose weights are not those the algorithm expects, with `Options.on_stale="error"`."""


def allowed_lag(phase: int, uses: int, accumulation: int) -> int:
    """
    The largest lag, in optimizer steps, that replaying a generation batch brings by itself.

    Args:
        phase: micro-batches that the optimizer step had used before this batch was generated.
        uses: micro-batches that are taken from it, `num_iterations * steps_per_generation`.
        accumulation: micro-batches of an optimizer step.

    Returns:
        floor((phase + uses - 1) / accumulation): 0 where every optimizer step generates its own batch.
    """
    return (phase + uses - 1) // accumulation


def worst_lag(lags: Sequence[int]) -> int:
    """The lag furthest from what the algorithm expects: the most negative, weights of the future, else the largest."""
    return min(lags) if min(lags) < 0 else max(lags)


@dataclass(frozen=True)
class Rollout:
    """
    What is known of the weights that sampled a generation batch.

    Attributes:
        versions: one version for all rows, or one a row; None = unknown.
        static: the sampler cannot take new weights.
        source: who sampled, in words.
    """

    versions: int | tuple[int, ...] | None
    static: bool = False
    source: str = "the sampler"

    @property
    def oldest(self) -> int | None:
        """The version of the oldest row; None where a row's is unknown."""
        if not isinstance(self.versions, tuple):
            return self.versions
        return None if UNKNOWN in self.versions else min(self.versions)

    @property
    def newest(self) -> int | None:
        """The version of the newest row; None where a row's is unknown."""
        if not isinstance(self.versions, tuple):
            return self.versions
        return None if UNKNOWN in self.versions else max(self.versions)


def rollout_of(fields: dict[str, Any], rows: int, source: str) -> Rollout:
    """
    What a `rollout_func` says of the weights it sampled with.

    Args:
        fields: its output; `policy_version` is an int or one int a row, `stale` True where the sampler cannot take new weights;
            numpy's and torch's too.
        rows: completions it returned.
        source: who sampled, in words.

    Returns:
        Rollout; without `policy_version` the version is unknown, never the current one.

    Raises:
        ValueError: a `policy_version` or `stale` of another kind.
    """
    static = fields.get(STATIC_KEY, False)
    if not _is_bool(static):
        raise ValueError(
            f"{source} returned {STATIC_KEY}={static!r}; give True where the sampler cannot take new weights, else False."
        )
    static = bool(static)
    given = fields.get(VERSION_KEY)
    if given is None:
        return Rollout(None, static, source)
    try:
        versions = tuple(map(_integer, given)) if _is_sequence(given) else _integer(given)
    except TypeError:
        versions = ()
    if isinstance(versions, tuple) and len(versions) != rows:
        raise ValueError(
            f"{source} returned {VERSION_KEY}={given!r} for {rows} completions; give one integer, or one for each of them: "
            "trainer.state.global_step when the sampler got its weights."
        )
    beyond = [
        each for each in (versions if isinstance(versions, tuple) else (versions,)) if not -(2**63) <= each < 2**63
    ]
    if beyond:
        shown = beyond[0] if beyond[0].bit_length() < 200 else f"an integer of {beyond[0].bit_length()} bits"
        raise ValueError(
            f"{source} returned {VERSION_KEY} with {shown}, which does not fit into 64 bits; give "
            "trainer.state.global_step when the sampler got its weights."
        )
    return Rollout(versions, static, source)


def _is_sequence(value: Any) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, str)) or getattr(value, "ndim", 0) == 1


def _is_bool(value: Any) -> bool:
    """Whether it is one of Python's, or a single one of numpy's or torch's."""
    array = getattr(value, "ndim", None) == 0 and str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    return isinstance(value, bool) or array


def _integer(value: Any) -> int:
    if _is_bool(value):
        raise TypeError
    return operator.index(value)


def in_words(version: int) -> str:
    """A version as a reader of a warning expects it."""
    if version >= 0:
        return f"optimizer step {version}"
    steps = "1 optimizer step" if version == -1 else f"{-version} optimizer steps"
    return f"{steps} before this train() began"
