"""What `backends()` says of the library: what it holds and, where it serves nothing, why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastgrpo
from fastgrpo.kernels import backends as table
from fastgrpo.kernels import select
from fastgrpo.kernels.library import KERNELS_ALONE, NO_LIBRARY, LibraryInfo

NVCC = LibraryInfo(Path("library.so"), "0.1.0", "nvcc 13.0.88, GNU 13.3.0", ("sm_90a", "compute_80"))
HIPCC = LibraryInfo(Path("library.so"), "0.1.0", "hipcc, Clang 22.1.0", ("gfx90a", "gfx942"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No accelerator, and torch built with CUDA."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    return monkeypatch


def library_line(machine: pytest.MonkeyPatch, info: LibraryInfo) -> table.Backend:
    for module in (select, table):
        machine.setattr(module, "library_info", lambda: info)
    return fastgrpo.backends()["library"]


def test_without_a_device_the_library_has_a_line_with_its_targets(machine):
    text = "0.1.0, nvcc 13.0.88, GNU 13.3.0, for sm_90a compute_80"
    assert library_line(machine, NVCC) == table.Backend(text, "cpu", "loaded, but torch has no CUDA device")
    assert text in str(fastgrpo.backends()) and "driver" not in fastgrpo.backends()
    machine.setattr(torch.version, "cuda", None)
    assert library_line(machine, NVCC).reason == "loaded, but this torch is built without CUDA"


def test_of_a_pure_wheel_the_line_says_why_there_is_none(machine):
    assert library_line(machine, LibraryInfo(None, reason=NO_LIBRARY)) == table.Backend("none", "cpu", NO_LIBRARY)


def test_a_named_library_that_is_not_there_is_a_reason_where_nothing_needs_it(machine):
    def missing() -> LibraryInfo:
        raise FileNotFoundError("FASTGRPO_LIBRARY is 'x', and there is no such file")

    machine.setattr(table, "library_info", missing)
    entry = fastgrpo.backends()["library"]
    assert entry.implementation == "none" and "no such file" in entry.reason


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_a_library_of_hipcc_has_kernels_and_no_ops_and_torch_ops_serve(machine, hip):
    line = library_line(machine, HIPCC)
    assert line.implementation == "0.1.0, hipcc, Clang 22.1.0, for gfx90a gfx942" and line.reason == KERNELS_ALONE
    machine.setattr(torch.version, "hip", hip)
    machine.setattr(torch.accelerator, "is_available", lambda: True)
    machine.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    machine.setattr(torch.cuda, "get_device_name", lambda: "a card")
    found = fastgrpo.backends()
    reason = KERNELS_ALONE if hip is None else select.OPS_ARE_FOR_CUDA
    for op in ("linear_logprob", "linear_grpo", "left_pack", "pack", "unpack"):
        assert found[op] == table.Backend(table.REFERENCE, "cuda", reason)
    assert found["library"].device == "a card" and found["library"].reason == KERNELS_ALONE


def test_beside_a_torch_for_amd_a_library_of_nvcc_serves_nothing(machine):
    machine.setattr(torch.version, "hip", "7.1")
    machine.setattr(torch.accelerator, "is_available", lambda: True)
    machine.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    machine.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert library_line(machine, NVCC).reason == select.OPS_ARE_FOR_CUDA
