from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastgrpo.tools import cli, plot
from fastgrpo.tools.plan.command import as_options
from fastgrpo.tools.plan.memory import TERMS

ROOT = Path(__file__).parents[3]
NUMBERS = "hidden=64,layers=4,heads=4,kv_heads=2,intermediate=128,vocabulary=500"
PLAN = ["plan", "--numbers", NUMBERS, "--lora-rank", "4"]


def test_a_table_shows_every_term_the_total_and_what_would_free_most(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main([*PLAN, "--capacity", "3", "--no-checkpointing", "--micro-batch", "32"]) == 0
    out = capsys.readouterr().out
    for word in (*TERMS, "total", "free of 3", "alive at once", "head:", "frees most:"):
        assert word in out, word
    assert "\x1b[" not in out  # no colours where nobody looks


def test_the_exit_status_says_whether_it_fits(capsys):
    assert cli.main([*PLAN, "--capacity", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert cli.main([*PLAN, "--capacity", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert cli.main([*PLAN, "--capacity", "2"]) == 1
    assert "It does not fit." in capsys.readouterr().out


def test_json_is_the_plan_with_the_settings_given(capsys):
    targets = "q_proj,v_proj"
    others = ["--generations", "4", "--reserve", "0.5", "--no-checkpointing", "--micro-batch", "32"]
    assert cli.main([*PLAN, "--json", "--lora-targets", targets, *others]) == 0
    document = json.loads(capsys.readouterr().out)
    assert tuple(document["terms_gb"]) == TERMS
    assert document["settings"]["lora_targets"] == targets.split(",")
    assert document["settings"]["num_generations"] == 4
    assert document["terms_gb"]["reserve"] == 0.5
    assert document["advice"] == document["alternatives"][0]["setting"] + " would free " + (
        f"{document['alternatives'][0]['frees_gb']:.1f} GB"
    )


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG\r\n\x1a\n"), ("plan.svg", b"<?xml")])
@pytest.mark.parametrize("capacity", [[], ["--capacity", "3"]])
def test_a_picture_is_drawn(name, start, capacity, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli.main([*PLAN, *capacity, "--picture", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    assert f"picture: {tmp_path / name}" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_a_failure_after_the_table(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    assert cli.main([*PLAN, "--picture", str(tmp_path / "no" / "plan.png")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert cli.main([*PLAN, "--picture", str(tmp_path / "plan.png")]) == 1
    shown = capsys.readouterr()
    assert 'pip install "fastgrpo[demo]"' in shown.err and "total" in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "give either MODEL or --numbers"),
        (["plan", "x", "--numbers", NUMBERS], "give either MODEL or --numbers"),
        (["plan", "/nowhere"], "there is no /nowhere. Give a local folder"),
        (["plan", "--numbers", "hidden=64"], "is missing"),
        ([*PLAN, "--picture", "plan.gif"], "ends neither in .png nor in .svg"),
        ([*PLAN, "--micro-batch", "0"], "--micro-batch: 0 is too small"),
        ([*PLAN, "--beta", "x"], "--beta: 'x' is no number"),
        ([*PLAN, "--beta", "-1"], "--beta: -1 is out of range"),
        ([*PLAN, "--dtype", "int8"], "invalid choice: 'int8'"),
        ([*PLAN, "--rollout", "vllm"], "--rollout 'vllm' takes a share of the device's memory; give --capacity."),
        ([*PLAN, "--lora-targets", "(["], "--lora-targets '([' is no regular expression: unterminated character set"),
        ([*PLAN[:3], "--lora-targets", "all-linear"], "--lora-targets 'all-linear' has no meaning in full fine-tuning"),
        (
            [*PLAN[:3], "--lora-rank", "100000000000000000000"],
            "--lora-rank is 100000000000000000000; give a whole number",
        ),
        ([*PLAN, "--mini-batch", "9"], "--mini-batch is 9, more than the 8 sequences that a device trains on"),
        ([*PLAN, "--capacity", "0"], "--capacity is 0.0; give a number above 0, at most 1,000,000."),
        ([*PLAN, "--offload-activations", "--no-checkpointing"], "--offload-activations needs --checkpointing, which"),
        (
            [*PLAN[:3], "--quantization", "4bit"],
            "--quantization '4bit' trains nothing without an adapter; give --lora-rank.",
        ),
        ([*PLAN, "--lora-targets", "q_proj,"], "--lora-targets is ('q_proj', ''), which names no layer"),
        (["plan", ""], "the model's name is empty. Give a local folder"),
        (["plan", "nosuch/model"], "hf download nosuch/model config.json"),
        ([*PLAN, "--lora-targets", "nope,never"], "The model's linear layers are down_proj"),
    ],
)
def test_wrong_usage_is_status_2_and_said(arguments, message, capsys):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.out == ""
    assert not {"Error", "NoneType", "Traceback", "frame #"} & set(shown.err.replace(":", " ").split())


def test_the_help_tells_exit_statuses_and_needs_no_transformers():
    code = "import sys; from fastgrpo.tools import cli; cli.main(['plan', '--help']); sys.exit('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    for text in ("it does not fit", "--lora-rank", "--picture", "--json", "--vllm-fraction", "example:"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("q_proj", ["q_proj"]),
        ("q_proj, v_proj", ["q_proj", "v_proj"]),
        ("all-linear", "all-linear"),
        (r".*layers\.\d{1,2}\..*q_proj", r".*layers\.\d{1,2}\..*q_proj"),
    ],
    ids=["name", "names", "all", "expression"],
)
def test_targets_are_names_unless_they_cannot_be(given, taken, capsys):
    assert cli.main([*PLAN, "--json", "--lora-targets", given]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["lora_targets"] == taken


def test_messages_speak_of_options_as_they_are_typed():
    said = as_options(
        "micro_batch is 0; share_prefix=False and packing='left' leave beta=0.5 and the head of capacity_gb alone"
    )
    assert said == (
        "--micro-batch is 0; --no-share-prefix and --packing 'left' leave --beta 0.5 and the head of --capacity alone"
    )
    assert as_options("there is no /data/lora_rank/head=3 here") == "there is no /data/lora_rank/head=3 here"


def test_what_is_wrong_is_said_before_torch_is_imported():
    code = (
        "import sys; from fastgrpo.tools import cli\n"
        "status = cli.main(['plan', 'nowhere', '--mini-batch', '9']); sys.exit(10 * status + ('torch' in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 20 and "--mini-batch is 9" in result.stderr
