"""Reads run logs back: every run of a file or folder, with a remark on whatever in it could not be used."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgrpo.runlog.schema import KEYS, SCHEMA, strict

_LARGEST = 3.4028234663852886e38  # of a float32, in which trainers sum rewards and losses
_ANY, _NOT_NEGATIVE = (-_LARGEST, _LARGEST), (0, _LARGEST)
_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "run": {},
    "step": {
        "step": (0, 2**53),
        "steps": (1, 2**53),
        **dict.fromkeys(("reward", "reward_std", "loss", "kl", "entropy", "grad_norm"), _ANY),
        **dict.fromkeys(("tokens_real", "tokens_padded", "peak_memory_gb"), _NOT_NEGATIVE),
        **dict.fromkeys(("time_generation", "time_reward", "time_sync", "time_update"), _NOT_NEGATIVE),
        **dict.fromkeys(("policy_version", "policy_lag"), _ANY),
    },
    "eval": {"step": (0, 2**53), "pass_at_1": (0, 1), **dict.fromkeys(("n", "temperature", "samples"), _NOT_NEGATIVE)},
    "end": dict.fromkeys(("wall_s", "seconds_per_step", "peak_memory_gb"), _NOT_NEGATIVE),
}
"""What a number of a line can be, from and to."""

_ESSENTIAL = {"eval": ("step", "pass_at_1", "temperature")}
"""Without what these said, a line would say something else."""

_WHOLE = ("step", "steps", "n", "samples")
_TEXTS = ("started", "device", "model", "rollout_path", "exit")
_TABLES = ("versions", "options", "settings", "plan")
_RUN_LINE = re.compile(rb'\{"kind": ?"run"')
_SNIFFED = 1 << 20
_SHOWN = 40


@dataclass(frozen=True)
class RunRecord:
    """
    A run read back; each line is a dict with the keys of `KEYS`. A value that its key cannot have, as a text, NaN or infinity
    where a number belongs, is None.

    Attributes:
        path: the file.
        run: its first line.
        steps, evals: their lines, in order.
        end: its last line; None for a run that still goes on, or was killed.
        remarks: a sentence for everything in the file that could not be used.
    """

    path: Path
    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    remarks: list[str] = field(default_factory=list)

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
    Reads the log of one run. A last line that was cut off while it was written is skipped.

    Args:
        path: the file, or the folder of the run that holds it.

    Returns:
        RunRecord.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a run log, one of several runs, or a schema newer than this version reads.
    """
    files = find_run_logs(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{path} holds the logs of {len(files)} runs: {names}. Name the file of the one that is meant."
        )
    records = _runs_of(files[0])
    if len(records) > 1:
        raise ValueError(
            f"{files[0]} holds {len(records)} runs, one after the other; give each a file of its own, or read all of them "
            "with `read_run_logs` or `fastgrpo report`."
        )
    return records[0]


def read_run_logs(path: str | Path) -> list[RunRecord]:
    """
    Reads every run of a file or folder, as `read_run_log` does the only one.

    Args:
        path: a log, which holds several runs where logs were joined, or a folder with any number of logs.

    Returns:
        a RunRecord a run, in the order of `find_run_logs`.

    Raises:
        FileNotFoundError, ValueError: as `read_run_log`.
    """
    return [record for file in find_run_logs(path) for record in _runs_of(file)]


def find_run_logs(path: str | Path) -> list[Path]:
    """
    The logs that a path stands for.

    Args:
        path: a file, which stands for itself, or a folder: its `log.jsonl`, `log-2.jsonl`, ... and whatever else there ends in
            `.jsonl` and starts with the line of a run.

    Returns:
        the files, by name, numbers in their order.

    Raises:
        FileNotFoundError: no such file, or none in the folder.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"there is no run log at {path}; give a log.jsonl or the folder of a run.")
        return [path]
    found = _logs_in(path)
    if found:
        return found
    runs = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and _logs_in(folder))
    inside = f" Folders in {path} with one: {', '.join(runs[:10])}{', ...' if len(runs) > 10 else ''}." if runs else ""
    raise FileNotFoundError(
        f"there is no run log at {path / 'log.jsonl'}; give a log.jsonl or the folder of a run.{inside}"
    )


def is_json(content: bytes) -> bool:
    """Whether it is one JSON object."""
    try:
        return isinstance(json.loads(content.decode("utf-8-sig", errors="replace")), dict)
    except (ValueError, RecursionError):
        return False


def _logs_in(folder: Path) -> list[Path]:
    try:
        files = [file for file in folder.glob("*.jsonl") if file.is_file()]
    except OSError:
        return []
    found = [file for file in files if re.fullmatch(r"log(-\d+)?", file.stem) or _starts_with_a_run(file)]
    return sorted(found, key=_name_and_number)


def _name_and_number(file: Path) -> tuple[str, int, str]:
    parts = re.fullmatch(r"(.*?)(?:-(\d{1,9}))?", file.stem, flags=re.DOTALL)
    return (parts[1], int(parts[2] or 1), file.name) if parts else (file.stem, 1, file.name)


def _starts_with_a_run(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            first = opened.readline(_SNIFFED)
    except OSError:
        return False
    return first.lstrip().startswith(b"{") and all(word in first for word in (b'"kind"', b'"run"', b'"schema"'))


def _runs_of(path: Path) -> list[RunRecord]:
    runs: list[_Run] = []
    for number, line in _lines(path):
        if not runs and (line is None or line.get("kind") != "run" or not isinstance(line.get("schema"), int)):
            what = (
                "line 1 is no JSON object"
                if line is None
                else "its first line is of no kind 'run' with a schema number"
            )
            raise ValueError(f"{path} is not a run log: {what}.")
        if line is None:
            runs[-1].broken.append(number)
        elif line.get("kind") == "run":
            runs.append(_Run(path, number, line))
        else:
            runs[-1].add(number, line)
    if not runs:
        raise ValueError(f"{path} is not a run log: it is empty.")
    return [run.record() for run in runs]


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number and object of every line, None for one that is none; a torn one is left out where a run ends with it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise type(error)(f"{path} cannot be read: {error.strerror}.") from error
    raw = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, text in enumerate(raw, 1):
        if not text.strip():
            continue
        line = _object(text)
        joined = list(_RUN_LINE.finditer(text))[-1:] if line is None else []
        if joined:  # behind the torn end of the run before
            line = _object(text[joined[0].start() :])
        if line is not None or number < len(raw) or number == 1:
            yield number, line


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text.decode(errors="replace"))
        strict(line)
    except (ValueError, RecursionError):  # the second: nested deeper than anything a log has
        return None
    return line if isinstance(line, dict) else None


class _Run:
    """The lines of a run, as they are read, and what in them was odd."""

    def __init__(self, path: Path, number: int, line: dict[str, Any]) -> None:
        if line.get("schema", 0) > SCHEMA:
            raise ValueError(
                f"{path} has schema {line['schema']}; this version of fastgrpo reads up to {SCHEMA}. Upgrade fastgrpo."
            )
        self._path = path
        self._lines: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KEYS}
        self.broken: list[int] = []
        self._foreign: list[str] = []
        self._odd: dict[tuple[str, str], list[str]] = defaultdict(list)  # where, and the first one's value
        self.add(number, line)

    def add(self, number: int, line: dict[str, Any]) -> None:
        kind = line.get("kind")
        if not isinstance(kind, str) or kind not in KEYS:
            self._foreign.append(f"line {number}: {_short(kind)}")
            return
        clean = {**dict.fromkeys(KEYS[kind]), **line}
        for key, value in clean.items():
            usable = _usable(kind, key, value)
            clean[key] = _as_read(key, value) if usable else None
            if not usable:
                self._odd[kind, key].append(f"line {number}: {_short(value)}")
        lost = any(clean[key] is None and line.get(key) is not None for key in _ESSENTIAL.get(kind, ()))
        if not lost and (kind != "step" or clean["step"] is not None):
            self._lines[kind].append(clean)
        elif line.get("step") is None:
            self._odd[kind, "step"].append(f"line {number}: none")

    def record(self) -> RunRecord:
        remarks = [self._remark(kind, key, places) for (kind, key), places in self._odd.items()]
        if self.broken:
            first, more = self.broken[0], len(self.broken) - 1
            others = f" and {more} more are" if more else " is"
            remarks.append(f"line {first}{others} no JSON object; left out")
        if self._foreign:
            remarks.append(f"{_count(self._foreign, 'is', 'are')} of no known kind{_first(self._foreign)}; left out")
        return RunRecord(
            path=self._path,
            run=self._lines["run"][0],
            steps=self._lines["step"],
            evals=self._lines["eval"],
            end=self._lines["end"][-1] if self._lines["end"] else None,
            remarks=remarks,
        )

    def _remark(self, kind: str, key: str, places: Sequence[str]) -> str:
        if key in _TABLES:
            return f"{key} is no table ({places[0]}); left out"
        low, high = _RANGES[kind][key]
        wanted = "no number from 0 to 1" if (low, high) == (0, 1) else "no usable number"
        return f"{_count(places, 'has', 'have')} {wanted} as {key}{_first(places)}; left out"


def _count(places: Sequence[str], singular: str, plural: str) -> str:
    return f"1 line {singular}" if len(places) == 1 else f"{len(places)} lines {plural}"


def _first(places: Sequence[str]) -> str:
    return f" ({'' if len(places) == 1 else 'the first is '}{places[0]})"


def _usable(kind: str, key: str, value: Any) -> bool:
    if value is None:
        return True
    if key in _TABLES and kind == "run":
        return isinstance(value, dict)
    if key not in _RANGES[kind]:
        return True
    low, high = _RANGES[kind][key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and low <= value <= high and (key not in _WHOLE or value == int(value))


def _as_read(key: str, value: Any) -> Any:
    if key in _WHOLE and value is not None:
        return int(value)
    if key in _TEXTS and value is not None and not isinstance(value, str):
        return json.dumps(strict(value))
    return strict(value)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
