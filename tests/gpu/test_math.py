"""csrc/math as nvcc or hipcc compiled it, on a device, against torch."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgrpo.kernels.library import library_info, load_library
from fastgrpo.objective import (
    CLIPPED_LOSS_TYPES,
    LOSS_TYPES,
    Objective,
    sampler_importance_ratio,
    token_terms,
    vespo_weights,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device"),
    pytest.mark.skipif(load_library() is None, reason=library_info().reason),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


class Params(ctypes.Structure):
    """ObjectiveParams of csrc/math/objective.h."""

    _fields_ = (
        ("loss_type", ctypes.c_int),
        ("epsilon_low", ctypes.c_double),
        ("epsilon_high", ctypes.c_double),
        ("delta", ctypes.c_double),
        ("beta", ctypes.c_double),
        ("bias_correct_kl", ctypes.c_bool),
        ("sapo_temperature_pos", ctypes.c_double),
        ("sapo_temperature_neg", ctypes.c_double),
    )


def launch(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    pointers = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status = getattr(load_library(), f"fastgrpo_check_{name}")(int(dtype == torch.float64), *pointers, stream)
    assert status == 0, f"{name}: runtime error {status}"
    torch.cuda.synchronize()


def worst(found: Tensor, expected: Tensor) -> float:
    """Largest relative error; equal entries, infinities included, are exact, and NaN must meet NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    assert (found.isnan() == expected.isnan()).all(), f"NaN in {found} against {expected}"
    error = (found - expected).abs() / (1 + expected.abs())
    return error.masked_fill((found == expected) | expected.isnan(), 0.0).max().item()


@DTYPES
@pytest.mark.parametrize("columns", [1, 7, 100, 4097])
def test_softmax_on_the_device_equals_torch(dtype: torch.dtype, columns: int) -> None:
    z = (8 * torch.randn(64, columns, dtype=torch.float64)).to(dtype).cuda()
    targets = torch.randint(columns, (64,), dtype=torch.int32).cuda()
    if columns > 1:
        z[0, 0] = math.nan
        z[1, 1] = 1e4
        z[2, : columns // 2] = -math.inf
        targets[2] = columns - 1
        targets[3] = z[3].argmax()
        z[4, targets[4].item()] = -math.inf
    out = torch.empty(3, 64, dtype=dtype, device="cuda")
    launch("softmax", dtype, z, targets, out, ctypes.c_longlong(64), ctypes.c_int(columns))
    logp = torch.log_softmax(z.double(), -1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -math.inf, 0.0)).sum(-1)
    truth = logp.gather(1, targets.long()[:, None])[:, 0], torch.logsumexp(z.double(), -1), entropy
    for name, found, expected in zip(("logprob", "lse", "entropy"), out, truth, strict=True):
        error = worst(found, expected)
        assert error <= (3e-6 if dtype == torch.float32 else 1e-13), f"{name}: {error:.3g}"


@DTYPES
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("delta", [None, 1.5])
def test_token_terms_on_the_device_equal_autograd(
    dtype: torch.dtype, loss_type: str, beta: float, delta: float | None
) -> None:
    options = Objective(loss_type, epsilon_high=0.3, delta=delta, beta=beta, max_completion_length=16)
    n = 4096
    logprob = -4 * torch.rand(n)
    old = logprob - 0.5 * torch.randn(n) * (torch.rand(n) > 0.3)
    fields = torch.stack(
        [
            logprob,
            old,
            logprob + torch.randn(n),
            torch.randn(n),
            (torch.rand(n) > 0.1) * torch.rand(n),
            3 * torch.rand(n),
        ]
    )
    inputs = fields.to(dtype).cuda()
    out = torch.empty(5, n, dtype=dtype, device="cuda")
    params = Params(
        LOSS_TYPES.index(loss_type),
        0.2,
        0.3,
        math.inf if delta is None else delta,
        beta,
        True,
        1.0,
        options.sapo_temperature_neg,
    )
    launch("tokens", dtype, ctypes.byref(params), inputs, out, ctypes.c_longlong(n))

    logprob, old, reference, advantage, multiplier, phi = fields.double()
    logprob.requires_grad_()
    terms = token_terms(options, logprob, advantage, logprob - old, reference, multiplier, phi)
    (grad,) = torch.autograd.grad(terms.loss.sum(), logprob)
    # Within a few roundings of a clip bound, float32 may take the other branch.
    bounds = torch.tensor([0.8, 1.3, 0.3, 1.5], dtype=torch.float64)
    clear = ((logprob - old).exp().detach()[:, None] - bounds).abs().min(1).values > 1e-5
    kl = torch.zeros(n) if terms.kl is None else terms.kl
    clips, cap = loss_type in CLIPPED_LOSS_TYPES, loss_type == "cispo"
    flags = (
        clips * ((terms.ratio < 0.8) & (advantage < 0))
        + 2 * clips * ((terms.ratio > 1.3) & (advantage > 0))
        + 4 * cap * ((terms.ratio > 0.3) & (advantage > 0))
    )
    for name, found, expected in zip(
        ("loss", "grad", "ratio", "kl", "flags"), out.cpu(), (terms.loss, grad, terms.ratio, kl, flags), strict=True
    ):
        error = worst(found[clear], expected.detach()[clear])
        assert error <= (2e-5 if dtype == torch.float32 else 1e-7), f"{name}: {error:.3g}"


@DTYPES
def test_sequence_weights_on_the_device_equal_torch(dtype: torch.dtype) -> None:
    log_weight = torch.tensor([-30.0, -18.0, -1.0, 0.0, 0.5, 1.0, 2.0, 30.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    inputs = torch.stack([log_weight, advantage]).to(dtype).cuda()
    out = torch.empty(6, 8, dtype=dtype, device="cuda")
    launch("sequences", dtype, inputs, out, ctypes.c_longlong(8))

    column, ones = log_weight[:, None], torch.ones(8, 1, dtype=torch.float64)
    expected = (
        log_weight.clamp(-20, 20),
        log_weight.exp().log().clamp(math.log(1e-8), 20),
        vespo_weights(Objective("vespo"), column, advantage[:, None], ones)[:, 0],
        sampler_importance_ratio(column, 0 * ones, ones, "token_truncate", 0.0, 3.0)[:, 0],
        sampler_importance_ratio(column, 0 * ones, ones, "token_mask", 0.0, 3.0)[:, 0],
        -torch.expm1(log_weight),
    )
    names = ("log ratio", "log sampler", "phi", "truncated", "masked", "complement")
    for name, found, value in zip(names, out, expected, strict=True):
        error = worst(found, value)
        assert error <= (2e-5 if dtype == torch.float32 else 1e-13), f"{name}: {error:.3g}"
