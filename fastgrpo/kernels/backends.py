"""Which implementation serves each op, where, and why not a faster one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fastgrpo.kernels.driver import driver_name, why_driver_is_too_old
from fastgrpo.kernels.library import LibraryInfo, library_info, row_is_read_once
from fastgrpo.kernels.select import OPS_ARE_FOR_CUDA, has_fused_head, pack_reason, why_reference

REFERENCE = "reference (torch ops)"
KERNELS = "row kernels, torch.mm"
FUSED = "fused product, torch.mm"
_NOT_FUSED = (
    "H is no multiple of 8, or there is a bias, a softcap over 128 temperatures, a scale outside 1e-6 to 1e6, "
    "a weight that is not contiguous, or an entropy bonus in one pass"
)
_HEAD_OPS = ("linear_logprob", "linear_grpo")
# A vocabulary of today's models: whether a card reads its rows once depends little on the length.
_VOCABULARY = 151936
_notes: dict[str, Backend] = {}


@dataclass(frozen=True)
class Backend:
    """
    What serves an op.

    Attributes:
        implementation: its name.
        device: the device type it runs on.
        reason: why a faster one is not used; empty where this is the fastest there is.
    """

    implementation: str
    device: str
    reason: str


class Backends(Mapping[str, Backend]):
    """Op name -> Backend; prints as a table."""

    def __init__(self, entries: dict[str, Backend]) -> None:
        self._entries = entries

    def __getitem__(self, op: str) -> Backend:
        return self._entries[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        rows = [("op", "implementation", "device", "why not faster")]
        rows += [(op, entry.implementation, entry.device, entry.reason or "-") for op, entry in self._entries.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    __repr__ = __str__


def backends() -> Backends:
    """
    Which implementation serves each op on this machine's default device.

    Returns:
        Backends: op -> (implementation, device, reason a faster one is not used).
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device_type = "cpu" if device is None else device.type
    entries: dict[str, Backend] = {}
    for op in _HEAD_OPS:
        entries[op] = head_backend(device_type)
        if entries[op].implementation == FUSED:
            entries[f"{op}, other heads"] = Backend(KERNELS, device_type, _NOT_FUSED)
        if entries[op].implementation in (KERNELS, FUSED):
            entries[f"{op}, float16"] = head_backend(device_type, torch.float16)
            entries[f"{op}, float32"] = head_backend(device_type, torch.float32)
    reason = pack_reason(device_type)
    for op in ("left_pack", "pack", "unpack"):
        entries[op] = Backend(REFERENCE if reason else "pack kernels", device_type, reason)
    entries["library"] = _library_backend(device_type)
    if device_type == "cuda" and torch.version.hip is None:
        old = why_driver_is_too_old(library_info().compiler)
        entries["driver"] = Backend(driver_name(), torch.cuda.get_device_name(), old)
    return Backends(entries | _notes)


def head_backend(device_type: str, compute_dtype: torch.dtype = torch.bfloat16) -> Backend:
    """
    What serves the head.

    Args:
        device_type: of the tensors.
        compute_dtype: dtype of the operands of the products.

    Returns:
        Backend; `FUSED` where that serves most heads.
    """
    reason = why_reference(device_type, compute_dtype)
    if reason:
        return Backend(REFERENCE, device_type, reason)
    if compute_dtype == torch.bfloat16 and has_fused_head(torch.device(device_type)):
        return Backend(FUSED, device_type, "")
    twice = "" if row_is_read_once(torch.device(device_type), _VOCABULARY) else "this card reads each row twice"
    return Backend(KERNELS, device_type, twice)


def note_backend(name: str, backend: Backend) -> None:
    """Records what serves `name` from now on, so that `backends()` shows it."""
    _notes[name] = backend


def forget_backend(name: str) -> None:
    """Takes back `note_backend`."""
    _notes.pop(name, None)


def _library_backend(device_type: str) -> Backend:
    device = torch.cuda.get_device_name() if device_type == "cuda" else device_type
    try:
        info = library_info()
    except OSError as error:
        return Backend("none", device, str(error))
    if info.path is None:
        return Backend("none", device, info.reason)
    return Backend(
        f"{info.version}, {info.compiler}, for {' '.join(info.targets)}", device, _why_idle(info, device_type)
    )


def _why_idle(info: LibraryInfo, device_type: str) -> str:
    """Why a library that is loaded serves nothing; an old driver has a line of its own."""
    if info.why_no_ops:
        return info.why_no_ops
    if device_type == "cuda":
        return OPS_ARE_FOR_CUDA if torch.version.hip is not None else ""
    if torch.version.cuda is None:
        return "loaded, but this torch is built without CUDA"
    return "loaded, but torch has no CUDA device"
