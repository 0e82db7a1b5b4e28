"""Default values that can be told from the same value given by the user."""

from __future__ import annotations


class LeftAloneFloat(float):
    """A field's default; whoever gives the same number gives a plain `float`."""


class LeftAloneInt(int):
    """A field's default; whoever gives the same number gives a plain `int`."""


def left_alone(default: float | int) -> LeftAloneFloat | LeftAloneInt:
    """
    A default to put into a dataclass field: equal to the number, printed as it, and known to `is_left_alone`.

    It stays what it is through argument parsers, which hand defaults on unchanged, and is made a plain number once it has
    been looked at; so what is copied, pickled or rebuilt from a dict counts as given.

    Args:
        default: the number.
    """
    return LeftAloneInt(default) if isinstance(default, int) else LeftAloneFloat(default)


def is_left_alone(value: object) -> bool:
    """Whether a field still holds its default because nobody gave it a value."""
    return isinstance(value, LeftAloneFloat | LeftAloneInt)


def plain(value: float | int) -> float | int:
    """The number itself."""
    if isinstance(value, LeftAloneInt):
        return int(value)
    return float(value) if isinstance(value, LeftAloneFloat) else value
