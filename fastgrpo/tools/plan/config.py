"""Which model a plan is about: a folder, a file, numbers or a configuration, checked before anything is built from it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from fastgrpo.tools.wording import reason

NUMBERS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
}
"""Names of `config_from_numbers` -> names in a configuration."""
_REQUIRED_NUMBERS = ("hidden", "layers", "heads", "intermediate", "vocabulary")
_MOST_LAYERS, _MOST = 1000, 10**7
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_SIZES = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size", "vocab_size"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"),
)
_GIVE = "Give a local folder with a config.json, that file, or numbers (--numbers)."


def config_from_numbers(**numbers: int | bool) -> PretrainedConfig:
    """
    A Llama-like decoder with these sizes.

    Args:
        numbers: see `NUMBERS`; `kv_heads` = `heads`, `head_dim` = `hidden / heads` and `tied` = False where left out.

    Raises:
        ValueError: an unknown or a missing name, or numbers of which there is no model.
    """
    unknown, missing = set(numbers) - set(NUMBERS), [name for name in _REQUIRED_NUMBERS if name not in numbers]
    if unknown:
        raise ValueError(f"a model has no number {', '.join(sorted(unknown))}; known are {', '.join(NUMBERS)}.")
    if missing:
        raise ValueError(f"the model's {', '.join(missing)} is missing; needed are {', '.join(_REQUIRED_NUMBERS)}.")
    for name, value in numbers.items():
        if name == "tied":
            if value not in (True, False):
                raise ValueError(f"tied is {value}; give true or false.")
        else:
            _check_size(name, value, _MOST_LAYERS if name == "layers" else _MOST)
    for name, divisor in (("hidden", "heads"), ("heads", "kv_heads")):
        if (
            divisor in numbers
            and not (divisor == "heads" and "head_dim" in numbers)
            and numbers[name] % numbers[divisor]
        ):
            raise ValueError(f"{name} is {numbers[name]}, no multiple of {divisor}, {numbers[divisor]}.")
    values = {NUMBERS[name]: bool(value) if name == "tied" else value for name, value in numbers.items()}
    try:
        return LlamaConfig(**values)
    except Exception as error:  # what else transformers demands of a model
        raise ValueError(f"there is no model of these numbers: {reason(error)}.") from error


def parse_numbers(text: str) -> dict[str, Any]:
    """`"hidden=2048,layers=28,tied=true"` as the arguments of `config_from_numbers`; ValueError where it is none."""
    numbers: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, value = part.partition("=")
        if not re.fullmatch(r"-?\d{1,30}|true|false", value.lower()):
            raise ValueError(f"{part!r} is no NAME=NUMBER; write for example hidden=2048,layers=28,tied=true")
        if key in numbers:
            raise ValueError(f"{key} is there twice; give it once.")
        numbers[key] = json.loads(value.lower())
    return numbers


def read_config(model: str | Path | PretrainedConfig | torch.nn.Module) -> tuple[str, PretrainedConfig]:
    """
    Name and configuration of a model; nothing is downloaded, and no network is waited for.

    Args:
        model: a folder with a config.json, the file itself, the name of a model in the local cache of the Hugging Face Hub, a
            configuration, or a model that has one.

    Raises:
        TypeError, ValueError: nothing that transformers reads as a configuration.
    """
    if isinstance(model, torch.nn.Module) and isinstance(getattr(model, "config", None), PretrainedConfig):
        model = model.config
    if isinstance(model, PretrainedConfig):
        config = copy.deepcopy(model)
        _check_sizes(vars(config.get_text_config()), "the configuration")
        return config.name_or_path or f"{config.model_type} configuration", config
    if not isinstance(model, str | Path):
        raise TypeError(
            f"model is a {type(model).__name__}; give a folder, a config.json, or a transformers configuration or model."
        )
    name, file = _find(model)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}. {_GIVE}") from error
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {reason(error)}. {_GIVE}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no JSON object, as a config.json does. {_GIVE}")
    for part in (values, values.get("text_config")):
        if isinstance(part, Mapping):
            _check_sizes(part, str(file))
    try:
        config = AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
        # Under whatever names an architecture has for them.
        _check_sizes({key: getattr(config.get_text_config(), key, None) for key in (*_LAYERS, *_SIZES)}, str(file))
    except Exception as error:  # what a wrong file raises is as varied as wrong files
        raise ValueError(f"{model} is no model that transformers can describe: {reason(error)}. {_GIVE}") from error
    return name, config


def _find(model: str | Path) -> tuple[str, Path]:
    """Name and config.json of a model."""
    if not str(model).strip():
        raise ValueError(f"the model's name is empty. {_GIVE}")
    path = Path(model)
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.exists():
            return (path.parent if path.name == "config.json" else path).resolve().name, path
    except OSError as error:
        raise ValueError(f"{str(model)[:80]} cannot be read: {error.strerror}. {_GIVE}") from error
    try:
        cached = try_to_load_from_cache(str(model), "config.json")
    except HFValidationError:
        raise ValueError(f"there is no {model}. {_GIVE}") from None
    if isinstance(cached, str):
        return str(model), Path(cached)
    raise ValueError(
        f"there is no folder or file {model} here, and the local cache of the Hugging Face Hub has no model of that name; "
        f"nothing is downloaded. {_GIVE} For a model of the Hub, fetch that one file first: hf download {model} config.json"
    )


def _in_folder(folder: Path) -> tuple[str, Path]:
    file = folder / "config.json"
    if file.exists():
        return folder.resolve().name, file
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds an adapter, which says nothing about its model. Give the folder of its base model."
        )
    raise ValueError(f"the folder {folder} has no config.json. {_GIVE}")


def _check_sizes(values: Mapping[str, Any], where: str) -> None:
    for key in (*_LAYERS, *_SIZES):
        value = values.get(key)
        if value is not None and not isinstance(value, list):  # a list has one for each layer
            _check_size(f"{key} in {where}", value, _MOST_LAYERS if key in _LAYERS else _MOST)


def _check_size(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r}; give a whole number from 1 to {most:,}.")


def quantization_of(config: PretrainedConfig) -> str | None:
    """
    The quantisation that a checkpoint's configuration names.

    Raises:
        ValueError: one that the plan does not know.
    """
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    settings = found if isinstance(found, dict) else found.to_dict()
    for name, answer in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
        if settings.get(name):
            return answer
    raise ValueError(
        f"the checkpoint is quantised with {settings.get('quant_method')!r}; the plan knows bitsandbytes' 4bit and 8bit only. "
        "Give the unquantised model, and quantization='4bit' or '8bit'."
    )
