"""Causal attention over one row that holds many sequences, some of which continue a shared prefix.

A segment is a run of tokens that see each other causally; it may also see all of one earlier run, its prefix. A prompt
and its G completions are G + 1 segments: the prompt is computed once, and each completion sees it and itself, which is
what G separate rows would compute.

Where torch's flash kernels can compute it, they do (`fastgrpo.kernels.flash`). Elsewhere the score matrix exists one block
at a time, and the backward pass computes it again from the saved log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrpo.checks import refuse_second_derivatives
from fastgrpo.kernels.flash import Bounds, flash_backward, flash_forward, flash_obstacle

# Bytes of float32 scores alive at once.
_SCORE_BYTES = 32 * 2**20
# A tile's padded area may be this many times what its blocks need; short ones are cheap whatever their padding.
_MOST_PADDING = 1.5
_SHORT = 64


class Segment(NamedTuple):
    """Tokens `start:stop` see each other causally, and all of `prefix_start:prefix_stop`, which they continue."""

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """
    Attention of every token to its own segment, causally, and to the segment's prefix.

    Args:
        query: `[A, N, D]`; A query heads.
        key, value: `[K, N, D]`, `[K, N, E]`; K divides A, and query head a reads head `a // (A / K)`.
        segments: cover every token that counts exactly once; a prefix lies before its segments. Tokens outside get 0.
        scale: factor of the scores.
        softcap: scores become `softcap * tanh(score / softcap)`.
        window: a token sees itself and the `window - 1` positions before it; None = all of them.

    Returns:
        `[N, A, E]` in the dtype of `value`. Differentiable once in query, key and value.

    Raises:
        ValueError: shapes or segments that do not fit.
    """
    heads, tokens, width = query.shape
    if key.shape[1:] != (tokens, width) or value.shape[:2] != key.shape[:2] or heads % key.shape[0]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit: [A, N, D], "
            "[K, N, D] and [K, N, E] with K a divisor of A."
        )
    bounds = _bounds(tuple(segments), tokens)
    if torch.compiler.is_compiling():
        return segment_attention_op(query, key, value, list(bounds), scale, softcap, window)[0]
    # The op does the same, but a call of it costs the processor ten times as much.
    return _SegmentAttention.apply(query, key, value, bounds, scale, softcap, window)


@lru_cache(maxsize=64)
def _bounds(segments: tuple[Segment, ...], tokens: int) -> Bounds:
    for segment in segments:
        start, stop, prefix_start, prefix_stop = segment
        if not (
            0 <= start <= stop <= tokens
            and 0 <= prefix_start <= prefix_stop
            and (prefix_stop <= start or prefix_start == prefix_stop)
        ):
            raise ValueError(f"{segment} does not lie in {tokens} tokens with its prefix before it.")
    return tuple(bound for segment in segments for bound in segment)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, *options):
        out, lse = _attend(query, key, value, *options)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, grad_out):
        refuse_second_derivatives("fastgrpo's attention")
        return *_attend_backward(grad_out, *ctx.saved_tensors, *ctx.options), None, None, None, None


@torch.library.custom_op("fastgrpo::segment_attention", mutates_args=())
def segment_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: list[int],
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """
    See `segment_attention`; `segments` is the four bounds of each, one after the other.

    Returns:
        `[N, A, E]` and the log-sum-exps of the scores `[A, N]` in fp32 (fp64).
    """
    return _attend(query, key, value, tuple(segments), scale, softcap, window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Bounds,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    if not flash_obstacle(query, value, segments, softcap, window):
        return flash_forward(query, key, value, segments, scale, window)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads, tokens, _ = query.shape
    # One row more than there are tokens: what a tile computes for its padding goes there.
    out = value.new_zeros(tokens + 1, heads, value.shape[2])
    lse = query.new_zeros(tokens + 1, heads, dtype=dtype)
    shape = _Heads(heads, key.shape[0])
    with torch.autocast(query.device.type, enabled=False):
        for tile in _tiles(segments, tokens, heads, window, query.device):
            scores = _scores(shape.queries_of(query, tile).to(dtype), key, tile, shape, scale, softcap)
            peak = scores.amax(-1, keepdim=True)
            mass = scores.sub_(peak).exp_()
            total = mass.sum(-1, keepdim=True)
            mixed = (mass @ _keys_of(value, tile).to(dtype)).div_(total)
            out[tile.written] = shape.by_token(mixed).to(out.dtype)
            lse[tile.written] = shape.by_token(peak + total.log()).squeeze(-1)
    return out[:-1], lse[:-1].t().contiguous()


@segment_attention_op.register_fake
def _(query, key, value, segments, scale, softcap, window):
    heads, tokens, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return value.new_empty(tokens, heads, value.shape[2]), query.new_empty(heads, tokens, dtype=dtype)


@torch.library.custom_op("fastgrpo::segment_attention_backward", mutates_args=())
def segment_attention_backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: list[int],
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in their dtypes; those of a shared prefix are summed in fp32 in a fixed order."""
    return _attend_backward(grad_out, query, key, value, out, lse, tuple(segments), scale, softcap, window)


def _attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Bounds,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not flash_obstacle(query, value, segments, softcap, window):
        return flash_backward(grad_out, query, key, value, out, lse, segments, scale, window)
    heads, tokens, _ = query.shape
    shape = _Heads(heads, key.shape[0])
    # By token, so that rows can be added where tokens are; one row more for padding, as in the forward.
    grad_query = torch.zeros(tokens + 1, heads, query.shape[2], dtype=lse.dtype, device=query.device)
    grad_key, grad_value = (x.new_zeros(tokens, x.shape[0], x.shape[2], dtype=lse.dtype) for x in (key, value))
    with torch.autocast(query.device.type, enabled=False):
        drift = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
        for tile in _tiles(segments, tokens, heads, window, query.device):
            rows = shape.queries_of(query, tile).to(lse.dtype)
            # Padding has the mass exp(-inf) and so no gradient, whatever it reads.
            row_lse = shape.queries_of(lse.unsqueeze(-1), tile, fill=float("inf"))
            grad = shape.queries_of(grad_out.transpose(0, 1), tile, fill=0.0).to(lse.dtype)
            row_drift = shape.queries_of(drift.unsqueeze(-1), tile, fill=0.0)
            scores = _scores(rows, key, tile, shape, scale, softcap)
            slope = None if softcap is None else 1 - (scores / softcap).square_().clamp_(max=1.0)
            mass = scores.sub_(row_lse).exp_()
            grad_value.index_add_(0, tile.keys.flatten(), _keys_by_token(mass.transpose(-1, -2) @ grad))
            grad_scores = (grad @ _keys_of(value, tile).to(lse.dtype).transpose(-1, -2)).sub_(row_drift).mul_(mass)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_scores.mul_(scale)
            grad_query[tile.written] = shape.by_token(grad_scores @ _keys_of(key, tile).to(lse.dtype))
            grad_key.index_add_(0, tile.keys.flatten(), _keys_by_token(grad_scores.transpose(-1, -2) @ rows))
    return (
        grad_query[:-1].transpose(0, 1).to(query.dtype, memory_format=torch.contiguous_format),
        grad_key.transpose(0, 1).to(key.dtype, memory_format=torch.contiguous_format),
        grad_value.transpose(0, 1).to(value.dtype, memory_format=torch.contiguous_format),
    )


@segment_attention_backward_op.register_fake
def _(grad_out, query, key, value, out, lse, segments, scale, softcap, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _context(ctx, inputs, output) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    if grad_out is None:
        return (None,) * 7
    return *segment_attention_backward_op(grad_out, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _refuse_second_derivatives(ctx, *grads):
    raise RuntimeError("fastgrpo's attention is differentiable once, and a second derivative was asked for.")


segment_attention_op.register_autograd(_backward, setup_context=_context)
segment_attention_backward_op.register_autograd(_refuse_second_derivatives)


class _Tile(NamedTuple):
    """Blocks of queries, each with the keys it sees, padded to one size: b blocks of m queries and n keys."""

    queries: Tensor
    """`[b, m]` tokens; padding repeats the block's first token, so that no other sequence's NaN gets in."""
    written: Tensor
    """`[b, m]` as `queries`, but padding is one past the last token."""
    padding: Tensor
    """`[b, m]` bool."""
    keys: Tensor
    """`[b, n]` tokens."""
    hidden: Tensor
    """`[b, 1, 1, m, n]` bool, keys that a query does not see."""


class _Block(NamedTuple):
    """Queries `first:last` of one segment, and the oldest position any of them sees."""

    segment: Segment
    first: int
    last: int
    oldest: int

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def width(self) -> int:
        """Keys from the oldest position to the last query."""
        return self.position(self.last) - self.oldest

    def position(self, token: int) -> int:
        """Of a token of the segment, counted from the first of its prefix."""
        return self.segment.prefix_stop - self.segment.prefix_start + token - self.segment.start


@lru_cache(maxsize=64)
def _tiles(bounds: Bounds, tokens: int, heads: int, window: int | None, device: torch.device) -> list[_Tile]:
    """The same for every layer of a model and for its backward pass, so made once."""
    area = max(_SCORE_BYTES // (4 * heads), 1)
    blocks = sorted(_blocks(bounds, area, window), key=lambda block: (block.width, block.rows))
    tiles: list[list[_Block]] = []
    for block in blocks:
        together = [*tiles[-1], block] if tiles else []
        padded = (
            len(together) * max((b.rows for b in together), default=0) * max((b.width for b in together), default=0)
        )
        needed = sum(b.rows * b.width for b in together)
        if together and padded <= area and (padded <= _MOST_PADDING * needed or block.width <= _SHORT):
            tiles[-1].append(block)
        else:
            tiles.append([block])
    return [_tile(tile, tokens, window, device) for tile in tiles]


def _blocks(bounds: Bounds, area: int, window: int | None) -> list[_Block]:
    blocks = []
    for segment in (Segment(*bounds[at : at + 4]) for at in range(0, len(bounds), 4)):
        whole = segment.prefix_stop - segment.prefix_start + segment.stop - segment.start
        size = max(area // max(whole, 1), 16)
        for first in range(segment.start, segment.stop, size):
            block = _Block(segment, first, min(first + size, segment.stop), 0)
            blocks.append(
                block if window is None else block._replace(oldest=max(block.position(first) - window + 1, 0))
            )
    return blocks


def _tile(blocks: list[_Block], tokens: int, window: int | None, device: torch.device) -> _Tile:
    rows, width = max(block.rows for block in blocks), max(block.width for block in blocks)
    queries = torch.empty(len(blocks), rows, dtype=torch.int64)
    written = torch.full_like(queries, tokens)
    keys = torch.empty(len(blocks), width, dtype=torch.int64)
    hidden = torch.ones(len(blocks), rows, width, dtype=torch.bool)
    for number, block in enumerate(blocks):
        segment = block.segment
        queries[number] = block.first
        queries[number, : block.rows] = written[number, : block.rows] = torch.arange(block.first, block.last)
        prefix = range(segment.prefix_start, segment.prefix_stop)
        seen = [*prefix, *range(segment.start, block.last)][block.oldest :]
        keys[number] = block.first
        keys[number, : block.width] = torch.tensor(seen)
        distance = torch.arange(block.position(block.first), block.position(block.first) + rows).unsqueeze(1) - (
            torch.arange(block.width) + block.oldest
        )
        out_of_sight = distance < 0 if window is None else (distance < 0) | (distance >= window)
        out_of_sight[block.rows :] = False
        hidden[number, :, : block.width] = out_of_sight
    return _Tile(
        queries.to(device),
        written.to(device),
        (written == tokens).to(device),
        keys.to(device),
        hidden[:, None, None].to(device),
    )


class _Heads(NamedTuple):
    """Grouped queries without repeated keys: the queries that read one key head become rows of one matrix."""

    queries: int
    keys: int

    def queries_of(self, x: Tensor, tile: _Tile, fill: float | None = None) -> Tensor:
        """`[A, N, D]` to `[b, K, (A / K) m, D]`, padding replaced by `fill`."""
        blocks, rows = tile.queries.shape
        taken = x[:, tile.queries]
        if fill is not None:
            taken = taken.masked_fill(tile.padding.unsqueeze(-1), fill)
        taken = taken.view(self.keys, self.queries // self.keys, blocks, rows, -1)
        return taken.permute(2, 0, 1, 3, 4).reshape(blocks, self.keys, -1, x.shape[-1])

    def by_token(self, x: Tensor) -> Tensor:
        """`[b, K, (A / K) m, D]` to `[b, m, A, D]`."""
        blocks = x.shape[0]
        x = x.view(blocks, self.keys, self.queries // self.keys, -1, x.shape[-1])
        return x.permute(0, 3, 1, 2, 4).reshape(blocks, -1, self.queries, x.shape[-1])


def _keys_of(x: Tensor, tile: _Tile) -> Tensor:
    """`[K, N, D]` to `[b, K, n, D]`."""
    return x[:, tile.keys].transpose(0, 1)


def _keys_by_token(x: Tensor) -> Tensor:
    """`[b, K, n, D]` to `[b n, K, D]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _scores(rows: Tensor, key: Tensor, tile: _Tile, shape: _Heads, scale: float, softcap: float | None) -> Tensor:
    scores = (rows @ _keys_of(key, tile).to(rows.dtype).transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    blocks, queries, width = tile.hidden.shape[0], tile.hidden.shape[3], tile.hidden.shape[4]
    by_row = scores.view(blocks, shape.keys, shape.queries // shape.keys, queries, width)
    by_row.masked_fill_(tile.hidden, float("-inf"))
    return scores
