"""Rows with images: without padding, or left-packed, and some of a micro-batch's rows with the images that are theirs.

TRL's scoring method knows which images belong to which rows, for every family of models, and makes a model's inputs of them.
Where rows are left-packed, that stays its business: it is given a model of which only the call differs, and of a
micro-batch in parts, it is given one part. Without padding, a model gets the images of the rows whose prompts are there.
Positions come from the model in either case, which reads them off the attention mask and the images.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from fastgrpo.packing import left_pack

if TYPE_CHECKING:
    from typing_extensions import Self

# What TRL passes beside the ids with an entry a token; everything else belongs to images.
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
# Models whose image features go, image after image, to the image tokens of a row, whose attention is causal over images, and
# whose backbone says what the positions of padded rows are. Each has a test.
_PACKED_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_POSITIONS_METHOD, _KEPT_OF_POSITIONS = "compute_3d_position_ids", "rope_deltas"
PACKED_INPUTS = {"pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids"}
"""All that TRL passes to its scoring method beside the ids for such a model."""


def images_obstacle(model: torch.nn.Module) -> str:
    """Why rows with images cannot reach a model without padding; empty where they can."""
    kind = model.config.model_type
    if kind not in _PACKED_FAMILIES:
        return (
            f"images of {kind!r} are not known to fit rows without padding; those of {', '.join(_PACKED_FAMILIES)} do"
        )
    if not hasattr(_backbone(model), _POSITIONS_METHOD):
        return f"this transformers does not tell the positions of {kind!r}"
    return ""


def _backbone(model: torch.nn.Module) -> torch.nn.Module:
    return getattr(model, model.base_model_prefix)


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

    @classmethod
    def _of_rows(cls, apart: dict[str, Any]) -> Self:
        """Of what is taken apart already, with an entry a row."""
        images = object.__new__(cls)
        images._apart = apart
        return images

    def part(self, rows: Tensor) -> Self:
        """
        The same for some rows, taken when something is asked of them: of a part of a part, nothing between is copied.

        Args:
            rows: `[K]` int64.
        """
        images = object.__new__(type(self))
        taken = "_apart" in vars(self)
        images._whole, images._rows = (self, rows) if taken else (self._whole, self._rows[rows])
        return images

    @cached_property
    def _apart(self) -> dict[str, Any]:
        rows = self._rows
        numbers = rows.tolist()
        return {
            name: value[rows] if isinstance(value, Tensor) else [value[number] for number in numbers]
            for name, value in self._whole._apart.items()
        }

    def split(self, rows: int) -> list[Self]:
        """The same of every so many rows."""
        starts = range(0, len(self._apart["pixel_values"]), rows)
        return [
            self._of_rows({name: value[start : start + rows] for name, value in self._apart.items()})
            for start in starts
        ]

    def arguments(self) -> dict[str, Any]:
        """Arguments of TRL's scoring method; nothing of images where no row has one."""
        if "num_images" in self._apart and not any(self._apart["num_images"]):
            return {name: value for name, value in self._apart.items() if name in _PER_TOKEN}
        return unsplit_pixel_values_by_grid(dict(self._apart))


class PackedImages(ImagesByRow):
    """The images of rows that reach a model without an `images_obstacle` without padding."""

    @classmethod
    def of(cls, inputs: dict[str, Any], rows: int) -> PackedImages | None:
        """
        The images of some rows.

        Args:
            inputs: what TRL passes to its scoring method beside the ids; None = not there.
            rows: B.

        Returns:
            None where there are no images, or something else that such a model's forward may want.
        """
        given = {name for name, value in inputs.items() if value is not None}
        return cls(inputs, rows) if PACKED_INPUTS - set(_PER_TOKEN) <= given <= PACKED_INPUTS else None

    @classmethod
    def joined(cls, parts: Sequence[PackedImages]) -> PackedImages:
        """The images of the rows of all parts, one part after the other."""
        apart = {}
        for name, first in parts[0]._apart.items():
            values = [part._apart[name] for part in parts]
            apart[name] = torch.cat(values) if isinstance(first, Tensor) else list(chain(*values))
        return cls._of_rows(apart)

    @property
    def in_every_row(self) -> bool:
        """Whether there is no row without an image."""
        return all(self._apart["num_images"])

    def names(self, width: int) -> list[int]:
        """
        Of each row the number of the first row with the same images, bit by bit, and all of them in the prompt.

        A row with images in its completion, as tools return them, is its own first: who shares its prompt would share those.

        Args:
            width: last columns of a row, its completion.
        """
        pixels, grids = self._apart["pixel_values"], self._apart["image_grid_thw"]
        types = self._apart.get("mm_token_type_ids")
        alone = [False] * len(pixels) if types is None else types[:, types.shape[1] - width :].any(1).tolist()
        # Two answers of the device for all rows, and one a row that has a twin.
        shapes = torch.cat(grids).cpu().split([len(grid) for grid in grids])
        sums = torch.stack([_sum_of_bits(values) for values in pixels]).tolist()
        firsts: dict[object, list[int]] = {}
        names = []
        for row, (shape, total) in enumerate(zip(shapes, sums, strict=True)):
            if alone[row]:
                names.append(row)
                continue
            like = firsts.setdefault((tuple(shape.flatten().tolist()), total), [])
            name = next((first for first in like if torch.equal(pixels[first], pixels[row])), row)
            if name == row:
                like.append(row)
            names.append(name)
        return names

    def positions(self, model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor | None:
        """
        What the model itself takes for the positions of padded rows.

        Args:
            model: of a family without an `images_obstacle`, unwrapped.
            input_ids, attention_mask: `[B, L]`, as TRL pads them.

        Returns:
            `[dimensions, B, L]`; None where the model counts tokens.
        """
        backbone = _backbone(model)
        method = getattr(backbone, _POSITIONS_METHOD)
        known = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "image_grid_thw": torch.cat(self._apart["image_grid_thw"]) if any(self._apart["num_images"]) else None,
            "mm_token_type_ids": self._apart.get("mm_token_type_ids"),
        }
        # Token by token, with questions to the device for each image; there are no answers to wait for on the host.
        known = {name: value if value is None else value.cpu() for name, value in known.items()}
        positions = method(**{name: known.get(name) for name in inspect.signature(method).parameters})
        # The model keeps a number a row of it for generation, which adds that to positions on the device.
        if isinstance(kept := getattr(backbone, _KEPT_OF_POSITIONS, None), Tensor):
            setattr(backbone, _KEPT_OF_POSITIONS, kept.to(input_ids.device))
        return positions

    def inputs(self) -> dict[str, Tensor]:
        """Arguments of the forward of such a model that has these rows without padding."""
        found = self.arguments()
        return {name: found[name] for name in ("pixel_values", "image_grid_thw") if name in found}


def _sum_of_bits(values: Tensor) -> Tensor:
    """The same for equal bits, in whichever order they are added."""
    return (
        values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]).sum()
    )
