"""`Options.run_log`: every `train()` of a patched trainer leaves a log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from tiny import PROMPTS, many_letters, tiny_trainer
from transformers import TrainerCallback

import fastgrpo
from fastgrpo.runlog import read_run_log
from fastgrpo.tools.report.summary import summarise
from fastgrpo.trl.around import Around
from fastgrpo.trl.clock import StepClock


def logs(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jsonl"))


def watch(trainer, clock: StepClock) -> None:
    for owner, name, around in clock.around(trainer):
        setattr(owner, name, Around(owner, name, around))


def test_training_writes_run_steps_and_end_by_default(tmp_path):
    trainer = tiny_trainer(tmp_path / "out", max_steps=3)
    with fastgrpo.patch(trainer):
        assert not (tmp_path / "out" / "log.jsonl").exists()
        result = trainer.train()
    assert result.global_step == 3
    record = read_run_log(tmp_path / "out")
    assert record.exit == "done"
    assert record.run["options"]["packing"] == "auto" and record.run["settings"]["max_steps"] == 3
    assert record.run["rollout_path"] == "transformers generate, in this process"
    assert record.run["model"] == "PeftModel" or "Llama" in record.run["model"]
    assert [line["step"] for line in record.steps] == [1, 2, 3]
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert record.rewards == pytest.approx(logged)
    assert record.end["wall_s"] > 0 and record.end["seconds_per_step"] > 0 and record.end["peak_memory_gb"] > 0


def test_generation_reward_and_update_are_told_apart(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2)
    with fastgrpo.patch(trainer):
        trainer.train()
    for line in read_run_log(tmp_path).steps:
        assert line["time_generation"] > line["time_reward"] > 0 and line["time_update"] > 0
        assert line["time_sync"] is None
        assert 0 < line["tokens_real"] <= line["tokens_padded"]


def test_a_step_that_replays_a_generation_has_a_line_of_its_own(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=5, num_iterations=3)
    with fastgrpo.patch(trainer):
        trainer.train()
    record = read_run_log(tmp_path)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line["step"] for line in record.steps] == [1, 2, 3, 4, 5]
    assert [line["policy_lag"] for line in record.steps] == [0, 1, 2, 0, 1]
    for index, (line, entry) in enumerate(zip(record.steps, entries, strict=True)):
        for key in ("reward", "reward_std", "loss", "entropy", "grad_norm"):
            assert line[key] == entry.get(key), key
        assert line["tokens_padded"] == entry["rollout/tokens_padded"]
        if index % 3:
            assert (
                line["reward"] is None and line["tokens_real"] == line["tokens_padded"] == line["time_generation"] == 0
            )
        else:
            assert line["reward"] is not None and 0 < line["tokens_real"] <= line["tokens_padded"]
    assert sum(line["tokens_real"] for line in record.steps) == entries[3]["num_tokens"]
    spent = sum(entry[f"time/{name}"] for entry in entries for name in ("generation", "reward", "update"))
    assert record.end["seconds_per_step"] == pytest.approx(spent / 5, rel=0.25)
    summary = summarise(record, "a")
    real, padded = (sum(line[key] for line in record.steps[3:]) for key in ("tokens_real", "tokens_padded"))
    assert summary.padding_share == pytest.approx(1 - real / padded) and summary.tokens_per_step == real / 2
    assert summary.remarks == []


def test_steps_after_the_last_entry_are_in_a_line_and_no_reward_is_lost(tmp_path):
    class Tells(TrainerCallback):  # an entry that is no step's takes the metrics so far
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1:
                trainer.log({"mine": 1.0})

    trainer = tiny_trainer(tmp_path, max_steps=3, logging_steps=2)
    trainer.add_callback(Tells())
    with fastgrpo.patch(trainer):
        trainer.train()
    record = read_run_log(tmp_path)
    assert [line["step"] for line in record.steps] == [2, 3]
    assert all(line["reward"] is not None for line in record.steps)
    assert [line["loss"] is None for line in record.steps] == [False, True]


def test_after_training_the_trainer_is_as_it_was_and_after_unpatching_it_logs_no_more(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    untouched = set(trainer.__dict__)
    callbacks = list(trainer.callback_handler.callbacks)
    handle = fastgrpo.patch(trainer)
    patched = set(trainer.__dict__)
    trainer.train()
    assert {name for name in trainer.__dict__ if callable(trainer.__dict__[name])} <= patched
    handle.unpatch()
    assert not (patched - untouched) & set(trainer.__dict__) and untouched <= set(trainer.__dict__)
    assert trainer.callback_handler.callbacks == callbacks
    trainer.train()
    assert logs(tmp_path) == ["log.jsonl"]


def test_every_call_has_a_log_of_its_own_and_none_is_overwritten(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    with fastgrpo.patch(trainer):
        trainer.train()
        first = (tmp_path / "log.jsonl").read_bytes()
        trainer.train()
        trainer.train()
    assert logs(tmp_path) == ["log-2.jsonl", "log-3.jsonl", "log.jsonl"]
    assert (tmp_path / "log.jsonl").read_bytes() == first


@pytest.mark.parametrize(
    ("run_log", "expected"),
    [(False, []), ("elsewhere", ["elsewhere/log.jsonl"]), (Path("elsewhere/a.jsonl"), ["elsewhere/a.jsonl"])],
)
def test_the_log_goes_where_run_log_says(run_log, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = tiny_trainer(tmp_path / "out", max_steps=1)
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=run_log)):
        assert ("train" in trainer.__dict__) == bool(run_log)
        trainer.train()
    assert logs(tmp_path) == expected


@pytest.mark.parametrize("run_log", [None, 3, ""])
def test_a_run_log_that_is_no_place_is_refused(run_log):
    with pytest.raises(ValueError, match="give a path, True or False"):
        fastgrpo.Options(run_log=run_log)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RuntimeError("out of luck"), "RuntimeError: out of luck"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_run_that_ends_badly_says_how_and_the_error_goes_on(error, expected, tmp_path):
    def reward(completions, **_):
        if reward.calls == 1:
            raise error
        reward.calls += 1
        return many_letters(completions)

    reward.calls = 0
    trainer = tiny_trainer(tmp_path, max_steps=4)
    trainer.reward_funcs = [reward]
    with fastgrpo.patch(trainer), pytest.raises(type(error)):
        trainer.train()
    record = read_run_log(tmp_path)
    assert record.exit == expected and len(record.steps) == 1


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    with fastgrpo.patch(trainer):
        monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
        trainer.train()
    assert logs(tmp_path) == []


def test_a_place_that_cannot_be_written_stops_no_training_unless_it_was_asked_for(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    trainer = tiny_trainer(tmp_path / "out", max_steps=1)
    trainer.args.output_dir = str(tmp_path / "file")
    with fastgrpo.patch(trainer), caplog.at_level(logging.WARNING, "fastgrpo"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert "training without a run log" in caplog.text
    asked = fastgrpo.Options(run_log=tmp_path / "file" / "x.jsonl")
    with (
        fastgrpo.patch(trainer, asked),
        pytest.raises(OSError, match=r"run_log is '.*file/x.jsonl', .* or run_log=False"),
    ):
        trainer.train()


def test_evaluations_count_for_no_step(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    clock, seen = StepClock(), []
    generate = trainer._generate
    trainer._generate = lambda prompts: seen.append(trainer.model.training) or generate(prompts)
    watch(trainer, clock)
    trainer.evaluate()
    assert seen and clock.generation is clock.reward is clock.tokens_padded is None
    assert trainer._generate.__name__ == "<lambda>"


def test_weight_sync_is_not_generation():
    class Engine:
        def sync_weights(self):
            clock_face[0] += 5.0

    class Trainer:
        model = SimpleNamespace(training=True)

        def __init__(self):
            self.vllm_generation = Engine()

        def _generate(self):
            self.vllm_generation.sync_weights()
            clock_face[0] += 2.0
            return [[3, 4]], [[5, 6, 7]], None

        def _calculate_rewards(self):
            clock_face[0] += 1.0

        def _generate_and_score_completions(self):
            raise AssertionError

    clock_face = [0.0]
    trainer, clock = Trainer(), StepClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgrpo.trl.clock.time.perf_counter", lambda: clock_face[0])
        watch(trainer, clock)
        trainer._generate()
        trainer._calculate_rewards()
    assert (clock.generation, clock.sync, clock.reward) == (2.0, 5.0, 1.0)
    assert clock.tokens_real == 5
    assert clock.phases(10.0) == {"generation": 2.0, "sync": 5.0, "reward": 1.0, "update": 2.0}


def test_the_log_is_one_strict_json_object_a_line(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2)
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=tmp_path)):
        trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "step", "step", "end"]
    assert lines[0]["options"]["run_log"] == str(tmp_path)
