"""The command as a process: exit statuses, stdout for JSON alone, Ctrl-C during imports, an output that nobody reads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

DONE, FAILED, USAGE, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
"""Exit statuses; the last, where nobody reads the output any more, is a shell's for SIGPIPE."""

_to_stdout: Callable[[str], object] | None = None


@contextmanager
def stdout_for_json(asked: bool) -> Iterator[None]:
    """
    While inside, `write_json` alone reaches stdout; what libraries, user's functions and child processes print goes to stderr.

    Args:
        asked: False = nothing changes.
    """
    global _to_stdout
    if not asked or sys.stdout is None or sys.stderr is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        _to_stdout = _writer(stack)
        try:
            yield
        finally:
            _to_stdout = None


def write_json(text: str) -> None:
    """Writes a document to stdout, whatever stdout has been turned to."""
    if _to_stdout is None:
        print(text, flush=True)
    else:
        _to_stdout(text + "\n")


def _writer(stack: contextlib.ExitStack) -> Callable[[str], object]:
    """Turns stdout to stderr until the stack unwinds, and gives what still writes to stdout."""
    stdout = sys.stdout
    stack.enter_context(contextlib.redirect_stdout(sys.stderr))
    try:
        descriptor, other = stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, OSError):  # no files: a notebook, a test
        return stdout.write
    stdout.flush()
    kept = os.dup(descriptor)
    stack.callback(os.close, kept)
    stack.callback(os.dup2, kept, descriptor)
    os.dup2(other, descriptor)

    def write(text: str) -> None:
        with open(kept, "w", encoding=stdout.encoding, errors="replace", closefd=False) as file:
            file.write(text)

    return write


@contextmanager
def interrupted_at_once_in_imports() -> Iterator[None]:
    """
    While inside, Ctrl-C during an import ends the process at once; at any other time it is a `KeyboardInterrupt` as always.

    An extension module that is half initialised may swallow the exception, turn it into another, or crash when the
    interpreter ends. Nothing has begun by then that would have to be ended.
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield
        return
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            say_interrupted()
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def say_interrupted() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # Over the line of a spinner, which hides the cursor.
        lead = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""
        sys.stderr.write(f"{lead}Interrupted.\n")
        sys.stderr.flush()


def finish_output() -> None:
    """Writes what is still buffered; raises `OSError` where it cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def drop_output() -> None:
    """What is buffered for an output that takes nothing goes nowhere: the interpreter would try it again at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except AttributeError:  # closed before the command began
            continue
