from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _unpatched_in_the_end() -> Iterator[None]:
    yield
    if "fastgrpo.trl.patch" in sys.modules:
        for handle in list(sys.modules["fastgrpo.trl.patch"]._active):
            handle.unpatch()
