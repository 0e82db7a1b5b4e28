"""A method of one object, with something around it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any


class Around:
    """
    Stands on an object for one of its methods, and calls `around(method, *args, **kwargs)` instead.

    A deep copy of the object gets the method that was there before.

    Args:
        owner: the object.
        name: the method.
        around: gets the method that was there before and the call's arguments; returns the result.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._method, self._around = getattr(owner, name), around
        # Without its attributes, which are those of this class where two stand on each other.
        functools.update_wrapper(self, self._method, updated=())

    def retire(self) -> None:
        """From here on a call is one of the method alone: for whoever wrapped this and keeps it."""
        self._around = lambda method, *args, **kwargs: method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._method, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._method, *args, **kwargs)
