"""Language models for the demo, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.tools.checkpoint import load_model, load_tokenizer
from fastgrpo.tools.demo.errors import Stopped
from fastgrpo.tools.process import USAGE
from fastgrpo.tools.wording import ToolError


def load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Reads a model and its tokenizer.

    Args:
        path: a folder as `save_pretrained` writes it, or a `.gguf` file, which is dequantised.

    Raises:
        Stopped: nothing that transformers can load.
    """
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    source = str(path.parent if path.is_file() else path)
    try:
        tokenizer = load_tokenizer(source, **gguf)
        model = load_model(source, torch.float32, **gguf)
    except ToolError as error:
        raise Stopped(
            f"{path} cannot be loaded as a language model: {error}. Give a folder with config.json, weights and tokenizer, or "
            "a .gguf file.",
            USAGE,
        ) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return (_plain(model) if gguf else model), tokenizer


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that does not call itself quantised, which transformers would refuse to train."""
    del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
