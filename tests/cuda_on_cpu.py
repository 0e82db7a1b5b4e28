"""The head's path of a CUDA device on the CPU: ops of the library are stood in for, and products sum in fp32 as cuBLAS does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgrpo.kernels import cuda, reference
from fastgrpo.kernels.library import load_library


def serve_on_the_cpu(monkeypatch: pytest.MonkeyPatch, ops: dict[str, Callable[..., Any]]) -> None:
    """
    From here on 16-bit heads on the CPU take the path of a CUDA device.

    Args:
        monkeypatch: takes it back.
        ops: stand-ins for `torch.ops.fastgrpo.*`.
    """
    mm = torch.mm

    def products(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        result = mm(a, b) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))
        return result if out is None else out.copy_(result)

    def more_products(
        total: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        beta: float,
        alpha: float = 1.0,
        out: Tensor,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        result = alpha * products(a, b, out_dtype=out_dtype or torch.float32)
        return out.copy_(result if beta == 0 else result + beta * total)

    ops = {"compact_rows": _compact_rows, "scale_round": lambda values, factor, out: out.copy_(values * factor)} | ops
    for name, function in ops.items():
        monkeypatch.setattr(torch.ops.fastgrpo, name, _as_declared(name, function), raising=False)
    for module in ("ops", "head"):
        monkeypatch.setattr(
            f"fastgrpo.{module}.head_kernels",
            lambda _, dtype: cuda if dtype in (torch.bfloat16, torch.float16) else reference,
        )
    monkeypatch.setattr("fastgrpo.ops._can_be_a_slice", lambda rows, count: rows.numel() == count)
    monkeypatch.setattr(cuda, "row_is_read_once", lambda *_: False)
    monkeypatch.setattr(cuda, "total_loss", reference.total_loss)
    monkeypatch.setattr(cuda, "weigh_slopes", reference.weigh_slopes)
    monkeypatch.setattr(torch, "mm", products)
    monkeypatch.setattr(torch, "addmm", more_products)


def _as_declared(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in that takes only what the library's op takes, where there is a library."""
    if load_library() is None:
        return function
    arguments = getattr(torch.ops.fastgrpo, name).default._schema.arguments
    required = sum(not argument.has_default_value() for argument in arguments)

    def call(*values: Any) -> Any:
        assert required <= len(values) <= len(arguments), f"{name} takes {len(arguments)} arguments, not {len(values)}"
        for argument, value in zip(arguments, values, strict=False):
            kind = str(argument.type)
            optional, kind = kind.startswith("Optional"), kind.removeprefix("Optional[").removesuffix("]")
            taken = {"Tensor": Tensor, "float": (float, int), "int": int, "bool": bool}[kind]
            assert (optional and value is None) or isinstance(value, taken), f"{name}: {argument.name} is {value!r}"
        return function(*values)

    return call


def _compact_rows(targets, vocabulary, first, second, wanted, others, counts) -> None:
    found, rest = reference.computed_rows(targets, vocabulary, first, second, True)
    wanted[: len(found)] = found
    if others is not None:
        others[: len(rest)] = rest
    counts[0] = len(found) | len(rest) << 32
