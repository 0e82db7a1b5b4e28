"""Bytes that the layers of a model keep for their backward, and need during it, found by running them without numbers.

Two decoder layers run forward and backward on fake tensors (shapes and dtypes, no memory), with the model's own code, its
adapter, autocast and checkpointing, while every storage is followed from birth to death. Layers are alike, so one against two
gives what a layer costs. Attention is counted as a flash kernel keeps it: queries, keys, values, output, log-sum-exp.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

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
    """

    kept: int
    working: int


def trace(
    model: nn.Module,
    layers: nn.ModuleList,
    *,
    rows: int,
    length: int,
    hidden: int,
    dtype: torch.dtype,
    autocast: bool,
    checkpointing: bool,
) -> Activations:
    """
    Follows the memory of a micro-batch.

    Args:
        model: on the meta device; changed in place, and of no use afterwards.
        layers: its decoder layers, at least two.
        rows, length: of the micro-batch.
        hidden: H.
        dtype: of the inputs of the first layer.
        autocast: products in bfloat16.
        checkpointing: gradient checkpointing.

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
    runs = []
    with FakeTensorMode():
        for number in (1, 2):
            del layers[:]
            layers.extend(two[:number])
            _make_fake(decoder)
            runs.append(_run(decoder, rows, length, hidden, dtype, autocast))
    (kept_one, working_one), (kept_two, working_two) = runs
    # The first layer's input is made outside of what is followed: one layer's input more.
    first_input = rows * length * hidden * dtype.itemsize
    return Activations(
        kept=first_input + kept_one + (count - 1) * (kept_two - kept_one),
        working=max(0, working_one, working_two),
    )


def _run(
    decoder: nn.Module, rows: int, length: int, hidden: int, dtype: torch.dtype, autocast: bool
) -> tuple[int, int]:
    live = _Live()
    for tensor in (*decoder.parameters(), *decoder.buffers()):
        live.ignore(tensor)
    inputs = torch.empty(rows, length, hidden, dtype=dtype, requires_grad=True)
    live.ignore(inputs)
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state
        kept = live.now
        live.peak = kept
        output.backward(torch.empty_like(output))
    return kept, live.peak - kept


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
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
