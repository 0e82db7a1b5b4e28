"""The check at patch time finds what changes a result, and leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
import trl.trainer.utils as trl_utils
from peft import LoraConfig
from tiny import MODELS, tiny_model, tiny_trainer
from transformers import LlamaForCausalLM

import fastgrpo
from fastgrpo.trl import probe as probe_module

NAMES = {"gpt2": "c_attn"}
SCORING = "_get_per_token_logps_and_entropies"
TRL_HEAD = trl_utils._ChunkedLogProbFunction


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    yield
    assert trl_utils._ChunkedLogProbFunction is TRL_HEAD, "a test left TRL's head replaced"


def rebuilt(cls: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    """The tiny Llama as another class."""
    model = tiny_model("llama")
    twin = cls(model.config)
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_every_supported_model_agrees_packed_and_unpacked(model, lora, tmp_path):
    trainer = tiny_trainer(
        tmp_path, model, LoraConfig(r=2, target_modules=[NAMES.get(model, "q_proj")]) if lora else False
    )
    with fastgrpo.patch(trainer) as handle:
        assert handle.finding.head == handle.finding.skipped == "" and not handle.finding.rejected
        assert handle.finding.difference < 1e-5
        layout, reason = "varlen", ""
        if "falcon" in model:
            layout, reason = "none", "state-space"
        elif trainer.model.config._attn_implementation == "eager":
            layout, reason = "left", "'eager' cannot be exchanged"
        assert handle.layout == layout and reason in handle.not_varlen_because


def test_nothing_of_the_check_is_left(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.model.train()
    trainer.model.get_base_model().model.layers[0].eval()
    modes = [module.training for module in trainer.model.modules()]
    hooks = {name: len(module._forward_hooks) for name, module in trainer.model.named_modules()}
    parameters = copy.deepcopy(trainer.model.state_dict())
    random_state = torch.get_rng_state()
    with fastgrpo.patch(trainer):
        assert torch.equal(torch.get_rng_state(), random_state)
        assert [module.training for module in trainer.model.modules()] == modes
        assert {name: len(module._forward_hooks) for name, module in trainer.model.named_modules()} == hooks
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(value, parameters[name])


class ScaledLlama(LlamaForCausalLM):
    """Multiplies its logits by something that no configuration names."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.3
        return output


@pytest.mark.parametrize("lora", [True, False])
def test_a_head_with_an_unknown_transform_is_refused_by_name_and_nothing_is_changed(lora, tmp_path):
    trainer = tiny_trainer(tmp_path, rebuilt(ScaledLlama), lora)
    before, callbacks = dict(trainer.__dict__), list(trainer.callback_handler.callbacks)
    with pytest.raises(fastgrpo.UnsupportedError, match=r"own forward disagree: log-probs differ by .*ScaledLlama"):
        fastgrpo.patch(trainer)
    assert trainer.__dict__ == before and trainer.callback_handler.callbacks == callbacks


def test_where_a_layout_changes_results_the_next_one_is_taken_and_it_is_said_once(tmp_path, caplog, monkeypatch):
    trainer = tiny_trainer(tmp_path, "llama")
    wrong, tried = {"varlen"}, []

    def shifted(self, ids, mask, keep, layout):
        logprobs, entropy = original(self, ids, mask, keep, layout)
        tried.append(layout)
        return logprobs + (0.1 if layout in wrong else 0.0), entropy

    method = fastgrpo.trl.scoring.ScoringMethod
    original = method.score
    monkeypatch.setattr(method, "score", shifted)
    with fastgrpo.patch(trainer) as handle:
        assert tried == ["none"] * 3 + ["varlen", "left"]
        assert handle.layout == getattr(trainer, SCORING).layout == "left"
        assert "it changes this model's results: log-probs differ by" in handle.not_varlen_because
        assert fastgrpo.backends()["packing"].implementation == "left-packed"
    assert caplog.text.count("rows are not packed as 'varlen'") == 1
    wrong.add("left")
    with fastgrpo.patch(trainer) as handle:
        assert handle.layout == "none"
        assert fastgrpo.backends()["packing"].implementation == "as TRL pads"
    for layout in ("varlen", "left"):
        with pytest.raises(
            fastgrpo.UnsupportedError, match=f"packing='{layout}' is not possible: it changes this model's"
        ):
            fastgrpo.patch(trainer, fastgrpo.Options(packing=layout))
    assert SCORING not in trainer.__dict__


def test_a_model_that_keeps_the_layout_from_its_attention_is_left_packed(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, "llama")
    for layer in trainer.model.get_base_model().model.layers:
        forward = layer.self_attn.forward
        monkeypatch.setattr(
            layer.self_attn, "forward", lambda *a, forward=forward, fastgrpo_layout=None, **k: forward(*a, **k)
        )
    with fastgrpo.patch(trainer) as handle:
        assert handle.layout == "left"
        assert "do not pass on the arguments" in handle.not_varlen_because


def test_a_wrong_gradient_is_found_too(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, "llama")
    method = fastgrpo.trl.scoring.ScoringMethod
    original = method.score

    def half_the_gradient(self, *args):
        logprobs, entropy = original(self, *args)
        return logprobs.detach() + 0.5 * (logprobs - logprobs.detach()), entropy

    monkeypatch.setattr(method, "score", half_the_gradient)
    with pytest.raises(fastgrpo.UnsupportedError, match=r"gradients differ by 0\.5 of their size"):
        fastgrpo.patch(trainer)


def test_nan_never_passes(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, "llama")
    method = fastgrpo.trl.scoring.ScoringMethod
    original = method.score

    def first_is_nan(self, *args):
        logprobs, entropy = original(self, *args)
        return logprobs + float("nan"), entropy

    monkeypatch.setattr(method, "score", first_is_nan)
    with pytest.raises(fastgrpo.UnsupportedError, match="log-probs differ by nan"):
        fastgrpo.patch(trainer)


class NoEvaluation(LlamaForCausalLM):
    """Cannot run outside training."""

    def forward(self, *args, **kwargs):
        if not self.training:
            raise NotImplementedError("only training is implemented\nsecond line")
        return super().forward(*args, **kwargs)


def test_a_model_that_cannot_be_checked_is_patched_and_it_is_said(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, rebuilt(NoEvaluation))
    with fastgrpo.patch(trainer) as handle:
        assert handle.finding.skipped == "NotImplementedError: only training is implemented"
        assert "patched without a check" in caplog.text
        assert any("not checked" in line for line in fastgrpo.trl.start.start_lines(handle))


def test_running_out_of_memory_in_the_check_is_no_refusal(tmp_path, monkeypatch):
    def out_of_memory(self, *args):
        raise torch.OutOfMemoryError("tried to allocate too much")

    monkeypatch.setattr(fastgrpo.trl.scoring.ScoringMethod, "score", out_of_memory)
    with fastgrpo.patch(tiny_trainer(tmp_path)) as handle:
        assert handle.finding.skipped == "OutOfMemoryError: tried to allocate too much"


def test_rounding_follows_the_coarsest_dtype(tmp_path):
    trainer = tiny_trainer(tmp_path, tiny_model("llama").to(torch.bfloat16))
    assert probe_module._rounding(trainer) == torch.finfo(torch.bfloat16).eps
    with fastgrpo.patch(trainer) as handle:
        assert handle.finding.head == "" and not handle.finding.rejected
        assert handle.finding.difference > 1e-5
