"""Gradient checkpointing off while a generation batch is scored, without walking through the model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny import checkpointed
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
