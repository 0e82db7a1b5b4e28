"""The head as CUDA devices run it, `kernels/cuda.py` included, with csrc/cuda/row.h and torch's products on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from cuda_on_cpu import serve_on_the_cpu
from row_kernels import GIVEN, OBJECTIVE, ONE, Params, RowArgs
from torch import Tensor
from truth import relative_error

from fastgrpo import Objective, linear_grpo_loss, linear_logprob

BF16, FP16 = torch.bfloat16, torch.float16
COUNT, WIDTH, WORDS = 150, 16, 203
# Rows in a chunk; eight make a batch.
CHUNK = 8 * 4 * 256


class RowOps:
    """The row ops of csrc/ops.cpp over the CPU's twin of the kernels; `calls` of each."""

    def __init__(self, row_twin: ctypes.CDLL) -> None:
        self.row_twin = row_twin
        self.calls: list[str] = []

    def row_pass(self, *values: Any) -> None:
        *head, first, second, scale = values
        self.run("row_pass", ONE, head, first, scale, None, second_grad=second)

    def row_objective(self, *values: Any) -> None:
        head, names = values[:9], ("advantages", "token_weights", "old_logprobs", "ref_logprobs", "multiplier", "phi")
        inputs = dict(zip((*names, "entropy_weights"), values[9:16], strict=True))
        *params, grad, scale, factors = values[16:]
        self.run("row_objective", OBJECTIVE, head, grad, scale, factors, Params(*params), **inputs)

    def row_grad(self, *values: Any) -> None:
        *head, g, h, grad, scale, factors = values
        self.run("row_grad", GIVEN, head, grad, scale, factors, grad_logprobs=g, grad_entropy=h)

    def run(self, name, coefficients, head, grad, scale, factors, params=None, **tensors: Tensor | None) -> None:
        logits, targets, bias, temperature, logit_scale, softcap, logprobs, lse, entropy = head
        self.calls.append(name)
        args = RowArgs(
            logits_pitch=logits.stride(0),
            targets_are_64_bit=True,
            rows=len(logits),
            columns=logits.shape[1],
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap or 0.0,
            coefficients=coefficients,
            grad_scale=scale,
        )
        if params is not None:
            args.params = params
        if grad is not None:
            args.grad_dtype, args.grad_pitch = int(grad.dtype == FP16), grad.stride(0)
        if tensors.get("second_grad") is not None:
            args.second_pitch = tensors["second_grad"].stride(0)
        if factors is not None:
            factors.fill_(float("nan"))
        tensors |= {"logits": logits, "targets": targets, "bias": bias, "grad": grad, "row_factors": factors}
        for field, tensor in (tensors | {"logprobs": logprobs, "lse": lse, "entropy": entropy}).items():
            if tensor is not None:
                setattr(args, field, tensor.data_ptr())
        self.row_twin.row_twin(ctypes.byref(args))


@pytest.fixture
def row_ops(row_twin: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> RowOps:
    ops = RowOps(row_twin)
    named = {name: getattr(ops, name) for name in ("row_pass", "row_objective", "row_grad")}
    serve_on_the_cpu(monkeypatch, named)
    return ops


def head(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias whose values the dtype holds, and targets, some of them ignored."""
    weight = (torch.randn(WORDS, WIDTH) * 0.5).to(dtype).float()
    hidden, targets = torch.randn(COUNT, WIDTH).to(dtype).float(), torch.randint(WORDS, (COUNT,))
    targets[::9] = -100
    return [hidden, weight, torch.randn(WORDS).to(dtype).float()], targets


def leaves(values: list[Tensor], dtype: torch.dtype, frozen: bool) -> list[Tensor]:
    return [x.to(dtype, copy=True).requires_grad_(i == 0 or not frozen) for i, x in enumerate(values)]


def assert_close(found: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    for value, truth in zip(found, exact, strict=True):
        assert (
            value.grad is truth.grad is None
            or relative_error(value.grad, truth.grad) <= {BF16: 4e-3, FP16: 6e-4}[dtype]
        )


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 2.0**20])
def test_log_probs_and_entropies_equal_float64(row_ops, dtype, frozen, scale):
    values, targets = head(dtype)
    options = {"temperature": 0.8, "softcap": 4.0, "return_entropy": True, "chunk_bytes": CHUNK}
    g, h = scale * torch.randn(COUNT), 0.1 * scale * torch.randn(COUNT)
    g[COUNT // 2 :] *= 1e-3  # batches of rows whose largest differ
    found, exact = leaves(values, torch.float32, frozen), leaves(values, torch.float64, frozen)
    for inputs, compute_dtype in ((found, dtype), (exact, torch.float64)):
        out = linear_logprob(*inputs[:2], targets, inputs[2], compute_dtype=compute_dtype, **options)
        torch.autograd.backward((out.logprobs, out.entropy), (g.to(out.logprobs), h.to(out.logprobs)))
    assert_close(found, exact, dtype)
    assert row_ops.calls.count("row_pass") > 8 and ("row_grad" in row_ops.calls) == (not frozen)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_the_loss_in_one_pass_equals_float64(row_ops, dtype, frozen, loss_type):
    values, targets = head(dtype)
    segments, advantages = torch.tensor([0, 40, 40, 100, COUNT]), torch.tensor([1.0, -1.0, 0.3, -1e-3])
    old, ref = (linear_logprob(*values[:2], targets).logprobs + 0.1 * torch.randn(COUNT) for _ in range(2))
    found, exact = leaves(values, torch.float32, frozen), leaves(values, torch.float64, frozen)
    for inputs, compute_dtype in ((found, dtype), (exact, torch.float64)):
        loss, _ = linear_grpo_loss(
            *inputs[:2], targets, segments, advantages, Objective(loss_type, beta=0.04, entropy_coef=0.01), old, ref,
            bias=inputs[2], compute_dtype=compute_dtype, chunk_bytes=CHUNK,
        )  # fmt: skip
        (loss * 2.0**16).backward()
    assert_close(found, exact, dtype)
    assert set(row_ops.calls) == {"row_objective"} and len(row_ops.calls) > 8


@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**50])
def test_a_gradient_scaler_trains_as_float32_does_and_recovers_from_an_overflow(row_ops, init_scale):
    def train(half: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        body, lm_head = torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, WORDS)
        parameters = [*body.parameters(), *lm_head.parameters()]
        start = [x.detach().clone() for x in parameters]
        inputs, targets = torch.randn(COUNT, 8), torch.randint(WORDS, (COUNT,))
        segments, advantages = torch.tensor([0, 90, COUNT]), torch.tensor([1.0, -0.7])
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=init_scale, backoff_factor=2.0**-20, growth_interval=1000, enabled=half
        )
        updates = skipped = 0
        while updates < 3 and skipped < 9:
            optimizer.zero_grad()
            with torch.autocast("cpu", FP16, enabled=half):
                loss, _ = linear_grpo_loss(
                    body(inputs), lm_head.weight, targets, segments, advantages, Objective("bnpo"), bias=lm_head.bias
                )
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            kept = scaler.get_scale() == before
            updates, skipped = updates + kept, skipped + (not kept)
        return [x.detach() - y for x, y in zip(parameters, start, strict=True)], skipped

    moved, skipped = train(True)
    wanted, _ = train(False)
    assert (skipped > 0) == (init_scale == 2.0**50) and "row_objective" in row_ops.calls
    assert all(relative_error(found, exact) <= 1e-2 for found, exact in zip(moved, wanted, strict=True))
