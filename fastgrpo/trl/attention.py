"""How fastgrpo's attention over one padding-free row gets into a transformers model.

Attention layers look their function up by name at every call, and pass on the keyword arguments of the model's forward.
So the layout travels as one such argument: gradient checkpointing keeps it for its second forward, and every call
without it, generation's and other models' among them, is handed on to the function that stood there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgrpo.attention import Segment, segment_attention

LAYOUT_ARGUMENT = "fastgrpo_layout"
# Arguments of attention functions that change what is computed and that `segment_attention` does not know.
_UNKNOWN_TERMS = ("s_aux", "position_bias", "bias", "head_mask")


@dataclass
class Layout:
    """Segments of the row a forward runs on, and the windows of the attention layers that have asked for them."""

    segments: tuple[Segment, ...]
    windows: list[int | None] = field(default_factory=list)


_unmasked: ContextVar[bool] = ContextVar("fastgrpo_unmasked", default=False)


@contextmanager
def without_masks() -> Iterator[None]:
    """While this is open, models make no attention masks: the layout says what a token sees."""
    token = _unmasked.set(True)
    try:
        yield
    finally:
        _unmasked.reset(token)


def install_attention(implementation: str) -> None:
    """Puts the dispatchers under an attention implementation's name, for the whole process; a second call does nothing."""
    for interface, kind in (
        (ALL_ATTENTION_FUNCTIONS, AttentionDispatcher),
        (ALL_MASK_ATTENTION_FUNCTIONS, MaskDispatcher),
    ):
        # An attention of the user's own may have no mask function; then models make no mask for it.
        if implementation in interface and not isinstance(interface[implementation], kind):
            local = interface._local_mapping.get(implementation)
            interface[implementation] = kind(interface, implementation, local)


def is_installed(implementation: str | None) -> bool:
    """Whether attention layers that look this name up get a dispatcher."""
    return isinstance(ALL_ATTENTION_FUNCTIONS.get(implementation), AttentionDispatcher)


def remove_attention() -> None:
    """Takes every `install_attention` back."""
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for name, present in list(interface._local_mapping.items()):
            if isinstance(present, _Dispatcher):
                del interface[name]
                if present.local is not None:
                    interface[name] = present.local


class _Dispatcher:
    """
    Stands for a function that models look up by name.

    Args:
        interface: where they look it up.
        name: under which.
        local: what stood in the interface's local mapping before; None = nothing, so the library's own counts, which
            somebody may register anew meanwhile.
    """

    def __init__(self, interface: Any, name: str, local: Any) -> None:
        self.interface, self.name, self.local = interface, name, local
        self._beneath = _beneath(interface[name])

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What would be called without the dispatcher."""
        function = self.interface._global_mapping[self.name] if self.local is None else self.local
        return _beneath(function)(*args, **kwargs)


def _beneath(function: Any) -> Any:
    # Somebody may have looked a name up while a dispatcher stood there, and registered later what was found.
    return function._beneath if isinstance(function, _Dispatcher) else function


class AttentionDispatcher(_Dispatcher):
    """Stands for an attention function: `segment_attention` for calls with a layout, the function itself for others."""

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        layout: Layout | None = kwargs.pop(LAYOUT_ARGUMENT, None)
        # A vision tower gets the arguments of the model's forward, too, and sees no row of tokens.
        if layout is None or not getattr(module, "is_causal", True):
            return self.original(module, query, key, value, attention_mask, **kwargs)
        unknown = [name for name in _UNKNOWN_TERMS if kwargs.get(name) is not None]
        if unknown or kwargs.get("dropout"):
            raise NotImplementedError(f"attention with {', '.join(unknown) or 'dropout'} has no padding-free form here")
        device = query.device.type
        if torch.is_autocast_enabled(device):
            # As torch does for its own attention; rotary embeddings may have made float32 of queries and keys.
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        layout.windows.append(kwargs.get("sliding_window"))
        scale = kwargs.get("scaling")
        out = segment_attention(
            query.squeeze(0),
            key.squeeze(0),
            value.squeeze(0),
            layout.segments,
            query.shape[-1] ** -0.5 if scale is None else scale,
            softcap=kwargs.get("softcap"),
            window=layout.windows[-1],
        )
        return out.unsqueeze(0), None


class MaskDispatcher(_Dispatcher):
    """Stands for a mask function: no mask inside `without_masks`, the function itself otherwise."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if _unmasked.get() else self.original(*args, **kwargs)
