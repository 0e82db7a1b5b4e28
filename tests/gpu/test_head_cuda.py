"""The torch-op head on a CUDA device: float64 truth, fp32 sums of 16-bit products, no surprise against the CPU."""

from __future__ import annotations

import pytest
import torch
from truth import logits_float64, logprobs_float64, relative_error, worst_row_error

from fastgrpo import Objective, backends, left_pack, linear_grpo_loss, linear_logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def make(count: int, width: int, vocabulary: int, dtype: torch.dtype):
    hidden = torch.randn(count, width, device="cuda").to(dtype)
    weight = (torch.randn(vocabulary, width, device="cuda") * 2 / width**0.5).to(dtype)
    targets = torch.randint(0, vocabulary, (count,), device="cuda")
    peaked = torch.rand(count, device="cuda") < 0.5
    hidden[peaked] += 2 * weight[targets[peaked]]
    return hidden, weight, targets


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("count", "width", "vocabulary"),
    [(0, 64, 257), (1, 100, 7), (129, 72, 50257), (300, 896, 151936), (64, 2048, 32000), (7, 64, 1)],
)
def test_equals_float64(count, width, vocabulary, dtype, frozen):
    hidden, weight, targets = make(count, width, vocabulary, dtype)
    if count > 5:
        targets[3] = -100
    leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    exact, exact_head = hidden.double().requires_grad_(), weight.double().requires_grad_(not frozen)
    grads = torch.randn(count, device="cuda"), torch.randn(count, device="cuda")
    out = linear_logprob(leaf, head, targets, temperature=0.9, softcap=30.0, return_entropy=True, chunk_bytes=1 << 26)
    logits = logits_float64(exact, exact_head, temperature=0.9, softcap=30.0)
    logprobs, entropy = logprobs_float64(logits, targets)
    limit = (1e-5 if dtype == torch.float32 else 1e-3) + 8 * 2**-24 * 34
    if count:
        assert (out.logprobs - logprobs).abs().max() <= limit
        assert (out.entropy - entropy).abs().max() <= limit
    (out.logprobs @ grads[0] + out.entropy @ grads[1]).backward()
    (logprobs @ grads[0].double() + entropy @ grads[1].double()).backward()
    for ours, true in ((leaf, exact), (head, exact_head)):
        if ours.requires_grad:
            assert relative_error(ours.grad, true.grad) <= 3e-3
            assert worst_row_error(ours.grad, true.grad) <= 2e-2


def test_more_than_two_to_the_31_logits_in_chunks():
    hidden, weight, targets = make(16500, 64, 131072 + 1, torch.bfloat16)
    assert hidden.shape[0] * weight.shape[0] > 2**31
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = linear_logprob(hidden, weight, targets, chunk_bytes=128 << 20)
    assert torch.cuda.max_memory_allocated() - before < 512 << 20
    logprobs, _ = logprobs_float64(logits_float64(hidden[-100:], weight), targets[-100:])
    assert (out.logprobs[-100:] - logprobs).abs().max() < 1e-3


@pytest.mark.parametrize("frozen", [True, False])
def test_the_fused_loss_equals_the_cpu_s(frozen):
    hidden, weight, targets = make(200, 256, 5003, torch.float32)
    segments = torch.tensor([0, 50, 50, 130, 200], dtype=torch.int32, device="cuda")
    advantages = torch.tensor([1.0, -1.0, 0.0, -0.5], device="cuda")
    old = torch.randn(200, device="cuda") * 0.1 - 8
    objective = Objective(loss_type="dapo", beta=0.04, delta=3.0, entropy_coef=0.01)
    results = []
    for device in ("cuda", "cpu"):
        leaf = hidden.to(device).clone().requires_grad_()
        head = weight.to(device).clone().requires_grad_(not frozen)
        tensors = (x.to(device) for x in (targets, segments, advantages))
        loss, stats = linear_grpo_loss(
            leaf, head, *tensors, objective, old_logprobs=old.to(device), ref_logprobs=old.to(device)
        )
        loss.backward()
        results.append((loss, leaf.grad, head.grad, stats.metrics()))
    (loss, grad, head_grad, metrics), (cpu_loss, cpu_grad, cpu_head_grad, cpu_metrics) = results
    assert loss.item() == pytest.approx(cpu_loss.item(), rel=1e-4)
    assert relative_error(grad.cpu(), cpu_grad) < 1e-3
    assert metrics == pytest.approx(cpu_metrics, rel=1e-3, abs=1e-6, nan_ok=True)
    if not frozen:
        assert relative_error(head_grad.cpu(), cpu_head_grad) < 1e-3


def test_left_packing_and_backends():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]], device="cuda")
    packed = left_pack(torch.arange(6, device="cuda").view(2, 3), mask)
    assert packed.input_ids[:, 0].tolist() == [1, 5]
    entry = backends()["linear_logprob"]
    assert entry.device == "cuda" and entry.reason


def test_a_tensor_on_the_wrong_device_is_named():
    hidden, weight, targets = make(4, 8, 11, torch.float32)
    with pytest.raises(ValueError, match=r"weight is on cpu and hidden on cuda:0; move both to one device"):
        linear_logprob(hidden, weight.cpu(), targets)
    with pytest.raises(ValueError, match=r"targets is on cpu"):
        linear_logprob(hidden, weight, targets.cpu())
