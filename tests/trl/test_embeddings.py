"""No gradient of embedded tokens and patches that nobody reads, with the results of stock TRL."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from outcomes import assert_same, generated, gradients
from peft import LoraConfig
from tiny import checkpointed
from tiny_images import vision_settings
from torch.utils.checkpoint import checkpoint

import fastgrpo
from fastgrpo import Options

RUN = Options(run_log=False)


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


class Watching:
    """A hook that is an object, and has no name."""

    __module__ = "peft.watching"

    def __call__(self, module, args, output) -> None:
        pass


@pytest.mark.parametrize("case", ["trained", "a hook of somebody else's", "a library's object", "reentrant"])
def test_a_gradient_that_somebody_may_want_stays(case, tmp_path):
    config = {"gradient_checkpointing_kwargs": {"use_reentrant": True}} if case == "reentrant" else {}
    trainer = checkpointed(tmp_path, model="qwen3", lora=case != "trained", **config)
    layers, arrived = trainer.model.get_decoder().layers, []
    if case == "a hook of somebody else's":

        def listen(module, args, output) -> None:
            if output.requires_grad:
                output.register_hook(arrived.append)

        trainer.model.get_input_embeddings().register_forward_hook(listen)
    if case == "a library's object":
        trainer.model.get_input_embeddings().register_forward_hook(Watching())
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
