"""Moving real tokens together and cutting what is padding in every row. Padding is known from masks, never from token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo.checks import require_device_of, require_tensor


@dataclass(frozen=True)
class LeftPacked:
    """
    A batch whose rows start with their real tokens, cut to the longest row; all tensors `[B, L']`.

    Attributes:
        input_ids: token ids; behind a row's end, ids of its padding.
        attention_mask: 1 on real tokens, in the dtype of the original mask.
        position_ids: int64 `0, 1, 2, ...` in every row. Behind a row's end they go on, so a causal model needs no
            attention mask: real tokens cannot see what follows them.
        index: int64, the original column of every entry; no column occurs twice in a row.
        width: L, columns of the original batch.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    index: Tensor
    width: int

    def take(self, values: Tensor) -> Tensor:
        """`[B, L]` values beside the original tokens to `[B, L']` beside the packed ones."""
        return values.gather(1, self.index)

    def restore(self, values: Tensor, fill: float = 0) -> Tensor:
        """`[B, L']` to `[B, L]` in the same dtype: the exact inverse of packing, `fill` for padding. Differentiable."""
        values = values.masked_fill(~self.attention_mask.bool(), fill)
        out = torch.full((values.shape[0], self.width), fill, dtype=values.dtype, device=values.device)
        return out.scatter(1, self.index, values)


def left_pack(input_ids: Tensor, attention_mask: Tensor) -> LeftPacked:
    """
    Moves the real tokens of every row to its left, in order, and cuts the columns that are padding in all rows.

    Args:
        input_ids: `[B, L]` integer ids.
        attention_mask: `[B, L]` bool or integer, not 0 on real tokens, which may stand anywhere.

    Returns:
        LeftPacked, `L'` = tokens of the longest row, at least 1 where L is.

    Raises:
        ValueError: not two tensors of one shape `[B, L]`.
        TypeError: ids or mask in a dtype that is no id or mask.
    """
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        require_tensor(name, value)
    require_device_of("input_ids", input_ids, "attention_mask", attention_mask)
    if input_ids.dim() != 2 or input_ids.shape != attention_mask.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; both must be "
            "[B, L]."
        )
    for name, value, allowed in (
        ("input_ids", input_ids, (torch.int32, torch.int64)),
        ("attention_mask", attention_mask, (torch.bool, torch.uint8, torch.int32, torch.int64)),
    ):
        if value.dtype not in allowed:
            raise TypeError(f"{name} is {value.dtype}; it must be one of {', '.join(map(str, allowed))}.")
    batch, width = input_ids.shape
    real = attention_mask.bool()
    count = real.sum(1, keepdim=True)
    columns = torch.arange(width, device=input_ids.device).expand(batch, width)
    place = torch.where(real, real.cumsum(1) - 1, count + (~real).cumsum(1) - 1)
    longest = max(int(count.max()), 1) if batch and width else 0
    index = torch.empty_like(place).scatter_(1, place, columns)[:, :longest]
    return LeftPacked(
        input_ids=input_ids.gather(1, index),
        attention_mask=attention_mask.gather(1, index),
        position_ids=columns[:, :longest],
        index=index,
        width=width,
    )
