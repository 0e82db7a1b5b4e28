"""`estimate_memory`: from a model and settings to a `MemoryPlan`, with what one changed setting would free."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from fastgrpo.tools.plan.config import quantization_of, read_config
from fastgrpo.tools.plan.memory import MemoryPlan, assemble
from fastgrpo.tools.plan.settings import PlanSettings
from fastgrpo.tools.plan.shape import ModelShape, build, decoder_layers, kv_cache_bytes, measure, quiet
from fastgrpo.tools.plan.trace import Activations, trace
from fastgrpo.tools.wording import reason


def estimate_memory(
    model: str | Path | PretrainedConfig | torch.nn.Module, *, settings: PlanSettings | None = None, **changes: Any
) -> MemoryPlan:
    """
    The memory that a GRPO run will need on one device, term by term.

    The model is built on the meta device: no weight is loaded or downloaded. Parameters and adapter are counted from it, and
    activations are followed through two of its layers (`fastgrpo.tools.plan.trace`).

    Args:
        model: a folder with a config.json, that file, a transformers configuration, or a model that has one.
        settings: of the run; None = the defaults of `PlanSettings`.
        changes: fields of `PlanSettings`, over `settings`.

    Returns:
        MemoryPlan: `.terms` (GB by name), `.total`, `.capacity`, `.free`, `.fits`, `.advice`.

    Raises:
        TypeError: an unknown setting, or a value of a wrong type.
        ValueError: a setting that is not allowed, a model that cannot be described, LoRA targets that match nothing.
    """
    _check_names(changes)
    if not isinstance(settings, PlanSettings | None):
        raise TypeError(f"settings is {settings!r}; give PlanSettings or None, and single settings by their names.")
    settings = dataclasses.replace(settings or PlanSettings(), **changes)
    name, config = read_config(model)
    if settings.quantization is None and (found := quantization_of(config)):
        settings = dataclasses.replace(settings, quantization=found)
    return _Estimator(name, config).plan(settings)


def _check_names(changes: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(PlanSettings)]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" ({near[0]}?)" if near else ""
            raise TypeError(f"a plan has no setting {name}{meant}. Its settings are {', '.join(known)}.")


class _Estimator:
    """Plans of one model; what settings share is built once."""

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        self._name, self._config = name, config
        self._shapes: dict[tuple[Any, ...], ModelShape] = {}
        self._traces: dict[tuple[Any, ...], tuple[Activations, str]] = {}

    def plan(self, settings: PlanSettings) -> MemoryPlan:
        shape = self._shape(settings)
        activations, note = self._activations(settings, shape)
        kv_bytes = kv_cache_bytes(
            self._config, settings.prompt_length + settings.completion_length, settings.weight_bytes
        )
        plan = assemble(settings, shape, activations, kv_bytes)
        own = [note] if note else []
        longest = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        if longest and settings.prompt_length + settings.completion_length > longest:
            own.append(
                f"prompt and completion together are {settings.prompt_length + settings.completion_length} tokens; the model's "
                f"context is {longest}"
            )
        return dataclasses.replace(plan, notes=(*plan.notes, *own), plan_with=self.plan)

    def _build(self, settings: PlanSettings) -> torch.nn.Module:
        return build(copy.deepcopy(self._config), settings.dtype, settings.lora_rank, settings.targets)

    def _shape(self, settings: PlanSettings) -> ModelShape:
        key = (settings.lora_rank, settings.targets)
        if key not in self._shapes:
            model = self._build(settings)
            try:
                self._shapes[key] = measure(self._name, model)
            except (AttributeError, TypeError) as error:
                raise ValueError(f"{self._name} is no decoder that can be planned: {reason(error)}.") from error
        return self._shapes[key]

    def _activations(self, settings: PlanSettings, shape: ModelShape) -> tuple[Activations, str]:
        rows, length = settings.rows
        key = (settings.lora_rank, settings.targets, settings.dtype, settings.compute_dtype, settings.checkpointing)
        key = (*key, rows, length, settings.continued_tokens, settings.fused_layers, settings.quantization)
        if key not in self._traces:
            self._traces[key] = self._trace(settings, shape, rows, length)
        return self._traces[key]

    def _trace(self, settings: PlanSettings, shape: ModelShape, rows: int, length: int) -> tuple[Activations, str]:
        try:
            model = self._build(settings)
            base = model.get_base_model() if hasattr(model, "peft_config") else model
            layers = decoder_layers(base)
            if len(layers) < 2:
                raise ValueError("fewer than two decoder layers")
            with quiet():
                found = trace(
                    model,
                    layers,
                    rows=rows,
                    length=length,
                    hidden=shape.hidden,
                    dtype=getattr(torch, settings.dtype),
                    autocast=getattr(torch, settings.compute_dtype) if settings.autocast else None,
                    checkpointing=settings.checkpointing,
                    continued=settings.continued_tokens,
                    # LoRA layers on a quantised base run their own forward.
                    fused_layers=settings.fused_layers and settings.quantization is None,
                )
            return found, ""
        except Exception as error:  # a model whose layers need values (some mixtures of experts) raises what it likes
            return _rule_of_thumb(self._config, settings, shape, rows * length), (
                "activations are a rule of thumb, good to a third: the model's layers cannot be followed "
                f"({reason(error)})"
            )


def _rule_of_thumb(config: PretrainedConfig, settings: PlanSettings, shape: ModelShape, tokens: int) -> Activations:
    """16 H + 5 I elements a token and layer, I the width that one token uses of the feed-forward part."""
    text = config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * shape.hidden
    if isinstance(inner, list):  # one for each layer
        inner = max(inner)
    if shape.experts:
        used = getattr(text, "num_experts_per_tok", 1) or 1
        inner = used * (getattr(text, "moe_intermediate_size", None) or inner)
    layer = tokens * (16 * shape.hidden + 5 * inner) * settings.compute_bytes
    inputs = tokens * shape.hidden * settings.weight_bytes
    ends = tokens * shape.hidden * 8  # last norm in float32, and its output
    working = tokens * 4 * inner * settings.compute_bytes
    casts = shape.linear_parameters * settings.compute_bytes if settings.full and settings.dtype == "float32" else 0
    if settings.checkpointing:
        return Activations(shape.layers * inputs + ends, layer + working, inputs, casts if settings.autocast else 0)
    return Activations(shape.layers * layer + ends, working, layer, 0)
