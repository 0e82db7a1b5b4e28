"""`fastgrpo demo --device cuda`, a few steps of it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from fastgrpo.runlog import read_run_log
from fastgrpo.tools import cli

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_the_toy_learns_on_the_card(tmp_path, capsys):
    arguments = ["--toy", "--device", "cuda", "--steps", "30", "--held-out", "256"]
    assert cli.main(["demo", *arguments, "--runs-dir", str(tmp_path)]) == 0
    record = read_run_log(tmp_path / "demo-toy")
    assert record.run["device"].startswith("cuda, ")
    assert record.run["settings"]["bf16"] is True
    assert len(record.steps) == 30
    assert record.steps[-1]["peak_memory_gb"] > 0
    before, after = (line["pass_at_1"] for line in record.evals)
    assert after > before
    assert "before and after" in capsys.readouterr().out
