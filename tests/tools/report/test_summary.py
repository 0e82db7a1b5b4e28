from __future__ import annotations

import dataclasses
from contextlib import suppress

import pytest

from fastgrpo.runlog import RunLog, read_run_log, read_run_logs
from fastgrpo.tools.report.lines import mean, standing, steps_of
from fastgrpo.tools.report.names import names_of
from fastgrpo.tools.report.rows import duration, rows_of, sentences_of, settings_of
from fastgrpo.tools.report.summary import UNEXPLAINED, UNFINISHED, different_settings, summarise
from fastgrpo.tools.report.verdict import verdict


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


def test_a_line_counts_as_often_as_it_has_steps(tmp_path):
    lines = [
        {"steps": 10, "reward": 0.5, "tokens_real": 60, "tokens_padded": 100, **times(2.0, 0.0, None, 1.0)},
        {"steps": 2, "reward": None, "tokens_real": 0, "tokens_padded": 40, **times(8.0, 0.0, None, 1.0)},
    ]
    run = summarise(written(tmp_path, lines), "a")
    assert run.phase_seconds == pytest.approx({"generation": (10 * 2 + 2 * 8) / 12, "reward": 0.0, "update": 1.0})
    assert run.tokens_per_step == pytest.approx(600 / 12) and run.padding_share == pytest.approx(1 - 600 / 1080)


def test_a_log_that_does_not_say_how_many_steps_a_line_has_is_weighted_by_their_numbers():
    def lines(*numbers, steps=None):
        return [{"step": number, "steps": steps, "time_update": float(number)} for number in numbers]

    assert steps_of(lines(10, 20, 23)) == [10, 10, 3]
    assert steps_of(lines(110, 120)) == [10, 10]  # resumed at 100
    assert steps_of(lines(7)) == [7] and steps_of(lines(0)) == [1] and steps_of([]) == []
    assert steps_of(lines(10, 20, steps=4)) == [4, 4]
    assert mean(lines(10, 20, 23), "time_update") == pytest.approx((100 + 200 + 69) / 23)
    assert mean([{"step": 1, "steps": 1, "kl": value} for value in (3e38, 3e38, None)], "kl") == pytest.approx(3e38)


def test_steps_that_were_taken_again_after_a_checkpoint_count_once_and_it_is_said(tmp_path):
    with RunLog(tmp_path / "log.jsonl") as log:
        for step in (1, 2, 3, 4, 2, 3):
            log.step(step, reward=float(step < 3), time_update=1.0)
    record = read_run_log(tmp_path)
    assert [line["step"] for line in standing(record.steps)] == [1, 2, 3]
    run = summarise(record, "a")
    assert run.steps == 3
    assert run.remarks == [
        "steps go back, as after a checkpoint: 3 lines were replaced by later ones of the same steps"
    ]


def test_a_run_without_any_reward_says_so(tmp_path):
    run = summarise(written(tmp_path, [{"reward": float("nan"), "loss": 0.1}] * 3), "a")
    assert run.remarks == ["there is no reward: none of its 3 step lines has a finite one"]
    assert cells(rows_of([run]), "reward, start to end") == ["none in the log"]
    assert "a: there is no reward: none of its 3 step lines has a finite one" in sentences_of(run)
    assert run.to_dict()["reward_last"] is None
    alone = summarise(written(tmp_path / "b", [{"reward": None}]), "b")
    assert alone.remarks == ["there is no reward: its only step line has no finite one"]
    other = summarise(written(tmp_path / "c", [{"reward": 0.5}]), "c")
    assert verdict([run, other]) == (
        "no verdict: no measure is in the logs of two runs; no pass@1 after training: a, c; no mean reward at the end: a"
    )
    third = summarise(written(tmp_path / "d", [{"reward": 0.25}]), "d")
    assert verdict([run, other, third]).startswith("best by mean reward at the end: c with 0.500; d 0.250")
    assert verdict([run, other, third]).endswith("; not compared, for want of it: a")


@pytest.mark.parametrize(
    ("lines", "remarks"),
    [
        ([{"reward": 0.5, "loss": 0.1, "tokens_real": 9}, {"loss": 0.1, "tokens_real": 0}], []),
        ([{"reward": 0.5, "loss": 0.1, "tokens_real": 9}, {"reward": 0.5, "tokens_real": 9}], []),
        (
            [{"loss": 0.1, "tokens_real": 9}, {"reward": 0.5, "loss": 0.1, "tokens_real": 9}],
            ["in 1 of 2 step lines rollouts have no finite reward"],
        ),
        ([{"reward": 0.5}] * 3 + [{"reward": 0.5, "loss": 0.1}], ["in 3 of 4 step lines the loss is not finite"]),
    ],
    ids=["replayed", "after the last entry", "a reward that is NaN", "a loss that is NaN"],
)
def test_lines_without_a_reward_or_loss_that_should_have_one_are_counted(lines, remarks, tmp_path):
    assert summarise(written(tmp_path, lines), "a").remarks == remarks


def test_parts_of_a_step_name_no_phase(tmp_path):
    run = summarise(written(tmp_path, [{"time_generation": 1.5, "time_reward": 0.5}]), "a")
    assert run.dominant_phase is run.dominant_share is run.to_dict()["dominant_phase"] is None
    path = tmp_path / "log.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert summarise(read_run_log(path), "a").seconds_per_step is None
    assert "only a part of a step was measured, 1.50 s of generation and 0.5 s of reward" in sentences_of(run)[0]


def test_an_evaluation_after_training_alone_is_the_one_after(tmp_path):
    runs = [written(tmp_path / str(i), [{}], [(1, rate, 100)]) for i, rate in enumerate((0.2, 0.9))]
    after, best = (summarise(run, name) for run, name in zip(runs, "ab", strict=True))
    assert (after.pass_at_1_before, after.pass_at_1_after) == (None, 0.2)
    assert verdict([after, best]).startswith("best by pass@1 after training: b with 90.0%; a 20.0%")
    again = summarise(written(tmp_path / "again", [{}], [(1, 0.2, 100), (1, 0.4, 100)]), "c")
    assert (again.pass_at_1_before, again.pass_at_1_after) == (None, 0.4)


def test_more_real_tokens_than_padded_ones_are_no_padding(tmp_path):
    run = summarise(written(tmp_path, [{"reward": 1.0, "tokens_real": 200, "tokens_padded": 100}]), "a")
    assert run.tokens_per_step == 200 and run.padding_share is None


def test_an_end_without_a_word_is_one(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "run", "schema": 1}\n{"kind": "end"}\n')
    assert summarise(read_run_log(path), "a").exit == UNEXPLAINED


def test_a_long_error_stands_beside_the_table_whole(tmp_path):
    run = summarise(written(tmp_path, crash=RuntimeError("out of memory\n" * 50 + "THE END")), "a")
    assert cells(rows_of([run]), "ended") == ["an error, see its text"]
    assert sentences_of(run)[-1].startswith("a: ended with an error: RuntimeError: out of memory out of memory")
    assert sentences_of(run)[-1].endswith("THE END")


@pytest.mark.parametrize("plan", [{"peaks_gb": {"a": None, "b": "x"}}, {"peaks_gb": [1]}, {"peaks_gb": None}, {}])
def test_a_plan_without_numbers_is_none(plan, tmp_path):
    assert summarise(written(tmp_path, plan=plan), "a").plan_gb is None


def test_an_error_text_is_how_a_run_ended(tmp_path):
    assert summarise(written(tmp_path, crash=RuntimeError("no luck")), "a").exit == "RuntimeError: no luck"


def test_names_are_short_and_different(tmp_path):
    records = [written(tmp_path / name) for name in ("x/run", "y/run", "other", "se\nven\x1b[1m")]
    (tmp_path / "other" / "log.jsonl").rename(tmp_path / "other" / "log-2.jsonl")
    records[2] = read_run_log(tmp_path / "other" / "log-2.jsonl")
    assert names_of(records) == ["x/run", "y/run", "other/log-2", "se ven\N{REPLACEMENT CHARACTER}[1m"]
    assert names_of([written(tmp_path / "x" / "y")]) == ["y"]
    (tmp_path / "other" / "log.jsonl").write_bytes(records[0].path.read_bytes())
    assert names_of(read_run_logs(tmp_path / "other")) == ["other/log", "other/log-2"]
    log, second = (tmp_path / "other" / name for name in ("log.jsonl", "log-2.jsonl"))
    log.write_bytes(log.read_bytes() + second.read_bytes())
    second.unlink()
    assert names_of(read_run_logs(tmp_path / "other")) == ["other, run 1", "other, run 2"]


def test_settings_that_differ_are_listed_and_the_same_are_not(tmp_path):
    a = written(tmp_path / "a", settings={"learning_rate": 1e-5, "beta": 0.1}, options={"packing": "auto"}, seed=1)
    b = written(tmp_path / "b", settings={"beta": 0.1}, options=None, seed=1)
    assert different_settings([a, b]) == {
        "learning_rate": [1e-5, None],
        "options.packing": ["auto", None],
        "patch": [True, False],
    }
    assert different_settings([a]) == {}
    rows = settings_of([summarise(a, "a"), summarise(b, "b")], different_settings([a, b]))
    assert rows == [["learning_rate", "1e-05", "default"], ["options.packing", "auto", "-"], ["patch", "yes", "no"]]


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
