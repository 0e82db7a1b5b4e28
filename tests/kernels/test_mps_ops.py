"""The reference path runs on MPS: every aten op it calls has an MPS kernel in this torch, and nothing is float64.

No Apple machine is needed: the ops are recorded on a CPU and looked up in the dispatch tables torch ships.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastgrpo.ops as ops
from fastgrpo import Objective, left_pack, linear_grpo_loss, linear_logprob

WORKS_ANYWHERE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


@functools.cache
def dispatch_tables() -> dict[str, dict]:
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    entries = yaml.safe_load(path.read_text())
    return {entry["func"].split("(")[0]: entry for entry in entries}


def runs_on_mps(name: str) -> bool:
    table = dispatch_tables()
    entry = table[name.removeprefix("aten::")]
    if "structured_delegate" in entry:
        entry = table[entry["structured_delegate"]]
    keys = {
        key.strip() for group in entry.get("dispatch", {"CompositeImplicitAutograd": ""}) for key in group.split(",")
    }
    return "MPS" in keys or bool(keys & set(WORKS_ANYWHERE))


class Recorder(TorchDispatchMode):
    """Collects the names of aten ops, and the dtypes of all tensors they return."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.names.add(func.name())
        self.dtypes |= {x.dtype for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


@pytest.fixture
def transparent_ops(monkeypatch):
    """Lets a recorder see into the custom ops: their implementations are called as plain functions."""
    for name in ("linear_logprob_op", "linear_logprob_backward_op", "linear_grpo_op"):
        monkeypatch.setattr(ops, name, getattr(ops, name)._init_fn)
    import fastgrpo.head as head

    monkeypatch.setattr(head, "run_linear_logprob", ops.linear_logprob_op)
    monkeypatch.setattr(head, "run_linear_grpo", ops.linear_grpo_op)


def assert_mps_has_all(recorder: Recorder) -> None:
    missing = sorted(name for name in recorder.names if not runs_on_mps(name))
    assert not missing, f"no MPS kernel for {missing}"
    assert len(recorder.names) > 3
    assert torch.float64 not in recorder.dtypes


def test_the_lookup_knows_ops_that_mps_lacks():
    assert runs_on_mps("aten::mm") and runs_on_mps("aten::exp_")
    assert not runs_on_mps("aten::linalg_eig")


@pytest.mark.parametrize(("softcap", "trained"), list(itertools.product([None, 3.0], [True, False])))
def test_linear_logprob_uses_only_ops_that_mps_has(softcap, trained, transparent_ops):
    hidden, weight, bias = torch.randn(9, 8), torch.randn(21, 8), torch.randn(21)
    targets = torch.randint(-1, 21, (9,))
    recorder = Recorder()
    with recorder, torch.no_grad():
        head = (0.9, 1.1, softcap, 4, torch.float32)
        slopes = not trained
        logprobs, entropy, lse, *_ = ops.linear_logprob_op(hidden, weight, targets, bias, *head, True, slopes, slopes)
        grads = torch.randn(9), torch.randn(9)
        ops.linear_logprob_backward_op(
            *grads, hidden, weight, targets, bias, logprobs, entropy, lse, *head, True, trained, trained
        )
    assert_mps_has_all(recorder)


@pytest.mark.parametrize("frozen", [True, False])
def test_autograd_around_the_op_uses_only_ops_that_mps_has(frozen):
    hidden = torch.randn(9, 8, requires_grad=True)
    weight = torch.randn(21, 8, requires_grad=not frozen)
    recorder = Recorder()
    with recorder:
        out = linear_logprob(hidden, weight, torch.randint(-1, 21, (9,), dtype=torch.int32), return_entropy=True)
        (out.logprobs.sum() + out.entropy.sum()).backward()
    assert_mps_has_all(recorder)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo", "vespo"])
def test_linear_grpo_loss_uses_only_ops_that_mps_has(loss_type, transparent_ops):
    segments = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    objective = Objective(loss_type=loss_type, beta=0.1, delta=4.0, entropy_coef=0.01)
    recorder = Recorder()
    with recorder, torch.no_grad():
        linear_grpo_loss(
            torch.randn(9, 8),
            torch.randn(21, 8),
            torch.randint(0, 21, (9,)),
            segments,
            torch.randn(3),
            objective,
            ref_logprobs=torch.randn(9),
            sampler_ratio=torch.rand(9),
        )
    assert_mps_has_all(recorder)


def test_left_packing_uses_only_ops_that_mps_has():
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]])
    recorder = Recorder()
    with recorder:
        packed = left_pack(torch.randint(0, 9, (2, 4)), mask)
        packed.restore(torch.randn(packed.input_ids.shape))
    assert_mps_has_all(recorder)
