"""What setup.py builds, with and without a compiler, on a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from toolchain import nvcc, setup_names

ROOT = Path(__file__).parents[1]
SOURCES = ("CMakeLists.txt", "LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml", "setup.py")
PURE_LINE = "fastgrpo: no CUDA or HIP compiler found; building the pure-Python package (reference kernels)"
TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "HIP_PATH", "FASTGRPO_BUILD")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a build reads."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for folder in ("csrc", "fastgrpo", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "_lib"))
    return copy


def build(checkout: Path, hook: str, path: str, **variables: str) -> tuple[Path | None, str]:
    """Runs a PEP 517 hook with `path` as PATH: the file it made (None where it failed) and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in TOOLKIT_VARIABLES}
    script = f"from setuptools import build_meta; print('made', build_meta.{hook}('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=checkout,
        env=environment | variables | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    made = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("made ")]
    return (checkout / "dist" / made[-1] if made else None), done.stdout + done.stderr


def build_tools() -> str:
    """A PATH with cmake and ninja, and the tools of the system."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "/usr/bin:/bin")])


@pytest.fixture
def no_compiler_path(tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_without_a_compiler_the_wheel_is_pure_and_one_line_says_so(checkout: Path, no_compiler_path: str) -> None:
    wheel, output = build(checkout, "build_wheel", no_compiler_path)
    assert wheel is not None, output
    assert wheel.name.endswith("-py3-none-any.whl")
    assert [line for line in output.splitlines() if "pure-Python" in line] == [PURE_LINE]
    names = contents(wheel)
    assert "fastgrpo/kernels/library.py" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fastgrpo"}
    assert not [name for name in names if name.endswith((".so", ".cu", ".h", ".cpp"))]


def test_wheel_carries_licence_and_command(checkout: Path, no_compiler_path: str) -> None:
    wheel, output = build(checkout, "build_wheel", no_compiler_path)
    assert wheel is not None, output
    with zipfile.ZipFile(wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        metadata = archive.read(f"{info}/METADATA").decode()
        assert "License-Expression: Apache-2.0" in metadata
        assert "Requires-Dist: torch>=2.10" in metadata
        assert b"fastgrpo = fastgrpo.tools.cli:main" in archive.read(f"{info}/entry_points.txt")
        assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")


def test_sdist_holds_everything_the_library_is_built_from(checkout: Path, no_compiler_path: str) -> None:
    sdist, output = build(checkout, "build_sdist", no_compiler_path)
    assert sdist is not None, output
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(checkout)) for path in (checkout / "csrc").rglob("*") if path.is_file()}
    assert sources | set(SOURCES) <= inside
    assert not [name for name in inside if name.endswith((".so", ".pyc"))]


def test_unknown_build_is_an_error_that_names_the_choices(checkout: Path, no_compiler_path: str) -> None:
    wheel, output = build(checkout, "build_wheel", no_compiler_path, FASTGRPO_BUILD="gpu")
    assert wheel is None
    assert "FASTGRPO_BUILD is 'gpu'; choose one of auto, cuda, hip, python" in output


@pytest.mark.parametrize(("build_for", "compiler"), [("cuda", "nvcc"), ("hip", "hipcc")])
def test_asking_for_a_compiler_that_is_missing_is_an_error(
    checkout: Path, no_compiler_path: str, build_for: str, compiler: str
) -> None:
    wheel, output = build(checkout, "build_wheel", no_compiler_path, FASTGRPO_BUILD=build_for)
    assert wheel is None
    assert f"FASTGRPO_BUILD={build_for}, and there is no {compiler} on PATH" in output
    assert "FASTGRPO_BUILD=python" in output


def fake_nvcc(folder: Path, top: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "nvcc"
    script.write_text(f'#!/bin/sh\necho "#\\$ TOP={top}" >&2\nexit 1\n')
    script.chmod(0o755)
    return folder


def test_build_that_fails_with_a_compiler_present_is_an_error(checkout: Path, tmp_path: Path) -> None:
    toolkit = fake_nvcc(tmp_path / "toolkit" / "bin", f"{tmp_path}/toolkit/bin/..")
    wheel, output = build(checkout, "build_wheel", f"{toolkit}{os.pathsep}{build_tools()}")
    assert wheel is None
    assert "CMake Error" in output


def test_a_build_with_hipcc_says_that_it_makes_kernels_and_no_ops(checkout: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "rocm" / "bin" / "hipcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    path = os.pathsep.join([str(compiler.parent), build_tools()])
    wheel, output = build(checkout, "build_wheel", path, FASTGRPO_BUILD="hip")
    assert wheel is None and "CMake Error" in output
    assert output.count(setup_names()["NO_OPS"]) == 1


def test_python_build_is_pure_whatever_is_installed(checkout: Path, tmp_path: Path) -> None:
    toolkit = fake_nvcc(tmp_path / "toolkit" / "bin", f"{tmp_path}/toolkit")
    wheel, output = build(checkout, "build_wheel", str(toolkit), FASTGRPO_BUILD="python")
    assert wheel is not None, output
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "fastgrpo: FASTGRPO_BUILD=python; building the pure-Python package" in output


def test_toolkit_root_comes_from_the_dryrun_of_a_wrapper_script(tmp_path: Path) -> None:
    toolkit = tmp_path / "toolkit-13.0"
    (toolkit / "bin").mkdir(parents=True)
    wrapper = fake_nvcc(tmp_path / "wrappers", f"{toolkit}/bin/..")
    assert setup_names()["cuda_root"](str(wrapper / "nvcc")) == toolkit


def test_the_tests_find_the_nvcc_of_a_build_and_with_expect_cuda_none_is_a_failure(
    tmp_path: Path, no_compiler_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", no_compiler_path)
    for variable in (*TOOLKIT_VARIABLES, "EXPECT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no nvcc on PATH, or under CUDA_HOME or CUDA_PATH"):
        nvcc()
    monkeypatch.setenv("EXPECT", "cuda")
    with pytest.raises(pytest.fail.Exception, match="no nvcc on PATH, or under CUDA_HOME or CUDA_PATH"):
        nvcc()
    toolkit = fake_nvcc(tmp_path / "toolkit" / "bin", f"{tmp_path}/toolkit/bin/..")
    monkeypatch.setenv("CUDA_HOME", str(toolkit.parent))
    assert nvcc() == str(toolkit / "nvcc")


@pytest.mark.slow
def test_with_nvcc_an_sdist_becomes_a_wheel_whose_library_loads_and_has_no_python_in_it(checkout: Path) -> None:
    path = f"{Path(nvcc()).parent}{os.pathsep}{build_tools()}"
    sdist, output = build(checkout, "build_sdist", path, FASTGRPO_BUILD="python")
    assert sdist is not None, output
    with tarfile.open(sdist) as archive:
        archive.extractall(checkout / "unpacked", filter="data")
    (checkout,) = (checkout / "unpacked").iterdir()
    wheel, output = build(checkout, "build_wheel", path, FASTGRPO_BUILD="cuda")
    assert wheel is not None, output
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")
    library = "fastgrpo/_lib/libfastgrpo_kernels.so"
    assert [name for name in contents(wheel) if name.endswith(".so")] == [library]
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(library, checkout))
    dynamic = subprocess.run(["readelf", "-dW", "--dyn-syms", file], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-1] for line in dynamic.splitlines() if " FUNC " in line or " NOTYPE " in line]
    assert "fastgrpo_build_info" in symbols
    assert not [name for name in symbols if name.startswith(("Py", "_Py"))]
    assert not [line for line in dynamic.splitlines() if "NEEDED" in line and ("python" in line or "cuda" in line)]

    script = "from fastgrpo.kernels.library import library_info; print(library_info().targets)"
    environment = os.environ | {"FASTGRPO_LIBRARY": str(file), "PYTHONPATH": str(ROOT)}
    loaded = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "sm_90a" in loaded.stdout

    # A second build in the same checkout, as pip does it: the tools of the first one's build environment are gone.
    (cache,) = checkout.glob("build/temp*/CMakeCache.txt")
    cache.write_text(re.sub(r"(CMAKE_MAKE_PROGRAM:FILEPATH=).*", r"\1/gone/bin/ninja", cache.read_text()))
    again, output = build(checkout, "build_wheel", path, FASTGRPO_BUILD="cuda")
    assert again is not None, output
