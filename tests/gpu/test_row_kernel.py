"""The row kernels against float64: every length, transform and coefficient, in place and apart, bits where promised."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_kernels import launch, over, padded, pitch_of, poisoned
from torch import Tensor

from fastgrpo.kernels import cuda, reference
from fastgrpo.kernels.library import FUSED_OPS, OPS, library_info, load_library, row_is_read_once
from fastgrpo.objective import LOSS_TYPES, Objective, token_grad
from fastgrpo.ops import objective_constants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(load_library() is None, reason=library_info().reason),
]
BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = [1, 2, 3, 4, 5, 7, 100, 257, 2047, 2048, 2049, 32000, 50257, 128256, 151936, 152064, 262144]
CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
KERNELS = pytest.mark.parametrize("kernel", ["streamed", *(["cluster"] if CLUSTERS else [])])


def make(rows: int, vocabulary: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Products and targets; half of the targets are likely ones."""
    products = torch.randn(rows, vocabulary, device="cuda") * spread
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    peaked = torch.arange(rows, device="cuda")[::2]
    products[peaked, targets[peaked]] += torch.rand(len(peaked), device="cuda") * 20
    return products, targets


def truth(
    products: Tensor, targets: Tensor, bias=None, temperature=1.0, logit_scale=1.0, softcap=None
) -> dict[str, Tensor]:
    """Statistics and gradients in float64, the latter without the factor logit_scale / temperature."""
    z = products.double() if bias is None else products.double() + bias[: products.shape[1]].double()
    slope = 1.0
    if softcap is None:
        z = z * (logit_scale / temperature)
    else:
        capped = torch.tanh(z * logit_scale / softcap)
        z, slope = capped * softcap / temperature, 1 - capped.square()
    log_p = torch.log_softmax(z, -1)
    p, safe = log_p.exp(), log_p.masked_fill(log_p == -math.inf, 0.0)
    entropy = -(p * safe).sum(-1)
    onehot = torch.zeros_like(p).scatter_(1, targets.long()[:, None], 1.0)
    return {
        "logprobs": log_p.gather(1, targets.long()[:, None])[:, 0],
        "lse": torch.logsumexp(z, -1),
        "entropy": entropy,
        "u": (onehot - p) * slope,
        "v": -p * (safe + entropy[:, None]) * slope,
        "largest": z[z.isfinite()].abs().max() if z.isfinite().any() else z.new_zeros(()),
    }


def assert_statistics(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    limit = 1e-5 + 8 * 2**-24 * wanted["largest"].item()
    for name in ("logprobs", "lse", "entropy"):
        error = (found[name].double() - wanted[name]).abs()
        error = error.masked_fill(found[name].double() == wanted[name], 0.0).max().item()
        bound = limit if name != "entropy" else limit + 1e-5 * wanted["entropy"].max().item()
        assert error <= bound, f"{name} is off by {error:.2e} > {bound:.2e}"


def assert_gradient(found: Tensor, wanted: Tensor, what: str) -> None:
    found = found.double()
    assert found.isfinite().all(), f"{what} is not finite, or not written"
    scale = wanted.norm(dim=1)
    error = ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
    # A rounding to bfloat16 is off by 2^-8 at most, and nothing averages it over a few entries.
    assert error <= 2**-8, f"{what}: relative error {error:.2e}"
    rows = ((found - wanted).norm(dim=1) / scale.clamp(min=1e-30))[scale > 1e-3 * scale.max()]
    assert not rows.numel() or rows.max() <= 2e-2, f"{what}: relative error of the worst row {rows.max().item():.2e}"


def row_pass(
    logits: Tensor, targets: Tensor, first=None, second=None, bias=None, scale=1.0, **options
) -> dict[str, Tensor]:
    rows = len(targets)
    out = {name: torch.full((rows,), math.nan, device="cuda") for name in ("logprobs", "lse", "entropy")}
    head = bias, options.get("temperature", 1.0), options.get("logit_scale", 1.0), options.get("softcap")
    torch.ops.fastgrpo.row_pass(logits, targets, *head, *out.values(), first, second, scale)
    return out


@KERNELS
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("vocabulary", LENGTHS)
@pytest.mark.parametrize("rows", [1, 37])
def test_equals_float64_at_every_length(kernel, dtype, vocabulary, rows):
    products, targets = make(rows, vocabulary)
    wanted = truth(products, targets)
    logits = padded(products)
    grads = over(logits, dtype), poisoned(rows, vocabulary, dtype)
    found = launch(kernel, logits, targets, grads[0], second=grads[1])
    assert_statistics(found, wanted)
    if vocabulary == 1:
        assert grads[0].eq(0).all() and grads[1].eq(0).all()
    else:
        tiny = 2**-12 if dtype == FP16 else 0.0  # unscaled float16 has no digits for small probabilities
        for grad, name in zip(grads, "uv", strict=True):
            big = wanted[name].abs() > tiny
            assert_gradient(grad.double().where(big, 0.0), wanted[name].where(big, 0.0), name)
            assert grad.isfinite().all()


@KERNELS
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.05},
        {"temperature": 10.0},
        {"softcap": 3.0},
        {"softcap": 30.0, "temperature": 0.7, "logit_scale": 8.0},
        {"logit_scale": 0.0625},
        {"logit_scale": -1.0},
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_bias_scale_softcap_and_temperature_apply_in_this_order(kernel, options, with_bias):
    products, targets = make(33, 5003, 2.0)
    bias = torch.randn(pitch_of(5003), device="cuda") if with_bias else None
    wanted = truth(products, targets, bias, **options)
    logits = padded(products)
    grads = over(logits, BF16), poisoned(33, 5003, BF16)
    found = launch(kernel, logits, targets, grads[0], second=grads[1], bias=bias, **options)
    assert_statistics(found, wanted)
    for grad, name in zip(grads, "uv", strict=True):
        assert_gradient(grad, wanted[name], name)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(1, 70_000),
    spread=st.floats(0.0, 40.0),
    temperature=st.floats(0.1, 10.0),
    softcap=st.one_of(st.none(), st.floats(1.0, 50.0)),
    seed=st.integers(0, 2**31),
)
def test_the_op_equals_float64_at_any_shape(rows, vocabulary, spread, temperature, softcap, seed):
    torch.manual_seed(seed)
    products, targets = make(rows, vocabulary, spread)
    wanted = truth(products, targets, None, temperature, 1.0, softcap)
    logits = padded(products)
    assert_statistics(row_pass(logits, targets.int(), temperature=temperature, softcap=softcap), wanted)
    grad = over(logits, BF16)
    found = row_pass(logits, targets, grad, temperature=temperature, softcap=softcap)
    assert_statistics(found, wanted)
    # Where the target has all the mass, 1 - p is below what float64 subtraction of p from 1 resolves.
    if wanted["u"].norm() > 1e-9:
        assert_gradient(grad, wanted["u"], "u")


@KERNELS
def test_gradients_have_the_same_bits_in_place_and_apart(kernel):
    products, targets = make(40, 50257)
    logits, apart = padded(products), padded(products)
    first = over(logits, BF16)
    launch(kernel, logits, targets, first)
    grads = poisoned(40, 50257, BF16), poisoned(40, 50257, BF16)
    launch(kernel, apart, targets, grads[0], second=grads[1])
    assert torch.equal(first, grads[0])
    assert torch.equal(apart, products), "logits were overwritten though the gradients lie apart"
    if kernel == "cluster":
        logits = padded(products)
        both = over(logits, BF16), over(logits, BF16, 1)
        launch(kernel, logits, targets, both[0], second=both[1])
        assert torch.equal(both[0], grads[0]) and torch.equal(both[1], grads[1])


@KERNELS
@pytest.mark.parametrize("vocabulary", [257, 50257, 151936, 262144])
def test_three_runs_and_a_permutation_of_rows_give_the_same_bits(kernel, vocabulary):
    products, targets = make(65, vocabulary)
    order = torch.randperm(65, device="cuda")
    results = []
    for index in (slice(None), slice(None), slice(None), order):
        logits = padded(products[index])
        grad, second = over(logits, BF16), poisoned(65, vocabulary, BF16)
        out = launch(kernel, logits, targets[index].contiguous(), grad, second=second)
        results.append((*out.values(), grad.clone(), second))
    for again in results[1:3]:
        assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))
    assert all(torch.equal(a, b[order]) for a, b in zip(results[3], results[0], strict=True))


@KERNELS
def test_nan_and_infinity_stay_in_their_rows(kernel):
    products, targets = make(9, 5003)
    clean = padded(products)
    clean_grad = over(clean, BF16)
    wanted = launch(kernel, clean, targets, clean_grad)
    products[2, 77] = math.nan
    products[4, targets[4]] = math.nan
    products[6, 5002] = math.inf
    logits = padded(products)
    grad = over(logits, BF16)
    found = launch(kernel, logits, targets, grad)
    bad, good = [2, 4, 6], [0, 1, 3, 5, 7, 8]
    for name, values in found.items():
        assert values[bad].isnan().all(), name
        assert torch.equal(values[good], wanted[name][good]), name
    assert grad[bad].isnan().all() and torch.equal(grad[good], clean_grad[good])


@KERNELS
def test_words_at_minus_infinity_have_no_mass_and_no_gradient(kernel):
    products, targets = make(12, 1001)
    bias = torch.zeros(pitch_of(1001), device="cuda")
    bias[500:1001] = -math.inf
    targets %= 500
    targets[3] = 700
    wanted = truth(products, targets, bias)
    logits = padded(products)
    grad, second = over(logits, BF16), poisoned(12, 1001, BF16)
    found = launch(kernel, logits, targets, grad, second=second, bias=bias)
    assert found["logprobs"][3] == -math.inf
    assert_statistics(found, wanted)
    assert_gradient(grad, wanted["u"], "u")
    assert_gradient(second, wanted["v"], "v")
    columns = torch.arange(1001, device="cuda").expand(12, -1)
    outside = (columns >= 500) & (columns != targets[:, None])
    assert grad[outside].eq(0).all() and second[outside].eq(0).all()


@KERNELS
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_logits_neither_overflow_nor_lose_the_gap(kernel, size):
    products, targets = make(16, 5003)
    products += size
    wanted = truth(products, targets)
    logits = padded(products)
    grad = over(logits, BF16)
    assert_statistics(launch(kernel, logits, targets, grad), wanted)
    assert_gradient(grad, wanted["u"], "u")


@KERNELS
def test_a_confident_target_keeps_its_digits(kernel):
    gap = torch.tensor([5.0, 20.0, 40.0, 80.0], device="cuda")
    products = torch.zeros(4, 300, device="cuda")
    products[:, 17] = gap
    logits = padded(products)
    grad = over(logits, BF16)
    found = launch(kernel, logits, torch.full((4,), 17, device="cuda"), grad)
    exact = -torch.log1p(299 * torch.exp(-gap.double()))
    assert ((found["logprobs"] - exact) / exact).abs().max() < 1e-5
    complement = -torch.expm1(exact)
    assert ((grad[:, 17].double() - complement) / complement).abs().max() < 2**-8


@KERNELS
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("vocabulary", [100, 50257])
def test_ignored_rows_are_zero_and_their_logits_are_not_used(kernel, id_dtype, vocabulary):
    products, targets = make(6, vocabulary)
    targets = targets.to(id_dtype)
    targets[1], targets[4] = -100, vocabulary
    products[1], products[4] = math.nan, math.nan
    logits = padded(products)
    grad, second = over(logits, BF16), poisoned(6, vocabulary, BF16)
    found = launch(kernel, logits, targets, grad, second=second)
    for values in (*found.values(), grad, second):
        assert values[[1, 4]].eq(0).all() and values.isfinite().all()
    keep = [0, 2, 3, 5]
    wanted = truth(products[keep], targets[keep])
    assert_statistics({name: values[keep] for name, values in found.items()}, wanted)
    assert_gradient(grad[keep], wanted["u"], "u")


@KERNELS
def test_rows_beyond_two_to_the_31_elements(kernel):
    rows, vocabulary = 8200, 262144
    logits = torch.empty(rows, vocabulary, device="cuda")
    logits[:] = torch.randn(vocabulary, device="cuda")
    last = torch.randn(3, vocabulary, device="cuda")
    logits[-3:] = last
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    wanted = truth(last, targets[-3:])
    grad = over(logits, BF16)
    found = launch(kernel, logits, targets, grad)
    assert rows * vocabulary > 2**31
    assert_statistics({name: values[-3:] for name, values in found.items()}, wanted)
    assert_gradient(grad[-3:], wanted["u"], "u")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("vocabulary", [7, 5003, 50257])
@pytest.mark.parametrize(("with_logprobs", "with_entropy"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_row_grad_combines_both_gradients_from_saved_statistics(
    dtype, vocabulary, with_logprobs, with_entropy, softcap
):
    products, targets = make(20, vocabulary)
    wanted = truth(products, targets, None, 0.8, 1.0, softcap)
    saved = row_pass(padded(products), targets, temperature=0.8, softcap=softcap)
    g = torch.randn(20, device="cuda") if with_logprobs else None
    h = torch.randn(20, device="cuda") if with_entropy else None
    scale = 2048.0 if dtype == FP16 else 1.0
    logits = padded(products)
    grad = over(logits, dtype)
    torch.ops.fastgrpo.row_grad(
        logits, targets, None, 0.8, 1.0, softcap, saved["logprobs"], saved["lse"], saved["entropy"], g, h, grad, scale
    )
    expected = sum(x.double()[:, None] * wanted[name] for x, name in ((g, "u"), (h, "v")) if x is not None)
    assert_gradient(grad.double() / scale, expected, "combined")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("on_policy", "bonus"), [(True, False), (False, True)])
def test_the_objective_in_the_kernel_equals_the_one_in_torch(loss_type, beta, on_policy, bonus):
    rows, vocabulary = 64, 5003
    products, targets = make(rows, vocabulary)
    wanted = truth(products, targets, None, 0.9)
    objective = Objective(loss_type, beta=beta, delta=3.0, max_completion_length=1)
    base = wanted["logprobs"].float()
    old = None if on_policy else base + 0.3 * torch.randn(rows, device="cuda")
    ref = base + torch.randn(rows, device="cuda") if beta else None
    advantages, weights = torch.randn(rows, device="cuda"), torch.rand(rows, device="cuda")
    multiplier, phi = torch.rand(rows, device="cuda"), torch.rand(rows, device="cuda") if loss_type == "vespo" else None
    entropy_weights = torch.rand(rows, device="cuda") if bonus else None
    logits = padded(products)
    grad = poisoned(rows, vocabulary, BF16)
    out = [torch.full((rows,), math.nan, device="cuda") for _ in range(3)]
    constants = objective_constants(objective)
    constants[4] = bool(constants[4])
    torch.ops.fastgrpo.row_objective(
        logits, targets, None, 0.9, 1.0, None, *out, advantages, weights, old, ref, multiplier, phi, entropy_weights,
        LOSS_TYPES.index(loss_type), *constants, grad, 1.0,
    )  # fmt: skip
    assert_statistics(dict(zip(("logprobs", "lse", "entropy"), out, strict=True)), wanted)
    doubles = [None if x is None else x.double() for x in (advantages, old, ref, multiplier, phi)]
    coefficient = weights.double() * token_grad(objective, wanted["logprobs"], *doubles)
    expected = coefficient[:, None] * wanted["u"]
    if bonus:
        expected -= entropy_weights.double()[:, None] * wanted["v"]
    # A ratio within a few roundings of a clip bound may fall on its other side.
    if old is not None:
        ratio = (wanted["logprobs"] - old.double()).exp()
        bounds = torch.tensor([0.8, 1.2, 3.0], device="cuda", dtype=torch.float64)
        clear = (ratio[:, None] - bounds).abs().min(1).values > 1e-4
        grad, expected = grad[clear], expected[clear]
    assert_gradient(grad, expected, loss_type)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("vocabulary", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "temperature": 0.7}])
def test_16_bit_logits_are_read_as_they_are(dtype, vocabulary, options):
    products, targets = make(9, vocabulary)
    pitch = pitch_of(vocabulary)
    buffer = torch.full((9, pitch), math.nan, device="cuda", dtype=dtype)
    logits = buffer[:, :vocabulary]
    logits.copy_(products)
    targets[3] = -100
    keep = [0, 1, 2, 4, 5, 6, 7, 8]
    wanted = truth(logits[keep].float(), targets[keep], **options)
    second = poisoned(9, vocabulary, dtype)
    apart = poisoned(9, vocabulary, dtype)
    again = logits.clone() if vocabulary == pitch else buffer.clone()[:, :vocabulary]
    row_pass(again, targets, apart, **options)
    found = row_pass(logits, targets, logits, second, **options)  # in place
    assert torch.equal(logits, apart)
    assert_statistics({name: values[keep] for name, values in found.items()}, wanted)
    assert logits[3].eq(0).all() and all(values[3] == 0 for values in found.values())
    if vocabulary == 1:
        return
    tiny = 2**-12 if dtype == FP16 else 0.0
    for grad, name in ((logits, "u"), (second, "v")):
        big = wanted[name].abs() > tiny
        assert_gradient(grad[keep].double().where(big, 0.0), wanted[name].where(big, 0.0), name)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bit_logits_serve_the_other_coefficients(dtype):
    products, targets = make(40, 5003)
    logits = torch.empty(40, pitch_of(5003), device="cuda", dtype=dtype)[:, :5003].copy_(products)
    wanted = truth(logits.float(), targets)
    weights, advantages = torch.rand(40, device="cuda"), torch.randn(40, device="cuda")
    out = [torch.full((40,), math.nan, device="cuda") for _ in range(3)]
    scale = 2048.0 if dtype == FP16 else 1.0
    grad = poisoned(40, 5003, dtype)
    constants = objective_constants(Objective())
    constants[4] = bool(constants[4])
    torch.ops.fastgrpo.row_objective(
        logits, targets, None, 1.0, 1.0, None, *out, advantages, weights, None, None, None, None, None,
        LOSS_TYPES.index("dapo"), *constants, grad, scale,
    )  # fmt: skip
    expected = (-advantages * weights).double()[:, None] * wanted["u"]
    assert_gradient(grad.double() / scale, expected, "objective")
    torch.ops.fastgrpo.row_grad(
        logits, targets, None, 1.0, 1.0, None, *out[:2], out[2], -advantages * weights, None, logits, scale
    )
    assert_gradient(logits.double() / scale, expected, "given")


def test_the_reference_gives_the_same_gradients():
    products, targets = make(20, 5003)
    operands = reference.Operands(
        products, None, reference.Transform(0.7, 1.3, 20.0), torch.float32, torch.float32, 20, 20
    )
    wanted = reference.row_pass(
        products.clone(), targets, operands, with_entropy=True, with_logprob_grad=True, with_entropy_grad=True
    )
    logits = padded(products)
    grads = poisoned(20, 5003, BF16), poisoned(20, 5003, BF16)
    found = row_pass(logits, targets, *grads, temperature=0.7, logit_scale=1.3, softcap=20.0)
    for name in ("logprobs", "lse", "entropy"):
        assert (found[name] - getattr(wanted, name)).abs().max() < 2e-5, name
    assert_gradient(grads[0], wanted.logprob_grad.double(), "u")
    assert_gradient(grads[1], wanted.entropy_grad.double(), "v")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (1000, 333), (4096, 5120)])
def test_scaling_rounds_once(dtype, shape):
    values, factor = torch.randn(shape, device="cuda"), torch.tensor(0.37, device="cuda")
    out = torch.full(shape, math.nan, device="cuda", dtype=dtype)
    torch.ops.fastgrpo.scale_round(values, factor, out)
    assert torch.equal(out, (values * factor).to(dtype))


@pytest.mark.parametrize(
    ("with_logprobs", "with_entropy"), [(True, False), (False, True), (True, True), (False, False)]
)
@pytest.mark.parametrize("width", [1, 100, 896])
def test_weighing_slopes_equals_the_reference_and_leaves_out_rows_without_weight(with_logprobs, with_entropy, width):
    slopes = [torch.randn(50, width, device="cuda") for _ in range(2)]
    g, h = (torch.randn(50, device="cuda") if wanted else None for wanted in (with_logprobs, with_entropy))
    targets = torch.randint(-1, 100, (50,), device="cuda")
    targets[5] = -100
    for values in (g, h):
        if values is not None:
            values[7] = 0.0
            values[5] = math.nan
    slopes[0][7] = slopes[1][7] = slopes[0][5] = math.nan
    arguments = g, h, targets, *slopes, 99, BF16
    found, wanted = cuda.weigh_slopes(*arguments), reference.weigh_slopes(*arguments)
    assert found.isfinite().all()
    assert (found.float() - wanted.float()).abs().max() <= 2**-7 * wanted.float().abs().max()


def test_no_rows_are_no_work():
    logits = torch.empty(0, 64, device="cuda")
    row_pass(logits, torch.empty(0, dtype=torch.long, device="cuda"), torch.empty(0, 64, device="cuda", dtype=BF16))


BAD = {
    "targets on the CPU": ({"targets": torch.zeros(4, dtype=torch.long)}, "targets is not on a CUDA device"),
    "targets float": ({"targets": torch.zeros(4)}, r"targets is torch.float32; it must be torch.int32"),
    "targets length": ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets has shape \[3\].*\[4\]"),
    "logits double": ({"logits": torch.zeros(4, 128).double()}, r"logits is torch.float64; it must be torch.float32"),
    "gradient of another dtype": (
        {"logits": torch.zeros(4, 128, dtype=FP16), "grad": torch.zeros(4, 128, dtype=BF16)},
        r"gradient is torch.bfloat16 and logits torch.float16; with 16-bit logits both must have one dtype",
    ),
    "logits 1d": ({"logits": torch.zeros(4)}, r"logits has shape \[4\]; it must be \[rows, V\]"),
    "logits odd pitch": ({"logits": torch.zeros(4, 127)}, r"rows of logits are 127 elements apart.*multiple of 4"),
    "bias short": ({"bias": torch.zeros(64)}, r"bias is torch.float32 of shape \[64\].*\[128\]"),
    "gradient fp32": ({"grad": torch.zeros(4, 128)}, "gradient is torch.float32; it must be torch.bfloat16"),
    "gradient shape": (
        {"grad": torch.zeros(4, 64, dtype=BF16)},
        r"gradient has shape \[4, 64\]; it must be \[4, 128\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_say_what_was_given_and_what_is_allowed(case):
    change, message = BAD[case]
    arguments = {
        "logits": torch.zeros(4, 128),
        "targets": torch.zeros(4, dtype=torch.long),
        "bias": None,
        "grad": None,
        **change,
    }
    stay = "CPU" in case
    moved = {
        name: None if x is None else x if stay and name == "targets" else x.cuda() for name, x in arguments.items()
    }
    with pytest.raises(RuntimeError, match=message):
        row_pass(moved["logits"], moved["targets"], moved["grad"], bias=moved["bias"])


def test_a_bias_off_the_16_bytes_that_a_load_takes_is_refused():
    bias = torch.zeros(132, device="cuda")[1:129]
    with pytest.raises(RuntimeError, match="bias must start at a multiple of 16 bytes"):
        row_pass(torch.zeros(4, 128, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda"), bias=bias)


def test_gradients_that_overlap_other_logits_are_refused():
    logits = torch.zeros(4, 128, device="cuda")
    shifted = logits.view(BF16)[:, 64:192]
    with pytest.raises(RuntimeError, match="overlaps logits"):
        row_pass(logits, torch.zeros(4, dtype=torch.long, device="cuda"), shifted)


def test_ops_pass_opcheck():
    logits, targets = padded(torch.randn(4, 100, device="cuda")), torch.zeros(4, dtype=torch.long, device="cuda")
    out = [torch.empty(4, device="cuda") for _ in range(3)]
    grad = poisoned(4, 100, BF16)
    values = [torch.rand(4, device="cuda") for _ in range(2)]
    segments = torch.tensor([0, 2, 4], device="cuda")

    def half(*shape):
        return torch.rand(shape, device="cuda").bfloat16()

    head = (logits, targets, None, 1.0, 1.0, None, *out)
    words = half(96, 8)
    fused = (half(4, 8), words, targets, 1.0, 1.0, None, *out)
    exponentials = poisoned(4, 96, BF16), torch.empty(4, device="cuda")
    scratch = torch.empty(4 * (4 + 2) + 1, device="cuda")
    fused_too = torch.cuda.get_device_capability() == (9, 0)
    arguments = {
        "fused_pass": (*fused, *exponentials, torch.empty(4, device="cuda"), scratch),
        "fused_objective": (
            *fused, *values, None, None, None, None, 3, 0.2, 0.2, math.inf, 0.0, True, 1.0, 1.05, *exponentials,
            torch.empty(4, device="cuda"), scratch,
        ),
        "fused_grad": (*fused, values[0], None, *exponentials),
        "finish_hidden_grad": (torch.rand(4, 8, device="cuda"), values[0], values[1], targets, words, 1.0),
        "add_to_targets": (torch.rand(96, 8, device="cuda"), values[0], targets, half(4, 8), 1.0),
        "take_targets": (half(4, 96), targets, half(4, 8)),
        "round_at_targets": (half(96, 8), torch.rand(4, 8, device="cuda"), values[0], targets, half(4, 8), 1.0),
        "scale_rows": (half(4, 8), values[0], half(4, 8)),
        "row_pass": (*head, grad, None, 1.0),
        "row_objective": (
            *head, *values, None, None, None, None, None, 3, 0.2, 0.2, math.inf, 0.0, True, 1.0, 1.05, grad, 1.0,
        ),
        "row_grad": (*head, values[0], None, grad, 1.0),
        "scale_round": (out[0], values[0][0], torch.empty(4, device="cuda", dtype=BF16)),
        "weigh_slopes": (
            values[0], torch.rand(4, 8, device="cuda"), None, None, targets, 100,
            torch.empty(4, 8, device="cuda", dtype=BF16),
        ),
        "merge_attention": (half(4, 2, 8), torch.rand(8, device="cuda"), half(4, 2, 8), torch.rand(8, device="cuda"),
                            torch.ones(4, device="cuda").bool(), torch.rand(8, device="cuda")),
        "rotary": (half(4, 2, 16), half(4, 1, 16), half(4, 16), half(4, 16), half(4, 2, 16), half(4, 1, 16), False),
        "swiglu": [half(4, 8) for _ in range(3)],
        "swiglu_grad": [half(4, 8) for _ in range(6)],
        "compact_rows": (targets, 100, values[0], None, *(torch.empty_like(targets) for _ in range(2)), targets.new_empty(1)),
        "grpo_rows": (
            segments, targets, 100, None, values[0], None, 2, 1.0, 1.0, None, 0.0, 0.0, 2.0, 3.0, 3.0, 2.0, True,
            *(torch.empty_like(targets) for _ in range(3)), *(torch.empty(4, device="cuda") for _ in range(2)), None, None,
            None, None, targets.new_empty(5), targets.new_empty(1),
        ),
        "grpo_sums": (
            segments, targets, *(torch.rand(4, device="cuda") for _ in range(3)), *[None] * 8, 3, 0.2, 0.2, math.inf, 0.0,
            True, 1.0, 1.05, 1.0, False, torch.empty(2, 10, device="cuda", dtype=torch.float64),
            torch.empty(9, 2, device="cuda"), torch.empty(2, 2, device="cuda"),
        ),
        "left_pack_into": (targets.view(2, 2), torch.empty_like(targets), torch.empty(2, device="cuda").long()),
        "take_rows_into": (torch.rand(4, 8, device="cuda"), targets, 0, torch.empty(4, 8, device="cuda")),
        "sum_rows_into": (
            torch.rand(4, 8, device="cuda"), torch.arange(4, device="cuda"), segments, torch.empty(2, 8, device="cuda"),
        ),
    }  # fmt: skip
    assert set(arguments) == set(OPS)
    for name, values in arguments.items():
        if fused_too or name not in FUSED_OPS:
            torch.library.opcheck(getattr(torch.ops.fastgrpo, name).default, values)


@pytest.mark.skipif(not CLUSTERS, reason="this card has no thread block clusters")
def test_rows_of_today_s_vocabularies_are_read_once():
    device = torch.device("cuda")
    assert all(row_is_read_once(device, vocabulary) for vocabulary in LENGTHS)
    assert not row_is_read_once(device, 10_000_000)


def test_results_do_not_depend_on_the_stream_or_on_poison():
    products, targets = make(30, 50257)
    results = []
    for stream, poison in itertools.product((torch.cuda.current_stream(), torch.cuda.Stream()), (math.nan, 1e30)):
        logits = padded(products)
        grad = torch.full((30, pitch_of(50257)), poison, device="cuda", dtype=BF16)[:, :50257]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            out = row_pass(logits, targets, grad)
        torch.cuda.synchronize()
        results.append((*out.values(), grad))
    assert all(torch.equal(a, b) for again in results[1:] for a, b in zip(again, results[0], strict=True))
