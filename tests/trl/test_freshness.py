"""Every batch knows the optimizer step whose weights sampled it; one that comes too late is reported, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import PROMPTS, tiny_trainer
from transformers import TrainerCallback
from trl import GRPOTrainer
from twins import OURS, trained_parameters

import fastgrpo
from fastgrpo.rollout.policy_version import StaleRolloutError
from fastgrpo.runlog import read_run_log

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")


class Sampler:
    """A `rollout_func` of random tokens that says of its weights what `version` makes of the present step."""

    def __init__(self, version: Any = None, **fields: Any) -> None:
        self.version, self.fields, self.fails = version, fields, False

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("out of service")
        generator = torch.Generator().manual_seed(trainer.state.global_step)
        completions = self.completions = torch.randint(3, 45, (len(prompts), 4), generator=generator).tolist()
        version = {} if self.version is None else {"policy_version": self.version(trainer.state.global_step)}
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(row) for row in completions],
            **self.fields,
            **version,
        }


class Engine:
    """Stands for TRL's vLLM engine."""

    def __init__(self) -> None:
        self.syncs, self.fails = 0, False

    def sync_weights(self) -> None:
        if self.fails:
            raise RuntimeError("connection lost")
        self.syncs += 1

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        rows = [[5, 6 + index % 7, 1] for index, _ in enumerate(prompts)]
        return prompts, rows, [[[-1.0]] * len(row) for row in rows], None


def with_engine(folder: Path, **settings: Any) -> GRPOTrainer:
    trainer = tiny_trainer(folder, **settings)
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Engine(), -1
    return trainer


def steps(trainer: GRPOTrainer) -> list[tuple[Any, Any, Any]]:
    """Version, lag and staleness of the steps that were logged."""
    keys = ("rollout/policy_version", "rollout/policy_lag", "rollout/stale")
    return [tuple(map(line.get, keys)) for line in trainer.state.log_history if "reward" in line or "loss" in line]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "weights" in r.getMessage()]


def test_in_this_process_every_batch_is_current_and_the_run_log_says_so(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, max_steps=3)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train()
        assert steps(trainer) == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
        for batch in trainer._buffered_inputs:
            assert batch["policy_version"].tolist() == [2] * 4 and batch["policy_version"].device.type == "cpu"
    assert not any("policy_version" in batch for batch in trainer._buffered_inputs)
    lines = [(line["policy_version"], line["policy_lag"], line["stale"]) for line in read_run_log(tmp_path).steps]
    assert lines == [(0, 0, False), (1, 0, False), (2, 0, False)]
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("config", "lags"),
    [
        ({"num_iterations": 2}, [0, 1, 0, 1]),
        ({"steps_per_generation": 4}, [0, 1, 0, 1]),
        ({"steps_per_generation": 1}, [0, 0, 0, 0]),
        ({"steps_per_generation": 3}, [0, 1, 1, 0]),
        ({"steps_per_generation": 3, "num_iterations": 2, "gradient_accumulation_steps": 4}, [0, 1, 1, 0]),
        # An epoch of three micro-batches, whose last step has only one.
        ({"steps_per_generation": 1, "train_dataset": Dataset.from_dict({"prompt": PROMPTS[:3]})}, [0, 0, 0, 0]),
        ({"steps_per_generation": 3, "train_dataset": Dataset.from_dict({"prompt": PROMPTS[:3]})}, [0, 1, 0, 1]),
    ],
)
def test_replayed_batches_lag_as_far_as_the_algorithm_says(config, lags, tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, max_steps=4, rollout_func=Sampler(lambda step: step), **config)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train()
    assert [lag for _, lag, _ in steps(trainer)] == lags
    assert not any(stale for *_, stale in steps(trainer))


def test_an_entry_of_several_steps_shows_the_worst_of_them(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=4, logging_steps=2, num_iterations=2)
    with fastgrpo.patch(trainer):
        trainer.train()
    assert steps(trainer) == [(0, 1, 0), (2, 1, 0)]


def test_a_rollout_func_that_says_nothing_is_unknown(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, max_steps=2, rollout_func=Sampler())
    with fastgrpo.patch(trainer):
        trainer.train()
    assert steps(trainer) == [(None, None, None)] * 2
    assert [line["stale"] for line in read_run_log(tmp_path).steps] == [None, None]
    (warning,) = warnings_of(caplog)
    assert "nobody knows which weights" in warning and "returning 'policy_version'" in warning


def test_a_late_batch_is_reported_with_both_versions(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, max_steps=3, rollout_func=Sampler(lambda step: [max(step - 1, 0)] * 7 + [step]))
    with fastgrpo.patch(trainer):
        trainer.train()
    assert steps(trainer) == [(0, 0, 0), (0, 1, 1), (1, 1, 1)]
    first, second = warnings_of(caplog)
    assert "used at optimizer step 1 that was sampled with the weights of optimizer step 0: a lag of 1" in first
    assert "the algorithm allows 0 (num_iterations=1, steps_per_generation=2, gradient_accumulation_steps=2)" in first
    assert "step 2 that was sampled with the weights of optimizer step 1" in second


def test_rows_keep_their_own_version_through_the_shuffle(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, rollout_func=Sampler(lambda _: list(range(-7, 1))))
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="ignore")):
        trainer.train()
        rows = [
            (version, row)
            for batch in trainer._buffered_inputs
            for version, row in zip(batch["policy_version"].tolist(), batch["completion_ids"].tolist(), strict=True)
        ]
    completions = trainer.rollout_func.completions
    assert dict(rows) == dict(zip(range(-7, 1), completions, strict=True))


@pytest.mark.parametrize("version", [lambda step: 0, None])
def test_with_error_nothing_is_updated_and_training_can_go_on(version, tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=3, rollout_func=Sampler(version))
    seen = []

    class Parameters(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(trained_parameters(trainer))

    trainer.add_callback(Parameters())
    before = trained_parameters(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        with pytest.raises(StaleRolloutError, match="optimizer step"):
            trainer.train()
        assert trainer.state.global_step == len(seen) == (0 if version is None else 1)
        expected = seen[-1] if seen else before
        assert all(torch.equal(value, expected[name]) for name, value in trained_parameters(trainer).items())
        trainer.rollout_func.version = lambda step: step
        trainer.train()
    assert trainer.state.global_step == 3


def test_with_ignore_nothing_is_said_but_all_is_logged(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, max_steps=2, rollout_func=Sampler(lambda step: 0))
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="ignore")):
        trainer.train()
    assert not warnings_of(caplog) and steps(trainer) == [(0, 0, 0), (0, 1, 1)]


def test_a_sampler_that_takes_no_weights_is_stale_from_the_first_batch_on(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, max_steps=3, rollout_func=Sampler(lambda step: 0, stale=True))
    with fastgrpo.patch(trainer):
        trainer.train()
    assert steps(trainer) == [(0, 0, 1), (0, 1, 1), (0, 2, 1)]
    assert [line["stale"] for line in read_run_log(tmp_path).steps] == [True] * 3
    assert len(warnings_of(caplog)) == 2 and all("cannot take new weights" in text for text in warnings_of(caplog))


def test_a_sampler_that_takes_no_weights_is_as_old_in_a_later_train(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2, rollout_func=Sampler(lambda step: 0, stale=True))
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="ignore")):
        for begin in (0, -2, -4):
            trainer.train()
            assert steps(trainer) == [(begin, -begin, 1), (begin, 1 - begin, 1)]
        trainer.rollout_func = Sampler(lambda step: 0, stale=True)  # another file: its 0 is of this train()
        trainer.train()
        assert steps(trainer) == [(0, 0, 1), (0, 1, 1)]
        trainer.rollout_func = Sampler(lambda step: step)
        trainer.train()
    assert steps(trainer) == [(0, 0, 0), (1, 0, 0)]


def test_with_error_a_sampler_that_takes_no_weights_gets_no_further_by_training_again(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=3, rollout_func=Sampler(lambda step: 0, stale=True))
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        for done in (1, 0, 0):
            with pytest.raises(StaleRolloutError, match="a lag of 1"):
                trainer.train()
            assert trainer.state.global_step == done


def test_a_row_of_weights_that_are_not_there_yet_is_an_error(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, rollout_func=Sampler(lambda step: [step] * 7 + [step + 5]))
    late = pytest.raises(StaleRolloutError, match="the weights of optimizer step 5: a lag of -5")
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")), late:
        trainer.train()
    with fastgrpo.patch(trainer):
        trainer.train()
    assert steps(trainer) == [(0, -5, 1)]


def test_an_entry_of_several_steps_does_not_hide_weights_that_are_not_there_yet(tmp_path):
    versions = Sampler(lambda step: [step] * 8 if step != 1 else [step + 3] * 8)
    trainer = tiny_trainer(tmp_path, max_steps=3, logging_steps=3, rollout_func=versions)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="ignore")):
        trainer.train()
    assert steps(trainer) == [(0, -3, 1)]
    assert read_run_log(tmp_path).steps[0]["policy_lag"] == -3


class OwnTurn(GRPOTrainer):
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return super()._generate_single_turn(*args, **kwargs)


class SaysVersion(OwnTurn):
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        batch["policy_version"] = torch.full((len(inputs),), self.state.global_step)
        return batch


@pytest.mark.parametrize(("trainer_class", "version"), [(OwnTurn, None), (SaysVersion, 0)])
def test_a_subclass_with_an_own_sampler_is_unknown_unless_its_batches_say(trainer_class, version, tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, trainer_class=trainer_class)
    with fastgrpo.patch(trainer):
        trainer.train()
    assert steps(trainer)[0][0] == version


def test_an_engine_has_the_version_of_its_last_sync(tmp_path):
    trainer = with_engine(tmp_path, max_steps=3, steps_per_generation=4)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train()
        assert steps(trainer) == [(0, 0, 0), (0, 1, 0), (2, 0, 0)]
    assert trainer.vllm_generation.syncs == 2
    assert [line["time/sync"] > 0 for line in trainer.state.log_history if "reward" in line or "loss" in line] == [
        1,
        0,
        1,
    ]
    assert read_run_log(tmp_path).steps[0]["time_sync"] > 0
    assert set(vars(trainer.vllm_generation)) == {"syncs", "fails"}


def test_an_engine_that_did_not_get_the_weights_is_late(tmp_path, caplog):
    class Forgets(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer._last_loaded_step = state.global_step  # TRL believes that it is up to date

    trainer = with_engine(tmp_path, max_steps=2)
    with fastgrpo.patch(trainer):
        trainer.evaluate(Dataset.from_dict({"prompt": PROMPTS[:1] * 8}))
        trainer.add_callback(Forgets())
        trainer.train()
    assert trainer.vllm_generation.syncs == 1
    assert steps(trainer) == [(0, 0, 0), (0, 1, 1)]
    assert "vLLM did not get the present weights" in warnings_of(caplog)[0]


def test_a_sync_that_somebody_else_asks_for_counts(tmp_path):
    class Syncs(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = state.global_step

    trainer = with_engine(tmp_path, max_steps=2)
    trainer.add_callback(Syncs())
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train()
    assert steps(trainer) == [(0, 0, 0), (1, 0, 0)]


def test_weights_that_stopped_on_their_way_are_of_no_version(tmp_path):
    trainer = with_engine(tmp_path, max_steps=2)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.vllm_generation.fails = True
        with pytest.raises(RuntimeError, match="connection lost"):
            trainer.train()
        trainer._last_loaded_step = 0  # of a caller who thinks it went through
        with pytest.raises(StaleRolloutError, match="nobody knows"):
            trainer.train()
        trainer.vllm_generation.fails, trainer._last_loaded_step = False, -1
        trainer.train()
    assert steps(trainer) == [(0, 0, 0), (1, 0, 0)]


def test_a_second_train_counts_from_0_and_knows_what_is_older(tmp_path, caplog):
    # Its first three micro-batches are the rest of the generation batch of the first train().
    trainer = tiny_trainer(
        tmp_path, max_steps=3, num_iterations=2, steps_per_generation=4, gradient_accumulation_steps=1
    )
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train()
        assert steps(trainer) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
        trainer.args.max_steps = 6
        trainer.train()
    assert steps(trainer) == [(-3, lag, 0) for lag in range(3, 8)] + [(5, 0, 0)]


def test_an_engine_that_trl_does_not_sync_in_a_second_train_is_late(tmp_path, caplog):
    # TRL compares steps, and step 0 of the second train() equals step 0 of the first.
    trainer = with_engine(tmp_path, max_steps=1)
    with fastgrpo.patch(trainer):
        trainer.train()
        trainer.train()
    assert trainer.vllm_generation.syncs == 1
    assert steps(trainer) == [(-1, 1, 1)]
    assert "weights of 1 optimizer step before this train() began" in warnings_of(caplog)[0]


def test_a_resumed_run_goes_on_with_the_checkpoint_s_step(tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "num_iterations": 2}
    with fastgrpo.patch(tiny_trainer(tmp_path, **settings), fastgrpo.Options(run_log=False)) as handle:
        handle.trainer.train()
    trainer = tiny_trainer(tmp_path, **{**settings, "max_steps": 4})
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps(trainer)[2:] == [(2, 0, 0), (2, 1, 0)]


def test_a_short_step_at_the_end_of_an_epoch_inside_a_replayed_batch_is_expected(tmp_path):
    # Resumed, generations no longer begin with the epoch: one is used by the end of a step, a step of two, and a third one.
    settings = {
        "steps_per_generation": 6,
        "gradient_accumulation_steps": 4,
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS * 3}),
        "save_strategy": "steps",
        "save_steps": 2,
    }
    tiny_trainer(tmp_path, **settings, rollout_func=Sampler(lambda step: step), max_steps=2).train()
    trainer = tiny_trainer(tmp_path, **settings, rollout_func=Sampler(lambda step: step), max_steps=6)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [lag for _, lag, _ in steps(trainer)[2:]] == [0, 1, 1, 2]


def test_what_was_sampled_before_a_checkpoint_was_loaded_is_unknown(tmp_path):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "num_iterations": 4}
    trainer = tiny_trainer(tmp_path, **settings)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train()
        trainer.args.max_steps = 2
        with pytest.raises(StaleRolloutError, match="before a checkpoint was loaded"):
            trainer.train(resume_from_checkpoint=True)


def test_what_was_sampled_before_the_best_checkpoint_came_back_is_unknown(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        max_steps=2,
        num_iterations=4,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2] * 4}),
        rollout_func=Sampler(lambda step: step),
        **{f"{kind}_strategy": "steps" for kind in ("eval", "save")},
        **{f"{kind}_steps": 1 for kind in ("eval", "save")},
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
    )
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train()
        with pytest.raises(StaleRolloutError, match="before a checkpoint was loaded"):
            trainer.train()


def test_weights_that_a_callback_changes_between_two_steps_are_those_of_the_next_one(tmp_path):
    class Shrinks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for parameter in trained_parameters(trainer):
                    trainer.model.get_parameter(parameter).mul_(0.5)

    trainer = tiny_trainer(tmp_path, max_steps=2)
    trainer.add_callback(Shrinks())
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.train()
    assert steps(trainer) == [(0, 0, 0), (1, 0, 0)]


def test_patched_in_the_middle_of_a_step_that_step_has_no_times_and_is_unknown(tmp_path):
    class Patches(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                fastgrpo.patch(trainer)

    trainer = tiny_trainer(tmp_path, max_steps=3)
    trainer.add_callback(Patches())
    trainer.train()
    first, second, third = (line for line in trainer.state.log_history if "loss" in line)
    assert not any(key.startswith(OURS) for line in (first, second) for key in line)
    assert third["rollout/policy_version"] == 2 and 0 < third["time/update"] < 100


def test_evaluations_expect_the_present_weights_and_are_no_steps(tmp_path, caplog):
    trainer = tiny_trainer(
        tmp_path,
        max_steps=2,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        rollout_func=Sampler(lambda step: 0),
        num_iterations=2,
    )
    with fastgrpo.patch(trainer):
        trainer.evaluate()
        assert not warnings_of(caplog)
        trainer.train()
    assert steps(trainer)[-2:] == [(0, 0, 0), (0, 1, 0)]
    assert "an evaluation batch is judged at optimizer step 1" in warnings_of(caplog)[0]
    assert not any(key.startswith("eval_rollout") for line in trainer.state.log_history for key in line)


def test_a_rollout_func_that_fails_leaves_a_trainer_that_goes_on(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2, rollout_func=Sampler(lambda step: step))
    before = trained_parameters(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")):
        trainer.rollout_func.fails = True
        with pytest.raises(RuntimeError, match="out of service"):
            trainer.train()
        assert all(torch.equal(value, before[name]) for name, value in trained_parameters(trainer).items())
        trainer.rollout_func.fails = False
        trainer.train()
    assert steps(trainer) == [(0, 0, 0), (1, 0, 0)]


def test_a_version_of_the_wrong_length_is_refused_before_the_update(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, rollout_func=Sampler(lambda step: [0]))
    with fastgrpo.patch(trainer), pytest.raises(ValueError, match=r"policy_version=\[0\] for 8 completions"):
        trainer.train()


def test_unpatching_in_the_middle_leaves_no_key_behind(tmp_path):
    class Unpatches(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                fastgrpo.unpatch(trainer)

    trainer = tiny_trainer(tmp_path, max_steps=3)
    untouched = set(trainer.__dict__)
    fastgrpo.patch(trainer)
    trainer.add_callback(Unpatches())
    trainer.train()
    ours = [any(key.startswith(OURS) for key in line) for line in trainer.state.log_history if "loss" in line]
    assert ours == [True, False, False]
    assert not {name for name in set(trainer.__dict__) - untouched if "generate" in name or "prepare" in name}


def test_what_stood_on_the_trainer_before_is_called_and_given_back(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    generate, calls = trainer._generate, []
    mine = trainer._generate = lambda prompts: calls.append(len(prompts)) or generate(prompts)
    with fastgrpo.patch(trainer):
        trainer.train()
    assert calls == [8] and trainer.__dict__["_generate"] is mine


@pytest.mark.parametrize("value", ["stop", None, True])
def test_on_stale_is_one_of_three_words(value):
    with pytest.raises(ValueError, match="'warn', 'error', 'ignore'"):
        fastgrpo.Options(on_stale=value)
