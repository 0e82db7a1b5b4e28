"""`skip_zero_advantage`: fewer rows in the gradient forward, the same loss and gradients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import tiny_trainer
from tiny_images import vision_settings
from transformers import TrainerCallback
from trl import GRPOTrainer
from twins import assert_same_parameters, trained_parameters, without_ours

import fastgrpo
from fastgrpo.trl.skipping import Kept, kept_rows


def reward_few(completions: list[str], **_) -> list[float]:
    """Differs inside some groups only."""
    return [1.0 if "a" in text else 0.0 for text in completions]


def constant(completions: list[str], **_) -> list[float]:
    return [1.0] * len(completions)


def trained(
    tmp_path: Path, skip: bool | None, reward=reward_few, mini_batch_size=None, **settings
) -> tuple[GRPOTrainer, dict, list[int]]:
    """A trainer after training, its parameters before, and the tokens of every gradient forward."""
    trainer = tiny_trainer(tmp_path, **settings)
    trainer.reward_funcs = [reward]
    before, tokens = trained_parameters(trainer), []
    if skip is not None:
        fastgrpo.patch(trainer, fastgrpo.Options(skip_zero_advantage=skip, mini_batch_size=mini_batch_size))

    def count(module, args, kwargs):
        if torch.is_grad_enabled() and trainer.model.training:
            tokens.append(kwargs["input_ids"].numel())

    hook = trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    hook.remove()
    return trainer, before, tokens


SETTINGS = {
    "lora": {},
    "full": {"lora": False},
    "replayed batches": {"num_iterations": 2},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "vespo": {"loss_type": "vespo"},
    "truncated completions masked": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "groups larger than a micro-batch": {"per_device_train_batch_size": 2},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_losses_and_parameters_are_those_of_stock_training(case, tmp_path):
    stock, before, _ = trained(tmp_path, None, **SETTINGS[case])
    patched, _, _ = trained(tmp_path, True, **SETTINGS[case])
    assert list(stock._logs["completion"]) == list(patched._logs["completion"])
    for ours, theirs in zip(patched.state.log_history, stock.state.log_history, strict=True):
        assert without_ours(ours).keys() == theirs.keys()
        for key in theirs.keys() & {"loss", "reward", "grad_norm", "clip_ratio/region_mean"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
    assert_same_parameters(stock, patched, before)


class Pulls(TrainerCallback):
    """After the first step the loss pulls every row to the reference."""

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.beta = 0.5


def test_rows_are_computed_from_when_a_callback_gives_them_a_gradient(tmp_path, caplog):
    results = []
    for options in (None, fastgrpo.Options(skip_zero_advantage=True)):
        trainer = tiny_trainer(tmp_path, max_steps=3)
        trainer.reward_funcs = [reward_few]
        before = trained_parameters(trainer)
        if options is not None:
            fastgrpo.patch(trainer, options)
        pulls = Pulls()
        pulls.trainer = trainer
        trainer.add_callback(pulls)
        trainer.train()
        results.append(trainer)
    assert_same_parameters(*results, before)
    assert caplog.text.count("rows without an advantage are computed: beta=0.5 pulls every row") == 1


@pytest.mark.parametrize("options", [{}, {"mini_batch_size": 1}])
def test_rows_with_images_are_left_out_with_them(options, tmp_path):
    settings = {"num_generations": 2, "max_steps": 3, **vision_settings([0, 1, 3, 1, 3, 1])}
    stock, before, everything = trained(tmp_path, None, **settings)
    patched, _, less = trained(tmp_path, True, **settings, **options)
    for ours, theirs in zip(patched.state.log_history, stock.state.log_history, strict=True):
        for key in theirs.keys() & {"loss", "reward", "grad_norm"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
    assert_same_parameters(stock, patched, before)
    # Mini-batches run their forward twice.
    assert options or sum(less) < 0.9 * sum(everything)


@pytest.mark.parametrize(
    ("advantages", "kept"), [([1, 0, 0, 0], [0, 2]), ([0, 0, 0, 1], [3]), ([0, 0, 0, 0], [0, 2]), ([1, 1, 1, 1], None)]
)
def test_where_a_micro_batch_has_images_some_row_that_is_computed_has_one(advantages, kept):
    ones = torch.ones(4, 3, dtype=torch.int64)
    inputs = {"completion_mask": ones, "advantages": torch.tensor(advantages), "num_images": [0, 0, 3, 1]}
    found = kept_rows(inputs)
    assert (found if found is None else found.rows.tolist()) == kept


def test_rows_without_an_advantage_are_not_computed(tmp_path):
    _, _, everything = trained(tmp_path, False)
    _, _, less = trained(tmp_path, True)
    assert len(less) == len(everything)
    assert sum(less) < 0.9 * sum(everything)


def test_a_batch_without_any_advantage_gives_a_differentiable_zero(tmp_path):
    trainer, before, _ = trained(tmp_path, True, reward=constant)
    assert all(line["loss"] == 0 for line in trainer.state.log_history if "loss" in line)
    for name, value in trained_parameters(trainer).items():
        assert torch.equal(value, before[name])


def test_rows_left_out_get_the_old_log_probs_and_the_mean_entropy():
    kept = Kept(torch.tensor([0, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    ours = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    assert kept.spread_logprobs(ours, 3).tolist() == [[-1.0, -2.0], [3.0, 4.0], [-3.0, -4.0]]
    assert kept._replace(old_logprobs=None).spread_logprobs(ours, 3)[1].tolist() == [0.0, 0.0]
    mask = torch.tensor([[1, 1], [1, 0]])
    entropies = kept.spread_entropies(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), mask, 3)
    assert entropies.tolist() == [[1.0, 2.0], [3.0, 3.0], [6.0, 9.0]]


def test_evaluation_computes_every_row(tmp_path):
    losses = []
    for skip in (None, True):
        trainer = tiny_trainer(tmp_path, eval_dataset=Dataset.from_dict({"prompt": ["1+1=", "a"]}))
        trainer.reward_funcs = [reward_few]
        if skip:
            fastgrpo.patch(trainer, fastgrpo.Options(skip_zero_advantage=True))
        torch.manual_seed(0)
        metrics = trainer.evaluate()
        losses.append((metrics["eval_loss"], metrics["eval_entropy"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)


def test_unpatch_takes_the_loss_back(tmp_path):
    trainer = tiny_trainer(tmp_path)
    before = dict(trainer.__dict__)
    with fastgrpo.patch(trainer, fastgrpo.Options(skip_zero_advantage=True)):
        assert "_compute_loss" in trainer.__dict__
    assert trainer.__dict__ == before


class OwnLoss(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"beta": 0.04}, "beta=0.04 pulls every row to the reference"),
        ({"entropy_coef": 0.1}, "the entropy bonus has a gradient in every row"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile compares the entropies"),
        ({"model": "qwen3 moe", "router_aux_loss_coef": 0.1}, "the auxiliary loss counts the tokens of every row"),
        ({"trainer_class": OwnLoss}, "OwnLoss brings its own _compute_loss"),
    ],
)
def test_where_every_row_has_a_gradient_it_is_refused(settings, reason, tmp_path):
    trainer = tiny_trainer(tmp_path, **settings)
    before = dict(trainer.__dict__)
    with pytest.raises(
        ValueError, match=rf"skip_zero_advantage=True is not possible: {re.escape(reason)}.*leave it False"
    ):
        fastgrpo.patch(trainer, fastgrpo.Options(skip_zero_advantage=True))
    assert trainer.__dict__ == before
