from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fastgrpo.runlog import RunLog
from fastgrpo.tools import cli, plot

ROOT = Path(__file__).parents[3]
PNG = b"\x89PNG\r\n\x1a\n"


def run(folder: Path, steps: int = 20, reward: float = 0.5, **values) -> Path:
    with RunLog(folder / "log.jsonl", **{"model": "m", "settings": {}, **values}) as log:
        log.eval(0, 0.25, 16)
        for step in range(1, steps + 1):
            log.step(
                step,
                reward=reward + 0.1 * step / steps,
                kl=0.01,
                entropy=1.0 / step,
                tokens_real=900 + step,
                tokens_padded=1000,
                time_generation=3.0,
                time_reward=0.1,
                time_sync=0.2,
                time_update=1.0,
                peak_memory_gb=2.0,
            )
        log.eval(steps, 0.5, 16)
    return folder


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.resources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.resources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_two_runs_are_compared_in_a_table_a_picture_and_a_page(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "150")
    a, b = run(tmp_path / "a"), run(tmp_path / "b", reward=0.1, settings={"beta": 0.2})
    assert cli.main(["report", str(a), str(b / "log.jsonl")]) == 0
    out = capsys.readouterr().out
    for text in ("a: generation dominates, 70% of a step (3.00 s)", "different: beta: default | 0.2", "25.0% -> 50.0%"):
        assert text in out, text
    assert "\x1b[" not in out
    picture = (a / "report.png").read_bytes()
    assert picture.startswith(PNG)
    text = (a / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    # Self-contained: the picture is in the page, and nothing else is loaded.
    assert [resource[:22] for resource in page.resources] == ["data:image/png;base64,"]
    assert base64.b64decode(page.resources[0][22:]) == picture
    assert not re.search(r"https?://|@import|url\(|<script", text)
    assert "generation dominates" in text and "Settings that differ" in text


def test_a_thousand_steps_make_a_page_under_two_megabytes(tmp_path):
    pytest.importorskip("matplotlib")
    folders = [str(run(tmp_path / name, steps=1000)) for name in "abc"]
    assert cli.main(["report", *folders, "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").stat().st_size < 2_000_000
    assert not (tmp_path / "a" / "report.html").exists()


def test_what_a_log_says_is_text_on_the_page(tmp_path):
    folder = run(tmp_path / "a", model="<script>alert(1)</script>")
    assert cli.main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text


def report(capsys, *arguments):
    status = cli.main(["report", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_all_logs_of_a_folder_are_runs_and_so_are_joined_ones(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    folder = run(tmp_path / "a")
    with RunLog(folder / "log-2.jsonl", model="m") as log:
        log.step(1, reward=0.9)
    status, out, _ = report(capsys, folder)
    assert status == 0 and "a/log " in out and "a/log-2" in out and "best by mean reward at the end: a/log-2" in out
    (tmp_path / "joined.jsonl").write_text("".join(path.read_text() for path in sorted(folder.glob("*.jsonl"))))
    document = json.loads(report(capsys, tmp_path / "joined.jsonl", tmp_path / "joined.jsonl", "--json")[1])
    assert [entry["name"] for entry in document["runs"]] == [f"{tmp_path.name}/joined, run {i}" for i in (1, 2)]
    (folder / "log.jsonl").write_text("")
    status, out, err = report(capsys, folder)
    assert status == 0 and "left out" in err and "log.jsonl is not a run log: it is empty" in err and "a/log-2" in out


def test_an_evaluation_is_written_into_no_run_that_was_not_named(tmp_path, capsys):
    folder = run(tmp_path / "a")
    with RunLog(folder / "log-2.jsonl", model="m") as log:
        log.step(1, reward=0.9)
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    problems = tmp_path / "test.jsonl"
    problems.write_text('{"prompt": "1+1=", "answer": 2}\n')
    assert cli.main(["eval", str(tmp_path / "model"), "--problems", str(problems), "--log", str(folder)]) == 2
    assert "holds the logs of 2 runs: log.jsonl, log-2.jsonl. Name the file" in capsys.readouterr().err
    assert [path.read_bytes() for path in sorted(folder.iterdir())] == before


def test_values_that_are_no_numbers_are_null_and_said_everywhere(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    rewards = ['"high"', "NaN", "Infinity", "1e308", "3e38", "-3e38", "0.5"]
    step = '{{"kind": "step", "step": {}, "reward": {}, "time_update": -1, "peak_memory_gb": 1e308}}\n'
    run_line = '{"kind": "run", "schema": 1, "settings": {"a": NaN}, "seed": NaN, "plan": {"peaks_gb": {"a": NaN}}}\n'
    path.write_text(run_line + "".join(step.format(i, reward) for i, reward in enumerate(rewards, 1)))
    with RunLog(tmp_path / "none" / "log.jsonl", model="m") as log:
        log.step(1, reward=float("nan"))

    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    status, out, _ = report(capsys, path, tmp_path / "none", "--json")
    first, second = json.loads(out, parse_constant=refuse)["runs"]
    said = '4 lines have no usable number as reward (the first is line 2: "high"); left out'
    assert said in first["remarks"] and first["peak_memory_gb"] is None and first["phase_seconds"] == {}
    assert second["remarks"] == ["there is no reward: its only step line has no finite one"]
    status, out, err = report(capsys, path, tmp_path / "none", "--output", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert status == 0 and "Traceback" not in err
    for text in (said, "none in the log", "there is no reward", "no verdict: no measure is in the logs of two runs"):
        assert text in out and text.replace('"', "&quot;") in page


def test_nothing_is_cut_where_there_is_little_room(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    folders = [run(tmp_path / f"a-rather-long-name-of-a-run-{i}", model="M" * 70) for i in range(3)]
    _, out, _ = report(capsys, *folders)
    assert "…" not in out and out.count("model") == 3 and out.replace("\n", "").count("M") == 3 * 70
    assert max(map(len, out[: out.index("pass@1 after")].splitlines())) <= 60


@pytest.mark.parametrize("name", ["_hidden", "läufe-日本語 $x_{$"])
def test_a_run_may_have_any_name_and_any_number_of_others(name, tmp_path, capsys, recwarn):
    pytest.importorskip("matplotlib")
    others = [run(tmp_path / f"other{i}", steps=2) for i in range(10)] if name == "_hidden" else []
    status, out, err = report(capsys, run(tmp_path / name, steps=1), *others)
    assert (status, err) == (0, "") and name in out and not recwarn.list
    assert name in (tmp_path / name / "report.html").read_text()


def test_what_belongs_to_no_report_is_refused(tmp_path, capsys):
    folder = run(tmp_path / "a")
    for arguments, words in (
        (["--output", tmp_path / "x.html"], "give a folder"),
        (["--output", tmp_path, "--json"], "not allowed with --json"),
    ):
        status, _, err = report(capsys, folder, *arguments)
        assert status == 2 and words in err
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"peaks_gb": {"a": null}}', '{"peaks_gb": null}', "\xff"])
def test_messages_about_a_plan_are_words(content, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_bytes(content.encode("latin-1")) if content is not None else plan.mkdir()
    status, _, err = report(capsys, run(tmp_path / "a"), "--plan", plan)
    assert status == 2 and ("is no plan: it has no peaks_gb" in err or "cannot be read: Is a directory" in err)


def test_json_has_the_numbers_and_writes_no_file(tmp_path, capsys):
    folder = run(tmp_path / "a")
    assert cli.main(["report", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"][0]["dominant_phase"] == "generation"
    assert document["runs"][0]["pass_at_1_after"] == 0.5
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl"]


def test_memory_is_set_against_a_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"peaks_gb": {"update": 2.5, "rollout": 1.0}}))
    assert cli.main(["report", str(run(tmp_path / "a")), "--plan", str(plan)]) == 0
    assert "80% of 2.5 GB" in capsys.readouterr().out
    plan.write_text("{}")
    assert cli.main(["report", str(tmp_path / "a"), "--plan", str(plan)]) == 2
    assert "is no plan" in capsys.readouterr().err


def test_runs_with_nothing_in_them_are_shown(tmp_path, capsys):
    with RunLog(tmp_path / "empty" / "log.jsonl"):
        pass
    assert cli.main(["report", str(tmp_path / "empty"), str(run(tmp_path / "a"))]) == 0
    assert "empty: the log has no times of phases" in capsys.readouterr().out


def test_without_matplotlib_there_is_a_page_without_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    folder = run(tmp_path / "a")
    assert cli.main(["report", str(folder)]) == 0
    assert 'pip install "fastgrpo[demo]"' in capsys.readouterr().err
    assert "<img" not in (folder / "report.html").read_text() and not (folder / "report.png").exists()


def test_what_cannot_be_read_or_written_is_said(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no run log" in capsys.readouterr().err
    assert cli.main(["report"]) == 2
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(run(tmp_path / "a")), "--output", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "a" / "report.html").mkdir()
    assert cli.main(["report", str(tmp_path / "a")]) == 1
    assert f"{tmp_path / 'a' / 'report.html'} cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_after_kill_9_in_a_demo_run_the_report_works(tmp_path, capsys):
    arguments = ["demo", "--toy", "--pretrain-steps", "3", "--held-out", "20", "--steps", "5000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fastgrpo.tools.cli", *arguments, "--runs-dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    path = tmp_path / "demo-toy" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text().count('"kind": "step"') >= 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert cli.main(["report", str(path.parent), "--json"]) == 0
    killed = json.loads(capsys.readouterr().out)["runs"][0]
    assert killed["exit"].startswith("no end line")
    assert killed["steps"] >= 2 and killed["dominant_phase"] is not None
