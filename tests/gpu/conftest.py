"""Fixtures of the tests on a GPU."""

from __future__ import annotations

import pytest

from fastgrpo.kernels import fused_head


@pytest.fixture(params=["what serves it best", "row kernels"])
def either_head(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head as a card has it, and, where that is the fused product, as the others have it."""
    if request.param == "row kernels":
        monkeypatch.setattr(fused_head, "serves", lambda call: False)
