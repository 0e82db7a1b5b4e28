"""What the library's ops say of arguments that do not fit: which one it is, and what is allowed, before any work."""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgrpo.kernels.library import FUSED_OPS, library_info

pytestmark = pytest.mark.skipif(bool(library_info().why_no_ops), reason=library_info().why_no_ops)
FP32, FP64, BF16, INT64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
HAS_DEVICE = torch.cuda.is_available()


class Shell(Tensor):
    """A tensor that says it is on a CUDA device, and has no memory: as far as checks look, and no further."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Shell:
        first = like.data_ptr() // like.element_size()
        size = (first + like.numel()) * like.element_size()
        return Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), first, dtype=like.dtype, device="cuda:0", storage_size=size
        )

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> None:
        raise AssertionError("a shell is for the library's ops alone")


# Every check is made on any machine; on a card the arguments that fit run, too.
PLACES = pytest.mark.parametrize(
    "card",
    [
        pytest.param(True, marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="no CUDA device")]),
        pytest.param(False, marks=pytest.mark.skipif(HAS_DEVICE, reason="a card is there")),
    ],
    ids=["on a card", "without one"],
)


def on_card(value: Tensor) -> Tensor:
    """A copy with the strides and the offset of the original, which `cuda()` may drop."""
    memory = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
    return memory.cuda().as_strided(value.shape, value.stride(), value.storage_offset())


def dispatched(card: bool) -> AbstractContextManager:
    return nullcontext() if card else torch._C._DisableTorchDispatch()


def call(op: str, arguments: dict[str, Any], card: bool, stays: str = "") -> None:
    """The op with its tensors on the device, but for the one that `stays` on the CPU."""
    moved = {
        name: (on_card if card else Shell)(value) if isinstance(value, Tensor) and name != stays else value
        for name, value in arguments.items()
    }
    with dispatched(card):
        getattr(torch.ops.fastgrpo, op)(**moved)


def fitting(op: str) -> dict[str, Any]:
    """Arguments that the op takes, every optional one given: four rows, two sequences, 64 words."""

    def rows(*more: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.zeros(4, *more, dtype=dtype)

    def half(*more: int) -> Tensor:
        return rows(*more, dtype=BF16)

    def ids() -> Tensor:
        return rows(dtype=INT64)

    segments, words = torch.tensor([0, 2, 4]), torch.zeros(64, 16, dtype=BF16)
    transform = {"temperature": 1.0, "logit_scale": 1.0, "softcap": None}
    statistics = {name: rows() for name in ("logprobs", "lse", "entropy")}
    terms = {name: rows() for name in ("old_logprobs", "ref_logprobs", "multiplier", "phi")}
    constants = {
        "loss_type": 3, "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": math.inf, "beta": 0.04, "bias_correct_kl": True,
        "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    }  # fmt: skip
    objective = {"advantages": rows(), "token_weights": rows(), **terms, **constants}
    fused = {"hidden": half(16), "weight": words, "targets": ids(), **transform, **statistics}
    every: dict[str, dict[str, Any]] = {
        "row_objective": {
            "logits": rows(64), "targets": ids(), "bias": torch.zeros(64), **transform, **statistics, **objective,
            "entropy_weights": rows(), "grad": rows(64, dtype=torch.float16), "grad_scale": 1.0, "row_factors": rows(),
        },
        "fused_objective": {
            **fused, **objective, "grad": half(64), "at_target": rows(), "row_factors": rows(), "scratch": torch.zeros(25),
        },
        "fused_grad": {
            **fused, "grad_logprobs": rows(), "grad_entropy": rows(), "grad": half(64), "at_target": rows(),
        },
        "scale_rows": {"hidden": half(16), "factors": rows(), "out": half(16)},
        "scale_round": {"values": rows(16), "factor": torch.zeros(1), "out": half(16)},
        "weigh_slopes": {
            "grad_logprobs": rows(), "logprob_slope": rows(16), "grad_entropy": rows(), "entropy_slope": rows(16),
            "targets": ids(), "vocabulary": 64, "out": half(16),
        },
        "merge_attention": {
            "out": half(2, 8), "lse": rows(2), "more": half(2, 8), "more_lse": rows(2),
            "continued": rows(dtype=torch.bool), "merged_lse": rows(2),
        },
        "rotary": {
            "query": half(2, 16), "key": half(1, 16), "cos": half(16), "sin": half(16), "out_query": half(2, 16),
            "out_key": half(1, 16), "transposed": False,
        },
        "grpo_rows": {
            "segments": segments, "targets": ids(), "vocabulary": 64, "mask": rows(dtype=torch.bool),
            "advantages": torch.zeros(2), "sampler_ratio": torch.zeros(2), "normaliser": 0, "factor": 1.0, "accumulation": 1.0,
            "items": torch.ones(1), "items_factor": 0.0, "entropy_coef": 0.1, "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0,
            "lambda_neg": 2.0, "by_advantage": True, "counted_targets": ids(), "wanted": ids(), "others": ids(),
            "row_advantages": rows(), "weights": rows(), "multiplier": rows(), "phi": rows(), "entropy_weights": rows(),
            "phi_of_sequence": torch.zeros(2), "sizes": torch.zeros(5, dtype=INT64), "counts": torch.zeros(1, dtype=INT64),
        },
        "grpo_sums": {
            "segments": segments, "counted_targets": ids(), "logprobs": rows(), "advantages": rows(), "weights": rows(),
            "entropy": rows(), **terms, "entropy_weights": rows(), "sequence_advantages": torch.zeros(2),
            "phi_of_sequence": torch.zeros(2), **constants, "policy_scale": 1.0, "sequence_level": True,
            "partials": torch.zeros(2, 10, dtype=FP64), "sums": torch.zeros(9, 2), "clips": torch.zeros(2, 2),
        },
    }  # fmt: skip
    return every[op]


# Each with the tensor that the others must go with.
OPS = {
    "row_objective": "logits",
    "fused_objective": "hidden",
    "fused_grad": "hidden",
    "scale_rows": "hidden",
    "scale_round": "out",
    "weigh_slopes": "out",
    "merge_attention": "out",
    "rotary": "out_query",
    "grpo_rows": "segments",
    "grpo_sums": "logprobs",
}
SPOKEN_OF_AS = {"grad": "the gradient"}


@PLACES
@pytest.mark.parametrize("op", OPS)
def test_the_arguments_that_the_others_are_made_of_fit(op, card):
    arguments = fitting(op)
    assert set(arguments) == {x.name for x in getattr(torch.ops.fastgrpo, op).default._schema.arguments}
    if not card:
        # What the checks let through fails where the device is first asked for.
        with pytest.raises(RuntimeError, match="device_guard"):
            call(op, arguments, card)
    elif op not in FUSED_OPS or torch.cuda.get_device_capability() == (9, 0):
        call(op, arguments, card)
        torch.cuda.synchronize()


def refused(op: str, arguments: dict[str, Any], message: str, card: bool, stays: str = "") -> None:
    with pytest.raises(RuntimeError) as caught:
        call(op, arguments, card, stays)
    assert re.match(f"{op}: {message}", str(caught.value), re.DOTALL), f"{caught.value}\nis not\n{op}: {message}"


@PLACES
@pytest.mark.parametrize("op", OPS)
def test_a_tensor_on_the_cpu_is_named(op, card):
    arguments = fitting(op)
    for name in (name for name, value in arguments.items() if isinstance(value, Tensor)):
        message = f"{SPOKEN_OF_AS.get(name, name)} is not on (a CUDA device; move it to )?the device of {OPS[op]}[;.]"
        if name == OPS[op]:
            message = f"{name} is not on a CUDA device; this op has CUDA kernels only"
        refused(op, arguments, message, card, stays=name)


# What an op takes of a tensor, where that is more than the dtype it has in `fitting`, or is said in other words.
TAKEN = {
    ("row_objective", "logits"): r"torch\.float32, torch\.bfloat16 or torch\.float16",
    ("row_objective", "grad"): r"torch\.bfloat16 or torch\.float16",
    **{(op, "targets"): r"torch\.int32 or torch\.int64" for op in ("row_objective", "fused_objective", "fused_grad")},
    ("grpo_rows", "segments"): r"contiguous torch\.int32 or torch\.int64",
    ("grpo_rows", "targets"): r"contiguous torch\.int32 or torch\.int64",
    ("grpo_sums", "segments"): r"contiguous torch\.int32 or torch\.int64",
    **{(op, "out"): r"torch\.bfloat16 or torch\.float16" for op in ("scale_round", "weigh_slopes", "merge_attention")},
    ("rotary", "out_query"): r"torch\.bfloat16 or torch\.float16",
}


@PLACES
@pytest.mark.parametrize("op", OPS)
def test_a_tensor_of_another_dtype_is_named(op, card):
    arguments = fitting(op)
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        other = FP32 if value.dtype == FP64 else FP64
        taken = TAKEN.get((op, name), rf"(contiguous )?{re.escape(str(value.dtype))}")
        spoken = SPOKEN_OF_AS.get(name, name)
        shape = re.escape(str(list(value.shape)))
        given = rf"{re.escape(str(other))}( of shape {shape}| with {value.numel()} elements)?"
        refused(op, arguments | {name: value.to(other)}, f"{spoken} is {given}; it must be {taken}", card)


# Of a tensor that others go with, one of those others is named.
OF_ANOTHER_SIZE = {
    ("row_objective", "logits"): r"targets has shape \[4\]; it must be contiguous \[3\], one id a row of logits",
    ("row_objective", "bias"): r"bias is torch\.float32 of shape \[63\].* at least \[64\]",
    ("fused_objective", "hidden"): r"targets has shape \[4\]; it must be contiguous \[3\], one id a row of hidden",
    ("fused_objective", "weight"): r"the gradient has shape \[4, 64\]; it must be \[4, 63\]",
    ("fused_objective", "scratch"): r"scratch is torch\.float32 with 24 elements; .* at least 25: rows x",
    ("fused_grad", "hidden"): r"targets has shape \[4\]; it must be contiguous \[3\], one id a row of hidden",
    ("fused_grad", "weight"): r"the gradient has shape \[4, 64\]; it must be \[4, 63\]",
    ("scale_rows", "hidden"): "out has 4 rows; it must have 3",
    ("scale_rows", "out"): "out has 3 rows; it must have 4",
    ("scale_round", "out"): r"values is .* of shape \[4, 16\]; it must be contiguous torch\.float32 with 48 elements",
    (
        "weigh_slopes",
        "out",
    ): r"grad_logprobs is .* of shape \[4\]; it must be contiguous torch\.float32 with 3 elements",
    (
        "merge_attention",
        "out",
    ): r"more is .* of shape \[4, 2, 8\]; it must be contiguous torch\.bfloat16 with 48 elements",
    ("rotary", "key"): r"key has shape \[3, 1, 16\] and out_query \[4, 2, 16\]; only their heads may differ",
    ("rotary", "out_query"): r"key has shape \[4, 1, 16\] and out_query \[3, 2, 16\]; only their heads may differ",
    ("grpo_rows", "segments"): r"advantages has shape \[2\]; it must have 1 elements, one a sequence, or 4, one a row",
    ("grpo_rows", "targets"): r"mask is .* of shape \[4\]; it must be contiguous torch\.bool with 3 elements",
    **{
        ("grpo_rows", name): rf"{name} has shape \[1\]; it must have 2 elements, one a sequence, or 4, one a row"
        for name in ("advantages", "sampler_ratio")
    },
    ("grpo_sums", "segments"): r"sequence_advantages is .* of shape \[2\]; .* with 1 elements",
    ("grpo_sums", "logprobs"): r"counted_targets is .* of shape \[4\]; .* with 3 elements",
}


@PLACES
@pytest.mark.parametrize("op", OPS)
def test_a_tensor_of_another_size_is_named(op, card):
    arguments = fitting(op)
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        less = value[:-1].clone()
        spoken, shape = SPOKEN_OF_AS.get(name, name), re.escape(str(list(less.shape)))
        dtype = re.escape(str(value.dtype))
        allowed = rf"(contiguous )?\[4.*row of {OPS[op]}|contiguous {dtype} (with {value.numel()} elements|\[4\])"
        message = rf"{spoken} (has shape|is {dtype} of shape) {shape}; it must be ({allowed})"
        refused(op, arguments | {name: less}, OF_ANOTHER_SIZE.get((op, name), message), card)


BAD = {
    "a temperature of 0": ("row_objective", {"temperature": 0.0}, "temperature is 0; it must be above 0"),
    "a softcap of 0": ("fused_grad", {"softcap": 0.0}, "softcap is 0; it must be above 0, or None"),
    "a logit scale of 0": ("fused_objective", {"logit_scale": 0.0}, "logit_scale is 0; it must be above 0"),
    "no loss type": ("row_objective", {"loss_type": 8}, "loss_type is 8; it must be a place in .*LOSS_TYPES"),
    "no loss type, fused": ("fused_objective", {"loss_type": -1}, "loss_type is -1; it must be a place in"),
    "no loss type, sums": ("grpo_sums", {"loss_type": 8}, "loss_type is 8; it must be a place in"),
    **{
        f"KL without a reference, {op}": (op, {"ref_logprobs": None}, r"beta is 0\.04, so ref_logprobs must be given")
        for op in ("row_objective", "fused_objective", "grpo_sums")
    },
    "factors of bfloat16": (
        "row_objective", {"grad": torch.zeros(4, 64, dtype=BF16)},
        r"row_factors is given and the gradient is torch\.bfloat16; only torch\.float16 needs them",
    ),
    "the entropy's gradient alone": ("fused_grad", {"entropy": None}, "grad_entropy is given, so entropy must be"),
    "the entropy's gradient without its slope": (
        "weigh_slopes", {"entropy_slope": None}, "grad_entropy is given, so entropy_slope must be",
    ),
    "slopes in 3d": (
        "weigh_slopes", {"out": torch.zeros(4, 2, 8, dtype=BF16)},
        r"out has shape \[4, 2, 8\]; it must be \[rows, width\]",
    ),
    "hidden states that 8 does not divide": (
        "fused_grad", {"hidden": torch.zeros(4, 12, dtype=BF16), "weight": torch.zeros(64, 12, dtype=BF16)},
        r"weight has shape \[64, 12\]; H must be a multiple of 8",
    ),
    "hidden states as wide as no weight": (
        "fused_objective", {"hidden": torch.zeros(4, 8, dtype=BF16)},
        r"hidden has shape \[4, 8\] and weight \[64, 16\]; they must be \[rows, H\] and \[V, H\]",
    ),
    "rows that a load does not fit": (
        "fused_objective", {"grad": torch.zeros(4, 68, dtype=BF16)[:, :64]},
        "the rows of the gradient are 68 elements apart; they must be a multiple of 8 apart, and 64 at least",
    ),
    "rows that 4 does not divide": (
        "scale_rows", {name: torch.zeros(4, 18, dtype=BF16) for name in ("hidden", "out")},
        r"out is torch\.bfloat16 of shape \[4, 18\]; .* a multiple of 4 wide",
    ),
    "rows that start anywhere": (
        "scale_round", {"values": torch.zeros(68)[1:65].view(4, 16)}, "values and out must start at a multiple of 16 bytes",
    ),
    "heads that 8 does not divide": (
        "merge_attention", {"out": torch.zeros(4, 2, 12, dtype=BF16)},
        r"out has shape \[4, 2, 12\]; it must be \[tokens, heads, width\] with a width that 8 divides",
    ),
    "heads that 16 does not divide": (
        "rotary", {"out_query": torch.zeros(4, 2, 24, dtype=BF16)},
        r"out_query has shape \[4, 2, 24\]; it must be \[tokens, heads, width\] with a width that 16 divides",
    ),
    "no normaliser": ("grpo_rows", {"normaliser": 4}, "normaliser is 4; it must be a place in Normaliser"),
    "no segments": ("grpo_rows", {"segments": torch.zeros(0, dtype=INT64)}, "there are -1 sequences; give 1 to 2"),
    "a multiplier of nothing": ("grpo_rows", {"sampler_ratio": None}, "multiplier is wanted without sampler_ratio"),
    "one phi for many advantages": (
        "grpo_rows", {"advantages": torch.zeros(4)}, "phi_of_sequence needs advantages a sequence",
    ),
    "no advantages of sequences": (
        "grpo_sums", {"sequence_advantages": None}, "sequence_level needs sequence_advantages",
    ),
}  # fmt: skip


@PLACES
@pytest.mark.parametrize("case", BAD)
def test_arguments_that_do_not_go_together_are_refused(case, card):
    op, change, message = BAD[case]
    refused(op, fitting(op) | change, message, card)
