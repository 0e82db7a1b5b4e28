"""Segment attention through the flash kernels that torch ships for CUDA: two variable-length calls, merged exactly.

One causal call runs over all segments, one call lets the tokens of segments with a prefix see that prefix. Their outputs
are merged by their log-sum-exps, as blocks of one softmax are. The backward calls get the merged output and
log-sum-exp: each then computes its share of the gradient of the merged softmax.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST_HEAD = 256


class _Call(NamedTuple):
    """Sequence bounds of one variable-length call: int32 `[sequences + 1]`, and the longest sequence."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


class _Plan(NamedTuple):
    own: _Call
    prefix: _Call | None
    queries: Tensor
    """Tokens of segments with a prefix, in order."""
    keys: Tensor
    """Tokens of the prefixes, in order."""


def flash_obstacle(query: Tensor, value: Tensor, segments: list[int], softcap: float | None, window: int | None) -> str:
    """Why the flash kernels cannot compute this; empty where they can."""
    if query.device.type != "cuda":
        return "no CUDA tensor"
    if query.dtype not in _DTYPES or value.dtype != query.dtype:
        return f"they take bfloat16 or float16, not {query.dtype}"
    if softcap is not None:
        return "they know no softcap of the scores"
    if query.shape[2] > _WIDEST_HEAD or value.shape[2] != query.shape[2] or query.shape[2] % 8:
        return f"heads of {query.shape[2]} and {value.shape[2]} numbers"
    if segments[::4] != [0, *segments[1::4]][: len(segments) // 4] or (segments or [0, 0])[-3] != query.shape[1]:
        return "the segments do not lie one behind the other"
    if window is not None and any(
        prefix and prefix + stop - start > window
        for start, stop, prefix in zip(segments[::4], segments[1::4], _prefixes(segments), strict=True)
    ):
        return "a window ends inside a shared prefix"
    return ""


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: list[int], scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """
    Output and log-sum-exps of `segment_attention`, which see.

    Args:
        query, key, value: `[A, N, D]`, `[K, N, D]`, `[K, N, D]` bf16 or fp16.
        segments, scale, window: as there.

    Returns:
        `[N, A, D]`, and fp32 `[A, N]`.
    """
    plan = _plan(tuple(segments), query.device)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    out, lse = _forward(query, key, value, plan.own, scale, True, window)
    if plan.prefix is not None:
        rows = plan.queries
        more, more_lse = _forward(query[rows], key[plan.keys], value[plan.keys], plan.prefix, scale, False, None)
        own_lse = lse[:, rows]
        merged = torch.logaddexp(own_lse, more_lse)
        share, more_share = ((x - merged).exp().t().unsqueeze(-1) for x in (own_lse, more_lse))
        out[rows] = (out[rows] * share + more * more_share).to(out.dtype)
        lse[:, rows] = merged
    return out, lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: list[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, see `flash_forward`; a prefix gets the sum over all that continue it in fp32."""
    plan = _plan(tuple(segments), query.device)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    grads = _backward(grad_out, query, key, value, out, lse, plan.own, scale, True, window)
    if plan.prefix is not None:
        rows, keys = plan.queries, plan.keys
        more = _backward(
            grad_out[rows],
            query[rows],
            key[keys],
            value[keys],
            out[rows],
            lse[:, rows],
            plan.prefix,
            scale,
            False,
            None,
        )
        for grad, extra, index in zip(grads, more, (rows, keys, keys), strict=True):
            grad[index] += extra
    return tuple(grad.transpose(0, 1) for grad in grads)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        call.queries,
        call.keys,
        call.most_queries,
        call.most_keys,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if causal else -1,
    )
    return out, lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: _Call,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out.contiguous(),
        query,
        key,
        value,
        out.contiguous(),
        lse.contiguous(),
        call.queries,
        call.keys,
        call.most_queries,
        call.most_keys,
        0.0,
        causal,
        no_dropout,
        no_dropout[:0],
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if causal else -1,
    )


def _prefixes(segments: list[int] | tuple[int, ...]) -> list[int]:
    return [stop - start for start, stop in zip(segments[2::4], segments[3::4], strict=True)]


@lru_cache(maxsize=64)
def _plan(segments: tuple[int, ...], device: torch.device) -> _Plan:
    """The same for every layer of a model and for its backward pass, so made once."""
    bounds = list(zip(*(segments[i::4] for i in range(4)), strict=True))
    lengths = [stop - start for start, stop, *_ in bounds]
    # Segments that follow each other and continue the same prefix are one sequence of queries of the second call.
    runs: list[tuple[tuple[int, int], int]] = []
    queries, keys = [], []
    for start, stop, *prefix in bounds:
        if prefix[0] == prefix[1] or start == stop:
            continue
        queries += range(start, stop)
        if runs and runs[-1][0] == tuple(prefix):
            runs[-1] = (runs[-1][0], runs[-1][1] + stop - start)
        else:
            runs.append(((prefix[0], prefix[1]), stop - start))
            keys += range(*prefix)
    own = _call(lengths, lengths, device)
    prefix_call = _call([count for _, count in runs], [p[1] - p[0] for p, _ in runs], device) if runs else None
    return _Plan(own, prefix_call, torch.tensor(queries, device=device), torch.tensor(keys, device=device))


def _call(queries: list[int], keys: list[int], device: torch.device) -> _Call:
    bounds = [torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32) for lengths in (queries, keys)]
    return _Call(*bounds, max(queries), max(keys))
