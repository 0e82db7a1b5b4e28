"""`log.jsonl`: what a run was, what each step did, how it ended. One strict JSON object a line, told apart by `kind`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

SCHEMA = 1

KEYS: dict[str, tuple[str, ...]] = {
    "run": (
        "schema",
        "started",
        "versions",
        "device",
        "model",
        "options",
        "settings",
        "rollout_path",
        "seed",
        "plan",
    ),
    "step": (
        "step",
        "reward",
        "reward_std",
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "tokens_real",
        "tokens_padded",
        "time_generation",
        "time_reward",
        "time_sync",
        "time_update",
        "peak_memory_gb",
        "policy_version",
        "policy_lag",
        "stale",
    ),
    "eval": ("step", "pass_at_1", "n", "temperature", "samples"),
    "end": ("wall_s", "seconds_per_step", "peak_memory_gb", "exit"),
}
"""The keys of every kind of line. All are always there; a value nobody measured is null."""


class RunLog:
    """
    Writes a run's `log.jsonl`, line by line; a context manager whose exit writes the `end` line.

    Each line reaches the file in one write, so a run that dies leaves whole lines. The `end` line's `exit` is "done",
    "interrupted" after Ctrl-C, or the text of the error that left the `with` block.

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
            self._file = self.path.open("xb", buffering=0)
        except FileExistsError:
            raise FileExistsError(f"{self.path} holds the log of another run; choose a new name or folder.") from None
        self._started = time.perf_counter()
        self._seconds, self._steps = 0.0, 0
        self._peak_memory_gb: float | None = None
        self._file.write(first)

    def step(self, step: int, *, seconds: float | None = None, steps: int = 1, **values: Any) -> None:
        """
        Writes the line of one optimizer step.

        Args:
            step: optimizer steps done, from 1.
            seconds: wall clock of the step, for the mean in the `end` line.
            steps: optimizer steps that the line is the mean of.
            values: what was measured, times in seconds, memory in GB (10^9 bytes); for names see `KEYS`.
        """
        if seconds is not None:
            self._seconds, self._steps = self._seconds + seconds * steps, self._steps + steps
        peak = values.get("peak_memory_gb")
        if peak is not None:
            self._peak_memory_gb = max(peak, self._peak_memory_gb or 0.0)
        self._write("step", {"step": step, **values})

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
        self._file.write(_line(kind, values))


def append_eval(path: str | Path, step: int, pass_at_1: float, n: int, **values: Any) -> None:
    """
    Adds an evaluation to the log of a run that is over; see `RunLog.eval`. A last line that was torn is taken off.

    Args:
        path: of a log that `read_run_log` reads.
        step, pass_at_1, n, values: as there.
    """
    path = _file_of(path)
    line = _line("eval", {"step": step, "pass_at_1": pass_at_1, "n": n, **values})
    with path.open("r+b", buffering=0) as file:
        content = file.read()
        file.seek(content.rfind(b"\n") + 1)
        file.truncate()
        file.write(line)


def _line(kind: str, values: Mapping[str, Any]) -> bytes:
    unknown = set(values) - set(KEYS[kind])
    if unknown:
        raise TypeError(f"a {kind!r} line has no {', '.join(sorted(unknown))}; its keys are {', '.join(KEYS[kind])}.")
    line = {"kind": kind, **{key: _strict(values.get(key)) for key in KEYS[kind]}}
    return (json.dumps(line, allow_nan=False) + "\n").encode()


def _strict(value: Any) -> Any:
    """The value as strict JSON can hold it: NaN and infinities become null, what JSON does not know its text."""
    if isinstance(value, bool | str | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), None):  # a scalar of torch or numpy
        return _strict(value.item())
    return str(value)


@dataclass(frozen=True)
class RunRecord:
    """
    A log read back; each line is a dict with the keys of `KEYS`.

    Attributes:
        path: the file.
        run: its first line.
        steps, evals: their lines, in order.
        end: its last line; None for a run that still goes on, or was killed.
    """

    path: Path
    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def exit(self) -> str | None:
        """ "done", "interrupted" or an error text; None where the log just stops."""
        return self.end["exit"] if self.end else None

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every step that has one."""
        return [line["reward"] for line in self.steps if line["reward"] is not None]


def first_and_last(values: Sequence[float], window: int = 10) -> tuple[int, float, float]:
    """Window, mean of the first and mean of the last `window` values; a run too short for two gets a smaller window."""
    window = max(1, min(window, len(values) // 2))
    return window, sum(values[:window]) / window, sum(values[-window:]) / window


def read_run_log(path: str | Path) -> RunRecord:
    """
    Reads a run's `log.jsonl`. A last line that was cut off while it was written is skipped.

    Args:
        path: the file, or the folder of the run that holds it.

    Returns:
        RunRecord.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a run log, a line in the middle that is no JSON, or a schema newer than this version reads.
    """
    path = _file_of(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no run log at {path}; give a log.jsonl or the folder of a run.")
    lines = list(_lines(path))
    if not lines or lines[0].get("kind") != "run" or not isinstance(lines[0].get("schema"), int):
        raise ValueError(
            f"{path} is not a run log: its first line is no JSON object of kind 'run' with a schema number."
        )
    if lines[0]["schema"] > SCHEMA:
        raise ValueError(
            f"{path} has schema {lines[0]['schema']}; this version of fastgrpo reads up to {SCHEMA}. Upgrade fastgrpo."
        )
    kinds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KEYS}
    for number, line in enumerate(lines, 1):
        kind = line.get("kind")
        if kind not in kinds:
            raise ValueError(f"{path}, line {number}: kind is {kind!r}; known are {', '.join(KEYS)}.")
        kinds[kind].append({**dict.fromkeys(KEYS[kind]), **line})
    return RunRecord(
        path=path,
        run=kinds["run"][0],
        steps=kinds["step"],
        evals=kinds["eval"],
        end=kinds["end"][-1] if kinds["end"] else None,
    )


def _file_of(path: str | Path) -> Path:
    path = Path(path)
    return path / "log.jsonl" if path.is_dir() else path


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes().decode("utf-8", errors="replace")
    raw = text.split("\n")
    lines = []
    for number, content in enumerate(raw, 1):
        if not content:
            continue
        try:
            line = json.loads(content)
        except ValueError:
            if number == len(raw):  # no newline behind it: torn
                continue
            raise ValueError(f"{path} is not a run log: line {number} is no JSON.") from None
        if not isinstance(line, dict):
            raise ValueError(f"{path} is not a run log: line {number} is no JSON object.")
        lines.append(line)
    return lines
