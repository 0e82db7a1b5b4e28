"""Gradient checkpointing off while a generation batch is scored, without walking through the model; and no gradient that
nobody reads: both with the results of stock TRL."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref

import pytest
import torch
from outcomes import assert_same, generated, gradients
from peft import LoraConfig
from tiny import tiny_trainer
from tiny_images import vision_settings
from torch.utils.checkpoint import checkpoint
from trl.trainer import grpo_trainer
from twins import twins

import fastgrpo
from fastgrpo import Options
from fastgrpo.trl.checkpointing import CheckpointingDispatcher

RUN = Options(run_log=False)
OWN = grpo_trainer.disable_gradient_checkpointing


def switches(trainer) -> list[bool]:
    return [
        module.gradient_checkpointing for module in trainer.model.modules() if hasattr(module, "gradient_checkpointing")
    ]


def checkpointed(tmp_path, **config):
    trainer = tiny_trainer(tmp_path, gradient_checkpointing=True, **config)
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return trainer


@pytest.fixture
def walks(monkeypatch) -> list[torch.nn.Module]:
    """Modules that somebody walked through with all that is below them."""
    seen: list[torch.nn.Module] = []
    modules = torch.nn.Module.modules
    monkeypatch.setattr(torch.nn.Module, "modules", lambda self: (seen.append(self), modules(self))[1])
    return seen


def test_everything_is_off_inside_and_as_it_was_afterwards(tmp_path, walks):
    trainer = checkpointed(tmp_path)
    hooks = dict(trainer.model.get_input_embeddings()._forward_hooks)
    with fastgrpo.patch(trainer, RUN):
        layer = next(module for module in trainer.model.modules() if getattr(module, "gradient_checkpointing", False))
        layer.gradient_checkpointing = False
        before = switches(trainer)
        assert any(before)
        walks.clear()
        with pytest.raises(KeyError), grpo_trainer.disable_gradient_checkpointing(trainer.model, {}):
            assert not walks
            assert not any(switches(trainer))
            raise KeyError
        assert switches(trainer) == before
        assert trainer.model.get_input_embeddings()._forward_hooks == hooks  # TRL's adds one at each call


def test_other_models_and_unpatched_ones_get_trl_s_own(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        grpo_trainer, "disable_gradient_checkpointing", lambda *given: (calls.append(given), OWN(*given))[1]
    )
    here = grpo_trainer.disable_gradient_checkpointing
    trainer, other = checkpointed(tmp_path / "a"), checkpointed(tmp_path / "b")
    with fastgrpo.patch(trainer, RUN):
        with grpo_trainer.disable_gradient_checkpointing(other.model, {"use_reentrant": False}):
            assert not any(switches(other))
            assert all(switches(trainer))
        assert calls == [(other.model, {"use_reentrant": False})]
        with fastgrpo.patch(other, RUN), grpo_trainer.disable_gradient_checkpointing(other.model, {}):
            assert not any(switches(other))
        assert len(calls) == 1
        with grpo_trainer.disable_gradient_checkpointing(other.model, None):
            pass
        assert len(calls) == 2
    assert grpo_trainer.disable_gradient_checkpointing is here


def test_a_model_is_not_kept(tmp_path):
    dispatcher, model = CheckpointingDispatcher(OWN), checkpointed(tmp_path, lora=False).model.base_model
    layers = weakref.ref(model.layers)
    dispatcher.know(model)
    del model
    gc.collect()
    assert layers() is None
    assert not dispatcher._switches


def test_training_is_what_it_is_unpatched_with_old_log_probs_and_a_reference(tmp_path):
    twins(tmp_path, gradient_checkpointing=True, beta=0.04, num_iterations=2, max_steps=3)


def runs_of(module: torch.nn.Module) -> list[bool]:
    """Of each forward whether autograd was on, from now on."""
    runs: list[bool] = []
    module.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    return runs


@pytest.mark.parametrize("options", [{}, {"mini_batch_size": 2}, {"packing": "left"}])
def test_layers_below_the_lowest_adapter_do_not_run_again(options, tmp_path):
    adapters = LoraConfig(r=4, target_modules=r".*layers\.1\..*_proj", init_lora_weights="gaussian")
    trainer = checkpointed(tmp_path, model="qwen3", lora=adapters)
    batch = generated(trainer)
    expected = gradients(trainer, batch)
    layers = trainer.model.get_base_model().model.layers
    below, above = runs_of(layers[0].mlp.gate_proj), runs_of(layers[1].input_layernorm)
    embedded = []
    with fastgrpo.patch(trainer, Options(run_log=False, fused_layers=False, **options)):
        below.clear(), above.clear()
        own = layers[0].register_forward_pre_hook(lambda _, args: embedded.append(args[0].requires_grad))
        assert_same(gradients(trainer, batch), expected)
        own.remove()
    assert embedded and not any(embedded)
    assert len(above) > len(below) >= 1
    if not options:
        assert (len(below), len(above)) == (1, 2)
    below.clear()
    gradients(trainer, batch)
    assert len(below) == 2  # stock again


def test_a_frozen_vision_tower_does_not_run_again(tmp_path):
    adapters = LoraConfig(r=4, target_modules=r".*language_model.*_proj", init_lora_weights="gaussian")
    trainer = checkpointed(tmp_path, lora=adapters, **vision_settings([1, 3, 1, 2]))
    batch = generated(trainer)
    expected = gradients(trainer, batch)
    tower = runs_of(trainer.model.get_base_model().model.visual.blocks[0].norm1)
    with fastgrpo.patch(trainer, RUN):
        tower.clear()
        assert_same(gradients(trainer, batch), expected)
    assert len(tower) == 1
    tower.clear()
    gradients(trainer, batch)
    assert len(tower) == 2


@pytest.mark.parametrize("case", ["trained", "a hook of somebody else's", "reentrant"])
def test_a_gradient_that_somebody_may_want_stays(case, tmp_path):
    config = {"gradient_checkpointing_kwargs": {"use_reentrant": True}} if case == "reentrant" else {}
    trainer = checkpointed(tmp_path, model="qwen3", lora=case != "trained", **config)
    layers, arrived = trainer.model.get_decoder().layers, []
    if case == "a hook of somebody else's":

        def listen(module, args, output) -> None:
            if output.requires_grad:
                output.register_hook(arrived.append)

        trainer.model.get_input_embeddings().register_forward_hook(listen)
    batch = generated(trainer)
    expected = gradients(trainer, batch)
    embedded = []
    arrived.clear()
    with fastgrpo.patch(trainer, RUN):
        layers[0].register_forward_pre_hook(
            lambda _, args: embedded.append(args[0].requires_grad) if torch.is_grad_enabled() else None
        )
        assert_same(gradients(trainer, batch), expected)
    assert any(embedded)
    assert len(arrived) == (1 if case == "a hook of somebody else's" else 0)


@pytest.mark.parametrize("case", ["own, reentrant", "switched on without a function", "one layer, reentrant"])
def test_checkpointing_that_is_not_known_has_its_inputs(case, tmp_path):
    trainer = checkpointed(tmp_path, model="qwen3")
    layers, batch = trainer.model.get_decoder().layers, generated(trainer)
    if case == "one layer, reentrant":
        layers[0]._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)
        trainer.model.get_decoder()._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    else:
        for module in trainer.model.modules():
            if hasattr(module, "gradient_checkpointing") and (case == "own, reentrant" or module in layers):
                module.gradient_checkpointing = False
            # As in models whose code calls torch's checkpoint: transformers sets a switch of the whole, and no function.
            vars(module).pop("_gradient_checkpointing_func", None)
        for layer in layers:
            own = inspect.unwrap(type(layer).forward).__get__(layer)
            layer.forward = lambda *args, own=own, **kwargs: checkpoint(
                functools.partial(own, **kwargs), *args, use_reentrant=True
            )
    expected = gradients(trainer, batch)
    with fastgrpo.patch(trainer, RUN):
        assert_same(gradients(trainer, batch), expected)


def test_a_backward_hook_on_the_embeddings_is_called(tmp_path):
    trainer = checkpointed(tmp_path, model="qwen3")
    batch, arrived = generated(trainer), []
    trainer.model.get_input_embeddings().register_full_backward_hook(lambda *_: arrived.append(True))
    gradients(trainer, batch)
    assert arrived
    with fastgrpo.patch(trainer, RUN):
        arrived.clear()
        gradients(trainer, batch)
    assert arrived
