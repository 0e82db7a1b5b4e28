"""Builds the kernel library with CMake and ninja where a CUDA or HIP compiler is found, else a pure-Python package.

FASTGRPO_BUILD overrides the choice: `auto` (default), `cuda`, `hip`, or `python` for the pure-Python package.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
LIBRARY = "libfastgrpo_kernels.so"
BUILDS = ("auto", "cuda", "hip", "python")
PURE = "fastgrpo: no CUDA or HIP compiler found; building the pure-Python package (reference kernels)"
PURE_ON_REQUEST = "fastgrpo: FASTGRPO_BUILD=python; building the pure-Python package (reference kernels)"
NO_OPS = "fastgrpo: hipcc builds the kernels alone, and no ops for torch so far: torch ops will serve on AMD's cards"


def find_compiler(name: str, root_variables: tuple[str, ...]) -> str | None:
    """The compiler on PATH, or under a toolkit root that the environment names."""
    roots = [os.environ[variable] for variable in root_variables if os.environ.get(variable)]
    return shutil.which(name) or next(filter(None, (shutil.which(name, path=f"{root}/bin") for root in roots)), None)


def find_nvcc() -> str | None:
    """The nvcc on PATH, or under CUDA_HOME or CUDA_PATH."""
    return find_compiler("nvcc", ("CUDA_HOME", "CUDA_PATH"))


def cuda_root(nvcc: str) -> Path:
    """The toolkit nvcc belongs to: nvcc itself may be a script that calls another."""
    dryrun = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], capture_output=True, text=True, check=False
    )
    top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
    if top is None:
        raise SystemExit(
            f"fastgrpo: `{nvcc} --dryrun` names no toolkit root (no TOP= line):\n{dryrun.stderr}\n"
            "Put a working nvcc on PATH, or set FASTGRPO_BUILD=python for the pure-Python package."
        )
    return Path(top.group(1).strip()).resolve()


def torch_folder() -> Path:
    """The torch whose headers the ops are built against; any from 2.10 on gives the same library."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit(
            "fastgrpo: the kernels are built against torch's headers, and there is no torch in this environment; install "
            "torch 2.10 or newer (any build, CPU too), or set FASTGRPO_BUILD=python for the pure-Python package."
        )
    return Path(found.origin).parent


def toolchain() -> tuple[list[str], dict[str, str]] | None:
    """CMake arguments and environment of the compiler to use; None for the pure-Python package."""
    build = os.environ.get("FASTGRPO_BUILD") or "auto"
    if build not in BUILDS:
        raise SystemExit(f"fastgrpo: FASTGRPO_BUILD is {build!r}; choose one of {', '.join(BUILDS)}, or unset it.")
    nvcc = find_nvcc() if build in ("auto", "cuda") else None
    if nvcc:
        root = cuda_root(nvcc)
        arguments = ["-DFASTGRPO_BACKEND=cuda", f"-DCMAKE_CUDA_COMPILER={root / 'bin' / 'nvcc'}"]
        return arguments, {"CUDA_HOME": str(root), "CUDAToolkit_ROOT": str(root)}
    hipcc = find_compiler("hipcc", ("ROCM_PATH", "HIP_PATH")) if build in ("auto", "hip") else None
    if hipcc:
        return ["-DFASTGRPO_BACKEND=hip", f"-DCMAKE_CXX_COMPILER={hipcc}"], {}
    if build in ("cuda", "hip"):
        compiler, root = ("nvcc", "CUDA_HOME") if build == "cuda" else ("hipcc", "ROCM_PATH")
        raise SystemExit(
            f"fastgrpo: FASTGRPO_BUILD={build}, and there is no {compiler} on PATH or under {root}; install it, or set "
            "FASTGRPO_BUILD=python for the pure-Python package."
        )
    return None


class BuildLibrary(build_ext):
    """Runs CMake for the one "extension", a shared library with a plain name and without Python in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        build = Path(self.build_temp).resolve()
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        arguments, environment = TOOLCHAIN
        environment = os.environ | environment
        # --fresh: a second pip install in the same checkout finds the ninja of the first one's build environment gone.
        configure = ["cmake", "--fresh", "-S", ROOT, "-B", build, "-G", "Ninja", *arguments]
        configure += [f"-DFASTGRPO_VERSION={self.distribution.get_version()}", "-DCMAKE_BUILD_TYPE=Release"]
        if "-DFASTGRPO_BACKEND=hip" in arguments:
            print(NO_OPS)
        if "-DFASTGRPO_BACKEND=cuda" in arguments:
            configure.append(f"-DFASTGRPO_TORCH={torch_folder()}")
        install = ["cmake", "--install", build, "--prefix", target, "--strip"]
        for command in (configure, ["cmake", "--build", build], install):
            subprocess.run([str(part) for part in command], check=True, env=environment)

    def copy_extensions_to_source(self) -> None:
        (ROOT / "fastgrpo" / "_lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()


class BuildPython(build_py):
    """Says once that there will be no kernels."""

    def run(self) -> None:
        if TOOLCHAIN is None:
            print(PURE_ON_REQUEST if os.environ.get("FASTGRPO_BUILD") == "python" else PURE)
        super().run()


class Wheel(bdist_wheel):
    """One wheel for every Python: the library has no CPython ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


TOOLCHAIN = toolchain()

setup(
    # A build environment gets torch only where there is something to compile against it.
    setup_requires=["torch>=2.10"] if TOOLCHAIN and "-DFASTGRPO_BACKEND=cuda" in TOOLCHAIN[0] else [],
    ext_modules=[Extension("fastgrpo._lib.kernels", sources=[])] if TOOLCHAIN else [],
    cmdclass={"build_ext": BuildLibrary, "build_py": BuildPython, "bdist_wheel": Wheel},
)
