"""Every fault the doctor is for is found, named, and comes with what to do."""

from __future__ import annotations

import itertools
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from tiny import tiny_trainer

from fastgrpo.kernels.library import LibraryInfo
from fastgrpo.tools import cli
from fastgrpo.tools.demo.toy import toy_model, toy_tokenizer
from fastgrpo.tools.doctor import machine
from fastgrpo.tools.doctor.case import Case, rewards_of
from fastgrpo.tools.doctor.machine import check_device, check_kernels, check_rollouts, check_versions
from fastgrpo.tools.doctor.policy import check_policy, check_settings, check_tokenizer
from fastgrpo.tools.doctor.rewards import check_rewards, examine, sample
from fastgrpo.tools.doctor.tiny_step import check_step, examine_step
from fastgrpo.tools.wording import ToolError


def only(lines):
    (line,) = list(lines)
    return line


@pytest.fixture
def toy(tmp_path):
    tokenizer = toy_tokenizer()
    toy_model(tokenizer).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


def test_torch_without_gpu_support_on_a_machine_with_a_gpu(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.write_text("NVRM version")
    monkeypatch.setattr(machine, "_DRIVERS", {"NVIDIA": driver})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    line = only(check_device(Case()))
    assert line.status == "wrong"
    assert "driver for NVIDIA GPUs" in line.text and "built without GPU support" in line.text
    assert "install a build of torch" in line.remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = only(check_device(Case()))
    assert line.status == "wrong" and "built for 13.0, finds no device" in line.text and "driver" in line.remedy


def test_a_machine_without_a_gpu_is_all_right(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_DRIVERS", {"NVIDIA": tmp_path / "nothing"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert only(check_device(Case())).status == "ok"


def test_a_missing_library_on_a_gpu_and_one_that_is_named_but_not_there(monkeypatch):
    monkeypatch.setattr(machine, "library_info", lambda: LibraryInfo(None, reason="pure-Python wheel"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    line = only(check_kernels(Case()))
    assert line.status == "hint" and "no compiled library: pure-Python wheel" in line.text and "slower" in line.remedy

    def missing():
        raise FileNotFoundError("FASTGRPO_LIBRARY is 'x', and there is no such file")

    monkeypatch.setattr(machine, "library_info", missing)
    line = only(check_kernels(Case()))
    assert line.status == "wrong" and "no such file" in line.text


def test_the_library_is_told_once_and_one_of_hipcc_with_what_it_lacks(monkeypatch):
    info = LibraryInfo(Path("library.so"), "0.1.0", "hipcc, Clang 22.1.8", ("gfx90a", "gfx942"))
    for module in ("fastgrpo.tools.doctor.machine", "fastgrpo.kernels.backends"):
        monkeypatch.setattr(f"{module}.library_info", lambda: info)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    line = only(check_kernels(Case()))
    library = "library 0.1.0 for gfx90a, gfx942; built by hipcc: the kernels alone, no ops for torch so far"
    assert line.status == "ok" and line.text == f"reference (torch ops); {library}"


def test_a_trl_out_of_range(monkeypatch):
    monkeypatch.setattr("fastgrpo.trl.compat.version", lambda name: "1.40.0")
    line = only(check_versions(Case()))
    assert line.status == "wrong" and "trl 1.40.0 is installed" in line.text and "pip install" in line.text


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_vllm_that_is_to_be_used_and_is_not_installed_or_out_of_range(monkeypatch, mode):
    monkeypatch.setattr("fastgrpo.rollout.vllm.vllm_version", lambda: None)
    case = Case(settings={"use_vllm": True, "vllm_mode": mode})
    line = only(check_versions(case))
    assert line.status == "wrong" and "vLLM, which is not installed" in line.text and 'pip install "vllm' in line.text
    monkeypatch.setattr("fastgrpo.rollout.vllm.vllm_version", lambda: "0.1")
    line = only(check_versions(case))
    assert line.status == "wrong" and "vllm 0.1 is installed" in line.text
    assert only(check_versions(Case())).status == "ok"


def test_target_modules_that_match_nothing_with_the_names_that_exist(toy):
    case = Case(toy, settings={"use_peft": True, "lora_target_modules": ["query", "value"]})
    line = list(check_policy(case))[-1]
    assert line.status == "wrong" and line.layer == "trained"
    for name in ("query", "q_proj", "down_proj", "and try again. The model's linear layers are"):
        assert name in line.text


def test_an_adapter_on_the_head_or_larger_than_the_model(toy):
    line = list(check_policy(Case(toy, settings={"use_peft": True, "lora_target_modules": ["lm_head", "q_proj"]})))[-1]
    assert (line.layer, line.status) == ("trained", "wrong") and "output head" in line.text
    settings = {"use_peft": True, "lora_r": 4096, "lora_target_modules": "all-linear", "max_completion_length": 4}
    assert "larger than the model" in list(check_policy(Case(toy, settings=settings)))[1].text


def test_trained_parameters_are_counted_and_small_models_hinted_at(toy):
    lines = list(check_policy(Case(toy, settings={"use_peft": True, "lora_r": 4, "max_completion_length": 4})))
    assert [line.status for line in lines] == ["ok", "hint", "ok"]
    assert "LoRA of rank 4" in lines[0].text and "Unsloth's reinforcement learning guide" in lines[1].text
    assert "all of the model" in next(iter(check_policy(Case(toy)))).text


def test_a_folder_without_a_tokenizer_is_not_one_with_an_empty_one(toy, tmp_path, capsys):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (toy / file).unlink()
    line = list(check_policy(Case(toy)))[-1]
    assert (line.layer, line.status) == (
        "tokenizer",
        "wrong",
    ) and "has no tokenizer: none of tokenizer.json" in line.text
    assert "save it beside the model" in line.remedy


def test_a_completion_longer_than_the_context_is_wrong_without_any_prompt(toy):
    line = list(check_policy(Case(toy)))[-1]
    assert line.status == "wrong" and "max_completion_length is 256 (the default)" in line.text
    line = list(check_policy(Case(toy, settings={"max_completion_length": 32})))[-1]
    assert line.status == "wrong" and "max_completion_length is 32, and the model's context has 32" in line.text


def test_prompts_that_are_no_tokens_of_the_model(toy):
    settings = {"max_completion_length": 4}
    conversation = [{"prompt": [{"role": "user", "content": "1+1="}]}]
    line = list(check_policy(Case(toy, rows=conversation, settings=settings)))[-1]
    assert line.status == "wrong" and "no chat template" in line.text and "texts" in line.remedy
    with pytest.raises(ToolError, match=r"prompt 1 has token \d+, and the model knows 2"):
        list(check_tokenizer(Case(rows=[{"prompt": "1+1="}], settings=settings), toy_tokenizer(), 32, vocabulary=2))
    with pytest.raises(ToolError, match="prompt 1 cannot be tokenised"):
        list(check_tokenizer(Case(rows=[{"prompt": 12}], settings=settings), toy_tokenizer(), 32))


def test_prompts_longer_than_the_context():
    rows = [{"prompt": "1+1="}, {"prompt": "1" * 30}]
    line = only(check_tokenizer(Case(rows=rows, settings={"max_completion_length": 8}), toy_tokenizer(), context=32))
    assert line.status == "wrong"
    assert "1 of 2 prompts are too long: the longest has 30 tokens, with 8 of completion" in line.text
    fits = only(
        check_tokenizer(Case(rows=rows[:1], settings={"max_completion_length": 8}), toy_tokenizer(), context=32)
    )
    assert fits.status == "ok"


def test_a_missing_pad_token():
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = None
    lines = list(check_tokenizer(Case(), tokenizer, context=None))
    assert lines[0].status == "hint" and "no pad token; TRL pads with the end token '<eos>'" in lines[0].text
    tokenizer.eos_token = None
    line = only(check_tokenizer(Case(), tokenizer, context=32))
    assert line.status == "wrong" and "none to pad with" in line.text and "tokenizer.pad_token" in line.remedy
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = None
    line = only(check_tokenizer(Case(), tokenizer, context=32))
    assert line.status == "wrong" and "no end-of-sequence token" in line.text and "pad" not in line.text


async def delayed(completions):
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
    ("reward", "status", "said"),
    [
        (
            lambda completions, **_: ["good"] * len(completions),
            "wrong",
            "returns 'good', of type str, which is no reward",
        ),
        (lambda completions, **_: "good", "wrong", "returns 'good', of type str, instead of a list"),
        (lambda completions, **_: 1.0, "wrong", "returns 1.0, of type float, instead of a list"),
        (lambda completions, **_: None, "wrong", "returns None instead of a list"),
        (lambda completions, **_: torch.zeros(len(completions), 2), "wrong", "of type Tensor"),
        (lambda completions, **_: (float(len(text)) for text in completions), "ok", "the same twice"),
        (lambda completions, **_: [math.nan] * len(completions), "wrong", "returns nan for 4 of 4 completions"),
        (lambda completions, **_: [math.inf] + [0.0] * (len(completions) - 1), "wrong", "returns inf for 1 of 4"),
        (lambda completions, **_: [1e39] * len(completions), "wrong", "returns 1e+39 for 4 of 4 completions"),
        (lambda completions, **_: [10**400] * len(completions), "wrong", "of type int"),
        (lambda completions, **_: [1.0], "wrong", "returns 1 rewards for 4 completions"),
        (lambda completions, **_: [None] * len(completions), "wrong", "None for every completion"),
        (lambda completions, **_: [0.5] * len(completions), "hint", "gives 0.5 to all 4 completions"),
        (lambda completions, answer, **_: [1.0], "wrong", "wants answer, which the rows have no column for"),
        (
            lambda prompts, completions, completion_ids: [1.0],
            "wrong",
            "does not take trainer_state, log_extra, log_metric",
        ),
        (
            lambda completions, **columns: columns["answer"],
            "wrong",
            "raises KeyError: answer is missing (test_faults.py",
        ),
        (lambda completions, **_: exit(4), "wrong", "calls sys.exit(4)"),
        (lambda completions, **_: delayed(completions), "wrong", "is no `async def`"),
        (lambda completions, **_: [len(text) for text in completions], "ok", "the same twice"),
        (lambda completions, **_: torch.tensor([float(len(text)) for text in completions]), "ok", "the same twice"),
        (lambda completions, **_: [None, *map(len, completions[1:])], "ok", "2 to 35 on 4"),
    ],
)
def test_rewards_that_cannot_teach(reward, status, said):
    line = only(examine("mine", reward, []))
    assert (line.status, said in line.text) == (status, True), line
    assert line.remedy or status == "ok"


def test_constants_are_wrong_where_the_users_own_completions_should_differ():
    rows = [{"prompt": "p", "completion": "good"}, {"prompt": "p", "completion": "bad"}]
    assert only(examine("mine", lambda completions, **_: [0.0] * len(completions), rows)).status == "wrong"


def test_completions_of_the_users_that_are_none():
    line = only(examine("mine", lambda completions, **_: [1.0], [{"prompt": "p", "completion": 3}]))
    assert line.status == "wrong" and "a row's completion is 3" in line.text


def test_columns_of_more_than_one_kind_are_no_dataset():
    line = only(check_step(Case(rows=[{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": "four"}])))
    assert line.status == "wrong" and "values of more than one kind" in line.text and "throughout" in line.remedy


def test_rewards_that_differ_between_two_calls():
    calls = itertools.count()
    line = only(examine("mine", lambda completions, **_: [next(calls) for _ in completions], []))
    assert line.status == "hint" and "other rewards at the second call" in line.text


def test_rewards_that_change_what_they_are_given():
    def reward(completions, **_):
        lengths = [len(text) for text in completions]
        completions.reverse()
        return lengths

    lines = list(examine("mine", reward, []))
    assert [line.status for line in lines] == ["hint", "ok"] and "changes the lists that it is given" in lines[0].text


def test_asynchronous_rewards_are_awaited():
    async def reward(completions, **_):
        return [float(len(text)) for text in completions]

    assert only(examine("mine", reward, [])).status == "ok"


def test_an_asynchronous_object_that_this_trl_would_not_await(monkeypatch):
    class Judge:
        async def __call__(self, completions, **_):
            return [float(len(text)) for text in completions]

    monkeypatch.setattr("trl.trainer.utils.is_async_callable", lambda function: True, raising=False)
    assert only(examine("mine", Judge(), [])).status == "ok"
    monkeypatch.delattr("trl.trainer.utils.is_async_callable")
    line = only(examine("mine", Judge(), []))
    assert line.status == "wrong" and "this TRL would not await" in line.text


def test_a_sample_has_the_datasets_columns_its_answers_and_the_prompts_form():
    arguments = sample([{"prompt": [{"role": "user", "content": "2+2"}], "answer": 4, "level": "easy"}])
    assert arguments["completions"][-1] == [{"role": "assistant", "content": "4"}]
    assert len(set(map(len, arguments.values()))) == 1
    assert set(arguments["level"]) == {"easy"}


@pytest.mark.parametrize(
    ("spec", "said"),
    [("nothing", "names no function"), ("no.such:f", "cannot be imported"), ("json:nope", "has no function nope")],
)
def test_a_reward_function_that_is_not_there(spec, said):
    line = only(check_rewards(Case(rewards=(spec,))))
    assert line.status == "wrong" and said in line.text


def test_a_rollout_server_that_is_down_and_one_that_is_up():
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Healthy)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert only(check_rollouts(Case(server=address))).status == "ok"
    line = only(check_rollouts(Case(server=address + "/else")))
    assert line.status == "wrong" and "answers 404" in line.text
    server.shutdown()
    server.server_close()
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": address}
    line = only(check_rollouts(Case(settings=settings)))
    assert line.status == "wrong" and f"{address} is down" in line.text and line.remedy
    assert "no http://" in only(check_rollouts(Case(server="localhost:8000"))).text
    assert "is no address" in only(check_rollouts(Case(server="http://two words/"))).text


def test_settings_outside_common_advice_are_hinted_at_with_their_source():
    case = Case(rows=[{"prompt": "a"}] * 20, settings={"max_steps": 100, "delta": 1.1, "epsilon": 0.2})
    lines = list(check_settings(case))
    assert [line.status for line in lines] == ["hint"] * 3
    for line, words in zip(lines, ("300", "500", "INTELLECT-2"), strict=True):
        assert words in line.text
    good = {"max_steps": 300, "delta": 4.0, "epsilon": 0.2}
    assert list(check_settings(Case(rows=[{"prompt": "a"}] * 500, settings=good))) == []


def step_trainer(tmp_path, reward, **config):
    trainer = tiny_trainer(tmp_path, max_steps=1, gradient_accumulation_steps=1, **config)
    trainer.reward_funcs = [reward]
    return trainer


def test_a_tiny_step_of_a_healthy_run(tmp_path):
    trainer = step_trainer(tmp_path, lambda completions, **_: [float(len(set(text))) for text in completions])
    line = only(examine_step(trainer))
    assert line.status == "ok" and "ratio 1.000000" in line.text


def test_rewards_of_0_everywhere_are_seen_in_the_step(tmp_path):
    line = only(examine_step(step_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions))))
    assert line.status == "hint" and "nothing is learned" in line.text


def test_a_step_that_is_not_finite(tmp_path):
    trainer = step_trainer(tmp_path, lambda completions, **_: [float(len(set(text))) for text in completions])
    trainer.create_optimizer_and_scheduler(1)
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = math.inf
    line = only(examine_step(trainer))
    assert line.status == "wrong" and "not finite" in line.text


def test_a_ratio_that_is_not_1_before_any_update(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian", lora_dropout=0.5)
    trainer = step_trainer(tmp_path, lambda completions, **_: [float(len(set(t))) for t in completions], lora=lora)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    line = only(examine_step(trainer))
    assert line.status == "wrong" and "not 1" in line.text and "dropout" in line.remedy


def test_a_check_that_breaks_is_a_line_and_no_traceback(capsys, monkeypatch):
    def broken(case):
        raise RuntimeError("of a library\n  in two lines")

    monkeypatch.setattr("fastgrpo.tools.doctor.layers.check_kernels", broken)
    assert cli.main(["doctor", "--no-step"]) == 1
    assert "WRONG kernels: RuntimeError: of a library in two lines (in doctor/test_faults.py" in capsys.readouterr().out


def test_rewards_of_the_configuration_are_looked_at(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges_of_mine.py").write_text("def f(completions, **_):\n    return [*map(len, completions)]\n")
    config = tmp_path / "grpo.yaml"
    config.write_text(
        "reward_funcs: [judges_of_mine.f, think_format_reward]\nreward_weights: [1.0, 2.0, 3.0]\nbf16: false\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}]}) + "\n")
    assert rewards_of({"reward_funcs": "a.b.c"}) == ("a.b:c",)
    assert cli.main(["doctor", "--no-step", "--config", str(config), "--prompts", str(rows)]) == 1
    out = capsys.readouterr().out
    assert "judges_of_mine:f" in out and "trl.rewards:think_format_reward" in out
    assert "reward_weights has 3 numbers for 2 reward functions" in out


def test_it_stops_at_the_first_that_is_wrong_and_the_status_says_so(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text("def words(completions, **_):\n    return ['good'] * len(completions)\n")
    arguments = ["doctor", "--rewards", f"{tmp_path / 'mine.py'}:words", "--server", "http://127.0.0.1:9"]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert "WRONG rewards" in out and "-> return numbers" in out
    assert "rollouts" not in out and "one step" not in out and "\x1b[" not in out
    assert cli.main([*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] is False and document["lines"][-1]["layer"] == "rewards"


def test_a_healthy_run_with_everything_given(toy, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def long(completions, answer, **_):\n    return [len(t) for t in completions]\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(6)))
    config = tmp_path / "grpo.yaml"
    config.write_text(f"model_name_or_path: {toy}\nmax_completion_length: 4\nuse_peft: true\nlora_r: 4\n")
    rewards = ["--rewards", f"{tmp_path / 'mine.py'}:long"]
    assert cli.main(["doctor", *rewards, "--prompts", str(rows), "--config", str(config), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    layers = [line["layer"] for line in document["lines"]]
    order = [
        "device",
        "versions",
        "kernels",
        "config",
        "trained",
        "tokenizer",
        "settings",
        "rewards",
        "rollouts",
        "one step",
    ]
    assert list(dict.fromkeys(layers)) == order
    assert document["healthy"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "cannot be read"),
        (["--config", "nowhere.yaml"], "cannot be read"),
        (["--lora-rank", "0"], "0 is too small"),
        (["--lora-targets", ", "], "names no layer"),
    ],
)
def test_files_that_cannot_be_read_are_wrong_usage(arguments, said, capsys):
    assert cli.main(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err
