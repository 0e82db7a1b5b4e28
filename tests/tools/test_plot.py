from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.runlog import RunLog, read_run_log
from fastgrpo.tools import plot

PNG = b"\x89PNG\r\n\x1a\n"


def record(folder: Path, rewards: list[float | None], evals: bool = True):
    with RunLog(folder / "log.jsonl") as log:
        if evals:
            log.eval(0, 0.3, 64)
        for step, reward in enumerate(rewards, 1):
            log.step(step, reward=reward)
        if evals:
            log.eval(len(rewards), 0.6, 64)
    return read_run_log(folder)


@pytest.mark.parametrize(("rewards", "evals"), [([0.1, 0.5, None, 0.7], True), ([0.4], False), ([-2.0, 3.0], True)])
def test_a_run_becomes_a_picture(rewards, evals, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "reward.png"
    plot.plot_reward(record(tmp_path, rewards, evals), path, "title")
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000


def test_a_run_without_rewards_has_none(tmp_path):
    with pytest.raises(ValueError, match="no step with a reward"):
        plot.plot_reward(record(tmp_path, [None]), tmp_path / "reward.png", "title")
    assert not (tmp_path / "reward.png").exists()


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert 'pip install "fastgrpo[demo]"' in plot.missing_matplotlib()


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40), st.integers(1, 50))
def test_a_moving_mean_stays_within_its_window(values, window):
    means = plot.moving_mean(values, window)
    assert len(means) == len(values)
    for i, mean in enumerate(means):
        seen = values[max(0, i + 1 - window) : i + 1]
        assert min(seen) - 1e-9 <= mean <= max(seen) + 1e-9
        assert math.isclose(mean, sum(seen) / len(seen), abs_tol=1e-9)
