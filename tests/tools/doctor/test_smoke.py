"""`doctor --smoke`: ten steps on the user's own rollout path, and what they say about the whole run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_trainer

from fastgrpo.tools import cli
from fastgrpo.tools.demo.toy import toy_model, toy_tokenizer
from fastgrpo.tools.doctor.case import Case
from fastgrpo.tools.doctor.smoke import _engine_line, _memory, check_smoke, plan_settings
from fastgrpo.tools.plan.estimate import estimate_memory

SHORT = {"max_completion_length": 4, "learning_rate": 1e-4}


@pytest.fixture
def toy(tmp_path):
    tokenizer = toy_tokenizer()
    toy_model(tokenizer).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


def reward_file(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"def reward(completions, **_):\n    {body}\n")
    return f"{path}:reward"


def test_seconds_per_step_times_steps_is_the_wall_clock(toy, tmp_path, capsys):
    config = tmp_path / "grpo.yaml"
    config.write_text("max_steps: 400\nper_device_train_batch_size: 8\nmax_completion_length: 4\nlora_r: 4\n")
    reward = reward_file(tmp_path, "return [float(len(set(text))) for text in completions]")
    arguments = ["doctor", "--smoke", "--no-step", "--model", str(toy), "--config", str(config), "--rewards", reward]
    assert cli.main([*arguments, "--json"]) == 0
    lines = [line for line in json.loads(capsys.readouterr().out)["lines"] if line["layer"] == "smoke"]
    assert lines[0]["text"].startswith("10 steps of 4 rollouts on transformers generate")
    assert "s per step; " in lines[0]["text"]
    assert lines[1]["text"].startswith("wall clock: 400 steps x ")
    assert "with the 8 of the configuration at most" in lines[1]["text"]
    assert lines[2]["text"].startswith("peak memory")


def test_a_reward_that_breaks_on_real_completions_is_found(tmp_path):
    spec = reward_file(tmp_path, "raise ValueError('no such thing')")
    (line,) = check_smoke(Case(rewards=(spec,), settings=SHORT))
    assert line.status == "wrong" and "ValueError: no such thing" in line.text


def test_equal_rewards_in_every_step_are_hinted_at(tmp_path):
    spec = reward_file(tmp_path, "return [0.0] * len(completions)")
    lines = list(check_smoke(Case(rewards=(spec,), settings=SHORT)))
    assert lines[-1].status == "hint" and "nothing is learned" in lines[-1].text


def test_an_engine_whose_weights_stay_old_is_wrong():
    assert _engine_line(SimpleNamespace(_last_loaded_step=0)).status == "wrong"
    assert _engine_line(SimpleNamespace(_last_loaded_step=9)).status == "ok"


def test_the_peak_is_set_against_the_plan_of_the_same_steps(toy, tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, max_steps=1, beta=0.1)
    case = Case(toy, rows=[{"prompt": "1+1="}, {"prompt": "12+34="}], settings={"lora_r": 4})
    settings = plan_settings(case, trainer)
    expected = {"beta": 0.1, "num_generations": 4, "completion_length": 12, "prompt_length": 6, "micro_batch": 4}
    expected |= {"accumulation": 2, "checkpointing": False, "autocast": False, "dtype": "float32", "lora_rank": 4}
    assert settings | expected == settings
    assert _memory(case, trainer, 1.0).status == "skipped"  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=16e9))
    plan = estimate_memory(toy, **plan_settings(case, trainer))
    peak = max(plan.peaks.values())
    assert f"planned {peak:.2f}: 50% of it" in _memory(case, trainer, peak / 2).text
