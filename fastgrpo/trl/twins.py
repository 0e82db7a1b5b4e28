"""The `fastgrpo_<name>` twins of `Options` as dataclass fields, in the form TRL's config fields have."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import typing
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from transformers.hf_argparser import string_to_bool

from fastgrpo.trl.config import Options, names_a_path

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
        ValueError, TypeError: a value that is not allowed, as `Options` raises.
    """
    values = {option.name: getattr(config, PREFIX + option.name) for option in dataclasses.fields(Options)}
    try:
        return Options(**values)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{error} (In GRPOConfig the names of these options start with {PREFIX}.)") from error


def settle_twins(config: Any) -> None:
    """
    Makes the twins of a config what their options take, and what JSON can hold.

    A command line gives a string where True, False or a path is allowed, in which the words that it has for switches are one,
    and a path becomes a string.

    Args:
        config: an instance of the patched `GRPOConfig`; changed in place.
    """
    hints = typing.get_type_hints(Options)
    for option in dataclasses.fields(Options):
        name = PREFIX + option.name
        value = getattr(config, name)
        if isinstance(value, Path):
            setattr(config, name, str(value) if names_a_path(str(value)) else f"./{value}")
        elif _is_switch_or_text(hints[option.name]) and isinstance(value, str) and not names_a_path(value):
            with contextlib.suppress(ArgumentTypeError):  # neither a path nor a switch: for Options to refuse
                setattr(config, name, string_to_bool(value))


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
