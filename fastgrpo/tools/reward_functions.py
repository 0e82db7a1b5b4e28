"""Reward functions of a user: found by name, called as TRL calls them, and kept from taking the program with them."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from fastgrpo.tools.wording import ToolError, named, place, reason

OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric")
"""What TRL passes to every reward function beside `prompts`, `completions`, `completion_ids` and the dataset's columns."""
_SURVIVE = "make it survive any completion"
_OWN_FILES: dict[Path, ModuleType] = {}


class RewardError(ToolError):
    """A reward function that cannot be used."""


@dataclass
class Conduct:
    """
    What a user's code did beside its work.

    Attributes:
        moved_to: the working directory it left behind; None = it stayed.
    """

    moved_to: str | None = None


@contextmanager
def contained(subject: str, remedy: str = _SURVIVE) -> Iterator[Conduct]:
    """
    Runs a user's code: the working directory stays, and its errors have a name.

    Args:
        subject: who acts, for the error's text.
        remedy: of an error that says nothing about one itself.

    Raises:
        RewardError: for everything that the code raises, SystemExit and a KeyboardInterrupt that nobody typed included.
    """
    conduct, here = Conduct(), os.getcwd()
    pressed: list[int] = []
    try:
        with _noticing_ctrl_c(pressed), _named(subject, remedy, pressed):
            yield conduct
    finally:
        conduct.moved_to = _back_to(here)


@contextmanager
def _named(subject: str, remedy: str = _SURVIVE, pressed: Sequence[int] = ()) -> Iterator[None]:
    try:
        yield
    except RewardError:
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise RewardError(
            f"{subject} calls sys.exit({code}){place(error)}", "raise an error instead, or return None"
        ) from error
    except KeyboardInterrupt as error:
        if pressed:
            raise
        raise RewardError(f"{subject} raises KeyboardInterrupt{place(error)}", "return None instead") from error
    except Exception as error:  # a user's code raises what it likes
        raise RewardError(f"{subject} raises {named(error)}{place(error)}", _remedy(error) or remedy) from error


@contextmanager
def _noticing_ctrl_c(pressed: list[int]) -> Iterator[None]:
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        previous(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _back_to(folder: str) -> str | None:
    try:
        now = os.getcwd()
    except FileNotFoundError:
        now = "a folder that is gone"
    if now == folder:
        return None
    os.chdir(folder)
    return now


def _remedy(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install what provides {error.name.partition('.')[0]} into this environment"
    if isinstance(error, ImportError):
        return "correct the import"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        return f"give rows with a column {error.args[0]} (a .jsonl file), if that is one, or make it survive without"
    return ""


def load_function(spec: str) -> Callable[..., Any]:
    """
    The function that `MODULE:NAME` or `FILE.py:NAME` names; the current folder, or the file's, can be imported from.

    Raises:
        RewardError: no such module, file or function, or one that cannot be imported.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        example = ":".join(spec.rsplit(".", 1)) if "." in spec and not spec.endswith(".py") else "my_rewards.py:exact"
        raise RewardError(f"{spec!r} names no function", f"give MODULE:NAME or FILE.py:NAME, for example {example}")
    module = _import_file(module_name) if module_name.endswith(".py") else _import_module(module_name)
    function = getattr(module, name, None)
    if function is None:
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        near = get_close_matches(name, there, 1) or sorted(there)[:5]
        known = f"it has {', '.join(near)}" if near else "it has no function at all"
        raise RewardError(f"{module_name} has no function {name}; {known}", "correct the name after the colon")
    if not callable(function):
        raise RewardError(
            f"{module_name} has no function {name}, but something of type {type(function).__name__} of that name",
            "name a function",
        )
    if inspect.isclass(function):
        raise RewardError(
            f"{spec} is a class, which TRL would call as a function", "name a function, or an instance of the class"
        )
    return function


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    with _importing(name):
        return importlib.import_module(name)


def _import_file(name: str) -> ModuleType:
    path = Path(name).resolve()
    if path in _OWN_FILES:
        return _OWN_FILES[path]
    if not path.is_file():
        raise RewardError(f"{name} cannot be imported: there is no such file", "correct the path before the colon")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # Under its own name, by which dataclasses and pickles look for it, unless that stands for another module.
    own_name = path.stem if path.stem not in sys.modules else f"fastgrpo_rewards_{len(_OWN_FILES)}_{path.stem}"
    found = importlib.util.spec_from_file_location(own_name, path)
    module = sys.modules[own_name] = importlib.util.module_from_spec(found)
    try:
        with _importing(name):
            found.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    _OWN_FILES[path] = module
    return module


@contextmanager
def _importing(name: str) -> Iterator[None]:
    try:
        with contained(name):
            yield
    except RewardError as error:
        cause = error.__cause__
        if isinstance(cause, SystemExit | KeyboardInterrupt):
            text = f"{name} cannot be imported: importing it ends the program ({named(cause)})"
            raise RewardError(text, 'put what it does as a program under if __name__ == "__main__"') from cause
        if isinstance(cause, ModuleNotFoundError) and cause.name and (name + ".").startswith(cause.name + "."):
            text = f"{name} cannot be imported: there is no module {cause.name} in this folder or environment"
            raise RewardError(text, "run it in the module's folder, or give FILE.py:NAME") from cause
        remedy = error.remedy if isinstance(cause, ImportError) else "correct what it does when it is imported"
        if isinstance(cause, ImportError) and "relative import" in str(cause):
            remedy = "it is part of a package: give PACKAGE.MODULE:NAME, from the folder that holds the package"
        said = reason(cause) if isinstance(cause, ModuleNotFoundError) else named(cause)
        raise RewardError(f"{name} cannot be imported: {said}{place(cause)}", remedy) from cause


def call(
    spec: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    conduct: list[Conduct] | None = None,
) -> Any:
    """
    What a reward function returns, awaited where it is asynchronous.

    Args:
        spec: its name, for people.
        function: of a user.
        arguments: `prompts`, `completions`, `completion_ids` and the dataset's columns; the trainer's are added.
        conduct: gets what it did beside its work.

    Raises:
        RewardError: it does not take these arguments, or raises.
    """
    given = {**arguments, **_of_no_trainer()}
    _check_signature(spec, function, given)
    form = "a text" if isinstance(arguments["completions"][0], str) else "a list of messages"
    with contained(spec, f"{_SURVIVE}; here each is {form}, as the prompts are") as observed:
        result = function(**given)
        if inspect.isawaitable(result):
            if not is_async(function):
                result.close() if inspect.iscoroutine(result) else None
                raise RewardError(
                    f"{spec} returns something to await, and is no `async def` itself, so TRL would not await it",
                    "make it an `async def`",
                )
            result = asyncio.run(_awaited(result))
        if inspect.isgenerator(result):  # which runs the user's code, too
            result = list(result)
    if conduct is not None:
        conduct.append(observed)
    return result


def guarded(spec: str) -> Callable[..., Any]:
    """
    The function that a name stands for, as a trainer may call it: it raises `RewardError` and nothing else.

    Args:
        spec: see `load_function`.
    """
    function = load_function(spec)

    def sync(**arguments: Any) -> Any:
        with contained(spec):
            return function(**arguments)

    async def asynchronous(**arguments: Any) -> Any:
        with _named(spec):  # several run at once, in a thread: nothing of the whole process is touched
            return await function(**arguments)

    wrapped = asynchronous if is_async(function) else sync
    wrapped.__name__ = getattr(function, "__name__", spec.rpartition(":")[2])
    return wrapped


async def _awaited(value: Any) -> Any:
    return await value


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives something to await: of an `async def`, bound or not, or of an object whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _of_no_trainer() -> dict[str, Any]:
    from transformers import TrainerState

    values = (TrainerState(), lambda column, values: None, lambda name, value: None)
    return dict(zip(OF_THE_TRAINER, values, strict=True))


def _check_signature(spec: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        missing = re.findall(r"argument: '(\w+)'", str(error))
        if "missing" in str(error) and missing:
            raise RewardError(
                f"{spec} wants {missing[0]}, which the rows have no column for",
                f"give rows with a column {missing[0]} (a .jsonl file), or a default in the function",
            ) from error
        accepted = [name for name in signature.parameters if name in arguments]
        unexpected = [name for name in arguments if name not in accepted]
        raise RewardError(
            f"{spec} does not take {', '.join(unexpected)}, which TRL passes to it ({reason(error)})",
            "add **kwargs to its arguments",
        ) from error


def is_number(value: Any) -> bool:
    """Whether TRL can make a reward of a value."""
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True
