"""`offload_activations`: what waits in host memory comes back bit for bit, and in time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_parts import gradients
from tiny import tiny_trainer
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fastgrpo
from fastgrpo.trl.offload import HostMemory, Offload, Shelf


class Late:
    """A stand-in for copies on a side stream: they happen when somebody waits for them, or lets go of the tensor."""

    device = "cpu"

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun: list[str] = []
        self.pending: list[Copy] = []

    def out(self, tensor, host):
        return self._begin(Copy("out", tensor, host, tensor, self))

    def back(self, host, device):
        target = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype)
        return self._begin(Copy("back", host, target, target, self))

    def _begin(self, copy: Copy) -> Copy:
        self.begun.append(copy.name)
        self.pending.append(weakref.ref(copy))
        return copy


class Copy:
    def __init__(self, kind, source, target, on_device, transfers) -> None:
        self.name = f"{kind} {tuple(source.shape)}"
        self.source, self.target, self.on_device, self.transfers = source, target, on_device, transfers
        self.finished = False

    def finish(self) -> None:
        if not self.finished:
            self.finished = True
            # One after the other, as on a stream.
            while self.transfers.pending:
                before = self.transfers.pending.pop(0)()
                if before is self or before is None:
                    break
                before.finish()
            self.target.copy_(self.source)
            self.transfers.done.append(self.name)

    def wait(self):
        self.finish()
        return self.on_device

    def __del__(self) -> None:
        self.finish()


@pytest.mark.parametrize("options", [{}, {"mini_batch_size": 3}, {"packing": "left"}])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_bit_for_bit_those_without(reentrant, lora, options, tmp_path):
    if reentrant and options.get("mini_batch_size"):
        pytest.skip("refused")
    how = {"use_reentrant": reentrant}
    trainer = tiny_trainer(tmp_path, lora=lora, gradient_checkpointing=True, gradient_checkpointing_kwargs=how)
    trainer.model.gradient_checkpointing_enable(how)
    trainer.model.enable_input_require_grads()
    trainer.model.train()
    with fastgrpo.patch(trainer, fastgrpo.Options(**options)):
        stock = gradients(trainer)
        transfers = Late()
        trainer._get_per_token_logps_and_entropies.offload = Offload(transfers, smallest=2000)
        ours = gradients(trainer)
    assert all(torch.equal(first, second) for first, second in zip(stock, ours, strict=True))
    width = trainer.model.config.hidden_size
    layers = sum("out" in name and name.endswith(f", {width})") for name in transfers.begun)
    parts = 3 if options.get("mini_batch_size") else 1
    # An input a layer, and what follows the last one; more are back than went last.
    assert layers >= parts * (trainer.model.config.num_hidden_layers + 1)
    assert sum("back" in name for name in transfers.begun) >= layers - 2


def test_everything_but_the_last_two_leaves_and_the_next_one_sets_out_early():
    transfers = Late()
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(6)]
    inputs = torch.randn(64, 16, requires_grad=True)

    def run() -> list[torch.Tensor]:
        hidden = inputs
        for weight in weights:
            hidden = checkpoint(lambda hidden, weight: (hidden @ weight).tanh(), hidden, weight, use_reentrant=False)
        return torch.autograd.grad(hidden.square().sum(), [inputs, *weights])

    stock = run()
    shelf = Shelf(transfers, {weight.untyped_storage().data_ptr() for weight in weights}, smallest=1)
    arrived = []

    def take(saved):
        tensor = shelf.take(saved)
        if not isinstance(saved, torch.Tensor):
            arrived.append([name for name in transfers.begun if name.startswith("back")])
        return tensor

    with saved_tensors_hooks(shelf.put, take):
        hidden = inputs
        for weight in weights:
            hidden = checkpoint(lambda hidden, weight: (hidden @ weight).tanh(), hidden, weight, use_reentrant=False)
        loss = hidden.square().sum()
    went = [name for name in transfers.begun if name == "out (64, 16)"]
    # Six inputs of layers, and the last output, of which the hidden state before square is the same tensor.
    assert len(went) == 7 and len(shelf._near) == 2
    ours = torch.autograd.grad(loss, [inputs, *weights])
    assert all(torch.equal(first, second) for first, second in zip(stock, ours, strict=True))
    # Two are near when they are needed; from the second on, the next one is on its way.
    assert [len(names) for names in arrived] == [0, 1, 2, 3, 4, 5, 5]


def shelf_of(**options) -> tuple[Shelf, Late]:
    transfers = Late()
    return Shelf(transfers, **{"staying": set(), "smallest": 100, **options}), transfers


def test_views_come_back_with_their_strides_and_the_same_tensor_goes_once():
    shelf, transfers = shelf_of()
    base = torch.randn(4, 10, 8)
    tensors = [base, base[1:3], base.transpose(0, 2), base[2].to(torch.bfloat16), base > 0]
    saved = [shelf.put(tensor) for tensor in tensors]
    assert shelf.put(tensors[-1]) is saved[-1] and shelf.put(tensors[-1][:]) is saved[-1]
    assert len(transfers.begun) == len(tensors)
    for tensor, handle in zip(reversed(tensors), reversed(saved), strict=True):
        for _ in range(2):  # as with retain_graph=True
            back = shelf.take(handle)
            assert torch.equal(back, tensor)
            assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)


def test_what_is_small_shared_by_all_or_a_parameter_stays():
    weight = torch.nn.Parameter(torch.randn(20, 20))
    shelf, transfers = shelf_of(staying={weight.untyped_storage().data_ptr()})
    overlapping = torch.randn(1, 50).expand(30, 50)
    for tensor in (torch.randn(5), weight, weight.t(), weight.detach()[3:], overlapping, torch.randn(20, 20)[:, ::2]):
        assert shelf.put(tensor) is tensor and shelf.take(tensor) is tensor
    assert not transfers.begun


def test_a_tensor_changed_before_it_has_left_is_an_error_when_it_is_needed():
    shelf, _ = shelf_of()
    tensor = torch.randn(40)
    for leave in (False, True):
        saved = shelf.put(tensor)
        tensor.add_(1)
        if leave:
            for _ in range(2):
                shelf.put(torch.randn(40))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            shelf.take(saved)


def test_a_graph_that_is_dropped_leaves_nothing():
    transfers = Late()
    inputs = torch.randn(30, 30, requires_grad=True)
    offload = Offload(transfers, smallest=1)
    with offload.saving(torch.nn.Linear(2, 2)):
        hidden = inputs
        for _ in range(5):
            hidden = hidden.tanh()
    left = weakref.ref(hidden)
    del hidden
    gc.collect()
    assert left() is None
    assert all(copy() is None for copy in transfers.pending)


def test_without_a_gradient_nothing_is_saved():
    transfers = Late()
    with torch.no_grad(), Offload(transfers, smallest=1).saving(torch.nn.Linear(2, 2)):
        torch.randn(9, 9, requires_grad=True).tanh()
    assert not transfers.begun


def test_host_memory_is_cut_from_slabs_that_are_given_back():
    memory = HostMemory(pinned=False)
    tensors = [torch.randn(1000, 700), torch.randn(3, 5).t(), torch.randn(7).to(torch.bfloat16), torch.randn(9) > 0]
    pieces = [memory.like(tensor) for tensor in tensors]
    for piece, tensor in zip(pieces, tensors, strict=True):
        piece.copy_(tensor)
    for piece, tensor in zip(pieces, tensors, strict=True):
        assert torch.equal(piece, tensor) and piece.stride() == tensor.stride()
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    assert pieces[0].untyped_storage().nbytes() == 64 << 20
    large = memory.like(torch.empty(70 << 20, dtype=torch.uint8))
    assert large.untyped_storage().nbytes() == 128 << 20
    slab = weakref.ref(pieces[0].untyped_storage())
    del pieces, piece
    assert slab() is None


def test_it_needs_gradient_checkpointing(tmp_path):
    trainer = tiny_trainer(tmp_path)
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match=r"offload_activations=True is not possible: it needs gradient checkpointing"):
        fastgrpo.patch(trainer, fastgrpo.Options(offload_activations=True))
    assert trainer.__dict__ == before


def test_on_a_cpu_nothing_changes_and_that_is_said(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, gradient_checkpointing=True)
    with fastgrpo.patch(trainer, fastgrpo.Options(offload_activations=True)):
        assert trainer._get_per_token_logps_and_entropies.offload is None
    assert "offload_activations=True changes nothing on cpu" in caplog.text


def test_it_is_on_or_off():
    with pytest.raises(ValueError, match="offload_activations is 1; it must be True or False"):
        fastgrpo.Options(offload_activations=1)
