"""Rows with images, left-packed.

TRL's scoring method knows which images belong to which rows, for every family of models, and cuts them into forwards. That
stays its business: it is given a model of which only the call differs. Positions come from the model, which reads them off
the attention mask and the images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgrpo.packing import left_pack

# What TRL passes beside the ids with an entry a token; everything else belongs to images.
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")


class LeftPackedForward:
    """
    A model as TRL's scoring method calls it, whose rows are left-packed on their way in and restored on their way out.

    Args:
        model: policy or reference, as accelerate wrapped it, with TRL's fused head.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **inputs: Any) -> Any:
        """
        The model's outputs for the padded rows.

        Args:
            input_ids, attention_mask: `[B, L]`, as TRL pads them.
            labels: `[B, L]`, -100 where nothing is scored.
            inputs: images and what belongs to them.

        Returns:
            What the model returns, with `log_probs` and `entropy` `[B, L - 1]`.
        """
        packed = left_pack(input_ids, attention_mask)
        packed_labels = packed.take(labels)
        if bool((packed_labels[:, 0] != -100).any()):
            # A row's first token is scored from TRL's padding, which would be cut.
            return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **inputs)
        inputs |= {name: packed.take(inputs[name]) for name in _PER_TOKEN if name in inputs}
        outputs = self.model(
            input_ids=packed.input_ids,
            attention_mask=packed.attention_mask,
            labels=packed_labels,
            **inputs,
        )
        for name in ("log_probs", "entropy"):
            values = getattr(outputs, name)
            if values is not None:
                setattr(outputs, name, packed.restore(torch.nn.functional.pad(values, (1, 0)))[:, 1:])
        return outputs
