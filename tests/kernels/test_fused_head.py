"""What surrounds the kernel of csrc/cuda/fused_head.cu, its ops in torch; tests/gpu/test_fused_head.py has the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_on_cpu import serve_on_the_cpu
from torch import Tensor
from truth import logits_float64, logprobs_float64, relative_error

from fastgrpo import Objective, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import cuda, fused_head, reference
from fastgrpo.kernels.library import FUSED_OPS, library_info, load_library
from fastgrpo.kernels.reference import HeadCall, Operands, RowStatistics, Transform, Use
from fastgrpo.objective import LOSS_TYPES, token_grad
from fastgrpo.ops import objective_from_constants

BF16 = torch.bfloat16
COUNT, WIDTH, WORDS = 150, 16, 97
# Rows whose 16-bit gradients are smaller than a gradient of the weight in fp32.
FEW = 20
# Bytes of a chunk of eight rows; four make a batch.
CHUNK = 8 * WORDS * 2
needs_library = pytest.mark.skipif(load_library() is None, reason=library_info().reason)


class FusedOps:
    """
    The ops from the reference's passes, gradients rounded as the kernel rounds them.

    Attributes:
        calls: the name and rows of each pass.
        rounded: how often a product rounded the weight's gradient.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.rounded = 0

    def fused_pass(self, *values: Any) -> None:
        *head, logprobs, lse, entropy, grad, at_target, factors, scratch = values
        self.require_scratch(head, scratch)
        result, inside = self.statistics("fused_pass", head, RowStatistics(logprobs, entropy, lse))
        if grad is not None:
            factors.copy_(torch.where(inside, 0.25, 0.0))
            self.store(result * 4.0, head[2], grad, at_target)
            at_target.mul_(0.25)

    def fused_objective(self, *values: Any) -> None:
        head, (logprobs, lse, entropy) = values[:6], values[6:9]
        advantages, weights, *others = values[9:15]
        loss_type, *constants = values[15:23]
        grad, at_target, factors, scratch = values[23:]
        self.require_scratch(head, scratch)
        result, _ = self.statistics("fused_objective", head, RowStatistics(logprobs, entropy, lse))
        objective = objective_from_constants(LOSS_TYPES[loss_type], [float(x) for x in constants])
        factors.copy_(weights * token_grad(objective, logprobs, advantages, *others))
        self.store(result, head[2], grad, at_target)
        at_target.mul_(factors)

    def fused_grad(self, *values: Any) -> None:
        *head, logprobs, lse, entropy, g, h, grad, at_target = values
        products, targets, operands = self.products("fused_grad", head)
        result = reference.row_grad(products, targets, operands, logprobs, lse, g, entropy, h, None)
        self.store(result, targets, grad, at_target)

    def finish_hidden_grad(self, out, factors, at_target, targets, weight, scale) -> None:
        inside = (targets >= 0) & (targets < len(weight))
        terms = torch.where(inside, at_target, 0.0).unsqueeze(1) * weight[targets.clamp(0, len(weight) - 1)].float()
        out.copy_(scale * (out * (1.0 if factors is None else factors.unsqueeze(1)) + terms))

    def add_to_targets(self, total, at_target, targets, hidden, scale) -> None:
        total.add_(self.terms(total, at_target, targets, hidden, scale))

    def take_targets(self, values, targets, out) -> None:
        assert out.is_contiguous() and out.shape[0] == len(values) == len(targets) <= out.shape[1]
        inside = (targets >= 0) & (targets < values.shape[1])
        out[:, : len(targets)] = torch.where(inside, values[:, torch.where(inside, targets, 0)], 0.0)

    def round_at_targets(self, total, sums, at_target, targets, hidden, scale) -> None:
        assert total.dtype == BF16 and sums.dtype == torch.float32 and sums.shape == hidden.shape
        self.rounded += 1
        inside = (targets >= 0) & (targets < len(total))
        words = targets[inside]
        total[words] = (sums[inside] + self.terms(total, at_target, targets, hidden, scale)[words]).to(BF16)

    @staticmethod
    def terms(total, at_target, targets, hidden, scale) -> Tensor:
        inside = (targets >= 0) & (targets < len(total))
        rows = torch.where(inside, scale * at_target, 0.0).unsqueeze(1) * hidden.float()
        return torch.zeros(total.shape).index_add_(0, torch.where(inside, targets, 0), rows)

    def scale_rows(self, hidden, factors, out) -> None:
        out.copy_(hidden.float() * factors.unsqueeze(1))

    def require_scratch(self, head, scratch: Tensor) -> None:
        strips = -(-len(head[1]) // 256)
        assert scratch.dtype == torch.float32 and scratch.numel() >= len(head[0]) * (4 * strips + 2) + 1

    def products(self, name, head) -> tuple[Tensor, Tensor, Operands]:
        hidden, weight, targets, *transform = head
        assert hidden.dtype == weight.dtype == BF16 and hidden.is_contiguous() and weight.is_contiguous()
        self.calls.append((name, len(hidden)))
        operands = Operands(weight, None, Transform(*transform), BF16, torch.float32, len(hidden), len(hidden))
        return hidden.float() @ weight.float().t(), targets, operands

    def statistics(self, name, head, out: RowStatistics) -> tuple[Tensor, Tensor]:
        products, targets, operands = self.products(name, head)
        inside = (targets >= 0) & (targets < products.shape[1])
        known = torch.where(inside, targets, 0)
        result = reference.row_pass(products, known, operands, with_entropy=True, with_logprob_grad=True)
        for into, values in zip(out, (result.logprobs, result.entropy, result.lse), strict=True):
            if into is not None:
                into.copy_(torch.where(inside, values, 0.0))
        return result.logprob_grad, inside

    @staticmethod
    def store(result: Tensor, targets: Tensor, grad: Tensor, at_target: Tensor) -> None:
        column = targets.clamp(0, result.shape[1] - 1).unsqueeze(1)
        at_target.copy_(result.gather(1, column).squeeze(1))
        grad.copy_(result.scatter(1, column, 0.0))


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> FusedOps:
    ops = FusedOps()
    serve_on_the_cpu(monkeypatch, {name: getattr(ops, name) for name in FUSED_OPS})
    monkeypatch.setattr(fused_head, "serves", lambda *_: True)
    return ops


def head(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(COUNT, WIDTH).to(BF16), (torch.randn(WORDS, WIDTH) * 0.5).to(BF16)
    targets = torch.randint(WORDS, (COUNT,))
    targets[::9], targets[::7] = -100, 5
    return hidden.to(dtype), weight.to(dtype), targets


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("skip_ignored", [True, False])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "softcap": 4.0, "logit_scale": 1.5}])
def test_log_probs_equal_float64(ops, frozen, skip_ignored, options):
    hidden, weight, targets = head()
    leaves = [x.clone().requires_grad_(x is hidden or not frozen) for x in (hidden, weight)]
    exact = [x.double().requires_grad_(x is hidden or not frozen) for x in (hidden, weight)]
    upstream = torch.randn(COUNT) * (torch.arange(COUNT) % 4 > 0)
    out = linear_logprob(
        *leaves, targets, return_entropy=True, entropy_requires_grad=False, compute_dtype=BF16, chunk_bytes=CHUNK,
        skip_ignored=skip_ignored, **options,
    )  # fmt: skip
    logprobs, entropy = logprobs_float64(logits_float64(*exact, **options), targets)
    assert (out.logprobs - logprobs).abs().max() < 1e-4 and (out.entropy - entropy).abs().max() < 1e-4
    out.logprobs.backward(upstream)
    logprobs.backward(upstream.double())
    for ours, truth in zip(leaves, exact, strict=True):
        assert ours.grad is truth.grad is None or relative_error(ours.grad, truth.grad) <= 4e-3
    rows = {name: [n for call, n in ops.calls if call == name] for name in ("fused_pass", "fused_grad")}
    counted = COUNT if skip_ignored is False else int((targets >= 0).sum())
    assert sum(rows["fused_pass"]) == counted and max(rows["fused_pass"]) == 8
    # Rows of a batch: four times the bytes of a chunk. None has a gradient of 0.
    assert frozen or (
        max(rows["fused_grad"]) == 32 and sum(rows["fused_grad"]) == int(((targets >= 0) & (upstream != 0)).sum())
    )


def test_entropies_of_a_head_that_trains_give_gradients(ops):
    hidden, weight, targets = head()
    leaves, exact = (
        [x.to(d, copy=True).requires_grad_() for x in (hidden, weight)] for d in (torch.float32, torch.float64)
    )
    upstream = torch.randn(COUNT)
    linear_logprob(*leaves, targets, return_entropy=True, compute_dtype=BF16).entropy.backward(upstream)
    logprobs_float64(logits_float64(*exact), targets)[1].backward(upstream.double())
    for ours, truth in zip(leaves, exact, strict=True):
        assert ours.grad is truth.grad is None or relative_error(ours.grad, truth.grad) <= 4e-3
    assert {name for name, _ in ops.calls} == {"fused_pass", "fused_grad"}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_the_loss_in_one_pass_equals_float64(ops, frozen, loss_type):
    hidden, weight, targets = head()
    segments, advantages = torch.tensor([0, 40, 40, 100, COUNT]), torch.tensor([1.0, -1.0, 0.0, -1e-3])
    old, ref = (linear_logprob(hidden, weight, targets).logprobs + 0.1 * torch.randn(COUNT) for _ in range(2))
    results = []
    for dtype, compute_dtype in ((torch.float32, BF16), (torch.float64, torch.float64)):
        leaves = [x.to(dtype, copy=True).requires_grad_(x is hidden or not frozen) for x in (hidden, weight)]
        loss, _ = linear_grpo_loss(
            *leaves, targets, segments, advantages, Objective(loss_type, beta=0.04), old, ref,
            compute_dtype=compute_dtype, chunk_bytes=CHUNK,
        )  # fmt: skip
        loss.backward()
        results.append((loss.detach(), *(x.grad for x in leaves)))
    for ours, truth in zip(*results, strict=True):
        assert ours is truth is None or relative_error(ours, truth) <= 4e-3
    assert {name for name, _ in ops.calls} == {"fused_objective"}
    assert max(rows for _, rows in ops.calls) == (8 if frozen else 32)


@pytest.fixture
def products(ops, monkeypatch) -> list[float | None]:
    """The last factors of products that give a weight's gradient at once, as they run; a head may be small."""
    factors, product = [], fused_head.rounded_weight_grad

    def recorded(*given: Any) -> Tensor:
        factors.append(None if given[3] is None else given[3].item())
        return product(*given)

    monkeypatch.setattr(fused_head, "_LEAST_WEIGHT", 0)
    monkeypatch.setattr(fused_head, "rounded_weight_grad", recorded)
    return factors


def few(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets = head(dtype)
    return hidden[:FEW], weight, targets[:FEW]


def one_pass(leaves: list[Tensor], targets: Tensor, advantages: list[float], **options: Any) -> Tensor:
    segments = torch.linspace(0, FEW, len(advantages) + 1).long()
    objective = Objective("dapo", num_items_in_batch=float(FEW))
    return linear_grpo_loss(*leaves, targets, segments, torch.tensor(advantages), objective, **options)[0]


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("loss_scale", [1.0, 0.3, 4096.0])
@pytest.mark.parametrize("advantages", [[1.0, -1.0], [1.0, 0.0, -0.5, 0.0]])
def test_a_single_batch_gives_the_weight_s_gradient_when_its_last_factor_is_known(
    ops, products, weight_dtype, loss_scale, advantages
):
    """Beside rows that are ignored, and rows without a coefficient, whose statistics come from the same buffers."""
    hidden, weight, targets = few(weight_dtype)
    leaves = [hidden.float().requires_grad_(), weight.requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    loss = one_pass(leaves, targets, advantages, temperature=0.7, compute_dtype=BF16)
    assert not products
    (loss * loss_scale).backward()
    assert products == [pytest.approx(loss_scale)] and ops.rounded == (weight_dtype == BF16)
    (one_pass(exact, targets, advantages, temperature=0.7) * loss_scale).backward()
    for ours, true in zip(leaves, exact, strict=True):
        assert ours.grad.dtype == ours.dtype and relative_error(ours.grad, true.grad) <= 4e-3
    assert leaves[0].grad[targets < 0].eq(0).all()
    assert {name for name, _ in ops.calls} == {"fused_objective"} | ({"fused_pass"} if 0.0 in advantages else set())


def test_a_product_that_waits(products):
    """Twice over one graph, in two losses at once, and not twice over."""
    hidden, weight, targets = few()
    targets = targets.clamp(min=0)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss = one_pass(leaves, targets, [1.0])
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, once, again)) and products == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, leaves)

    (one_pass(leaves, targets, [1.0]) + 3 * one_pass(leaves, targets, [1.0])).backward()
    for leaf, grad in zip(leaves, once, strict=True):
        assert relative_error(leaf.grad, 4 * grad.double()) <= 6e-3
    assert sorted(products) == [1.0, 1.0, 1.0, 3.0]

    with torch.autograd.graph.save_on_cpu():
        loss = one_pass(leaves, targets, [1.0])
    assert all(map(torch.equal, torch.autograd.grad(loss, leaves), once)) and len(products) == 5


@pytest.mark.parametrize("differentiated", [0, 1])
def test_second_derivatives_of_others_are_left_alone_and_those_of_a_head_refused(products, differentiated):
    hidden, weight, targets = few()
    leaves, other = [x.clone().requires_grad_() for x in (hidden, weight)], torch.tensor(2.0, requires_grad=True)
    total = one_pass(leaves, targets, [1.0]) + other**3
    *ours, of_other = torch.autograd.grad(total, [*leaves, other], create_graph=True)
    assert torch.autograd.grad(of_other, other)[0] == 12 and len(products) == 1
    with pytest.raises(RuntimeError, match="differentiable once"):
        ours[differentiated].float().sum().backward()


def test_hidden_states_may_not_change_before_a_product_that_waits(products):
    hidden, weight, targets = few()
    loss = one_pass([hidden, weight.requires_grad_()], targets.clamp(min=0), [1.0])
    hidden += 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("weight_alone", [True, False])
def test_log_probs_of_a_single_batch_give_a_weight_s_gradient_rounded_once(ops, products, weight_alone):
    hidden, weight, targets = few()
    leaves, exact = (
        [hidden.to(d, copy=True).requires_grad_(not weight_alone), weight.to(d, copy=True).requires_grad_()]
        for d in (BF16, torch.float64)
    )
    upstream = torch.randn(FEW)
    linear_logprob(*leaves, targets, compute_dtype=BF16).logprobs.backward(upstream)
    assert products == [None] and ops.rounded == 1
    logprobs_float64(logits_float64(*exact), targets)[0].backward(upstream.double())
    for ours, truth in zip(leaves, exact, strict=True):
        assert ours.grad is truth.grad is None or relative_error(ours.grad, truth.grad) <= 4e-3


def test_values_wait_where_they_are_no_larger_than_the_sum_in_float32():
    for rows, vocabulary, width, expected in (
        (2048, 128256, 4096, True),
        (8192, 128256, 4096, True),
        (8193, 128256, 4096, False),
        (4096, 151936, 2048, True),
        (4097, 151936, 2048, False),
        (16, 1024, 64, False),
    ):
        assert fused_head.rounds_at_once(2 * rows * vocabulary, vocabulary, width) is expected


@pytest.mark.parametrize(("use", "bytes_a_word"), [(Use.STATISTICS, 1 / 16), (Use.SLOPES, 2), (Use.OBJECTIVE, 2)])
def test_a_chunk_holds_16_bit_gradients_or_no_logits_at_all(ops, use, bytes_a_word):
    weight = torch.empty(151936, 8, dtype=BF16)
    call = HeadCall(weight, None, Transform(), BF16, use)
    assert cuda.bytes_a_row(call, True) == pytest.approx(151936 * bytes_a_word, rel=0.01)
    operands = cuda.prepare(call, torch.float32, 8, 100, collect=False)
    assert (operands.values is None) == (use is Use.STATISTICS)


def test_a_chunk_of_statistics_counts_the_hidden_states_and_no_call_has_more_rows_than_the_kernel_counts(ops):
    call = HeadCall(torch.empty(1024, 5120, dtype=BF16), None, Transform(), BF16, Use.STATISTICS)
    assert cuda.bytes_a_row(call, True) > 6 * 5120
    small = call._replace(weight=torch.empty(32, 8, dtype=BF16))
    operands = cuda.prepare(small, torch.float32, 1 << 24, 1 << 24, collect=False)
    assert operands.chunk_rows == operands.batch_rows == 1 << 20


def test_a_cpu_is_not_served():
    assert not fused_head.serves(HeadCall(torch.empty(64, 8, dtype=BF16), None, Transform(), BF16, Use.SLOPES))


@needs_library
def test_tensors_on_the_cpu_are_refused_with_a_reason():
    hidden, weight, targets = head(BF16)
    row = torch.zeros(COUNT)
    with pytest.raises(RuntimeError, match="fused_pass: hidden is not on a CUDA device"):
        torch.ops.fastgrpo.fused_pass(hidden, weight, targets, 1.0, 1.0, None, row, row, None, None, None, None, row)
    with pytest.raises(RuntimeError, match="fused_pass: grad, at_target and row_factors go together"):
        torch.ops.fastgrpo.fused_pass(hidden, weight, targets, 1.0, 1.0, None, row, row, None, weight, None, None, row)
    with pytest.raises(RuntimeError, match="finish_hidden_grad: out is not on a CUDA device"):
        torch.ops.fastgrpo.finish_hidden_grad(hidden.float(), None, row, targets, weight, 1.0)
    with pytest.raises(RuntimeError, match="add_to_targets: hidden is not on a CUDA device"):
        torch.ops.fastgrpo.add_to_targets(weight.float(), row, targets, hidden, 1.0)
    with pytest.raises(RuntimeError, match="take_targets: values is not on a CUDA device"):
        torch.ops.fastgrpo.take_targets(hidden, targets, hidden)
    with pytest.raises(RuntimeError, match="round_at_targets: hidden is not on a CUDA device"):
        torch.ops.fastgrpo.round_at_targets(weight, hidden.float(), row, targets, hidden, 1.0)
