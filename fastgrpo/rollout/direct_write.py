"""Writing into an engine's parameters as its own loader did once, without the loader.

For every tensor, vLLM's `load_weights` finds out by its name where it belongs: a part of a fused matrix, this rank's part of
that. For a matrix it takes a quarter of a millisecond of Python, several times what the copy takes. It ends in copies of (parts
of) the tensor into (parts of) parameters, always the same ones: here they are recorded once, and later repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class _Copy(NamedTuple):
    target: Tensor
    """A view of a parameter."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Of the part that is copied, in the whole tensor."""


class DirectWrite:
    """
    A loader of a model's weights that learns from its first call.

    Args:
        model: whose parameters are written.
        load: loads whole tensors by name.
    """

    def __init__(self, model: nn.Module, load: Callable[[Iterable[tuple[str, Tensor]]], Any]) -> None:
        self.model, self.load = model, load
        self._copies: dict[str, list[_Copy]] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._learns = True

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """
        Writes tensors.

        What the loader has copied from a tensor of that name is copied again. Other names, and parameters to which the loader
        does more than that, go through the loader; so does everything where a parameter has moved since.

        Args:
            weights: (name, whole tensor).
        """
        if self._copies and self._moved():
            self._copies = {}
        if not self._copies and self._learns:
            self._learn(weights)
            return
        unknown = self._write_known(weights)
        first = next(unknown, None)
        if first is not None:
            self.load(chain([first], unknown))

    def _learn(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        recorder = _Recorder()
        with recorder:
            self.load(recorder.watch(weights))
        writable = self._storages() - recorder.else_written
        self._copies = {
            name: copies
            for name, copies in recorder.copies.items()
            if all(_storage(copy.target) in writable for copy in copies)
        }
        self._shapes = recorder.shapes
        self._learns = bool(self._copies)

    def _write_known(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Writes what it knows how to; the rest comes out."""
        for name, weight in weights:
            if name not in self._copies or weight.shape != self._shapes[name] or not weight.is_contiguous():
                yield name, weight
                continue
            with torch.no_grad():
                for target, size, stride, offset in self._copies[name]:
                    target.copy_(weight.as_strided(size, stride, weight.storage_offset() + offset))

    def _moved(self) -> bool:
        storages = self._storages()
        return any(_storage(copy.target) not in storages for copies in self._copies.values() for copy in copies)

    def _storages(self) -> set[int]:
        return {_storage(parameter) for parameter in self.model.parameters()}


class _Recorder(TorchDispatchMode):
    """Sees where tensors on their way through a loader are copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[str, list[_Copy]] = {}
        self.else_written: set[int] = set()
        """Storages that were written in another way than by copies of watched tensors."""
        self.shapes: dict[str, torch.Size] = {}
        self._watched: dict[int, tuple[StorageWeakRef, str, int]] = {}

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            self.shapes[name] = weight.shape
            alive = StorageWeakRef(weight.untyped_storage())
            self._watched[_storage(weight)] = alive, name, weight.storage_offset()
            yield name, weight

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any) -> None:
        found = self._watched.get(_storage(args[1])) if func is torch.ops.aten.copy_.default else None
        # What was freed may be something else's memory by now.
        if found is None or found[0].expired():
            self.else_written |= {_storage(arg) for arg in args if isinstance(arg, Tensor)}
            return
        target, source = args[:2]
        _, name, start = found
        part = _Copy(target, tuple(source.shape), source.stride(), source.storage_offset() - start)
        self.copies.setdefault(name, []).append(part)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
