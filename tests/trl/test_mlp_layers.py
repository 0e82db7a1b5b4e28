"""Gated MLPs that run as one function while a trainer scores: which, when, and that nothing else changes."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from test_layers import PLAIN, RUN, compare, scored, trained
from tiny import tiny_model, tiny_trainer
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

import fastgrpo
from fastgrpo.trl import mlp_layers
from fastgrpo.trl.layers import FusedLayers, layers_installed

CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.fixture
def ran(monkeypatch) -> list:
    """The MLPs' matrices, once a call."""
    calls, function = [], mlp_layers.gated_mlp

    def call(x, mlp, trained):
        calls.append(mlp)
        return function(x, mlp, trained)

    monkeypatch.setattr(mlp_layers, "gated_mlp", call)
    return calls


def both(trainer, ran, **options):
    """What a trainer scores with layers one by one and as one function."""
    outcomes = []
    for patched in (PLAIN, RUN):
        with fastgrpo.patch(trainer, patched):
            ran.clear()
            torch.manual_seed(0)
            outcomes.append(scored(trainer, **options))
        if patched is PLAIN:
            assert not ran
    return outcomes


@pytest.mark.parametrize("config", [{}, CHECKPOINTED], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    ("model", "targets", "adapted"),
    [
        ("mistral window", "all-linear", 3),
        ("llama", ["q_proj", "v_proj"], 0),
        ("qwen3", ["gate_proj"], 1),
        ("qwen2 tied", ["down_proj", "up_proj", "q_proj"], 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_mlps_are_fused_whichever_of_their_layers_have_adapters(model, targets, adapted, config, tmp_path, ran):
    trainer = trained(tmp_path, model, {"target_modules": targets}, **config)
    expected, found = both(trainer, ran)
    compare(found, expected)
    assert len(ran) == (4 if config else 2)
    for mlp in ran:
        assert sum(isinstance(layer, fastgrpo.lora.Adapted) for layer in mlp[:3]) == adapted


def test_without_gradients_and_under_autocast(tmp_path, ran):
    trainer = trained(tmp_path, "qwen3", bf16=True)
    expected, found = both(trainer, ran, grad=False)
    assert (found[0] - expected[0]).norm() <= 0.02 * expected[0].norm()
    assert len(ran) == 2
    assert all(mlp.dtype == torch.bfloat16 for mlp in ran)


def kind_of(name: str) -> type[torch.nn.Module]:
    """A class of transformers by its model and its own name."""
    model, kind = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), kind)


class Holder(torch.nn.Module):
    """A model that is one MLP with adapters that have left their start."""

    def __init__(self, kind: str = "llama.LlamaMLP") -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, mlp_bias=True)
        self.mlp = kind_of(kind)(config)
        lora = LoraConfig(r=3, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights="gaussian")
        inject_adapter_in_model(lora, self)
        for name, parameter in self.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)

    def outcome(self, fused: bool) -> list[torch.Tensor]:
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with layers_installed([self]), FusedLayers(fused).in_use():
            torch.manual_seed(0)
            out = self.mlp(x)
        self.zero_grad()
        out.square().sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in self.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "kind", ["llama.LlamaMLP", "qwen2.Qwen2MLP", "mistral.MistralMLP", "smollm3.SmolLM3MLP", "qwen2_5_vl.Qwen2_5_VLMLP"]
)
def test_mlps_with_their_code_are_fused_in_every_model(kind, ran):
    holder = Holder(kind)
    compare(holder.outcome(True), holder.outcome(False))
    assert len(ran) == 1
    assert not hasattr(kind_of(kind).forward, "fastgrpo_original")


@pytest.mark.parametrize("kind", ["phi3.Phi3MLP", "gpt2.GPT2MLP", "phi.PhiMLP"])
def test_mlps_with_other_code_are_not(kind):
    mlp = kind_of(kind).__new__(kind_of(kind))
    torch.nn.Module.__init__(mlp)
    with layers_installed([mlp]):
        assert not hasattr(kind_of(kind).forward, "fastgrpo_original")


def hook_on(name):
    def change(mlp):
        mlp.get_submodule(name).register_forward_hook(lambda *_: None)

    change.__name__ = f"hook_on_{name}"
    return change


def own_forward(mlp):
    mlp.up_proj.forward = type(mlp.up_proj).forward.__get__(mlp.up_proj)


def dropout_in_one(mlp):
    mlp.down_proj.lora_dropout["default"] = torch.nn.Dropout(0.5)


def frozen_part_that_trains(mlp):
    mlp.gate_proj.base_layer.weight.requires_grad_()


def bias_that_trains(mlp):
    mlp.gate_proj = mlp.gate_proj.base_layer
    mlp.gate_proj.bias.requires_grad_()


def another_activation(mlp):
    mlp.act_fn = torch.nn.GELU()


def another_linear(mlp):
    """As a quantised one is."""
    mlp.gate_proj.base_layer.__class__ = type("Linear4bit", (torch.nn.Linear,), {})


@pytest.mark.parametrize(
    "change",
    [
        *map(hook_on, ("gate_proj", "act_fn", "down_proj.base_layer", "up_proj.lora_A.default")),
        *(own_forward, dropout_in_one, frozen_part_that_trains, bias_that_trains, another_activation, another_linear),
    ],
    ids=lambda change: change.__name__,
)
def test_an_mlp_that_is_more_than_plain_layers_runs_its_own_forward(change, ran):
    holder = Holder()
    change(holder.mlp)
    compare(holder.outcome(True), holder.outcome(False))
    assert not ran


def test_full_fine_tuning_and_its_frozen_reference_round_alike(tmp_path, ran):
    trainer = tiny_trainer(tmp_path, model=tiny_model("qwen3").to(torch.bfloat16), lora=False, bf16=True)
    reference = copy.deepcopy(trainer.model).requires_grad_(False)
    ids = torch.randint(3, 45, (2, 7), generator=torch.Generator().manual_seed(1))
    with fastgrpo.patch(trainer, RUN), torch.no_grad():
        policy, frozen = (
            trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), 4)[0]
            for model in (trainer.model, reference)
        )
    assert torch.equal(policy, frozen)
    assert not ran


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]], ids=["mlp", "attention"])
def test_an_adapter_at_its_start_and_its_reference_agree_bit_for_bit(targets, tmp_path, ran):
    model = tiny_model("qwen3").to(torch.bfloat16)
    trainer = trained(tmp_path, model, {"target_modules": targets}, bf16=True)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    with fastgrpo.patch(trainer, RUN):
        ran.clear()
        policy = scored(trainer, grad=False)[0]
        with trainer.model.disable_adapter():
            reference = scored(trainer, grad=False)[0]
        assert len(ran) == 4
    assert torch.equal(policy, reference)


def test_a_merged_adapter_is_in_the_weights(tmp_path, ran):
    trainer = trained(tmp_path)
    trainer.model.merge_adapter()
    expected, found = both(trainer, ran, grad=False)
    compare([*found, found[0]], [*expected, expected[0]])
    assert not ran


def test_a_class_s_forward_comes_back_and_a_subclass_s_stays(monkeypatch, tmp_path, ran):
    class ShiftedMLP(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) + 0.1

    forwards = modeling_llama.LlamaMLP.forward, ShiftedMLP.forward
    trainers = [trained(tmp_path / "a")]
    monkeypatch.setattr(modeling_llama, "LlamaMLP", ShiftedMLP)
    trainers.append(trained(tmp_path / "b"))
    with fastgrpo.patch(trainers[0], RUN):
        assert forwards[0] is not ShiftedMLP.__base__.forward
        expected, found = both(trainers[1], ran)
        compare(found, expected)
        assert not ran
    assert forwards == (ShiftedMLP.__base__.forward, ShiftedMLP.forward)
