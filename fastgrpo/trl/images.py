"""Rows with images: left-packed, and some of a micro-batch's rows with the images that are theirs.

TRL's scoring method knows which images belong to which rows, for every family of models, and makes a model's inputs of them.
That stays its business: it is given a model of which only the call differs, and of a micro-batch in parts, it is given
one part. Positions come from the model, which reads them off the attention mask and the images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

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


class ImagesByRow:
    """
    Images of a micro-batch and what belongs to them, taken apart as TRL takes them apart before it shuffles rows.

    Args:
        inputs: what TRL passes to its scoring method beside the ids; None = not there.
        rows: B.

    Raises:
        ValueError: something of which it is not known which rows it belongs to.
    """

    def __init__(self, inputs: dict[str, Any], rows: int) -> None:
        given = {name: value for name, value in inputs.items() if value is not None}
        # `[B, images of a row, height, width]`: padded to the row with most images, whatever the number of images.
        padded = "pixel_attention_mask" in given and given["pixel_attention_mask"].dim() == 4
        self._apart = dict(given) if padded else split_pixel_values_by_grid(given)
        counts = given.get("num_images") or [1] * rows
        for name, value in self._apart.items():
            known = len(value) == rows
            if not padded and isinstance(value, Tensor) and name in ("pixel_attention_mask", "image_sizes"):
                known = known and set(counts) == {1}
            alone = not given.keys() - {"pixel_values", "num_images", *_PER_TOKEN}
            if name == "pixel_values" and isinstance(value, list) and value[0].dim() == 5 and alone:
                # As many images as rows, or padded rows: the shape does not say.
                known = set(counts) == {1}
            if not known:
                size = list(given[name].shape) if isinstance(given[name], Tensor) else len(given[name])
                raise ValueError(
                    f"{name} of size {size} cannot be taken apart into {rows} rows with {counts} images, as mini_batch_size, "
                    "max_tokens_per_microbatch and skip_zero_advantage need it; leave them None, None and False."
                )

    def take(self, rows: Tensor) -> dict[str, Any]:
        """
        The same for some rows.

        Args:
            rows: `[K]` int64.

        Returns:
            Arguments of TRL's scoring method; nothing of images where these rows have none.
        """
        numbers = rows.tolist()
        taken = {
            name: value[rows] if isinstance(value, Tensor) else [value[number] for number in numbers]
            for name, value in self._apart.items()
        }
        if "num_images" in taken and not any(taken["num_images"]):
            return {name: value for name, value in taken.items() if name in _PER_TOKEN}
        return unsplit_pixel_values_by_grid(taken)
