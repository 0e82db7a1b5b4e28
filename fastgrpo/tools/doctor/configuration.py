"""The layer of the settings: what TRL makes of a configuration file, what it refuses, and what it takes and cannot work."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import torch
from transformers.hf_argparser import string_to_bool
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from fastgrpo.objective import Objective
from fastgrpo.tools.doctor.case import Case, Line, fault
from fastgrpo.tools.wording import ToolError, reason
from fastgrpo.trl.classes import GRPOConfig as PatchedConfig
from fastgrpo.trl.parts import check_generated
from fastgrpo.trl.twins import PREFIX, options_of, settle_twins
from fastgrpo.versions import installed_version

_LAYER = "config"
_CORRECT = "correct it in the configuration (--config)"
_NOT_BUILT = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
"""Settings that change the process, or want several, and are left out of what is built here."""
_GONE = {
    "max_prompt_length": "TRL does not cut prompts any more: drop long ones from the dataset",
    "torch_dtype": "write dtype",
    "warmup_ratio": "write warmup_steps: a number below 1 is a share of all steps",
}
_SWITCHES = ("scale_rewards",)
"""Texts that may be true or false, too."""
_NEEDED = ("num_generations",)
"""TRL's annotation allows None, and its code does not."""
_CHOICES = {
    "scale_rewards": ("group", "batch", "none"),
    "vllm_mode": ("colocate", "server"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
}
_COUNTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    *("num_generations", "num_iterations", "max_completion_length", "lora_r", "lora_alpha", "ref_model_sync_steps"),
    *("vllm_tensor_parallel_size", "vllm_max_model_length", "vllm_server_port"),
)
"""Whole numbers of at least 1."""
_ABOVE_0 = ("learning_rate", "temperature", "repetition_penalty", "vllm_server_timeout", "adam_epsilon", "top_p")
_AT_LEAST_0 = (
    "weight_decay",
    "max_grad_norm",
    "warmup_steps",
    "warmup_ratio",
    "min_p",
    "dataloader_num_workers",
    "seed",
)
_UP_TO_1 = (
    "top_p",
    "min_p",
    "vllm_gpu_memory_utilization",
    "ref_model_mixup_alpha",
    "adam_beta1",
    "adam_beta2",
    "lora_dropout",
)
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}


def check_configuration(case: Case) -> Iterator[Line]:
    """What TRL makes of the settings, and whether a run can work with them."""
    if not case.settings:
        yield Line(_LAYER, "skipped", "no --config given")
        return
    try:
        _check_names(case.settings)
        _check_kinds(case.settings)
        config, model = _built(case.settings, case.processes)
        _check_values(config, model, case.settings)
        _check_options(config, case.settings)
    except ToolError as error:
        yield fault(_LAYER, error)
        return
    count = len(case.settings)
    yield Line(
        _LAYER, "ok", f"{count} setting{'' if count == 1 else 's'}, as TRL {installed_version('trl')} takes them"
    )
    yield from _hints(case, config, model)


def typed_settings(case: Case) -> dict[str, Any]:
    """A case's settings with the values that TRL's parser makes of them; for a configuration that was checked."""
    config, model = _built(case.settings, case.processes)
    return {
        name: next((getattr(part, name) for part in (config, model) if hasattr(part, name)), value)
        for name, value in case.settings.items()
    }


def _classes(settings: Mapping[str, Any]) -> tuple[type, ...]:
    config = PatchedConfig if _has_ours(settings) else GRPOConfig
    return (GRPOScriptArguments, config, ModelConfig, DatasetMixtureConfig)


def _has_ours(settings: Mapping[str, Any]) -> bool:
    return any(name.startswith(PREFIX) or name == "vllm_sampling_params" for name in settings)


@lru_cache
def _hints_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _check_names(settings: Mapping[str, Any]) -> None:
    known = {field.name for cls in _classes(settings) for field in dataclasses.fields(cls)}
    for name in settings:
        if name in known:
            continue
        text = f"TRL {installed_version('trl')} knows no setting {name}"
        if name in _GONE:
            raise ToolError(text, _GONE[name])
        if f"{PREFIX}{name}" in {field.name for field in dataclasses.fields(PatchedConfig)}:
            raise ToolError(
                text, f"write {PREFIX}{name}, with `import fastgrpo.auto` in the script; or Options({name}=...)"
            )
        near = get_close_matches(str(name), sorted(known), 1)
        raise ToolError(text, f"did you mean {near[0]}?" if near else "take it out, or correct its name")


def _check_kinds(settings: Mapping[str, Any]) -> None:
    hints = {name: hint for cls in _classes(settings) for name, hint in _hints_of(cls).items()}
    for name, value in settings.items():
        kinds = tuple(kind for kind in _kinds(hints[name]) if name not in _NEEDED or kind is not type(None))
        if name in _SWITCHES and isinstance(value, bool):
            continue
        if not _fits(value, kinds):
            wanted = " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
            given = "empty" if value is None else f"{value!r}"
            raise ToolError(f"{name} is {given}; it must be {wanted}", _CORRECT)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a field may have; generic ones without what they hold."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(typing.get_origin(member) or member for member in members)


def _fits(value: Any, kinds: tuple[Any, ...]) -> bool:
    if any(kind not in (*_KINDS, type(None)) for kind in kinds):
        return True  # an enumeration, a Literal: TRL says what it takes
    if value is None:
        return type(None) in kinds
    if isinstance(value, str) and str not in kinds and list not in kinds:
        return any(_reads(value, kind) for kind in kinds)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int):
        return int in kinds or float in kinds or (bool in kinds and value in (0, 1))
    return isinstance(value, tuple(kind for kind in kinds if kind is not type(None))) or (
        isinstance(value, str) and list in kinds
    )


def _reads(text: str, kind: Any) -> bool:
    read = {int: int, float: float, bool: string_to_bool}.get(kind)
    try:
        return read is not None and read(text) is not None
    except Exception:  # argparse has an error of its own
        return False


class _Parser(TrlParser):
    def error(self, message: str) -> typing.NoReturn:
        found = re.match(r"argument --(\w+)\S*: (.*)", message, re.DOTALL)
        raise ToolError(f"{found[1]}: {found[2]}" if found else message, _CORRECT)


def _built(settings: Mapping[str, Any], processes: int) -> tuple[Any, Any]:
    """TRL's (GRPOConfig, ModelConfig) of the settings, with a precision that this machine has, as if in so many processes."""
    given = {name: value for name, value in settings.items() if name not in _NOT_BUILT}
    if not torch.cuda.is_available():
        given |= {"bf16": False, "fp16": False, "use_cpu": True, "tf32": None}
    script, config_class, *others = _classes(settings)
    in_all = type(config_class.__name__, (config_class,), {"world_size": property(lambda _: processes)})
    parser = _Parser((script, in_all, *others))
    parser.set_defaults_with_config(**given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, config, model, _ = parser.parse_args_into_dataclasses(args=[])
    except ToolError:
        raise
    except Exception as error:  # TRL and transformers refuse in their own ways
        raise ToolError(f"TRL refuses it: {reason(error)}", _remedy(reason(error), processes)) from error
    return config, model


def _remedy(text: str, processes: int) -> str:
    if text.startswith("False is not a valid"):
        return 'write "no" in quotes: YAML reads no as false'
    if "must be divisible" in text:
        counted = "1 process" if processes == 1 else f"{processes} processes"
        return f"{_CORRECT}; counted for {counted}, --processes says otherwise"
    return _CORRECT


def _check_values(config: Any, model: Any, settings: Mapping[str, Any]) -> None:
    values = {**vars(model), **vars(config)}

    def refuse(name: str, what: str) -> typing.NoReturn:
        default = "" if name in settings else " (TRL's default)"
        raise ToolError(f"{name} is {values[name]!r}{default}; it must be {what}", _CORRECT)

    for name in settings:
        if isinstance(values.get(name), float) and not math.isfinite(values[name]):
            refuse(name, "a finite number")
    for names, fits, what in (
        (_COUNTS, lambda value: value >= 1, "1 or more"),
        (_ABOVE_0, lambda value: value > 0, "above 0"),
        (_AT_LEAST_0, lambda value: value >= 0, "0 or more"),
        (_UP_TO_1, lambda value: 0 <= value <= 1, "between 0 and 1"),
    ):
        for name in names:
            value = values.get(name)
            if isinstance(value, int | float) and not fits(value):
                refuse(name, what)
    for name, choices in _CHOICES.items():
        if values.get(name) is not None and values[name] not in choices:
            refuse(name, f"one of {', '.join(choices)}")
    if config.max_steps < 1 and config.num_train_epochs <= 0:
        refuse("num_train_epochs", "above 0 where max_steps is not given")
    if config.sync_ref_model and not config.beta:
        raise ToolError(
            "sync_ref_model is true, and beta is 0: there is no reference model to sync", "set beta above 0"
        )
    own = {field.name for field in dataclasses.fields(Objective)} & set(values)
    try:
        Objective(**{name: values[name] for name in own})
    except (TypeError, ValueError) as error:
        raise ToolError(reason(error), _CORRECT) from error


def _check_options(config: Any, settings: Mapping[str, Any]) -> None:
    if not _has_ours(settings):
        return
    try:
        settle_twins(config)
        check_generated(config, options_of(config).mini_batch_size)
    except (TypeError, ValueError) as error:
        raise ToolError(reason(error), _CORRECT) from error


def _hints(case: Case, config: Any, model: Any) -> Iterator[Line]:
    settings = case.settings
    parallel = [name for name in ("deepspeed", "fsdp") if settings.get(name)]
    if parallel:
        yield Line(
            _LAYER,
            "hint",
            f"{parallel[0]} is not looked at here",
            "fastgrpo.patch refuses FSDP and DeepSpeed's ZeRO-3 (docs/patch.md); DDP needs neither",
        )
    lora = next((name for name in settings if name.startswith("lora_")), None)
    if lora is not None and not model.use_peft:
        yield Line(
            _LAYER, "hint", f"{lora} is given and use_peft is not: TRL trains all of the model", "use_peft: true"
        )
    size = config.per_device_train_batch_size
    if settings.get(f"{PREFIX}mini_batch_size", 0) > size:
        text = f"{PREFIX}mini_batch_size is more than per_device_train_batch_size, {size}: nothing is taken apart"
        yield Line(_LAYER, "hint", text, f"give less than {size}")
    if not torch.cuda.is_available() and _wants_16_bit(settings):
        yield Line(
            _LAYER,
            "hint",
            "TRL trains in 16 bit unless told otherwise, and refuses that on this machine, which has no GPU",
            "to train here: bf16: false, or `import fastgrpo.auto`, which chooses by the device",
        )
    prompts = config.generation_batch_size // config.num_generations
    if case.rows and len(case.rows) < prompts:
        yield Line(
            _LAYER,
            "hint",
            f"a generation batch has {prompts} prompts, and --prompts has {len(case.rows)}: with no more than these, TRL takes "
            "no step at all",
            "more rows, or a smaller gradient_accumulation_steps or per_device_train_batch_size",
        )


def _wants_16_bit(settings: Mapping[str, Any]) -> bool:
    if settings.get("use_cpu"):
        return False
    return bool(settings.get("fp16")) or settings.get("bf16", True) not in (False, "false", "no")
