"""What a workload with pictures has beside its text: a vision tower, the pictures of a batch, a processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

# What stands for a picture and around it: the last ids of a vocabulary, from its end.
_IMAGE, _VIDEO, _START, _END = 1, 2, 3, 4
RESERVED = 4
INPUTS = ("pixel_values", "image_grid_thw", "mm_token_type_ids", "num_images")


@dataclass(frozen=True)
class Tower:
    """
    The vision tower of Qwen2.5-VL, and the one picture that every prompt begins with.

    Args:
        layers, hidden, heads, intermediate: of the tower.
        side: patches along a side of the picture; four of them make a token.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    side: int

    def config(self, text: dict[str, Any]) -> Qwen2_5_VLConfig:
        """
        Of the whole model.

        Args:
            text: of its text model.
        """
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        rope = {"rope_type": "default", "mrope_section": [half // 4, half * 3 // 8, half * 3 // 8]}
        size = text["vocab_size"]
        return Qwen2_5_VLConfig(
            text_config=text | {"rope_parameters": rope},
            vision_config={
                "depth": self.layers,
                "hidden_size": self.hidden,
                "num_heads": self.heads,
                "intermediate_size": self.intermediate,
                "out_hidden_size": text["hidden_size"],
                # Every eighth layer sees the whole picture, the others windows of it.
                "fullatt_block_indexes": list(range(min(7, self.layers - 1), self.layers, 8)),
            },
            tie_word_embeddings=text["tie_word_embeddings"],
            image_token_id=size - _IMAGE,
            video_token_id=size - _VIDEO,
            vision_start_token_id=size - _START,
            vision_end_token_id=size - _END,
        )

    def show(self, batch: dict[str, Tensor], vocabulary: int, completions: int, generator: torch.Generator) -> dict:
        """
        Puts a picture at the start of every prompt.

        Args:
            batch: as `GRPOTrainer` builds it, without pictures; its prompts' first ids are exchanged in place.
            vocabulary: of the model.
            completions: rows that a prompt has, which follow each other and see the same picture.
            generator: of the pictures.

        Returns:
            What TRL adds to a generation batch for pictures.
        """
        rows, tokens = batch["prompt_ids"].shape[0], self.side**2 // 4
        sign = torch.tensor([vocabulary - _START, *[vocabulary - _IMAGE] * tokens, vocabulary - _END])
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True):
            start = int(mask.argmax())
            ids[start : start + len(sign)] = sign
        text = {"hidden_size": 8, "num_attention_heads": 1, "vocab_size": RESERVED, "tie_word_embeddings": True}
        vision = self.config(text).vision_config
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pictures = torch.randn(rows // completions, self.side**2, size, generator=generator)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        return {
            "pixel_values": pictures.repeat_interleave(completions, 0).flatten(0, 1),
            "image_grid_thw": torch.tensor([[1, self.side, self.side]]).repeat(rows, 1),
            "mm_token_type_ids": (ids == vocabulary - _IMAGE).long(),
            "num_images": [1] * rows,
        }


class Processor(Qwen2_5_VLProcessor):
    """Without videos, which need torchvision; it makes TRL take the model for one that sees."""

    def __init__(
        self, image_processor: Any = None, tokenizer: PreTrainedTokenizerBase | None = None, chat_template: str = ""
    ) -> None:
        super().__init__(image_processor or Qwen2VLImageProcessorPil(), tokenizer, chat_template=chat_template)
