"""The head with its passes inside the product, where a card has it: float64 truth, hard rows, and which calls it serves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_cases import check_against_float64
from head_cases import make as make_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import check_16_bit, objective
from loss_cases import make as make_rows
from torch import Tensor
from truth import every_row_error, logits_float64, logprobs_float64, relative_error, worst_row_error

from fastgrpo import linear_grpo_loss, linear_logprob
from fastgrpo.kernels import fused_head
from fastgrpo.kernels.library import library_info, load_library
from fastgrpo.kernels.reference import HeadCall, Transform, Use
from fastgrpo.kernels.rows import pitch_of, rounded_sum_over_rows
from fastgrpo.objective import LOSS_TYPES, Objective
from fastgrpo.ops import objective_constants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(load_library() is None, reason=library_info().reason),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernel is for compute capability 9.0",
    ),
]

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fused passes that run."""
    names: list[str] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            names.append(function.__name__)
            return function(*arguments)

        return call

    for name in ("head_pass", "head_objective", "head_grad"):
        monkeypatch.setattr(fused_head, name, recorded(getattr(fused_head, name)))
    return names


def make(count: int, width: int, vocabulary: int, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets, _ = make_on_cpu(count, width, vocabulary, BF16, spread)
    return hidden.cuda(), weight.cuda(), targets.cuda()


def run(
    hidden: Tensor, weight: Tensor, targets: Tensor, frozen: bool, upstream: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Log-probs, entropies, and the gradients of hidden and weight."""
    leaf, head = hidden.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
    out = linear_logprob(leaf, head, targets, return_entropy=True, entropy_requires_grad=False, **options)
    grads = torch.autograd.grad(out.logprobs, [leaf] if frozen else [leaf, head], upstream)
    return (*out, *grads)


def truth(
    hidden: Tensor, weight: Tensor, targets: Tensor, frozen: bool, upstream: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    leaf, head = hidden.double().requires_grad_(), weight.double().requires_grad_(not frozen)
    logprobs, entropy = logprobs_float64(logits_float64(leaf, head, **options), targets)
    grads = torch.autograd.grad(logprobs, [leaf] if frozen else [leaf, head], upstream.double())
    return (logprobs.detach(), entropy.detach(), *grads)


def check(found: tuple[Tensor, ...], exact: tuple[Tensor, ...], largest_logit: float) -> None:
    limit = 1e-4 + 8 * 2**-24 * largest_logit
    for name, ours, true in zip(("log-prob", "entropy"), found, exact, strict=False):
        error = (ours - true).abs().max().item()
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e}"
    for ours, true in zip(found[2:], exact[2:], strict=True):
        assert relative_error(ours, true) <= 3e-3
        assert worst_row_error(ours, true) <= 2e-2


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    ("count", "width", "vocabulary"),
    [
        (1, 8, 32),
        (7, 72, 96),
        (127, 64, 256),
        (128, 200, 288),
        (129, 2048, 32000),
        (255, 896, 151936),
        (257, 64, 128256),
        (300, 5120, 152064),
        (513, 128, 262144),
        (4097, 64, 4096),
        # The last group of columns is not whole, in either half of a strip, or there is no other.
        (3, 16, 1),
        (40, 24, 31),
        (130, 136, 129),
        (64, 64, 255),
        (300, 128, 1000),
        (200, 1024, 32001),
        (129, 2048, 50257),
        (300, 896, 128257),
        (4097, 64, 4099),
    ],
)
def test_equals_float64(calls, count, width, vocabulary, frozen):
    hidden, weight, targets = make(count, width, vocabulary)
    if count > 5:
        targets[3], targets[5] = -100, vocabulary
    upstream = torch.randn(count, device="cuda")
    upstream[4::5] = 0.0
    found = run(hidden, weight, targets, frozen, upstream, temperature=0.9, chunk_bytes=1 << 26)
    check(found, truth(hidden, weight, targets, frozen, upstream, temperature=0.9), 100)
    assert set(calls) == ({"head_pass"} if frozen else {"head_pass", "head_grad"})


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.05},
        {"temperature": 10.0},
        {"logit_scale": 0.0625},
        {"softcap": 5.0},
        {"softcap": 30.0, "temperature": 0.7, "logit_scale": 1.5},
    ],
)
def test_every_way_from_products_to_logits(calls, frozen, options):
    hidden, weight, targets = make(300, 128, 4096)
    upstream = torch.randn(300, device="cuda")
    found = run(hidden, weight, targets, frozen, upstream, **options)
    check(found, truth(hidden, weight, targets, frozen, upstream, **options), 500)
    assert calls


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("gradient_of", ["logprobs", "entropy"])
def test_entropies_give_gradients(calls, gradient_of, frozen):
    torch.manual_seed(0)
    head = make_on_cpu(200, 64, 1024, BF16)
    check_against_float64(*head, frozen=frozen, gradient_of=gradient_of, device="cuda")
    assert "head_grad" in calls


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 300),
    width=st.integers(1, 16).map(lambda n: 8 * n),
    vocabulary=st.integers(2, 2900),
    frozen=st.booleans(),
    gradient_of=st.sampled_from(["logprobs", "entropy"]),
    temperature=st.floats(0.3, 3.0),
    softcap=st.one_of(st.none(), st.floats(5.0, 50.0)),
    seed=st.integers(0, 2**31),
)
def test_equals_float64_at_any_shape(count, width, vocabulary, seed, **options):
    torch.manual_seed(seed)
    head = make_on_cpu(count, width, vocabulary, BF16, spread=1.0)
    check_against_float64(*head, device="cuda", odd=True, **options)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "sapo", "vespo"])
def test_the_loss_in_one_pass_equals_float64(calls, loss_type, trains):
    torch.manual_seed(1)
    on_policy = loss_type == "vespo"
    rows = make_rows((40, 0, 70, 1, 189), BF16, 1024, 64, on_policy=on_policy, trains=(trains, False))
    check_16_bit(rows, objective(loss_type, beta=0.04), device="cuda")
    assert "head_objective" in calls


@pytest.mark.parametrize("frozen", [True, False])
def test_logits_of_any_size(calls, frozen):
    """Targets that no model would draw: shifts that are wrong by thousands of bits."""
    hidden, weight, targets = make(300, 64, 4096)
    scale = torch.logspace(-4, 4, 300, device="cuda").unsqueeze(1)
    hidden = (hidden * scale).to(BF16)
    upstream = torch.randn(300, device="cuda")
    found = run(hidden, weight, targets, frozen, upstream)
    exact = truth(hidden, weight, targets, frozen, upstream)
    largest = logits_float64(hidden, weight).abs().amax(1)
    assert largest.max() > 1e4
    for ours, true in zip(found[:2], exact[:2], strict=True):
        assert ((ours - true).abs() <= 1e-4 + 8 * 2**-24 * largest).all()
    assert relative_error(found[2], exact[2]) <= 3e-3
    assert worst_row_error(found[2] / scale, exact[2] / scale) <= 2e-2
    assert calls


@pytest.mark.parametrize("frozen", [True, False])
def test_a_row_s_bits_do_not_depend_on_its_neighbours(calls, frozen):
    """Nor on the chunk, nor on whether a neighbour's shift was wrong and all was done twice."""
    hidden, weight, targets = make(600, 128, 32000)
    upstream = torch.randn(600, device="cuda")
    alone = run(hidden, weight, targets, frozen, upstream)
    again = run(hidden, weight, targets, frozen, upstream)
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    order = torch.randperm(600, device="cuda")
    permuted = run(hidden[order], weight, targets[order], frozen, upstream[order])
    assert all(torch.equal(a, b[order]) for a, b in zip(permuted[:3], alone[:3], strict=True))
    far = hidden.clone()
    far[7] *= 1000
    beside = run(far, weight, targets, frozen, upstream)
    others = torch.arange(600, device="cuda") != 7
    assert all(torch.equal(a[others], b[others]) for a, b in zip(beside[:3], alone[:3], strict=True))
    in_parts = run(hidden, weight, targets, frozen, upstream, num_chunks=7)
    assert all(torch.equal(a, b) for a, b in zip(in_parts[:2], alone[:2], strict=True))
    assert calls


@pytest.mark.parametrize("frozen", [True, False])
def test_a_nan_row_stays_alone_and_ignored_rows_are_zero(calls, frozen):
    hidden, weight, targets = make(9, 64, 4096)
    hidden[4, 10] = hidden[7] = float("nan")
    targets[7], targets[8] = -100, 4096
    upstream = torch.randn(9, device="cuda")
    for skip_ignored in (True, False):
        logprobs, entropy, grad, *_ = run(hidden, weight, targets, frozen, upstream, skip_ignored=skip_ignored)
        assert logprobs[4].isnan() and entropy[4].isnan() and grad[4].isnan().all()
        assert logprobs[[7, 8]].eq(0).all() and entropy[[7, 8]].eq(0).all() and grad[[7, 8]].eq(0).all()
        others = [0, 1, 2, 3, 5, 6]
        clean = run(hidden[others], weight, targets[others], frozen, upstream[others])
        assert all(torch.equal(a[others], b) for a, b in zip((logprobs, entropy, grad), clean[:3], strict=True))
    assert calls


@pytest.mark.parametrize("frozen", [True, False])
def test_words_that_cannot_be_drawn(calls, frozen):
    """Logits of -inf, of the target too."""
    hidden, weight, targets = make(200, 64, 1024)
    hidden[:, 0] = 1.0
    weight[7, 0] = weight[300, 0] = -torch.inf
    targets[targets == 7], targets[targets == 300] = 8, 8
    upstream = torch.randn(200, device="cuda")
    found = run(hidden, weight, targets, frozen, upstream)
    finite = weight.clone()
    finite[7, 0] = finite[300, 0] = -1e30
    exact = truth(hidden, finite, targets, frozen, upstream)
    for ours, true in zip(found[:2], exact[:2], strict=True):
        assert (ours - true).abs().max() <= 1e-4
    # What these words give to hidden is 0 x -inf, as in eager torch.
    if not frozen:
        assert relative_error(found[3], exact[3]) <= 3e-3
    targets[5] = 7
    hidden[5, 1:] *= 100  # the others' logits are far from the shift that such a target has
    logprobs = linear_logprob(hidden, weight, targets).logprobs
    others = torch.arange(200, device="cuda") != 5
    assert logprobs[5] == -torch.inf and torch.equal(logprobs[others], found[0][others])
    weight[:, 0] = -torch.inf
    assert linear_logprob(hidden, weight, targets).logprobs.isnan().all()
    assert calls


def test_more_rows_than_a_call_counts(calls):
    hidden, weight, targets = make((1 << 20) + 5, 8, 32)
    logprobs = linear_logprob(hidden, weight, targets, num_chunks=1).logprobs
    exact, _ = logprobs_float64(logits_float64(hidden, weight), targets)
    assert (logprobs - exact).abs().max() < 1e-4
    assert calls == ["head_pass", "head_pass"]


def test_more_than_two_to_the_31_logits(calls):
    hidden, weight, targets = make(16500, 64, 131104)
    assert hidden.shape[0] * weight.shape[0] > 2**31
    out = linear_logprob(hidden.requires_grad_(), weight, targets, num_chunks=1)
    out.logprobs[-100:].sum().backward()
    leaf = hidden[-100:].detach().double().requires_grad_()
    logprobs, _ = logprobs_float64(logits_float64(leaf, weight), targets[-100:])
    logprobs.sum().backward()
    assert (out.logprobs[-100:] - logprobs).abs().max() < 1e-4
    assert relative_error(hidden.grad[-100:], leaf.grad) <= 3e-3
    assert calls == ["head_pass"]


@pytest.mark.parametrize("frozen", [True, False])
def test_operands_that_copies_cannot_take_are_made_so(calls, frozen):
    hidden, weight, targets = make(100, 64, 1024)
    upstream = torch.randn(100, device="cuda")
    plain = run(hidden, weight, targets, frozen, upstream)
    wide = torch.zeros(100, 128, device="cuda", dtype=BF16)
    wide[:, ::2] = hidden
    offset = torch.zeros(1024 * 64 + 3, device="cuda", dtype=BF16)[3:].view(1024, 64).copy_(weight)
    assert offset.data_ptr() % 16
    for states, head in ((wide[:, ::2], weight), (hidden, offset)):
        other = run(states, head, targets, frozen, upstream)
        assert all(torch.equal(a, b) for a, b in zip(other, plain, strict=True))
    masters = run(hidden.float(), weight.float(), targets, frozen, upstream, compute_dtype=BF16)
    assert all(torch.equal(a, b) for a, b in zip(masters[:2], plain[:2], strict=True))
    assert relative_error(masters[2], plain[2]) <= 3e-3


def test_a_process_that_asks_before_it_uses_the_card_is_told_the_same():
    """The driver encodes the kernel's copies only where there is a context, and the answer is kept."""
    code = (
        "import fastgrpo, torch; from fastgrpo.kernels import fused_head; table = fastgrpo.backends();"
        "assert 'fused product' in table['linear_logprob'].implementation, table;"
        "assert fused_head.device_serves(torch.zeros(1, device='cuda').device)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_the_row_kernels_serve_instead():
    weight = torch.empty(1024, 64, device="cuda", dtype=BF16)
    call = HeadCall(weight, None, Transform(), BF16, Use.SLOPES)
    assert fused_head.serves(call)
    assert fused_head.serves(HeadCall(weight, None, Transform(0.7, 2.0, 30.0), BF16, Use.GIVEN, True))
    assert fused_head.serves(call._replace(transform=Transform(1.0, 2e-6)))
    assert fused_head.serves(call._replace(weight=weight[:1]))
    others = {
        "a width that is no multiple of 8": call._replace(weight=weight[:, :60].contiguous()),
        "a transposed weight": call._replace(weight=weight.t().contiguous().t()),
        "a bias": call._replace(bias=weight[:, 0]),
        "a negative scale": call._replace(transform=Transform(1.0, -1.0)),
        "a scale of almost nothing": call._replace(transform=Transform(1.0, 5e-7)),
        "a scale beyond all": call._replace(transform=Transform(1e-7)),
        "a softcap of many temperatures": call._replace(transform=Transform(0.1, 1.0, 30.0)),
        "float16": call._replace(weight=weight.half(), compute_dtype=torch.float16),
        "slopes of an entropy": call._replace(entropy_gradient=True),
        "an entropy bonus": call._replace(use=Use.OBJECTIVE, entropy_gradient=True),
    }
    assert not [name for name, other in others.items() if fused_head.serves(other)]


def test_rows_of_weight_that_train_beside_a_row_of_huge_shift(calls):
    """A factor far below 1 times hidden states must not vanish."""
    hidden, weight, targets = make(64, 64, 1024)
    hidden[::2] *= 30
    assert logits_float64(hidden, weight).abs().max() > 100
    upstream = torch.full((64,), 1e-6, device="cuda")
    found, exact = (f(hidden, weight, targets, False, upstream) for f in (run, truth))
    assert relative_error(found[3], exact[3]) <= 3e-3
    segments, advantages = torch.tensor([0, 64], device="cuda"), torch.tensor([1e-6], device="cuda")
    leaf, head = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss, _ = linear_grpo_loss(leaf, head, targets, segments, advantages, objective("grpo"))
    loss.backward()
    ones = torch.full((64,), -1e-6 / 64, device="cuda")
    exact = truth(hidden, weight, targets, False, ones)
    assert relative_error(leaf.grad, exact[2]) <= 3e-3 and relative_error(head.grad, exact[3]) <= 3e-3
    assert set(calls) == {"head_pass", "head_grad", "head_objective"}


@pytest.mark.parametrize("frozen", [True, False])
def test_targets_that_repeat_and_targets_that_are_none(calls, frozen):
    """What targets alone give is added up apart from the products: one word for half of the rows, in any order."""
    hidden, weight, targets = make(5000, 72, 256)
    targets[::2], targets[7], targets[9] = 5, -100, 256
    upstream = torch.randn(5000, device="cuda")
    found = run(hidden, weight, targets, frozen, upstream, skip_ignored=False)
    check(found, truth(hidden, weight, targets, frozen, upstream), 100)
    assert calls


def loss_of(leaves: list[Tensor], targets: Tensor, **options: Any) -> Tensor:
    """Of rows with a coefficient of -1 / N each."""
    segments, advantages = torch.tensor([0, len(targets)], device="cuda"), torch.ones(1, device="cuda")
    return linear_grpo_loss(*leaves, targets, segments, advantages, objective("grpo"), **options)[0]


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    ("count", "width", "vocabulary"), [(2048, 1024, 32000), (129, 896, 151936), (1, 2048, 8192), (2001, 1024, 49155)]
)
def test_a_weight_s_gradient_is_rounded_once(monkeypatch, count, width, vocabulary, weight_dtype):
    """Of the only batch, when its last factor is known; one word is the target of a third of the rows."""
    used, product = [], fused_head.rounded_weight_grad
    monkeypatch.setattr(fused_head, "rounded_weight_grad", lambda *given: used.append(given[3]) or product(*given))
    hidden, weight, targets = make(count, width, vocabulary)
    targets[::3] = 5
    given = [hidden, weight.to(weight_dtype)]
    leaves = [x.detach().requires_grad_() for x in given]
    loss = loss_of(leaves, targets, temperature=0.7, compute_dtype=BF16)
    assert not used
    (0.3 * loss).backward()
    assert [len(used), used[0].item()] == [1, pytest.approx(0.3)]
    upstream = torch.full((count,), -0.3 / count, device="cuda")
    *_, exact_hidden, exact = truth(hidden, weight, targets, False, upstream, temperature=0.7)
    assert leaves[1].grad.dtype == weight_dtype
    assert relative_error(leaves[0].grad, exact_hidden) <= 2.5e-3
    # 16-bit values and 16-bit results, each rounded once.
    assert relative_error(leaves[1].grad, exact) <= 2.5e-3
    words = targets.unique()
    limit = 2e-3 if weight_dtype == BF16 else 1e-3
    assert relative_error(leaves[1].grad[words], exact[words]) <= limit
    found = run(hidden, given[1], targets, False, upstream, temperature=0.7, compute_dtype=BF16)
    assert len(used) == 2 and used[1] is None
    assert relative_error(found[3], exact) <= 2.5e-3 and relative_error(found[3][words], exact[words]) <= limit


@pytest.mark.parametrize("vocabulary", [8192, 8200, 8195, 8255])
def test_every_word_s_sum_over_rows_is_rounded_once(vocabulary):
    """Those of the last words of an odd vocabulary too, which have a small product of their own."""
    values = torch.randn(2001, pitch_of(vocabulary), device="cuda").to(BF16)[:, :vocabulary]
    hidden = torch.randn(2001, 1024, device="cuda").to(BF16)
    found, exact = rounded_sum_over_rows(values, hidden, 0.3), 0.3 * values.double().t() @ hidden.double()
    assert found.dtype == BF16
    # Half of the last place, and what fp32 adds up to.
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


def test_gradients_are_taken_at_every_row_s_target():
    values = torch.randn(300, 1088, device="cuda").bfloat16()[:, :1056]
    targets = torch.randint(1056, (300,), device="cuda")
    targets[4], targets[7] = -100, 1056
    out = torch.full((300, 320), torch.nan, device="cuda", dtype=BF16)
    torch.ops.fastgrpo.take_targets(values, targets, out)
    inside = (targets >= 0) & (targets < 1056)
    assert torch.equal(out[:, :300], torch.where(inside, values[:, targets.clamp(0, 1055)], 0.0))
    assert out[:, 300:].isnan().all()
    with pytest.raises(
        RuntimeError, match=r"take_targets: out has shape \[300, 299\]; it must be contiguous \[300, 300 or more\]"
    ):
        torch.ops.fastgrpo.take_targets(values, targets, out.new_empty(300, 299))
    with pytest.raises(RuntimeError, match="round_at_targets: sums has 3 rows; it must have 300"):
        rows = torch.zeros(300, device="cuda")
        hidden = out.new_zeros(300, 8)
        torch.ops.fastgrpo.round_at_targets(out.new_zeros(64, 8), rows.new_zeros(3, 8), rows, targets, hidden, 1.0)


def test_bits_of_a_product_that_waited_are_those_of_a_second_backward():
    hidden, weight, targets = make(600, 1024, 32000)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    loss = loss_of(leaves, targets)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    other = torch.autograd.grad(loss_of(leaves, targets), leaves)
    assert all(map(torch.equal, once, again)) and all(map(torch.equal, once, other))


def test_hidden_states_must_not_change_before_a_product_that_waits():
    hidden, weight, targets = make(600, 1024, 32000)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    states = leaves[0] * 1.0
    loss = loss_of([states, leaves[1]], targets)
    with torch.no_grad():
        states.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
def test_a_product_that_waits_needs_no_second_gradient(weight_dtype):
    hidden, weight, targets = make(2048, 2048, 128256)
    leaves = [hidden.requires_grad_(), weight.to(weight_dtype).requires_grad_()]
    del weight
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(leaves, targets, compute_dtype=BF16)
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    assert leaves[1].grad is not None
    after, peak = (x - before for x in (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    values, result = 2048 * 128256 * 2, leaves[1].numel() * leaves[1].element_size()
    small = 100 << 20
    assert values <= kept <= values + small and result <= after <= result + small
    cast = 0 if weight_dtype == BF16 else 2 * leaves[1].numel()
    assert peak <= values + max(result, cast) + small, f"{peak >> 20} MiB"


def arguments(count: int = 40, width: int = 64, vocabulary: int = 1056) -> dict[str, Any]:
    """Of the op, with poison where it writes."""
    hidden, weight, targets = make(count, width, vocabulary)
    pitch, strips = -(-vocabulary // 64) * 64, -(-vocabulary // 256)
    rows = torch.full((6, count), torch.nan, device="cuda")
    grad = torch.full((count, pitch), torch.nan, device="cuda", dtype=BF16)[:, :vocabulary]
    return {
        "hidden": hidden, "weight": weight, "targets": targets, "temperature": 0.9, "logit_scale": 1.0, "softcap": None,
        "logprobs": rows[0], "lse": rows[1], "entropy": rows[2], "grad": grad, "at_target": rows[3], "row_factors": rows[4],
        "scratch": torch.full((count * (4 * strips + 2) + 1,), torch.nan, device="cuda"),
    }  # fmt: skip


def test_a_row_s_gradient_is_its_factor_times_the_values_but_for_the_target():
    given = arguments()
    torch.ops.fastgrpo.fused_pass(*given.values())
    log_p = torch.log_softmax(logits_float64(given["hidden"], given["weight"], temperature=0.9), -1)
    column = given["targets"].unsqueeze(1)
    assert (
        given["lse"] - logits_float64(given["hidden"], given["weight"], temperature=0.9).logsumexp(-1)
    ).abs().max() < 1e-4
    assert given["grad"].gather(1, column).eq(0).all()
    found = (given["row_factors"].unsqueeze(1) * given["grad"]).scatter(1, column, given["at_target"].unsqueeze(1))
    exact = torch.nn.functional.one_hot(given["targets"], log_p.shape[1]) - log_p.exp()
    assert relative_error(found, exact) <= 2e-3
    assert relative_error(given["at_target"], exact.gather(1, column).squeeze(1)) <= 1e-5


def confident(gap: float, width: int, vocabulary: int, count: int = 130) -> tuple[Tensor, Tensor, Tensor]:
    """
    Rows whose target is `gap` nats above all other words, which are near each other.

    An exponential of another word is 2^(z - shift): farther below the target than 87 nats it is 0.
    """
    words = width // 4
    axes, _ = torch.linalg.qr(torch.randn(width, width))
    targets, place = torch.randperm(vocabulary)[:words], torch.randint(words, (count,))
    weight = torch.randn(vocabulary, width - words) @ axes[words:] / (width - words) ** 0.5
    weight[targets] = axes[:words]
    hidden, weight = 0.5 * torch.randn(count, width - words) @ axes[words:], weight.to(BF16)
    targets = targets[place]
    for _ in range(4):
        nearest, _ = below_targets(hidden.to(BF16), weight, targets)
        hidden += (gap - nearest).float().unsqueeze(1) * weight[targets]
    nearest, farthest = below_targets(hidden.to(BF16), weight, targets)
    assert (nearest - gap).abs().max() < 0.5 and farthest.max() < 87
    return hidden.to(BF16).cuda(), weight.cuda(), targets.cuda()


def below_targets(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """How many nats the nearest and the farthest of all other words are below the target of each row."""
    logits, column = logits_float64(hidden, weight), targets.unsqueeze(1)
    below = logits.gather(1, column) - logits
    return below.scatter(1, column, torch.inf).amin(1), below.amax(1)


def confident_truth(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """
    Log-probs, and d log-prob of hidden and (summed) of weight, in float64.

    `log_softmax` and its gradient lose digits there, in float64 too: log p is -log(1 + the odds against the target).
    """
    logits, column = logits_float64(hidden, weight), targets.unsqueeze(1)
    odds = (logits.scatter(1, column, -torch.inf).logsumexp(1) - logits.gather(1, column).squeeze(1)).exp()
    logprobs = -torch.log1p(odds)
    slopes = -(logits - logits.logsumexp(1, keepdim=True)).exp()
    slopes.scatter_(1, column, (odds / (1 + odds)).unsqueeze(1))
    return logprobs, slopes @ weight.double(), slopes.t() @ hidden.double()


# An absolute error of a logit, of fp32 products of 80 and more about 1e-4 at most, is a relative one of log p and of 1 - p. In
# z - lse, and in 1 - exp(log p), it is 1e-6 or so beside 1e-9 (20 nats) and less: nothing is right there.
CONFIDENT = 1e-3
GAPS = pytest.mark.parametrize("gap", [5.0, 12.0, 20.0, 40.0, 80.0])


@GAPS
@pytest.mark.parametrize("way", ["frozen", "trained", "loss, frozen", "loss, trained"])
# The last has a weight whose gradient a product rounds at once.
@pytest.mark.parametrize(("width", "vocabulary"), [(128, 1056), (128, 1003), (256, 32768)])
def test_confident_rows_keep_their_digits(calls, gap, way, width, vocabulary):
    hidden, weight, targets = confident(gap, width, vocabulary)
    exact = confident_truth(hidden, weight, targets)
    leaves = [hidden.requires_grad_(), weight.requires_grad_("trained" in way)]
    factor = 1.0
    if "loss" in way:
        segments, advantages = torch.tensor([0, len(targets)], device="cuda"), torch.ones(1, device="cuda")
        loss, stats = linear_grpo_loss(*leaves, targets, segments, advantages, objective("grpo"))
        logprobs, factor = stats.logprobs, -1.0 / len(targets)
        loss.backward()
        assert set(calls) == {"head_objective"}
    else:
        logprobs = linear_logprob(*leaves, targets).logprobs
        logprobs.sum().backward()
        assert set(calls) == ({"head_pass"} if way == "frozen" else {"head_pass", "head_grad"})
    assert ((logprobs - exact[0]) / exact[0]).abs().max() <= CONFIDENT
    # The target's term is in fp32. Beside it the other words' are small, and what is left is the rounding of the result.
    limit = CONFIDENT + 2**-8
    assert every_row_error(hidden.grad, factor * exact[1]) <= limit
    if "trained" in way:
        words = targets.unique()
        assert every_row_error(weight.grad[words], factor * exact[2][words]) <= limit
        assert relative_error(weight.grad, factor * exact[2]) <= 3e-3


@GAPS
@pytest.mark.parametrize("op", ["fused_pass", "fused_objective", "fused_grad"])
def test_confident_targets_get_one_minus_p(op, gap):
    head = dict(zip(("hidden", "weight", "targets"), confident(gap, 128, 1003), strict=True))
    logprobs, *_ = confident_truth(**head)
    given = arguments(130, 128, 1003) | head | {"temperature": 1.0}
    g = torch.randn(130, device="cuda")
    *before, grad, at_target, factors, scratch = given.values()
    rows = grad, at_target, factors, scratch
    if op == "fused_objective":
        # On-policy a log-prob's coefficient is minus the advantage.
        ones, constants = torch.ones(130, device="cuda"), objective_constants(Objective("dapo"))
        constants[4] = bool(constants[4])
        place = LOSS_TYPES.index("dapo")
        torch.ops.fastgrpo.fused_objective(*before, -g, ones, None, None, None, None, place, *constants, *rows)
    else:
        torch.ops.fastgrpo.fused_pass(*given.values())
    found = given["logprobs"]
    assert ((found - logprobs) / logprobs).abs().max() <= CONFIDENT
    if op == "fused_grad":
        at_target.fill_(torch.nan)
        torch.ops.fastgrpo.fused_grad(*before, g, None, grad, at_target)
    expected = -torch.expm1(logprobs) * (1.0 if op == "fused_pass" else g)
    assert ((at_target - expected) / expected).abs().max() <= CONFIDENT


@pytest.mark.parametrize("vocabulary", [1, 1003, 1025, 1055, 1063])
def test_a_row_is_written_to_the_end_of_its_last_group_of_columns(vocabulary):
    """With zeros, and no further."""
    given = arguments(vocabulary=vocabulary)
    torch.ops.fastgrpo.fused_pass(*given.values())
    rows = given["grad"].as_strided((40, given["grad"].stride(0)), (given["grad"].stride(0), 1))
    end = -(-vocabulary // 32) * 32
    assert rows[:, :vocabulary].isfinite().all() and rows[:, vocabulary:end].eq(0).all() and rows[:, end:].isnan().all()


def test_a_call_waits_for_its_own_stream():
    """Hidden states that are late there, and are something else until then."""
    given, outputs = arguments(), ("logprobs", "lse", "entropy", "grad", "at_target", "row_factors")
    torch.ops.fastgrpo.fused_pass(*given.values())
    expected = [given[name].clone() for name in outputs]
    late, stream = arguments() | {name: given[name] for name in ("weight", "targets")}, torch.cuda.Stream()
    late["hidden"] = torch.zeros_like(given["hidden"])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late["hidden"].copy_(given["hidden"])
        torch.ops.fastgrpo.fused_pass(*late.values())
    stream.synchronize()
    assert all(torch.equal(late[name], values) for name, values in zip(outputs, expected, strict=True))


def test_no_logits_are_kept_without_a_gradient_and_16_bit_ones_with_one(calls):
    hidden, weight, targets = make(8192, 64, 128256)
    for frozen_grad, limit in ((False, 96), (True, 576)):
        leaf = hidden.detach().requires_grad_(frozen_grad)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_logprob(leaf, weight, targets, return_entropy=True, entropy_requires_grad=False)
        peak = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
        assert peak <= limit, f"{peak:.0f} MiB"
    assert calls.count("head_pass") == 1 + 4


def test_ids_of_32_bits():
    given = arguments()
    torch.ops.fastgrpo.fused_pass(*given.values())
    short = arguments() | {name: given[name] for name in ("hidden", "weight")} | {"targets": given["targets"].int()}
    torch.ops.fastgrpo.fused_pass(*short.values())
    names = ("logprobs", "lse", "entropy", "grad", "at_target", "row_factors")
    assert all(torch.equal(given[name], short[name]) for name in names)


def test_an_entropy_bonus_in_one_pass_is_for_the_row_kernels(calls):
    torch.manual_seed(2)
    check_16_bit(
        make_rows((40, 60), BF16, 1024, 64, trains=(True, False)), objective("dapo", entropy_coef=0.01), device="cuda"
    )
    assert not calls


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"hidden": lambda x: x.float()},
            r"hidden is torch.float32 of shape \[40, 64\]; it must be contiguous torch.bfloat16",
        ),
        ({"hidden": lambda x: x[:, :60]}, r"hidden has shape \[40, 60\] and weight \[1056, 64\]; they must be"),
        ({"weight": lambda x: x[:0]}, r"weight has shape \[0, 64\]; H must be a multiple of 8, and V at least 1"),
        ({"weight": lambda x: x.cpu()}, "weight is not on a CUDA device; move it to the device of hidden"),
        ({"targets": lambda x: x.float()}, "targets is torch.float32; it must be torch.int32 or torch.int64"),
        ({"targets": lambda x: x[:7]}, r"targets has shape \[7\]; it must be contiguous \[40\]"),
        ({"logit_scale": lambda x: -x}, "logit_scale is -1; it must be above 0"),
        ({"temperature": lambda x: 0.0}, "temperature is 0; it must be above 0"),
        ({"grad": lambda x: x.float()}, "the gradient is torch.float32; it must be torch.bfloat16"),
        (
            {"weight": lambda x: x[:1048], "grad": lambda x: x.new_empty(40, 1048)},
            "rows of the gradient are 1048 elements apart; they must be a multiple of 8 apart, and 1056 at least",
        ),
        (
            {
                "weight": lambda x: x[:1048],
                "grad": lambda x: torch.empty_strided((40, 1048), (1056, 1), dtype=BF16, device="cuda"),
            },
            "the gradient has 42232 elements of memory; its last row, too, is written to column 1056",
        ),
        ({"grad": lambda x: x[:, :96]}, r"the gradient has shape \[40, 96\]; it must be \[40, 1056\]"),
        ({"at_target": lambda x: None}, "grad, at_target and row_factors go together"),
        ({"scratch": lambda x: x[:50]}, "with 50 elements; it must be contiguous torch.float32 with at least 881"),
    ],
)
def test_bad_arguments_are_named(wrong, message):
    given = arguments()
    for name, change in wrong.items():
        given[name] = change(given[name])
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastgrpo.fused_pass(*given.values())
    torch.cuda.synchronize()
