"""`vllm_sampling_params` of the patched `GRPOConfig`: one dict for all that vLLM's sampler takes."""

from __future__ import annotations

import json
import math
from typing import Any

from trl import GRPOConfig as TRLConfig

_TRL_DECIDES = {
    "n": "num_generations",
    "max_tokens": "max_completion_length",
    "logprobs": "no field: the importance-sampling correction needs what TRL asks for",
}


MERGED = "vllm_sampling_params_merged"
"""Name of what a config has from `vllm_sampling_params`; a field, since `dataclasses.replace` copies nothing else."""


def check_sampling_text(config: Any) -> None:
    """
    Raises where `vllm_sampling_params` is a text, as on a command line, that transformers will not read as a dict.

    Args:
        config: a `GRPOConfig` before its `__post_init__`; blanks around the text are taken off.

    Raises:
        ValueError: no JSON.
        TypeError: JSON of something else than a dict.
    """
    text = config.vllm_sampling_params
    if not isinstance(text, str):
        return
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"vllm_sampling_params is {text!r}, which is no JSON ({error}); {_WANTED}") from error
    _check_dict(value)
    config.vllm_sampling_params = text.strip()


def take_out_merged(config: Any) -> bool:
    """
    Takes out what the config that this one is a copy of had from its `vllm_sampling_params`.

    What was given another value since stays.

    Args:
        config: a `GRPOConfig`; `temperature` and `generation_kwargs` are changed in place.

    Returns:
        whether the temperature was among it, and is TRL's default again.
    """
    merged = getattr(config, MERGED)
    if not merged:
        return False
    setattr(config, MERGED, None)
    absent = object()
    others = config.generation_kwargs or {}
    kept = {name: value for name, value in others.items() if merged.get(name, absent) != value}
    if len(kept) < len(others):
        config.generation_kwargs = kept or None
    if merged.get("temperature", absent) != config.temperature:
        return False
    config.temperature = TRLConfig.__dataclass_fields__["temperature"].default
    return True


def merge_sampling_params(config: Any, temperature_left_alone: bool) -> None:
    """
    Merges `vllm_sampling_params` into what TRL hands to vLLM's `SamplingParams`.

    TRL lays `generation_kwargs` over its own fields (`top_p`, `top_k`, `min_p`, `repetition_penalty`), in both vLLM modes, and
    knows nothing of a temperature in there when it scores. So the temperature becomes the config's own, with which
    completions are sampled and scored, and the rest goes into `generation_kwargs`.

    Args:
        config: a `GRPOConfig` with all its values; `temperature` and `generation_kwargs` are changed in place, and
            `vllm_sampling_params_merged` says what is new in them.
        temperature_left_alone: whether the user gave no `temperature`.

    Raises:
        ValueError: without vLLM, or with a value that something else decides.
        TypeError: no dict.
    """
    given = config.vllm_sampling_params
    if given is None:
        return
    _check_dict(given)
    if not config.use_vllm:
        raise ValueError(
            "vllm_sampling_params was given without use_vllm=True. Set that, or give generation_kwargs, which transformers' "
            "own generation takes, and temperature as a field."
        )
    for name, field in _TRL_DECIDES.items():
        if name in given:
            raise ValueError(
                f"vllm_sampling_params sets {name!r}, which TRL decides; leave it out. Its field: {field}."
            )
    others = config.generation_kwargs or {}
    for name, value in given.items():
        if name in others and others[name] != value:
            raise ValueError(
                f"{name!r} is {value!r} in vllm_sampling_params and {others[name]!r} in generation_kwargs; give it once."
            )
    new = {name: value for name, value in given.items() if name != "temperature" and name not in others}
    config.generation_kwargs = {**others, **new} or config.generation_kwargs
    if "temperature" in given:
        _set_temperature(config, given["temperature"], temperature_left_alone)
        if temperature_left_alone:
            new["temperature"] = config.temperature
    setattr(config, MERGED, new or None)


_WANTED = "give a dict, on a command line as JSON: '{\"top_k\": 5}'."


def _check_dict(value: Any) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"vllm_sampling_params is a {type(value).__name__}, {value!r}; {_WANTED}")


def _set_temperature(config: Any, temperature: Any, left_alone: bool) -> None:
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (number and temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"The temperature in vllm_sampling_params is {temperature!r}; it must be a finite number above 0, since "
            "log-probs are divided by it."
        )
    if not left_alone and config.temperature != temperature:
        raise ValueError(
            f"temperature is {config.temperature:g}, and {temperature:g} in vllm_sampling_params; completions are sampled and "
            "scored with one temperature: give it once."
        )
    config.temperature = float(temperature)
