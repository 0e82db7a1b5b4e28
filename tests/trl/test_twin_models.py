"""Patched equals stock for mixtures of experts, vision-language models, hybrids and adapters that TRL did not add itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tiny_trainer
from tiny_images import vision_settings
from trl import GRPOTrainer
from twins import assert_twins, run, twins, twins_in_16_bit

import fastgrpo
import fastgrpo.trl.compat as compat
import fastgrpo.trl.heads as heads

MIXTURE: dict[str, Any] = {"model": "qwen3 moe", "router_aux_loss_coef": 0.1}


@pytest.mark.parametrize("lora", [True, False])
def test_a_mixture_of_experts_trains_with_its_auxiliary_loss(lora, tmp_path):
    stock, _ = twins(tmp_path, lora=lora, **MIXTURE)
    assert stock.aux_loss_enabled and all(line["aux_loss"] > 0 for line in stock.state.log_history if "loss" in line)


@pytest.mark.parametrize("packing", ["left", "none"])
def test_a_mixture_of_experts_trains_in_every_layout(packing, tmp_path):
    twins(tmp_path, options={"packing": packing}, max_steps=2, **MIXTURE)


def test_a_mixture_of_experts_trains_without_its_auxiliary_loss(tmp_path):
    stock, _ = twins(tmp_path, max_steps=2, beta=0.04, **{**MIXTURE, "router_aux_loss_coef": 0.0})
    assert not stock.aux_loss_enabled


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("model", ["qwen3", "qwen2.5 vl"])
def test_mixed_precision_starts_as_stock_does(model, lora, tmp_path):
    """Here on a CPU; `tests/gpu` does the same on a card."""
    if model == "qwen2.5 vl" and not compat.has_fused_head():
        pytest.skip("this TRL takes full logits where there are images")
    settings = vision_settings([1, 3, 1, 2], model) if model == "qwen2.5 vl" else {"model": model}
    twins_in_16_bit(tmp_path, lora=lora, bf16=True, use_cpu=True, **settings)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("model", ["hyperclova x scale", "falcon h1 scale"])
def test_scales_with_names_of_their_own_are_applied_once(model, lora, tmp_path):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights="gaussian")
    # Left padding enters the states of a state-space layer, so its rows stay as TRL pads them.
    _, patched = twins(tmp_path, model=model, lora=lora and adapter)
    assert fastgrpo.patch(patched).layout == ("none" if model == "falcon h1 scale" else "varlen")


def test_an_adapter_that_came_with_the_model_has_a_frozen_copy_as_its_reference(tmp_path):
    def adapted() -> Any:
        return get_peft_model(
            tiny_model(),
            LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian", task_type="CAUSAL_LM"),
        )

    stock, before = run(tmp_path, patched=False, model=adapted(), lora=False, beta=0.04)
    patched, _ = run(tmp_path, patched=True, model=adapted(), lora=False, beta=0.04)
    assert_twins(stock, patched, before)
    assert any(line["kl"] > 1e-3 for line in stock.state.log_history if "kl" in line)


@pytest.mark.parametrize("lora", [True, False])
def test_prompts_with_no_one_and_three_images_train_side_by_side(lora, tmp_path):
    mixtures: list[set[int]] = []

    class Recording(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            mixtures.append(set(batch.get("num_images") or [0]))
            return batch

    _, patched = twins(tmp_path, lora=lora, trainer_class=Recording, **vision_settings([0, 1, 3, 0, 1, 3]))
    assert set.union(*mixtures) == {0, 1, 3} and any(0 in mixture and len(mixture) > 1 for mixture in mixtures)
    assert fastgrpo.patch(patched).layout == ("varlen" if compat.has_fused_head() else "none")


@pytest.mark.skipif(not compat.has_fused_head(), reason="this TRL takes full logits where there are images")
def test_rows_with_images_reach_the_model_without_shared_padding(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, **vision_settings([0, 1, 3, 1]))
    masks: list[Any] = []
    trainer.model.get_base_model().model.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    with fastgrpo.patch(trainer, fastgrpo.Options(packing="left")):
        trainer.train()
    images = [mask for mask in masks if mask is not None]
    assert images
    for mask in images:
        assert bool(mask[:, 0].all()) and bool(mask[:, -1].any())
        assert bool((mask.diff(dim=1) <= 0).all())


def test_a_vision_language_model_trains_on_text_alone(tmp_path):
    twins(tmp_path, max_steps=2, **vision_settings([0, 0, 0, 0]))


@pytest.mark.skipif(not compat.has_fused_head(), reason="this TRL takes full logits where there are images")
def test_images_are_scored_by_our_head_and_no_hidden_states_are_kept(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, max_steps=1, **vision_settings([1, 3, 1, 3]))
    ours: list[int] = []
    monkeypatch.setattr(heads, "linear_logprob", lambda *a, **k: ours.append(1) or fastgrpo.linear_logprob(*a, **k))
    asked: list[Any] = []
    trainer.model.get_base_model().model.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs.get("output_hidden_states")), with_kwargs=True
    )
    with fastgrpo.patch(trainer):
        trainer.train()
    assert ours and not any(asked)
