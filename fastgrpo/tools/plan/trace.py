"""Bytes that the layers of a model keep for their backward, and need during it, found by running them without numbers.

Two decoder layers run forward and backward on fake tensors (shapes and dtypes, no memory), with the model's own code, its
adapter, autocast and checkpointing, while every storage is followed from birth to death. Layers are alike, so one against two
gives what a layer costs. Attention is counted as `fastgrpo.kernels.flash` and torch's flash kernels allocate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "fastgrpo_plan"


@dataclass(frozen=True)
class Activations:
    """
    Bytes of a forward and backward of all layers, the output head left out.

    Attributes:
        kept: alive at the end of the forward.
        working: more than that at the most in the backward.
        a_layer: what one layer has of `kept`.
        casts: alive beside `kept` until the forward ends: copies of weights that autocast made and keeps.
    """

    kept: int
    working: int
    a_layer: int
    casts: int


def trace(
    model: nn.Module,
    layers: nn.ModuleList,
    *,
    rows: int,
    length: int,
    hidden: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    checkpointing: bool,
    continued: int,
    fused_layers: bool,
) -> Activations:
    """
    Follows the memory of a micro-batch.

    Args:
        model: on the meta device; changed in place, and of no use afterwards.
        layers: its decoder layers, at least two.
        rows, length: of the micro-batch.
        hidden: H.
        dtype: of the inputs of the first layer.
        autocast: dtype of the products; None = as the tensors are.
        checkpointing: gradient checkpointing.
        continued: tokens that continue a shared prompt.
        fused_layers: as `fastgrpo.Options.fused_layers`.

    Returns:
        Activations.

    Raises:
        Exception: whatever a model raises that needs values to run.
    """
    count = len(layers)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    decoder = base.get_decoder()
    model.train()
    for module in decoder.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    two = list(layers)[-2:]
    token = _continued.set(continued)
    fused = _fused(model) if fused_layers else nullcontext()
    try:
        with FakeTensorMode(), fused:
            runs = []
            for number in (1, 2):
                del layers[:]
                layers.extend(two[:number])
                _make_fake(decoder)
                runs.append(_run(decoder, rows, length, hidden, dtype, autocast))
    finally:
        _continued.reset(token)
    one, two_ = runs
    more = [b - a for a, b in zip(one, two_, strict=True)]
    # The first layer's input is made outside of what is followed: one layer's input more.
    first_input = rows * length * hidden * dtype.itemsize
    return Activations(
        kept=first_input + one.kept + (count - 1) * more[0],
        working=max(0, one.working, two_.working),
        a_layer=more[0],
        casts=one.casts + (count - 1) * more[2],
    )


class _Followed(NamedTuple):
    kept: int
    working: int
    casts: int


def _run(
    decoder: nn.Module, rows: int, length: int, hidden: int, dtype: torch.dtype, autocast: torch.dtype | None
) -> _Followed:
    live = _Live()
    for tensor in (*decoder.parameters(), *decoder.buffers()):
        live.ignore(tensor)
    inputs = torch.empty(rows, length, hidden, dtype=dtype, requires_grad=True)
    live.ignore(inputs)
    with live:
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            output = decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state
            in_autocast = live.now
        kept = live.now
        live.peak = kept
        output.backward(torch.empty_like(output))
    return _Followed(kept, live.peak - kept, in_autocast - kept)


@contextmanager
def _fused(model: nn.Module) -> Iterator[None]:
    """While inside, layers run as one function each, as they do in a patched trainer."""
    from fastgrpo.trl.layers import FusedLayers, layers_installed

    with layers_installed([model]), FusedLayers(enabled=True, rms_norm=_rms_norm).in_use():
        yield


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, epsilon: float) -> tuple[Tensor]:
    """As torch's CUDA kernel has it: the input and a number a row are saved. On a CPU it is many ops."""
    return (_Norm.apply(x, weight),)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


def _make_fake(decoder: nn.Module) -> None:
    """Fresh fake tensors for all parameters; their gradients are dropped as they come, since they are counted elsewhere."""
    for module in decoder.modules():
        for name, value in module._parameters.items():
            if value is not None:
                fresh = nn.Parameter(torch.empty(value.shape, dtype=value.dtype), requires_grad=value.requires_grad)
                if fresh.requires_grad:
                    fresh.register_post_accumulate_grad_hook(_drop_gradient)
                module._parameters[name] = fresh
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Live(TorchDispatchMode):
    """Bytes of the storages alive now, and at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._follow(value, value.untyped_storage().nbytes())
        return result

    def ignore(self, tensor: Tensor) -> None:
        self._follow(tensor, 0)

    def _follow(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._seen[key]
        self.now -= size


_continued: ContextVar[int] = ContextVar("fastgrpo_plan_continued", default=0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, length, _ = query.shape
        output = query.new_empty(rows, length, heads, value.shape[-1])
        logsumexp = query.new_empty(rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        _flash_backward(query, grad.new_empty, query.shape[0] * query.shape[2])
        if _continued.get():
            # The second call, over all tokens and the keys of prompts, has its own gradient of queries.
            second = torch.empty_like(query)
            _flash_backward(query, grad.new_empty, query.shape[0] * query.shape[2])
            del second
        return grads


def _flash_backward(query: Tensor, new_empty: Callable[..., Tensor], tokens: int) -> None:
    """Torch's kernel sums the gradient of queries in float32, and has those of keys and values once a query head."""
    shape = (tokens, query.shape[1], query.shape[3])
    _ = new_empty(shape, dtype=torch.float32), new_empty(shape), new_empty(shape)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    return _Attention.apply(query, key, value), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
