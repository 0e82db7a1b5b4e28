"""What `backends()` says of the NVIDIA driver, on a machine that may have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastgrpo
from fastgrpo.kernels import backends as table
from fastgrpo.kernels import driver, select
from fastgrpo.kernels.library import LibraryInfo

BUILT = "nvcc 13.0.88, GNU 13.3.0"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A card behind driver 570.86.10, which serves CUDA 12.8; the library is built with CUDA 13.0."""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (root@here)\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    info = LibraryInfo(tmp_path / "library.so", "0.1.0", BUILT, ("sm_90a",))
    monkeypatch.setattr(driver, "_VERSION", tmp_path / "version")
    monkeypatch.setattr(driver, "driver_cuda", lambda: 12080)
    monkeypatch.setattr(torch.version, "hip", None)
    for module in (select, table):
        monkeypatch.setattr(module, "library_info", lambda: info)
    driver.why_driver_is_too_old.cache_clear()
    yield monkeypatch
    driver.why_driver_is_too_old.cache_clear()


def test_an_old_driver_is_served_by_torch_ops_and_backends_say_why(machine):
    machine.setattr(torch.accelerator, "is_available", lambda: True)
    machine.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    machine.setattr(torch.cuda, "get_device_name", lambda: "a card")
    reason = "the library's CUDA 13 runtime needs driver 580 or newer, and this one is 570.86.10, CUDA 12.8"
    assert select.why_reference("cuda", torch.bfloat16) == reason == select.pack_reason("cuda")
    found = fastgrpo.backends()
    assert found["driver"] == table.Backend("570.86.10, CUDA 12.8", "a card", reason)
    assert found["linear_logprob"].reason == reason
    assert "0.1.0" in found["library"].implementation


@pytest.mark.parametrize(
    ("compiler", "cuda"),
    [
        (BUILT, 13000),
        (BUILT, 14010),
        (BUILT, None),
        ("", 12080),
        ("hipcc, Clang 22", 12080),
        ("nvcc 12.8.61, GNU 13", 12020),
    ],
)
def test_a_driver_that_serves_or_nobody_knows_is_no_reason(machine, compiler, cuda):
    machine.setattr(driver, "driver_cuda", lambda: cuda)
    assert driver.why_driver_is_too_old(compiler) == ""


def test_what_is_not_known_of_a_driver_is_left_out(machine, tmp_path):
    machine.setattr(driver, "driver_cuda", lambda: None)
    assert driver.driver_name() == "570.86.10"
    machine.setattr(driver, "_VERSION", tmp_path / "absent")
    assert driver.driver_name() == "unknown"
    machine.setattr(driver, "driver_cuda", lambda: 13020)
    assert driver.driver_name() == "CUDA 13.2"


def test_the_driver_of_this_machine_is_read_without_an_error():
    assert driver.driver_cuda() is None or driver.driver_cuda() >= 11000
    if torch.cuda.is_available() and torch.version.hip is None:
        assert driver.driver_cuda() is not None
