"""A model as numbers: built on the meta device, so every architecture is counted by its own code, and nothing is loaded."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, PretrainedConfig

from fastgrpo.tools.plan.trace import ATTENTION

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
_FULL_ATTENTION = "full_attention"
_WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class ModelShape:
    """
    What memory depends on.

    Attributes:
        name: for people.
        parameters: all, tied ones once.
        linear_parameters: weights of linear layers but the output head: what a quantised base holds in 4 or 8 bit.
        embedding_parameters: of embedding layers (tied to the head or not).
        adapter_parameters: of the LoRA adapter; 0 without one.
        layer_parameters: of the largest decoder layer, adapter left out.
        gathered_parameters: of what lies outside the layers: embeddings, head, norms.
        largest_linear: of the largest single matrix among the quantisable ones.
        hidden, layers, vocabulary: H, decoder layers, V.
        experts: mixture of experts.
        tied: the output head's weight is the embeddings'.
    """

    name: str
    parameters: int
    linear_parameters: int
    embedding_parameters: int
    adapter_parameters: int
    layer_parameters: int
    gathered_parameters: int
    largest_linear: int
    hidden: int
    layers: int
    vocabulary: int
    experts: bool
    tied: bool


def config_from_numbers(**numbers: float | bool) -> PretrainedConfig:
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
        if name != "tied" and value < 1:
            raise ValueError(f"{name} is {value}; give 1 or more.")
    for name, divisor in (("hidden", "heads"), ("heads", "kv_heads")):
        if divisor in numbers and numbers[name] % numbers[divisor]:
            raise ValueError(f"{name} is {numbers[name]}, no multiple of {divisor}, {numbers[divisor]}.")
    return LlamaConfig(**{NUMBERS[name]: value for name, value in numbers.items()})


def read_config(model: str | Path | PretrainedConfig) -> tuple[str, PretrainedConfig]:
    """
    Name and configuration of a model; nothing is downloaded.

    Args:
        model: a folder with a config.json, the file itself, the name of a model in the local cache, or a configuration.

    Raises:
        TypeError, ValueError: nothing that transformers reads as a configuration.
    """
    if isinstance(model, PretrainedConfig):
        return model.name_or_path or f"{model.model_type} configuration", copy.deepcopy(model)
    if not isinstance(model, str | Path):
        raise TypeError(
            f"model is a {type(model).__name__}; give a folder, a config.json, or a transformers configuration."
        )
    path = Path(model)
    if not path.exists() and (path.is_absolute() or str(model).startswith(".")):
        raise ValueError(f"there is no {model}. Give a local folder with a config.json, that file, or numbers.")
    name = (path.parent if path.name == "config.json" else path).resolve().name if path.exists() else str(model)
    try:
        return name, AutoConfig.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a wrong file raises is as varied as wrong files
        raise ValueError(
            f"{model} is no model that transformers can describe: {_line(error)}. Give a local folder with a config.json, "
            "that file, or numbers."
        ) from error


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


def build(
    config: PretrainedConfig, dtype: str, lora_rank: int | None, lora_targets: str | tuple[str, ...]
) -> nn.Module:
    """
    The model on the meta device, ready to be counted and traced.

    Args:
        config: its configuration, changed in place.
        dtype: of its weights.
        lora_rank, lora_targets: of the adapter; None = none, and everything trains.

    Raises:
        ValueError: targets that match no layer, or a configuration that is no language model.
    """
    config.__dict__.pop("quantization_config", None)
    with quiet(), torch.device("meta"):
        model = _from_config(config, getattr(torch, dtype))
        if lora_rank is None:
            return model
        names = sorted({name.rsplit(".", 1)[-1] for name, part in model.named_modules() if type(part) is nn.Linear})
        targets = lora_targets if isinstance(lora_targets, str) else list(lora_targets)
        try:
            return get_peft_model(model, LoraConfig(r=lora_rank, target_modules=targets), low_cpu_mem_usage=True)
        except ValueError as error:
            raise ValueError(
                f"lora_targets={lora_targets!r} fit no layer of this model, or one that takes no adapter ({_line(error)}); its "
                f"linear layers are {', '.join(names)}."
            ) from error


def _from_config(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    errors: list[Exception] = []
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        # An own attention function is traced exactly; models that have none keep theirs.
        for attention in (ATTENTION, "eager"):
            try:
                return auto.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
            except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
                errors.append(error)
    raise ValueError(
        f"a {config.model_type} configuration does not build a language model: {_line(errors[0])}."
    ) from errors[0]


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:160]


def measure(name: str, model: nn.Module) -> ModelShape:
    """
    Counts a model from `build`.

    Args:
        name: for people.
        model: with or without an adapter.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    adapter = {id(p) for key, p in model.named_parameters() if ".lora_" in key}
    head = base.get_output_embeddings()
    config = base.config.get_text_config()
    linear = {}
    for key, part in base.named_modules():
        if type(part) is nn.Linear and part is not head and ".lora_" not in key:
            linear[id(part.weight)] = part.weight.numel()
    embeddings = {id(part.weight): part.weight.numel() for part in base.modules() if isinstance(part, nn.Embedding)}
    layers = decoder_layers(base)
    in_layers = [sum(p.numel() for p in layer.parameters() if id(p) not in adapter) for layer in layers]
    total = sum(p.numel() for p in base.parameters() if id(p) not in adapter)
    return ModelShape(
        name=name,
        parameters=total,
        linear_parameters=sum(linear.values()),
        embedding_parameters=sum(embeddings.values()),
        adapter_parameters=sum(p.numel() for p in model.parameters() if id(p) in adapter),
        layer_parameters=max(in_layers, default=0),
        gathered_parameters=total - sum(in_layers),
        largest_linear=max(linear.values(), default=0),
        hidden=config.hidden_size,
        layers=len(layers) or config.num_hidden_layers,
        vocabulary=head.weight.shape[0] if head is not None else config.vocab_size,
        experts=any("experts" in key for key, _ in base.named_modules()),
        tied=head is not None and id(head.weight) in embeddings,
    )


def decoder_layers(base: nn.Module) -> nn.ModuleList:
    """The list of decoder layers, empty where there is none of the configured length."""
    count = base.config.get_text_config().num_hidden_layers
    decoder = base.get_decoder()
    for part in (decoder, *decoder.children()):
        for child in part.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return child
    return nn.ModuleList()


def kv_cache_bytes(config: PretrainedConfig, tokens: int, itemsize: int) -> int:
    """
    Keys and values that transformers keeps for one sequence.

    Args:
        config: of the model.
        tokens: of prompt and completion.
        itemsize: bytes of an element.

    Returns:
        bytes; layers with a window keep the window, layers without attention nothing.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:  # no attention anywhere
        return 0
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention, which transformers caches expanded
        per_token = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    else:
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        per_token = 2 * kv_heads * head_dim
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or tokens
    kinds = getattr(text, "layer_types", None) or [_FULL_ATTENTION] * text.num_hidden_layers
    kept = sum(tokens if kind == _FULL_ATTENTION else min(tokens, window) if kind in _WINDOWED else 0 for kind in kinds)
    return kept * per_token * itemsize


@contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' warnings, which are about weights that nobody loads, and torch's report of a failed trace."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def parse_numbers(text: str) -> dict[str, Any]:
    """`"hidden=2048,layers=28,tied=true"` as the arguments of `config_from_numbers`; ValueError where it is none."""
    numbers = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        try:
            numbers[key] = json.loads(value.lower())
        except ValueError:
            equals = ""
        if not equals or not isinstance(numbers[key], int):
            raise ValueError(f"{part!r} is no NAME=NUMBER; write for example hidden=2048,layers=28,tied=true")
    return numbers
