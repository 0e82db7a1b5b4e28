"""The fused LoRA layer against PEFT's own, and against float64."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear

from fastgrpo.lora import Adapted, SharedInput, lora_linear, lora_linears


def peft_layer(rank=3, bias=False, dtype=torch.float32) -> Linear:
    torch.manual_seed(rank)
    base = torch.nn.Linear(16, 24, bias=bias, dtype=dtype).requires_grad_(False)
    layer = Linear(base, "default", LoraConfig(r=rank, lora_alpha=5), r=rank, lora_alpha=5)
    for part in (layer.lora_A, layer.lora_B):
        torch.nn.init.normal_(part.default.weight)
    return layer


def fused(layer: Linear, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    base, down, up = layer.base_layer, layer.lora_A.default.weight, layer.lora_B.default.weight
    copies = (part.detach().to(dtype) for part in (down, up))
    return lora_linear(x, Adapted(base.weight, base.bias, *copies, layer.scaling["default"]), down, up)


def outcome(function, layer: Linear, x: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x, layer.lora_A.default.weight, layer.lora_B.default.weight]
    out = function(x)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(16,), (7, 16), (2, 5, 16), (0, 16), (1, 0, 16)])
def test_values_and_gradients_are_peft_s(shape, bias):
    layer, x = peft_layer(bias=bias), torch.randn(shape, requires_grad=True)
    expected = outcome(layer, layer, x)
    found = outcome(lambda x: fused(layer, x, torch.float32), layer, x)
    for name, ours, theirs in zip(("out", "x", "A", "B"), found, expected, strict=True):
        assert ours.shape == theirs.shape, name
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def peft_layers(ranks, dtype=torch.float32) -> list[Linear]:
    """Of one input; the second has a bias."""
    layers = [peft_layer(rank, bias=number == 1, dtype=dtype) for number, rank in enumerate(ranks)]
    for layer in layers:
        layer.scaling["default"] = 1.25
    return layers


def together(layers: list[Linear], x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    trained = [part.default.weight for layer in layers for part in (layer.lora_A, layer.lora_B)]
    down = torch.cat([part.detach().to(dtype) for part in trained[::2]])
    adapted = [
        Adapted(layer.base_layer.weight, layer.base_layer.bias, down, up.detach().to(dtype), layer.scaling["default"])
        for layer, up in zip(layers, trained[1::2], strict=True)
    ]
    return lora_linears(x, SharedInput.of(adapted, down), trained)


def outcome_of_all(outs, layers: list[Linear], x: torch.Tensor, used: tuple[int, ...]) -> list[torch.Tensor | None]:
    leaves = [x, *(part.default.weight for layer in layers for part in (layer.lora_A, layer.lora_B))]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    picked = [[parts[number] for number in used] for parts in (outs, grads)]
    return [*outs, *torch.autograd.grad(picked[0], leaves, picked[1], allow_unused=True)]


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1,)], ids=str)
@pytest.mark.parametrize("shape", [(16,), (2, 5, 16), (0, 16)], ids=str)
def test_layers_of_one_input_are_what_each_of_them_is(shape, used):
    layers, x = peft_layers((3, 1, 4)), torch.randn(shape, requires_grad=True)
    expected = outcome_of_all([layer(x) for layer in layers], layers, x, used)
    found = outcome_of_all(together(layers, x, torch.float32), layers, x, used)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_layers_of_one_input_round_no_more_than_apart():
    worse = torch.zeros(10, dtype=torch.float64)
    for rank in range(1, 9):
        layers = peft_layers((rank, rank + 1, 2), torch.bfloat16)
        for layer in layers:
            layer.lora_B.default.weight.data.mul_(0.1)  # an adapter is a small change
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
        apart = outcome_of_all([fused(layer, x, torch.bfloat16) for layer in layers], layers, x, (0, 1, 2))
        found = outcome_of_all(together(layers, x, torch.bfloat16), layers, x, (0, 1, 2))
        assert [part.dtype for part in found] == [part.dtype for part in apart]
        exact, x = [layer.double() for layer in layers], x.detach().double().requires_grad_()
        truth = outcome_of_all([layer(x) for layer in exact], exact, x, (0, 1, 2))
        for number, parts in enumerate(zip(found, apart, truth, strict=True)):
            ours, theirs, true = (part.detach().double() for part in parts)
            worse[number] += ((ours - true).norm() - (theirs - true).norm()) / true.norm() / 8
    assert worse.max() <= 2e-5, worse
    assert worse[3] < 0, "dx is rounded four times, apart eight"


def test_layers_of_one_input_have_one_narrow_product_and_save_their_input_once():
    layers, x, saved = peft_layers((3, 1, 4)), torch.randn(9, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape), t)[1], lambda t: t):
        outs = together(layers, x, torch.float32)
    assert saved == [(9, 16), (9, 8)]
    assert len({out.grad_fn for out in outs}) == 1


@pytest.mark.parametrize("frozen", ["x", "A", "B"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_gets_its_own(frozen):
    layers, x = peft_layers((3, 1, 4)), torch.randn(9, 16, requires_grad=True)
    parts = {"x": [x], "A": [layer.lora_A.default.weight for layer in layers]}
    parts["B"] = [layer.lora_B.default.weight for layer in layers]
    for part in parts[frozen]:
        part.requires_grad_(False)
    leaves = [part for name in parts if name != frozen for part in parts[name]]
    expected = torch.autograd.grad(sum(layer(x).square().sum() for layer in layers), leaves)
    found = torch.autograd.grad(sum(out.square().sum() for out in together(layers, x, torch.float32)), leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_under_autocast_errors_are_not_above_those_of_peft(base, adapters):
    worse = dict.fromkeys(("out", "x", "A", "B"), 0.0)
    for rank in range(1, 9):
        layer = peft_layer(rank, dtype=base)
        layer.lora_A.to(adapters), layer.lora_B.to(adapters)
        x = torch.randn(64, 16).to(base).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            theirs = outcome(layer, layer, x)
            ours = outcome(lambda x, layer=layer: fused(layer, x, torch.bfloat16), layer, x)
        assert [part.dtype for part in ours] == [part.dtype for part in theirs]
        exact = peft_layer(rank).double()
        for (_, to), (_, of) in zip(exact.named_parameters(), layer.named_parameters(), strict=True):
            to.data.copy_(of)
        truth = outcome(exact, exact, x.detach().double().requires_grad_())
        for name, a, b, t in zip(worse, ours, theirs, truth, strict=True):
            mine, peft_s = ((x.detach().double() - t.detach()).norm() / t.detach().norm() for x in (a, b))
            worse[name] += float(mine - peft_s) / 8
    assert all(difference <= 2e-4 for difference in worse.values()), worse


def test_nothing_is_saved_but_the_input_and_its_narrow_product():
    layer, x, saved = peft_layer(), torch.randn(9, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape), t)[1], lambda t: t):
        fused(layer, x, torch.float32)
    assert saved == [(9, 16), (9, 3)]


@pytest.mark.parametrize("what", ["second derivative", "changed adapter", "changed weight"])
def test_what_would_give_a_wrong_gradient_is_an_error(what):
    layer, x = peft_layer(), torch.randn(9, 16, requires_grad=True)
    out = fused(layer, x, torch.float32)
    changed = {"changed adapter": layer.lora_B.default.weight, "changed weight": layer.base_layer.weight}.get(what)
    if changed is not None:
        with torch.no_grad():
            changed.mul_(2)
    message = "differentiable once" if changed is None else "changed between its forward and its backward"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(out.sum(), x, create_graph=changed is None)
