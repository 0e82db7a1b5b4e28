"""What can be seen of the library's ops without a GPU: they load beside any torch, are listed, and check their arguments."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from toolchain import nvcc

import fastgrpo
from fastgrpo.kernels import cuda, reference
from fastgrpo.kernels.library import OPS, library_info, row_is_read_once
from fastgrpo.kernels.select import head_kernels, why_reference

CSRC = Path(__file__).parents[2] / "csrc"
needs_library = pytest.mark.skipif(bool(library_info().why_no_ops), reason=library_info().why_no_ops)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@needs_library
@pytest.mark.parametrize("name", OPS)
def test_ops_are_registered_and_write_into_what_they_are_given(name):
    schema = getattr(torch.ops.fastgrpo, name).default._schema
    assert not schema.returns
    written = {argument.name for argument in schema.arguments if argument.is_write}
    assert written & {"logits", "out", "out_query", "counts", "sizes", "sums", "product", "scratch", "grad", "total"}


@needs_library
def test_a_tensor_on_the_cpu_is_refused_with_a_reason():
    row = torch.zeros(2)
    arguments = (
        torch.zeros(2, 64),
        torch.zeros(2, dtype=torch.long),
        None,
        1.0,
        1.0,
        None,
        row,
        row,
        None,
        None,
        None,
        1.0,
    )
    with pytest.raises(RuntimeError, match="row_pass: logits is not on a CUDA device"):
        torch.ops.fastgrpo.row_pass(*arguments)


@needs_library
def test_the_library_holds_no_python_and_asks_for_no_cuda_library():
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    path = library_info().path
    dynamic = subprocess.run(["readelf", "-dW", "--dyn-syms", path], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert not [name for name in needed if "python" in name or "cuda" in name], needed
    assert "RUNPATH" not in dynamic and "RPATH" not in dynamic
    symbols = [line.split() for line in dynamic.splitlines() if re.match(r"\s+\d+:", line)]
    names = {fields[-1].split("@")[0] for fields in symbols if len(fields) > 7}
    assert not [name for name in names if name.startswith(("Py", "_Py"))]
    # A CPU-only torch lacks it.
    undefined = {fields[7].split("@")[0]: fields[4] for fields in symbols if len(fields) > 7 and fields[6] == "UND"}
    assert undefined["aoti_torch_get_current_cuda_stream"] == "WEAK"
    assert not [name for name in names if name.startswith(("_ZN2at", "_ZN3c10"))], "unstable ABI"


@needs_library
def test_without_a_card_no_row_is_read_once():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert not row_is_read_once(CUDA, 151936)


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (CPU, torch.bfloat16, "no kernels for cpu"),
        (torch.device("mps"), torch.float16, "no kernels for mps"),
        (CUDA, torch.float32, "16-bit products, not float32"),
        (CUDA, torch.float64, "16-bit products, not float64"),
    ],
)
def test_a_call_the_kernels_cannot_serve_has_a_reason(device, dtype, reason):
    assert reason in why_reference(device.type, dtype)
    assert head_kernels(device, dtype) is reference


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_on_cuda_get_the_kernels(dtype):
    assert head_kernels(CUDA, dtype) is cuda


def test_both_implementations_have_the_same_functions():
    functions = {
        name for name in dir(cuda) if callable(getattr(cuda, name)) and getattr(cuda, name).__module__ == cuda.__name__
    } - {"CudaOperands"}
    public = {name for name in functions if not name.startswith("_")}
    assert public == {
        "add_weight_grad", "back_project", "bias_grad", "bytes_a_row", "computed_rows", "gradient_buffer", "head_grad",
        "head_objective", "head_pass", "prefers_given", "prepare", "project", "rounding_product", "row_grad",
        "row_objective", "row_pass", "scale", "total_loss", "weigh_slopes",
    }  # fmt: skip
    assert all(callable(getattr(reference, name)) for name in public)


def test_backends_name_the_reference_where_it_serves():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    entry = fastgrpo.backends()["linear_grpo"]
    assert entry.implementation == "reference (torch ops)" and "no kernels for" in entry.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["row_streamed", "row_cluster"])
def test_the_row_kernels_spill_no_register(name, tmp_path):
    command = [nvcc(), "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-c"]
    done = subprocess.run(
        [*command, CSRC / "cuda" / f"{name}.cu", "-o", tmp_path / "kernel.o"],
        capture_output=True,
        text=True,
        check=True,
    )
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills and set(spills) == {("0", "0", "0")}, done.stderr
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
    assert max(registers) <= 64, registers
