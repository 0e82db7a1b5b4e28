"""`fastgrpo demo --device cuda`, a few steps of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("trl", reason="TRL is not installed")

from fastgrpo.runlog import read_run_log
from fastgrpo.tools import cli
from fastgrpo.tools.demo import run as demo

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


def test_the_toy_starts_as_stock_does(tmp_path, monkeypatch):
    drawn = []

    def reward(completions, **rest):
        values = toy.reward(completions=completions, **rest)
        drawn.append((completions, values))
        return values

    toy = demo.TOY
    monkeypatch.setattr(demo, "TOY", dataclasses.replace(toy, reward=reward))
    arguments = ["--toy", "--device", "cuda", "--steps", "2", "--held-out", "64", "--runs-dir", str(tmp_path)]
    # cuDNN's attention, which torch would choose, does not repeat its bits.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        for stock in (["--stock", "--name", "stock"], ["--name", "patched"]):
            assert cli.main(["demo", *arguments, *stock]) == 0
    assert len(drawn) == 4 and drawn[0] == drawn[2]
    runs = [read_run_log(tmp_path / name) for name in ("stock", "patched")]
    assert runs[0].evals[0] == pytest.approx(runs[1].evals[0])
    stock, patched = (record.steps[0] for record in runs)
    for name, tolerance in (("reward", 0), ("reward_std", 0), ("loss", 1e-4), ("entropy", 1e-2), ("grad_norm", 2e-2)):
        assert patched[name] == pytest.approx(stock[name], rel=tolerance, abs=1e-6), name
