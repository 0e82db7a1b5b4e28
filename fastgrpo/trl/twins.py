"""The `fastgrpo_<name>` twins of `Options` as dataclass fields, in the form TRL's config fields have."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

from fastgrpo.trl.config import Options

PREFIX = "fastgrpo_"


def twin_fields() -> list[tuple[str, Any, Any]]:
    """
    Every field of `Options` as `make_dataclass` takes it: name, type, and a field with default and help text.

    Types are those that `HfArgumentParser` can read from a command line; help texts are those of the docstring of `Options`.
    """
    hints, helps = typing.get_type_hints(Options), option_helps()
    return [
        (
            PREFIX + option.name,
            _parsable(hints[option.name]),
            dataclasses.field(default=option.default, metadata={"help": _for_argparse(helps[option.name])}),
        )
        for option in dataclasses.fields(Options)
    ]


def options_of(config: Any) -> Options:
    """
    The options that a config's twins say.

    Args:
        config: an instance of the patched `GRPOConfig`.

    Returns:
        Options.

    Raises:
        ValueError: a value that is not allowed.
    """
    values = {option.name: getattr(config, PREFIX + option.name) for option in dataclasses.fields(Options)}
    try:
        return Options(**values)
    except ValueError as error:
        raise ValueError(f"{error} (In GRPOConfig the names of these options start with {PREFIX}.)") from error


def settle_twins(config: Any) -> None:
    """
    Makes the twins of a config what their options take, and what JSON can hold.

    A command line gives a path where True or False is allowed too as a string, and a path becomes one.

    Args:
        config: an instance of the patched `GRPOConfig`; changed in place.
    """
    hints = typing.get_type_hints(Options)
    for option in dataclasses.fields(Options):
        name = PREFIX + option.name
        value = getattr(config, name)
        if isinstance(value, Path):
            setattr(config, name, str(value))
        elif _is_switch_or_text(hints[option.name]) and isinstance(value, str) and value.lower() in ("true", "false"):
            setattr(config, name, value.lower() == "true")


def option_helps() -> dict[str, str]:
    """What the docstring of `Options` says of each of its fields, by name, as one line of text."""
    text = inspect.getdoc(Options) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (\w+): ", arguments, flags=re.MULTILINE)[1:]
    found = {name: " ".join(words.split()) for name, words in zip(entries[::2], entries[1::2], strict=True)}
    return {option.name: found.get(option.name, "") for option in dataclasses.fields(Options)}


def _for_argparse(text: str) -> str:
    return (text[:1].upper() + text[1:]).replace("%", "%%")


def _is_switch_or_text(hint: Any) -> bool:
    return {bool, str} <= set(typing.get_args(hint))


def _parsable(hint: Any) -> Any:
    return str if _is_switch_or_text(hint) else hint
