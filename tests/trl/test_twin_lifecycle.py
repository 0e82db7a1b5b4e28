"""Patched equals stock over a trainer's whole life: checkpoints, exceptions, several trainers in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny import PROMPTS, many_letters, tiny_model, tiny_tokenizer, tiny_trainer
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOTrainer
from twins import TIMINGS, assert_same_metrics, assert_same_parameters, assert_twins, run, trained_parameters

import fastgrpo


@pytest.mark.parametrize(
    "config",
    [{}, {"lora": False, "optim": "adamw_torch", "learning_rate": 1e-2}, {"num_iterations": 2, "beta": 0.04}],
    ids=["lora", "full, adamw", "within a replayed batch"],
)
def test_a_resumed_run_equals_the_resumed_stock_run_and_the_one_without_a_break(config, tmp_path):
    # More prompts than six steps take: past an epoch's end TRL itself resumes with other prompts.
    prompts = Dataset.from_dict({"prompt": PROMPTS * 2})
    settings = {**config, "save_strategy": "steps", "save_steps": 3, "train_dataset": prompts}
    limit = 5e-3 if "optim" in config else 1e-4
    stock, before = run(tmp_path / "stock", patched=False, **settings)
    whole, _ = run(tmp_path / "patched", patched=True, **settings)

    def resumed(patched: bool) -> GRPOTrainer:
        trainer = tiny_trainer(tmp_path / "resumed", **settings)
        if patched:
            fastgrpo.patch(trainer)
        trainer.train(resume_from_checkpoint=str(tmp_path / ("patched" if patched else "stock") / "checkpoint-3"))
        return trainer

    stock_resumed, ours = resumed(False), resumed(True)
    assert ours.state.global_step == 6
    assert_twins(stock_resumed, ours, before, limit)
    assert_twins(stock, whole, before, limit)
    if "num_iterations" not in config:  # TRL does not keep the batch it was replaying
        assert_same_parameters(stock, stock_resumed, before, limit)
        assert_same_parameters(whole, ours, before, limit)
        assert_same_metrics(*[[line for line in t.state.log_history if "loss" in line] for t in (whole, ours)])
    random_states = [
        torch.load(tmp_path / name / "checkpoint-6" / "rng_state.pth", weights_only=False)["cpu"]
        for name in ("stock", "patched")
    ]
    assert torch.equal(*random_states)


def test_a_checkpoint_of_a_patched_trainer_holds_the_same_files_and_keys(tmp_path):
    for patched in (False, True):
        run(tmp_path / str(patched), patched, max_steps=1, save_strategy="steps", save_steps=1)
    folders = [tmp_path / str(patched) / "checkpoint-1" for patched in (False, True)]
    assert len({tuple(sorted(file.name for file in folder.iterdir())) for folder in folders}) == 1
    stock, ours = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert stock.keys() == ours.keys()


def train_dpo(output_dir: Path, after_step: Any = None) -> DPOTrainer:
    trainer = DPOTrainer(
        model=tiny_model(),
        ref_model=tiny_model(),  # scored with the outputs that a patched trainer asks for
        args=DPOConfig(
            output_dir=str(output_dir),
            per_device_train_batch_size=2,
            max_steps=4,
            optim="sgd",
            learning_rate=0.1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict(
            {
                "prompt": ["1+1=", "2+3=", "a"] * 4,
                "chosen": ["2", "5", "b c d"] * 4,
                "rejected": ["3 or 4", "6", "z"] * 4,
            }
        ),
        processing_class=tiny_tokenizer(),
    )
    if after_step is not None:
        trainer.add_callback(AfterStep(after_step))
    trainer.train()
    return trainer


class AfterStep(TrainerCallback):
    def __init__(self, action: Any) -> None:
        self.action = action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.action()


def test_a_dpo_trainer_beside_a_patched_one_gets_the_same_bits_as_without(tmp_path):
    alone = train_dpo(tmp_path)
    grpo = tiny_trainer(tmp_path, max_steps=1)
    ids, mask = torch.tensor([[3, 4, 5, 6], [0, 4, 5, 6]]), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])

    def score() -> None:
        with torch.no_grad():
            grpo._get_per_token_logps_and_entropies(grpo.model, ids, mask, 2, compute_entropy=True)

    with fastgrpo.patch(grpo):
        grpo.train()
        beside = train_dpo(tmp_path, after_step=score)
    lines = [
        [{k: v for k, v in line.items() if not any(word in k for word in TIMINGS)} for line in t.state.log_history]
        for t in (alone, beside)
    ]
    assert lines[0] == lines[1] and lines[0][0]["loss"] > 0
    ours = dict(beside.model.named_parameters())
    assert all(torch.equal(parameter, ours[name]) for name, parameter in alone.model.named_parameters())


def test_two_trainers_trained_in_turn_do_not_meet(tmp_path):
    def both(patched: bool) -> list[tuple[GRPOTrainer, dict]]:
        first = tiny_trainer(tmp_path / "first", max_steps=2)
        second = tiny_trainer(tmp_path / "second", model="gemma2 softcap", lora=False, temperature=0.7, max_steps=2)
        before = [trained_parameters(trainer) for trainer in (first, second)]
        if patched:
            fastgrpo.patch(first, fastgrpo.Options(packing="none", num_chunks=3))
            fastgrpo.patch(second)
        for trainer in (first, second, first, second):
            trainer.train()
        return list(zip((first, second), before, strict=True))

    for (stock, before), (patched, _) in zip(both(False), both(True), strict=True):
        assert_twins(stock, patched, before)


def test_a_patched_trainer_may_score_inside_another_one_s_forward(tmp_path):
    """The inner call must not leave its chunking or labels behind, nor take the outer one's."""
    ids, mask = torch.tensor([[3, 4, 5, 6], [0, 4, 5, 6]]), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])

    def both(patched: bool) -> tuple[GRPOTrainer, dict, torch.Tensor]:
        inner = tiny_trainer(tmp_path / "inner", model="cohere scale")
        outer = tiny_trainer(tmp_path / "outer", max_steps=2)
        before, scores = trained_parameters(outer), []

        @torch.no_grad()
        def score(*_: Any) -> None:
            scores.append(inner._get_per_token_logps_and_entropies(inner.model, ids, mask, 2)[0])

        if patched:
            fastgrpo.patch(inner, fastgrpo.Options(num_chunks=2))
            fastgrpo.patch(outer)
        outer.model.get_base_model().model.norm.register_forward_hook(score)
        outer.train()
        return outer, before, torch.stack(scores)

    (stock, before, stock_scores), (patched, _, scores) = both(False), both(True)
    assert_twins(stock, patched, before)
    assert (stock_scores - scores).abs().max() < 1e-5


def fail_in_reward(trainer: GRPOTrainer) -> None:
    calls = []

    def failing(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("on purpose")
        return many_letters(completions)

    trainer.reward_funcs[0] = failing


def fail_in_the_model(trainer: GRPOTrainer) -> None:
    """In the forward of the third micro-batch, behind the last layer."""
    calls = []

    def failing(*_: Any) -> None:
        calls.extend([1] if torch.is_grad_enabled() else [])
        if len(calls) == 3 and torch.is_grad_enabled():
            raise RuntimeError("on purpose")

    trainer.accelerator.unwrap_model(trainer.model).get_base_model().model.norm.register_forward_hook(failing)


@pytest.mark.parametrize("breakage", [fail_in_reward, fail_in_the_model])
def test_training_goes_on_after_an_exception_in_the_middle_of_it(breakage, tmp_path):
    def broken(patched: bool) -> tuple[GRPOTrainer, dict]:
        trainer = tiny_trainer(tmp_path, max_steps=3)
        before = trained_parameters(trainer)
        if patched:
            fastgrpo.patch(trainer)
        breakage(trainer)
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.train()
        trainer.train()
        assert trainer.model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape[-1] == 61
        return trainer, before

    (stock, before), (patched, _) = broken(False), broken(True)
    assert_twins(stock, patched, before)


@pytest.mark.parametrize("lora", [True, False])
def test_a_trainer_may_be_patched_and_unpatched_after_it_was_prepared(lora, tmp_path):
    def three_trainings(patched: bool) -> tuple[GRPOTrainer, dict]:
        trainer = tiny_trainer(tmp_path, lora=lora, max_steps=2)
        before = trained_parameters(trainer)
        trainer.train()
        if patched:
            fastgrpo.patch(trainer)
        trainer.train()
        if patched:
            fastgrpo.unpatch(trainer)
        trainer.train()
        return trainer, before

    (stock, before), (patched, _) = three_trainings(False), three_trainings(True)
    assert_twins(stock, patched, before)
