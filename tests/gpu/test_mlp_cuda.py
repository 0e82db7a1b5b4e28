"""The gated MLP on a device: its kernels against float64, its function beside the layers one by one, and its memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from fastgrpo import mlp
from fastgrpo.lora import Adapted, lora_linear
from fastgrpo.mlp import GatedMlp, gated_mlp
from fastgrpo.swiglu import swiglu, swiglu_grad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIDDEN, INNER, RANK = 256, 704, 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 264), (500, 1536), (0, 16), (5, 20)])
def test_the_gate_and_its_gradients_are_rounded_once(shape, dtype):
    """A width of 20 is torch's ops."""
    gate, up, grad = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    gate.mul_(4).view(-1)[:2] = torch.tensor([-200.0, 200.0]).to(gate) if gate.numel() else gate.new_empty(0)
    product, *others = (torch.full_like(gate, float("nan")) for _ in range(4))
    swiglu(gate, up, product)
    swiglu_grad(gate, up, grad, *others)
    exact = [x.double().requires_grad_() for x in (gate, up)]
    truth = silu(exact[0]) * exact[1]
    expected = [truth, *torch.autograd.grad(truth, exact, grad.double()), truth]
    # Half a step of the dtype, and fp32's own errors: the slope is a sum that may cancel.
    step = torch.finfo(dtype).eps / 2
    for found, of in zip((product, *others), expected, strict=True):
        assert ((found.double() - of).abs() <= 1.001 * step * of.abs() + 4e-6 * (1 + (up * grad).double().abs())).all()
    assert torch.equal(product, others[2])
    # In place of what is read, and without the product.
    swiglu_grad(gate, up, grad, gate, up, None)
    assert torch.equal(gate, others[0])
    assert torch.equal(up, others[1])


def test_arrays_that_are_not_alike_are_refused():
    x = torch.zeros(4, 8, device="cuda", dtype=torch.bfloat16)
    for wrong, match in (
        (x[:2], "product"),
        (x.float(), "product"),
        (x.cpu(), "product"),
        (torch.zeros(33, device="cuda", dtype=x.dtype)[1:], "16 bytes"),
    ):
        with pytest.raises(RuntimeError, match=match):
            torch.ops.fastgrpo.swiglu(x, x, wrong)
    with pytest.raises(RuntimeError, match="8 must divide"):
        torch.ops.fastgrpo.swiglu(*[torch.zeros(12, device="cuda")] * 3)
    with pytest.raises(RuntimeError, match=r"torch\.float32, torch\.bfloat16 or torch\.float16"):
        torch.ops.fastgrpo.swiglu(*[torch.zeros(16, device="cuda").double()] * 3)


def layers(dtype, hidden=HIDDEN, inner=INNER):
    torch.manual_seed(0)
    parts, trained = [], []
    for m, k in ((inner, hidden), (inner, hidden), (hidden, inner)):
        weight = (torch.randn(m, k, device="cuda") / k**0.5).to(dtype)
        pair = [torch.randn(RANK, k, device="cuda") / k**0.5, torch.randn(m, RANK, device="cuda") / RANK**0.5]
        trained += [x.requires_grad_() for x in pair]
        parts.append(Adapted(weight, None, *(x.detach().to(dtype) for x in pair), 0.7))
    return parts, trained


def outcome(function, x, trained):
    for leaf in (x, *trained):
        leaf.grad = None
    out = function(x)
    out.backward(torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).to(out.dtype))
    return [out.detach(), x.grad, *(leaf.grad for leaf in trained)]


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("in_checkpoint", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_not_above_those_of_the_layers_one_by_one(dtype, in_checkpoint, blocks, monkeypatch):
    monkeypatch.setattr(mlp, "_BLOCK_BYTES", -(-1000 // blocks) * INNER * 2)
    parts, trained = layers(dtype)
    x = torch.randn(2, 500, HIDDEN, device="cuda").to(dtype).requires_grad_()

    def fused(x):
        return gated_mlp(x, GatedMlp(*parts, dtype), trained)

    def one_by_one(x):
        gate, up = (lora_linear(x, parts[i], *trained[2 * i : 2 * i + 2]) for i in range(2))
        return lora_linear(silu(gate) * up, parts[2], *trained[4:])

    def exact(x, *trained):
        def layer(i, x):
            down, up = trained[2 * i : 2 * i + 2]
            return linear(x, parts[i].weight.double()) + 0.7 * linear(linear(x, down), up)

        return layer(2, silu(layer(0, x)) * layer(1, x))

    ours = outcome((lambda x: checkpoint(fused, x, use_reentrant=False)) if in_checkpoint else fused, x, trained)
    theirs = outcome(one_by_one, x, trained)
    wide = [leaf.detach().double().requires_grad_() for leaf in trained]
    truth = outcome(lambda x: exact(x, *wide), x.detach().double().requires_grad_(), wide)
    for a, b, t in zip(ours, theirs, truth, strict=True):
        assert (a - t).norm() <= 1.1 * (b - t).norm()


@pytest.mark.parametrize(("in_checkpoint", "matrices"), [(True, 0), (False, 2)])
def test_no_more_than_three_blocks_are_alive_beside_what_is_saved(in_checkpoint, matrices, monkeypatch):
    rows, hidden, inner = 8192, 512, 4096
    monkeypatch.setattr(mlp, "_BLOCK_BYTES", 1024 * inner * 2)
    parts, trained = layers(torch.bfloat16, hidden, inner)
    x = torch.randn(rows, hidden, device="cuda").bfloat16().requires_grad_()

    def fused(x):
        return gated_mlp(x, GatedMlp(*parts, torch.bfloat16), trained)

    run = (lambda x: checkpoint(fused, x, use_reentrant=False)) if in_checkpoint else fused
    outcome(run, x, trained)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outcome(run, x, trained)
    used = torch.cuda.max_memory_allocated() - before
    # Output, its gradient in fp32 and 16 bit, dx and its sum; adapters' gradients.
    narrow = 2 * rows * hidden * 2 + rows * hidden * (4 + 2) + sum(leaf.numel() * 8 for leaf in trained) + (16 << 20)
    assert used <= (3 * 1024 + matrices * rows) * inner * 2 + narrow
