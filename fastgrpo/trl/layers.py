"""Layers of a scored model that run as one function: LoRA layers of PEFT; MLPs, RMS norms, rotary embeddings of transformers.

While some trainer is patched, a dispatcher stands as `forward` of the layers' classes and of the attentions that give three of
them one input, and in the place of the function that rotates queries and keys. It computes the fused form while `FusedLayers`
of a trainer are in use, where that gives what the original gives, and calls the original everywhere else: in generation, for
other trainers, for adapters that are more than two plain matrices. Nothing is set on a layer, so copies, checkpoints and
merges know nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fastgrpo.rotary import rotary
from fastgrpo.trl.lora_layers import Adapters, Fused
from fastgrpo.trl.mlp_layers import fused_mlp, remember_adapters
from fastgrpo.trl.one_input import PROJECTIONS, gives_one_input, run_with_one_input


class FusedLayers:
    """
    The layers of one trainer, and copies of its adapters in the dtype of autocast.

    Args:
        enabled: False = every layer runs its own forward.
        rms_norm: what computes RMS norms, with the arguments and results of torch's own; None = that.
    """

    def __init__(self, enabled: bool, rms_norm: Callable[..., tuple[Tensor, ...]] | None = None) -> None:
        self.enabled, self.rms_norm = enabled, rms_norm
        self.adapters = Adapters()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """
        While this is open, layers with a dispatcher run as one function where they can; so does their second forward.

        Adapters are copied here, all in one go, and must not change until the backward pass is over.
        """
        if not self.enabled:
            yield
            return
        self.adapters.refresh()
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[FusedLayers | None] = ContextVar("fastgrpo_fused_layers", default=None)
# What computed a layer's last forward, so that gradient checkpointing, which runs it again, meets the same function.
_last: WeakKeyDictionary[nn.Module, Fused] = WeakKeyDictionary()
# Cosines that a fused forward was given, which its second forward is given again.
_rotated_by: WeakIdKeyDictionary = WeakIdKeyDictionary()
_installed: set[tuple[Any, str]] = set()
# What was installed before each `layers_installed` that is open.
_open: list[set[tuple[Any, str]]] = []


def install_layers(models: Iterable[nn.Module]) -> None:
    """Puts dispatchers where these models look their layers' functions up; a second call does nothing."""
    models = list(models)
    for model in models:
        remember_adapters(model)
    for kind in {type(module) for model in models for module in model.modules()}:
        own = kind.__dict__.get("forward")
        if kind is LoraLinear:
            _install(kind, "forward", _layer_dispatcher(kind, own, _lora))
        elif gives_one_input(own, PROJECTIONS):
            _install(kind, "forward", _owner_dispatcher(kind, own, PROJECTIONS))
        elif _does_as(own, _rms_norm_of_transformers):
            _install(kind, "forward", _layer_dispatcher(kind, own, _rms_norm))
        elif any(_does_as(own, known) for known in (_gated_mlp_of_transformers, _gated_mlp_of_towers)):
            _install(kind, "forward", _layer_dispatcher(kind, own, _gated_mlp))
        home = sys.modules.get(kind.__module__)
        rotate, half = (getattr(home, name, None) for name in ("apply_rotary_pos_emb", "rotate_half"))
        if _does_as(rotate, _rotary_of_transformers) and _does_as(half, _half_of_transformers):
            _install(home, "apply_rotary_pos_emb", _rotary_dispatcher(rotate))


@contextmanager
def layers_installed(models: Iterable[nn.Module]) -> Iterator[None]:
    """`install_layers` for as long as this is open; what was installed before stays."""
    before = set(_installed)
    install_layers(models)
    _open.append(before)
    try:
        yield
    finally:
        _open.remove(before)
        _remove(_installed - before)


def remove_layers() -> None:
    """
    Takes every `install_layers` back. What something else has put over a dispatcher since stays.

    A trainer that is dropped calls this, whenever the garbage collector finds it: where `layers_installed` is open, its layers
    stay until it is closed.
    """
    if _open:
        for before in _open:
            before.clear()
        return
    _remove(set(_installed))
    _last.clear()


def _remove(installed: set[tuple[Any, str]]) -> None:
    for owner, name in installed:
        _installed.discard((owner, name))
        original = getattr(owner.__dict__.get(name), "fastgrpo_original", None)
        if original is not None:
            setattr(owner, name, original)


def _install(owner: Any, name: str, dispatcher: Callable) -> None:
    if not hasattr(dispatcher.fastgrpo_original, "fastgrpo_original"):
        setattr(owner, name, dispatcher)
        _installed.add((owner, name))


def _owner_dispatcher(kind: type[nn.Module], original: Callable, names: Sequence[str]) -> Callable:
    """For a module that gives these layers of its one tensor."""

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or type(self) is not kind:
            return original(self, *args, **kwargs)
        if _current.get() is None and torch._C._current_graph_task_id() == -1:
            return original(self, *args, **kwargs)
        return run_with_one_input(original, self, names, args, kwargs)

    forward.fastgrpo_original = original
    return forward


def _layer_dispatcher(
    kind: type[nn.Module], original: Callable, fuse: Callable[[Any, Tensor, FusedLayers], Fused | None]
) -> Callable:
    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # somebody else's model; ours are not compiled
            return original(self, *args, **kwargs)
        fused = None
        layers = _current.get()
        if layers is not None:
            if type(self) is kind and len(args) == 1 and not kwargs:
                fused = fuse(self, args[0], layers)
        elif torch._C._current_graph_task_id() != -1:  # inside a backward pass: a second forward
            fused = _last.get(self)
        elif not torch.is_grad_enabled():  # no backward pass follows: generation, for example
            return original(self, *args, **kwargs)
        if fused is None:
            if not _is_of_reference(self):
                _last.pop(self, None)
            return original(self, *args, **kwargs)
        if not _is_of_reference(self):
            _last[self] = fused
        return fused(args[0])

    forward.fastgrpo_original = original
    return forward


def _is_of_reference(layer: nn.Module) -> bool:
    """The policy without its adapters, which may come between the policy's forward and backward pass."""
    return not torch.is_grad_enabled() and any(
        getattr(part, "disable_adapters", False) for part in (layer, *layer._modules.values())
    )


def _gated_mlp(layer: Any, x: Tensor, layers: FusedLayers) -> Fused | None:
    return fused_mlp(layer, x, layers.adapters)


def _lora(layer: LoraLinear, x: Tensor, layers: FusedLayers) -> Fused | None:
    return layers.adapters.function_of(layer, x)


def _rms_norm(layer: Any, x: Tensor, layers: FusedLayers) -> Fused:
    weight, epsilon, norm = layer.weight, layer.variance_epsilon, layers.rms_norm or torch._fused_rms_norm
    if weight.dtype == x.dtype:
        return lambda x: norm(x, weight.shape, weight, epsilon)[0]
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return lambda x: norm(x.to(dtype), weight.shape, weight.to(dtype), epsilon)[0]


def _rotary_dispatcher(original: Callable) -> Callable:
    @wraps(original)
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(q, k, cos, sin, *args, **kwargs)
        fused = _current.get() is not None or (torch._C._current_graph_task_id() != -1 and cos in _rotated_by)
        if not fused or args or kwargs or not _can_be_rotated(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)
        _rotated_by[cos] = True
        return rotary(q, k, cos, sin)

    apply_rotary_pos_emb.fastgrpo_original = original
    return apply_rotary_pos_emb


def _can_be_rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    batch, _, tokens, width = query.shape
    return (
        cos.shape == sin.shape == (batch, tokens, width)
        and (key.shape[0], *key.shape[2:]) == (batch, tokens, width)
        and width % 2 == 0
        and query.dtype == key.dtype == cos.dtype == sin.dtype
        and query.device == key.device == cos.device == sin.device
        and not (cos.requires_grad or sin.requires_grad)
    )


def _does_as(function: Any, known: Callable) -> bool:
    """Whether a function has the code of one of transformers' that many of its models share."""
    code = getattr(function, "__code__", None)
    return code is not None and _meaning(code) == _meaning(known.__code__)


def _meaning(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, [value for value in code.co_consts if not isinstance(value, str)]


def _rms_norm_of_transformers(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _gated_mlp_of_transformers(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _gated_mlp_of_towers(self, hidden_state):
    return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))


def _rotary_of_transformers(q, k, cos, sin, unsqueeze_dim=1):
    """Has a docstring as theirs has, which counts among the constants."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)  # noqa: F821 - compared, never called
    k_embed = (k * cos) + (rotate_half(k) * sin)  # noqa: F821
    return q_embed, k_embed


def _half_of_transformers(x):
    """See above."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
