"""The NVIDIA driver of this machine, and whether the CUDA runtime inside the library can work on it."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path

_VERSION = Path("/proc/driver/nvidia/version")
# The oldest driver for each major version of the CUDA runtime (CUDA's release notes).
_OLDEST = {12: 525, 13: 580}


@cache
def driver_cuda() -> int | None:
    """Newest CUDA runtime that the driver serves, as CUDA counts (13000 is 13.0); None where there is no driver."""
    found = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    return found.value if status == 0 and found.value > 0 else None


def driver_name() -> str:
    """The driver's version and the newest CUDA it serves, `"580.95.05, CUDA 13.0"`; what is not known is left out."""
    try:
        version = re.search(r"\b\d{3,}(\.\d+)+\b", _VERSION.read_text())
    except OSError:
        version = None
    cuda = driver_cuda()
    served = "" if cuda is None else f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    return ", ".join(filter(None, (version and version[0], served))) or "unknown"


@cache
def why_driver_is_too_old(compiler: str) -> str:
    """
    Why the library's CUDA runtime, which is linked into it, cannot work on this driver.

    Args:
        compiler: what built the library (`LibraryInfo.compiler`): `"nvcc 13.0.88, ..."`; its runtime is of that version.

    Returns:
        The reason; empty where it can, and where either version is not known.
    """
    built, cuda = re.match(r"nvcc (\d+)\.", compiler), driver_cuda()
    if built is None or cuda is None or cuda // 1000 >= int(built[1]):
        return ""
    major = int(built[1])
    oldest = f"driver {_OLDEST[major]} or newer" if major in _OLDEST else "a newer driver"
    return f"the library's CUDA {major} runtime needs {oldest}, and this one is {driver_name()}"
