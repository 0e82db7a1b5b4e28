"""The gated MLP as one function against its layers one by one: values, gradients, what is saved and what is computed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastgrpo import mlp
from fastgrpo.lora import Adapted
from fastgrpo.mlp import Frozen, GatedMlp, gated_mlp

HIDDEN, INNER, RANK = 8, 20, 3
NAMES = ("gate", "up", "down")


class Layers:
    """Three layers, which of them have adapters, and the same as modules would compute it."""

    def __init__(self, adapted=NAMES, bias=False, dtype=torch.float32, base=None, adapters=None, seed=0) -> None:
        torch.manual_seed(seed)
        self.parts, self.trained = [], []
        for name in NAMES:
            k, m = (INNER, HIDDEN) if name == "down" else (HIDDEN, INNER)
            weight = (torch.randn(m, k) / k**0.5).to(base or dtype)
            offset = torch.randn(m).to(base or dtype) if bias else None
            if name not in adapted:
                self.parts.append(Frozen(weight, offset))
                self.trained += [None, None]
                continue
            down, up = torch.randn(RANK, k) / k**0.5, torch.randn(m, RANK) / RANK**0.5
            trained = [x.to(adapters or dtype).requires_grad_() for x in (down, up)]
            self.parts.append(
                Adapted(weight, offset, *(x if x.dtype == dtype else x.detach().to(dtype) for x in trained), 0.7)
            )
            self.trained += trained
        self.dtype = dtype

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        return gated_mlp(x, GatedMlp(*self.parts, self.dtype), self.trained)

    def one_by_one(self, x: torch.Tensor) -> torch.Tensor:
        def linear(number: int, x: torch.Tensor) -> torch.Tensor:
            part, (down, up) = self.parts[number], self.trained[2 * number : 2 * number + 2]
            out = torch.nn.functional.linear(x, part.weight, part.bias)
            return out if down is None else out + torch.nn.functional.linear(x @ down.t(), up) * part.scale

        return linear(2, torch.nn.functional.silu(linear(0, x)) * linear(1, x))

    def leaves(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [leaf for leaf in (x, *self.trained) if leaf is not None and leaf.requires_grad]


def some(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def outcome(function, layers: Layers, x: torch.Tensor, autocast=False) -> list[torch.Tensor]:
    leaves = layers.leaves(x)
    for leaf in leaves:
        leaf.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = function(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def checkpointed(reentrant: bool):
    return lambda function: lambda x: checkpoint(function, x, use_reentrant=reentrant)


AROUND = {"nothing": lambda f: f, "checkpoint": checkpointed(False), "reentrant": checkpointed(True)}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of at most 6 rows in float32."""
    monkeypatch.setattr(mlp, "_BLOCK_BYTES", 6 * INNER * 4)
    monkeypatch.setattr(mlp, "TILE", 2)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapted", [NAMES, ("gate",), ("up", "down"), ("down",), ()], ids="-".join)
def test_values_and_gradients_are_those_of_the_layers(adapted, bias, around, small_blocks):
    layers, x = Layers(adapted, bias), some(2, 10, HIDDEN)
    run = AROUND[around]
    found, expected = outcome(run(layers.fused), layers, x), outcome(layers.one_by_one, layers, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(layers.fused(x), found[0])


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("shape", [(HIDDEN,), (0, HIDDEN), (1, 0, HIDDEN), (7, HIDDEN)])
def test_any_shape_and_no_rows_at_all(shape, around):
    layers, x = Layers(), some(*shape)
    found, expected = outcome(AROUND[around](layers.fused), layers, x), outcome(layers.one_by_one, layers, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_derivatives_are_those_of_finite_differences(small_blocks):
    layers, x = Layers(dtype=torch.float64), some(13, HIDDEN, dtype=torch.float64)

    def function(x, *trained):
        parts = [part._replace(down=trained[2 * i], up=trained[2 * i + 1]) for i, part in enumerate(layers.parts)]
        return gated_mlp(x, GatedMlp(*parts, torch.float64), trained)

    assert torch.autograd.gradcheck(function, (x, *layers.trained), fast_mode=True)


@pytest.mark.parametrize("around", ["nothing", "checkpoint"])
def test_what_is_frozen_gets_nothing(around):
    layers = Layers()
    layers.trained[0].requires_grad_(False)
    layers.trained[5].requires_grad_(False)
    for x in (some(5, HIDDEN), some(5, HIDDEN).requires_grad_(False)):
        found = outcome(AROUND[around](layers.fused), layers, x)
        for ours, theirs in zip(found, outcome(layers.one_by_one, layers, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("around", ["nothing", "checkpoint"])
@pytest.mark.parametrize(("base", "adapters"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16",) * 2])
def test_in_bf16_errors_are_not_above_those_of_the_layers(base, adapters, around, small_blocks):
    dtypes = {"base": getattr(torch, base), "adapters": getattr(torch, adapters)}
    errors = torch.zeros(2, 8)
    for seed in range(6):
        layers, x = Layers(dtype=torch.bfloat16, seed=seed, **dtypes), some(500, HIDDEN, dtype=dtypes["base"])
        found = [outcome(f, layers, x, autocast=True) for f in (AROUND[around](layers.fused), layers.one_by_one)]
        assert [part.dtype for part in found[0]] == [part.dtype for part in found[1]]
        exact = Layers(dtype=torch.float64)
        exact.parts = [
            e._replace(weight=part.weight.double()) for e, part in zip(exact.parts, layers.parts, strict=True)
        ]
        for leaf, of in zip(exact.trained, layers.trained, strict=True):
            leaf.data.copy_(of)
        truth = outcome(exact.one_by_one, exact, x.detach().double().requires_grad_())
        errors += torch.tensor([[(a - t).norm() / t.norm() for a, t in zip(x, truth, strict=True)] for x in found])
    ours, theirs = errors
    assert (ours <= theirs).all(), (ours, theirs)


def saved_bytes(function, x: torch.Tensor) -> int:
    """Of storages that autograd saved, once each."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(x)  # noqa: F841 - alive, so that no storage takes the place of another
    return sum(storages.values())


def test_gate_and_up_are_saved_where_four_such_matrices_were():
    layers, x, count = Layers(), some(1000, HIDDEN), 1000 * 4
    weights = 4 * sum(part.weight.numel() + part.down.numel() + part.up.numel() for part in layers.parts)
    assert saved_bytes(layers.fused, x) == count * (HIDDEN + 2 * INNER + 2 * RANK)
    assert saved_bytes(layers.one_by_one, x) - weights >= count * (HIDDEN + 4 * INNER + 3 * RANK)
    frozen = Layers(())
    assert saved_bytes(frozen.fused, x) == count * 2 * INNER


class _Products(TorchDispatchMode):
    """Multiplications in products with a weight, by number of rows and in all."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.count[RANK in (*a.shape, *b.shape)] += a.shape[0] * a.shape[1] * b.shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("around", "expected"), [("nothing", 6), ("checkpoint", 8), ("reentrant", 9)])
def test_a_checkpoint_s_second_forward_does_not_compute_the_mlp(around, expected, small_blocks):
    """One by one it is nine with either kind of checkpoint."""
    layers, x = Layers(), some(20, HIDDEN)
    with _Products() as products:
        outcome(AROUND[around](layers.fused), layers, x)
    assert products.count[False] == expected * 20 * HIDDEN * INNER


def test_what_follows_in_a_checkpoint_is_given_the_values(small_blocks):
    layers, x = Layers(), some(20, HIDDEN)

    def followed(function):
        return lambda x: function(x).tanh().sin() + x

    found = outcome(AROUND["checkpoint"](followed(layers.fused)), layers, x)
    for ours, theirs in zip(found, outcome(followed(layers.one_by_one), layers, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("around", ["nothing", "checkpoint"])
def test_a_graph_is_used_twice_with_the_same_gradients(around, small_blocks):
    layers, x = Layers(), some(20, HIDDEN)
    out = AROUND[around](layers.fused)(x)
    first, second = (torch.autograd.grad(out.sum(), layers.leaves(x), retain_graph=keep) for keep in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), layers.leaves(x))


def test_a_second_derivative_and_a_changed_weight_are_refused():
    layers, x = Layers(), some(5, HIDDEN)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(layers.fused(x).sum(), x, create_graph=True)
    for changed in (layers.parts[1].weight, layers.trained[4]):
        out = layers.fused(x)
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="was changed between"):
            out.sum().backward()


@pytest.mark.parametrize(("count", "sizes"), [(0, [0]), (1, [1]), (6, [6]), (7, [4, 3]), (20, [6, 6, 6, 2])])
def test_blocks_are_even_whole_tiles_and_cover_all_rows(count, sizes, small_blocks):
    blocks = mlp._blocks(count, torch.empty(INNER, HIDDEN))
    assert [block.stop - block.start for block in blocks] == sizes
    assert [block.start for block in blocks] == [sum(sizes[:i]) for i in range(len(sizes))]
