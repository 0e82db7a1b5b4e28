"""GRPO defaults that train stably, where the user left a field alone, and what each of them costs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
import trl.trainer.utils as trl_utils
from accelerate.utils import is_peft_model
from transformers import AutoConfig, PretrainedConfig
from trl import GRPOTrainer

BETA = 0.001
"""The KL coefficient of DeepSeek-R1 (arXiv:2501.12948): enough to keep the policy near the model it started from."""
VLLM_ALL_TOKENS = -1
"""What every supported vLLM reads as "no top-k"; transformers reads TRL's 0 so."""
FIELDS = ("beta", "top_k")


def tuned_values(config: Any, left_alone: set[str]) -> dict[str, float | int]:
    """
    The values to put in place of TRL's defaults.

    Args:
        config: a `GRPOConfig` with all its values.
        left_alone: names of the fields that the user gave no value.

    Returns:
        field name -> value, only where it differs from what is there.
    """
    values: dict[str, float | int] = {}
    # Rows without an advantage have a gradient once there is a KL term, so the two exclude each other.
    if "beta" in left_alone and not getattr(config, "fastgrpo_skip_zero_advantage", False):
        values["beta"] = BETA
    if "top_k" in left_alone and config.use_vllm and "top_k" not in (config.generation_kwargs or {}):
        values["top_k"] = VLLM_ALL_TOKENS
    return {name: value for name, value in values.items() if value != getattr(config, name)}


def price_of(name: str, config: Any, model: Any, has_adapter: bool) -> str:
    """
    What a tuned default costs, in words.

    Args:
        name: one of `FIELDS`.
        config: the `GRPOConfig` in use.
        model: what the trainer is built with: a name, a path or a model.
        has_adapter: whether an adapter will be trained.
    """
    if name == "top_k":
        return "all tokens, in vLLM's own words; costs nothing"
    forward = "one more forward without gradients for every batch"
    if has_adapter or _has_adapter(model):
        return f"{forward}; no second model, since the adapter can be switched off"
    size = reference_gb(model, config)
    of_size = f" of {size:.3g} GB" if size is not None else ""
    return f"{forward}, and a second copy of the model{of_size}, loaded from {_name_of(model)}"


def can_have_reference(model: Any, has_adapter: bool) -> bool:
    """Whether TRL can build the reference model: it loads it from where the policy came from, or switches the adapter off."""
    if isinstance(model, str) or has_adapter or _has_adapter(model):
        return True
    return bool(_name_of(model))


def _has_adapter(model: Any) -> bool:
    return not isinstance(model, str) and is_peft_model(model)


def reference_gb(model: Any, config: Any) -> float | None:
    """
    Size of the weights of the reference model that TRL loads for full fine-tuning.

    Args:
        model: a name, a path or a model.
        config: the `GRPOConfig` in use.

    Returns:
        GB (10^9 bytes); None where the model's configuration cannot be read.
    """
    init = config.model_init_kwargs if isinstance(config.model_init_kwargs, dict) else {}
    dtype = init.get("dtype", "float32")
    if "dtype" not in init and not isinstance(model, str) and _reference_follows_policy():
        dtype = model.dtype
    try:
        if dtype in ("auto", None):
            dtype = _declaration(model, init, config).dtype or torch.float32
        if isinstance(model, str):
            model = _without_weights(_declaration(model, init, config))
    except Exception:  # whatever is wrong with the model is for TRL to say, when it loads it
        return None
    size = (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)).itemsize
    return sum(parameter.numel() for parameter in model.parameters()) * size / 1e9


def _name_of(model: Any) -> str:
    return model if isinstance(model, str) else trl_utils.get_config_model_id(model.config)


def _declaration(model: Any, init: dict[str, Any], config: Any) -> PretrainedConfig:
    known = {key: init[key] for key in ("revision",) if key in init}
    return AutoConfig.from_pretrained(_name_of(model), trust_remote_code=config.trust_remote_code, **known)


def _without_weights(config: PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])._from_config(config)


def _reference_follows_policy() -> bool:
    """Whether this TRL loads the reference in the dtype of a policy given as a model; older ones load it in float32."""
    return 'setdefault("dtype", self.model.dtype)' in inspect.getsource(GRPOTrainer.__init__)
