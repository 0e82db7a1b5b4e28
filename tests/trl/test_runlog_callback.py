from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import fastgrpo
from fastgrpo.runlog import KEYS, RunLog, read_run_log
from fastgrpo.tools.demo.toy import toy_model, toy_tokenizer
from fastgrpo.trl.clock import StepClock
from fastgrpo.trl.runlog import RunLogCallback, describe_run, peak_memory_gb

PROMPTS = ["1+1=", "12+34="]
ROWS, LONGEST_PROMPT, COMPLETION = 8, 6, 3


def digits(completions, **_):
    time.sleep(0.01)
    return [float(len(set(text))) for text in completions]


def config(folder, **changes) -> GRPOConfig:
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": ROWS,
        "num_generations": 4,
        "max_completion_length": COMPLETION,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **changes,
    }
    return GRPOConfig(output_dir=str(folder), **settings)


def train(folder, clock: StepClock | None, callbacks: tuple[TrainerCallback, ...] = (), **changes):
    tokenizer = toy_tokenizer()
    model = toy_model(tokenizer)
    settings = config(folder, **changes)
    seen: list[dict] = []
    with RunLog(folder / "log.jsonl", seed=settings.seed) as log:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=clock.timed_reward(digits) if clock else digits,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
            processing_class=tokenizer,
            callbacks=[*callbacks, RunLogCallback(log, clock, seen.append)],
        )
        if clock is None:
            trainer.train()
        else:
            with clock.watch(trainer.model):
                trainer.train()
    return trainer, read_run_log(folder), seen


def test_every_step_has_a_line_with_what_trl_logged(tmp_path):
    trainer, record, seen = train(tmp_path, StepClock())
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [line["step"] for line in record.steps] == [1, 2, 3, 4]
    for line, entry in zip(record.steps, logged, strict=True):
        for key in ("reward", "reward_std", "loss", "entropy", "grad_norm"):
            assert line[key] == pytest.approx(entry[key]), key
    assert [values["step"] for values in seen] == [1, 2, 3, 4]
    assert set(seen[0]) <= {"seconds", *KEYS["step"]}


def test_times_and_tokens_are_measured_and_what_is_unknown_is_null(tmp_path):
    _, record, seen = train(tmp_path, StepClock())
    for line, values in zip(record.steps, seen, strict=True):
        assert line["time_generation"] > 0
        assert line["time_reward"] >= 0.01
        assert line["time_update"] > 0
        parts = line["time_generation"] + line["time_reward"] + line["time_update"]
        assert parts == pytest.approx(values["seconds"])
        # The rollouts of a step hold both prompts, four times each.
        assert ROWS * (4 + 6) / 2 + ROWS <= line["tokens_real"] <= line["tokens_padded"]
        assert line["tokens_padded"] <= ROWS * (LONGEST_PROMPT + COMPLETION)
        assert line["peak_memory_gb"] > 0.05
        for key in ("kl", "time_sync", "policy_version", "policy_lag", "stale"):
            assert line[key] is None, key
    assert record.end["seconds_per_step"] == pytest.approx(sum(v["seconds"] for v in seen) / 4)


def test_without_a_clock_times_are_null(tmp_path):
    _, record, _ = train(tmp_path, None, max_steps=2)
    for line in record.steps:
        assert line["tokens_real"] > 0
        for key in ("tokens_padded", "time_generation", "time_reward", "time_update"):
            assert line[key] is None, key


def test_times_that_the_trainer_logs_itself_are_taken(tmp_path):
    class OwnTimes(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs |= {"time/generation": 1.5, "time/sync": 0.25}

    _, record, _ = train(tmp_path, StepClock(), callbacks=(OwnTimes(),), max_steps=2)
    for line in record.steps:
        assert (line["time_generation"], line["time_sync"]) == (1.5, 0.25)
        assert line["time_reward"] is None


def test_fewer_lines_hold_means_per_step(tmp_path):
    _, record, seen = train(tmp_path, StepClock(), logging_steps=2)
    assert [line["step"] for line in record.steps] == [2, 4]
    for line, values in zip(record.steps, seen, strict=True):
        assert line["tokens_real"] <= line["tokens_padded"] <= ROWS * (LONGEST_PROMPT + COMPLETION)
        parts = line["time_generation"] + line["time_reward"] + line["time_update"]
        assert parts == pytest.approx(values["seconds"])


def test_a_line_of_fewer_steps_weighs_less(tmp_path):
    _, record, seen = train(tmp_path, None, max_steps=3, logging_steps=2)
    assert [line["step"] for line in record.steps] == [2, 3]
    two, one = (values["seconds"] for values in seen)
    assert record.end["seconds_per_step"] == pytest.approx((2 * two + one) / 3)


def test_a_clock_s_replayed_steps_generate_for_0_s(tmp_path):
    _, record, _ = train(tmp_path, StepClock(), num_iterations=2)
    assert [line["step"] for line in record.steps] == [1, 2, 3, 4]
    for line in record.steps[1::2]:
        assert line["reward"] is None
        assert line["tokens_real"] == line["tokens_padded"] == line["time_generation"] == line["time_reward"] == 0
        assert line["time_update"] > 0
    assert all(line["time_generation"] > 0 and line["reward"] is not None for line in record.steps[::2])


def test_evaluation_entries_are_no_steps(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    callback = RunLogCallback(log)
    args, state = config(tmp_path), type("State", (), {"global_step": 3, "is_world_process_zero": True})()
    for entry in ({"eval_reward": 1.0}, {"train_runtime": 2.0}, {}, None):
        callback.on_log(args, state, None, logs=entry)
    assert read_run_log(tmp_path).steps == []


@pytest.mark.parametrize(("processes", "real"), [(1, 60.0), (2, None)])
def test_trl_s_count_of_all_processes_stands_for_no_single_one(processes, real, tmp_path):
    callback = RunLogCallback(RunLog(tmp_path / "log.jsonl"))
    args = SimpleNamespace(world_size=processes, device=torch.device("cpu"))
    state = SimpleNamespace(global_step=0, is_world_process_zero=True, num_input_tokens_seen=100)
    callback.on_train_begin(args, state, None)
    for _ in range(2):
        callback.on_step_begin(args, state, None)
        callback.on_step_end(args, state, None)
    state.global_step, state.num_input_tokens_seen = 2, 220
    callback.on_log(args, state, None, logs={"loss": 0.1})
    (line,) = read_run_log(tmp_path).steps
    assert (line["tokens_real"], line["steps"]) == (real, 2)


def test_only_the_main_process_writes(tmp_path):
    callback = RunLogCallback(RunLog(tmp_path / "log.jsonl"))
    state = type("State", (), {"global_step": 3, "is_world_process_zero": False})()
    callback.on_log(config(tmp_path), state, None, logs={"reward": 1.0})
    assert read_run_log(tmp_path).steps == []


def test_the_watched_model_gets_its_generate_back():
    model = toy_model(toy_tokenizer())
    clock = StepClock()
    with pytest.raises(RuntimeError), clock.watch(model):
        model.generate(input_ids=torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False)
        raise RuntimeError
    assert "generate" not in vars(model)
    assert clock.generation > 0
    assert 2 < clock.tokens_padded <= 5


def test_the_run_line_tells_versions_device_options_and_what_differs_from_the_defaults(tmp_path):
    values = describe_run(
        config(tmp_path, learning_rate=3e-4, seed=7, hub_token="secret"),
        model="toy",
        rollout_path="transformers",
        device="cpu",
        options=fastgrpo.Options(num_chunks=2),
    )
    with RunLog(tmp_path / "log.jsonl", **values):
        pass
    run = read_run_log(tmp_path).run
    assert run["versions"]["torch"] == torch.__version__
    assert run["device"].startswith("cpu, ")
    assert run["options"]["num_chunks"] == 2
    assert run["seed"] == 7
    assert run["settings"]["learning_rate"] == 3e-4
    assert run["settings"]["max_completion_length"] == COMPLETION
    assert "temperature" not in run["settings"]
    assert "secret" not in (tmp_path / "log.jsonl").read_text()
    assert run["plan"] is None


def test_an_unpatched_run_has_no_options(tmp_path):
    assert describe_run(config(tmp_path), model="m", rollout_path="transformers", device="cpu")["options"] is None


def test_peak_memory_of_a_cpu_grows_with_what_is_held():
    before = peak_memory_gb(torch.device("cpu"))
    block = torch.ones(100_000_000)  # 0.4 GB
    assert peak_memory_gb(torch.device("cpu")) >= before
    assert peak_memory_gb(torch.device("cpu")) >= 0.4
    del block


def test_peak_memory_of_a_device_without_a_meter_is_unknown():
    assert peak_memory_gb(torch.device("mps")) is None
