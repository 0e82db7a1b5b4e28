"""Queries, keys and values from one function: which attentions, when, and that everything else is computed apart."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_layers import PLAIN, RUN, compare, scored, trained
from tiny import tiny_model
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import fastgrpo
from fastgrpo.trl import lora_layers
from fastgrpo.trl.layers import FusedLayers, layers_installed
from fastgrpo.trl.one_input import PROJECTIONS, gives_one_input

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.fixture
def groups(monkeypatch) -> list[int]:
    """How many layers each call of the function computed, beginning with those that are computed together."""
    sizes: list[int] = []
    together, alone = lora_layers.lora_linears, lora_layers.lora_linear
    monkeypatch.setattr(
        lora_layers, "lora_linears", lambda x, *rest: (sizes.append(len(rest[0].layers)), together(x, *rest))[1]
    )
    monkeypatch.setattr(lora_layers, "lora_linear", lambda *given: (sizes.append(1), alone(*given))[1])
    return sizes


@pytest.mark.parametrize("kind", [LlamaAttention, Qwen2Attention, Qwen3Attention, MistralAttention])
def test_attentions_of_transformers_give_one_input(kind):
    assert gives_one_input(kind.forward, PROJECTIONS)


def a_variable_written_between(self, x):
    q = self.q_proj(x)
    x = x + 1
    k = self.k_proj(x)
    v = self.v_proj(x)
    return q, k, v


def two_variables(self, x, y):
    q = self.q_proj(x)
    k, v = self.k_proj(y), self.v_proj(y)
    return q, k, v


def only_sometimes(self, x):
    q = self.q_proj(x)
    k = v = self.k_proj(x)
    if self.has_values:
        v = self.v_proj(x)
    return q, k, v


def twice(self, x):
    q = self.q_proj(x)
    k = self.k_proj(x)
    v = self.v_proj(x) + self.v_proj(x)
    return q, k, v


def another_use(self, x):
    q = self.q_proj(x)
    k = self.k_proj(x)
    v = self.v_proj(x) + self.q_proj.in_features
    return q, k, v


def of_another_module(self, other, x):
    q = self.q_proj(x)
    k = self.k_proj(x)
    v = other.v_proj(x)
    return q, k, v


@pytest.mark.parametrize(
    "forward",
    [
        a_variable_written_between,
        two_variables,
        only_sometimes,
        twice,
        another_use,
        of_another_module,
        GPT2Attention.forward,
        None,
        torch.relu,
        eval("lambda self, x: (self.q_proj(x), self.k_proj(x), self.v_proj(x))"),
    ],
    ids=lambda forward: getattr(forward, "__qualname__", "none"),
)
def test_other_code_does_not(forward):
    assert not gives_one_input(forward, PROJECTIONS)


def another_scale(trainer):
    first_attention(trainer).k_proj.scaling["default"] *= 2


def a_hook_on_a_layer(trainer):
    first_attention(trainer).v_proj.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def first_attention(trainer):
    return next(module for module in trainer.model.modules() if isinstance(module, Qwen2Attention))


@pytest.mark.parametrize("checkpointing", [{}, CHECKPOINTING], ids=["", "checkpointing"])
@pytest.mark.parametrize(
    ("lora", "change", "together", "alone"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, None, 0, 4),
        ({"rank_pattern": {"q_proj": 2, "v_proj": 6}}, None, 0, 8),
        (
            {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 4}},
            None,
            2,
            2,
        ),
        ({}, another_scale, 1, 5),
        ({}, a_hook_on_a_layer, 1, 5),
    ],
    ids=["no keys", "other scales", "other ranks", "another scale", "a hook"],
)
def test_layers_that_are_not_alike_are_computed_apart(lora, change, together, alone, checkpointing, tmp_path, groups):
    trainer = trained(tmp_path, "qwen2 tied", lora, **checkpointing)
    if change is not None:
        change(trainer)
    outcomes = []
    for options in (PLAIN, RUN):
        with fastgrpo.patch(trainer, options):
            groups.clear()
            outcomes.append(scored(trainer))
    passes = 2 if checkpointing else 1
    assert groups.count(3) == together * passes
    # A second forward may stop once it has what is needed.
    assert alone * passes - 2 <= groups.count(1) <= alone * passes
    compare(outcomes[1], outcomes[0])


class Odd(nn.Module):
    """Its code promises one input, and its layers get another, or the same one with other numbers."""

    def __init__(self, attention, change):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (getattr(attention, name) for name in PROJECTIONS)
        self.change = change

    def forward(self, x):
        q = self.q_proj(x)
        changed = self.change(self, x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v, changed


def odd_attention(change=lambda self, x: None) -> Odd:
    torch.manual_seed(0)
    config = LoraConfig(r=3, target_modules=list(PROJECTIONS), init_lora_weights=False)
    model = get_peft_model(tiny_model("llama"), config).base_model.model
    return Odd(model.model.layers[0].self_attn, change)


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        (lambda self, x: None, [3]),
        (lambda self, x: x.add_(1), [3, 1, 1]),
        (lambda self, x: self.k_proj(x + 1), [3, 1]),
        (lambda self, x: self.q_proj(x), [3, 1]),
        (lambda self, x: self.k_proj(x), [3, 1]),
    ],
    ids=["nothing", "x is written to", "another tensor first", "queries again", "keys again"],
)
def test_only_what_was_computed_from_this_very_tensor_is_handed_out(change, sizes, groups):
    odd = odd_attention(change)
    with torch.no_grad():
        expected = odd(torch.ones(2, 32))
        with layers_installed([odd]), FusedLayers(enabled=True).in_use():
            found = odd(torch.ones(2, 32))
    assert groups == sizes
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_adapters_of_two_dtypes_are_computed_apart_under_autocast(part, groups):
    odd = odd_attention()
    getattr(odd.v_proj, part).default.bfloat16()
    with torch.autocast("cpu", torch.bfloat16), layers_installed([odd]), FusedLayers(enabled=True).in_use():
        odd(torch.ones(2, 32))
    assert groups == [1, 1, 1]


def test_a_layer_that_is_two_of_the_three_is_right():
    odd, x = odd_attention(), torch.ones(2, 32)
    odd.v_proj = odd.k_proj
    with torch.no_grad(), layers_installed([odd]), FusedLayers(enabled=True).in_use():
        _, keys, values, _ = odd(x)
    torch.testing.assert_close(keys, odd.k_proj(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, keys, rtol=1e-5, atol=1e-5)


def test_nothing_is_held_beyond_the_forward_even_where_it_raises(groups, monkeypatch):
    computed = []
    together = lora_layers.lora_linears

    def followed(*given):
        outs = together(*given)
        computed.extend(map(weakref.ref, outs))
        return outs

    def failing(self, x):
        raise ValueError("no keys today")

    monkeypatch.setattr(lora_layers, "lora_linears", followed)
    odd = odd_attention(failing)
    with layers_installed([odd]), FusedLayers(enabled=True).in_use():
        with pytest.raises(ValueError, match="no keys today"):
            odd(torch.ones(2, 32))
        try:
            odd(torch.ones(2, 32))
        except ValueError as error:
            raised = error  # whose traceback holds the queries that the attention had
    gc.collect()
    assert [ref() is not None for ref in computed[3:]] == [raised is not None, False, False]
    odd.change = lambda self, x: None
    with layers_installed([odd]), FusedLayers(enabled=True).in_use():
        odd(torch.ones(2, 32))
    gc.collect()
    assert len(computed) == 9
    assert not any(ref() is not None for ref in computed[6:])


def test_adapters_that_got_another_shape_are_copied_anew():
    layers, odd, x = FusedLayers(enabled=True), odd_attention(), torch.ones(2, 32)
    with layers_installed([odd]), torch.no_grad():
        with layers.in_use():
            odd(x)
        for part in (odd.q_proj.lora_A, odd.q_proj.lora_B):
            part.default.weight.data = part.default.weight.data.narrow(
                0 if part is odd.q_proj.lora_A else 1, 0, 1
            ).clone()
        expected = odd(x)[0]
        with layers.in_use():
            torch.testing.assert_close(odd(x)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", range(9))
def test_a_changed_weight_of_any_of_them_is_an_error(number):
    odd = odd_attention()
    weights = [
        part
        for name in PROJECTIONS
        for part in (
            getattr(odd, name).base_layer.weight,
            getattr(odd, name).lora_A.default.weight,
            getattr(odd, name).lora_B.default.weight,
        )
    ]
    with layers_installed([odd]), FusedLayers(enabled=True).in_use():
        out = odd(torch.ones(2, 32))
    with torch.no_grad():
        weights[number].mul_(2)
    with pytest.raises(RuntimeError, match="changed between its forward and its backward"):
        out[1].sum().backward()


def test_second_derivatives_are_refused():
    odd, x = odd_attention(), torch.ones(2, 32, requires_grad=True)
    with layers_installed([odd]), FusedLayers(enabled=True).in_use():
        out = odd(x)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out[0].sum(), x, create_graph=True)


def test_gradients_of_one_matrix_can_be_written_to_without_the_others(tmp_path):
    odd = odd_attention()
    with layers_installed([odd]), FusedLayers(enabled=True).in_use():
        sum(part.sum() for part in odd(torch.ones(2, 32))[:3]).backward()
    grads = [getattr(odd, name).lora_A.default.weight.grad for name in PROJECTIONS]
    others = [grad.clone() for grad in grads[1:]]
    grads[0].zero_()
    assert all(torch.equal(*pair) for pair in zip(grads[1:], others, strict=True))


def test_a_copy_of_a_patched_trainer_s_layers_has_adapters_of_its_own():
    layers, odd = FusedLayers(enabled=True), odd_attention()
    x = torch.ones(2, 32)
    with layers_installed([odd]), torch.no_grad():
        with layers.in_use():
            before = odd(x)[0]
        other_layers, other = copy.deepcopy((layers, odd))
        other.q_proj.lora_A.default.weight.zero_()
        with other_layers.in_use():
            assert not torch.allclose(other(x)[0], before)
        with layers.in_use():
            assert torch.equal(odd(x)[0], before)


def test_what_is_compiled_is_the_model_s_own():
    odd, x = odd_attention(), torch.ones(2, 32)
    expected = odd(x)[0]
    with layers_installed([odd]), FusedLayers(enabled=True).in_use():
        compiled = torch.compile(odd, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x)[0], expected)


def test_unpatching_restores_the_attention(tmp_path):
    own = modeling_llama.LlamaAttention.forward
    trainer = trained(tmp_path)
    with fastgrpo.patch(trainer, RUN):
        assert modeling_llama.LlamaAttention.forward is not own
    assert modeling_llama.LlamaAttention.forward is own
