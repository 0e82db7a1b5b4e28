"""Weights as a rollout engine wants them: LoRA merged out of place, or the adapter alone in a file.

The model that trains is only read. `merge_adapter` of PEFT, which stock TRL calls at each sync, adds to its base weights and
subtracts again, which moves them in 16 bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_PEFT_PREFIX = "base_model.model."
# Initialisations that leave the base weights as they were loaded, so that adapter and checkpoint belong together.
_ADDITIVE_INITS = (True, False, "gaussian", "eva", "orthogonal")


def lora_obstacle(model: nn.Module) -> str:
    """
    Why a model's adapter is not a plain LoRA of linear layers, so that its weights must travel another way.

    Args:
        model: a `PeftModel`.

    Returns:
        The reason, naming what stands in the way; empty where nothing does.
    """
    active = model.active_adapters
    if len(active) != 1:
        return f"{len(active)} adapters are active ({', '.join(active)})"
    config = model.peft_config[active[0]]
    if config.peft_type != "LORA":
        return f"the adapter is {getattr(config.peft_type, 'value', config.peft_type)}, not LoRA"
    for name in ("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"):
        if getattr(config, name, None):
            return f"the adapter has {name}={getattr(config, name)}"
    if config.use_dora:
        return "the adapter is DoRA (use_dora=True)"
    if config.bias != "none" or getattr(config, "lora_bias", False):
        return f"the adapter trains biases (bias={config.bias!r}, lora_bias={getattr(config, 'lora_bias', False)})"
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        name = name.removeprefix(_PEFT_PREFIX)
        if any(module is end for end in ends):
            return f"the adapter sits on {name}, an embedding or the output head"
        if type(module.lora_A[active[0]] if active[0] in getattr(module, "lora_A", ()) else None) is not nn.Linear:
            return f"{name} is a {_kind(module)}, not LoRA on a linear layer"
        if getattr(module, "lora_variant", None):
            return f"{name} is a variant of LoRA"
    return ""


def merge_obstacle(model: nn.Module) -> str:
    """Why LoRA of a model cannot be merged out of place: `lora_obstacle`, or a base that is no plain matrix."""
    obstacle = lora_obstacle(model)
    if obstacle:
        return obstacle
    for name, module in _lora_modules(model):
        base = module.get_base_layer()
        if (
            type(module) is not LoraLinear
            or type(base) not in (nn.Linear, Conv1D)
            or not base.weight.is_floating_point()
        ):
            return f"the base of {name} is a {_kind(base)}, not a plain matrix"
    return ""


def adapter_obstacle(model: nn.Module) -> str:
    """Why the adapter alone does not describe a model: something else is trained, or the base was changed."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and model.prefix not in name:
            return f"{name.removeprefix(_PEFT_PREFIX)} is trained beside the adapter"
    active = model.active_adapters
    init = getattr(model.peft_config[active[0]], "init_lora_weights", True) if len(active) == 1 else True
    if init not in _ADDITIVE_INITS:
        return f"init_lora_weights={init!r} changes the base weights"
    return ""


class EngineWeight(NamedTuple):
    """A parameter on its way to an engine."""

    name: str
    """The engine's."""
    parameter: nn.Parameter
    lora: LoraLinear | None
    """The layer whose base it is."""


def engine_parameters(model: nn.Module, rename: Callable[[str], str]) -> list[EngineWeight]:
    """
    What an engine gets of a model, in the order and under the names of `VLLMGeneration._iter_named_params` of TRL.

    Args:
        model: the model that trains, a `PeftModel` or not.
        rename: the engine's name for a parameter, given transformers' name.
    """
    lora = {id(module.get_base_layer().weight): module for _, module in _lora_modules(model)}
    prefix = getattr(model, "prefix", None)
    return [
        EngineWeight(
            rename(name.removeprefix(_PEFT_PREFIX).replace(".base_layer", "")), parameter, lora.get(id(parameter))
        )
        for name, parameter in model.named_parameters()
        if prefix is None or prefix not in name
    ]


def engine_weights(
    parameters: list[EngineWeight], everything: bool, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """
    Weights for an engine, one at a time.

    Args:
        parameters: see `engine_parameters`; they are only read.
        everything: False = only what training changes: matrices under LoRA, and parameters that require a gradient.
        merge: False = a matrix under LoRA is its base alone.

    Yields:
        (name, weight). A matrix under LoRA is W + scaling B A in float32, for the engine to round once to its own dtype.
    """
    for name, parameter, lora in parameters:
        if lora is not None and merge:
            yield name, merged_weight(lora)
        elif everything or parameter.requires_grad:
            yield name, parameter.data


@torch.no_grad()
def merged_weight(layer: LoraLinear) -> Tensor:
    """
    The weight that a LoRA layer acts as, out of place: W + scaling B A, the sum of `get_delta_weight` of PEFT.

    Args:
        layer: of PEFT, with at most one active adapter.

    Returns:
        `[out, in]` (`[in, out]` where the base is a `Conv1D`) float32, on the weight's device.

    Raises:
        RuntimeError: the adapter is already merged into the base, so that it would count twice.
    """
    if layer.merged:
        raise RuntimeError(
            "The adapter is merged into the model's base weights (merge_adapter was called), so they are not its base any "
            "more; call unmerge_adapter() before weights are handed to vLLM."
        )
    weight = layer.get_base_layer().weight.float()
    for name in layer.active_adapters:
        if layer.disable_adapters or name not in layer.lora_A:
            continue
        up, down = layer.lora_B[name].weight, layer.lora_A[name].weight
        with torch.autocast(weight.device.type, enabled=False):
            if layer.fan_in_fan_out:
                up, down = down.T, up.T
            weight = torch.addmm(weight, up.float(), down.float(), alpha=layer.scaling[name])
    return weight


def save_adapter(model: nn.Module, folder: Path) -> None:
    """
    Writes the active LoRA adapter as vLLM reads it: PEFT's two files.

    The scaling of every layer is multiplied into its B, since vLLM takes one scaling for all, without PEFT's patterns.

    Args:
        model: a `PeftModel` without `lora_obstacle`.
        folder: made by this.
    """
    (adapter,) = model.active_adapters
    tensors: dict[str, Tensor] = {}
    rank = 1
    for name, module in _lora_modules(model):
        if adapter not in module.lora_A:
            continue
        down, up = module.lora_A[adapter].weight.detach(), module.lora_B[adapter].weight.detach()
        rank = max(rank, down.shape[0])
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = down.contiguous()
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = (up.float() * module.scaling[adapter]).to(up.dtype)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.peft_config[adapter].base_model_name_or_path),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in _lora_modules(model)}),
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


def largest_rank(model: nn.Module) -> int:
    """The largest rank of a model's active LoRA adapter, by layer."""
    return max(
        (module.lora_A[name].weight.shape[0] for _, module in _lora_modules(model) for name in module.lora_A), default=1
    )


def count_lora_matrices(model: nn.Module) -> int:
    """How many weight matrices of a model are under LoRA."""
    return sum(1 for _ in _lora_modules(model))


def _lora_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and hasattr(module, "lora_A"):
            yield name.removeprefix(_PEFT_PREFIX), module


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"
