"""A configuration that TRL refuses, or takes and cannot work, is said by its name; one that works is read as TRL reads it."""

from __future__ import annotations

import json

import pytest
import torch

from fastgrpo.tools import cli
from fastgrpo.tools.doctor.case import Case
from fastgrpo.tools.doctor.configuration import check_configuration, typed_settings


def lines(rows=(), **settings):
    return list(check_configuration(Case(settings={"bf16": False, **settings}, rows=rows)))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_generations", 1, "GRPO requires at least 2 generations"),
        ("num_generations", 3, "generation_batch_size (8) must be divisible by num_generations (3)"),
        ("num_generations", None, "num_generations is empty"),
        ("auto_find_batch_size", True, "auto_find_batch_size is not supported"),
        ("loss_type", "bad", "loss_type is 'bad'; choose one of 'grpo'"),
        ("importance_sampling_level", "word", "importance_sampling_level is 'word'"),
        ("scale_rewards", "sometimes", "must be one of group, batch, none"),
        ("lr_scheduler_type", "bad", "bad is not a valid SchedulerType"),
        ("beta", -3, "beta is -3"),
        ("epsilon", -1, "epsilon is -1"),
        ("learning_rate", "fast", "learning_rate is 'fast'; it must be a number"),
        ("learning_rate", 0, "learning_rate is 0; it must be above 0"),
        ("learning_rate", float("nan"), "must be a finite number"),
        ("temperature", 0.0, "temperature is 0.0; it must be above 0"),
        ("max_steps", "many", "max_steps is 'many'; it must be a whole number"),
        ("max_steps", 2.5, "max_steps is 2.5; it must be a whole number"),
        ("max_steps", [1], "max_steps is [1]; it must be a whole number"),
        ("max_steps", True, "max_steps is True; it must be a whole number"),
        ("max_steps", None, "max_steps is empty"),
        ("use_vllm", "maybe", "use_vllm is 'maybe'; it must be true or false"),
        ("reward_weights", 1.0, "reward_weights is 1.0; it must be a list"),
        ("gradient_accumulation_steps", 0, "gradient_accumulation_steps is 0; it must be 1 or more"),
        ("vllm_gpu_memory_utilization", 30, "must be between 0 and 1"),
        ("lora_dropout", 2, "lora_dropout is 2; it must be between 0 and 1"),
        ("output_dir", 2026, "output_dir is 2026; it must be a text"),
        ("num_train_epochs", -1, "num_train_epochs is -1"),
        ("sync_ref_model", True, "there is no reference model to sync"),
        ("learning_rat", 1e-5, "knows no setting learning_rat"),
        ("max_prompt_length", 512, "knows no setting max_prompt_length"),
        ("mini_batch_size", 4, "knows no setting mini_batch_size"),
        ("fastgrpo_mini_batch_size", 64, "mini_batch_size is 64, more than the 8 sequences"),
        ("fastgrpo_packing", "odd", "packing is 'odd'"),
    ],
)
def test_a_setting_that_cannot_work_is_said_by_its_name(name, value, said):
    (line,) = lines(**{name: value})
    assert (line.layer, line.status) == ("config", "wrong") and said in line.text, line
    assert line.remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("learning_rat", "did you mean learning_rate?"),
        ("mini_batch_size", "write fastgrpo_mini_batch_size"),
        ("max_prompt_length", "drop long ones"),
        ("qqqq", "take it out"),
    ],
)
def test_an_unknown_name_comes_with_the_one_that_is_meant(name, remedy):
    (line,) = lines(**{name: 4})
    assert remedy in line.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "1e-5"),
        ("max_steps", "300"),
        ("scale_rewards", False),
        ("lora_target_modules", "all-linear"),
        ("gradient_checkpointing_kwargs", {"use_reentrant": False}),
        ("report_to", "none"),
        ("dataset_name", "mine"),
        ("loss_type", "vespo"),
        ("steps_per_generation", 3),
        ("fastgrpo_mini_batch_size", 4),
        ("vllm_max_model_length", None),
    ],
)
def test_what_trl_takes_is_all_right(name, value):
    assert [line.status for line in lines(use_peft=True, **{name: value})] == ["ok"]


def test_values_are_those_that_trl_makes_of_them():
    given = {"learning_rate": "1e-5", "use_vllm": "no", "max_steps": "300", "lora_r": "8", "fastgrpo_packing": "left"}
    assert typed_settings(Case(settings=given)) == {
        "learning_rate": 1e-5,
        "use_vllm": False,
        "max_steps": 300,
        "lora_r": 8,
        "fastgrpo_packing": "left",
    }


def test_batches_are_counted_over_the_processes_of_the_run(tmp_path, capsys):
    settings = {"bf16": False, "num_generations": 4, "per_device_train_batch_size": 2}
    (line,) = check_configuration(Case(settings=settings))
    assert line.status == "wrong" and "counted for 1 process, --processes" in line.remedy
    assert [line.status for line in check_configuration(Case(settings=settings, processes=2))] == ["ok"]
    (tmp_path / "grpo.json").write_text(json.dumps(settings))
    assert cli.main(["doctor", "--no-step", "--config", str(tmp_path / "grpo.json"), "--processes", "2"]) == 0
    assert "generation batch" not in capsys.readouterr().out


def test_a_no_without_quotes_is_explained():
    (line,) = lines(eval_strategy=False)
    assert line.status == "wrong" and 'write "no" in quotes' in line.remedy


def test_what_works_and_is_hardly_meant_is_hinted_at(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for settings, said in (
        ({"lora_alpha": 8}, "lora_alpha is given and use_peft is not"),
        ({"bf16": True}, "TRL trains in 16 bit"),
        ({"gradient_accumulation_steps": 64}, "a generation batch has 64 prompts, and --prompts has 1"),
        ({"fsdp": "full_shard"}, "fsdp is not looked at"),
        ({"fastgrpo_mini_batch_size": 9, "gradient_accumulation_steps": 2}, "nothing is taken apart"),
    ):
        found = lines(rows=[{"prompt": "a"}], **settings)
        assert found[0].status == "ok" and found[1].status == "hint" and said in found[1].text, found


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("env: 3\n", 2, "env is 3\n  -> give a mapping"),
        ("7: x\n", 2, "a setting 7, which is no text"),
        ("- 1\n", 2, "holds a list"),
        ("a: [\n", 2, "is neither YAML nor JSON"),
        ("", 2, "is empty"),
        ("use_vllm: 'no'\nmax_steps: '400'\nbf16: false\n", 0, "3 settings"),
    ],
    ids=["env", "number", "list", "broken", "empty", "texts"],
)
def test_a_configuration_file_is_read_as_trl_reads_it(text, status, said, tmp_path, capsys):
    path = tmp_path / "grpo.yaml"
    path.write_text(text)
    assert cli.main(["doctor", "--no-step", "--config", str(path)]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_variables_of_the_configuration_are_set_before_rewards_are_imported(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KEY_OF_MY_JUDGE", "")
    config = tmp_path / "grpo.json"
    config.write_text(json.dumps({"env": {"KEY_OF_MY_JUDGE": "here"}, "bf16": False}))
    judge = tmp_path / "judge_with_key.py"
    body = "    return [len(c) + len(KEY) for c in completions]\n"
    judge.write_text(f"import os\nKEY = os.environ['KEY_OF_MY_JUDGE']\ndef f(completions, **_):\n{body}")
    assert cli.main(["doctor", "--no-step", "--config", str(config), "--rewards", f"{judge}:f"]) == 0
    assert "judge_with_key.py:f: 4 to " in capsys.readouterr().out
