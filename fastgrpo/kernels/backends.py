"""Which implementation serves each op, where, and why not a faster one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fastgrpo.kernels.library import library_info

REFERENCE = "reference (torch ops)"
_OPS = ("linear_logprob", "linear_grpo", "left_pack")
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
    reason = _reference_reason(device_type)
    entries = {op: Backend(REFERENCE, device_type, reason) for op in _OPS}
    return Backends(entries | _notes)


def note_backend(name: str, backend: Backend) -> None:
    """Records what serves `name` from now on, so that `backends()` shows it."""
    _notes[name] = backend


def forget_backend(name: str) -> None:
    """Takes back `note_backend`."""
    _notes.pop(name, None)


def _reference_reason(device_type: str) -> str:
    if device_type in ("cpu", "mps"):
        return f"there are no kernels for {device_type}"
    info = library_info()
    return "this version has no kernels yet" if info.path else info.reason
