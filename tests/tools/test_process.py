"""The command as a process: Ctrl-C at any time, an output that nobody reads, stdout for JSON alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastgrpo.tools import cli, process

ROOT = Path(__file__).parents[2]
NUMBERS = "hidden=64,layers=2,heads=2,intermediate=128,vocabulary=100"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_the_command_line_starts_without_torch():
    """Torch takes seconds to import: until then nobody could say what happens at Ctrl-C."""
    result = python(
        "import sys; from fastgrpo.tools import cli; cli.main(['--help']); cli.main(['plan', '--beta', 'x'])\n"
        "sys.exit(bool({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--numbers", NUMBERS],
        ["plan", "--numbers", NUMBERS, "--json"],
        ["doctor", "--no-step"],
        ["eval", "model", "--problems", "problems.jsonl"],
        ["report", "run", "--json"],
        ["demo", "--toy"],
    ],
    ids=["plan", "plan-json", "doctor", "eval", "report-json", "demo"],
)
def test_ctrl_c_during_an_import_that_would_swallow_it_ends_the_command(arguments, tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "class Swallowing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'fastgrpo.tools.report.summary'):\n"
        "            try:\n"
        "                os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\n"
        "            except KeyboardInterrupt: pass\n"
        "sys.meta_path.insert(0, Swallowing())\n"
        "os.chdir(sys.argv[1])\n"
        "from fastgrpo.tools import cli\n"
        "sys.exit(cli.main(sys.argv[2:]))"
    )
    result = python(code, str(tmp_path), *arguments)
    assert (result.returncode, result.stderr, result.stdout) == (130, "Interrupted.\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plan", "--help"], ["plan", "--numbers", NUMBERS], ["plan", "--numbers", NUMBERS, "--json"]],
    ids=["help", "plan-help", "plan", "plan-json"],
)
def test_an_output_that_nobody_reads_ends_the_command_quietly(arguments, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", output)
    assert cli.main(arguments) == 141
    output.close()  # nothing is left that would fail when the interpreter ends
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_an_output_without_room_is_said(monkeypatch, capsys):
    with open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(["plan", "--help"]) == 1
    assert "the output cannot be written: No space left on device." in capsys.readouterr().err


def test_json_has_stdout_to_itself_whoever_else_prints():
    result = python(
        "import os; from fastgrpo.tools.process import stdout_for_json, write_json\n"
        "with stdout_for_json(True):\n"
        "    print('a reward function'); os.system('echo a child process'); write_json('{}'); print('late')\n"
        "print('after')"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "{}\nafter\n"
    assert sorted(result.stderr.splitlines()) == ["a child process", "a reward function", "late"]


def test_without_json_stdout_is_left_alone(capsys):
    with process.stdout_for_json(False):
        print("text")
        process.write_json(json.dumps([1]))
    assert capsys.readouterr().out == "text\n[1]\n"


def test_wrong_usage_is_told_in_two_lines_with_the_command_that_helps(capsys):
    for arguments, name in ((["plan", "--beta", "x"], "fastgrpo plan"), (["demo", "--stepps", "3"], "fastgrpo demo")):
        assert cli.main(arguments) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith(f"{name}: ") and said[1:] == [f"`{name} --help` tells what is allowed."]
