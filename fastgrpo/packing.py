"""Moving real tokens together and cutting what is padding in every row. Padding is known from masks, never from token ids."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo import pack_ops
from fastgrpo.attention import Segment
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
    _check_batch(input_ids, attention_mask)
    batch, width = input_ids.shape
    index, counts = pack_ops.left_pack_index(attention_mask)
    # The one number that the host must know: the size of the result.
    longest = max(int(counts.max()), 1) if batch and width else 0
    index = index[:, :longest]
    return LeftPacked(
        input_ids=input_ids.gather(1, index),
        attention_mask=attention_mask.gather(1, index),
        position_ids=torch.arange(longest, device=input_ids.device).expand(batch, longest),
        index=index,
        width=width,
    )


@dataclass(frozen=True)
class Packed:
    """
    The real tokens of a batch as one row, without padding; a prompt that rows share may be there once.

    Attributes:
        tokens: `[1, N]` token ids.
        position_ids: `[1, N]` int64, each token's position in its own row of the batch.
        segments: runs of tokens that see each other, and the prefixes they continue, see `fastgrpo.attention`.
        index: `[B, L]` int64, where each token of the batch is in the row; 0 for padding.
        real: `[B, L]` bool, False on padding.
        rows: numbers of the batch's rows in the order in which they begin in the packed row; of rows that share a prompt, the
            first alone.
    """

    tokens: Tensor
    position_ids: Tensor
    segments: list[Segment]
    index: Tensor
    real: Tensor
    rows: list[int]

    def previous(self) -> Tensor:
        """`[B, L]`: where the token before each is, in its own row of the batch; 0 for a row's first and for padding."""
        place = (self.real.cumsum(1) - 1).clamp(min=0)
        in_order = torch.zeros_like(self.index).scatter_reduce(1, place, self.index * self.real, "amax")
        return in_order.gather(1, (place - 1).clamp(min=0)).masked_fill(~self.real | (place == 0), 0)

    def take(self, values: Tensor) -> Tensor:
        """`[B, L]` values beside the original tokens to `[N]` beside the packed ones; of a shared token, one row's."""
        count = self.tokens.shape[1]
        place = torch.where(self.real, self.index, count).flatten()
        return values.new_zeros(count + 1).scatter(0, place, values.flatten())[:count]


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_lengths: Tensor | None = None,
    share_prefix: bool = False,
    beside: Sequence[Hashable] | None = None,
) -> Packed:
    """
    Puts the real tokens of all rows behind each other.

    Args:
        input_ids: `[B, L]` integer ids.
        attention_mask: `[B, L]` bool or integer, not 0 on real tokens, which may stand anywhere.
        prompt_lengths: `[B]` integers, how many of a row's first real tokens are its prompt; needed for sharing.
        share_prefix: rows with the same prompt follow each other, and the prompt stands before them once.
        beside: with `share_prefix`, B hashable values, what each row's prompt has beside its tokens, such as the name of its
            picture: prompts are the same where tokens and value are equal. None = prompts are their tokens.

    Returns:
        Packed. Rows keep their order, but for those that join the first row with their prompt.

    Raises:
        ValueError: shapes or lengths that do not fit, or sharing without `prompt_lengths`.
        TypeError: ids or mask in a dtype that is no id or mask.
    """
    _check_batch(input_ids, attention_mask)
    batch, width = input_ids.shape
    if share_prefix and prompt_lengths is None:
        raise ValueError("share_prefix=True needs prompt_lengths: without them nobody knows where prompts end.")
    if prompt_lengths is not None:
        require_tensor("prompt_lengths", prompt_lengths)
        if prompt_lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"prompt_lengths is {prompt_lengths.dtype}; it must be torch.int32 or torch.int64.")
    if prompt_lengths is not None and prompt_lengths.shape != (batch,):
        raise ValueError(
            f"prompt_lengths has shape {tuple(prompt_lengths.shape)}; it must be [{batch}], one for each row."
        )
    if beside is not None and len(beside) != batch:
        raise ValueError(f"beside has {len(beside)} entries; it must have {batch}, one for each row.")
    device = input_ids.device
    real = attention_mask.bool()
    # The one place where ids, lengths and prompts are read from the device, in one copy.
    held = [input_ids.flatten(), real.flatten(), *([] if prompt_lengths is None else [prompt_lengths])]
    on_host = torch.cat([x.to(torch.int64) for x in held]).cpu()
    host_ids, host_real = on_host[: batch * width].view(batch, width), on_host[batch * width : 2 * batch * width]
    host_ids, host_real = host_ids.to(input_ids.dtype), host_real.view(batch, width).bool()
    rows = [ids[keep] for ids, keep in zip(host_ids, host_real, strict=True)]
    prompts = [0] * batch if prompt_lengths is None else on_host[2 * batch * width :].tolist()
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        if not 0 <= prompt <= len(row):
            raise ValueError(f"prompt_lengths[{number}] is {prompt}; the row has {len(row)} tokens.")
    owners = range(batch)
    if share_prefix:
        owners = first_with_prompt([row[:prompt] for row, prompt in zip(rows, prompts, strict=True)], beside)
    groups: dict[int, list[int]] = {}
    for number, owner in enumerate(owners):
        groups.setdefault(owner, []).append(number)

    tokens, positions, segments, places = [], [], [], [torch.empty(0, dtype=torch.int64)] * batch
    end = 0

    def append(piece: Tensor, first_position: int, prefix: tuple[int, int] = (0, 0)) -> Tensor:
        nonlocal end
        place = torch.arange(end, end + len(piece))
        tokens.append(piece)
        positions.append(torch.arange(first_position, first_position + len(piece)))
        if len(piece):
            segments.append(Segment(end, end + len(piece), *prefix))
        end += len(piece)
        return place

    for members in groups.values():
        if len(members) == 1:
            places[members[0]] = append(rows[members[0]], 0)
            continue
        prompt = prompts[members[0]]
        shared = append(rows[members[0]][:prompt], 0)
        prefix = (end - prompt, end)
        for number in members:
            places[number] = torch.cat([shared, append(rows[number][prompt:], prompt, prefix)])

    index = torch.zeros(batch, width, dtype=torch.int64)
    if batch:
        index[host_real] = torch.cat(places)
    # One copy back, which nothing waits for.
    results = torch.cat([x.to(torch.int64) for x in (*tokens, *positions, index.flatten())])
    if device.type == "cuda":
        results = results.pin_memory().to(device, non_blocking=True)
    row, position, index = results.to(device).split([end, end, batch * width])
    return Packed(
        tokens=row.to(input_ids.dtype).unsqueeze(0),
        position_ids=position.unsqueeze(0),
        segments=segments,
        index=index.view(batch, width),
        real=real,
        rows=list(groups),
    )


def first_with_prompt(prompts: Sequence[Tensor], beside: Sequence[Hashable] | None = None) -> list[int]:
    """
    Which rows share a prompt.

    Args:
        prompts: B tensors `[P]` of ids, on the CPU.
        beside: see `pack`.

    Returns:
        Of each row the number of the first row with its prompt; its own where its prompt is empty.
    """
    values = [None] * len(prompts) if beside is None else beside
    first: dict[object, int] = {}
    return [
        first.setdefault((tuple(prompt.tolist()), value) if len(prompt) else row, row)
        for row, (prompt, value) in enumerate(zip(prompts, values, strict=True))
    ]


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """
    `values[rows]`; the gradients of a row that is taken several times are summed in fp32, in order.

    Args:
        values: `[N, H]`.
        rows: `[S]` int64.

    Returns:
        `[S, H]`.
    """
    return pack_ops.take_rows(values, rows, 0.0)


def unpack(values: Tensor, packed: Packed, fill: float = 0) -> Tensor:
    """
    Values beside packed tokens, beside the original ones.

    Args:
        values: `[N]` or `[1, N]`.
        packed: from `pack`.
        fill: what padding gets.

    Returns:
        `[B, L]` in the same dtype; a shared token's value in every row that has it. Differentiable.
    """
    require_tensor("values", values)
    if not isinstance(packed, Packed):
        raise TypeError(f"packed is a {type(packed).__name__}; give what fastgrpo.pack returned.")
    count = packed.tokens.shape[1]
    if values.shape not in ((count,), (1, count)):
        raise ValueError(f"values has shape {tuple(values.shape)}; it must be [{count}] or [1, {count}].")
    rows = packed.index.masked_fill(~packed.real, -1).flatten()
    return pack_ops.take_rows(values.reshape(-1), rows, float(fill)).view(packed.real.shape)


def _check_batch(input_ids: Tensor, attention_mask: Tensor) -> None:
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
