"""The gate of a transformer's MLP (SwiGLU, Shazeer 2020, eq. 6): `silu(gate) * up`, and its gradients.

transformers rounds silu(gate) and then the product; here the product is rounded once. A kernel each on CUDA, torch ops
elsewhere. What is written may lie over what is read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastgrpo.kernels.select import why_no_library

_SERVED = (torch.float32, torch.bfloat16, torch.float16)
# Numbers that must make up a whole: two pieces of 16 bytes in float32.
_PIECE = 8


def swiglu(gate: Tensor, up: Tensor, product: Tensor) -> None:
    """
    Writes `silu(gate) * up`.

    Args:
        gate, up, product: of one shape and dtype, contiguous; `product` may be either of the others.
    """
    if isinstance(gate, FakeTensor):  # nothing to write
        return
    if _has_kernels(gate):
        torch.ops.fastgrpo.swiglu.default(gate, up, product)
        return
    g = _wide(gate)
    product.copy_(torch.sigmoid(g).mul_(g).mul_(_wide(up)))


def swiglu_grad(
    gate: Tensor, up: Tensor, grad: Tensor, grad_gate: Tensor, grad_up: Tensor, product: Tensor | None
) -> None:
    """
    Writes what gate and up receive from the gradient of their product, and the product.

    Args:
        gate, up: as they were.
        grad: of the product.
        grad_gate, grad_up: to be written.
        product: to be written, or None. All of one shape and dtype, contiguous; what is written may be what is read, but no
            two of the former the same.
    """
    if isinstance(gate, FakeTensor):
        return
    if _has_kernels(gate):
        torch.ops.fastgrpo.swiglu_grad.default(gate, up, grad, grad_gate, grad_up, product)
        return
    g, u, d = _wide(gate), _wide(up), _wide(grad)
    share = torch.sigmoid(g)
    silu = g * share
    slope = torch.addcmul(share, silu, 1 - share).mul_(u).mul_(d)
    of_up = d * silu
    if product is not None:
        product.copy_(silu.mul_(u))
    grad_gate.copy_(slope)
    grad_up.copy_(of_up)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _SERVED and x.shape[-1] % _PIECE == 0 and not why_no_library()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
