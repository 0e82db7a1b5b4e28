"""Segment attention through the flash kernels that torch ships for CUDA: two variable-length calls, merged exactly.

One causal call runs over all segments; one call lets the tokens of segments with a prefix see that prefix, and the others
no key at all. Their outputs are merged by their log-sum-exps, as blocks of one softmax are. The backward calls get the
merged output and log-sum-exp: each then computes its share of the gradient of the merged softmax.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrpo.kernels.select import why_no_library

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
    continued: Tensor
    """`[N]` bool, tokens of segments with a prefix."""
    keys: Tensor
    """Tokens of the prefixes, in order."""
    no_dropout: Tensor
    """Seed and offset that the backward call wants."""


Bounds = tuple[int, ...]
"""The four bounds of each segment, one after the other."""


def flash_obstacle(query: Tensor, value: Tensor, segments: Bounds, softcap: float | None, window: int | None) -> str:
    """Why the flash kernels cannot compute this; empty where they can."""
    if query.device.type != "cuda":
        return "no CUDA tensor"
    if query.dtype not in _DTYPES or value.dtype != query.dtype:
        return f"they take bfloat16 or float16, not {query.dtype}"
    if softcap is not None:
        return "they know no softcap of the scores"
    if query.shape[2] > _WIDEST_HEAD or value.shape[2] != query.shape[2] or query.shape[2] % 8:
        return f"heads of {query.shape[2]} and {value.shape[2]} numbers"
    return _layout_obstacle(segments, query.shape[1], window)


@lru_cache(maxsize=64)
def _layout_obstacle(segments: Bounds, tokens: int, window: int | None) -> str:
    if segments[::4] != (0, *segments[1::4])[: len(segments) // 4] or (segments or (0, 0))[-3] != tokens:
        return "the segments do not lie one behind the other"
    if window is not None and any(
        prefix and prefix + stop - start > window
        for start, stop, prefix in zip(segments[::4], segments[1::4], _prefixes(segments), strict=True)
    ):
        return "a window ends inside a shared prefix"
    return ""


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Bounds, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """
    Output and log-sum-exps of `segment_attention`, which see.

    Args:
        query, key, value: `[A, N, D]`, `[K, N, D]`, `[K, N, D]` bf16 or fp16.
        segments, scale, window: as there.

    Returns:
        `[N, A, D]`, and fp32 `[A, N]`.
    """
    plan = _plan(segments, query.device)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    out, lse = _forward(query, key, value, plan.own, scale, True, window)
    if plan.prefix is None:
        return out, lse
    more, more_lse = _forward(query, *_prefix_keys(plan, key, value), plan.prefix, scale, False, None)
    return merge_attention(out, lse, more, more_lse, plan.continued)


def merge_attention(
    out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, continued: Tensor
) -> tuple[Tensor, Tensor]:
    """
    One attention over two sets of keys from the attention over each.

    Args:
        out: `[N, A, D]` bf16 or fp16; overwritten.
        lse: `[A, N]` fp32.
        more, more_lse: over the other keys.
        continued: `[N]` bool, the tokens that see other keys; of the rest, `more` and `more_lse` are not read.

    Returns:
        `[N, A, D]`, and fp32 `[A, N]`.
    """
    if out.is_cuda and not why_no_library():
        merged_lse = torch.empty_like(lse)
        torch.ops.fastgrpo.merge_attention.default(out, lse, more, more_lse, continued, merged_lse)
        return out, merged_lse
    more_lse = more_lse.masked_fill(~continued, float("-inf"))
    merged_lse = torch.logaddexp(lse, more_lse)
    share, more_share = ((x - merged_lse).exp().t().unsqueeze(-1) for x in (lse, more_lse))
    more = more.masked_fill(~continued.view(-1, 1, 1), 0)
    return out.copy_(out * share + more * more_share), merged_lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Bounds,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, see `flash_forward`; a prefix gets the sum over all that continue it in fp32."""
    plan = _plan(segments, query.device)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    grad_out = grad_out.contiguous()
    rest = (plan.no_dropout, scale)
    grads = _backward(grad_out, query, key, value, out, lse, plan.own, *rest, True, window)
    if plan.prefix is not None:
        shared = _prefix_keys(plan, key, value)
        more = _backward(grad_out, query, *shared, out, lse, plan.prefix, *rest, False, None)
        grads[0].add_(more[0])
        for grad, extra in zip(grads[1:], more[1:], strict=True):
            grad.index_add_(0, plan.keys, extra)  # no key occurs twice, so the order of additions is fixed
    return tuple(grad.transpose(0, 1) for grad in grads)


def _prefix_keys(plan: _Plan, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key.index_select(0, plan.keys), value.index_select(0, plan.keys)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
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
    return out.contiguous(), lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: _Call,
    no_dropout: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._flash_attention_backward.default(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
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


def _prefixes(segments: Bounds) -> list[int]:
    return [stop - start for start, stop in zip(segments[2::4], segments[3::4], strict=True)]


@lru_cache(maxsize=64)
def _plan(segments: Bounds, device: torch.device) -> _Plan:
    """The same for every layer of a model and for its backward pass, so made once."""
    bounds = list(zip(*(segments[i::4] for i in range(4)), strict=True))
    lengths = [stop - start for start, stop, *_ in bounds]
    # Segments that follow each other and continue the same prefix are one sequence of queries of the second call.
    runs: list[tuple[range, int]] = []
    continued: list[bool] = []
    for start, stop, *prefix in bounds:
        if start == stop:
            continue
        seen = range(*prefix)
        continued += [len(seen) > 0] * (stop - start)
        if runs and runs[-1][0] == seen:
            runs[-1] = (seen, runs[-1][1] + stop - start)
        else:
            runs.append((seen, stop - start))
    prefixes = [len(seen) for seen, _ in runs]
    return _Plan(
        own=_call(lengths, lengths, device),
        prefix=_call([count for _, count in runs], prefixes, device) if any(prefixes) else None,
        continued=torch.tensor(continued, device=device),
        keys=torch.tensor([token for seen, _ in runs for token in seen], dtype=torch.int64, device=device),
        no_dropout=torch.zeros(2, dtype=torch.uint64, device=device),
    )


def _call(queries: list[int], keys: list[int], device: torch.device) -> _Call:
    bounds = [torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32) for lengths in (queries, keys)]
    return _Call(*bounds, max(queries), max(keys))
