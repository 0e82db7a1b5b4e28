"""setup.py's names, and the nvcc it would build with."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

SETUP = Path(__file__).parents[1] / "setup.py"


def setup_names() -> dict[str, Any]:
    """What setup.py defines; nothing is built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **_: None)
        patch.setenv("FASTGRPO_BUILD", "python")
        return runpy.run_path(str(SETUP))


def nvcc() -> str:
    """The nvcc that setup.py finds. Without one a test is skipped, and fails where EXPECT=cuda says that there is one."""
    found = setup_names()["find_nvcc"]()
    if found is None:
        leave = pytest.fail if os.environ.get("EXPECT") == "cuda" else pytest.skip
        leave("no nvcc on PATH, or under CUDA_HOME or CUDA_PATH")
    return found
