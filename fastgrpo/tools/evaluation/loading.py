"""The model of a folder: saved whole, or an adapter beside its base."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_ADAPTER = "adapter_config.json"


def load_policy(path: Path, base: str | None, device: torch.device) -> tuple[Any, Any]:
    """
    Model and tokenizer.

    Args:
        path: a folder as `save_pretrained` or a trainer's checkpoint writes it, or a .gguf file; with an adapter in it, its
            base is where the adapter says.
        base: of the adapter, over what it says.
        device: where to run; on a CPU in float32, elsewhere in the checkpoint's dtype.

    Raises:
        ValueError: nothing that can be loaded.
    """
    if not path.exists():
        raise ValueError(f"there is no {path}; give a folder as save_pretrained or a checkpoint writes it.")
    adapter = path / _ADAPTER if path.is_dir() else None
    has_adapter = adapter is not None and adapter.exists()
    if base is not None and not has_adapter:
        raise ValueError(f"{path} holds no adapter ({_ADAPTER}), so --base has no meaning.")
    try:
        source = str(path)
        if has_adapter:
            source = base or json.loads(adapter.read_text())["base_model_name_or_path"]
        gguf = {"gguf_file": path.name} if path.is_file() else {}
        source = str(path.parent) if path.is_file() else source
        dtype = torch.float32 if device.type == "cpu" else "auto"
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, local_files_only=True, trust_remote_code=False, **gguf
        )
        own_tokenizer = has_adapter and (path / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(
            str(path) if own_tokenizer else source, local_files_only=True, trust_remote_code=False, **gguf
        )
        if has_adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(path))
    except Exception as error:  # what a folder that is no model raises is as varied as such folders
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        help_ = f" Its base is {source}; --base names another." if has_adapter else ""
        raise ValueError(
            f"{path} cannot be loaded as a language model: {reason}. Give a folder with config.json, weights and tokenizer, or "
            f"one with an adapter.{help_}"
        ) from error
    return model.to(device).eval(), tokenizer


def steps_of(path: Path) -> int | None:
    """Optimizer steps that a checkpoint's folder says it has seen; None where it does not say."""
    state = path / "trainer_state.json"
    try:
        return int(json.loads(state.read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        named = re.fullmatch(r"checkpoint-(\d+)", path.resolve().name)
        return int(named[1]) if named else None
