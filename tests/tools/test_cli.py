from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trl import GRPOTrainer

from fastgrpo.runlog import RunLog, read_run_log
from fastgrpo.tools import cli
from fastgrpo.tools.demo import run as demo_run

ROOT = Path(__file__).parents[2]
TINY = ["demo", "--toy", "--pretrain-steps", "5", "--held-out", "20"]


def started(*arguments: str, **popen) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fastgrpo.tools.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **popen,
    )


COMMANDS = ("demo", "plan", "doctor", "eval", "report")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_help_and_tells_its_exit_statuses(command, capsys):
    assert cli.main(["--help"]) == 0
    assert command in capsys.readouterr().out
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "exit status:" in text
    for status in ("0 ", "1 ", "2 ", "130 "):
        assert f"\n  {status}" in text
    assert ("--json" in text) == (command != "demo")


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_follow_no_color_even_where_they_are_forced(no_color, tmp_path, monkeypatch, capsys):
    """Runs are shown as on a terminal; NO_COLOR takes the colours, and only those."""
    with RunLog(tmp_path / "log.jsonl", model="m", options=None) as log:
        log.step(1, reward=0.5)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    cli.main(["doctor", "--no-step"])
    cli.main(["plan", "--numbers", "hidden=64,layers=2,heads=2,intermediate=128,vocabulary=100", "--capacity", "1"])
    cli.main(["report", str(tmp_path)])
    printed = "".join(capsys.readouterr())
    colours = re.findall(r"\x1b\[[0-9;]*?(?:3[0-7]|9[0-7]|38;5;[0-9]+)m", printed)
    assert bool(colours) != no_color, colours[:3]


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_tells_commands_and_exit_statuses(arguments, capsys):
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "demo" in text
    for status in ("0    done", "1    failed", "2    wrong usage", "130  interrupted"):
        assert status in text


def test_the_help_of_the_demo_names_its_options_and_defaults(capsys):
    cli.main(["demo", "--help"])
    text = capsys.readouterr().out
    for option in ("--toy", "--model", "--steps", "--seed", "--name", "--runs-dir", "--stock", "--held-out"):
        assert option in text
    assert "default: runs" in text and "toy 120" in text


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"fastgrpo \S.*\n", capsys.readouterr().out)


def test_without_a_command_there_is_help_and_a_usage_error(capsys):
    assert cli.main([]) == 2
    assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--steps", "0"], "--steps: 0 is too small; give 1 or more"),
        (["demo", "--steps", "ten"], "--steps: 'ten' is no whole number"),
        (["demo", "--seed", "-1"], "--seed: -1 is no seed; give 0 to 4294967295"),
        (["demo", "--name", "a/b"], "--name: 'a/b' is no name for a folder"),
        (["demo", "--name", ".."], "--name: '..' is no name for a folder"),
        (["demo", "--name", " "], "--name: ' ' is no name for a folder"),
        (["demo", "--toy", "--held-out", "8000"], "--held-out: 8000 leaves too few sums"),
        (["demo", "--pretrain-steps", "5"], "--pretrain-steps: only allowed with --toy"),
        (["demo", "--toy", "--model", "x"], "--model: not allowed with argument --toy"),
        (["demo", "--stepps", "3"], "unrecognized arguments: --stepps"),
    ],
)
def test_wrong_usage_is_said_before_any_work(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_runs_dir_that_is_a_file_is_said(tmp_path, capsys):
    (tmp_path / "runs").write_text("")
    assert cli.main([*TINY, "--runs-dir", str(tmp_path / "runs")]) == 1
    assert "is, or lies in, a file that is no folder; choose another --runs-dir" in capsys.readouterr().err
    assert cli.main([*TINY, "--runs-dir", str(tmp_path / "runs" / "below")]) == 1
    assert "is no folder; choose another --runs-dir" in capsys.readouterr().err


def test_a_name_that_no_folder_can_have_is_said(tmp_path, capsys):
    assert cli.main([*TINY, "--runs-dir", str(tmp_path), "--name", "x" * 300]) == 1
    said = capsys.readouterr().err
    assert "File name too long; choose another --name." in said and "Traceback" not in said


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_runs_dir_that_cannot_be_written_is_said(capsys):
    assert cli.main([*TINY, "--runs-dir", "/proc/runs"]) == 1
    assert "cannot be written to" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_said(tmp_path, capsys):
    assert cli.main(["demo", "--model", str(tmp_path / "nope"), "--runs-dir", str(tmp_path)]) == 2
    assert "--model takes a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_no_model_is_said(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert cli.main(["demo", "--model", str(tmp_path / "model"), "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "cannot be loaded as a language model" in capsys.readouterr().err
    assert "cannot be loaded" in read_run_log(tmp_path / "runs" / "demo").exit


def test_a_missing_gguf_reader_names_the_extra(tmp_path, capsys, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(demo_run, "find_spec", lambda name: None)
    assert cli.main(["demo", "--model", str(tmp_path / "m.gguf"), "--runs-dir", str(tmp_path)]) == 1
    assert 'pip install "fastgrpo[demo]"' in capsys.readouterr().err


def test_a_trainer_that_cannot_be_patched_is_said(tmp_path, capsys, monkeypatch):
    def refuse(trainer, options):
        raise demo_run.fastgrpo.UnsupportedError("no such TRL.")

    monkeypatch.setattr(demo_run.fastgrpo, "patch", refuse)
    assert cli.main([*TINY, "--steps", "1", "--runs-dir", str(tmp_path)]) == 1
    assert "no such TRL. (`fastgrpo demo --stock`" in capsys.readouterr().err
    assert read_run_log(tmp_path / "demo-toy").exit.startswith("Stopped: no such TRL.")


def test_an_installation_that_cannot_be_patched_is_said_before_any_work(tmp_path, capsys, monkeypatch):
    def refuse():
        raise demo_run.fastgrpo.UnsupportedError("trl 0.1 is installed.")

    monkeypatch.setattr(demo_run, "check_installation", refuse)
    assert cli.main([*TINY, "--steps", "1", "--runs-dir", str(tmp_path)]) == 1
    assert "trl 0.1 is installed. (`fastgrpo demo --stock`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_hold_the_signs_is_no_crash(tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli.main([*TINY, "--steps", "1", "--runs-dir", str(tmp_path)]) == 0
    sys.stdout.flush()
    assert b"? training" in raw.getvalue()


def test_a_crash_leaves_a_log_with_its_text(tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(GRPOTrainer, "train", crash)
    with pytest.raises(RuntimeError, match="out of luck"):
        cli.main([*TINY, "--steps", "1", "--runs-dir", str(tmp_path)])
    assert read_run_log(tmp_path / "demo-toy").exit == "RuntimeError: out of luck"


@pytest.mark.parametrize("stock", [False, True])
def test_the_toy_demo_from_start_to_end(stock, tmp_path, capsys, monkeypatch):
    patched = []
    patch = demo_run.fastgrpo.patch
    monkeypatch.setattr(demo_run.fastgrpo, "patch", lambda trainer, options: patched.append(patch(trainer, options)))
    assert cli.main([*TINY, "--steps", "4", "--runs-dir", str(tmp_path), "--name", "a", *["--stock"] * stock]) == 0
    assert len(patched) == (not stock)

    record = read_run_log(tmp_path / "a")
    assert record.exit == "done"
    assert [line["step"] for line in record.steps] == [1, 2, 3, 4]
    assert [(line["step"], line["n"]) for line in record.evals] == [(0, 20), (4, 20)]
    assert (record.run["options"] is None) == stock
    assert all(line["time_generation"] > 0 for line in record.steps)

    out, err = capsys.readouterr()
    assert err == ""
    assert "pre-training" in out and "pass@1 before training" in out
    assert "greedy pass@1, 20 held-out" in out and "reward, mean of 2 steps" in out
    assert "log.jsonl" in out
    for chatter in ("{'loss'", "Warning", "warnings.warn"):
        assert chatter not in out
    picture = tmp_path / "a" / "reward.png"
    if demo_run.missing_matplotlib():
        assert not picture.exists()
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "reward.png" in out


def test_an_existing_run_is_kept_and_the_new_one_gets_a_number(tmp_path):
    assert demo_run.make_run_folder(tmp_path, "a") == tmp_path / "a"
    assert demo_run.make_run_folder(tmp_path, "a") == tmp_path / "a-2"
    assert demo_run.make_run_folder(tmp_path, "a") == tmp_path / "a-3"
    assert demo_run.make_run_folder(tmp_path, "b") == tmp_path / "b"


def test_without_matplotlib_the_demo_runs_and_says_so_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        demo_run, "missing_matplotlib", lambda: 'matplotlib is not there (pip install "fastgrpo[demo]")'
    )
    assert cli.main([*TINY, "--steps", "1", "--runs-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith('There will be no picture: matplotlib is not there (pip install "fastgrpo[demo]")')
    assert not (tmp_path / "demo-toy" / "reward.png").exists()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    rewards = []
    for seed in ("1", "1", "2"):
        assert cli.main([*TINY, "--steps", "2", "--seed", seed, "--runs-dir", str(tmp_path)]) == 0
    for name in ("demo-toy", "demo-toy-2", "demo-toy-3"):
        record = read_run_log(tmp_path / name)
        rewards.append([(line["reward"], line["loss"], line["entropy"]) for line in record.steps])
    assert rewards[0] == rewards[1] != rewards[2]


def wait_for(path: Path, kind: str, process: subprocess.Popen) -> None:
    """Until the log has a line of this kind."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and f'"kind": "{kind}"' in path.read_text():
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no {kind!r} line; the demo said: {process.communicate()}")


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
@pytest.mark.parametrize("kind", ["run", "eval", "step"])
def test_ctrl_c_leaves_a_valid_log_and_no_traceback(kind, tmp_path):
    """Sent while it loads or pre-trains, generates its first rollouts, trains."""
    pretraining = ["--pretrain-steps", "100000" if kind == "run" else "3"]
    process = started("demo", "--toy", *pretraining, "--held-out", "20", "--steps", "5000", "--runs-dir", str(tmp_path))
    path = tmp_path / "demo-toy" / "log.jsonl"
    wait_for(path, kind, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # impatient
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    assert "Interrupted after" in out and "log.jsonl" in out
    record = read_run_log(path)
    assert record.exit == "interrupted"
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "end"
    has_steps = bool(record.rewards) and not demo_run.missing_matplotlib()
    assert (path.parent / "reward.png").exists() == has_steps


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_ctrl_c_while_importing_has_no_traceback(tmp_path):
    code = (
        "import sys; from fastgrpo.tools import cli\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'fastgrpo.tools.demo.run': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"sys.exit(cli.main(['demo', '--toy', '--runs-dir', {str(tmp_path)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 130
    assert result.stderr == "Interrupted.\n"


@pytest.mark.slow
def test_the_toy_lifts_its_reward_and_its_pass_at_1(tmp_path):
    from fastgrpo.tools.demo.summary import first_and_last

    assert cli.main(["demo", "--toy", "--seed", "0", "--runs-dir", str(tmp_path)]) == 0
    record = read_run_log(tmp_path / "demo-toy")
    window, first, last = first_and_last(record.rewards)
    assert window == 10
    assert last >= 1.15 * first, f"first ten {first:.3f}, last ten {last:.3f}"
    before, after = (line["pass_at_1"] for line in record.evals)
    assert after > before
