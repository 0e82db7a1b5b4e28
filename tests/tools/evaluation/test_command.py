"""`fastgrpo eval` on a model made by hand: four of six answers are right."""

from __future__ import annotations

import json

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from successor import successor_model

from fastgrpo.runlog import RunLog, read_run_log
from fastgrpo.tools import cli
from fastgrpo.tools.demo.toy import toy_tokenizer
from fastgrpo.tools.evaluation.problems import last_number

ROWS = [("0", 1), ("1234", 5), ("12+6", 7), ("3=8", 9), ("7+2", 4), ("5", 6)]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    successor_model().save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in ROWS))
    return path


def evaluate(model, problems, *options):
    return cli.main(["eval", str(model), "--problems", str(problems), "--max-new-tokens", "3", *map(str, options)])


def printed(capsys):
    return json.loads(capsys.readouterr().out)["results"]


def test_greedy_pass_at_1_of_a_saved_model_and_its_answers(model, problems, tmp_path, capsys):
    assert evaluate(model, problems, "--json", "--answers", tmp_path / "answers.jsonl") == 0
    (result,) = printed(capsys)
    assert (result["pass_at_1"], result["n"], result["temperature"]) == (pytest.approx(4 / 6), 6, None)
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["completion"] for line in lines] == ["1", "5", "7", "9", "3", ""]
    assert [line["solved"] for line in lines] == [True] * 4 + [False] * 2
    assert evaluate(model, problems, "--limit", 2) == 0
    assert "100.0%" in capsys.readouterr().out


def test_sampled_answers_come_beside_the_greedy_ones_or_alone(model, problems, capsys):
    assert evaluate(model, problems, "--json", "--samples", 4, "--temperature", 0.01) == 0
    greedy, sampled = printed(capsys)
    assert greedy["samples"] == 1 and (sampled["samples"], sampled["n"]) == (4, 6)
    assert sampled["pass_at_1"] == pytest.approx(4 / 6)
    assert evaluate(model, problems, "--json", "--samples", 4, "--no-greedy") == 0
    (alone,) = printed(capsys)
    assert alone["temperature"] == 1.0


def test_a_reward_function_judges(model, problems, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def half(prompts, completions, answer, **_):\n"
        "    return [0.5 * (text == str(right)) for text, right in zip(completions, answer)]\n"
        "def text(completions, **_):\n    return ['good']\n"
    )
    reward = ["--json", "--reward", f"{tmp_path / 'mine.py'}:half"]
    assert evaluate(model, problems, *reward) == 0
    (result,) = printed(capsys)
    assert result["pass_at_1"] == 0 and result["mean_reward"] == pytest.approx(2 / 6)
    assert evaluate(model, problems, *reward, "--solved-at", 0.5) == 0
    assert printed(capsys)[0]["pass_at_1"] == pytest.approx(4 / 6)
    assert evaluate(model, problems, "--reward", f"{tmp_path / 'mine.py'}:text") == 1
    assert "it must be a list of one number" in capsys.readouterr().err


def reward(tmp_path, body, head="completions, answer, **_"):
    (tmp_path / "judge.py").write_text(f"def judge({head}):\n    {body}\n")
    return ["--reward", str(tmp_path / "judge.py") + ":judge"]


def test_rewards_that_say_nothing_are_counted_apart_and_are_no_zero(model, problems, tmp_path, capsys):
    # Right, right, right, right, wrong, wrong; the first is not judged, and the fifth is NaN.
    judge = reward(
        tmp_path, "return [{1: None, 4: float('nan')}.get(a, float(t == str(a))) for t, a in zip(completions, answer)]"
    )
    with RunLog(tmp_path / "log.jsonl", model="m", options=None) as log:
        log.step(9)
    answers = tmp_path / "answers.jsonl"
    assert evaluate(model, problems, *judge, "--json", "--log", tmp_path, "--answers", answers) == 0
    captured = capsys.readouterr()
    (result,) = json.loads(captured.out)["results"]
    assert (result["pass_at_1"], result["n"], result["unjudged"]) == (pytest.approx(3 / 4), 4, 2)
    assert result["mean_reward"] == pytest.approx(3 / 4)
    assert "2 of 6 answers have no reward (1 NaN, 1 None)" in captured.err
    (line,) = read_run_log(tmp_path).evals
    assert (line["pass_at_1"], line["n"]) == (pytest.approx(3 / 4), 4)
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["solved"] for line in lines] == [None, True, True, True, None, False]
    assert [line["reward"] for line in lines] == [None, 1.0, 1.0, 1.0, "nan", 0.0]
    assert evaluate(model, problems, *judge) == 0
    assert "not judged" in capsys.readouterr().out


def test_rewards_that_all_say_nothing_are_an_error(model, problems, tmp_path, capsys):
    judge = reward(tmp_path, "return [None]")
    assert evaluate(model, problems, *judge, "--answers", tmp_path / "answers.jsonl") == 1
    assert "judged no answer at all: 6 None" in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize(
    ("body", "head", "said"),
    [
        ("import sys; sys.exit(3)", "completions, **_", "judge.py:judge calls sys.exit(3) (judge.py, line 2)"),
        ("raise KeyboardInterrupt", "completions, **_", "raises KeyboardInterrupt"),
        ("return [1.0]", "prompts, completions", "-> add **kwargs to its arguments"),
        ("return [1.0]", "completions, difficulty, **_", "wants difficulty, which the rows have no column for"),
        ("import no_such_thing", "completions, **_", "-> install what provides no_such_thing"),
        ("return [1 / 0]", "completions, **_", "ZeroDivisionError: division by zero (judge.py, line 2)"),
    ],
    ids=["exit", "interrupt", "signature", "column", "module", "zero"],
)
def test_a_reward_function_that_fails_is_found_before_any_answer(
    body, head, said, model, problems, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "fastgrpo.tools.evaluate.evaluate_pass_at_1", lambda *_, **__: pytest.fail("answers were generated")
    )
    assert evaluate(model, problems, *reward(tmp_path, body, head)) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "" and "Traceback" not in captured.err


def test_what_a_reward_function_prints_and_where_it_goes_is_kept_out(model, problems, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    body = "import os; os.chdir('elsewhere'); print('seen'); return [1.0 for _ in completions]"
    assert evaluate(model, problems, *reward(tmp_path, body), "--limit", 2, "--json", "--answers", "mine.jsonl") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["results"][0]["pass_at_1"] == 1.0
    assert "seen" in captured.err
    assert (tmp_path / "mine.jsonl").exists()


def test_an_asynchronous_reward_function_judges(model, problems, tmp_path, capsys):
    (tmp_path / "later.py").write_text("async def judge(completions, **_):\n    return [1.0 for _ in completions]\n")
    assert evaluate(model, problems, "--json", "--reward", f"{tmp_path / 'later.py'}:judge") == 0
    assert printed(capsys)[0]["pass_at_1"] == 1.0


@pytest.mark.parametrize("name", ["nowhere/answers.jsonl", "folder", "test.jsonl"])
def test_answers_that_cannot_be_written_are_said_before_anything_is_loaded(name, problems, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    before = problems.read_text()
    assert evaluate(tmp_path / "no-model", problems, "--answers", tmp_path / name) == 2
    assert f"--answers {tmp_path / name}" in capsys.readouterr().err
    assert problems.read_text() == before
    assert evaluate(tmp_path / "no-model", problems, "--answers", tmp_path / "new.jsonl") == 2
    assert not (tmp_path / "new.jsonl").exists()


def test_an_adapter_is_loaded_over_its_base(model, problems, tmp_path, capsys):
    adapted = get_peft_model(successor_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "moved")
    adapted.save_pretrained(tmp_path / "checkpoint-7")
    assert evaluate(tmp_path / "checkpoint-7", problems) == 2
    assert "--base names another" in capsys.readouterr().err
    log = RunLog(tmp_path / "log.jsonl", model="m", options=None)
    with log:
        log.step(9)
    assert evaluate(tmp_path / "checkpoint-7", problems, "--base", model, "--log", tmp_path) == 0
    (line,) = read_run_log(tmp_path).evals
    assert line["step"] == 7 and line["pass_at_1"] == pytest.approx(4 / 6)


def test_an_adapter_that_is_not_whole_or_of_another_base_is_said(model, problems, tmp_path, capsys):
    adapted = get_peft_model(successor_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(model)
    adapted.save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)

    def refused():
        assert evaluate(tmp_path / "adapter", problems) == 2
        return capsys.readouterr().err

    save_file({name: tensor for name, tensor in tensors.items() if "q_proj" in name}, weights)
    assert "lacks layers that its adapter_config.json has" in refused()
    save_file({name: tensor[:1].contiguous() for name, tensor in tensors.items()}, weights)
    assert "does not fit its base" in refused()
    weights.write_bytes(weights.read_bytes()[:300])
    assert "is damaged or cut short" in refused()
    weights.unlink()  # PEFT would look for it on the Hub
    assert "has no weights of its adapter" in refused()


def test_before_and_after_are_in_the_log_and_in_the_report(model, problems, tmp_path, capsys):
    run = tmp_path / "run"
    with RunLog(run / "log.jsonl", model="m", options=None) as log:
        log.step(200, reward=0.5)
    with (run / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "torn')
    assert evaluate(model, problems, "--log", run, "--samples", 2) == 0
    assert evaluate(model, problems, "--log", run, "--limit", 5, "--step", 0) == 0
    evals = read_run_log(run).evals
    assert [(line["step"], line["n"], line["temperature"], line["samples"]) for line in evals] == [
        (200, 6, None, 1),
        (200, 6, 1.0, 2),
        (0, 5, None, 1),
    ]
    capsys.readouterr()
    assert cli.main(["report", str(run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["runs"][0]
    assert summary["pass_at_1_before"] == pytest.approx(4 / 5)
    assert summary["pass_at_1_after"] == pytest.approx(4 / 6)
    assert summary["sampled_after"] == evals[1]["pass_at_1"] and summary["sampled_before"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-greedy"], "leaves nothing to do without --samples"),
        (["--step", "3"], "only allowed with --log"),
        (["--temperature", "0"], "0 is greedy"),
        (["--match", "exact", "--reward", "a:b"], "not allowed with argument"),
        (["--reward", "nowhere:name"], "nowhere cannot be imported"),
        (["--log", "{tmp}/none"], "there is no run log"),
        (["--base", "{tmp}"], "holds no adapter"),
        (["--problems", "{tmp}/none.jsonl"], "cannot be read"),
        (
            ["--problems", "{tmp}/no-answers.jsonl"],
            "row 1 has no right answer\n  -> give rows with one of the columns answer",
        ),
        (["--problems", "{tmp}/odd.jsonl"], "line 1: its prompt is neither a text nor a list of messages"),
    ],
)
def test_wrong_input_is_said_before_any_answer(options, message, model, problems, tmp_path, capsys):
    (tmp_path / "no-answers.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "odd.jsonl").write_text('{"prompt": 12, "answer": 1}\n')
    assert evaluate(model, problems, *(option.format(tmp=tmp_path) for option in options)) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_said(problems, tmp_path, capsys):
    assert evaluate(tmp_path / "nothing", problems) == 2
    assert "no model of that name in the local cache" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert evaluate(tmp_path / "empty", problems) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_prompts_that_leave_no_room_for_an_answer_are_said_before_any(model, problems, capsys):
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 32}
    (model / "config.json").write_text(json.dumps(config))
    assert evaluate(model, problems, "--max-new-tokens", 28) == 0
    assert evaluate(model, problems, "--max-new-tokens", 29) == 2
    error = capsys.readouterr().err
    assert "2 of 6 prompts leave no room for an answer of 29 tokens in the model's context of 32" in error
    assert "the longest, row 2, has 4" in error and "28 tokens or fewer (--max-new-tokens)" in error


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 1,234.", 1234.0),
        ("#### -5", -5.0),
        ("3.50 dollars", 3.5),
        ("2 then 3", 3.0),
        ("none", None),
        ("1,2", 2.0),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number
