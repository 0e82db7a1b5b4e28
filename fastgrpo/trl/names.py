"""`patch_trl` and `unpatch_trl`: the names `GRPOConfig` and `GRPOTrainer`, wherever modules hold them."""

from __future__ import annotations

import copyreg
import gc
import logging
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer as TRLTrainer

from fastgrpo.trl.by_name import reduce_by_name
from fastgrpo.trl.classes import SWITCH, GRPOConfig, GRPOTrainer
from fastgrpo.trl.compat import check_installation

logger = logging.getLogger("fastgrpo")

_OURS: dict[type, type] = {TRLConfig: GRPOConfig, TRLTrainer: GRPOTrainer}
_LARGEST_REGISTRY = 1000

_replaced: list[tuple[Any, str, Any, Any]] = []
"""(owner, attribute, what stood there, what stands there now), in the order of replacement."""


def patch_trl(tuned_defaults: bool = True) -> None:
    """
    Makes every GRPO trainer built from now on a patched one: the names in TRL become subclasses with the same API.

    `GRPOConfig` and `GRPOTrainer` are replaced in `trl`, in its modules, and in every module that imported them already, as
    attributes of its classes and in default arguments too; a trainer class that was derived from TRL's before derives from the
    replacement now. Local variables and closures that hold TRL's classes are not seen. Configs get a `fastgrpo_<name>` for
    every field of `Options`, `vllm_sampling_params`, a precision that fits the device, and tuned defaults. A second call
    counts for `tuned_defaults`, and for what holds TRL's classes since.

    Args:
        tuned_defaults: whether configs made from now on use `beta=0.001`, and with vLLM `top_k=-1`, where these fields are not
            given. `GRPOConfig(fastgrpo_tuned_defaults=...)` says otherwise for one config.

    Raises:
        UnsupportedError (a ValueError): an installation that is not supported.
        TypeError: a config class that was derived from TRL's before, and so has none of the new fields. Nothing is changed.
    """
    if not isinstance(tuned_defaults, bool):
        raise TypeError(f"tuned_defaults is {tuned_defaults!r}; give True or False.")
    check_installation()
    _refuse_older_configs()
    SWITCH.on, SWITCH.tuned_defaults = True, tuned_defaults
    unreached = _exchange(_OURS, _replaced)
    for subclass in _subclasses(TRLTrainer, GRPOTrainer):
        bases = tuple(GRPOTrainer if base is TRLTrainer else base for base in subclass.__bases__)
        if _put(subclass, "__bases__", bases, _replaced):
            logger.warning(
                "fastgrpo: %s, defined earlier, is a subclass of the patched GRPOTrainer now.", _full_name(subclass)
            )
        else:
            unreached.append(_full_name(subclass))
    copyreg.pickle(TRLConfig, reduce_by_name)
    if unreached:
        warnings.warn(
            f"fastgrpo.patch_trl could not replace TRL's classes in {', '.join(sorted(unreached))}; trainers made through "
            "these are not patched. Import fastgrpo.auto before them, or call fastgrpo.patch(trainer).",
            stacklevel=2,
        )


def unpatch_trl() -> None:
    """
    Takes `patch_trl` back: every name stands for TRL's class again, also in modules imported since.

    Trainers built in between stay patched until `fastgrpo.unpatch(trainer)`; classes derived in between behave as if derived
    from TRL's. Without `patch_trl` before, it does nothing.
    """
    SWITCH.on = False
    if not _replaced:
        return
    copyreg.dispatch_table.pop(TRLConfig, None)
    while _replaced:
        owner, attribute, before, ours = _replaced.pop()
        if getattr(owner, attribute, None) is ours:
            setattr(owner, attribute, before)
        else:
            warnings.warn(
                f"fastgrpo.unpatch_trl: {owner.__name__}.{attribute} was replaced by something else since; it is left.",
                stacklevel=2,
            )
    _exchange({ours: stock for stock, ours in _OURS.items()}, [])


def _refuse_older_configs() -> None:
    if _subclasses(TRLConfig, GRPOConfig):
        gc.collect()  # a class that nobody holds any more is in the way until then
    older = _subclasses(TRLConfig, GRPOConfig)
    if older:
        raise TypeError(
            f"{', '.join(map(_full_name, older))} was derived from TRL's GRPOConfig before fastgrpo.patch_trl(), so it has "
            "none of the fields that come with it. Import fastgrpo.auto, or call fastgrpo.patch_trl(), before the class is "
            "defined or imported."
        )


def _subclasses(stock: type, ours: type) -> list[type]:
    return [cls for cls in stock.__subclasses__() if not issubclass(ours, cls) and not _is_own(cls.__module__)]


def _exchange(by: dict[type, type], record: list[tuple[Any, str, Any, Any]]) -> list[str]:
    """
    Replaces classes under every name that modules hold them by, as attributes of their classes, and in default arguments.

    Args:
        by: class -> what is put in its place.
        record: gets (owner, attribute, before, after) of what was replaced.

    Returns:
        names of the places that could not be changed.
    """
    failed = []
    for name, module in _modules_that_know(by):
        for attribute, value in list(vars(module).items()):
            places, unreachable = _places(f"{name}.{attribute}", module, attribute, value, by)
            failed += [place for place, owner, member, after in places if not _put(owner, member, after, record)]
            failed += unreachable
    return failed


Place = tuple[str, Any, str, Any]
"""(what it is called, owner, attribute, value to set)"""


def _places(
    place: str, module: ModuleType, attribute: str, value: Any, by: dict[type, type]
) -> tuple[list[Place], list[str]]:
    """Where one value of a module holds a class, and where it does so out of reach."""
    # By type(): isinstance() and getattr() may wake objects that pretend to be something else.
    kind = type(value)
    if _replacement(value, by):
        return [(place, module, attribute, _replacement(value, by))], []
    if kind is FunctionType:
        return _in_defaults(place, value, by), []
    if issubclass(kind, type) and value.__module__ == module.__name__:
        members = [(f"{place}.{member}", member, held) for member, held in list(vars(value).items())]
        found = [
            (label, value, name, _replacement(held, by)) for label, name, held in members if _replacement(held, by)
        ]
        return found + [inner for label, _, held in members for inner in _in_defaults(label, held, by)], []
    if kind is partial:
        return [], [place] if _replacement(value.func, by) else []
    if kind in (list, tuple, set, frozenset, dict) and len(value) <= _LARGEST_REGISTRY:
        held = list(value.values() if kind is dict else value)
        return [], [place] if any(_replacement(one, by) for one in held) else []
    return [], []


def _in_defaults(place: str, function: Any, by: dict[type, type]) -> list[Place]:
    if type(function) is not FunctionType:
        return []
    found: list[Place] = []
    positional, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    if any(_replacement(value, by) for value in positional):
        found.append((place, function, "__defaults__", tuple(_replacement(value, by) or value for value in positional)))
    if any(_replacement(value, by) for value in keywords.values()):
        after = {name: _replacement(value, by) or value for name, value in keywords.items()}
        found.append((place, function, "__kwdefaults__", after))
    return found


def _replacement(value: Any, by: dict[type, type]) -> type | None:
    return next((after for before, after in by.items() if value is before), None)


def _modules_that_know(classes: Iterable[type]) -> list[tuple[str, ModuleType]]:
    """(name, module) for every module that holds one of the classes, or a module of TRL."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if issubclass(type(module), ModuleType)]
    known = {id(cls) for cls in classes} | {id(module) for name, module in modules if name.split(".")[0] == "trl"}
    return [
        (name, module)
        for name, module in modules
        if not _is_own(name) and any(id(value) in known for value in list(vars(module).values()))
    ]


def _is_own(module: str) -> bool:
    return module.split(".")[0] == "fastgrpo"


def _put(owner: Any, attribute: str, after: Any, record: list[tuple[Any, str, Any, Any]]) -> bool:
    before = getattr(owner, attribute)
    try:
        setattr(owner, attribute, after)
    except Exception:  # modules may refuse in any way they like
        return False
    if getattr(owner, attribute) is not after:
        return False
    record.append((owner, attribute, before, after))
    return True


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
