"""Old log-probs that are the loss's own are not computed twice, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from sampler import SampledTrainer, policy_forwards
from tiny import PROMPTS, tiny_model, tiny_trainer
from transformers import TrainerCallback
from trl import GRPOTrainer
from twins import assert_same_metrics, assert_same_parameters, assert_twins, run, trained_parameters, without_ours

import fastgrpo
from fastgrpo.trl.onpolicy import SamplerTally, StepWindow

SAMPLED = {"trainer_class": SampledTrainer, "max_steps": 2}


def trained(
    folder: Path, patched: bool, options: dict[str, Any] | None = None, **settings: Any
) -> tuple[GRPOTrainer, dict[str, torch.Tensor], list[tuple[bool, bool]]]:
    """A trainer after training, its parameters before, and the policy's forwards."""
    trainer = tiny_trainer(folder, **settings)
    before = trained_parameters(trainer)
    if patched:
        fastgrpo.patch(trainer, fastgrpo.Options(**(options or {})))
    with policy_forwards(trainer) as forwards:
        trainer.train()
    return trainer, before, forwards


def compared(folder: Path, options: dict[str, Any] | None = None, **settings: Any) -> tuple[float, float]:
    """Policy forwards over loss forwards, stock and patched, of twins that were found equal."""
    stock, before, stock_forwards = trained(folder, False, **settings)
    patched, _, patched_forwards = trained(folder, True, options, **settings)
    assert_twins(stock, patched, before)
    if getattr(stock, "use_vllm", False):
        name = "sampling/importance_sampling_ratio/mean"
        means = [line[name] for line in stock.state.log_history if name in line]
        assert len(set(means)) == len(means) > 1
    return tuple(len(seen) / sum(gradient for _, gradient in seen) for seen in (stock_forwards, patched_forwards))


ALIGNED = {
    "sequence_mask": {},
    "sequence_truncate": {"vllm_importance_sampling_mode": "sequence_truncate", "lora": False},
    "token_mask": {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.2},
    "token_truncate": {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
        "vllm_importance_sampling_clip_min": 0.9,
        "lora": False,
    },
    "two generations a step": {"steps_per_generation": 1},
    "a replay inside the step": {"steps_per_generation": 1, "num_iterations": 2},
    "reference by disabled adapter": {"beta": 0.04},
    "vespo, off-policy mask": {
        "loss_type": "vespo",
        "vllm_importance_sampling_mode": "token_mask",
        "off_policy_mask_threshold": 0.01,
    },
}


@pytest.mark.parametrize("case", ALIGNED)
def test_with_a_sampler_s_correction_the_policy_runs_once_a_micro_batch(case, tmp_path):
    stock, patched = compared(tmp_path, **SAMPLED, **ALIGNED[case])
    # The reference by disabled adapters is a forward of the same model.
    others = 1 if "beta" in ALIGNED[case] else 0
    reused = 1 / ALIGNED[case].get("num_iterations", 1)
    assert (stock, patched) == (1 + reused + others, 1 + others)


MISALIGNED = {
    "generation outlives the step": {"steps_per_generation": 4},
    "replayed after the step": {"num_iterations": 2, "beta": 0.04},
}


@pytest.mark.parametrize("case", MISALIGNED)
def test_where_the_policy_moves_before_a_batch_is_used_up_the_pass_stays(case, tmp_path):
    stock, patched = compared(tmp_path, trainer_class=SampledTrainer, max_steps=4, **MISALIGNED[case])
    assert stock == patched > 1


def test_only_batches_that_cross_a_step_need_the_pass(tmp_path):
    """Six micro-batches a step, four a generation: the first and the third batch of three lie inside a step."""
    stock, patched = compared(
        tmp_path,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
        per_device_train_batch_size=2,
        num_generations=2,
        steps_per_generation=4,
        gradient_accumulation_steps=6,
        max_steps=2,
    )
    assert stock == 2 and patched == 1 + 1 / 3


def rollout_with_feedback(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
    _, completions, logprobs, _ = trainer.vllm_generation.generate(prompt_ids)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completions,
        "logprobs": [[entry[0] for entry in row] for row in logprobs],
        "env_mask": [[int(position % 4 != 1) for position in range(len(row))] for row in completions],
    }


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("mode", ["sequence_mask", "token_mask"])
def test_tokens_of_an_environment_count_for_no_ratio(mode, tmp_path):
    settings = {"rollout_func": rollout_with_feedback, "vllm_importance_sampling_mode": mode}
    assert compared(tmp_path, **SAMPLED, **settings) == (2, 1)


def test_rows_left_out_have_a_ratio_of_one_and_are_in_no_metric(tmp_path):
    def few(completions: list[str], **_: Any) -> list[float]:
        return [1.0 if "a" in text else 0.0 for text in completions]

    settings = {**SAMPLED, "reward": few, "vllm_importance_sampling_mode": "token_truncate"}
    stock, before, _ = trained(tmp_path, False, **settings)
    patched, _, _ = trained(tmp_path, True, {"skip_zero_advantage": True}, **settings)
    for ours, theirs in zip(patched.state.log_history, stock.state.log_history, strict=True):
        assert without_ours(ours).keys() == theirs.keys()
        for key in theirs.keys() & {"loss", "grad_norm"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6)
    assert_same_parameters(stock, patched, before)


@pytest.mark.parametrize("sampled", [True, False])
def test_an_evaluation_scores_once_before_training_and_within(sampled, tmp_path):
    """Without a sampler, TRL makes the pass in evaluations too where `num_iterations` is above 1."""
    settings: dict[str, Any] = {"trainer_class": SampledTrainer} if sampled else {"num_iterations": 2}
    evaluations, counts, histories = [], [], []
    for patched in (False, True):
        trainer = tiny_trainer(
            tmp_path,
            eval_dataset=Dataset.from_dict({"prompt": ["1+1=", "a"]}),
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=1,
            max_steps=2,
            **settings,
        )
        if patched:
            fastgrpo.patch(trainer)
        with policy_forwards(trainer) as forwards:
            torch.manual_seed(0)
            evaluations.append(trainer.evaluate())
            counts.append(len(forwards))
            trainer.train()
        histories.append(trainer.state.log_history)
    assert_same_metrics([evaluations[0]], [evaluations[1]])
    assert_same_metrics(*histories)
    assert any("eval_loss" in line for line in histories[0])
    assert counts[0] == 2 * counts[1]


class Interrupting(TrainerCallback):
    """Ctrl-C in the middle of the second step, once."""

    def __init__(self) -> None:
        self.done = False

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == 1 and not self.done:
            self.done = True
            raise KeyboardInterrupt


def test_after_an_interruption_amid_a_step_the_rest_of_the_batch_is_scored_as_trl_does(tmp_path):
    """From then on every step uses the last micro-batch of a batch that was generated before the step."""
    results = []
    for patched in (False, True):
        # A loss whose rows stay in TRL's micro-batches: others have metrics at the end of the step only.
        trainer = tiny_trainer(tmp_path, loss_type="grpo", **SAMPLED)
        before = trained_parameters(trainer)
        if patched:
            fastgrpo.patch(trainer)
        trainer.add_callback(Interrupting())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        results.append(trainer)
    assert_twins(*results, before)


class Unpatching(TrainerCallback):
    """Takes the patch back in the middle of a step, where a micro-batch is left without a ratio."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == 1:
            fastgrpo.unpatch(self.trainer)


@pytest.mark.filterwarnings("error:fastgrpo.unpatch")
def test_a_patch_may_be_taken_back_amid_a_step_and_leaves_nothing(tmp_path):
    settings = {**SAMPLED, "loss_type": "grpo"}  # whose rows stay in TRL's micro-batches, and its metrics with them
    stock, _ = run(tmp_path, patched=False, **settings)
    trainer = tiny_trainer(tmp_path, **settings)
    attributes = set(trainer.__dict__)
    # With shared prompts, rows of the step would stay in the order they came in, and means of micro-batches differ.
    fastgrpo.patch(trainer, fastgrpo.Options(share_prefix=False))
    trainer.add_callback(Unpatching(trainer))
    trainer.train()
    assert not {name for name in set(trainer.__dict__) - attributes if name.startswith(("_compute", "_gen", "_get"))}
    stock_metrics, metrics = ([dict(line) for line in t.state.log_history] for t in (stock, trainer))
    for line in (stock_metrics[1], metrics[1]):  # the batch whose sums nobody finished
        for name in [name for name in line if name.startswith("sampling/")]:
            del line[name]
    assert_same_metrics(stock_metrics, metrics)
    for name, value in trained_parameters(trainer).items():
        assert torch.allclose(value, trained_parameters(stock)[name], atol=1e-5), name


def test_the_reference_is_told_from_the_policy_by_its_model_and_its_adapters(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=SampledTrainer)
    old = fastgrpo.patch(trainer).old
    asked: list[bool] = []

    def generate(_: Any) -> dict[str, Any]:
        with torch.no_grad():
            with trainer.model.disable_adapter():
                asked.append(old.leave_out(trainer.model))
            asked.append(old.leave_out(tiny_model()))
            asked.extend(old.leave_out(trainer.model) for _ in range(2))
        assert not trainer.vllm_importance_sampling_correction
        return {"old_per_token_logps": None}

    assert old.generate(generate, None) == {}
    assert asked == [False, False, True, False] and trainer.vllm_importance_sampling_correction
    with torch.no_grad():
        assert not old.leave_out(trainer.model)


class ReadsOldLogProbs(SampledTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        assert batch["old_per_token_logps"].abs().sum() > 0
        return batch


def test_it_is_said_and_so_is_what_dropout_makes_of_it(tmp_path, caplog):
    assert "old log-probs" not in fastgrpo.backends()
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2)
    trainer = tiny_trainer(tmp_path, lora=lora, disable_dropout=False, trainer_class=SampledTrainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(packing="none")):
        assert "dropout is 0.2: the forward for old log-probs, which drew random numbers" in caplog.text
        assert fastgrpo.backends()["old log-probs"].reason == ""
    with fastgrpo.patch(tiny_trainer(tmp_path, trainer_class=ReadsOldLogProbs)):
        reason = "ReadsOldLogProbs brings its own _generate_and_score_completions, which may read old log-probs"
        assert fastgrpo.backends()["old log-probs"].reason == reason


def test_a_subclass_that_may_read_old_log_probs_gets_them(tmp_path):
    assert compared(tmp_path, max_steps=2, trainer_class=ReadsOldLogProbs) == (2, 2)


def test_micro_batches_of_unequal_size_and_none_at_all_make_the_metrics_of_one_batch(tmp_path):
    trainer = tiny_trainer(tmp_path)
    generator = torch.Generator().manual_seed(0)
    ratio, gap = torch.rand(6, 5, generator=generator), torch.rand(6, 5, generator=generator)
    gap[0, 0] = float("nan")
    mask = torch.rand(6, 5, generator=generator) > 0.4
    mask[0, 0], mask[4:] = True, False
    computed = torch.ones(6, 1, dtype=torch.bool)
    for rows in ([slice(0, 6)], [slice(0, 1), slice(1, 4), slice(4, 6), slice(0, 0)]):
        tally = SamplerTally(len(rows))
        for part in rows:
            tally.add(ratio[part], gap[part], mask[part], computed[part])
        assert tally.left == 0
        tally.log(trainer)
    there = gap[mask & ~gap.isnan()]
    expected = [there.mean(), there.max(), ratio[mask].min(), ratio[mask].mean(), ratio[mask].max()]
    metrics = list(trainer._metrics["train"].values())
    for at in (0, 1):
        assert [values[at] for values in metrics] == pytest.approx([value.item() for value in expected])
    nothing = SamplerTally(1)
    nothing.add(ratio[:, :1], gap, torch.zeros_like(mask), torch.zeros_like(computed))
    nothing.log(trainer)
    assert [values[2] for values in metrics] == [0.0] * 5


def test_the_window_is_unknown_to_a_patch_amid_a_training(tmp_path):
    trainer = tiny_trainer(tmp_path)
    assert StepWindow(trainer).left() == 2
    trainer.is_in_train = True
    window = StepWindow(trainer)
    assert window.left() == 0
    trainer.state.global_step += 1
    assert window.left() == 2
    window.begin()
    assert window.left() == 1
