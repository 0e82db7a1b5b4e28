"""GRPO of a vision-language model on pictures made on the spot: what colour is it?

python examples/vision_language.py                          # Qwen2.5-VL-3B with LoRA; wants a GPU
python examples/vision_language.py --tiny                   # an untrained toy, 20 steps on a CPU, nothing downloaded
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, Features, Image, Value
from datasets import List as ListOf
from offline import TINY_STEPS, VISION, decoder_settings, tiny_tokenizer
from peft import LoraConfig
from PIL import Image as Pictures
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import GRPOConfig, GRPOTrainer, TrlParser

import fastgrpo.auto  # noqa: F401

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 200), "yellow": (240, 220, 40)}


@dataclass
class Script:
    """What is not TRL's."""

    model: str = field(default="Qwen/Qwen2.5-VL-3B-Instruct", metadata={"help": "Name or path of the model."})
    tiny: bool = field(default=False, metadata={"help": "Train a toy model that is made on the spot, on a CPU."})
    pictures: int = field(default=64, metadata={"help": "Number of pictures."})


def pictures(count: int, side: int) -> Dataset:
    """Squares of one colour with some noise, and the colour's name."""
    source = random.Random(0)
    names = [source.choice(list(COLOURS)) for _ in range(count)]
    images = []
    for name in names:
        image = Pictures.new("RGB", (side, side), COLOURS[name])
        for _ in range(side):
            image.putpixel(
                (source.randrange(side), source.randrange(side)), tuple(source.randrange(256) for _ in range(3))
            )
        images.append([image])
    prompt = [{"role": "user", "content": "What colour is this? One word."}]
    return Dataset.from_dict(
        {"prompt": [prompt] * count, "images": images, "colour": names},
        features=Features(
            {
                "prompt": ListOf({"role": Value("string"), "content": Value("string")}),
                "images": ListOf(Image()),
                "colour": Value("string"),
            }
        ),
    )


def right_colour(completions: list[Any], colour: list[str], **_: Any) -> list[float]:
    """1 for the colour's name, a little for its letters."""
    said = [completion[0]["content"].lower() for completion in completions]
    return [
        1.0 if right in words else 0.1 * len(set(right) & set(words)) / len(set(right))
        for words, right in zip(said, colour, strict=True)
    ]


def tiny_vision_model() -> tuple[Any, Any]:
    """Qwen2.5-VL with two layers of each kind, and a processor for it."""

    class ImagesOnly(Qwen2_5_VLProcessor):
        """Without videos, which need torchvision."""

        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
        ) -> None:
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

    tokenizer = tiny_tokenizer()
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**decoder_settings(tokenizer), "rope_parameters": rope},
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
            },
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
        )
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    return model, ImagesOnly(images, tokenizer, chat_template=tokenizer.chat_template)


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Trains; returns the trainer."""
    parser = TrlParser((Script, GRPOConfig))
    parser.set_defaults(
        output_dir="vision_language",
        max_steps=0,  # not given
        num_generations=8,
        per_device_train_batch_size=8,
        max_completion_length=16,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    script, config = parser.parse_args_and_config(arguments)
    config.max_steps = config.max_steps or (TINY_STEPS if script.tiny else 100)
    model, processor = tiny_vision_model() if script.tiny else (script.model, None)
    if script.tiny:
        # A model that has learned nothing draws the tokens that stand for pictures, too.
        config.generation_kwargs = {"suppress_tokens": processor.tokenizer.convert_tokens_to_ids(VISION)}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right_colour,
        args=config,
        train_dataset=pictures(script.pictures, side=56 if script.tiny else 224),
        processing_class=processor,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
