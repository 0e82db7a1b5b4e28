"""Finding and loading the compiled library; without one, why there is none."""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LIBRARY_VARIABLE = "FASTGRPO_LIBRARY"
FUSED_OPS = (
    *("fused_pass", "fused_objective", "fused_grad"),
    *("finish_hidden_grad", "add_to_targets", "take_targets", "round_at_targets", "scale_rows"),
)
"""Those behind the fused head, which is for compute capability 9.0."""
OPS = (
    *FUSED_OPS,
    *("row_pass", "row_objective", "row_grad", "scale_round", "weigh_slopes", "merge_attention", "rotary"),
    *("swiglu", "swiglu_grad"),
    *("compact_rows", "grpo_rows", "grpo_sums", "left_pack_into", "take_rows_into", "sum_rows_into"),
)
"""The library's ops, `torch.ops.fastgrpo.*`; each writes into tensors it is given and returns nothing."""
NO_LIBRARY = "pure-Python wheel: built without a CUDA or HIP compiler"
KERNELS_ALONE = "built by hipcc: the kernels alone, no ops for torch so far"
_answers: dict[tuple[str | int, ...], bool] = {}
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

    @property
    def why_no_ops(self) -> str:
        """Why `torch.ops.fastgrpo.*` are not there: no library, or one of hipcc; empty where they are."""
        return self.reason or (KERNELS_ALONE if self.compiler.startswith("hipcc") else "")


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


def row_is_read_once(device: torch.device, columns: int) -> bool:
    """Whether rows of this many logits stay on the chip of a CUDA device between their statistics and their gradients."""
    return answer_of_device(device, "fastgrpo_row_cluster_serves", columns)


def answer_of_device(device: torch.device, question: str, *arguments: int) -> bool:
    """
    What the library says of a CUDA device, asked once.

    Args:
        device: without an index, the current one.
        question: a function of the library; the device's index is its last argument.
        arguments: those before. An answer of -1, no memory to tell, is a no that is asked again.
    """
    import torch

    index = device.index
    if index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    key = question, *arguments, index
    if key not in _answers:
        if load_library() is None or not torch.cuda.is_available():
            return False
        # Torch comes back from another device without making a context on one that has none.
        with torch.cuda.device(index):
            answer = getattr(load_library(), question)(*arguments, index)
        if answer < 0:
            return False
        _answers[key] = bool(answer)
    return _answers[key]


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
    # The library's ops need torch's symbols; loading it registers them as torch.ops.fastgrpo.*.
    import torch

    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        # Torch has a sentence of its own, and the loader's reason behind it.
        why = error.__cause__ or error
        raise OSError(f"{path} does not load on this machine: {why}; build it here: pip install .") from error
    try:
        build_info = library.fastgrpo_build_info
    except AttributeError:
        raise OSError(f"{path} is not a fastgrpo library: it has no fastgrpo_build_info") from None
    build_info.restype = ctypes.c_char_p
    built = json.loads(build_info().decode())
    for op in OPS:
        if hasattr(torch.ops.fastgrpo, op):
            torch.library.register_fake(f"fastgrpo::{op}", lambda *_: None, allow_override=True)
    return LibraryInfo(path, built["version"], built["compiler"], tuple(built["targets"].split())), library
