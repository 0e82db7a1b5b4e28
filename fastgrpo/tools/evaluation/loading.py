"""The model of a folder: saved whole, or an adapter beside its base."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from fastgrpo.tools.checkpoint import (
    ADAPTER,
    check_adapter_files,
    check_files,
    folder_of,
    load_model,
    load_tokenizer,
    read_model_config,
)
from fastgrpo.tools.wording import ToolError, named

_SAME_BASE = "is the base the one it was trained on? --base names another"


def load_policy(path: Path, base: str | None, device: torch.device) -> tuple[Any, Any]:
    """
    Model and tokenizer.

    Args:
        path: a folder as `save_pretrained` or a trainer's checkpoint writes it, a name in the local cache, or a .gguf file;
            with an adapter in the folder, its base is where the adapter says.
        base: of the adapter, over what it says.
        device: where to run; on a CPU in float32, elsewhere in the checkpoint's dtype.

    Raises:
        ToolError: nothing that can be loaded.
    """
    if path.is_file() and path.suffix != ".gguf":
        raise ToolError(f"{path} is a file", "give the folder it is in, or a .gguf file")
    adapter = path / ADAPTER
    if not adapter.exists():
        if base is not None:
            raise ToolError(f"{path} holds no adapter ({ADAPTER}), so --base has no meaning", "leave it out")
        model, tokenizer = _whole(path, device)
        return model.to(device).eval(), tokenizer
    check_adapter_files(path)
    source = base or _base_of(adapter)
    own_tokenizer = (path / "tokenizer_config.json").exists()
    try:
        model, tokenizer = _whole(Path(source), device, path if own_tokenizer else None)
    except ToolError as error:
        raise ToolError(f"the base of the adapter in {path}: {error}", "--base names another base") from error
    return _with_adapter(model, path).to(device).eval(), tokenizer


def _whole(path: Path, device: torch.device, tokenizer: Path | None = None) -> tuple[Any, Any]:
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else folder_of(path)
    source = str(folder)
    if not gguf:
        read_model_config(folder)
        check_files(folder)
    model = load_model(source, torch.float32 if device.type == "cpu" else "auto", **gguf)
    return model, load_tokenizer(str(tokenizer)) if tokenizer else load_tokenizer(source, **gguf)


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads(adapter.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolError(f"{adapter} cannot be read, or names no base: {named(error)}", "name it with --base") from error
    if not base or not isinstance(base, str):
        raise ToolError(f"{adapter} names no base", "name it with --base")
    return base


def _with_adapter(model: Any, path: Path) -> Any:
    from peft import PeftModel

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(model, str(path))
    except Exception as error:  # what a folder that is no adapter raises is as varied as such folders
        raise ToolError(f"the adapter in {path} does not fit its base: {named(error)}", _SAME_BASE) from error
    if any("missing adapter keys" in str(warning.message) for warning in said):
        raise ToolError(
            f"the adapter in {path} lacks layers that its {ADAPTER} has, which would do nothing", _SAME_BASE
        )
    return adapted


def steps_of(path: Path) -> int | None:
    """Optimizer steps that a checkpoint's folder says it has seen; None where it does not say."""
    state = path / "trainer_state.json"
    try:
        return int(json.loads(state.read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        named = re.fullmatch(r"checkpoint-(\d+)", path.resolve().name)
        return int(named[1]) if named else None
