from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def csrc_math() -> ModuleType:
    """The pybind11 module over csrc/math, built with CMake and ninja; rebuilt where a header changed."""
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler: csrc/math cannot be built")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("no Python headers (Debian: apt install python3-dev): csrc/math cannot be bound")
    import pybind11

    # One build folder per Python, so that two environments do not fight over a CMake cache.
    build = ROOT / "build" / f"testing-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    configure = [
        *("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DFASTGRPO_TESTING=ON", "-DCMAKE_BUILD_TYPE=Release"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"),
    ]
    build.mkdir(parents=True, exist_ok=True)
    with FileLock(build / "lock"):  # tests may run in several processes
        for command in (configure, ["cmake", "--build", build]):
            done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    (file,) = build.glob("fastgrpo_math*.so")
    spec = importlib.util.spec_from_file_location("fastgrpo_math", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def row_twin(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """csrc/testing/row_twin.cpp: csrc/cuda/row.h on the CPU."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("row_twin")
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    probe = folder / "probe.cpp"
    probe.write_text("_Float16 half(float x) { return static_cast<_Float16>(x); }")
    if subprocess.run([*command, probe, "-o", folder / "probe.so"], capture_output=True, check=False).returncode:
        pytest.skip("this C++ compiler has no _Float16")
    made = folder / "row_twin.so"
    command += [f"-I{ROOT / 'csrc' / 'testing'}", ROOT / "csrc" / "testing" / "row_twin.cpp", "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))
