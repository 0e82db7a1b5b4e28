"""What a run leaves behind: a table, a JSON file, and the comparison of its ratios with stored ones."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fastgrpo.kernels.backends import head_backend
from fastgrpo.kernels.library import library_info

SCHEMA = 1
TOLERANCE = 0.05
_PACKAGES = (
    "fastgrpo",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "vllm",
    "liger-kernel",
    "unsloth_zoo",
    "cut-cross-entropy",
)
_GIT_SECONDS = 5
_HOW_OFTEN = ("rounds", "warm_ups")


def record(
    kind: str, device: torch.device, settings: dict[str, Any], rows: list[dict[str, Any]], ratios: dict[str, float]
) -> dict:
    """
    A run as it is stored.

    Args:
        kind: `"head"` or `"update"`.
        device: where it ran.
        settings: shapes, rounds and whatever else decides what was measured.
        rows: one dict a line of the table.
        ratios: name -> fastgrpo's time or memory over the other's, from this run; lower is better.

    Returns:
        A JSON-ready dict.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **source(),
        "machine": _machine(device),
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "settings": settings,
        "ratios": ratios,
        "rows": rows,
    }


@cache
def source() -> dict[str, str | None]:
    """
    What is measured, as the first call in a process finds it.

    Returns:
        `commit`: see `commit`, of the checkout that `bench` is in, else what a workflow's runner says; `library`: the first 16
        hex digits of the sha256 of the file of the kernel library, or None.
    """
    return {"commit": commit(Path(__file__).parents[1]) or os.environ.get("GITHUB_SHA"), "library": _library()}


def commit(root: Path) -> str | None:
    """The commit of the git checkout whose root this is, `-dirty` behind it where tracked files differ, or None."""
    git = ["git", "--no-optional-locks", "-C", str(root)]
    options = {"capture_output": True, "text": True, "check": True, "timeout": _GIT_SECONDS}
    try:
        top, head = subprocess.run([*git, "rev-parse", "--show-toplevel", "HEAD"], **options).stdout.splitlines()
        # A folder without git may lie within a checkout of something else.
        if not Path(top).samefile(root):
            return None
        changes = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], **options).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changes else head


def keeper(path: Path | None) -> Callable[[dict], None]:
    """What writes a run that is not finished, for a long one may be cut off; it says so in its `unfinished`."""
    return lambda run: None if path is None else write(path, run | {"unfinished": True})


def write(path: Path, run: dict) -> None:
    """Writes a run as JSON, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, sort_keys=False) + "\n")


def load(path: Path, kind: str) -> dict:
    """
    A run that `write` wrote.

    Args:
        path: the file.
        kind: `"head"` or `"update"`.

    Returns:
        The run.

    Raises:
        OSError: no such file.
        ValueError: not a run, one of another kind or schema, or one without ratios.
    """
    run = json.loads(path.read_text())
    for key, wanted in (("schema", SCHEMA), ("kind", kind)):
        if not isinstance(run, dict) or run.get(key) != wanted:
            found = run.get(key) if isinstance(run, dict) else run
            raise ValueError(f"its {key} is {found!r}, not {wanted!r}; give a file that --json wrote")
    ratios = run.get("ratios")
    if not isinstance(ratios, dict) or not all(type(ratio) in (int, float) for ratio in ratios.values()):
        raise ValueError("its ratios are no numbers with names; give a file that --json wrote")
    return run


def load_baseline(path: Path, kind: str) -> dict:
    """As `load`; raises `ValueError` also for a ratio that nothing can be compared with."""
    run = load(path, kind)
    for name, ratio in run["ratios"].items():
        if not 0 < ratio < math.inf:
            raise ValueError(f"its ratio {name!r} is {ratio}; give a run whose ratios are all finite and above 0")
    return run


def regressions(run: dict, stored: dict) -> tuple[list[str], list[str]]:
    """
    Ratios that rose by more than 5 % over stored ones, or are NaN.

    Args:
        run, stored: two runs of one kind.

    Returns:
        The names of the ratios that both have, and those of them that got worse.
    """
    common = [name for name in run["ratios"] if name in stored["ratios"]]
    return common, [name for name in common if _is_worse(run["ratios"][name], stored["ratios"][name])]


def vanished(run: dict, stored: dict) -> list[str]:
    """The names of the stored ratios that a run has not measured."""
    return [name for name in stored["ratios"] if name not in run["ratios"]]


def same_settings(run: dict, stored: dict) -> bool:
    """Whether two runs were to measure the same; how often does not matter."""

    def what(settings: dict) -> dict:
        # As JSON has it.
        return {key: json.loads(json.dumps(value)) for key, value in settings.items() if key not in _HOW_OFTEN}

    return what(run["settings"]) == what(stored.get("settings", {}))


def table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints a table; the first column is text, the others are numbers. A line of no cells is a rule."""
    out = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        out.add_column(column, justify="left" if position == 0 else "right", overflow="fold", no_wrap=position == 0)
    for line in lines:
        if line:
            out.add_row(*line)
        else:
            out.add_section()
    _console().print(out)


def quiet() -> None:
    """Keeps what TRL and its neighbours say while a trainer is built out of the tables."""
    for name in ("transformers", "trl", "accelerate", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)


def say(text: str) -> None:
    """Prints a line of text without markup, as one line however long it is."""
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


def describe(run: dict) -> str:
    """The line that belongs beside every number: machine, versions, load, commit, date, command."""
    machine, versions = run["machine"], run["versions"]
    packages = " ".join(f"{name} {versions[name]}" for name in _PACKAGES if versions[name])
    load = "" if machine["load"] is None else f", load {machine['load']:.1f} at the end"
    # Runs that were stored before they said so have neither.
    commit = f"commit {run['commit']}" if run.get("commit") else ""
    head = "; ".join(f"head in {dtype}: {name}" for dtype, name in machine.get("head", {}).items())
    parts = (
        f"{machine['name']}, {machine['threads']} threads{load}",
        packages,
        head,
        commit,
        run["date"],
        run["command"],
    )
    return "; ".join(part for part in parts if part)


def _is_worse(now: float, before: float) -> bool:
    # No comparison with NaN holds.
    return not now <= before * (1 + TOLERANCE)


def _console() -> Console:
    # A table in a file or a CI log must not be folded to 80 columns.
    return Console(width=None if sys.stdout.isatty() else 180)


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": device.type,
        "name": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "head": {
            str(dtype).removeprefix("torch."): head_backend(device.type, dtype).implementation
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        },
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    fields = {}
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "model" not in fields:
        return name
    amx = ", AMX" if "amx_bf16" in fields.get("flags", "") else ""
    return f"{name} (family {fields['cpu family']} model {fields['model']}{amx})"


def _library() -> str | None:
    try:
        path = library_info().path
        return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
