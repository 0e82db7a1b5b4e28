"""`patch(trainer)` and `unpatch(trainer)`: the only place that replaces anything of TRL."""

from __future__ import annotations

import logging
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import trl.trainer.utils as trl_utils
from trl import GRPOTrainer

from fastgrpo.kernels.backends import Backend, forget_backend, head_backend, note_backend
from fastgrpo.trl.compat import (
    HEAD_NAME,
    SCORING_METHOD,
    UnsupportedError,
    accepts_position_ids,
    check_installation,
    check_trainer,
    has_fused_head,
    packing_obstacle,
)
from fastgrpo.trl.config import Options
from fastgrpo.trl.heads import HeadDispatcher
from fastgrpo.trl.scoring import ScoringMethod

logger = logging.getLogger("fastgrpo")

_BACKEND_NOTES = ("packing", "trainer head")


@dataclass(eq=False)
class Patch:
    """
    Handle of a patched trainer; also a context manager that unpatches at its end.

    Attributes:
        trainer: the patched trainer.
        options: the options in force.
        unpacked_because: why rows keep TRL's layout; empty where they are left-packed.
        active: False once unpatched.
    """

    trainer: GRPOTrainer
    options: Options
    unpacked_because: str = ""
    active: bool = True
    replaced: list[tuple[Any, str, Any]] = field(default_factory=list, repr=False)
    """(owner, attribute, what stands there now), in the order of replacement."""

    def unpatch(self) -> None:
        """Restores the trainer. A second call does nothing. Something put over the patch since then is left, with a warning."""
        if not self.active:
            return
        self.active = False
        while self.replaced:
            owner, name, ours = self.replaced.pop()
            if owner.__dict__.get(name) is ours:
                delattr(owner, name)
            else:
                warnings.warn(
                    f"fastgrpo.unpatch: {type(owner).__name__}.{name} was replaced by something else after the patch; it is "
                    "left as it is.",
                    stacklevel=2,
                )
        _leave(self)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.unpatch()


def patch(trainer: GRPOTrainer, options: Options | None = None) -> Patch:
    """
    Makes a built `GRPOTrainer` compute its log-probs with fastgrpo; everything else stays TRL's.

    Works before, between and after `train()` calls. Results agree with the unpatched trainer's up to the rounding of
    floating-point sums. Models whose absolute positions TRL shifts by its left padding (GPT-2, OPT) are scored at their
    real positions.

    Args:
        trainer: the trainer; its model may be fully trained or carry LoRA adapters.
        options: see `Options`; None = the defaults.

    Returns:
        Patch, the handle: `handle.unpatch()` or `fastgrpo.unpatch(trainer)` restores the trainer. A second call with the
        same options, or none, returns the handle there is.

    Raises:
        TypeError: not a GRPOTrainer, or options that are no `Options`.
        UnsupportedError (a ValueError): an installation or a trainer that the patch does not support; nothing is changed.
        ValueError: already patched with other options.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options is a {type(options).__name__}; give fastgrpo.Options(...) or None.")
    check_installation()
    check_trainer(trainer)
    present = find_patch(trainer)
    if present is not None:
        if options is not None and options != present.options:
            raise ValueError(
                f"The trainer is patched with {present.options}; to change to {options}, call fastgrpo.unpatch(trainer) first."
            )
        return present

    if SCORING_METHOD in trainer.__dict__:
        raise UnsupportedError(
            f"The trainer already has an own {SCORING_METHOD}, set on the object, which the patch would hide. Patch first and "
            "wrap afterwards, or override the method in a subclass: the patch calls that."
        )
    options = options or Options()
    unpacked_because = _reason_not_to_pack(trainer, options)
    method = ScoringMethod(
        trainer,
        options.chunk_plan,
        packed=not unpacked_because,
        explicit_positions=accepts_position_ids(trainer),
    )
    handle = Patch(trainer, options, unpacked_because)
    method.handle = handle
    _enter(handle)
    _replace(handle, trainer, SCORING_METHOD, method)
    return handle


def unpatch(trainer: GRPOTrainer) -> None:
    """
    Takes `patch` back: the trainer is as it was.

    Args:
        trainer: a patched trainer; one that is not patched is left alone.

    Raises:
        TypeError: not a GRPOTrainer.
    """
    if not isinstance(trainer, GRPOTrainer):
        raise TypeError(f"fastgrpo.unpatch takes a trl.GRPOTrainer; it was given a {type(trainer).__name__}.")
    present = find_patch(trainer)
    if present is not None:
        present.unpatch()


def find_patch(trainer: GRPOTrainer) -> Patch | None:
    """The handle of a patched trainer, or None."""
    return next((handle for handle in _active if handle.trainer is trainer), None)


def _replace(handle: Patch, owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)
    handle.replaced.append((owner, name, value))


def _reason_not_to_pack(trainer: GRPOTrainer, options: Options) -> str:
    obstacle = packing_obstacle(trainer)
    if options.packing == "left" and obstacle:
        raise ValueError(f"packing='left' is not possible: {obstacle}; use packing='auto' or 'none'.")
    if obstacle and options.packing == "auto":
        logger.warning("fastgrpo: rows reach the model as TRL pads them, not left-packed: %s.", obstacle)
    return "packing='none'" if options.packing == "none" else obstacle


# Patches in force; a trainer that is dropped without unpatching takes its own out.
_active: weakref.WeakSet[Patch] = weakref.WeakSet()


def _enter(handle: Patch) -> None:
    _active.add(handle)
    weakref.finalize(handle, _restore_if_unused)
    # TRL's fused head looks its kernel up there at each call, for every trainer in the process.
    present = getattr(trl_utils, HEAD_NAME)
    if has_fused_head() and not isinstance(present, HeadDispatcher):
        setattr(trl_utils, HEAD_NAME, HeadDispatcher(present))
    _show_backends(handle)


def _leave(handle: Patch) -> None:
    _active.discard(handle)
    _restore_if_unused()


def _restore_if_unused() -> None:
    remaining = [handle for handle in _active if handle.active]
    if remaining:
        _show_backends(remaining[-1])
        return
    present = getattr(trl_utils, HEAD_NAME)
    if isinstance(present, HeadDispatcher):
        setattr(trl_utils, HEAD_NAME, present.original)
    for name in _BACKEND_NOTES:
        forget_backend(name)


def _show_backends(handle: Patch) -> None:
    device = handle.trainer.accelerator.device.type
    layout = "as TRL pads" if handle.unpacked_because else "left-packed"
    note_backend("packing", Backend(layout, device, handle.unpacked_because))
    note_backend("trainer head", head_backend(device))
