"""The row kernels called without torch, as csrc/cuda/row_args.h declares them: either of them, whatever an op would choose."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastgrpo.kernels.library import load_library

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
ONE, GIVEN, OBJECTIVE = range(3)


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


class RowArgs(ctypes.Structure):
    """RowArgs of csrc/cuda/row_args.h."""

    _fields_ = (
        ("logits", POINTER),
        ("logits_pitch", LONG),
        ("bias", POINTER),
        ("targets", POINTER),
        ("targets_are_64_bit", ctypes.c_bool),
        ("rows", INT),
        ("columns", INT),
        ("temperature", FLOAT),
        ("logit_scale", FLOAT),
        ("softcap", FLOAT),
        ("logprobs", POINTER),
        ("lse", POINTER),
        ("entropy", POINTER),
        ("coefficients", INT),
        ("grad_dtype", INT),
        ("grad_scale", FLOAT),
        ("grad", POINTER),
        ("second_grad", POINTER),
        ("grad_pitch", LONG),
        ("second_pitch", LONG),
        ("grad_logprobs", POINTER),
        ("grad_entropy", POINTER),
        ("params", Params),
        ("advantages", POINTER),
        ("token_weights", POINTER),
        ("old_logprobs", POINTER),
        ("ref_logprobs", POINTER),
        ("multiplier", POINTER),
        ("phi", POINTER),
        ("entropy_weights", POINTER),
        ("logits_dtype", INT),
        ("row_factors", POINTER),
    )


def pitch_of(vocabulary: int) -> int:
    """V rounded up to 64."""
    return -(-vocabulary // 64) * 64


def padded(logits: Tensor) -> Tensor:
    """A copy whose rows are a multiple of 64 elements apart, with NaN between them, narrowed to `[R, V]`."""
    rows, vocabulary = logits.shape
    buffer = torch.full((rows, pitch_of(vocabulary)), float("nan"), device=logits.device)
    buffer[:, :vocabulary] = logits
    return buffer[:, :vocabulary]


def over(logits: Tensor, dtype: torch.dtype, half: int = 0) -> Tensor:
    """16-bit `[R, V]` over a half of the rows of `padded` logits."""
    rows, vocabulary = logits.shape
    pitch = logits.stride(0)
    return logits.as_strided((rows, pitch), (pitch, 1)).view(dtype)[:, half * pitch : half * pitch + vocabulary]


def poisoned(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """A buffer of its own for `[R, V]` gradients, full of NaN."""
    return torch.full((rows, pitch_of(vocabulary)), float("nan"), device="cuda", dtype=dtype)[:, :vocabulary]


def launch(kernel: str, logits: Tensor, targets: Tensor, grad: Tensor | None = None, **options) -> dict[str, Tensor]:
    """
    Runs `fastgrpo_row_<kernel>` with the coefficients of `Coefficients::one`, or of GRPO's objective on-policy.

    Args:
        kernel: `"streamed"` or `"cluster"`.
        logits: `padded`.
        targets: `[R]`.
        grad: where d logprob goes.
        options: `second`, `bias`, `temperature`, `logit_scale`, `softcap`, `scale`; for the objective `advantages`, `weights`
            and `entropy_weights`, each `[R]`; `factors` `[R]`, written.

    Returns:
        logprobs, lse and entropy, each `[R]`.
    """
    rows, vocabulary = logits.shape
    out = {name: torch.full((rows,), float("nan"), device="cuda") for name in ("logprobs", "lse", "entropy")}
    second, bias = options.get("second"), options.get("bias")
    args = RowArgs(
        logits=logits.data_ptr(),
        logits_pitch=logits.stride(0),
        bias=None if bias is None else bias.data_ptr(),
        targets=targets.data_ptr(),
        targets_are_64_bit=targets.dtype == torch.int64,
        rows=rows,
        columns=vocabulary,
        temperature=options.get("temperature", 1.0),
        logit_scale=options.get("logit_scale", 1.0),
        softcap=options.get("softcap") or 0.0,
        coefficients=ONE if options.get("advantages") is None else OBJECTIVE,
        grad_scale=options.get("scale", 1.0),
        params=Params(0, 0.2, 0.2, float("inf"), 0.0, True, 1.0, 1.05),
        **{name: tensor.data_ptr() for name, tensor in out.items()},
    )
    if grad is not None:
        args.grad, args.grad_pitch = grad.data_ptr(), grad.stride(0)
        args.grad_dtype = int(grad.dtype == torch.float16)
    for field, name in (
        ("advantages", "advantages"),
        ("token_weights", "weights"),
        ("entropy_weights", "entropy_weights"),
        ("row_factors", "factors"),
    ):
        if options.get(name) is not None:
            setattr(args, field, options[name].data_ptr())
    if second is not None:
        args.second_grad, args.second_pitch = second.data_ptr(), second.stride(0)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status = getattr(load_library(), f"fastgrpo_row_{kernel}")(ctypes.byref(args), stream)
    assert status == 0, f"fastgrpo_row_{kernel}: runtime error {status}"
    torch.cuda.synchronize()
    return out
