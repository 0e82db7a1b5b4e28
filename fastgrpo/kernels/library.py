"""Finding and loading the compiled library; without one, why there is none."""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIBRARY_VARIABLE = "FASTGRPO_LIBRARY"
NO_LIBRARY = "pure-Python wheel: built without a CUDA or HIP compiler"
_PACKAGED = Path(__file__).parents[1] / "_lib" / "libfastgrpo_kernels.so"


@dataclass(frozen=True)
class LibraryInfo:
    """
    The compiled library of this installation.

    Attributes:
        path: the file; None where there is none.
        version: fastgrpo version it was built from.
        compiler: compilers and their versions.
        targets: what it holds code for, as compilers name it: `"sm_90a"`, `"compute_80"` (PTX), `"gfx942"`.
        reason: why there is no library; empty where there is one.
    """

    path: Path | None
    version: str = ""
    compiler: str = ""
    targets: tuple[str, ...] = ()
    reason: str = ""


def library_info() -> LibraryInfo:
    """
    The compiled library, looked for in `FASTGRPO_LIBRARY` and then in the package; the first call loads it.

    Returns:
        LibraryInfo.

    Raises:
        FileNotFoundError: `FASTGRPO_LIBRARY` names a file that does not exist.
        OSError: it names a file that is not a fastgrpo library, or does not load on this machine.
    """
    return _load(os.environ.get(LIBRARY_VARIABLE))[0]


def load_library() -> ctypes.CDLL | None:
    """The compiled library, loaded once a process, or None; raises as `library_info` does."""
    return _load(os.environ.get(LIBRARY_VARIABLE))[1]


@cache
def _load(named: str | None) -> tuple[LibraryInfo, ctypes.CDLL | None]:
    if named:
        path = Path(named)
        if not path.is_file():
            raise FileNotFoundError(
                f"{LIBRARY_VARIABLE} is {named!r}, and there is no such file; give the path of a "
                f"{_PACKAGED.name}, or unset {LIBRARY_VARIABLE} to use the one of the package."
            )
        return _open(path)
    if not _PACKAGED.is_file():
        return LibraryInfo(None, reason=NO_LIBRARY), None
    try:
        return _open(_PACKAGED)
    except OSError as error:
        return LibraryInfo(None, reason=str(error)), None


def _open(path: Path) -> tuple[LibraryInfo, ctypes.CDLL]:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(f"{path} does not load on this machine: {error}; build it here: pip install .") from error
    try:
        build_info = library.fastgrpo_build_info
    except AttributeError:
        raise OSError(f"{path} is not a fastgrpo library: it has no fastgrpo_build_info") from None
    build_info.restype = ctypes.c_char_p
    built = json.loads(build_info().decode())
    return LibraryInfo(path, built["version"], built["compiler"], tuple(built["targets"].split())), library
