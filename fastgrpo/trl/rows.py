"""Some rows of a micro-batch, and what belongs to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastgrpo.trl.fused import FusedLoss
    from fastgrpo.trl.images import ImagesByRow

_IGNORE = -100


@dataclass(frozen=True)
class Rows:
    """
    Rows as TRL pads them: prompts to the left, completions to the right.

    Attributes:
        input_ids, attention_mask: `[B, L]`.
        width: T, last columns, which are scored.
        counted: `[B, T]` bool, the tokens that the loss counts; None = all of the completions.
        fused_loss: the loss, `[B, T]`, where the head may compute it.
        images: theirs.
    """

    input_ids: Tensor
    attention_mask: Tensor
    width: int
    counted: Tensor | None = None
    fused_loss: FusedLoss | None = None
    images: ImagesByRow | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def take(self, rows: Tensor) -> Rows:
        """
        Some of the rows.

        Args:
            rows: `[K]` int64.
        """
        return self._of(lambda values: values[rows], None if self.images is None else self.images.part(rows))

    def split(self, size: int) -> list[Rows]:
        """Every so many of the rows."""
        if size >= len(self):
            return [self]
        starts = range(0, len(self), size)
        images = [None] * len(starts) if self.images is None else self.images.split(size)
        return [
            self._of(lambda values, start=start: values[start : start + size], some)
            for start, some in zip(starts, images, strict=True)
        ]

    def _of(self, function: Callable[[Tensor], Tensor], images: ImagesByRow | None) -> Rows:
        return replace(
            self,
            input_ids=function(self.input_ids),
            attention_mask=function(self.attention_mask),
            counted=None if self.counted is None else function(self.counted),
            fused_loss=None if self.fused_loss is None else self.fused_loss.map(function),
            images=images,
        )

    def beside_prompts(self, values: Tensor) -> Tensor:
        """`[B, T]` values of the last columns to `[B, L]`, 0 in the others."""
        return torch.nn.functional.pad(values, (self.input_ids.shape[1] - self.width, 0))

    def last(self, values: Tensor) -> Tensor:
        """`[B, L]` to `[B, T]`: the last columns."""
        return values[:, self.input_ids.shape[1] - self.width :]

    @cached_property
    def scored(self) -> Tensor:
        """`[B, L]` bool, the real tokens of the last columns."""
        scored = self.attention_mask != 0
        scored[:, : scored.shape[1] - self.width] = False
        return scored

    @cached_property
    def computed(self) -> Tensor:
        """`[B, L]` bool, those of them that the loss counts."""
        return self.scored if self.counted is None else self.scored & self.beside_prompts(self.counted)

    def labels(self) -> Tensor:
        """`[B, L]` ids, -100 where nothing is computed."""
        return self.input_ids.masked_fill(~self.computed, _IGNORE)

    def laid_out_loss(self, layout: Callable[[Tensor], Tensor]) -> FusedLoss | None:
        """
        The fused loss with its tokens laid out in another way.

        Args:
            layout: of `[B, L]` values.
        """
        if self.fused_loss is None:
            return None
        return self.fused_loss.map(lambda values: layout(self.beside_prompts(values)))

    def cannot_be_packed(self) -> bool:
        """Whether a row's first real token is to be scored, with nothing before it but padding, or no token is real."""
        real = self.attention_mask != 0
        first = real & (real.cumsum(1) == 1)
        return bool((first & self.scored).any() | ~real.any())
