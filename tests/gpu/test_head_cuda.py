"""The head on a CUDA device: float64 truth, fp32 sums of 16-bit products, no surprise against the CPU or the reference."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from head_cases import ODD_16_BIT, check_autocast, check_odd_16_bit, errors_beside_eager
from head_cases import make as make_on_cpu
from hypothesis import given, settings
from loss_cases import cases_of_16_bit, check_16_bit, objective
from loss_cases import make as make_rows
from truth import every_row_error, logits_float64, logprobs_float64, relative_error, worst_row_error

import fastgrpo.kernels.select as select
from fastgrpo import Objective, backends, left_pack, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import cuda, fused_head
from fastgrpo.kernels.backends import FUSED, KERNELS
from fastgrpo.kernels.library import library_info, load_library, row_is_read_once

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


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("count", "width", "vocabulary"),
    [
        (0, 64, 257),
        (1, 100, 7),
        (127, 72, 100),
        (129, 72, 50257),
        (300, 896, 151936),
        (64, 2048, 32000),
        (7, 64, 1),
        (128, 5120, 152064),
        (130, 64, 262144),
        (4097, 64, 5003),
    ],
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
    if dtype == torch.float32 and width > 2048:
        limit *= 4  # fp32 sums of 5120 products, whose rounding alone is more: torch's own, and the same in eager torch
    if count:
        error = (out.logprobs - logprobs).abs().max().item()
        assert error <= limit, f"log-prob error {error:.2e}"
        error = (out.entropy - entropy).abs().max().item()
        assert error <= limit, f"entropy error {error:.2e}"
    inputs, exact_inputs = ([x for x in pair if x.requires_grad] for pair in ((leaf, head), (exact, exact_head)))
    # One at a time: where the two nearly cancel, little of a row is left to compare with.
    for ours, true, grad in ((out.logprobs, logprobs, grads[0]), (out.entropy, entropy, grads[1])):
        found = torch.autograd.grad(ours, inputs, grad, retain_graph=True)
        wanted = torch.autograd.grad(true, exact_inputs, grad.double(), retain_graph=True)
        for value, truth in zip(found, wanted, strict=True):
            if vocabulary == 1:
                assert value.abs().max() <= 1e-4
                continue
            assert relative_error(value, truth) <= 3e-3
            assert worst_row_error(value, truth) <= 2e-2


@pytest.mark.usefixtures("either_head")
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


needs_library = pytest.mark.skipif(load_library() is None, reason=library_info().reason)


@needs_library
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.05}, {"temperature": 10.0}, {"logit_scale": 0.0625}, {"softcap": 5.0}]
)
def test_kernels_and_reference_agree(monkeypatch, frozen, options):
    hidden, weight, targets = make(700, 256, 20011, torch.bfloat16)
    bias = torch.randn(20011, device="cuda").bfloat16()
    targets[5] = -100
    grads = torch.randn(700, device="cuda"), 0.1 * torch.randn(700, device="cuda")
    results = []
    for reason in ("", "for this test"):
        monkeypatch.setattr(select, "why_no_library", lambda reason=reason: reason)
        leaves = [x.clone().requires_grad_(x is hidden or not frozen) for x in (hidden, weight, bias)]
        # Small enough for several chunks, and for several batches of chunks.
        out = linear_logprob(
            leaves[0], leaves[1], targets, leaves[2], return_entropy=True, chunk_bytes=10 << 20, **options
        )
        (out.logprobs @ grads[0] + out.entropy @ grads[1]).backward()
        results.append((*out, *(leaf.grad for leaf in leaves if leaf.requires_grad)))
    limit = 1e-4 if options.get("temperature") != 0.05 else 2e-3
    for ours, reference in zip(results[0][:2], results[1][:2], strict=True):
        assert (ours - reference).abs().max() <= limit
    for ours, reference in zip(results[0][2:], results[1][2:], strict=True):
        assert relative_error(ours, reference) <= 4e-3


@needs_library
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo", "vespo"])
def test_the_fused_loss_in_bfloat16_agrees_with_the_reference(monkeypatch, frozen, loss_type):
    hidden, weight, targets = make(700, 256, 20011, torch.bfloat16)
    segments = torch.tensor([0, 300, 300, 530, 700], dtype=torch.int32, device="cuda")
    advantages = torch.tensor([1.0, -1.0, 0.0, -0.5], device="cuda")
    base = linear_logprob(hidden, weight, targets).logprobs
    old = base + torch.randn(700, device="cuda") * 0.1
    mask = torch.rand(700, device="cuda") > 0.3
    objective = Objective(loss_type=loss_type, beta=0.04, entropy_coef=0.01, num_items_in_batch=400.0)
    if loss_type == "vespo":
        old = None
    results = []
    for reason in ("", "for this test"):
        monkeypatch.setattr(select, "why_no_library", lambda reason=reason: reason)
        leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        loss, stats = linear_grpo_loss(
            leaf, head, targets, segments, advantages, objective, old_logprobs=old, ref_logprobs=base, loss_mask=mask,
            chunk_bytes=10 << 20,
        )  # fmt: skip
        loss.backward()
        results.append((loss, leaf.grad, head.grad, stats.metrics()))
    (loss, grad, head_grad, metrics), (wanted, wanted_grad, wanted_head_grad, wanted_metrics) = results
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-3, abs=1e-5, nan_ok=True)
    assert relative_error(grad, wanted_grad) < 4e-3
    if not frozen:
        assert relative_error(head_grad, wanted_head_grad) < 4e-3


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("frozen", [True, False])
def test_three_runs_and_a_permutation_give_the_same_bits(frozen):
    hidden, weight, targets = make(600, 128, 50257, torch.bfloat16)
    order = torch.randperm(600, device="cuda")
    upstream = torch.randn(600, device="cuda")
    results = []
    for index in (torch.arange(600, device="cuda"),) * 3 + (order,):
        leaf, head = hidden[index].clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        out = linear_logprob(leaf, head, targets[index], return_entropy=True, num_chunks=1)
        out.logprobs.backward(upstream[index])
        results.append((*out, leaf.grad, head.grad))
    for again in results[1:3]:
        assert all(a is b or torch.equal(a, b) for a, b in zip(again, results[0], strict=True))
    assert all(torch.equal(a, b[order]) for a, b in zip(results[3][:3], results[0][:3], strict=True))


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masters", [True, False])
def test_chunks_and_batches_of_any_size_agree(dtype, frozen, masters):
    """N rows, in any number of chunks, are the first N of 600 in one."""
    hidden, weight, targets = make(600, 128, 50257, dtype)
    if masters:
        hidden = hidden.float()
    results = {}
    for count, num_chunks in ((600, 1), (600, 2), (600, 7), (600, 600), (129, 1), (129, 4), (1, 1)):
        leaf = hidden[:count].clone().requires_grad_()
        head = weight.clone().requires_grad_(not frozen)
        out = linear_logprob(leaf, head, targets[:count], num_chunks=num_chunks, compute_dtype=dtype)
        out.logprobs.sum().backward()
        results[count, num_chunks] = out.logprobs.detach(), leaf.grad
    whole, whole_grad = results[600, 1]
    # A gradient in fp32 may be off by 5e-4. Two of 16 bit that were off by so much before they were rounded fall on different
    # sides of a boundary with a probability of d / u (d: how far apart, u: a unit in the last place), and are u apart then: a
    # mean square of d u, at most 5e-4 x 2^-7 in bfloat16. A bound of 5e-4 would ask for a d of 3e-5.
    limit = 5e-4 if masters else (5e-4 * torch.finfo(dtype).eps) ** 0.5
    for (count, num_chunks), (logprobs, grad) in results.items():
        assert grad.dtype == hidden.dtype
        error = (logprobs - whole[:count]).abs().max().item()
        assert error <= 1e-5, f"{count} rows, {num_chunks} chunks: log-prob {error:.2e}"
        error = relative_error(grad, whole_grad[:count])
        assert error <= limit, f"{count} rows, {num_chunks} chunks: gradient {error:.2e}"


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("vocabulary", [4096, 5003])
def test_the_gradient_of_a_confident_row_is_as_exact_as_any(frozen, vocabulary):
    """However far below the largest it is: `worst_row_error` leaves out those below 1e-3 of that."""
    hidden, weight, targets, _ = make_on_cpu(200, 256, vocabulary, torch.bfloat16)
    hidden = (hidden + torch.linspace(0, 12, 200)[:, None] * weight[targets]).bfloat16()
    hidden, weight, targets = hidden.cuda(), weight.cuda(), targets.cuda()
    leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    linear_logprob(leaf, head, targets).logprobs.sum().backward()
    logits, column = logits_float64(hidden, weight), targets[:, None]
    # In float64, too, 1 - p keeps its digits as p over the others alone.
    slopes = -(logits - logits.logsumexp(1, keepdim=True)).exp()
    slopes.scatter_(1, column, -slopes.scatter(1, column, 0.0).sum(1, keepdim=True))
    exact = slopes @ weight.double()
    norms = exact.norm(dim=1)
    assert norms.max() > 1 and (norms < 1e-3 * norms.max()).sum() > 50 and norms.min() < 1e-9
    # Rounding takes about 2^-9 of each entry of a row of logits' gradients (2^-8 at most), and may take all the same way.
    summed = 2**-9 * (slopes.abs() @ weight.double().norm(dim=1)) / norms
    limit = 1e-3 + 2**-9 + summed.max().item()
    assert limit <= 1e-2
    assert every_row_error(leaf.grad, exact) <= limit


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_vocabulary_whose_rows_are_read_twice(monkeypatch, dtype, frozen):
    """More words than the registers of a cluster hold, for the row kernels: csrc/cuda/row_streamed.cu, from end to end."""
    count, vocabulary = 40, 330_001
    monkeypatch.setattr(fused_head, "serves", lambda call: False)
    passes = []
    for name in ("row_pass", "row_grad", "row_objective"):
        function = getattr(cuda, name)
        monkeypatch.setattr(
            cuda, name, lambda *given, _of=function, **more: passes.append(_of.__name__) or _of(*given, **more)
        )
    hidden, weight, targets = make(count, 64, vocabulary, dtype)
    # What the op asks, too.
    assert select.head_kernels(hidden.device, dtype) is cuda and not row_is_read_once(hidden.device, vocabulary)
    targets[3], targets[5] = -100, vocabulary - 1
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_(not frozen)]
    # Two chunks.
    options = {"temperature": 0.9, "softcap": 30.0}
    out = linear_logprob(*leaves, targets, return_entropy=True, chunk_bytes=25 * 4 * vocabulary, **options)
    logprobs, entropy = logprobs_float64(logits_float64(*exact, **options), targets)
    limit = 1e-3 + 8 * 2**-24 * 34
    assert (out.logprobs - logprobs).abs().max() <= limit and (out.entropy - entropy).abs().max() <= limit
    segments, advantages = torch.tensor([0, count], device="cuda"), torch.ones(1, device="cuda")
    loss, stats = linear_grpo_loss(
        *leaves, targets, segments, advantages, Objective("dapo", entropy_coef=0.1), chunk_bytes=25 * 4 * vocabulary,
        **options,
    )  # fmt: skip
    assert (stats.logprobs - logprobs).abs().max() <= limit
    counted = count - 1
    wanted_loss = -(logprobs.sum() + 0.1 * entropy.sum()) / counted
    grads = torch.randn(count, device="cuda"), torch.randn(count, device="cuda")
    inputs, exact_inputs = ([x for x in pair if x.requires_grad] for pair in (leaves, exact))
    for ours, true, grad in (
        (out.logprobs, logprobs, grads[0]),
        (out.entropy, entropy, grads[1]),
        # float16 holds no gradients of 1 / N of that many words without a scale of the loss.
        (loss, wanted_loss, torch.tensor(float(counted), device="cuda")),
    ):
        found = torch.autograd.grad(ours, inputs, grad, retain_graph=True)
        wanted = torch.autograd.grad(true, exact_inputs, grad.double(), retain_graph=True)
        for value, truth in zip(found, wanted, strict=True):
            assert relative_error(value, truth) <= 3e-3
            assert worst_row_error(value, truth) <= 2e-2
    assert passes.count("row_pass") == 2 and passes.count("row_objective") == 2
    assert passes.count("row_grad") == (0 if frozen else 4)


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("frozen", [True, False])
def test_strided_inputs_and_expanded_gradients_change_nothing(frozen):
    hidden, weight, targets = make(100, 64, 5003, torch.bfloat16)
    wide, ids = torch.randn(100, 128, device="cuda").bfloat16(), torch.zeros(100, 2, device="cuda", dtype=torch.long)
    wide[:, ::2], ids[:, 1] = hidden, targets
    old = torch.randn(100, 2, device="cuda") * 0.1 - 8
    segments, advantages = torch.tensor([0, 40, 100], device="cuda"), torch.tensor([1.0, -0.5], device="cuda")
    results = []
    for strided in (False, True):
        leaf = (wide[:, ::2] if strided else hidden).detach().requires_grad_()
        head = (weight.t().contiguous().t() if strided else weight.clone()).requires_grad_(not frozen)
        words, before = (ids[:, 1], old[:, 0]) if strided else (targets, old[:, 0].contiguous())
        out = linear_logprob(leaf, head, words, return_entropy=True)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        objective = Objective(loss_type="grpo", beta=0.1)
        loss, _ = linear_grpo_loss(
            leaf, head, words, segments, advantages, objective, old_logprobs=before, ref_logprobs=before
        )
        loss.backward()
        results.append((out.logprobs, out.entropy, loss, leaf.grad, head.grad))
    for plain, other in zip(*results, strict=True):
        assert plain is other or relative_error(other, plain) < 4e-3


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_nan_row_stays_alone_and_ignored_rows_are_zero(frozen):
    hidden, weight, targets = make(9, 64, 5003, torch.bfloat16)
    clean = hidden.clone().requires_grad_()
    hidden[4, 10] = hidden[7] = float("nan")
    targets[7] = -100
    leaf = hidden.clone().requires_grad_()
    for x in (clean, leaf):
        out = linear_logprob(x, weight.clone().requires_grad_(not frozen), targets, return_entropy=True)
        (out.logprobs.sum() + out.entropy.sum()).backward()
    others = [0, 1, 2, 3, 5, 6, 8]
    assert out.logprobs[4].isnan() and leaf.grad[4].isnan().all()
    assert torch.equal(leaf.grad[others], clean.grad[others])
    assert out.logprobs[7] == 0 and out.entropy[7] == 0 and leaf.grad[7].eq(0).all()


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize(("frozen", "one_pass"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "width", "vocabulary"), [(256, 896, 32000), (129, 1024, 50257)])
def test_never_less_exact_than_eager_16_bit(dtype, frozen, one_pass, count, width, vocabulary):
    errors = errors_beside_eager(*make(count, width, vocabulary, dtype), frozen=frozen, one_pass=one_pass)
    for name, (ours, eager) in errors.items():
        assert ours <= eager, f"{name}: {ours:.2e}, eager {eager:.2e}"


@pytest.mark.usefixtures("either_head")
@pytest.mark.parametrize(("frozen", "one_pass"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "width", "vocabulary"), [(256, 896, 32000), (129, 1024, 50257)])
def test_never_less_exact_than_eager_16_bit_with_an_entropy_bonus(dtype, frozen, one_pass, count, width, vocabulary):
    coefficient = 0.3
    hidden, weight, targets = make(count, width, vocabulary, dtype)
    advantages = torch.where(torch.arange(count, device="cuda") % 2 == 0, 1.0, -0.5)
    results = []
    for kind in ("ours", "eager", "truth"):
        cast = torch.float64 if kind == "truth" else dtype
        leaf = hidden.to(cast, copy=True).requires_grad_()
        head = weight.to(cast, copy=True).requires_grad_(not frozen)
        if kind == "ours" and one_pass:
            # Sums of the tokens' losses, and the mean of their entropies.
            objective = Objective(loss_type="dapo", num_items_in_batch=1.0, entropy_coef=coefficient * count)
            segments = torch.tensor([0, count], device="cuda")
            loss, stats = linear_grpo_loss(leaf, head, targets, segments, advantages, objective)
            logprobs, entropy = stats.logprobs, stats.entropy
        else:
            if kind == "ours":
                logprobs, entropy = linear_logprob(leaf, head, targets, return_entropy=True)
            else:
                logits = leaf @ head.t()
                logprobs, entropy = logprobs_float64(logits.float() if kind == "eager" else logits, targets)
            loss = -(advantages * logprobs).sum() - coefficient * entropy.sum()
        loss.backward()
        results.append((logprobs.detach(), entropy.detach(), leaf.grad, head.grad))
    ours, eager, exact = results
    for place, name in enumerate(("logprobs", "entropy", "hidden", *(() if frozen else ("weight",)))):
        if place < 2:
            errors = [(values[place] - exact[place]).abs().max().item() for values in (ours, eager)]
        else:
            errors = [relative_error(values[place], exact[place]) for values in (ours, eager)]
        assert errors[0] <= errors[1], f"{name}: {errors[0]:.2e}, eager {errors[1]:.2e}"


@settings(max_examples=25, deadline=None)
@given(**ODD_16_BIT)
def test_16_bit_equals_float64_at_odd_shapes(**case):
    check_odd_16_bit(**case, device="cuda")


@settings(max_examples=25, deadline=None)
@given(cases_of_16_bit())
def test_the_fused_loss_of_16_bit_equals_float64_at_odd_shapes(case):
    rows, options, scale = case
    check_16_bit(rows, options, "cuda", scale, odd=True)


@pytest.mark.parametrize("frozen", [True, False])
def test_fp32_masters_under_autocast_get_fp32_gradients(frozen):
    hidden, weight, targets, _ = make_on_cpu(129, 72, 5003, torch.float32)
    check_autocast(hidden, weight, targets, frozen=frozen, device="cuda", bound=3e-3)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("level", "on_policy"), [("token", True), ("sequence", True), ("sequence", False)])
def test_the_fused_loss_of_fp32_masters_under_autocast_equals_float64(level, on_policy, trains):
    rows = make_rows(
        (40, 0, 77, 1, 60), torch.float32, 1003, 72, on_policy=on_policy, trains=(trains, False), leave_out=()
    )
    # A sequence's ratio far from the edges of clipping.
    check_16_bit(rows, objective("dapo", level, beta=0.04, epsilon=0.9), "cuda", autocast=True)


def test_float16_gradients_survive_a_loss_scale():
    hidden, weight, targets = make(64, 128, 50257, torch.float16)
    leaf, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    linear_logprob(leaf, weight, targets).logprobs.backward(torch.full((64,), 1024.0, device="cuda"))
    logprobs_float64(logits_float64(exact, weight), targets)[0].backward(
        torch.full((64,), 1024.0, device="cuda").double()
    )
    assert relative_error(leaf.grad, exact.grad) <= 3e-3 and worst_row_error(leaf.grad, exact.grad) <= 2e-2


@pytest.mark.usefixtures("either_head")
@needs_library
def test_the_default_budget_keeps_the_promised_memory():
    hidden, weight, targets = make(8192, 1024, 128256, torch.bfloat16)
    leaf = hidden.requires_grad_()
    for chunk_bytes, limit in ((None, 768), (128 << 20, 320)):
        leaf.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = linear_logprob(
            leaf, weight, targets, return_entropy=True, entropy_requires_grad=False, chunk_bytes=chunk_bytes
        )
        out.logprobs.sum().backward()
        peak = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
        assert peak <= limit, f"{peak:.0f} MiB"


@pytest.mark.usefixtures("either_head")
@needs_library
@pytest.mark.parametrize("frozen", [True, False])
def test_the_only_host_sync_is_the_compaction_of_rows(frozen):
    hidden, weight, targets = make(600, 128, 5003, torch.bfloat16)
    leaf, head = hidden.requires_grad_(), weight.requires_grad_(not frozen)
    linear_logprob(leaf, head, targets).logprobs.sum().backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            linear_logprob(leaf, head, targets, chunk_bytes=1 << 20).logprobs.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(syncs) == (1 if frozen else 2), syncs


@pytest.mark.usefixtures("either_head")
@needs_library
@pytest.mark.parametrize("with_grad", [True, False])
def test_where_no_row_is_skipped_nothing_waits_and_nothing_changes(with_grad):
    hidden, weight, targets = make(600, 128, 5003, torch.bfloat16)
    targets[5], targets[599] = -100, 5003
    upstream, results, syncs = torch.randn(600, device="cuda"), [], []
    for skip_ignored in (True, False, False):
        leaf = hidden.clone().requires_grad_(with_grad)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                out = linear_logprob(
                    leaf,
                    weight,
                    targets,
                    return_entropy=True,
                    chunk_bytes=1 << 20,
                    entropy_requires_grad=False,
                    skip_ignored=skip_ignored,
                )
                if with_grad:
                    out.logprobs.backward(upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        syncs.append(sum("synchroniz" in str(warning.message) for warning in caught))
        results.append((*out, leaf.grad))
    assert syncs[1:] == [0, 0] and syncs[0] <= 1
    for every, some in zip(results[2], results[0], strict=True):
        assert every is some is None or (every.float() - some.float()).abs().max() <= 1e-5
    assert results[2][0][5] == 0 == results[2][1][599]


@pytest.mark.usefixtures("either_head")
@needs_library
@pytest.mark.parametrize(
    ("frozen", "softcap", "vocabulary"), list(itertools.product([True, False], [None, 20.0], [5003, 4096]))
)
def test_compiles_without_a_graph_break(frozen, softcap, vocabulary):
    torch._dynamo.reset()  # it counts how often it has compiled a function for another value of an argument
    hidden, weight, targets = make(64, 64, vocabulary, torch.bfloat16)

    def loss(hidden, weight):
        out = linear_logprob(hidden, weight, targets, softcap=softcap, return_entropy=True)
        return (out.logprobs.sum() - 0.1 * out.entropy.sum()) * 2

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        value = function(*leaves)
        value.backward()
        results.append((value, leaves[0].grad, leaves[1].grad))
    for eager, compiled in zip(*results, strict=True):
        assert eager is compiled or torch.equal(eager, compiled)


@needs_library
def test_backends_say_that_the_kernels_serve_and_where_they_do_not():
    table = backends()
    fused = torch.cuda.get_device_capability() == (9, 0)
    for op in ("linear_logprob", "linear_grpo"):
        assert table[op].implementation == (FUSED if fused else KERNELS)
        assert not fused or (table[f"{op}, other heads"].implementation == KERNELS)
    assert "16-bit products" in table["linear_logprob, float32"].reason
    assert table["linear_grpo, float16"].implementation == KERNELS
    assert table["library"].device == torch.cuda.get_device_name()
    assert "CUDA 1" in table["driver"].implementation and not table["driver"].reason


def test_left_packing_and_backends():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]], device="cuda")
    packed = left_pack(torch.arange(6, device="cuda").view(2, 3), mask)
    assert packed.input_ids[:, 0].tolist() == [1, 5]
    entry = backends()["left_pack"]
    assert entry.device == "cuda" and bool(entry.reason) == (load_library() is None)


def test_a_tensor_on_the_wrong_device_is_named():
    hidden, weight, targets = make(4, 8, 11, torch.float32)
    with pytest.raises(ValueError, match=r"weight is on cpu and hidden on cuda:0; move both to one device"):
        linear_logprob(hidden, weight.cpu(), targets)
    with pytest.raises(ValueError, match=r"targets is on cpu"):
        linear_logprob(hidden, weight, targets.cpu())
