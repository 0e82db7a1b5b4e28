"""What users do around a patched trainer: other attention, hooks, copies, callbacks, odd arguments."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_model, tiny_trainer
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    TrainerCallback,
    set_seed,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import GRPOTrainer
from twins import assert_twins, run, trained_parameters, twins

import fastgrpo

SCORING = "_get_per_token_logps_and_entropies"
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


@pytest.fixture(autouse=True)
def _attention_is_as_it_was():
    before = [dict(interface._local_mapping) for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    yield
    for handle in list(sys.modules["fastgrpo.trl.patch"]._active):
        handle.unpatch()
    after = [dict(interface._local_mapping) for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    assert after == before, "a test left attention functions replaced"


def score(
    trainer: Any, ids: torch.Tensor | None = None, mask: torch.Tensor | None = None, keep: int = 3, **options: Any
):
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [3, 4, 5, 6, 7, 0]]) if ids is None else ids
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]) if mask is None else mask
    return getattr(trainer, SCORING)(trainer.model, ids, mask, keep, **options)[0]


def test_noise_that_depends_on_the_width_keeps_trl_s_layout(tmp_path):
    _, patched = twins(tmp_path, max_steps=2, neftune_noise_alpha=5.0)
    assert "neftune_noise_alpha" in fastgrpo.patch(patched).not_varlen_because


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_positions_that_depend_on_the_width_are_said(rope_type, tmp_path, caplog):
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4} if rope_type == "longrope" else {}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24, **factors}
    config = LlamaConfig(
        **SMALL, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=96, rope_parameters=rope
    )
    with fastgrpo.patch(tiny_trainer(tmp_path, LlamaForCausalLM(config))):
        assert f"rope_type='{rope_type}' depends on the length of the longest row" in caplog.text


@pytest.mark.parametrize("kind", ["functional dropout", "router jitter"])
def test_random_numbers_of_any_kind_are_said(kind, tmp_path, caplog):
    if kind == "router jitter":
        config = MixtralConfig(
            **SMALL, intermediate_size=32, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.2
        )
        model, expected = MixtralForCausalLM(config), "router_jitter_noise is 0.2|jitter_noise is 0.2"
    else:
        config = OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, dropout=0.1, attention_dropout=0.0)
        model, expected = OPTForCausalLM(config), "dropout is 0.1"
    with fastgrpo.patch(tiny_trainer(tmp_path, model, LoraConfig(r=2, target_modules=["q_proj"]))):
        assert any(part in caplog.text for part in expected.split("|"))
        assert "draw random numbers for fewer tokens" in caplog.text


def test_a_reference_with_another_attention_than_the_policy_trains(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")

    def settings() -> dict[str, Any]:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa")
        return {"model": model, "lora": False, "beta": 0.04, "model_init_kwargs": {"attn_implementation": "eager"}}

    stock, before = run(tmp_path, patched=False, max_steps=2, **settings())
    patched, _ = run(tmp_path, patched=True, max_steps=2, **settings())
    assert_twins(stock, patched, before)


def test_an_attention_exchanged_after_the_patch_falls_back_and_says_so_once(tmp_path, caplog):
    stock, before = run(tmp_path, patched=False, max_steps=2)
    trainer = tiny_trainer(tmp_path, max_steps=2)
    fastgrpo.patch(trainer)
    trainer.model.get_base_model().set_attn_implementation("eager")
    trainer.train()
    assert_twins(stock, trainer, before)
    assert caplog.text.count("attn_implementation is 'eager' now") == 1


def test_an_attention_of_the_user_s_own_is_exchanged_and_given_back(tmp_path):
    calls = []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("mine", mine)
    try:
        model = tiny_model()
        model.set_attn_implementation("mine")
        trainer = tiny_trainer(tmp_path, model, max_steps=1)
        with fastgrpo.patch(trainer) as handle:
            assert handle.layout == "varlen"
            calls.clear()
            score(trainer)
            assert not calls
            trainer.train()
            assert calls  # generation
    finally:
        del AttentionInterface._global_mapping["mine"]


def test_an_attention_registered_while_patched_is_used_at_once_and_afterwards(tmp_path):
    calls = []
    original = AttentionInterface._global_mapping["sdpa"]

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    other = tiny_model("qwen3")
    other.set_attn_implementation("sdpa")
    try:
        with fastgrpo.patch(tiny_trainer(tmp_path)):
            AttentionInterface.register("sdpa", mine)
            other(torch.tensor([[5, 6, 7]]))
            assert len(calls) == 2
        other(torch.tensor([[5, 6, 7]]))
        assert len(calls) == 4
    finally:
        AttentionInterface.register("sdpa", original)


def test_a_hook_that_wants_the_mask_gets_a_layout_that_has_one(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.model.register_forward_pre_hook(lambda m, a, k: k["attention_mask"].sum() and None, with_kwargs=True)
    with fastgrpo.patch(trainer) as handle:
        assert handle.layout == "none"
        assert "a forward in this layout raises KeyError: 'attention_mask'" in handle.not_varlen_because


def test_a_backbone_with_a_fixed_signature_is_left_packed(tmp_path):
    class Strict(LlamaModel):
        def forward(
            self,
            input_ids=None,
            attention_mask=None,
            position_ids=None,
            past_key_values=None,
            inputs_embeds=None,
            use_cache=None,
            cache=None,
        ):
            return super().forward(
                input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, use_cache=False
            )

    model = tiny_model()
    model.model.__class__ = Strict
    with fastgrpo.patch(tiny_trainer(tmp_path, model)) as handle:
        assert handle.layout == "left" and "unexpected keyword" in handle.not_varlen_because


def test_a_batch_without_any_real_token_is_scored_as_trl_does(tmp_path):
    trainer = tiny_trainer(tmp_path)
    ids = torch.randint(3, 9, (2, 8))
    stock = score(trainer, ids, torch.zeros_like(ids), 4)
    with fastgrpo.patch(trainer):
        ours = score(trainer, ids, torch.zeros_like(ids), 4)
    assert ours.shape == stock.shape == (2, 4) and ours.requires_grad


@pytest.mark.parametrize("keep", [0, 6, 7])
def test_odd_widths_get_what_trl_makes_of_them(keep, tmp_path):
    trainer = tiny_trainer(tmp_path)
    try:
        stock = score(trainer, keep=keep)
    except RuntimeError as error:
        pytest.skip(f"this TRL raises: {error}")
    with fastgrpo.patch(trainer):
        ours = score(trainer, keep=keep)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def test_a_float_mask_is_a_mask(tmp_path):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    with fastgrpo.patch(tiny_trainer(tmp_path)) as handle:
        torch.testing.assert_close(score(handle.trainer, mask=mask.float()), score(handle.trainer, mask=mask))


class Counting(TrainerCallback):
    def __init__(self, then=None):
        self.steps, self.then = 0, then

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        if self.then and state.global_step == 2:
            self.then()


def test_unpatching_in_a_callback_takes_no_event_from_the_others(tmp_path):
    trainer = tiny_trainer(tmp_path)
    fastgrpo.patch(trainer)
    after = Counting()
    trainer.add_callback(Counting(lambda: fastgrpo.unpatch(trainer)))
    trainer.add_callback(after)
    trainer.train()
    assert after.steps == 6 and SCORING not in trainer.__dict__


def test_a_deep_copy_of_a_patched_trainer_is_a_stock_one(tmp_path, capsys):
    trainer = tiny_trainer(tmp_path, max_steps=2)
    before = trained_parameters(trainer)
    try:
        stock = copy.deepcopy(trainer)
    except TypeError as error:
        pytest.skip(f"no trainer of this TRL can be copied: {error}")
    set_seed(7)
    stock.train()
    fastgrpo.patch(trainer)
    copied = copy.deepcopy(trainer)
    fastgrpo.unpatch(trainer)
    assert all(getattr(copied, name).__func__ is getattr(GRPOTrainer, name) for name in (SCORING, "train"))
    capsys.readouterr()
    set_seed(7)
    copied.train()
    assert "fastgrpo |" not in capsys.readouterr().err
    assert_twins(stock, copied, before)
    with fastgrpo.patch(copied) as handle:
        assert handle.active


def test_a_wrapper_that_outlives_the_patch_calls_trl_s_own(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    stock = score(trainer)
    fastgrpo.patch(trainer)
    ours = getattr(trainer, SCORING)
    setattr(trainer, SCORING, lambda *args, **kwargs: ours(*args, **kwargs))
    with pytest.warns(UserWarning, match="was replaced by something else"):
        fastgrpo.unpatch(trainer)
    assert torch.equal(score(trainer), stock)
    trainer.train()


@pytest.mark.parametrize(
    "context", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_check_does_not_depend_on_where_patch_is_called(context, tmp_path):
    trainer = tiny_trainer(tmp_path)
    with context():
        handle = fastgrpo.patch(trainer)
    assert handle.layout == "varlen" and not handle.finding.skipped and handle.finding.difference < 1e-5


def test_a_dispatcher_that_somebody_registers_as_an_attention_calls_what_it_stood_for(tmp_path):
    original = AttentionInterface._global_mapping["sdpa"]
    try:
        with fastgrpo.patch(tiny_trainer(tmp_path)):
            found = ALL_ATTENTION_FUNCTIONS["sdpa"]
        AttentionInterface.register("sdpa", found)
        trainer = tiny_trainer(tmp_path, max_steps=1)
        with fastgrpo.patch(trainer):
            trainer.train()
        assert trainer.state.global_step == 1
    finally:
        AttentionInterface.register("sdpa", original)
