"""The `GRPOConfig` and `GRPOTrainer` that `patch_trl` puts in place of TRL's: the same, and patched once built."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import logging
import sys
import typing
from abc import ABCMeta
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import trl.trainer.utils as trl_utils
from accelerate.utils import is_peft_model
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer as TRLTrainer

from fastgrpo.precision import FORCE_FLOAT32, choose_precision, training_device
from fastgrpo.trl.by_name import reduce_by_name
from fastgrpo.trl.compat import UnsupportedError
from fastgrpo.trl.config import Options
from fastgrpo.trl.engine import fitted_engine
from fastgrpo.trl.left_alone import is_left_alone, left_alone, plain
from fastgrpo.trl.patch import patch
from fastgrpo.trl.sampling import MERGED, check_sampling_text, merge_sampling_params, take_out_merged
from fastgrpo.trl.tuned import can_have_reference, price_of, tuned_values
from fastgrpo.trl.twins import options_of, settle_twins, twin_fields

logger = logging.getLogger("fastgrpo")

_HALF = (torch.float16, torch.bfloat16)
_TOLD_APART = ("beta", "top_k", "temperature")
"""Numbers that count as given or not given."""


@dataclass
class Switch:
    """Whether the classes do anything beyond TRL's, and what `fastgrpo_tuned_defaults` is where nobody says."""

    on: bool = False
    tuned_defaults: bool = True


SWITCH = Switch()


def _fields() -> list[tuple[str, Any, Any]]:
    stock = {field.name: field for field in dataclasses.fields(TRLConfig)}
    hints = typing.get_type_hints(TRLConfig)
    numbers = [
        (name, hints[name], dataclasses.field(default=left_alone(stock[name].default), metadata=stock[name].metadata))
        for name in _TOLD_APART
    ]
    return [
        *numbers,
        # None tells "not said" from False; the class that is seen after __post_init__ holds a bool.
        ("fp16", hints["fp16"], dataclasses.field(default=None, metadata=stock["fp16"].metadata)),
        (
            "vllm_sampling_params",
            dict | str | None,
            dataclasses.field(
                default=None,
                metadata={
                    "help": "Parameters of vLLM's sampler (`SamplingParams`), merged over `top_p`, `top_k`, `min_p` and "
                    "`repetition_penalty`. A `temperature` in here is also the one that completions are scored with. "
                    "Requires `use_vllm=True`."
                },
            ),
        ),
        (
            "fastgrpo_tuned_defaults",
            bool | None,
            dataclasses.field(
                default=None,
                metadata={
                    "help": "Whether `beta` and `top_k` get fastgrpo's defaults where they are not given: `beta=0.001`, and "
                    "with vLLM `top_k=-1`. If not set, what `fastgrpo.patch_trl(tuned_defaults=...)` said (default: True)."
                },
            ),
        ),
        *twin_fields(),
        (MERGED, dict | str | None, dataclasses.field(default=None, metadata={"help": argparse.SUPPRESS})),
    ]


_WithTwins = dataclasses.make_dataclass("_WithTwins", _fields(), bases=(TRLConfig,), namespace={"__module__": __name__})


@dataclass
class GRPOConfig(_WithTwins, metaclass=ABCMeta):
    __doc__ = f"""{(TRLConfig.__doc__ or "").rstrip()}

    As patched by fastgrpo: `vllm_sampling_params`, `fastgrpo_tuned_defaults`, and a `fastgrpo_<name>` for every field of
    `fastgrpo.Options`. Precision is chosen where `bf16` and `fp16` are not given.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TRLConfig._VALID_DICT_FIELDS, "vllm_sampling_params", MERGED]

    # What is said when a trainer is built with this config. A pickle of them needs nothing of fastgrpo.
    _fastgrpo_instead_of = MappingProxyType({})  # field -> TRL's value
    _fastgrpo_precision_note = ""
    _fastgrpo_forced_float32 = False

    def __post_init__(self) -> None:
        untouched = {name for name in _TOLD_APART if is_left_alone(getattr(self, name))}
        for name in untouched:
            setattr(self, name, plain(getattr(self, name)))
        if not SWITCH.on:
            self.fp16 = bool(self.fp16)
            super().__post_init__()
            return
        if self.fastgrpo_tuned_defaults is not None and not isinstance(self.fastgrpo_tuned_defaults, bool):
            raise ValueError(
                f"fastgrpo_tuned_defaults is {self.fastgrpo_tuned_defaults!r}; it must be True or False, or None for what "
                "fastgrpo.patch_trl(tuned_defaults=...) said."
            )
        check_sampling_text(self)
        precision = choose_precision(self.bf16, self.fp16, device=training_device(self.use_cpu))
        # TRL itself takes bf16 where nothing is said.
        was_chosen = self.bf16 is None and not self.fp16
        asked = "TRL's bf16" if was_chosen else "fp16=True" if self.fp16 else "bf16=True" if self.bf16 else ""
        self.bf16, self.fp16 = precision.name == "bf16", precision.name == "fp16"
        if precision.forced:
            self.bf16_full_eval = self.fp16_full_eval = False
        super().__post_init__()
        self._settle_autocast(precision.autocast)
        settle_twins(self)
        options_of(self)  # raises on bad values
        was_merged = take_out_merged(self)
        merge_sampling_params(self, was_merged or "temperature" in untouched)
        if self.fastgrpo_tuned_defaults is None:
            self.fastgrpo_tuned_defaults = SWITCH.tuned_defaults
        tuned = tuned_values(self, untouched) if self.fastgrpo_tuned_defaults else {}
        self._fastgrpo_instead_of = {name: getattr(self, name) for name in tuned}
        for name, value in tuned.items():
            setattr(self, name, value)
        self._fastgrpo_forced_float32 = precision.forced
        if asked and (precision.forced or (was_chosen and precision.name != "bf16")):
            self._fastgrpo_precision_note = f"{precision.name} instead of {asked}: {precision.reason}"

    def _settle_autocast(self, autocast: str) -> None:
        # TrainingArguments takes the variable of accelerate where both fields are False.
        if self.mixed_precision == autocast:
            return
        if self.deepspeed_plugin is not None:
            raise ValueError(
                f"ACCELERATE_MIXED_PRECISION={self.mixed_precision} reaches DeepSpeed, but the run is to be "
                f"{'without autocast' if autocast == 'no' else autocast}; set the variable to {autocast!r}."
            )
        self.mixed_precision = autocast

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_by_name(self) if type(self) is GRPOConfig else super().__reduce_ex__(protocol)

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        # An object made before the names were replaced still is what its user calls a GRPOConfig.
        return True if cls is GRPOConfig and TRLConfig in other.__mro__ else NotImplemented


class GRPOTrainer(TRLTrainer, metaclass=ABCMeta):
    __doc__ = TRLTrainer.__doc__

    @functools.wraps(TRLTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not SWITCH.on:
            super().__init__(*args, **kwargs)
            return
        try:
            given = inspect.signature(TRLTrainer.__init__).bind(self, *args, **kwargs)
        except TypeError:
            super().__init__(*args, **kwargs)  # raises, with TRL's own words
            raise
        config = _settle_arguments(given.arguments)
        options = options_of(config) if isinstance(config, _WithTwins) else Options()
        with fitted_engine(config, options.sync):
            super().__init__(*given.args[1:], **given.kwargs)
        if isinstance(config, _WithTwins) and config.fp16:
            _raise_masters(self)
        try:
            patch(self, options)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{error} To train this one as TRL does, call fastgrpo.unpatch_trl() before it is built, or leave out "
                "`import fastgrpo.auto` and fastgrpo.patch_trl()."
            ) from error

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return True if cls is GRPOTrainer and TRLTrainer in other.__mro__ else NotImplemented


def _settle_arguments(given: dict[str, Any]) -> TRLConfig:
    """
    Says what differs from TRL, before anything is loaded, and forces float32 weights where that was asked for.

    Args:
        given: arguments of the trainer by name; changed in place.

    Returns:
        the config that the trainer will have.
    """
    model = given["model"]
    if given.get("args") is None:
        # As TRL does, which would be too late to say what it costs.
        name = model if isinstance(model, str) else trl_utils.get_config_model_id(model.config)
        given["args"] = GRPOConfig(f"{name.split('/')[-1]}-GRPO")
    config = given["args"]
    if not isinstance(config, _WithTwins):
        logger.warning(
            "fastgrpo: args were made before fastgrpo.patch_trl(): the trainer is patched with the default options, and "
            "precision and defaults stay TRL's."
        )
        return config
    if config._fastgrpo_forced_float32:
        _force_float32(given)
    lines = _differences(config, model, given.get("peft_config") is not None)
    if config.process_index == 0:
        _say(*lines)
    return config


def _differences(config: GRPOConfig, model: Any, has_adapter: bool) -> list[str]:
    """What a config sets differently from TRL's and its user did not ask for, with its price; said once for a config."""
    lines = [config._fastgrpo_precision_note] if config._fastgrpo_precision_note else []
    instead_of = config._fastgrpo_instead_of
    config._fastgrpo_instead_of, config._fastgrpo_precision_note = {}, ""
    changed = False
    for name, stock in instead_of.items():
        value = getattr(config, name)
        if name == "beta" and value and not can_have_reference(model, has_adapter):
            config.beta = stock
            lines.append(
                f"beta stays {stock:g}: this model came from no folder or hub that a reference could be loaded from"
            )
        elif value != stock:
            changed = True
            lines.append(f"{name}={value:g} instead of TRL's {stock:g}: {price_of(name, config, model, has_adapter)}")
    if changed:
        lines.append("to keep TRL's: GRPOConfig(fastgrpo_tuned_defaults=False), or give the field a value")
    return lines


def _say(*lines: str) -> None:
    for line in lines:
        print(f"fastgrpo | {line}", file=sys.stderr, flush=True)


def _force_float32(given: dict[str, Any]) -> None:
    model, config = given["model"], given["args"]
    quantised = given.get("quantization_config") is not None or getattr(model, "is_quantized", False)
    if quantised or "quantization_config" in (config.model_init_kwargs or {}):
        raise ValueError(f"{FORCE_FLOAT32}=1 was set, and the model is quantised; unset the one or the other.")
    if isinstance(model, str):
        config.model_init_kwargs = {**(config.model_init_kwargs or {}), "dtype": "float32"}
    elif any(parameter.dtype in _HALF for parameter in model.parameters()):
        given["model"] = model.float()


def _raise_masters(trainer: TRLTrainer) -> None:
    """Makes trained 16-bit weights float32: a gradient scaler refuses gradients in 16 bit, and steps would be rounded away."""
    if getattr(trainer.args, "use_transformers_continuous_batching", False):
        raise ValueError(
            "use_transformers_continuous_batching makes TRL cast the weights to float16, and a gradient scaler refuses such "
            "gradients; leave it False, or train with bf16=True or bf16=False, fp16=False."
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return
    raised = [p for p in trainer.model.parameters() if p.requires_grad and p.dtype in _HALF]
    for parameter in raised:
        parameter.data = parameter.data.float()
    if raised and trainer.is_world_process_zero():
        size = 4 * sum(parameter.numel() for parameter in raised) / 1e9
        what = "the adapter" if is_peft_model(trainer.model) else "the model"
        _say(f"trained weights of {what} in float32 instead of 16 bit ({size:.3g} GB): fp16 needs that")
