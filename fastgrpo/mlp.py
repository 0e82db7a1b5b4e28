"""The gated MLP of a transformer (SwiGLU, Shazeer 2020, eq. 6) as one function: `y = down(silu(gate(x)) * up(x))`.

Its three linear layers are frozen, with or without a low-rank adapter each; their products are those of `fastgrpo.lora`. Run
one by one they have seven matrices `[N, I]` alive at once in their backward pass, with I, the width between them, 3 to 5 times
that of x: gate, silu(gate), up, their product, and gradients. Here it is three blocks of rows `[n, I]`, since every row is by
itself:

    forward     block by block: gate and up; the product over gate; y
    backward    block by block: the product's gradient; gate's, up's and the product itself in their places; dx, dA and dB

What is saved depends on who would keep it. Inside a checkpoint (`torch.utils.checkpoint`, not reentrant) it is x alone, before
anything is computed: where no more is saved after it, a checkpoint's second forward ends there, so the MLP is not computed for
nothing, and the backward pass computes gate and up once more. That is eight products of N rows where the layers one by one have
nine: three forward, the same in the second forward, three backward. Elsewhere gate and up are saved. What is saved is never
written to, so a graph may be used twice.

Numbers are rounded to the products' dtype after each product and sum, as those of the layers one by one, but silu(gate) is not.
dA and dB are summed over blocks in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgrpo.checks import refuse_second_derivatives
from fastgrpo.chunking import MIB, TILE
from fastgrpo.lora import Adapted, _product, _scaled_product, require_unchanged
from fastgrpo.swiglu import swiglu, swiglu_grad

# Of an [n, I] block. Products of fewer rows would be slower: at I = 14336 in 16 bit these are 4096 or more.
_BLOCK_BYTES = 128 * MIB


class Frozen(NamedTuple):
    """A frozen linear layer."""

    weight: Tensor
    """W, `[M, K]`."""
    bias: Tensor | None
    """b, `[M]`."""


class GatedMlp(NamedTuple):
    """The three layers, and the dtype of their products; that of the adapters in it."""

    gate: Adapted | Frozen
    up: Adapted | Frozen
    down: Adapted | Frozen
    dtype: torch.dtype


def gated_mlp(x: Tensor, mlp: GatedMlp, trained: Sequence[Tensor | None]) -> Tensor:
    """
    A gated MLP and the adapters of its layers.

    Args:
        x: `[..., H]`.
        mlp: the tensors of the products; they get no gradient.
        trained: A and B of gate, up and down as they are trained, six in all; None for those of a layer without adapter.

    Returns:
        `[..., M]` in the products' dtype. Differentiable once in x and what is trained, whose gradients have their dtypes.

    Raises:
        RuntimeError: in the backward pass, where a second derivative is asked for, or a weight was changed since.
    """
    rows = x.detach().reshape(-1, x.shape[-1]).to(mlp.dtype)
    if torch.is_grad_enabled():
        in_checkpoint = _in_checkpoint()
        out = _GatedMlp.apply(x, rows, mlp, in_checkpoint, *trained)
        if in_checkpoint:
            # After what is saved has been saved: in a second forward, the checkpoint may have ended it by now.
            with torch.no_grad():
                _forward(rows, mlp, out)
    else:
        out = _empty_output(rows, mlp)
        _forward(rows, mlp, out)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


def _in_checkpoint() -> bool:
    """Whether what is saved now is thrown away, and computed again when it is needed."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


class _Saved(NamedTuple):
    """What the backward pass is given; all but x is None where x is saved alone."""

    rows: Tensor | None
    """x, `[N, H]`; None where nothing needs it."""
    gate: Tensor | None = None
    """`[N, I]`, and so is up."""
    up: Tensor | None = None
    hidden_gate: Tensor | None = None
    """Of gate's adapter, `s x A^T`, `[N, r]`; None without one."""
    hidden_up: Tensor | None = None


def _forward(rows: Tensor, mlp: GatedMlp, out: Tensor, save: bool = False) -> _Saved:
    """Fills `out`, y. With `save`, gate and up are made as a whole, and are returned."""
    gate, up, down = _in_dtype(mlp)
    blocks = _blocks(rows.shape[0], gate.weight)
    width, most = gate.weight.shape[0], blocks[0].stop
    hidden_gate, hidden_up = _hidden(rows, gate), _hidden(rows, up)
    whole = [rows.new_empty(rows.shape[0] if save else most, width) for _ in range(2)]
    product = rows.new_empty(most, width) if save else whole[0]
    for block in blocks:
        first = slice(0, block.stop - block.start)
        new_gate, new_up = (_part(x, block if save else first) for x in whole)
        new_product, x = _part(product, first), _part(rows, block)
        _project(x, _part(hidden_gate, block), gate, new_gate)
        _project(x, _part(hidden_up, block), up, new_up)
        swiglu(new_gate, new_up, new_product)
        _project(new_product, _hidden(new_product, down), down, _part(out, block))
    adapted = hidden_gate is not None or hidden_up is not None
    return _Saved(rows if adapted else None, *whole, hidden_gate, hidden_up)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, mlp, x_alone, *trained):
        out = _empty_output(rows, mlp)
        ctx.save_for_backward(*(_Saved(rows) if x_alone else _forward(rows, mlp, out, save=True)))
        # Not saved as those: whoever hooks into saved tensors, gradient checkpointing for one, would pay for each.
        ctx.mlp, ctx.trained = mlp, trained
        ctx.weights = [x for x in (*(layer.weight for layer in mlp[:3]), *trained) if x is not None]
        ctx.versions = [x._version for x in ctx.weights]
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return out

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivatives("fastgrpo's gated MLP, there because of Options(fused_layers=True),")
        require_unchanged(ctx.weights, ctx.versions)
        sums = [_Sum() if needed else None for needed in ctx.needs_input_grad[4:]]
        grad_rows = _backward(
            grad.reshape(-1, grad.shape[-1]), _Saved(*ctx.saved_tensors), ctx.mlp, sums, ctx.needs_input_grad[0]
        )
        if grad_rows is not None:
            grad_rows = grad_rows.view(ctx.shape).to(ctx.dtype)
        trained = (None if sum_ is None else sum_.total.to(x.dtype) for sum_, x in zip(sums, ctx.trained, strict=True))
        return grad_rows, None, None, None, *trained


class _Sum:
    """A product's sum over blocks of rows, in fp32 where the factors are in 16 bit."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Adds `a @ b`."""
        product = _product(a, b, torch.promote_types(a.dtype, torch.float32))
        self.total = product if self.total is None else self.total.add_(product)


def _backward(
    grad: Tensor, saved: _Saved, mlp: GatedMlp, sums: Sequence[_Sum | None], needs_rows: bool
) -> Tensor | None:
    """dx, `[N, H]`, where needed; the sums, of A and B of gate, up and down, receive what theirs get."""
    gate, up, down = _in_dtype(mlp)
    rows, whole_gate, whole_up, hidden_gate, hidden_up = saved
    if whole_gate is None:
        hidden_gate, hidden_up = _hidden(rows, gate), _hidden(rows, up)
    blocks = _blocks(grad.shape[0], gate.weight)
    buffers = [grad.new_empty(blocks[0].stop, gate.weight.shape[0]) for _ in range(3)]
    grad_rows = grad.new_empty(grad.shape[0], gate.weight.shape[1]) if needs_rows else None
    for block in blocks:
        first = slice(0, block.stop - block.start)
        grad_gate, grad_up, product = (_part(buffer, first) for buffer in buffers)
        x, grad_y = _part(rows, block), _part(grad, block)
        hidden = _part(hidden_gate, block), _part(hidden_up, block)
        if whole_gate is None:
            old_gate, old_up = grad_gate, grad_up
            _project(x, hidden[0], gate, old_gate)
            _project(x, hidden[1], up, old_up)
        else:
            old_gate, old_up = _part(whole_gate, block), _part(whole_up, block)
        narrow = _narrow(grad_y, down)
        _sum_products([(narrow, grad_y, down)], product)
        trains = sums[4] is not None or sums[5] is not None
        swiglu_grad(old_gate, old_up, product, grad_gate, grad_up, product if trains else None)
        if trains:
            _add_adapter(sums[4:], narrow, product, grad_y, _hidden(product, down))
        parts = []
        for number, (layer, grad_layer) in enumerate(((gate, grad_gate), (up, grad_up))):
            narrow = _narrow(grad_layer, layer)
            parts.append((narrow, grad_layer, layer))
            _add_adapter(sums[2 * number : 2 * number + 2], narrow, x, grad_layer, hidden[number])
        if grad_rows is not None:
            _sum_products(parts, _part(grad_rows, block))
    return grad_rows


def _add_adapter(
    sums: Sequence[_Sum | None], narrow: Tensor | None, x: Tensor | None, grad: Tensor, hidden: Tensor | None
) -> None:
    """Adds to dA and dB of a layer: `g^T x` and `dy^T h`."""
    of_down, of_up = sums
    if of_down is not None:
        of_down.add(narrow.t(), x)
    if of_up is not None:
        of_up.add(grad.t(), hidden)


def _sum_products(parts: Sequence[tuple[Tensor | None, Tensor, Adapted | Frozen]], out: Tensor) -> None:
    """Writes what x gets from its layers, `g A + dy W` of each; the small ones first."""
    factors = [(narrow, layer.down) for narrow, _, layer in parts if narrow is not None]
    factors += [(grad, layer.weight) for _, grad, layer in parts]
    torch.mm(*factors[0], out=out)
    for a, b in factors[1:]:
        out.addmm_(a, b)


def _project(rows: Tensor, hidden: Tensor | None, layer: Adapted | Frozen, out: Tensor) -> None:
    """Writes `x W^T + b + h B^T`."""
    if layer.bias is None:
        torch.mm(rows, layer.weight.t(), out=out)
    else:
        torch.addmm(layer.bias, rows, layer.weight.t(), out=out)
    if hidden is not None:
        out.addmm_(hidden, layer.up.t())


def _hidden(rows: Tensor, layer: Adapted | Frozen) -> Tensor | None:
    """h, `s x A^T`."""
    return _scaled_product(rows, layer.down.t(), layer.scale) if isinstance(layer, Adapted) else None


def _narrow(grad: Tensor, layer: Adapted | Frozen) -> Tensor | None:
    """g, `s dy B`."""
    return _scaled_product(grad, layer.up, layer.scale) if isinstance(layer, Adapted) else None


def _part(rows: Tensor | None, block: slice) -> Tensor | None:
    # A view costs the host as much as a small kernel, and mostly all rows are one block.
    return rows if rows is None or block == slice(0, rows.shape[0]) else rows[block]


def _in_dtype(mlp: GatedMlp) -> Iterator[Adapted | Frozen]:
    """The three layers with weights and biases in the products' dtype."""
    for layer in mlp[:3]:
        if any(x is not None and x.dtype != mlp.dtype for x in layer[:2]):
            weight, bias = (None if x is None else x.to(mlp.dtype) for x in layer[:2])
            layer = layer._replace(weight=weight, bias=bias)
        yield layer


def _empty_output(rows: Tensor, mlp: GatedMlp) -> Tensor:
    return rows.new_empty(rows.shape[0], mlp.down.weight.shape[0])


def _blocks(count: int, weight: Tensor) -> list[slice]:
    """Rows of one block after the other, the first the longest; one where all of them fit."""
    most = max(1, _BLOCK_BYTES // (weight.shape[0] * weight.element_size()))
    size = max(1, -(-count // max(1, -(-count // most))))
    if size < count:
        size = min(count, -(-size // TILE) * TILE)
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]
