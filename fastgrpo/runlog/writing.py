"""Writes run logs: a line at a time, each in one write, and evaluations into logs that are there."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from fastgrpo.runlog.reading import is_json, read_run_log
from fastgrpo.runlog.schema import KEYS, SCHEMA, strict

logger = logging.getLogger("fastgrpo")

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)


class RunLog:
    """
    Writes a run's `log.jsonl`, line by line; a context manager whose exit writes the `end` line.

    Each line is appended in one write, so a run that dies leaves whole lines, and what others append meanwhile stays. A disk
    that takes no more ends the log with a warning, and not the run. The `end` line's `exit` is "done", "interrupted" after
    Ctrl-C, or the text of the error that left the `with` block.

    Args:
        path: the new file; its folder is made.
        run: values of the `run` line, which is written at once; `schema` and `started` (UTC) are filled in. For names see
            `KEYS`.

    Raises:
        FileExistsError: there is a file at `path`; logs are never overwritten.
        TypeError: a name that the `run` line does not have.
    """

    def __init__(self, path: str | Path, **run: Any) -> None:
        self.path = Path(path)
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        first = _line("run", {"schema": SCHEMA, "started": started, **run})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = os.fdopen(os.open(self.path, _NEW, 0o666), "ab", buffering=0)
        except FileExistsError:
            raise FileExistsError(f"{self.path} holds the log of another run; choose a new name or folder.") from None
        self._started = time.perf_counter()
        self._seconds, self._steps = 0.0, 0
        self._peak_memory_gb: float | None = None
        self._broken = False
        self._append(first)

    def step(self, step: int, *, seconds: float | None = None, steps: int = 1, **values: Any) -> None:
        """
        Writes the line of one optimizer step.

        Args:
            step: optimizer steps done, from 1.
            seconds: wall clock of the step, for the mean in the `end` line.
            steps: optimizer steps that the line is the mean of; its weight in every mean over lines.
            values: what was measured, times in seconds, memory in GB (10^9 bytes); for names see `KEYS`.
        """
        if seconds is not None:
            self._seconds, self._steps = self._seconds + seconds * steps, self._steps + steps
        peak = values.get("peak_memory_gb")
        if peak is not None:
            self._peak_memory_gb = max(peak, self._peak_memory_gb or 0.0)
        self._write("step", {"step": step, "steps": steps or None, **values})

    def eval(self, step: int, pass_at_1: float, n: int, **values: Any) -> None:
        """
        Writes an evaluation.

        Args:
            step: optimizer steps done before it.
            pass_at_1: share of problems solved, 0 to 1; the mean over `samples` answers to each.
            n: problems.
            values: `temperature` of the sampling, left out for greedy answers, and `samples` of each problem.
        """
        self._write("eval", {"step": step, "pass_at_1": pass_at_1, "n": n, **values})

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            exit_reason = "done"
        elif isinstance(error, KeyboardInterrupt):
            exit_reason = "interrupted"
        else:
            exit_reason = f"{type(error).__name__}: {error}"
        self._write(
            "end",
            {
                "wall_s": round(time.perf_counter() - self._started, 3),
                "seconds_per_step": self._seconds / self._steps if self._steps else None,
                "peak_memory_gb": self._peak_memory_gb,
                "exit": exit_reason,
            },
        )
        self._file.close()

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        self._append(_line(kind, values))

    def _append(self, line: bytes) -> None:
        if self._broken:  # what would follow half a line is not readable
            return
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._broken = True
            logger.warning("fastgrpo: %s cannot be written any further: %s.", self.path, error.strerror)


def append_eval(path: str | Path, step: int, pass_at_1: float, n: int, **values: Any) -> None:
    """
    Adds an evaluation to a run's log; see `RunLog.eval`. A last line that was torn is taken off.

    Args:
        path: of a log that `read_run_log` reads: a file, or a folder with one log.
        step, pass_at_1, n, values: as there.

    Raises:
        FileNotFoundError, ValueError: as `read_run_log` does: no log, several of them, or none that can be read.
    """
    line = _line("eval", {"step": step, "pass_at_1": pass_at_1, "n": n, **values})
    path = read_run_log(path).path
    with path.open("r+b", buffering=0) as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if is_json(content[whole:]):
            line = b"\n" + line
        elif whole < len(content):
            file.truncate(whole)
    with path.open("ab", buffering=0) as file:
        file.write(line)


def _line(kind: str, values: Mapping[str, Any]) -> bytes:
    unknown = set(values) - set(KEYS[kind])
    if unknown:
        raise TypeError(f"a {kind!r} line has no {', '.join(sorted(unknown))}; its keys are {', '.join(KEYS[kind])}.")
    line = {"kind": kind, **{key: strict(values.get(key)) for key in KEYS[kind]}}
    return (json.dumps(line, allow_nan=False) + "\n").encode()
