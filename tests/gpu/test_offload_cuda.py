"""`offload_activations` on a CUDA device: the same bits, less memory, whatever the copies' timing."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("trl", reason="TRL is not installed")

from test_parts import gradients
from tiny import tiny_trainer

import fastgrpo
from fastgrpo.trl.offload import CudaTransfers, Offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LAYERS, ROWS, WIDTH = 16, 4096, 2048
ACTIVATION = ROWS * WIDTH * 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.silu(self.up(hidden)))


def stack() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Block() for _ in range(LAYERS)).to("cuda", torch.bfloat16)
    return model, torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def run(model: torch.nn.Module, inputs: torch.Tensor, offload: Offload | None) -> tuple[list[torch.Tensor], int, int]:
    """Gradients, bytes that the forward left, and the most at once."""
    model.zero_grad()
    inputs.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def forward() -> torch.Tensor:
        hidden = inputs
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden.float().square().mean()

    if offload is None:
        loss = forward()
    else:
        with offload.saving(model):
            loss = forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    found = [inputs.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]
    return found, kept, torch.cuda.max_memory_allocated() - before


def test_gradients_are_the_same_bits_and_layer_inputs_leave_the_device():
    model, inputs = stack()
    stock, kept, _ = run(model, inputs, None)
    again, _, _ = run(model, inputs, None)
    assert all(torch.equal(first, second) for first, second in zip(stock, again, strict=True))
    offload = Offload()
    for _ in range(3):
        ours, left, _ = run(model, inputs, offload)
        assert all(torch.equal(first, second) for first, second in zip(stock, ours, strict=True))
        assert left < kept - (LAYERS - 4) * ACTIVATION, (left, kept)


class Late(CudaTransfers):
    """Every copy begins long after it was asked for."""

    def _copy(self, source, target, on_device):
        side = self._streams.setdefault(on_device.device, torch.cuda.Stream(on_device.device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(5_000_000)
        return super()._copy(source, target, on_device)


def test_late_copies_change_nothing():
    model, inputs = stack()
    stock, _, _ = run(model, inputs, None)
    late = Offload(Late())
    for _ in range(3):
        ours, _, _ = run(model, inputs, late)
        assert all(torch.equal(first, second) for first, second in zip(stock, ours, strict=True))


def test_a_graph_that_is_dropped_half_way_leaves_no_copy_behind():
    model, inputs = stack()
    stock, _, _ = run(model, inputs, None)
    offload = Offload(Late())
    with offload.saving(model):
        hidden = inputs
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
    del hidden
    # Memory that copies still write to, were they not waited for.
    ours, _, _ = run(model, inputs, None)
    assert all(torch.equal(first, second) for first, second in zip(stock, ours, strict=True))


@pytest.mark.parametrize("options", [{}, {"mini_batch_size": 3}, {"packing": "left"}])
def test_a_trainer_s_gradients_are_the_same_bits(options, tmp_path):
    trainer = tiny_trainer(tmp_path, model="qwen3", use_cpu=False, bf16=True, gradient_checkpointing=True)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.model.train()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with fastgrpo.patch(trainer, fastgrpo.Options(**options)):
            stock = gradients(trainer)
        with fastgrpo.patch(trainer, fastgrpo.Options(offload_activations=True, **options)):
            method = trainer._get_per_token_logps_and_entropies
            assert isinstance(method.offload, Offload)
            method.offload.smallest = 2000
            ours = gradients(trainer)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, second) for first, second in zip(stock, ours, strict=True))
