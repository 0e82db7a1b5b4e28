from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.runlog import KEYS, SCHEMA, RunLog, read_run_log


def lines(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def small_log(path: Path) -> Path:
    with RunLog(path, model="m", seed=3, device="cpu") as log:
        log.eval(0, 0.25, 64)
        log.step(1, seconds=2.0, reward=0.5, peak_memory_gb=1.5)
        log.step(2, seconds=4.0, reward=0.75, peak_memory_gb=1.25)
        log.eval(2, 0.5, 64)
    return path


def test_what_is_written_is_read_back(tmp_path):
    record = read_run_log(small_log(tmp_path / "log.jsonl"))
    assert record.run["model"] == "m"
    assert record.run["seed"] == 3
    assert record.rewards == [0.5, 0.75]
    assert [line["step"] for line in record.steps] == [1, 2]
    assert [(line["step"], line["pass_at_1"], line["n"]) for line in record.evals] == [(0, 0.25, 64), (2, 0.5, 64)]
    assert record.exit == "done"
    assert record.end["seconds_per_step"] == 3.0
    assert record.end["peak_memory_gb"] == 1.5
    assert record.end["wall_s"] >= 0


def test_a_line_of_several_steps_weighs_as_much_as_they_are(tmp_path):
    with RunLog(tmp_path / "log.jsonl") as log:
        log.step(1, seconds=8.0)
        log.step(4, seconds=4.0, steps=3)
    assert read_run_log(tmp_path).end["seconds_per_step"] == 5.0


def test_a_folder_stands_for_the_log_in_it(tmp_path):
    small_log(tmp_path / "log.jsonl")
    assert read_run_log(tmp_path) == read_run_log(tmp_path / "log.jsonl")


def test_every_line_has_every_key_of_its_kind_and_null_for_what_is_unknown(tmp_path):
    written = lines(small_log(tmp_path / "log.jsonl"))
    assert {line["kind"] for line in written} == set(KEYS)
    for line in written:
        assert list(line) == ["kind", *KEYS[line["kind"]]]
    assert written[0]["schema"] == SCHEMA
    assert written[0]["started"].endswith("+00:00")
    step = next(line for line in written if line["kind"] == "step")
    assert step["kl"] is None and step["policy_version"] is None and step["time_sync"] is None


def test_the_schema_has_the_keys_that_reports_rely_on():
    assert set(KEYS["step"]) >= {
        "step",
        "reward",
        "reward_std",
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "time_generation",
    }
    assert set(KEYS["run"]) == {
        *("schema", "started", "versions", "device", "model", "options", "settings", "rollout_path", "seed", "plan")
    }
    assert KEYS["eval"] == ("step", "pass_at_1", "n", "temperature", "samples")
    assert KEYS["end"] == ("wall_s", "seconds_per_step", "peak_memory_gb", "exit")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_becomes_null(value, tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path, settings={"a": [value, 1.0], "b": torch.tensor(value)}) as log:
        log.step(1, reward=value, loss=torch.tensor(value), grad_norm=torch.tensor(2.5))
    first, step, _ = lines(path)
    assert first["settings"] == {"a": [None, 1.0], "b": None}
    assert (step["reward"], step["loss"], step["grad_norm"]) == (None, None, 2.5)
    assert read_run_log(path).rewards == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(settings=json_values)
def test_any_value_makes_one_strict_line_and_finite_ones_come_back(settings, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    with RunLog(path, settings={"any": settings}):
        pass
    assert path.read_bytes().count(b"\n") == 2
    back = read_run_log(path).run["settings"]["any"]
    if "nan" not in repr(settings) and "inf" not in repr(settings):
        assert back == settings


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_is_skipped(cut, tmp_path):
    path = small_log(tmp_path / "log.jsonl")
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:3]) + whole[3][:cut])
    record = read_run_log(path)
    assert record.rewards == [0.5]
    assert record.exit is None


def test_a_torn_character_in_the_last_line_is_skipped(tmp_path):
    path = small_log(tmp_path / "log.jsonl")
    path.write_bytes(path.read_bytes() + '{"kind": "é'.encode()[:-1])
    assert read_run_log(path).exit == "done"


def test_each_step_is_in_the_file_before_the_next(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        for step in range(1, 4):
            log.step(step)
            assert len(lines(path)) == 1 + step


def test_an_interrupted_run_says_so_and_the_interrupt_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunLog(tmp_path / "log.jsonl") as log:
        log.step(1)
        raise KeyboardInterrupt
    assert read_run_log(tmp_path).exit == "interrupted"


def test_a_crash_leaves_its_text_and_goes_on(tmp_path):
    with pytest.raises(ZeroDivisionError), RunLog(tmp_path / "log.jsonl"):
        _ = 1 / 0
    record = read_run_log(tmp_path)
    assert record.exit == "ZeroDivisionError: division by zero"
    assert record.end["seconds_per_step"] is None


def test_a_log_is_never_overwritten(tmp_path):
    path = small_log(tmp_path / "log.jsonl")
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="choose a new name"):
        RunLog(path)
    assert path.read_bytes() == before


def test_an_unknown_key_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="no rewrad; its keys are"):
        RunLog(tmp_path / "a.jsonl", rewrad=1)
    assert not (tmp_path / "a.jsonl").exists()
    with RunLog(tmp_path / "b.jsonl") as log, pytest.raises(TypeError, match="'step' line has no rewrad"):
        log.step(1, rewrad=1)
    assert len(lines(tmp_path / "b.jsonl")) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a run log"),
        ("hello\nworld\n", "line 1 is no JSON"),
        ("[1]\n", "line 1 is no JSON object"),
        ('{"kind": "step"}\n', "first line"),
        ('{"kind": "run", "schema": 99}\n', "schema 99.*Upgrade"),
        ('{"kind": "run", "schema": "1"}\n', "schema number"),
        ("\0\1\2\xff\n\n", "line 1 is no JSON object"),
        ("[" * 100_000 + "\n", "line 1 is no JSON object"),
    ],
)
def test_what_is_no_run_log_is_refused(content, message, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_run_log(path)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run log at .*log\.jsonl"):
        read_run_log(tmp_path)
