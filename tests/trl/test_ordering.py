"""Order of rows: a group's completions in one micro-batch of an optimizer step, and everything else as TRL has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_trainer
from transformers import TrainerCallback
from trl import GRPOTrainer
from twins import assert_same_metrics, assert_same_parameters, assert_twins, trained_parameters

import fastgrpo
from fastgrpo.trl.ordering import together


class Seen(NamedTuple):
    """A micro-batch as a loss with a gradient gets it."""

    step: int
    rows: list[tuple[float, ...]]
    """Prompt, completion and advantage."""
    tokens: int
    """With each prompt once."""


def seen(trainer: GRPOTrainer, inputs: dict[str, Any]) -> Seen:
    rows = torch.cat([inputs["prompt_ids"], inputs["completion_ids"], inputs["advantages"][:, None]], 1).tolist()
    prompts = {
        tuple(ids[mask.bool()].tolist()) for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
    }
    tokens = sum(map(len, prompts)) + int(inputs["completion_mask"].sum())
    return Seen(trainer.state.global_step, [tuple(row) for row in rows], tokens)


def steps(batches: list[Seen]) -> dict[int, list[tuple[float, ...]]]:
    """Rows of each optimizer step, sorted."""
    found: dict[int, list] = {}
    for batch in batches:
        found.setdefault(batch.step, []).extend(batch.rows)
    return {step: sorted(rows) for step, rows in found.items()}


def trained(
    folder: Path, options: dict[str, Any] | None, monkeypatch, callback: TrainerCallback | None = None, **settings
) -> tuple[GRPOTrainer, dict[str, torch.Tensor], list[Seen], list[int]]:
    """A trainer after training, its parameters before, what losses with a gradient got, and what its forwards computed."""
    trainer = tiny_trainer(folder, **settings)
    if callback is not None:
        trainer.add_callback(callback)
    before, batches, tokens = trained_parameters(trainer), [], []
    if options is not None:
        fastgrpo.patch(trainer, fastgrpo.Options(**options))
    own = GRPOTrainer._compute_loss

    def note(trainer, model, inputs):
        if torch.is_grad_enabled():
            batches.append(seen(trainer, inputs))
        return own(trainer, model, inputs)

    def count(module, args, kwargs):
        if torch.is_grad_enabled() and trainer.model.training:
            tokens.append(kwargs["input_ids"].numel())

    hook = trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    with monkeypatch.context() as patched:
        patched.setattr(GRPOTrainer, "_compute_loss", note)
        trainer.train()
    hook.remove()
    return trainer, before, batches, tokens


CASES = {
    "dapo": {},
    "cispo, beta": {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.04},
    "vespo, full": {"loss_type": "vespo", "lora": False},
    "two steps a generation": {"steps_per_generation": 4, "per_device_train_batch_size": 2},
    "replayed, two steps a generation": {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4},
    "two generations a step": {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
    "generations and steps that overlap": {
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 3,
        "max_steps": 4,
    },
    "groups larger than a micro-batch": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
    "sequence level, truncated completions masked": {
        "importance_sampling_level": "sequence",
        "mask_truncated_completions": True,
        "gradient_accumulation_steps": 4,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_groups_come_together_and_training_is_stock_s(case, tmp_path, monkeypatch):
    settings = {"max_steps": 2, **CASES[case]}
    stock, before, as_trl, _ = trained(tmp_path, None, monkeypatch, **settings)
    ours, _, batches, tokens = trained(tmp_path, {}, monkeypatch, **settings)
    assert_twins(stock, ours, before)
    assert steps(batches) == steps(as_trl)
    assert [len(batch.rows) for batch in batches] == [len(batch.rows) for batch in as_trl]
    assert [b["completion_ids"].tolist() for b in stock._buffered_inputs] == [
        b["completion_ids"].tolist() for b in ours._buffered_inputs
    ]
    assert tokens == [batch.tokens for batch in batches]
    assert sum(tokens) < 0.97 * sum(batch.tokens for batch in as_trl), (tokens, as_trl)


def test_rows_without_an_advantage_stay_out_in_any_order(tmp_path, monkeypatch):
    settings = {"max_steps": 3, "reward": few}
    stock, before, as_trl, _ = trained(tmp_path, None, monkeypatch, **settings)
    ours, _, batches, tokens = trained(tmp_path, {"skip_zero_advantage": True}, monkeypatch, **settings)
    assert_same_parameters(stock, ours, before)
    assert steps(batches) == steps(as_trl)
    assert sum(tokens) < sum(batch.tokens for batch in batches) < sum(batch.tokens for batch in as_trl)


def few(completions: list[str], **_) -> list[float]:
    """Differs inside some groups only."""
    return [1.0 if "a" in text else 0.0 for text in completions]


class Unpatches(TrainerCallback):
    """Takes the patch back in the middle of the second step."""

    def __init__(self) -> None:
        self.trainer: list[GRPOTrainer] = []

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            for handle in list(sys.modules["fastgrpo.trl.patch"]._active):
                handle.unpatch()


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}])
def test_unpatched_in_the_middle_of_a_step_it_still_has_every_row_once(settings, tmp_path, monkeypatch):
    settings |= {"max_steps": 3, "gradient_accumulation_steps": 4}
    stock, before, as_trl, _ = trained(tmp_path, None, monkeypatch, **settings)
    ours, _, batches, _ = trained(tmp_path, {}, monkeypatch, Unpatches(), **settings)
    assert "_compute_loss" not in ours.__dict__
    assert steps(batches) == steps(as_trl)
    assert_same_parameters(stock, ours, before)
    assert_same_metrics(*([line for line in t.state.log_history if line.get("step") != 2] for t in (stock, ours)))
    # Means over the micro-batches that there were.
    theirs, mine = (t.state.log_history[1] for t in (stock, ours))
    assert mine["entropy"] == pytest.approx(theirs["entropy"], rel=0.1)
    assert mine.keys() == theirs.keys()


class Interrupts(TrainerCallback):
    """Ends the training in the middle of its second step."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise KeyboardInterrupt


def test_after_an_interruption_it_goes_on_as_stock_does(tmp_path):
    results = []
    for options in (None, {}):
        trainer = tiny_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=4)
        if options is not None:
            fastgrpo.patch(trainer, fastgrpo.Options(**options))
        interrupt = Interrupts()
        trainer.add_callback(interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.remove_callback(interrupt)
        before = trained_parameters(trainer)
        trainer.train()
        results.append(trainer)
    assert_twins(*results, before)


class Carries(GRPOTrainer):
    """Its micro-batches have something of their own."""

    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions(inputs) | {"own": torch.arange(8)}


def test_what_is_unknown_stays_with_its_row(tmp_path, monkeypatch, caplog):
    settings = {"max_steps": 2, "trainer_class": Carries}
    stock, before, as_trl, _ = trained(tmp_path, None, monkeypatch, **settings)
    ours, _, batches, _ = trained(tmp_path, {}, monkeypatch, **settings)
    assert_twins(stock, ours, before)
    assert batches == as_trl
    assert caplog.text.count("rows stay in the micro-batches that TRL put them in: micro-batches carry own") == 1


class Selects(TrainerCallback):
    """After the first step the loss counts only some tokens of a micro-batch."""

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.top_entropy_quantile = 0.5


def test_rows_stay_from_when_a_callback_lets_the_loss_depend_on_it(tmp_path, caplog):
    results = []
    for options in (None, {}):
        trainer = tiny_trainer(tmp_path, max_steps=3, gradient_accumulation_steps=4)
        before = trained_parameters(trainer)
        if options is not None:
            fastgrpo.patch(trainer, fastgrpo.Options(**options))
        selects = Selects()
        selects.trainer = trainer
        trainer.add_callback(selects)
        trainer.train()
        results.append(trainer)
    assert_twins(*results, before)
    assert caplog.text.count("that TRL put them in: top_entropy_quantile compares the entropies") == 1


class OwnStep(GRPOTrainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, {}, "a micro-batch has one row"),
        ({"gradient_accumulation_steps": 1}, {}, "an optimizer step has all its rows in one micro-batch"),
        ({"loss_type": "grpo"}, {}, "loss_type='grpo' is a mean over the rows of a micro-batch"),
        ({"loss_type": "dr_grpo"}, {}, "loss_type='dr_grpo' is a mean"),
        ({"entropy_coef": 0.1}, {}, "the entropy bonus is a mean over the tokens of a micro-batch"),
        ({"top_entropy_quantile": 0.5}, {}, "top_entropy_quantile compares the entropies of a micro-batch"),
        ({"model": "qwen3 moe", "router_aux_loss_coef": 0.1}, {}, "the auxiliary loss is a mean"),
        ({"trainer_class": OwnStep}, {}, "OwnStep brings its own training_step"),
        ({}, {"share_prefix": False}, "prompts are not shared"),
        ({}, {"packing": "left"}, "prompts are not shared"),
    ],
)
def test_where_a_loss_or_nothing_depends_on_it_rows_stay(settings, options, reason, tmp_path):
    with fastgrpo.patch(tiny_trainer(tmp_path, **settings), fastgrpo.Options(**options)) as handle:
        assert handle.loss.order is None
        note = fastgrpo.backends()["order of rows"]
        assert note.implementation == "as TRL shuffles them" and note.reason.startswith(reason)


def test_backends_say_where_groups_come_together(tmp_path):
    with fastgrpo.patch(tiny_trainer(tmp_path)):
        note = fastgrpo.backends()["order of rows"]
        assert (note.implementation, note.reason) == ("groups together within an optimizer step", "")
    assert "order of rows" not in fastgrpo.backends()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=4, max_size=24), st.integers(2, 4))
def test_micro_batches_keep_their_sizes_and_have_every_row(rows, count):
    sizes = [len(rows) // count + (number < len(rows) % count) for number in range(count)]
    parts = together([(group,) * (group + 1) for group, _ in rows], [length for _, length in rows], sizes)
    assert [len(part) for part in parts] == sizes
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))


def test_groups_that_fit_are_whole_and_token_counts_are_near_each_other():
    prompts = [(1,), (2,), (3,), (4,)] * 4
    lengths = [100, 10, 1, 1] * 4
    heavy = together(prompts, lengths, [8, 8])[0]
    assert {prompts[row] for row in heavy} & {(1,), (2,)} in ({(1,)}, {(2,)})
    parts = together(prompts, lengths, [4] * 4)
    assert sorted(sorted({prompts[row] for row in part}) for part in parts) == [[(1,)], [(2,)], [(3,)], [(4,)]]
    first, second = together([(1,)] * 8, [1, 2, 3, 4, 5, 6, 7, 8], [4, 4])
    assert abs(sum(first) - sum(second)) <= 4
