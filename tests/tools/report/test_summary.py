from __future__ import annotations

import dataclasses
from contextlib import suppress

import pytest

from fastgrpo.runlog import RunLog, read_run_log
from fastgrpo.tools.report.rows import duration, rows_of
from fastgrpo.tools.report.summary import UNFINISHED, different_settings, names_of, summarise, verdict


def written(folder, steps=(), evals=(), crash=None, **run):
    with suppress(RuntimeError), RunLog(folder / "log.jsonl", **run) as log:
        for number, values in enumerate(steps, 1):
            log.step(number, **values)
        for step, rate, n in evals:
            log.eval(step, rate, n)
        if crash:
            raise crash
    return read_run_log(folder)


def times(generation, reward, sync, update):
    return {"time_generation": generation, "time_reward": reward, "time_sync": sync, "time_update": update}


def cells(table, label):
    return next(row[1:] for row in table if row[0].strip() == label)


@pytest.mark.parametrize(
    ("phases", "dominant", "share"),
    [((3.0, 0.5, 0.5, 1.0), "generation", 0.6), ((1.0, 5.0, None, 4.0), "reward", 0.5), ((1, 0, 7, 2), "sync", 0.7)],
)
def test_the_phase_that_most_of_a_step_goes_into_is_named(phases, dominant, share, tmp_path):
    run = summarise(written(tmp_path, [times(*phases)] * 3), "a")
    assert run.dominant_phase == dominant
    assert run.dominant_share == pytest.approx(share)
    assert cells(rows_of([run]), "most of a step") == [f"{dominant}, {share:.0%}"]


def test_a_log_without_times_names_no_phase_and_is_no_error(tmp_path):
    run = summarise(written(tmp_path, [{"reward": 1.0}]), "a")
    assert run.dominant_phase is run.dominant_share is run.peak_memory_gb is None
    labels = {row[0] for row in rows_of([run])}
    assert "reward, start to end" in labels and "most of a step" not in labels


def test_an_empty_run_and_one_that_was_killed_are_no_error(tmp_path):
    empty = summarise(written(tmp_path), "a")
    assert (empty.steps, empty.reward_last, empty.exit) == (0, None, "done")
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:1]) + '\n{"kind": "step", "step": 1, "rew')
    assert summarise(read_run_log(tmp_path), "a").exit == UNFINISHED


def test_numbers_are_those_of_the_log(tmp_path):
    steps = [{"reward": i / 100, "tokens_real": 50, "tokens_padded": 80, "peak_memory_gb": 3 - i} for i in range(30)]
    run = summarise(written(tmp_path, steps, [(0, 0.25, 8), (30, 0.5, 8)]), "a", plan_gb=4.0)
    assert run.reward_window == 10
    assert (run.reward_first, run.reward_last) == (pytest.approx(0.045), pytest.approx(0.245))
    assert (run.pass_at_1_before, run.pass_at_1_after, run.pass_at_1_problems) == (0.25, 0.5, 8)
    assert run.padding_share == pytest.approx(3 / 8)
    table = rows_of([run])
    assert cells(table, "peak memory") == ["3.00 GB"]
    assert cells(table, "peak against plan") == ["75% of 4.0 GB"]
    assert cells(table, "pass@1") == ["25.0% -> 50.0%"]


def test_a_plan_in_the_log_is_compared_with(tmp_path):
    record = written(tmp_path, [{"peak_memory_gb": 2.0}], plan={"peaks_gb": {"update": 4.0, "rollout": 1.0}})
    assert summarise(record, "a").plan_gb == 4.0


def test_an_error_text_is_how_a_run_ended(tmp_path):
    assert summarise(written(tmp_path, crash=RuntimeError("no luck")), "a").exit == "RuntimeError: no luck"


def test_names_are_short_and_different(tmp_path):
    records = [written(tmp_path / name) for name in ("x/run", "y/run", "other")]
    (tmp_path / "other" / "log.jsonl").rename(tmp_path / "other" / "log-2.jsonl")
    records[2] = read_run_log(tmp_path / "other" / "log-2.jsonl")
    assert names_of(records) == ["run", "run (2)", "other/log-2"]


def test_settings_that_differ_are_listed_and_the_same_are_not(tmp_path):
    a = written(tmp_path / "a", settings={"learning_rate": 1e-5, "beta": 0.1}, options={"packing": "auto"}, seed=1)
    b = written(tmp_path / "b", settings={"beta": 0.1}, options=None, seed=1)
    assert different_settings([a, b]) == {
        "learning_rate": [1e-5, None],
        "options.packing": ["auto", None],
        "patch": [True, False],
    }
    assert different_settings([a]) == {}


def test_the_better_run_is_named_by_pass_at_1_and_else_by_reward(tmp_path):
    rewards = [{"reward": 0.9}] * 4, [{"reward": 0.2}] * 4
    evals = [(0, 0.1, 10), (4, 0.3, 10)], [(0, 0.1, 10), (4, 0.7, 10)]
    runs = [written(tmp_path / str(i), rewards[i], evals[i]) for i in (0, 1)]
    summaries = [summarise(run, name) for run, name in zip(runs, "ab", strict=True)]
    assert verdict(summaries).startswith("best by pass@1 after training: b with 70.0%; a 30.0%")
    assert "within the noise of 10 problems" in verdict(summaries)
    many = [dataclasses.replace(summary, pass_at_1_problems=500) for summary in summaries]
    assert "noise" not in verdict(many)
    plain = [summarise(written(tmp_path / f"p{i}", rewards[i]), name) for i, name in enumerate("ab")]
    assert verdict(plain).startswith("best by mean reward at the end: a with 0.900; b 0.200 (comparable only if")
    assert verdict(plain[:1]) == ""
    other = summarise(written(tmp_path / "o", rewards[1], [(0, 0.1, 99), (4, 0.7, 99)]), "c")
    assert "reward" in verdict([summaries[0], other])  # pass@1 on other problems compares nothing


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (3.21, "3.2 s"), (75, "1 min 15 s"), (3600 * 2 + 60 * 5, "2 h 05 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
