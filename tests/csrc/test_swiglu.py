"""csrc/math/swiglu.h against torch in float64, and the op's torch form against both."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from fastgrpo.swiglu import swiglu, swiglu_grad

EPS = {"f32": 2.0**-24, "f64": 2.0**-53}
# Gates beyond where exp overflows among them.
GATES = [-1e4, -200.0, -89.0, -20.0, -1.2784645, -1e-30, 0.0, 1e-3, 3.0, 20.0, 89.0, 200.0, 1e4]


def numbers() -> list[torch.Tensor]:
    torch.manual_seed(0)
    gate = torch.cat([torch.tensor(GATES), 4 * torch.randn(500)]).double()
    return [gate, *torch.randn(2, gate.numel()).double()]


def truth(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    product = torch.nn.functional.silu(gate) * up
    return [product.detach(), *torch.autograd.grad(product, (gate, up), grad)]


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest error over what the value would be with a slope of 1, since a slope crosses zero."""
    gate, up, grad = numbers()
    sizes = gate * up, up * grad, gate * grad
    return max(
        float(((a - b).abs() / (b.abs() + size.abs() * torch.sigmoid(gate) + 1e-30)).max())
        for a, b, size in zip(found, expected, sizes, strict=True)
    )


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_the_header_s_formulas_err_by_a_few_roundings(csrc_math: ModuleType, precision: str):
    ops = getattr(csrc_math, precision)
    given = [x.numpy() for x in numbers()]
    with np.errstate(over="ignore"):
        product = ops.swiglu(*given[:2])
        again, of_gate, of_up = (getattr(ops, f"swiglu_grad_{name}")(*given) for name in ("product", "gate", "up"))
    assert (product == again).all()
    found = [torch.from_numpy(x).double() for x in (product, of_gate, of_up)]
    assert worst(found, truth(*numbers())) < 8 * EPS[precision]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_s_form_is_the_same(dtype: torch.dtype):
    gate, up, grad = (x.to(dtype) for x in numbers())
    product, *grads = (torch.empty_like(gate) for _ in range(4))
    swiglu(gate, up, product)
    swiglu_grad(gate, up, grad, *grads)
    assert torch.equal(grads[2], product)
    found = [x.double() for x in (product, *grads[:2])]
    assert worst(found, truth(*numbers())) < 8 * EPS["f32" if dtype == torch.float32 else "f64"]
    # In place of what is read, and with nobody asking for the product.
    swiglu_grad(gate, up, grad, gate, up, None)
    assert torch.equal(gate, grads[0])
    assert torch.equal(up, grads[1])
    assert not torch.equal(grad, grads[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_rounded_once_and_transformers_twice(dtype: torch.dtype):
    gate, up, grad = (x[len(GATES) :].to(dtype) for x in numbers())
    product = torch.empty_like(gate)
    swiglu(gate, up, product)
    exact = truth(*(x.double() for x in (gate, up, grad)))[0]
    theirs = torch.nn.functional.silu(gate) * up
    assert ((product.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-7).all()
    assert (product - exact).norm() < 0.9 * (theirs - exact).norm()
