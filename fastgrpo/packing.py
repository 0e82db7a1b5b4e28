"""Moving real tokens together and cutting what is padding in every row. Padding is known from masks, never from token ids."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo import pack_ops
from fastgrpo.attention import Segment
from fastgrpo.checks import (
    require_dense,
    require_device_of,
    require_flag,
    require_number,
    require_tensor,
    require_values,
)

# What gather, scatter and masked_fill take on every device.
_GATHERED = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


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
        """
        Values beside the original tokens, beside the packed ones.

        Args:
            values: `[B, L]`, of a dtype that torch gathers everywhere: not uint16 and wider, not float8, not complex32.

        Returns:
            `[B, L']` in the same dtype. Differentiable.

        Raises:
            TypeError: no tensor, a sparse or nested one, or one of another dtype.
            ValueError: of another shape, or on another device than the batch.
        """
        _require_values(values, self.index, (self.index.shape[0], self.width))
        return values.gather(1, self.index)

    def restore(self, values: Tensor, fill: float = 0) -> Tensor:
        """
        Values beside the packed tokens, beside the original ones: the exact inverse of packing.

        Args:
            values: `[B, L']`, of a dtype that torch gathers everywhere: not uint16 and wider, not float8, not complex32.
            fill: what padding gets.

        Returns:
            `[B, L]` in the same dtype. Differentiable.

        Raises:
            TypeError: no tensor, a sparse or nested one, or one of another dtype; a fill that is no number.
            ValueError: of another shape, or on another device than the batch; a fill that the dtype does not hold.
        """
        _require_values(values, self.index, tuple(self.index.shape))
        fill = _checked_fill(fill, values.dtype)
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
        ValueError: not two tensors of one shape `[B, L]` on one device, or tensors on meta, which have no values.
        TypeError: ids or mask in a dtype that is no id or mask, or sparse or nested.
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
        """
        Values beside the original tokens, beside the packed ones.

        Args:
            values: `[B, L]`, of a dtype that torch gathers everywhere: not uint16 and wider, not float8, not complex32.

        Returns:
            `[N]` in the same dtype; of a shared token, one row's.

        Raises:
            TypeError: no tensor, a sparse or nested one, or one of another dtype.
            ValueError: of another shape, or on another device than the batch.
        """
        _require_values(values, self.index, tuple(self.index.shape))
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
        share_prefix: True: rows with the same prompt follow each other, and the prompt stands before them once.
        beside: with `share_prefix`, B hashable values, what each row's prompt has beside its tokens, such as the name of its
            picture: prompts are the same where tokens and value are equal. None = prompts are their tokens.

    Returns:
        Packed. Rows keep their order, but for those that join the first row with their prompt.

    Raises:
        ValueError: shapes, lengths or devices that do not fit, tensors on meta, or sharing without `prompt_lengths`.
        TypeError: ids, mask or lengths in a dtype that is none of theirs, or sparse or nested; a `share_prefix` that is no
            bool; a `beside` that is no sequence of hashable values.
    """
    _check_batch(input_ids, attention_mask)
    require_flag("share_prefix", share_prefix)
    batch, width = input_ids.shape
    if share_prefix and prompt_lengths is None:
        raise ValueError("share_prefix=True needs prompt_lengths: without them nobody knows where prompts end.")
    if prompt_lengths is not None:
        _check_lengths(prompt_lengths, input_ids)
    if beside is not None:
        _check_beside(beside, batch)
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

    # The row is put together on the host, whatever the default device.
    tokens, positions, segments, places = [], [], [], [torch.empty(0, dtype=torch.int64, device="cpu")] * batch
    end = 0

    def append(piece: Tensor, first_position: int, prefix: tuple[int, int] = (0, 0)) -> Tensor:
        nonlocal end
        place = torch.arange(end, end + len(piece), device="cpu")
        tokens.append(piece)
        positions.append(torch.arange(first_position, first_position + len(piece), device="cpu"))
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

    index = torch.zeros(batch, width, dtype=torch.int64, device="cpu")
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
        values: `[N]` or `[1, N]`, of a dtype that torch gathers everywhere: not uint16 and wider, not float8, not complex32.
        packed: from `pack`.
        fill: what padding gets.

    Returns:
        `[B, L]` in the same dtype; a shared token's value in every row that has it. Differentiable.

    Raises:
        TypeError: values that are no tensor, sparse or nested, or of another dtype; a `packed` that is not from `pack`; a fill
            that is no number.
        ValueError: of another shape, or on another device than the batch; a fill that the dtype does not hold.
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"packed is a {type(packed).__name__}; give what fastgrpo.pack returned.")
    count = packed.tokens.shape[1]
    _require_values(values, packed.index, (count,), (1, count))
    fill = _checked_fill(fill, values.dtype)
    rows = packed.index.masked_fill(~packed.real, -1).flatten()
    return pack_ops.take_rows(values.reshape(-1), rows, fill).view(packed.real.shape)


def _check_batch(input_ids: Tensor, attention_mask: Tensor) -> None:
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        _require_readable(name, value)
    require_device_of("input_ids", input_ids, "attention_mask", attention_mask)
    if input_ids.dim() != 2 or input_ids.shape != attention_mask.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; both must be "
            "[B, L]."
        )
    _require_dtype("input_ids", input_ids, torch.int32, torch.int64)
    _require_dtype("attention_mask", attention_mask, torch.bool, torch.uint8, torch.int32, torch.int64)


def _check_lengths(prompt_lengths: Tensor, input_ids: Tensor) -> None:
    _require_readable("prompt_lengths", prompt_lengths)
    require_device_of("input_ids", input_ids, "prompt_lengths", prompt_lengths)
    _require_dtype("prompt_lengths", prompt_lengths, torch.int32, torch.int64)
    batch = input_ids.shape[0]
    if prompt_lengths.shape != (batch,):
        raise ValueError(
            f"prompt_lengths has shape {tuple(prompt_lengths.shape)}; it must be [{batch}], one for each row."
        )


def _check_beside(beside: Sequence[Hashable], batch: int) -> None:
    # As a list's or an array's, the order of the entries is that of the rows.
    ordered = hasattr(beside, "__len__") and hasattr(beside, "__getitem__") and not isinstance(beside, Mapping | Tensor)
    if not ordered:
        raise TypeError(
            f"beside is a {type(beside).__name__}; give a list of {batch} hashable values, one for each row."
        )
    if len(beside) != batch:
        raise ValueError(f"beside has {len(beside)} entries; it must have {batch}, one for each row.")
    for row, value in enumerate(beside):
        # A tensor's hash is its identity, so equal ones would count as different without a word.
        if _holds_a_tensor(value) or not _is_hashable(value):
            raise TypeError(
                f"beside[{row}] is a {type(value).__name__}; give hashable values that compare as a whole, such as names, "
                "numbers or tuples of them."
            )


def _holds_a_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | frozenset) and any(map(_holds_a_tensor, value)))


def _is_hashable(value: object) -> bool:
    # Not isinstance(value, Hashable), which is true of a tuple of lists.
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _require_readable(name: str, value: Tensor) -> None:
    """Raises unless `value` is an ordinary tensor whose values the host can read."""
    require_tensor(name, value)
    require_dense(name, value)
    require_values(name, value)


def _require_dtype(name: str, value: Tensor, *allowed: torch.dtype) -> None:
    if value.dtype not in allowed:
        raise TypeError(f"{name} is {value.dtype}; it must be one of {', '.join(map(str, allowed))}.")


def _require_values(values: Tensor, index: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raises unless `values` can be gathered by a packed batch's index, and has one of the shapes."""
    require_tensor("values", values)
    require_dense("values", values)
    _require_dtype("values", values, *_GATHERED)
    require_device_of("the packed batch", index, "values", values)
    if values.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"values has shape {tuple(values.shape)}; it must be {allowed}.")


def _checked_fill(fill: float, dtype: torch.dtype) -> float:
    """`fill` as a Python number; raises unless the dtype holds it: in its range, and whole where the dtype is."""
    if not isinstance(fill, int | float) and getattr(fill, "ndim", None) == 0:
        # A number of numpy's, or a tensor's.
        fill = fill.item()
    if not isinstance(fill, bool):
        require_number("fill", fill)
    if dtype == torch.bool:
        held, allowed = fill in (0, 1), "True or False"
    elif dtype.is_floating_point or dtype.is_complex:
        largest = torch.finfo(dtype).max
        held = not largest < abs(fill) < math.inf
        allowed = f"a number from {-largest} to {largest}, an infinity or nan"
    else:
        least, largest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        held = least <= fill <= largest and fill % 1 == 0
        allowed = f"a whole number from {least} to {largest}"
    if not held:
        raise ValueError(f"fill is {fill!r}, and values is {dtype}, which does not hold it; give {allowed}.")
    return fill
