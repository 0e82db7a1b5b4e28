"""`patch(trainer)` and `unpatch(trainer)`: the only place that replaces anything of TRL."""

from __future__ import annotations

import logging
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import trl.trainer.grpo_trainer as trl_grpo
import trl.trainer.utils as trl_utils
from transformers import TrainerCallback
from trl import GRPOTrainer

from fastgrpo.kernels.backends import Backend, forget_backend, head_backend, note_backend
from fastgrpo.trl.around import Around
from fastgrpo.trl.attention import install_attention, remove_attention
from fastgrpo.trl.checkpointing import CheckpointingDispatcher
from fastgrpo.trl.clock import StepClock
from fastgrpo.trl.compat import (
    CHECKPOINTING_NAME,
    GENERATE_METHOD,
    HEAD_NAME,
    LOSS_METHOD,
    SCORING_METHOD,
    UnsupportedError,
    accepts_position_ids,
    base_model,
    check_installation,
    check_trainer,
    has_fused_head,
    has_own_attribute,
    models_of,
    notes_on,
    overrides,
    packing_obstacle,
    varlen_obstacle,
)
from fastgrpo.trl.config import Options
from fastgrpo.trl.freshness import Freshness
from fastgrpo.trl.fused import head_trains, loss_backend, why_with_a_graph
from fastgrpo.trl.heads import HeadDispatcher
from fastgrpo.trl.layers import install_layers, remove_layers
from fastgrpo.trl.loss import LossMethod
from fastgrpo.trl.metrics import StepMetrics
from fastgrpo.trl.offload import Offload, offload_obstacle
from fastgrpo.trl.onpolicy import OldLogProbs, corrects_sampler, old_pass_obstacle
from fastgrpo.trl.ordering import RowOrder, order_obstacle
from fastgrpo.trl.parts import check_limits
from fastgrpo.trl.probe import Finding, probe
from fastgrpo.trl.runlog import LoggedTrain
from fastgrpo.trl.scoring import Layouts, ScoringMethod
from fastgrpo.trl.skipping import skipping_obstacle
from fastgrpo.trl.start import StartLines
from fastgrpo.trl.sync import WeightSync, choose_sync

logger = logging.getLogger("fastgrpo")

_BACKEND_NOTES = ("packing", "trainer head", "trainer loss", "old log-probs", "order of rows", "weight sync")


@dataclass(eq=False)
class Patch:
    """
    Handle of a patched trainer; also a context manager that unpatches at its end.

    Attributes:
        trainer: the patched trainer.
        options: the options in force.
        layout: how rows reach the model: `"varlen"`, `"left"` or `"none"`, see `Options.packing`.
        not_varlen_because: why not as one row without padding; empty where they do.
        finding: what the check at patch time found.
        old_pass_because: why TRL's pass for old log-probs is always made; empty where it is left out when it can be.
        sync: how weights reach vLLM; None where the trainer does not use it.
        slow_sync_because: why not a faster way; empty where there is none.
        in_place_because: why rows stay in the micro-batches TRL put them in; empty where a group's come together.
        active: False once unpatched.
    """

    trainer: GRPOTrainer
    options: Options
    layout: Layouts = "none"
    not_varlen_because: str = ""
    finding: Finding = field(default_factory=Finding)
    old_pass_because: str = ""
    sync: WeightSync | None = field(default=None, repr=False)
    slow_sync_because: str = ""
    in_place_because: str = ""
    active: bool = True
    callbacks: list[TrainerCallback] = field(default_factory=list, repr=False)
    replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list, repr=False)
    """(owner, attribute, what stands there now, what stood there or None), in the order of replacement."""
    old: OldLogProbs | None = field(default=None, repr=False)
    loss: LossMethod | None = field(default=None, repr=False)

    def unpatch(self) -> None:
        """Restores the trainer. A second call does nothing. Something put over the patch since then is left, with a warning."""
        if not self.active:
            return
        if self.loss is not None:
            self.loss.settle()
        if self.old is not None:
            self.old.settle(getattr(self.trainer, SCORING_METHOD))
        self.active = False
        while self.replaced:
            owner, name, ours, before = self.replaced.pop()
            if isinstance(ours, Around):
                ours.retire()
            present = owner.__dict__.get(name)
            if present is ours and before is None:
                delattr(owner, name)
            elif present is ours:
                setattr(owner, name, before)
            else:
                warnings.warn(
                    f"fastgrpo.unpatch: {type(owner).__name__}.{name} was replaced by something else after the patch; it is "
                    "left as it is.",
                    stacklevel=2,
                )
        if self.sync is not None:
            self.sync.close()
        # A new list, since the trainer may be going through the old one: this may be called by a callback.
        callbacks = self.trainer.callback_handler.callbacks
        self.trainer.callback_handler.callbacks = [
            c for c in callbacks if not any(c is ours for ours in self.callbacks)
        ]
        for callback in self.callbacks:
            if isinstance(callback, StepMetrics):
                callback.withdraw()
        _leave(self)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.unpatch()


def patch(trainer: GRPOTrainer, options: Options | None = None) -> Patch:
    """
    Makes a built `GRPOTrainer` compute its log-probs with fastgrpo; everything else stays TRL's.

    Works before, between and after `train()` calls. Three short rows are scored by the model itself and by fastgrpo first:
    where packed rows differ, rows keep TRL's layout; where the head differs, the trainer is refused. Results agree with the
    unpatched trainer's up to the rounding of floating-point sums. Models whose absolute positions TRL shifts by its left
    padding (GPT-2, XGLM) are scored at their real positions.

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

    if has_own_attribute(trainer, SCORING_METHOD):
        raise UnsupportedError(
            f"The trainer already has an own {SCORING_METHOD}, set on the object, which the patch would hide. Patch first and "
            "wrap afterwards, or override the method in a subclass: the patch calls that."
        )
    options = options or Options()
    obstacles = _obstacles(trainer, options)
    if options.skip_zero_advantage and skipping_obstacle(trainer):
        raise ValueError(f"skip_zero_advantage=True is not possible: {skipping_obstacle(trainer)}; leave it False.")
    if options.offload_activations and offload_obstacle(trainer):
        raise ValueError(f"offload_activations=True is not possible: {offload_obstacle(trainer)}, or leave it False.")
    check_limits(trainer, options.limits)
    layouts: list[Layouts] = [layout for layout, obstacle in obstacles.items() if not obstacle]
    method = ScoringMethod(
        trainer,
        options.chunk_plan,
        layout=layouts[0],
        share_prefix=options.share_prefix,
        explicit_positions=accepts_position_ids(trainer),
        limits=options.limits,
        fuse=options.fused_layers and not trainer.args.torch_compile,
    )
    handle = Patch(
        trainer, options, old_pass_because=old_pass_obstacle(trainer), in_place_because=order_obstacle(trainer)
    )
    handle.sync, handle.slow_sync_because = choose_sync(trainer, options.sync)
    method.handle = handle
    if options.offload_activations:
        method.offload = _offload(trainer.accelerator.device.type)
    _enter(handle)
    try:
        if "varlen" in layouts:
            for model in models_of(trainer):
                install_attention(model.config.get_text_config()._attn_implementation)
        if method.fused.enabled:
            install_layers(models_of(trainer))
        _choose_layout(handle, method, layouts, obstacles)
    except BaseException:
        handle.unpatch()
        raise
    once = corrects_sampler(trainer) and not handle.old_pass_because
    for note in notes_on(trainer, handle.layout != "none", once):
        logger.warning("fastgrpo: %s.", note)
    _replace_methods(handle, method)
    if handle.slow_sync_because and options.sync == "auto":
        logger.warning("fastgrpo: how weights reach vLLM: %s, because %s.", handle.sync.words, handle.slow_sync_because)
    if handle.sync is not None:
        for owner, name, value in handle.sync.replacements():
            _replace(handle, owner, name, value)
    if options.run_log is not False:
        _replace(handle, trainer, "train", LoggedTrain(trainer, options))
    clock, freshness = StepClock(), Freshness(trainer, options.on_stale)
    for owner, name, around in [*freshness.around(), *clock.around(trainer)]:
        _replace(handle, owner, name, Around(owner, name, around))
    for callback in (StartLines(handle), StepMetrics(trainer, clock, freshness)):
        trainer.add_callback(callback)
        handle.callbacks.append(callback)
    return handle


def _offload(device: str) -> Offload | None:
    if device == "cuda":
        return Offload()
    logger.warning("fastgrpo: offload_activations=True changes nothing on %s: activations share host memory.", device)
    return None


def _obstacles(trainer: GRPOTrainer, options: Options) -> dict[Layouts, str]:
    """Layout -> why it cannot be, for those the options allow, the best first."""
    obstacles = {
        "varlen": packing_obstacle(trainer) or varlen_obstacle(trainer),
        "left": packing_obstacle(trainer),
        "none": "",
    }
    if options.packing == "auto":
        return obstacles
    if obstacles[options.packing]:
        rows = "" if obstacles["left"] else " (rows are left-packed)"
        raise ValueError(
            f"packing={options.packing!r} is not possible: {obstacles[options.packing]}; use packing='auto'{rows} or 'none'."
        )
    return {options.packing: ""}


def _choose_layout(handle: Patch, method: ScoringMethod, layouts: list[Layouts], obstacles: dict[Layouts, str]) -> None:
    """Checks the head and the layouts against the model itself, and takes the first layout that agrees."""
    finding = probe(handle.trainer, method.score, layouts)
    if finding.head and method.fused.enabled:
        method.fused.enabled = False
        unfused = probe(handle.trainer, method.score, layouts)
        if not unfused.head:
            logger.warning("fastgrpo: layers run their own forward, as with fused_layers=False: %s.", finding.head)
            finding = unfused
    handle.finding = finding
    if finding.skipped:
        logger.warning(
            "fastgrpo: patched without a check against the model's own forward, which raised %s", finding.skipped
        )
    if finding.head:
        raise UnsupportedError(
            f"On three short rows, fastgrpo's output head and the model's own forward disagree: {finding.head}. "
            f"{type(base_model(handle.trainer.model)).__name__} turns hidden states into logits in a way that fastgrpo does "
            "not know, or another trainer with another temperature uses the same model object. Train without the patch, and "
            "please report the model."
        )
    wanted = handle.options.packing
    if wanted in finding.rejected:
        raise UnsupportedError(
            f"packing={wanted!r} is not possible: {finding.rejected[wanted]}; use packing='auto' or 'none'."
        )
    method.layout = handle.layout = finding.layout
    reasons = obstacles | finding.rejected
    handle.not_varlen_because = reasons.get("varlen", f"packing={wanted!r}") if finding.layout != "varlen" else ""
    if finding.layout != "varlen" or not handle.options.share_prefix:
        handle.in_place_because = handle.in_place_because or "prompts are not shared"
    for layout, reason in finding.rejected.items():
        logger.warning("fastgrpo: rows are not packed as %r: %s.", layout, reason)
    if finding.layout == "none" and wanted == "auto":
        logger.warning("fastgrpo: rows reach the model as TRL pads them: %s.", reasons["left"])
    _show_backends(handle)


def _replace_methods(handle: Patch, method: ScoringMethod) -> None:
    trainer = handle.trainer
    _replace(handle, trainer, SCORING_METHOD, method)
    if overrides(trainer, LOSS_METHOD):
        return
    old = OldLogProbs(trainer, method)
    order = None if handle.in_place_because else RowOrder(trainer, old.window)
    handle.loss = LossMethod(trainer, method, old, handle.options.skip_zero_advantage, order)
    _replace(handle, trainer, LOSS_METHOD, handle.loss)
    if not handle.old_pass_because:
        method.old = handle.old = old
        _replace(handle, trainer, GENERATE_METHOD, Around(trainer, GENERATE_METHOD, old.generate))


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
    handle.replaced.append((owner, name, value, owner.__dict__.get(name)))
    setattr(owner, name, value)


# Patches in force; a trainer that is dropped without unpatching takes its own out.
_active: weakref.WeakSet[Patch] = weakref.WeakSet()


def _enter(handle: Patch) -> None:
    _active.add(handle)
    weakref.finalize(handle, _restore_if_unused)
    # TRL's fused head looks its kernel up there at each call, for every trainer in the process.
    present = getattr(trl_utils, HEAD_NAME)
    if has_fused_head() and not isinstance(present, HeadDispatcher):
        setattr(trl_utils, HEAD_NAME, HeadDispatcher(present))
    present = getattr(trl_grpo, CHECKPOINTING_NAME, None)
    if present is not None and not isinstance(present, CheckpointingDispatcher):
        present = CheckpointingDispatcher(present)
        setattr(trl_grpo, CHECKPOINTING_NAME, present)
    if present is not None:
        present.know(handle.trainer.model)
    _show_backends(handle)


def _leave(handle: Patch) -> None:
    _active.discard(handle)
    present = getattr(trl_grpo, CHECKPOINTING_NAME, None)
    if isinstance(present, CheckpointingDispatcher):
        present.forget(handle.trainer.model)
    _restore_if_unused()


def _restore_if_unused() -> None:
    remaining = [handle for handle in _active if handle.active]
    if remaining:
        _show_backends(remaining[-1])
        return
    present = getattr(trl_utils, HEAD_NAME)
    if isinstance(present, HeadDispatcher):
        setattr(trl_utils, HEAD_NAME, present.original)
    present = getattr(trl_grpo, CHECKPOINTING_NAME, None)
    if isinstance(present, CheckpointingDispatcher):
        setattr(trl_grpo, CHECKPOINTING_NAME, present.original)
    remove_attention()
    remove_layers()
    for name in _BACKEND_NOTES:
        forget_backend(name)


def describe_layout(handle: Patch) -> str:
    """How rows reach the model, in words."""
    if handle.layout == "varlen":
        return "no padding, prompts shared" if handle.options.share_prefix else "no padding"
    return {"left": "left-packed", "none": "as TRL pads"}[handle.layout]


def _show_backends(handle: Patch) -> None:
    # Not the accelerator's, whose state is gone while another trainer's arguments are made.
    device = handle.trainer.args.device.type
    note_backend("packing", Backend(describe_layout(handle), device, handle.not_varlen_because))
    note_backend("trainer head", head_backend(device))
    order = "as TRL shuffles them" if handle.in_place_because else "groups together within an optimizer step"
    note_backend("order of rows", Backend(order, device, handle.in_place_because))
    if head_trains(handle.trainer):
        packed, in_parts = handle.layout == "varlen", bool(handle.options.limits)
        reason = why_with_a_graph(handle.trainer, packed, in_parts, not handle.old_pass_because)
        note_backend("trainer loss", loss_backend(device, reason))
    if corrects_sampler(handle.trainer):
        way = (
            "a forward of their own"
            if handle.old_pass_because
            else "the loss's own, where the policy cannot move before"
        )
        note_backend("old log-probs", Backend(way, device, handle.old_pass_because))
    if handle.sync is None:
        forget_backend("weight sync")
    else:
        note_backend("weight sync", Backend(handle.sync.words, device, handle.slow_sync_because))
