"""Checks of arguments: what was given, what is allowed, what to do. They look at no tensor's values."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

COMPUTED_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The floating dtypes that torch computes in; float8 and narrower only store."""
LARGEST_FLOAT32 = torch.finfo(torch.float32).max

_LARGEST_NUMBER = 10**300
_LARGEST_COUNT = 2**31 - 1


def require_tensor(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; give a torch.Tensor.")


def require_dense(name: str, value: Tensor) -> None:
    """Raises `TypeError` for sparse and nested tensors."""
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(f"{name} is {'nested' if value.is_nested else value.layout}; give an ordinary, dense tensor.")


def require_device_of(other_name: str, other: Tensor, name: str, value: Tensor) -> None:
    """Raises `ValueError` unless both tensors live on one device."""
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device} and {other_name} on {other.device}; move both to one device.")


def require_values(name: str, value: Tensor) -> None:
    """Raises `ValueError` for a tensor on meta."""
    if value.is_meta:
        raise ValueError(f"{name} is on meta and has no values; give a tensor on a device.")


def require_float(name: str, value: Tensor) -> None:
    """Raises `TypeError` unless the tensor's dtype is one of `COMPUTED_FLOATS`."""
    if value.dtype not in COMPUTED_FLOATS:
        raise TypeError(f"{name} is {value.dtype}; it must be a float tensor: bfloat16, float16, float32 or float64.")


def require_real(name: str, value: Tensor) -> None:
    """Raises `TypeError` unless the tensor holds truth values, whole numbers, or floats that torch computes in."""
    stores_only = value.is_floating_point() and value.dtype not in COMPUTED_FLOATS
    if stores_only or value.is_complex() or value.is_quantized:
        raise TypeError(
            f"{name} is {value.dtype}; it must be bool, an integer dtype, or bfloat16, float16, float32 or float64."
        )


def require_number(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` is a Python number; a tensor would lose its gradient without a word."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}; give a Python number.")
    if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
        raise TypeError(f"{name} is a whole number of {len(str(abs(value)))} digits; give one that a float holds.")


def require_finite(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` is a Python number, `ValueError` unless it is a finite one."""
    require_number(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; give a finite number.")


def require_count(name: str, value: Any, *, or_none: bool = False) -> None:
    """
    Raises `TypeError` unless `value` is a number, `ValueError` unless it is whole and at least 1; 4.0 and numpy's are whole.

    `or_none`: whether the caller takes None too, for the message alone.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        require_number(name, value)
    if not 1 <= value <= _LARGEST_COUNT or value != int(value):
        most = f", at most {_LARGEST_COUNT:,}" if value > _LARGEST_COUNT else ""
        raise ValueError(f"{name} is {value}; give a whole number of at least 1{most}{', or None' if or_none else ''}.")


def require_function(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` can be called, or is None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} is a {type(value).__name__}; give a function of a tensor, or None.")


def require_flag(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False.")


def refuse_forward_mode(*values: Tensor | None) -> None:
    """Raises `RuntimeError` where a tensor carries a tangent, which a custom op would drop without a word."""
    # No level, no tangent; where torch does not tell, every tensor is looked at, which takes longer.
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) < 0:
        return
    for value in values:
        if value is not None and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                "fastgrpo's head has reverse-mode derivatives only, and a forward-mode one was asked for (torch.func.jvp, "
                "torch.autograd.forward_ad). Use torch.autograd.grad, or torch.log_softmax over full logits."
            )


def refuse_second_derivatives(what: str) -> None:
    """Raises `RuntimeError` in the backward pass of an autograd function where a derivative of it is asked for."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} is differentiable once, and a second derivative was asked for (create_graph=True, or a hessian)."
        )
