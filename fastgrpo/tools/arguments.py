"""What the subcommands of `fastgrpo` share: the parser and types of arguments, the console, JSON, exit statuses."""

from __future__ import annotations

import argparse
import io
import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from fastgrpo.tools.process import DONE, FAILED, INTERRUPTED, UNREAD, USAGE, write_json

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "UNREAD",
    "USAGE",
    "Parser",
    "console",
    "integer",
    "number",
    "positive",
    "print_json",
    "seed",
]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a line of its own, without a page of usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n`{self.prog} --help` tells what is allowed.\n")


def integer(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small; give 1 or more")
    return value


def seed(text: str) -> int:
    """A seed of torch's generators."""
    value = integer(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{value} is no seed; give 0 to {2**32 - 1}")
    return value


def number(text: str) -> float:
    """A number that is finite and not negative."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is out of range; give 0 or more")
    return value


def console(stderr: bool = False) -> Console:
    """A rich console on stdout or stderr; colours follow the terminal and NO_COLOR, and no sign makes it fail."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # to `main`: rich would end with a status that means something else here

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # an output in ASCII has no tick
    return Output(stderr=stderr)


def print_json(value: Any) -> None:
    """One indented JSON document on stdout."""
    write_json(json.dumps(value, indent=2, allow_nan=False))
