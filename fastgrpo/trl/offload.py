"""`Options.offload_activations`: what a scoring forward keeps for its backward waits in pinned host memory.

With gradient checkpointing that is the input of every layer, and what the output head keeps. Whatever autograd saves outside
a checkpointed layer, a checkpoint's inputs among it, passes through a pair of hooks: it is copied out on a side stream while
the next layers run, and back, one ahead of need, while the backward pass of the layers after it runs. Copies are bit for bit.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from trl import GRPOTrainer

# Smaller ones stay: a copy each would cost more than they hold.
_SMALLEST = 1 << 20
# Tensors on their way out, or just arrived there: the last ones saved are the first ones needed.
_NEAR = 2
_FIRST_SLAB, _LARGEST_SLAB = 64 << 20, 1 << 30
_ALIGNMENT = 512


def offload_obstacle(trainer: GRPOTrainer) -> str:
    """Why activations cannot be offloaded; empty where they can."""
    checkpointed = trainer.args.gradient_checkpointing or any(
        getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules()
    )
    if not checkpointed:
        return "it needs gradient checkpointing, which leaves only inputs of layers to be kept; set gradient_checkpointing=True"
    return ""


class InFlight(Protocol):
    """A tensor on the device that is being copied, out or in."""

    def wait(self) -> Tensor:
        """The tensor; what uses it from here on comes after the copy."""


class Transfers(Protocol):
    """Copies between a device and host memory, in the order they were asked for."""

    device: str
    """Type of the device; tensors elsewhere stay where they are."""

    def out(self, tensor: Tensor, host: Tensor) -> InFlight:
        """A copy to host memory begins; the tensor must live until it is done."""

    def back(self, host: Tensor, device: torch.device) -> InFlight:
        """A copy to the device begins."""


class HostMemory:
    """
    Pinned memory in slabs, which are given back when nothing in them is used any more.

    torch rounds every pinned allocation up to a power of two, which for single tensors may waste nearly half.

    Args:
        pinned: page-locked, which copies that run beside computation need.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned, self._size = pinned, _FIRST_SLAB
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor of the same dtype, shape and strides."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > self._slab.numel():
            while self._size < size:
                self._size *= 2
            self._slab, self._used = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned), 0
            self._size = max(min(2 * self._size, _LARGEST_SLAB), _FIRST_SLAB)
        piece = self._slab[self._used : self._used + size].view(tensor.dtype)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())


class CudaTransfers:
    """Copies on one side stream for each device; memory belongs to the stream that computes."""

    device = "cuda"

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def out(self, tensor: Tensor, host: Tensor) -> InFlight:
        return self._copy(tensor, host, tensor)

    def back(self, host: Tensor, device: torch.device) -> InFlight:
        tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        return self._copy(host, tensor, tensor)

    def _copy(self, source: Tensor, target: Tensor, on_device: Tensor) -> InFlight:
        device = on_device.device
        side = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))
        computing = torch.cuda.current_stream(device)
        # What is read must have been written, and what memory was before must be done with.
        side.wait_stream(computing)
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            done = side.record_event()
        return _CudaInFlight(on_device, computing, done)


class _CudaInFlight:
    """Whoever lets go of the tensor makes the stream its memory belongs to wait for the copy."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream, done: torch.cuda.Event) -> None:
        self._tensor, self._stream, self._done = tensor, stream, done

    def wait(self) -> Tensor:
        torch.cuda.current_stream(self._tensor.device).wait_event(self._done)
        return self._tensor

    def __del__(self) -> None:
        self._stream.wait_event(self._done)


class Saved:
    """
    A tensor that autograd saved: near, on the device, or in host memory only.

    Args:
        tensor: as autograd gave it.
        host: memory for it.
        transfers: that take it there.
        number: how many were saved before.
    """

    def __init__(self, tensor: Tensor, host: Tensor, transfers: Transfers, number: int) -> None:
        # An output that held its own graph would never be freed.
        tensor = tensor.detach()
        self.host, self.number, self.device = host, number, tensor.device
        self.near: InFlight | None = transfers.out(tensor, host)
        self._tensor: Tensor | None = tensor
        self._version, self._modified = tensor._version, False

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is this very tensor, or another view of the same elements."""
        own = self._tensor
        return (
            own is not None
            and own.data_ptr() == tensor.data_ptr()
            and own.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and (own.shape, own.stride(), own.dtype, own._version)
            == (tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        )

    def leave(self) -> None:
        """It is in host memory only."""
        self._look()
        self._tensor = self.near = None

    def fetch(self, transfers: Transfers) -> None:
        """It is on its way back, if it is not near."""
        if self.near is None:
            self.near = transfers.back(self.host, self.device)

    def take(self) -> Tensor:
        """The tensor on the device, near no more."""
        self._look()
        if self._modified:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, after it was "
                "saved for the backward pass and before it was in host memory"
            )
        tensor = self.near.wait()
        self._tensor = self.near = None
        return tensor

    def _look(self) -> None:
        # Of a tensor that nobody has any more, nobody can change the elements either.
        if self._tensor is not None and self._tensor._version != self._version:
            self._modified = True


class Shelf:
    """
    What one forward keeps for its backward.

    Args:
        transfers: between device and host memory.
        staying: addresses of storages that stay where they are: of parameters and buffers.
        smallest: bytes below which a tensor stays.
    """

    def __init__(self, transfers: Transfers, staying: set[int], smallest: int = _SMALLEST) -> None:
        self._transfers, self._staying, self._smallest = transfers, staying, smallest
        self._memory = HostMemory(pinned=transfers.device == "cuda")
        self._near: deque[Saved] = deque()
        self._all: list[weakref.ref[Saved]] = []

    def put(self, tensor: Tensor) -> Tensor | Saved:
        """What autograd keeps in place of a tensor."""
        if not self._goes(tensor):
            return tensor
        for saved in self._near:
            if saved.is_of(tensor):
                return saved
        while len(self._near) >= _NEAR:
            self._near.popleft().leave()
        saved = Saved(tensor, self._memory.like(tensor), self._transfers, len(self._all))
        self._near.append(saved)
        self._all.append(weakref.ref(saved))
        return saved

    def take(self, saved: Tensor | Saved) -> Tensor:
        """The tensor again; the one that is needed after it sets out."""
        if isinstance(saved, Tensor):
            return saved
        if saved in self._near:
            self._near.remove(saved)
        saved.fetch(self._transfers)
        tensor = saved.take()
        del self._all[saved.number :]
        while self._all:
            following = self._all[-1]()
            if following is not None:
                following.fetch(self._transfers)
                break
            self._all.pop()
        return tensor

    def _goes(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == self._transfers.device
            and type(tensor) is Tensor
            and tensor.numel() * tensor.element_size() >= self._smallest
            and tensor.layout == torch.strided
            and torch.ops.aten.is_non_overlapping_and_dense(tensor)
            and tensor.untyped_storage().data_ptr() not in self._staying
        )


class Offload:
    """
    Offloading for one trainer.

    Args:
        transfers: between its device and host memory.
        smallest: bytes below which a tensor stays.
    """

    def __init__(self, transfers: Transfers | None = None, smallest: int = _SMALLEST) -> None:
        self.transfers, self.smallest = transfers or CudaTransfers(), smallest

    @contextmanager
    def saving(self, model: torch.nn.Module) -> Iterator[None]:
        """While this is open, what autograd saves goes to host memory; nothing where no gradient is wanted."""
        if not torch.is_grad_enabled():
            yield
            return
        staying = {x.untyped_storage().data_ptr() for x in chain(model.parameters(), model.buffers())}
        shelf = Shelf(self.transfers, staying, self.smallest)
        with saved_tensors_hooks(shelf.put, shelf.take):
            yield

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        return self
