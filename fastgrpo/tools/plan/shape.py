"""A model as numbers: built on the meta device, so every architecture is counted by its own code, and nothing is loaded."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from fastgrpo.tools.plan.trace import ATTENTION
from fastgrpo.tools.wording import reason

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
        except Exception as error:  # peft and torch raise what they like
            raise ValueError(
                f"lora_targets={lora_targets!r} with lora_rank={lora_rank} make no adapter: {reason(error)}. The model's "
                f"linear layers are {', '.join(names)}."
            ) from error


def _from_config(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    errors: list[Exception] = []
    known = (AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping)
    if not any(type(config) in mapping for mapping in known):
        raise ValueError(f"transformers has no decoder language model of the {config.model_type} architecture to plan.")
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        # An own attention function is traced exactly; models that have none keep theirs.
        for attention in (ATTENTION, "eager"):
            try:
                return auto.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
            except Exception as error:  # a model whose numbers do not go together raises what it likes
                errors.append(error)
    raise ValueError(
        f"a language model of the {config.model_type} architecture cannot be built of these numbers: {reason(errors[0])}."
    ) from errors[0]


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
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
