"""Language models for the demo, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.tools.demo.errors import DemoError


def load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Reads a model and its tokenizer.

    Args:
        path: a folder as `save_pretrained` writes it, or a `.gguf` file, which is dequantised.

    Raises:
        DemoError: nothing that transformers can load.
    """
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    source = str(path.parent if path.is_file() else path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, padding_side="left", **gguf
        )
        model = AutoModelForCausalLM.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, dtype=torch.float32, **gguf
        )
    except Exception as error:  # what a file that is no model raises is as varied as such files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DemoError(
            f"{path} cannot be loaded as a language model: {reason}. Give a folder with config.json, weights and tokenizer, "
            "or a .gguf file."
        ) from error
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
