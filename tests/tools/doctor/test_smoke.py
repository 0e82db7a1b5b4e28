"""`doctor --smoke`: ten steps on the user's own rollout path, and what they say about the whole run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from fastgrpo.tools import cli
from fastgrpo.tools.demo.toy import toy_model, toy_tokenizer
from fastgrpo.tools.doctor.case import Case
from fastgrpo.tools.doctor.smoke import _memory, _options, _policy_line, check_smoke

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
    # YAML reads this learning rate as a text.
    config.write_text(
        "max_steps: 400\nper_device_train_batch_size: 8\nmax_completion_length: 4\nlora_r: 4\nlearning_rate: 1e-4\n"
    )
    reward = reward_file(tmp_path, "return [float(len(set(text))) for text in completions]")
    arguments = ["doctor", "--smoke", "--no-step", "--model", str(toy), "--config", str(config), "--rewards", reward]
    assert cli.main([*arguments, "--json"]) == 0
    lines = [line for line in json.loads(capsys.readouterr().out)["lines"] if line["layer"] == "smoke"]
    assert lines[0]["text"].startswith("10 steps of 4 rollouts on transformers generate")
    assert "s per step; " in lines[0]["text"]
    assert lines[1]["text"] == "every batch came from the weights of its step; the last one from those of step 9"
    assert lines[2]["text"].startswith("wall clock: 400 steps x ")
    assert "with the 8 of the configuration at most" in lines[2]["text"]
    assert lines[3]["text"].startswith("peak memory")


def test_a_reward_that_breaks_on_real_completions_is_found(tmp_path):
    spec = reward_file(tmp_path, "raise ValueError('no such thing')")
    (line,) = check_smoke(Case(rewards=(spec,), settings=SHORT))
    assert line.status == "wrong" and "ValueError: no such thing" in line.text


def test_equal_rewards_in_every_step_are_hinted_at(tmp_path):
    spec = reward_file(tmp_path, "return [0.0] * len(completions)")
    lines = list(check_smoke(Case(rewards=(spec,), settings=SHORT)))
    assert lines[-1].status == "hint" and "nothing is learned" in lines[-1].text


def test_options_of_the_configuration_hold_in_the_smoke_run(tmp_path):
    settings = {"fastgrpo_packing": "left", "fastgrpo_mini_batch_size": 16, "fastgrpo_on_stale": "error", "beta": 0.1}
    options = _options(Case(settings=settings), tmp_path / "log.jsonl")
    assert (options.packing, options.mini_batch_size, options.on_stale) == ("left", 4, "ignore")
    assert options.run_log == tmp_path / "log.jsonl"


def test_a_sampler_whose_weights_stay_old_is_wrong():
    def status(*steps: tuple[int | None, bool | None]) -> str:
        lines = [{"policy_version": version, "stale": stale} for version, stale in steps]
        return _policy_line(SimpleNamespace(steps=lines)).status

    assert status((0, False), (0, True)) == "wrong"
    assert status((8, False), (9, False)) == "ok"
    assert status((None, None), (None, None)) == "hint"


def test_the_peak_is_set_against_the_plan_of_the_same_steps():
    measured = SimpleNamespace(peak_memory_gb=2.0, plan_gb=4.0)
    assert "planned 4.00: 50% of it" in _memory(measured).text
    assert _memory(SimpleNamespace(peak_memory_gb=2.0, plan_gb=None)).status == "skipped"  # no GPU
