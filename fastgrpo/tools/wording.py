"""Errors of other people's code, in words for one line."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import fastgrpo

_MOST_CHARACTERS = 400
_CPP_FRAMES = re.compile(r"\s*Exception raised from .*", re.DOTALL)
_CLASS_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception): |Class validation error for validator '\w+':\s+")
_NOT_THE_USERS = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")]
_NOT_THE_USERS.append(Path(fastgrpo.__file__).parent)


def short(value: Any) -> str:
    """A value as it stands in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


class ToolError(ValueError):
    """
    Something of the user's that cannot be used.

    Args:
        text: what is wrong with it.
        remedy: what to do.
    """

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


def reason(error: BaseException) -> str:
    """
    An error's text on one line, without names of classes, C++ frames and full stop, cut between words where it is long.

    Args:
        error: of any library.

    Returns:
        the name of the error's type where it has no text.
    """
    if isinstance(error, KeyError) and error.args:
        return f"{error.args[0]} is missing"
    text = " ".join(_CLASS_NAME.sub("", _CPP_FRAMES.sub("", str(error))).split()).rstrip(".: ")
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS].rsplit(" ", 1)[0] + " ..."
    # Quotation marks that the frames have left open.
    return text + '"' * (text.count('"') % 2) or type(error).__name__


def named(error: BaseException) -> str:
    """The same, after the name of its type."""
    name, text = type(error).__name__, reason(error)
    return name if text == name else f"{name}: {text}"


def origin(error: BaseException) -> str:
    """` (in PACKAGE/FILE.py, line N)` of the frame that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return f" (in {'/'.join(Path(frames[-1].filename).parts[-2:])}, line {frames[-1].lineno})"


def place(error: BaseException) -> str:
    """` (FILE, line N)` of the innermost frame that is neither Python's, a package's nor ours; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_absolute() and not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS):
            return f" ({path.name}, line {frame.lineno})"
    return ""
