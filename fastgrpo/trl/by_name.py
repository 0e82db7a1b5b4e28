"""Pickles of a config that name TRL's class, so that they load with and without fastgrpo."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from trl import GRPOConfig as TRLConfig

_MODULE, _NAME = TRLConfig.__module__, TRLConfig.__qualname__


def reduce_by_name(config: TRLConfig) -> tuple[Any, ...]:
    """
    How a `GRPOConfig`, TRL's or fastgrpo's, is pickled and copied.

    A class is pickled as the name under which it must be found, and under TRL's name stands fastgrpo's class while it is
    patched. So the pickle asks for whatever has that name when it is loaded; a copy has the class of the original.

    Args:
        config: an instance of exactly one of the two classes.

    Returns:
        as `object.__reduce__`.
    """
    return _Blank(type(config)), (), object.__reduce_ex__(config, 2)[2]


class _Blank:
    """Makes an instance without calling `__init__`. Pickled, it is that function for the class with the name."""

    def __init__(self, cls: type[TRLConfig]) -> None:
        self._cls = cls

    def __call__(self) -> TRLConfig:
        return object.__new__(self._cls)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (object.__new__, _Call(getattr, _Call(importlib.import_module, _MODULE), _NAME))


class _Call:
    """Pickled, it is what the function returns when the pickle is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call
