"""What libraries say when something fails, as a sentence for people."""

from __future__ import annotations

import re

_LONGEST = 240
_CPP_FRAMES = re.compile(r"\s*Exception raised from .*", re.DOTALL)
_CLASS_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception): |Class validation error for validator '\w+':\s+")


def in_one_line(error: BaseException) -> str:
    """
    An exception's message without line breaks, names of classes, C++ frames and full stop, cut between words where it is long.

    Args:
        error: of any library.
    """
    if isinstance(error, KeyError) and error.args:
        return f"{error.args[0]} is missing"
    text = " ".join(_CLASS_NAME.sub("", _CPP_FRAMES.sub("", str(error))).split()).rstrip(".: ")
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rsplit(" ", 1)[0] + " ..."
    # Quotation marks that the frames have left open.
    return text + '"' * (text.count('"') % 2) or "no reason was given"
