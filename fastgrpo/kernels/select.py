"""The one place that decides which implementation of the head's building blocks serves a call."""

from __future__ import annotations

from types import ModuleType

import torch

from fastgrpo.kernels import cuda, reference
from fastgrpo.kernels.driver import why_driver_is_too_old
from fastgrpo.kernels.fused_head import device_serves
from fastgrpo.kernels.library import library_info

OPS_ARE_FOR_CUDA = "the library's ops are built for CUDA only"


def head_kernels(device: torch.device, compute_dtype: torch.dtype) -> ModuleType:
    """
    The module whose functions `fastgrpo.ops` calls for a head: `cuda` or `reference`.

    Args:
        device: of the tensors.
        compute_dtype: dtype of the operands of the products.

    Returns:
        The module.
    """
    return reference if why_reference(device.type, compute_dtype) else cuda


def has_row_kernels(device: torch.device, compute_dtype: torch.dtype) -> bool:
    """Whether `head_kernels` gives the library's kernels, and so those of csrc/cuda/grpo.cu serve too."""
    return not why_reference(device.type, compute_dtype)


def has_fused_head(device: torch.device) -> bool:
    """Whether the product with its passes inside serves bfloat16 heads there, where their shape lets it."""
    return has_row_kernels(device, torch.bfloat16) and device_serves(device)


def why_reference(device_type: str, compute_dtype: torch.dtype) -> str:
    """Why `reference` serves this call of a head; empty where the kernels do."""
    if device_type != "cuda":
        return f"there are no kernels for {device_type}"
    if compute_dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels serve 16-bit products, not {str(compute_dtype).removeprefix('torch.')}"
    return why_no_library()


def pack_reason(device_type: str) -> str:
    """Why torch ops move tokens on this kind of device; empty where the library's kernels do."""
    return why_no_library() if device_type == "cuda" else f"there are no kernels for {device_type}"


@torch.compiler.assume_constant_result
def why_no_library() -> str:
    """Why the library's ops do not serve CUDA tensors; empty where they do."""
    if torch.version.hip is not None:
        return OPS_ARE_FOR_CUDA
    info = library_info()
    return info.why_no_ops or why_driver_is_too_old(info.compiler)
