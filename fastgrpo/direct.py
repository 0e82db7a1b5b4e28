"""Custom ops called as plain functions: `torch.library` takes about half a millisecond a call, which only tracing needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Types that are no tensor subclasses, known at a glance; the others are looked at, which takes longer.
_PLAIN = {Tensor, torch.nn.Parameter, torch.dtype, type(None), bool, float, int, str, list}


def with_autograd(
    op: Any,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    direct: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    one_gradient: bool = False,
) -> Callable[..., Any]:
    """
    Registers the autograd of a custom op, and returns how to call the op with the least work.

    Args:
        op: from `torch.library.custom_op`.
        setup_context, backward: as `op.register_autograd` takes them.
        direct: forward and backward of a `torch.autograd.Function` for where nothing traces; they need not keep to the op's
            results. None: of the op's own function and the two above.
        one_gradient: whether a batch of gradients, which would end deep inside torch, is refused in words.

    Returns:
        A function of the op's arguments: the op itself where something traces, else the `torch.autograd.Function`, and without
        gradients the op's own function.
    """
    if one_gradient:
        backward = _of_one_gradient(backward)
    op.register_autograd(backward, setup_context=setup_context)
    body = _body(op)

    # Not a `setup_context` of its own: with one, torch looks up and binds the signature in every call.
    def forward(ctx: Any, *arguments: Any) -> Any:
        results = body(*arguments)
        setup_context(ctx, arguments, results)
        return results

    methods = dict(zip(("forward", "backward"), direct or (forward, backward), strict=True))
    function = type(body.__name__, (torch.autograd.Function,), {k: staticmethod(v) for k, v in methods.items()})

    def run(*arguments: Any) -> Any:
        if _traced(arguments):
            _refuse_functional_gradients()
            return op(*arguments)
        return function.apply(*arguments) if torch.is_grad_enabled() else body(*arguments)

    return run


def without_autograd(op: Any) -> Callable[..., Any]:
    """`op` where something traces, or needs a gradient that the op may refuse; else its own function."""
    body = _body(op)

    def run(*arguments: Any) -> Any:
        needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        return op(*arguments) if needs_grad or _traced(arguments) else body(*arguments)

    return run


def _of_one_gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward`, which raises `RuntimeError` for several gradients at once, where it would end deep inside torch."""
    functorch = torch._C._functorch

    def run(ctx: Any, *grads: Any) -> Any:
        # `torch.autograd.grad` has batches of the older kind, `torch.vmap` around it the other.
        if any(
            x is not None and (functorch.is_legacy_batchedtensor(x) or functorch.is_batchedtensor(x)) for x in grads
        ):
            raise RuntimeError(
                "fastgrpo's head takes one gradient at a time, and a batch of them was given (is_grads_batched=True, "
                "jacobian(vectorize=True), vmap). Call torch.autograd.grad once for each, with retain_graph=True."
            )
        return backward(ctx, *grads)

    return run


def _refuse_functional_gradients() -> None:
    """Raises `RuntimeError` inside `torch.func.grad` and its like, which cannot differentiate an op from `torch.library`."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack().key() == functorch.TransformType.Grad:
        raise RuntimeError(
            "fastgrpo's head has no derivatives under torch.func (grad, vjp, jacrev, hessian), which does not take custom ops "
            "with an autograd of their own. Use torch.autograd.grad or backward()."
        )


def _body(op: Any) -> Callable[..., Any]:
    return getattr(op, "_init_fn", op)


def _traced(arguments: tuple[Any, ...]) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or any(issubclass(kind, Tensor) for kind in set(map(type, arguments)) - _PLAIN)
    )
