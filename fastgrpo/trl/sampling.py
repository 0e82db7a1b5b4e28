"""`vllm_sampling_params` of the patched `GRPOConfig`: one dict for all that vLLM's sampler takes."""

from __future__ import annotations

from typing import Any

_TRL_DECIDES = {
    "n": "num_generations",
    "max_tokens": "max_completion_length",
    "logprobs": "no field: the importance-sampling correction needs what TRL asks for",
}


def merge_sampling_params(config: Any, temperature_left_alone: bool) -> None:
    """
    Merges `vllm_sampling_params` into what TRL hands to vLLM's `SamplingParams`.

    TRL lays `generation_kwargs` over its own fields (`top_p`, `top_k`, `min_p`, `repetition_penalty`), in both vLLM modes, and
    knows nothing of a temperature in there when it scores. So the temperature becomes the config's own, with which
    completions are sampled and scored, and the rest goes into `generation_kwargs`.

    Args:
        config: a `GRPOConfig` with all its values; `temperature` and `generation_kwargs` are changed in place.
        temperature_left_alone: whether the user gave no `temperature`.

    Raises:
        ValueError: without vLLM, or with a value that something else decides.
        TypeError: no dict.
    """
    given = config.vllm_sampling_params
    if given is None:
        return
    if not isinstance(given, dict):
        raise TypeError(f"vllm_sampling_params is a {type(given).__name__}; give a dict, on a command line as JSON.")
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
    if "temperature" in given:
        _set_temperature(config, given["temperature"], temperature_left_alone)
    merged = {**others, **{name: value for name, value in given.items() if name != "temperature"}}
    config.generation_kwargs = merged or config.generation_kwargs


def _set_temperature(config: Any, temperature: Any, left_alone: bool) -> None:
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
        raise ValueError(
            f"The temperature in vllm_sampling_params is {temperature!r}; it must be a number above 0, since log-probs are "
            "divided by it."
        )
    if not left_alone and config.temperature != temperature:
        raise ValueError(
            f"temperature is {config.temperature:g}, and {temperature:g} in vllm_sampling_params; completions are sampled and "
            "scored with one temperature: give it once."
        )
    config.temperature = float(temperature)
