"""A loader is followed where all it does is copy, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastgrpo.rollout.direct_write import DirectWrite


class Engine(nn.Module):
    """As in vLLM: q and k are one matrix, `part` is one half of a larger tensor, the dtype is its own."""

    def __init__(self, twist=None):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
        self.part = nn.Parameter(torch.zeros(3, 4))
        self.twist = twist
        self.loads = 0

    def load_weights(self, weights):
        for name, weight in weights:
            self.loads += 1
            if name == "k" and self.twist is not None:
                self.twist(self, weight)
            elif name in ("q", "k"):
                self.qk.data.narrow(0, 0 if name == "q" else 2, weight.shape[0]).copy_(weight)
            elif name == "part":
                weight = weight.narrow(0, 3, 3)
                self.part.data.copy_(weight)

    @property
    def held(self):
        return {"q": self.qk[:2], "k": self.qk[2:], "part": self.part}


def weights(seed, names=("q", "k", "part")):
    torch.manual_seed(seed)
    values = {"q": torch.randn(2, 4), "k": torch.randn(4, 4), "part": torch.randn(6, 4)}
    for name in names:
        yield name, values[name] + 0  # nobody else holds it


def agrees(engine, seed, names=("q", "k", "part")):
    for name, weight in weights(seed):
        if name in names:
            expected = (weight[3:] if name == "part" else weight).to(engine.held[name].dtype)
            assert torch.equal(engine.held[name], expected), name


def test_what_was_copied_once_is_copied_again_without_the_loader():
    engine = Engine()
    write = DirectWrite(engine, engine.load_weights)
    write(weights(1))
    assert engine.loads == 3
    write(weights(2))
    agrees(engine, 2)
    write(weights(3, ("k",)))
    agrees(engine, 3, ("k",))
    agrees(engine, 2, ("q", "part"))
    assert engine.loads == 3


def test_unknown_names_transposed_tensors_and_other_shapes_go_through_the_loader():
    engine = Engine()
    write = DirectWrite(engine, engine.load_weights)
    write(weights(1, ("q", "part")))
    write(weights(2))
    agrees(engine, 2)
    assert engine.loads == 3
    torch.manual_seed(9)
    part = torch.randn(4, 6).T
    write([("part", part)])
    assert engine.loads == 4 and torch.equal(engine.part, part[3:])
    write([("part", torch.ones(7, 4))])
    assert engine.loads == 5


@pytest.mark.parametrize(
    "twist",
    [
        lambda engine, weight: engine.qk.data[2:].copy_(weight.to(torch.bfloat16)),
        lambda engine, weight: engine.qk.data[2:].copy_(weight).add_(0),
        lambda engine, weight: engine.qk.data[2:].copy_(weight * 1),
    ],
    ids=["of a converted tensor", "and changed afterwards", "of a product"],
)
def test_a_parameter_to_which_the_loader_does_more_than_copy_always_goes_through_it(twist):
    engine = Engine(twist)
    write = DirectWrite(engine, engine.load_weights)
    for seed in (1, 2):
        write(weights(seed))
        agrees(engine, seed)
    assert engine.loads == 3 + 2  # q and k, which are one parameter


def test_a_parameter_that_has_moved_is_found_again():
    engine = Engine()
    write = DirectWrite(engine, engine.load_weights)
    write(weights(1))
    engine.qk = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    write(weights(2))
    agrees(engine, 2)
    assert engine.loads == 6
    write(weights(3))
    agrees(engine, 3)
    assert engine.loads == 6


def test_a_load_that_breaks_off_teaches_nothing():
    engine = Engine()
    write = DirectWrite(engine, engine.load_weights)

    def breaks():
        yield from weights(1, ("q",))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(breaks())
    write(weights(2))
    agrees(engine, 2)
    assert engine.loads == 4
