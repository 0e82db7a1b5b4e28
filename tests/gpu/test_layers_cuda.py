"""Fused layers and merged attention on a device: errors against float64, beside those of what they stand for."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fastgrpo.kernels.flash import merge_attention
from fastgrpo.lora import Adapted, SharedInput, lora_linear, lora_linears
from fastgrpo.rotary import rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def layer(rank, adapters, base, bias=False):
    torch.manual_seed(rank)
    linear = torch.nn.Linear(256, 384, bias=bias, device="cuda", dtype=base).requires_grad_(False)
    found = Linear(linear, "default", LoraConfig(r=rank, lora_alpha=3 * rank), r=rank, lora_alpha=3 * rank).cuda()
    for module in (found.lora_A.default, found.lora_B.default):
        module.to(adapters)
        torch.nn.init.normal_(module.weight, std=0.1)
    return found


def gradients(function, x, found):
    leaves = [x, found.lora_A.default.weight, found.lora_B.default.weight]
    torch.manual_seed(0)
    out = function(x)
    return [out, *torch.autograd.grad(out, leaves, torch.randn_like(out, dtype=torch.float32).to(out.dtype))]


def fused(found, dtype):
    down, up, base = found.lora_A.default.weight, found.lora_B.default.weight, found.base_layer
    copies = (part.detach().to(dtype) for part in (down, up))
    adapted = Adapted(base.weight, base.bias, *copies, found.scaling["default"])
    return lambda x: lora_linear(x, adapted, down, up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapters", ["float32", "same"])
@pytest.mark.parametrize(("rank", "bias", "base"), [(16, False, "same"), (5, True, "same"), (64, False, "float32")])
def test_errors_are_not_above_those_of_peft_s_layer(rank, bias, base, adapters, dtype):
    kinds = {"same": dtype, "float32": torch.float32}
    found = layer(rank, kinds[adapters], kinds[base], bias)
    x = torch.randn(3, 500, 256, device="cuda").to(kinds[base]).requires_grad_()
    with torch.autocast("cuda", dtype):
        stock = gradients(found, x, found)
        ours = gradients(fused(found, dtype), x, found)
    assert [a.dtype for a in ours] == [a.dtype for a in stock]
    exact = layer(rank, kinds[adapters], kinds[base], bias).double()
    truth = gradients(exact, x.detach().double().requires_grad_(), exact)
    # The same gradient of the output in all three.
    errors = [
        [float((a.double() - t).norm() / t.norm()) for a, t in zip(found, truth, strict=True)]
        for found in (ours, stock)
    ]
    for name, mine, theirs in zip(("out", "x", "A", "B"), *errors, strict=True):
        assert mine <= 1.1 * theirs + 1e-6, f"{name}: {mine:.2e}, PEFT's {theirs:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [(16, 16, 16), (5, 3, 64), (1, 8, 2)], ids=str)
def test_errors_of_layers_of_one_input_are_not_above_those_of_peft_s(ranks, dtype):
    found = [layer(rank, torch.float32, dtype, bias=rank == 8) for rank in ranks]
    trained = [part.default.weight for one in found for part in (one.lora_A, one.lora_B)]
    down = torch.cat([part.detach().to(dtype) for part in trained[::2]])
    adapted = [
        Adapted(one.base_layer.weight, one.base_layer.bias, down, up.detach().to(dtype), one.scaling["default"])
        for one, up in zip(found, trained[1::2], strict=True)
    ]
    x = torch.randn(3, 500, 256, device="cuda").to(dtype).requires_grad_()
    exact = [layer(rank, torch.float32, dtype, bias=rank == 8).double() for rank in ranks]
    exact_x = x.detach().double().requires_grad_()

    def outcome(outs, x, layers):
        leaves = [x, *(part.default.weight for one in layers for part in (one.lora_A, one.lora_B))]
        torch.manual_seed(0)
        grads = [torch.randn_like(out, dtype=torch.float32).to(dtype).to(out.dtype) for out in outs]
        return [*outs, *torch.autograd.grad(outs, leaves, grads)]

    with torch.autocast("cuda", dtype):
        stock = outcome([one(x) for one in found], x, found)
        ours = outcome(lora_linears(x, SharedInput.of(adapted, down), trained), x, found)
    truth = outcome([one(exact_x) for one in exact], exact_x, exact)
    for number, (mine, theirs, true) in enumerate(zip(ours, stock, truth, strict=True)):
        assert mine.dtype == theirs.dtype
        error, bound = (float((part.double() - true).norm() / true.norm()) for part in (mine, theirs))
        assert error <= 1.1 * bound + 1e-6, f"{number}: {error:.2e}, PEFT's {bound:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(333, 6, 96), (1, 1, 8), (1000, 16, 128)])
def test_merged_attention_is_rounded_once(tokens, heads, width, dtype):
    out, more = (torch.randn(tokens, heads, width, device="cuda").to(dtype) for _ in range(2))
    lse, more_lse = (40 * torch.randn(heads, tokens, device="cuda") for _ in range(2))
    continued = torch.rand(tokens, device="cuda") < 0.7
    more[~continued], more_lse[:, ~continued] = float("nan"), float("inf")
    expected_lse = torch.where(continued, torch.logaddexp(lse.double(), more_lse.double()), lse.double())
    shares = [(x.double() - expected_lse).exp().t().unsqueeze(-1) for x in (lse, more_lse)]
    merged = out.double() * shares[0] + more.double() * shares[1]
    expected = torch.where(continued.view(-1, 1, 1), merged, out.double())
    found, found_lse = merge_attention(out, lse, more, more_lse, continued)
    torch.testing.assert_close(found_lse.double(), expected_lse, rtol=2e-7, atol=2e-5)
    step = torch.finfo(dtype).eps
    assert ((found.double() - expected).abs() <= step * expected.abs() + 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "width"), [(1, (16, 8), 128), (2, (3, 1), 16), (3, (4, 4), 96), (1, (2, 2), 20)]
)
@pytest.mark.parametrize("layout", ["heads of a token together", "tokens of a head together"])
def test_rotated_heads_are_rounded_once(layout, batch, heads, width, dtype):
    def made(count):
        made = torch.randn(batch, 77, count, width, device="cuda").to(dtype).transpose(1, 2)
        return (made if layout.startswith("heads") else made.contiguous()).detach().requires_grad_()

    query, key = (made(count) for count in heads)
    cos, sin = (torch.randn(batch, 77, width, device="cuda").to(dtype) for _ in range(2))
    ours = rotary(query, key, cos, sin)
    exact = [x.detach().double().requires_grad_() for x in (query, key)]
    truth = apply_rotary_pos_emb(*exact, cos.double(), sin.double())
    grads = [torch.randn_like(x) for x in ours]
    found = torch.autograd.grad(ours, (query, key), grads)
    expected = torch.autograd.grad(truth, exact, [grad.double() for grad in grads])
    step = torch.finfo(dtype).eps
    for a, b in zip((*ours, *found), (*truth, *expected), strict=True):
        # One rounding of the result, where a kernel computes it; two in torch ops, for a width that 16 does not divide.
        assert ((a.double() - b).abs() <= (1 if width % 16 == 0 else 4) * step * b.abs().clamp(min=0.5)).all()
