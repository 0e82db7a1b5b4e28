"""Logs as people have them: several in a folder, joined, damaged, written by others."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path

import pytest

from fastgrpo.runlog import RunLog, append_eval, find_run_logs, read_run_log, read_run_logs

RUN = '{"kind": "run", "schema": 1, "model": "m"}\n'


def run(path: Path, rewards=(0.5,), **values) -> Path:
    with RunLog(path, **values) as log:
        for step, reward in enumerate(rewards, 1):
            log.step(step, reward=reward)
    return path


def by_hand(path: Path, *lines: str | dict) -> Path:
    path.write_text(RUN + "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def step(number: object, **values: object) -> dict:
    return {"kind": "step", "step": number, **values}


def test_a_folder_stands_for_all_its_logs_in_their_order(tmp_path):
    for name in ("log.jsonl", "log-10.jsonl", "log-2.jsonl", "mine.jsonl"):
        run(tmp_path / name, model=name)
    (tmp_path / "answers.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "folder.jsonl").mkdir()
    names = ["log.jsonl", "log-2.jsonl", "log-10.jsonl", "mine.jsonl"]
    assert [path.name for path in find_run_logs(tmp_path)] == names
    assert [record.run["model"] for record in read_run_logs(tmp_path)] == names


def test_one_of_several_has_to_be_named(tmp_path):
    run(tmp_path / "log.jsonl")
    second = run(tmp_path / "log-2.jsonl")
    before = [path.read_bytes() for path in find_run_logs(tmp_path)]
    for act in (read_run_log, lambda path: append_eval(path, 1, 0.5, 8)):
        with pytest.raises(ValueError, match=r"logs of 2 runs: log\.jsonl, log-2\.jsonl\. Name the file"):
            act(tmp_path)
    assert [path.read_bytes() for path in find_run_logs(tmp_path)] == before
    append_eval(second, 1, 0.5, 8)
    assert [len(record.evals) for record in read_run_logs(tmp_path)] == [0, 1]


def test_a_folder_of_runs_says_which_folders_have_logs(tmp_path):
    for name in ("b", "a"):
        run(tmp_path / name / "log.jsonl")
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no run log at .*log\.jsonl; .* with one: a, b\.$"):
        read_run_logs(tmp_path)


def test_joined_logs_are_several_runs(tmp_path):
    first, second = run(tmp_path / "a.jsonl", [0.1, 0.2], seed=1), run(tmp_path / "b.jsonl", [0.8], seed=2)
    joined = tmp_path / "joined.jsonl"
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    records = read_run_logs(joined)
    assert [(record.run["seed"], record.rewards, record.exit) for record in records] == [
        (1, [0.1, 0.2], "done"),
        (2, [0.8], "done"),
    ]
    with pytest.raises(ValueError, match="holds 2 runs, one after the other"):
        read_run_log(joined)
    with pytest.raises(ValueError, match="holds 2 runs"):
        append_eval(joined, 1, 0.5, 8)
    # The first was killed in the middle of a line.
    joined.write_bytes(first.read_bytes()[:-30] + second.read_bytes())
    records = read_run_logs(joined)
    assert [(record.rewards, record.exit, record.remarks) for record in records] == [
        ([0.1, 0.2], None, []),
        ([0.8], "done", []),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ('"high"', '"high"'),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("1e999", "Infinity"),
        ("1e308", "1e+308"),
        ("1" + "0" * 400, "1" + "0" * 39 + "..."),
        ("true", "true"),
        ("[1]", "[1]"),
        ('{"a": null}', '{"a": null}'),
    ],
)
def test_what_is_no_number_is_left_out_and_said(value, shown, tmp_path):
    lines = [f'{{"kind": "step", "step": {i}, "reward": {r}}}\n' for i, r in enumerate(["0.5", value, value], 1)]
    record = read_run_log(by_hand(tmp_path / "log.jsonl", *lines))
    assert record.rewards == [0.5] and [line["step"] for line in record.steps] == [1, 2, 3]
    assert record.remarks == [f"2 lines have no usable number as reward (the first is line 3: {shown}); left out"]
    json.dumps(record.steps, allow_nan=False)


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        (step("one"), '1 line has no usable number as step (line 2: "one"); left out'),
        (step(None), "1 line has no usable number as step (line 2: none); left out"),
        (step(-1), "1 line has no usable number as step (line 2: -1); left out"),
        (step(1.5), "1 line has no usable number as step (line 2: 1.5); left out"),
        (step(1, time_update=-3.0), "1 line has no usable number as time_update (line 2: -3.0); left out"),
        (
            {"kind": "eval", "step": 1, "pass_at_1": 50, "n": 8},
            "1 line has no number from 0 to 1 as pass_at_1 (line 2: 50); left out",
        ),
        ({"kind": "end", "wall_s": "long"}, '1 line has no usable number as wall_s (line 2: "long"); left out'),
        ({"kind": "dance"}, '1 line is of no known kind (line 2: "dance"); left out'),
        ({"kind": ["step"]}, '1 line is of no known kind (line 2: ["step"]); left out'),
        ('{"kind": "st\n', "line 2 is no JSON object; left out"),
        ("[1]\n", "line 2 is no JSON object; left out"),
        ("[" * 100_000 + "\n", "line 2 is no JSON object; left out"),
        ('{"kind": "step", "step": 1, "x": ' + "[" * 600 + "]" * 600 + "}\n", "line 2 is no JSON object; left out"),
    ],
    ids=lambda value: None if isinstance(value, str) and len(value) > 100 else str(value)[:40],
)
def test_a_line_that_cannot_be_used_leaves_the_others(line, remark, tmp_path):
    record = read_run_log(by_hand(tmp_path / "log.jsonl", line, step(2, reward=0.5)))
    assert record.rewards == [0.5]
    assert record.remarks == [remark]


def test_an_evaluation_at_an_unusable_temperature_is_no_greedy_one(tmp_path):
    evals = [
        {"kind": "eval", "step": 1, "pass_at_1": rate, "temperature": t} for rate, t in ((0.5, None), (0.7, "hot"))
    ]
    record = read_run_log(by_hand(tmp_path / "log.jsonl", *evals))
    assert [line["pass_at_1"] for line in record.evals] == [0.5]
    assert record.remarks == ['1 line has no usable number as temperature (line 3: "hot"); left out']


def test_the_line_of_a_run_may_be_anybody_s(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"schema": 1, "kind": "run", "model": 7, "settings": [1], "plan": "none", "options": {"a": NaN}}\r\n'
        b"   \r\n"
    )
    record = read_run_log(tmp_path)
    assert (record.run["model"], record.run["settings"], record.run["plan"]) == ("7", None, None)
    assert record.run["options"] == {"a": None}
    assert record.remarks == [
        "settings is no table (line 1: [1]); left out",
        'plan is no table (line 1: "none"); left out',
    ]


def test_an_evaluation_of_a_run_that_goes_on_stays_and_so_do_its_steps(tmp_path):
    with RunLog(tmp_path / "log.jsonl") as log:
        log.step(1, reward=0.5)
        append_eval(tmp_path, 1, 0.5, 8)
        log.step(2, reward=0.75)
    record = read_run_log(tmp_path)
    assert (record.rewards, len(record.evals), record.exit, record.remarks) == ([0.5, 0.75], 1, "done", [])


def test_a_last_line_without_its_newline_is_kept_by_an_evaluation(tmp_path):
    path = run(tmp_path / "log.jsonl")
    path.write_bytes(path.read_bytes().rstrip())
    append_eval(path, 1, 0.5, 8)
    record = read_run_log(path)
    assert (record.exit, len(record.evals), record.remarks) == ("done", 1, [])


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, caplog):
    with RunLog(tmp_path / "log.jsonl") as log, caplog.at_level(logging.WARNING, "fastgrpo"):
        log.step(1, reward=0.5)
        file, sizes = log._file, [10]

        class Full:
            def write(self, content):
                if not sizes:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(content[: sizes.pop()])

            def close(self):
                file.close()

        log._file = Full()
        log.step(2, reward=0.75)
        sizes.append(1000)  # somebody made room
        log.step(3, reward=0.75)
    assert caplog.text.count("cannot be written any further: No space left on device") == 1
    record = read_run_log(tmp_path)
    assert (record.rewards, record.exit, record.remarks) == ([0.5], None, [])
