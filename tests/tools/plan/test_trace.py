"""What is followed on two fake layers is what real layers keep."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama

from fastgrpo import mlp
from fastgrpo.lora import Adapted, lora_linear
from fastgrpo.tools.plan.shape import build, decoder_layers
from fastgrpo.tools.plan.trace import _make_fake, _run, trace
from fastgrpo.trl.layers import layers_installed, remove_layers

ROWS, LENGTH = 3, 40


def config(layers: int = 5) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )


def followed(model, **options):
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    settings = {"dtype": torch.float32, "autocast": None, "checkpointing": False, "continued": 0}
    settings |= {"fused_layers": False, "rows": ROWS, "length": LENGTH, **options}
    return trace(model, decoder_layers(base), hidden=64, **settings)


@pytest.mark.parametrize("rank", [None, 4])
def test_what_two_layers_cost_holds_for_five(rank):
    from_two = followed(build(config(), "float32", rank, "all-linear"))
    model = build(config(), "float32", rank, "all-linear").train()
    base = model.get_base_model() if rank else model
    with FakeTensorMode():
        _make_fake(base.get_decoder())
        five = _run(base.get_decoder(), ROWS, LENGTH, 64, torch.float32, None)
    first_input = ROWS * LENGTH * 64 * 4
    assert from_two.kept == five.kept + first_input
    assert from_two.working == pytest.approx(five.working, rel=0.02)


def test_autocast_keeps_its_copies_of_weights_until_the_forward_ends():
    settings = {"autocast": torch.bfloat16, "checkpointing": True}
    found = followed(build(config(), "float32", None, "all-linear"), **settings)
    layers = decoder_layers(build(config(), "float32", None, "all-linear"))
    linear = sum(p.numel() for name, p in layers.named_parameters() if "_proj" in name)
    assert found.casts == 2 * linear
    assert followed(build(config(), "bfloat16", None, "all-linear"), dtype=torch.bfloat16, **settings).casts == 0


def test_a_shared_prompt_costs_its_second_attention_call():
    plain, shared = (followed(build(config(), "float32", None, "all-linear"), continued=n) for n in (0, 100))
    assert shared.kept == plain.kept and shared.working >= plain.working


@pytest.mark.parametrize("frozen", [False, True])
def test_what_real_layers_save_is_what_is_predicted(frozen):
    """A real forward in float32 on this machine; unique storages that autograd saved, parameters left out."""
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa").train()
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    predicted_model = build(config(), "float32", None, "all-linear")
    if frozen:
        model.requires_grad_(False)
        predicted_model.requires_grad_(False)
    inputs = torch.randn(ROWS, LENGTH, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.get_decoder()(inputs_embeds=inputs, use_cache=False).last_hidden_state
    saved[output.untyped_storage()._cdata] = output.untyped_storage().nbytes()
    saved[inputs.untyped_storage()._cdata] = inputs.untyped_storage().nbytes()
    assert followed(predicted_model).kept == pytest.approx(sum(saved.values()), rel=0.03)


def test_autocast_and_checkpointing_keep_less():
    plain = followed(build(config(), "float32", None, "all-linear"))
    checkpointed = followed(build(config(), "float32", None, "all-linear"), checkpointing=True)
    assert checkpointed.kept < 0.3 * plain.kept
    bf16 = followed(build(config(), "bfloat16", None, "all-linear"), dtype=torch.bfloat16)
    assert bf16.kept < 0.75 * plain.kept


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_layers_keep_less_and_leave_nothing_behind(checkpointing):
    """Followed as they run in a patched trainer: adapters, norms and rotary embeddings as one function each."""
    rotate = modeling_llama.apply_rotary_pos_emb
    plain, fused = (
        followed(
            build(config(), "bfloat16", 4, "all-linear"),
            dtype=torch.bfloat16,
            autocast=torch.bfloat16,
            checkpointing=checkpointing,
            fused_layers=fused_layers,
        )
        for fused_layers in (False, True)
    )
    assert fused.kept + fused.working < (0.8 if not checkpointing else 0.95) * (plain.kept + plain.working)
    assert fused.casts == 0  # their own copies of the adapter stay
    assert modeling_llama.apply_rotary_pos_emb is rotate
    assert not hasattr(LoraLinear.forward, "fastgrpo_original")
    x = torch.randn(3, 4, requires_grad=True)
    layer = Adapted(torch.randn(5, 4), None, torch.randn(2, 4), torch.randn(5, 2), 1.0)
    assert lora_linear(x, layer, layer.down, layer.up).isfinite().all()  # no fake tensor was kept for it


def test_of_an_mlp_at_most_three_blocks_are_at_work_beside_what_is_kept(monkeypatch):
    """In units of a matrix between the layers of an MLP so wide that nothing else counts."""
    wide = config(2)
    wide.intermediate_size, rows = 8192, 2 * 1024
    matrix = rows * wide.intermediate_size * 2

    def found(blocks, **options):
        monkeypatch.setattr(mlp, "_BLOCK_BYTES", matrix // blocks)
        model = build(wide, "bfloat16", 4, "all-linear")
        return followed(model, rows=2, length=1024, dtype=torch.bfloat16, autocast=torch.bfloat16, **options)

    assert found(1, checkpointing=True).working > 7 * matrix
    for blocks in (1, 8):
        working = found(blocks, checkpointing=True, fused_layers=True).working
        assert working == pytest.approx((3 / blocks + 0.08) * matrix, rel=0.03)
    assert found(1, fused_layers=True).a_layer == pytest.approx(2.06 * matrix, rel=0.01)


def test_a_trainer_that_is_dropped_while_layers_are_followed_leaves_them_in_place():
    """The garbage collector finds it at any time: layers would go on one by one, with twice as much kept."""
    model = build(config(), "bfloat16", 4, "all-linear")
    own = LoraLinear.forward
    with layers_installed([model]):
        ours = LoraLinear.forward
        remove_layers()
        assert LoraLinear.forward is ours is not own
    assert LoraLinear.forward is own
