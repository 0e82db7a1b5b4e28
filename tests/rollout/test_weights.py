"""What travels to a rollout engine: LoRA merged out of place, or the adapter alone."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import tiny_model

from fastgrpo.rollout.weights import (
    adapter_obstacle,
    engine_parameters,
    engine_weights,
    lora_obstacle,
    merge_obstacle,
    merged_weight,
    save_adapter,
)

QKV = ["q_proj", "k_proj", "v_proj"]


def adapted(name="qwen3", **config):
    return get_peft_model(
        tiny_model(name), LoraConfig(**{"r": 4, "target_modules": QKV, "init_lora_weights": False, **config})
    )


def merged_by_peft(model):
    """Names and values as stock TRL pushes them."""
    model.merge_adapter()
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix not in name:
            found[name] = parameter.detach().clone()
    model.unmerge_adapter()
    return found


def weights(model, **how):
    return engine_weights(engine_parameters(model, lambda name: name), **how)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("qwen3", {}),
        ("qwen3", {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 32}}),
        ("qwen2 tied", {"target_modules": "all-linear"}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
    ids=["plain", "patterns and rank-stabilised", "all linear, tied", "transposed"],
)
def test_merged_out_of_place_is_what_peft_merges_under_the_names_that_trl_pushes(model, config):
    model = adapted(model, **config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ours = dict(weights(model, everything=True))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    theirs = merged_by_peft(model)
    assert list(ours) == list(theirs)
    worst = max((ours[name].float() - theirs[name]).abs().max().item() for name in ours)
    assert worst < 1e-5, worst
    base = dict(weights(model, everything=True, merge=False))
    assert any(not torch.equal(base[name], ours[name]) for name in ours) and list(base) == list(ours)


def test_only_what_training_changes_travels_later():
    model = adapted()
    norm = "model.layers.1.input_layernorm.weight"
    model.get_base_model().get_parameter(norm).requires_grad_(True)
    names = [name for name, _ in weights(model, everything=False)]
    matrices = [f"model.layers.{layer}.self_attn.{target}.weight" for layer in (0, 1) for target in QKV]
    assert sorted(names) == sorted([*matrices, norm])
    full = tiny_model("qwen3")
    assert [name for name, _ in weights(full, everything=False)] == [n for n, _ in full.named_parameters()]


def test_a_16_bit_base_is_rounded_once():
    model = adapted().to(torch.bfloat16)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    weight = merged_weight(layer)
    up, down = layer.lora_B["default"].weight.double(), layer.lora_A["default"].weight.double()
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * (up @ down)
    assert weight.dtype == torch.float32
    assert (weight.double() - exact).abs().max() < 1e-6 * exact.abs().max()


def test_an_adapter_that_is_merged_already_is_not_merged_twice():
    model = adapted()
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="unmerge_adapter"):
        list(weights(model, everything=False))


def test_a_switched_off_adapter_does_not_count():
    model = adapted()
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    with model.disable_adapter():
        assert torch.equal(merged_weight(layer), layer.base_layer.weight)


@pytest.mark.parametrize(
    "config", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 32}}]
)
def test_a_saved_adapter_needs_no_scaling_but_its_own(tmp_path, config):
    model = adapted(**config)
    save_adapter(model, tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["r"] == saved["lora_alpha"] == (8 if config else 4)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.v_proj"
    layer = model.get_base_model().model.layers[0].self_attn.v_proj
    delta = tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
    assert torch.allclose(delta, layer.get_delta_weight("default"), atol=1e-6)
    if not config:  # without patterns PEFT reads it too
        again = PeftModel.from_pretrained(tiny_model("qwen3"), tmp_path / "adapter")
        ids = torch.tensor([[5, 9, 20, 11]])
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": [*QKV, "embed_tokens"]}, "embed_tokens, an embedding or the output head"),
        ({"target_modules": [*QKV, "lm_head"]}, "lm_head, an embedding or the output head"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3]}, "trainable_token_indices"),
    ],
)
def test_what_is_no_plain_lora_of_linear_layers_is_named(config, reason):
    assert reason in lora_obstacle(adapted(**config))
    assert reason in merge_obstacle(adapted(**config))


def test_a_base_that_is_no_plain_matrix_can_have_an_adapter_and_cannot_be_merged():
    class Packed(torch.nn.Linear):
        """As 4-bit layers are."""

    base = tiny_model("qwen3")
    base.model.layers[1].self_attn.v_proj = Packed(32, 16, bias=False)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=QKV))
    assert lora_obstacle(model) == "" and adapter_obstacle(model) == ""
    assert "the base of model.layers.1.self_attn.v_proj is a" in merge_obstacle(model) and "Packed" in merge_obstacle(
        model
    )


def test_experts_under_lora_other_methods_and_several_adapters_are_named():
    experts = adapted("qwen3 moe", target_parameters=["mlp.experts.gate_up_proj"])
    assert "target_parameters" in lora_obstacle(experts)
    assert "VERA, not LoRA" in lora_obstacle(
        get_peft_model(tiny_model("qwen3"), VeraConfig(r=4, target_modules=["q_proj"]))
    )
    several = adapted()
    several.add_adapter("other", LoraConfig(r=2, target_modules=QKV))
    assert lora_obstacle(several) == ""
    several.base_model.set_adapter(["default", "other"])
    assert lora_obstacle(several) == "2 adapters are active (default, other)"


def test_an_adapter_alone_is_not_the_model_where_more_is_trained_or_its_base_was_changed():
    assert adapter_obstacle(adapted()) == ""
    changed = adapted(init_lora_weights="pissa")
    assert (
        "init_lora_weights='pissa' changes the base weights" in adapter_obstacle(changed)
        and merge_obstacle(changed) == ""
    )
    model = adapted()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    assert adapter_obstacle(model) == "model.norm.weight is trained beside the adapter"
