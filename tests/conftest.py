from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Threads that spin for work make small CPU tests several times slower on a shared machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Tests never judge time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _unpatched_in_the_end() -> Iterator[None]:
    """A demo or a doctor leaves its trainer patched until it is collected."""
    yield
    if "fastgrpo.trl.patch" in sys.modules:
        for handle in list(sys.modules["fastgrpo.trl.patch"]._active):
            handle.unpatch()
