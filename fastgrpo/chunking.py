"""How many rows of logits are alive at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
DEFAULT_CHUNK_BYTES = 512 * MIB
# Host memory is the user's own, and a chunk near the caches' size is not slower.
DEFAULT_CHUNK_BYTES_CPU = 128 * MIB
# What cuBLAS computes at a time: a chunk of other sizes leaves its last tile partly idle.
TILE = 256
# What numbers of rows should be multiples of on a CUDA device: of 1024, or of 256 where they are below that.
CUDA_ROWS = (4 * TILE, TILE)
# Up to such a multiple a chunk may be this much over its budget. 262,208 words (Gemma 3 with pictures) are 64 more than fit
# 1024 rows into 512 MiB; without, those would be 768.
_OVER = 1 / 256


@dataclass(frozen=True)
class ChunkPlan:
    """
    The choice of chunk size of the head.

    Args:
        chunk_bytes: bytes that the `[rows, V]` buffers of a chunk take together, or what stands in for them, on a CUDA device
            to within 0.4 %; None = 512 MiB, on a CPU 128 MiB.
        num_chunks: -1 = as many as `chunk_bytes` asks for; n >= 1 = exactly n (fewer where there are fewer rows).
        logit_chunk_multiplier: multiplies the automatic number of chunks; above 1 for less memory.

    Raises:
        TypeError: not a number.
        ValueError: a value outside these ranges, or `logit_chunk_multiplier` together with `num_chunks >= 1`.
    """

    chunk_bytes: int | None = None
    num_chunks: int = -1
    logit_chunk_multiplier: float | None = None

    def __post_init__(self) -> None:
        for name, optional in (("chunk_bytes", True), ("num_chunks", False)):
            value = getattr(self, name)
            if not (isinstance(value, int) or (optional and value is None)) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; give a whole number{' or None' if optional else ''}.")
        if not isinstance(self.logit_chunk_multiplier, int | float | None) or isinstance(
            self.logit_chunk_multiplier, bool
        ):
            raise TypeError(f"logit_chunk_multiplier is {self.logit_chunk_multiplier!r}; give a number or None.")
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}; give a number of bytes of at least 1, or None.")
        if self.num_chunks != -1 and self.num_chunks < 1:
            raise ValueError(f"num_chunks is {self.num_chunks}; give -1 (automatic) or a number of at least 1.")
        if self.logit_chunk_multiplier is not None:
            if not 0 < self.logit_chunk_multiplier < math.inf:
                raise ValueError(
                    f"logit_chunk_multiplier is {self.logit_chunk_multiplier}; give a finite number above 0, or None."
                )
            if self.num_chunks != -1:
                raise ValueError(
                    f"logit_chunk_multiplier={self.logit_chunk_multiplier} scales the automatic number of chunks, but "
                    f"num_chunks={self.num_chunks} fixes it; give one of the two."
                )

    def rows(self, count: int, bytes_a_row: int, device: torch.device, liked: tuple[int, ...] = ()) -> int:
        """
        Rows in a chunk.

        Args:
            count: rows in all.
            bytes_a_row: what a row takes in everything that grows with them and that the pass keeps alive at once.
            device: where they live.
            liked: an automatic number is a multiple of the first of these that is not larger, or by 1/256 at most.

        Returns:
            At least 1.
        """
        if self.num_chunks != -1:
            return max(1, -(-count // self.num_chunks))
        budget = self.chunk_bytes
        if budget is None:
            budget = DEFAULT_CHUNK_BYTES_CPU if device.type == "cpu" else DEFAULT_CHUNK_BYTES
        rows = max(1, budget // bytes_a_row)
        if self.logit_chunk_multiplier is not None:
            rows = max(1, int(min(rows / self.logit_chunk_multiplier, max(count, 1))))
        nearly = rows + int(rows * _OVER)
        return next((nearly - nearly % step for step in liked if step <= nearly), rows)
