"""Tiny prompts with images, and the processor for them."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from tiny import _DECODER, PROMPTS, VISION_IDS, tiny_tokenizer
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_IMAGE = VISION_IDS["<|image_pad|>"]
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


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


def vision_settings(counts: list[int], model: str = "qwen2.5 vl") -> dict[str, Any]:
    """Prompts with as many images as `counts` says, and a model of `tiny.MODELS` that sees them."""
    tokenizer = tiny_tokenizer(vision=True)
    images = iter(range(sum(counts)))
    return {
        "model": model,
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


def _llava() -> PreTrainedModel:
    settings = {"vision_config": CLIPVisionConfig(**_TOWER), "text_config": LlamaConfig(**_DECODER)}
    return LlavaForConditionalGeneration(LlavaConfig(**settings, image_token_id=_IMAGE, image_seq_length=4))


def _gemma3() -> PreTrainedModel:
    text = {**_DECODER, "head_dim": 8, "sliding_window": 8}
    settings = {"vision_config": dict(_TOWER), "text_config": text, "mm_tokens_per_image": 4}
    return Gemma3ForConditionalGeneration(Gemma3Config(**settings, image_token_id=_IMAGE))


def _idefics3() -> PreTrainedModel:
    settings = {"vision_config": {**_TOWER, "image_size": 16}, "text_config": LlamaConfig(**_DECODER)}
    return Idefics3ForConditionalGeneration(
        Idefics3Config(**settings, image_token_id=_IMAGE, scale_factor=2, pad_token_id=0)
    )


OTHERS = {"llava": _llava, "gemma 3": _gemma3, "idefics 3": _idefics3}


def other_model(name: str) -> PreTrainedModel:
    """A tiny vision-language model, float32, whose images take four tokens each."""
    torch.manual_seed(0)
    model = OTHERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def other_batch(name: str, counts: list[int]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Ids, mask and images of rows with so many images each, as TRL scores them; completions of up to six tokens."""
    generator = torch.Generator().manual_seed(0)
    words = lambda size: torch.randint(5, 40, (size,), generator=generator)  # noqa: E731
    shown = torch.tensor([_IMAGE] * 4 + [7])
    prompts = [torch.cat([words(2), shown.repeat(count), words(3)]) for count in counts]
    width = max(map(len, prompts))
    ids = torch.zeros(len(counts), width + 6, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start, end = width - len(prompt), width + 6 - row
        ids[row, start:end] = torch.cat([prompt, words(6 - row)])
        mask[row, start:end] = 1
    if name == "idefics 3":
        values = torch.randn(len(counts), max(counts), 3, 16, 16, generator=generator)
        there = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
        values *= there[..., None, None, None]
        images = {"pixel_values": values, "pixel_attention_mask": there[..., None, None].expand(-1, -1, 16, 16)}
    else:
        images = {"pixel_values": torch.randn(sum(counts), 3, 8, 8, generator=generator)}
    if name == "gemma 3":
        images["token_type_ids"] = (ids == _IMAGE).long()
    return ids, mask, images | {"num_images": counts}
