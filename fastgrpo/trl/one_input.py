"""Modules that give several of their layers one tensor: which do, and the layers' outputs until they are asked for.

An attention of transformers calls `self.q_proj(x)`, `self.k_proj(x)` and `self.v_proj(x)`. The first call computes all three,
and the other two are handed out. What is known of a module's code decides only whether that is worth while: a layer that
is called with another tensor, or with one that was written to since, is computed by itself.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_SIMPLE = (ast.Assign, ast.AnnAssign)


class OneInput:
    """
    Layers of one module, while its forward runs.

    Args:
        owner: the module.
        layers: in the order of their outputs; None = the module has no such layer.

    Attributes:
        functions: what computes each; empty = not together, None = nobody has asked.
        empty: whether no outputs came to be kept yet.
    """

    def __init__(self, owner: nn.Module, layers: Sequence[nn.Module | None]) -> None:
        self.owner, self.layers = owner, layers
        self.functions: Sequence[Callable[[Tensor], Tensor]] | None = None
        self.drop()
        self.empty = True

    def number_of(self, layer: nn.Module) -> int | None:
        """Which of the layers it is; None = none."""
        for number, one in enumerate(self.layers):
            if one is layer:
                return number
        return None

    def keep(self, key: Any, x: Tensor, outs: Sequence[Tensor]) -> None:
        """Takes the outputs, one a layer, that something computed from an input."""
        self.empty = False
        self._key, self._x, self._version, self._outs = key, x, x._version, dict(enumerate(outs))

    def has(self, number: int, x: Tensor) -> bool:
        """Whether a layer's output is there, and x is what it was computed from."""
        return number in self._outs and x is self._x and x._version == self._version

    def take(self, key: Any, number: int, x: Tensor) -> Tensor | None:
        """A layer's output, once; None where `key` did not compute it, or from something else."""
        return self._outs.pop(number) if key is self._key and self.has(number, x) else None

    def drop(self) -> None:
        """Lets go of every tensor."""
        self._key = self._x = None
        self._version, self._outs = 0, {}


_open: ContextVar[OneInput | None] = ContextVar("fastgrpo_one_input", default=None)
current_input = _open.get
"""`OneInput` of the innermost module whose forward runs, or None."""


def run_with_one_input(forward: Callable, owner: nn.Module, names: Sequence[str], args: Any, kwargs: Any) -> Any:
    """A module's forward, during which these layers of it may be computed together."""
    layers = OneInput(owner, tuple(map(owner._modules.get, names)))
    token = _open.set(layers)
    try:
        return forward(owner, *args, **kwargs)
    finally:
        _open.reset(token)
        layers.drop()


def gives_one_input(function: Any, names: Sequence[str]) -> bool:
    """
    Whether a module's forward calls each of these layers once, with the same variable, and nothing but assignments between.

    Args:
        function: the forward; what wraps it is looked through.
        names: of the module's attributes.

    Returns:
        False also where there is no source to read.
    """
    function = inspect.unwrap(function) if callable(function) else None
    code = getattr(function, "__code__", None)
    if code is None or not set(names) <= set(code.co_names):
        return False
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(definition, ast.FunctionDef):
        return False
    used = [node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute) and node.attr in names]
    calls = [(number, node) for number, line in enumerate(definition.body) for node in _calls(line, names)]
    if not sorted(used) == sorted(call.func.attr for _, call in calls) == sorted(names):
        return False
    lines = definition.body[calls[0][0] : calls[-1][0] + 1]
    inputs = {call.args[0].id for _, call in calls}
    written = {node.id for line in lines for node in ast.walk(line) if _is_written(node)}
    return all(isinstance(line, _SIMPLE) for line in lines) and len(inputs) == 1 and not inputs & written


def _calls(line: ast.stmt, names: Sequence[str]) -> Iterator[ast.Call]:
    """`self.name(variable)` in a line."""
    for node in ast.walk(line):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in names
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "self"
            and not node.keywords
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Name)
        ):
            yield node


def _is_written(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
