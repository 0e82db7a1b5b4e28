"""Tiny prompts with images, and the processor for them."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from tiny import PROMPTS, VISION_IDS, tiny_tokenizer
from transformers import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class ImageProcessor(Qwen2_5_VLProcessor):
    """Without videos, which need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: list[Any] | None = None, **kwargs: Any) -> Any:
        # TRL gives rows without images as None, which transformers takes for a broken image.
        return super().__call__(images=images and [row or [] for row in images], **kwargs)


def picture(index: int) -> PILImage.Image:
    """Some noise of a size of its own: one to four tokens."""
    width, height = [(28, 28), (56, 28), (56, 56)][index % 3]
    noise = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
    return PILImage.fromarray(noise.numpy())


def vision_settings(counts: list[int]) -> dict[str, Any]:
    """Prompts with as many images as `counts` says."""
    tokenizer = tiny_tokenizer(vision=True)
    images = iter(range(sum(counts)))
    return {
        "model": "qwen2.5 vl",
        "processing_class": ImageProcessor(
            Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}),
            tokenizer,
            chat_template=tokenizer.chat_template,
        ),
        "train_dataset": Dataset.from_dict(
            {
                "prompt": [[{"role": "user", "content": text}] for text, _ in zip(PROMPTS, counts, strict=False)],
                "images": [[picture(next(images)) for _ in range(count)] for count in counts],
            },
            features=Features(
                {
                    "prompt": List({"role": Value("string"), "content": Value("string")}),
                    "images": List(Image()),
                }
            ),
        ),
        "generation_kwargs": {"suppress_tokens": list(VISION_IDS.values())},
    }
