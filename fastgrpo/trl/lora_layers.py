"""LoRA layers of a scored model as functions: each by itself, or those of one input together, with copies of their adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from fastgrpo.lora import Adapted, SharedInput, lora_linear, lora_linears
from fastgrpo.trl.one_input import current_input
from fastgrpo.trl.plain_layers import PlainLora, compute_dtype, plain_lora, runs_only_its_forward

Fused = Callable[[Tensor], Tensor]
"""What computes a layer's output. It must not hold the layer, which would never be freed."""


class Adapters:
    """The adapters of one trainer in the dtype of the products, and the functions of their layers."""

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, _Copy] = WeakKeyDictionary()

    def refresh(self) -> None:
        """Copies every adapter again, all in one go; one that has moved, or has another shape, is forgotten."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for owner, copy in list(self._copies.items()):
            if copy.fits():
                sources += copy.sources
                targets += copy.targets
            else:
                del self._copies[owner]
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapters:
        return Adapters()

    def function_of(self, layer: LoraLinear, x: Tensor) -> Fused | None:
        """What computes a layer of an input, that of its neighbours with it where it can; None where its own forward must."""
        inputs = current_input()
        number = None if inputs is None else inputs.number_of(layer)
        if number is not None:
            first = inputs.functions is None
            if first:
                inputs.functions = self._functions(inputs.owner, inputs.layers, x)
            if inputs.functions and (first or inputs.has(number, x)):
                return inputs.functions[number]
        functions = self._functions(layer, (layer,), x)
        return functions[0] if functions else None

    def _functions(self, owner: nn.Module, layers: Sequence[nn.Module | None], x: Tensor) -> Sequence[Fused]:
        """One a layer; none where they cannot be computed, or not together."""
        plain: list[PlainLora] = []
        for layer in layers:
            # Of several, one that is not called as they are would be computed for nothing.
            called = type(layer) is LoraLinear and (len(layers) == 1 or runs_only_its_forward(layer))
            one = plain_lora(layer) if called and not layer.disable_adapters else None
            if one is None or (plain and not _alike(one, plain[0])):
                return ()
            plain.append(one)
        dtype = compute_dtype(x, *[part for one in plain for part in (one.weight, one.down, one.up)])
        return () if dtype is None else self.copied(owner, plain, dtype).functions

    def copied(self, owner: nn.Module, layers: Sequence[PlainLora], dtype: torch.dtype) -> _Copy:
        """
        Layers of one input, with their adapters in a dtype.

        Args:
            owner: the layer, or the module whose layers they are. The copies live as long as it does.
            layers: with one scale, and one dtype of A and one of B. The A of several are copied in any case, since they stand
                one below the other.
            dtype: of the products.
        """
        copy, key = self._copies.get(owner), (dtype, *map(id, chain.from_iterable(layers)))
        if copy is None or copy.key != key:
            with torch.inference_mode(False), torch.no_grad():
                copy = self._copies[owner] = _Copy.of(layers, dtype, key)
        return copy


def _alike(one: PlainLora, other: PlainLora) -> bool:
    return one.scale == other.scale and one.down.dtype == other.down.dtype and one.up.dtype == other.up.dtype


class _Copy(NamedTuple):
    key: tuple[Any, ...]
    """The dtype, and what everything in `layers` is, by its address."""
    layers: tuple[PlainLora, ...]
    shared: SharedInput
    trained: tuple[Tensor, ...]
    """A and B of each layer, one after the other,"""
    sources: tuple[Tensor, ...]
    """those of them that were copied,"""
    targets: tuple[Tensor, ...]
    """and where to."""
    functions: tuple[Fused, ...]

    @classmethod
    def of(cls, layers: Sequence[PlainLora], dtype: torch.dtype, key: tuple[Any, ...]) -> _Copy:
        downs = [layer.down.to(dtype) for layer in layers]
        stacked = downs[0]
        if len(layers) > 1:
            stacked = torch.cat(downs)
            downs = stacked.split([down.shape[0] for down in downs])
        ups = [layer.up.to(dtype) for layer in layers]
        trained = tuple(part for layer in layers for part in (layer.down, layer.up))
        copies = [part for pair in zip(downs, ups, strict=True) for part in pair]
        copied = [(source, target) for source, target in zip(trained, copies, strict=True) if source is not target]
        adapted = [
            Adapted(layer.weight, layer.bias, down, up, layer.scale)
            for layer, down, up in zip(layers, downs, ups, strict=True)
        ]
        shared = SharedInput.of(adapted, stacked)
        functions: Sequence[Fused] = [lambda x: lora_linears(x, shared, trained)[0]]
        if len(layers) > 1:
            functions = [_Together(shared, trained, number) for number in range(len(layers))]
        sources, targets = zip(*copied, strict=True) if copied else ((), ())
        return cls(key, tuple(layers), shared, trained, sources, targets, tuple(functions))

    def fits(self) -> bool:
        """Whether what was copied is where it was, and as large."""
        for source, target in zip(self.sources, self.targets, strict=True):
            if source.device != target.device or source.shape != target.shape:
                return False
        return True


class _Together(NamedTuple):
    """One of several layers: the first that is called computes all of them, the others take what is theirs."""

    shared: SharedInput
    trained: tuple[Tensor, ...]
    number: int

    def __call__(self, x: Tensor) -> Tensor:
        inputs = current_input()
        if inputs is not None:
            if inputs.empty:
                inputs.keep(self.shared, x, lora_linears(x, self.shared, self.trained))
            out = inputs.take(self.shared, self.number, x)
            if out is not None:
                return out
        place = 2 * self.number
        return lora_linear(x, self.shared.layers[self.number], *self.trained[place : place + 2])
