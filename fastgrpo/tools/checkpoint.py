"""A model's folder: what is wrong with it, said before anything is loaded, and then loaded."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fastgrpo.tools.wording import ToolError, reason

ADAPTER = "adapter_config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_AT_LEAST_ONE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_LONGER_ROPE = ("linear", "dynamic", "yarn", "longrope")
_MOST_NAMES = 3
_OWN_CODE = "use an architecture that transformers has; code from a model's folder is not run here"


def folder_of(model: Path) -> Path:
    """
    The folder of a model: itself, or the one in the local cache for a name as the Hub has it.

    Raises:
        ToolError: neither.
    """
    if model.is_dir():
        return model
    if model.suffix == ".gguf" and model.is_file():
        raise ToolError(
            f"{model} is a GGUF file; GRPO trains the weights that it was quantised from",
            "give the folder that the file was made of",
        )
    if model.exists():
        raise ToolError(f"{model} is a file", "give the folder that holds config.json, weights and tokenizer")
    try:
        cached = try_to_load_from_cache(str(model), "config.json")
    except HFValidationError:  # no name that the Hub could have
        cached = None
    if not isinstance(cached, str):
        raise ToolError(
            f"there is no folder {model}, and no model of that name in the local cache",
            "correct the path, or download the model first; nothing is downloaded here",
        )
    return Path(cached).parent


def read_model_config(folder: Path) -> PretrainedConfig:
    """
    A folder's config.json.

    Raises:
        ToolError: there is none, none of a language model, or one of no model that could be.
    """
    file = folder / "config.json"
    if not file.exists() and (folder / ADAPTER).exists():
        base = _json(folder / ADAPTER).get("base_model_name_or_path")
        raise ToolError(f"{folder} holds an adapter and no model", f"give the folder of its base, {base}")
    if not file.exists():
        gguf = sorted(file.name for file in folder.glob("*.gguf"))
        raise ToolError(
            f"{folder} has no config.json{f'; it has {_some(gguf)}' if gguf else ''}",
            "give the folder of a model as save_pretrained writes it",
        )
    written = _json(file)
    _check_sizes(file, written)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a wrong file raises is as varied as wrong files
        if "auto_map" in written:
            raise ToolError(f"{folder} wants code of its own to be run (auto_map in config.json)", _OWN_CODE) from error
        raise ToolError(
            f"{file} describes no model that transformers {transformers.__version__} knows: {reason(error)}",
            "correct it, or use a model of a type that this transformers has",
        ) from error
    return config


def _check_sizes(file: Path, written: dict[str, Any]) -> None:
    for sizes in (written, *(part for part in written.values() if isinstance(part, dict))):
        for name in _AT_LEAST_ONE:
            value = sizes.get(name)
            if isinstance(value, int) and value < 1:
                raise ToolError(
                    f"{file} says {name}={value}, of which there is no model", "restore the file of the model"
                )


def context_of(config: PretrainedConfig) -> int | None:
    """Tokens that a model was made for, in one sequence; None where its configuration sets no limit."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None)
    if context is None or not isinstance(rope, dict) or rope.get("rope_type") not in _LONGER_ROPE:
        return context
    original = rope.get("original_max_position_embeddings") or context
    return max(context, int(original * (rope.get("factor") or 1)))


def check_weights(folder: Path, config: PretrainedConfig) -> None:
    """
    Whether all weights are there, whole and of the right shapes; only headers of files are read.

    Raises:
        ToolError: not so.
    """
    files = check_files(folder)
    model_class = _class_of(folder, config)
    if getattr(config, "quantization_config", None) is None and all(f.suffix == ".safetensors" for f in files):
        _check_names(folder, config, model_class, files)


def check_files(folder: Path) -> list[Path]:
    """The files of the weights; ToolError where some are missing, damaged or cut short."""
    files = _weight_files(folder)
    for file in files:
        _check_file(file)
    return files


def check_adapter_files(folder: Path) -> None:
    """Whether the weights of an adapter are there and whole; ToolError where not. PEFT would look for them elsewhere."""
    file = next((folder / name for name in _ADAPTER_WEIGHTS if (folder / name).exists()), None)
    if file is None:
        raise ToolError(
            f"{folder} has no weights of its adapter: neither {' nor '.join(_ADAPTER_WEIGHTS)}", "copy them there"
        )
    _check_file(file)


def _weight_files(folder: Path) -> list[Path]:
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return [folder / name]
        if index.exists():
            parts = sorted(set(_json(index).get("weight_map", {}).values()))
            missing = [part for part in parts if not (folder / part).exists()]
            if missing or not parts:
                raise ToolError(
                    f"{folder} lacks {len(missing)} of the {len(parts)} files that {index.name} names: {_some(missing)}",
                    "download or copy them",
                )
            return [folder / part for part in parts]
    other = sorted(
        file.name for pattern in ("*.gguf", "*.safetensors", "*.bin", "*.pt") for file in folder.glob(pattern)
    )
    beside = f" (it has {_some(other)})" if other else ""
    raise ToolError(
        f"{folder} has no weights: neither {' nor '.join(_WEIGHTS)}, nor an index of several{beside}",
        "copy them there, or give the folder that has them",
    )


def _check_file(file: Path) -> None:
    with file.open("rb") as opened:
        start = opened.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ToolError(f"{file} is a Git LFS pointer, not the weights", "run git lfs pull in its repository")
    cut_short = False
    if file.suffix == ".safetensors":
        try:
            with safe_open(str(file), "pt"):
                pass
        except (SafetensorError, OSError):
            cut_short = True
    elif start.startswith(b"PK"):
        cut_short = not zipfile.is_zipfile(file)
    if cut_short or not start:
        size = file.stat().st_size
        raise ToolError(
            f"{file} is damaged or cut short: its {size} bytes are not the tensors that its header names",
            "download or copy it again",
        )


def _class_of(folder: Path, config: PretrainedConfig) -> type[PreTrainedModel]:
    names = getattr(config, "architectures", None) or []
    if not names:
        raise ToolError(
            f"{folder / 'config.json'} names no architectures, by which TRL finds the model's class",
            'write it there, for example "architectures": ["Qwen3ForCausalLM"]',
        )
    found = getattr(transformers, names[0], None)
    if found is None:
        raise ToolError(
            f"{folder} is a {names[0]}, which transformers {transformers.__version__} does not have", _OWN_CODE
        )
    if not issubclass(found, GenerationMixin):
        raise ToolError(f"{folder} is a {names[0]}, which does not write text", "give a causal language model")
    return found


def _check_names(
    folder: Path, config: PretrainedConfig, model_class: type[PreTrainedModel], files: Sequence[Path]
) -> None:
    tensors = {}
    for file in files:
        with safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensors[name] = torch.empty(opened.get_slice(name).get_shape(), device="meta", dtype=torch.bfloat16)
    try:
        _, info = model_class.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict=tensors,
            device_map="meta",
            dtype=torch.bfloat16,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # what a configuration that does not build raises is as varied as configurations
        raise ToolError(
            f"{folder / 'config.json'} does not build a model: {reason(error)}", "restore the file of the model"
        ) from error
    _check_info(folder, info)


def _check_info(folder: Path | str, info: dict[str, Any]) -> None:
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise ToolError(
            f"the weights of {folder} lack {_count(missing, 'tensor')} that its config.json describes, which would be random: "
            f"{_some(missing)}",
            "are config.json and weights of the same model?",
        )
    differ = sorted(info.get("mismatched_keys") or ())
    if differ:
        name, have, want = differ[0]
        raise ToolError(
            f"in {folder}, {_count(differ, 'tensor')} of another shape than its config.json says: {name} is {list(have)}, not "
            f"{list(want)}",
            "are config.json and weights of the same model?",
        )


def load_model(source: str, dtype: torch.dtype | str, **gguf: str) -> PreTrainedModel:
    """
    A language model, also one that looks at pictures, none of whose weights is random.

    Args:
        source: folder, or a name in the local cache.
        dtype: of the weights; "auto" = the checkpoint's.
        gguf: `gguf_file`, its name in the folder, which is dequantised.

    Raises:
        ToolError: not so.
    """
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False, **gguf)
        pictures = (
            type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        )
        model, info = (AutoModelForImageTextToText if pictures else AutoModelForCausalLM).from_pretrained(
            source,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **gguf,
        )
    except Exception as error:  # what a folder that is no model raises is as varied as such folders
        raise ToolError(
            f"{_subject(source, gguf)} cannot be loaded as a language model: {_other_code(error) or reason(error)}",
            "give a folder as save_pretrained writes it, or a whole .gguf file",
        ) from error
    _check_info(source, info)
    return model


def load_tokenizer(source: str, **gguf: str) -> PreTrainedTokenizerBase:
    """
    A tokenizer that knows more than its special tokens: without files, transformers makes an empty one.

    Args:
        source: folder, or a name in the local cache.
        gguf: as for `load_model`.

    Raises:
        ToolError: not so.
    """
    save = "save it beside the model: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)"
    folder = Path(source)
    without = f"{source} has no tokenizer: none of {', '.join(_TOKENIZERS)} is there"
    bare = folder.is_dir() and not gguf and not any((folder / name).exists() for name in _TOKENIZERS)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False, **gguf)
    except Exception as error:  # as varied as above
        text = (
            without
            if bare
            else f"the tokenizer of {_subject(source, gguf)} cannot be loaded: {_other_code(error) or reason(error)}"
        )
        raise ToolError(text, save) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ToolError(without if bare else f"the tokenizer of {_subject(source, gguf)} knows no word at all", save)
    return tokenizer


def _subject(source: str, gguf: dict[str, str]) -> str:
    return str(Path(source, *gguf.values()))


def _other_code(error: Exception) -> str:
    return "it wants code of its own to be run (auto_map)" if "trust_remote_code" in str(error) else ""


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ToolError(f"{file} cannot be read: {reason(error)}", "restore the file of the model") from error
    if not isinstance(content, dict):
        raise ToolError(f"{file} holds no JSON object", "restore the file of the model")
    return content


def _count(things: Sequence[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
