"""What of the installed TRL, and of a trainer, the patch can work with. Everything else is refused by name."""

from __future__ import annotations

import hashlib
import inspect
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
import trl
import trl.trainer.utils as trl_utils
from packaging.version import Version
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import GRPOTrainer

from fastgrpo.trl.images import images_obstacle

TRL_RANGE = ("1.12", "1.17")
SCORING_METHOD = "_get_per_token_logps_and_entropies"
LOSS_METHOD = "_compute_loss"
GENERATE_METHOD = "_generate_and_score_completions"
HEAD_NAME = "_ChunkedLogProbFunction"
CHECKPOINTING_NAME = "disable_gradient_checkpointing"

# The methods' source (SHA-256, first 16 digits) in the releases they were read in. Another text may mean another thing.
_KNOWN_SOURCES = {
    SCORING_METHOD: {"331ae01b88d8e2cf": "1.12, 1.13", "dc17fee20840b7eb": "1.14", "ea73c3909275851d": "1.15, 1.16"},
    LOSS_METHOD: {"75bd01badfb43ed6": "1.12 to 1.14", "80295546bbdbf6f7": "1.15, 1.16"},
}
# Where these have another text, the patch does without what rests on them.
_KNOWN_OPTIONAL_SOURCES = {
    GENERATE_METHOD: {
        "db028931a84025f2": "1.12, 1.13",
        "2deae91942535170": "1.14.0, 1.14.1",
        "e03ed7a34c24a6b3": "1.14.2",
        "1fa48922792dcd5c": "1.15, 1.16",
    }
}
_HALF = (torch.bfloat16, torch.float16)
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class UnsupportedError(ValueError):
    """A trainer or an installation that `fastgrpo.patch` cannot speed up without changing results."""


def check_installation() -> None:
    """
    Raises `UnsupportedError` unless the installed TRL has the names and signatures the patch replaces.

    A version outside the tested range is refused even where the names are there: what they mean may have changed.
    """
    installed = Version(version("trl"))
    low, high = TRL_RANGE
    if not Version(low) <= installed < Version(high):
        raise UnsupportedError(
            f"trl {installed} is installed; this version of fastgrpo works with trl >= {low}, < {high}. "
            f'Install one of them: pip install "trl>={low},<{high}"'
        )
    head = getattr(trl_utils, HEAD_NAME, None)
    if head is None or not (hasattr(head, "original") or head.__module__.startswith("trl.")):
        raise UnsupportedError(
            f"trl {installed} is in the supported range, but its `{HEAD_NAME}`, which fastgrpo replaces, is "
            f"{'missing' if head is None else f'from {head.__module__}'}; something else modified trl. Start without that, "
            "or reinstall trl from its release."
        )
    for method in _KNOWN_SOURCES:
        _check_source(method, installed)


def _check_source(method: str, installed: Version) -> None:
    function = getattr(GRPOTrainer, method, None)
    if function is None:
        raise UnsupportedError(f"trl {installed} has no GRPOTrainer.{method}; reinstall trl from its release.")
    package = Path(trl.__file__).parent
    layer = function
    while layer is not None:
        if not Path(inspect.getfile(layer)).is_relative_to(package):
            raise UnsupportedError(
                f"GRPOTrainer.{method} was replaced by {layer.__module__}.{layer.__qualname__}, for every trainer in this "
                "process; fastgrpo would hide it. Make that a subclass of GRPOTrainer, or start without it."
            )
        layer = getattr(layer, "__wrapped__", None)
    digest = _digest(function)
    if digest not in _KNOWN_SOURCES[method]:
        raise UnsupportedError(
            f"The source of GRPOTrainer.{method} in trl {installed} ({digest}) is none that this version of fastgrpo was "
            f"tested with (trl >= {TRL_RANGE[0]}, < {TRL_RANGE[1]}); is it modified, or a newer patch release? Install another "
            "release of trl, or a newer fastgrpo."
        )


def has_known_source(method: str) -> bool:
    """Whether a GRPOTrainer method that the patch can do without is as some release that was tested has it."""
    return _digest(getattr(GRPOTrainer, method)) in _KNOWN_OPTIONAL_SOURCES[method]


def _digest(function: Any) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def has_fused_head() -> bool:
    """Whether this TRL (1.15 and later) scores through a fused head of the model; before, it takes full logits."""
    return hasattr(trl_utils, "add_fused_lm_head")


def check_trainer(trainer: GRPOTrainer) -> None:
    """Raises `TypeError` for what is no GRPOTrainer, `UnsupportedError` for one the patch does not support yet."""
    if not isinstance(trainer, GRPOTrainer):
        raise TypeError(
            f"fastgrpo.patch takes a trl.GRPOTrainer, built and ready; it was given a {type(trainer).__name__}."
        )
    for cls in type(trainer).__mro__:
        if cls.__module__.split(".")[0] in ("unsloth", "unsloth_zoo", "unsloth_compiled_cache"):
            raise UnsupportedError(
                f"The trainer's class {cls.__name__} comes from Unsloth, which replaces the same methods; use one or the "
                "other: start Python without importing unsloth."
            )
    if not has_fused_head() and trainer.args.use_liger_kernel:
        raise UnsupportedError(
            "use_liger_kernel=True makes this TRL compute the loss without its log-prob method, so there is nothing to "
            "patch; set use_liger_kernel=False, or use TRL 1.15 or later."
        )
    if trainer.is_fsdp_enabled:
        raise UnsupportedError(
            "The trainer shards its model with FSDP, which is not supported yet; use DDP, or no patch."
        )
    if trainer.is_deepspeed_enabled and getattr(trainer.accelerator.state.deepspeed_plugin, "zero_stage", 0) == 3:
        raise UnsupportedError("The trainer uses DeepSpeed ZeRO-3, which is not supported yet; use ZeRO-2 or lower.")
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size", "tp_size"):
        if parallelism is not None and getattr(parallelism, name, 1) > 1:
            raise UnsupportedError(
                f"parallelism_config.{name} is {getattr(parallelism, name)}; only 1 is supported yet."
            )
    _check_model(trainer.model, "model")
    if trainer.ref_model is not None:
        _check_model(trainer.accelerator.unwrap_model(trainer.ref_model), "reference model")


def overrides(trainer: GRPOTrainer, method: str) -> bool:
    """Whether the trainer, by its class or on the object, brings its own version of a GRPOTrainer method."""
    return has_own_attribute(trainer, method) or getattr(type(trainer), method) is not getattr(GRPOTrainer, method)


def loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """`[B, T]`, not 0 on the tokens of a micro-batch that its loss counts: completions, without what tools said."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


class Standing:
    """
    What a patch puts on a trainer in place of one of its methods; a deep copy of the trainer gets the class's method.

    Attributes:
        trainer: the trainer.
        replaces: the name of the method.
    """

    trainer: GRPOTrainer
    replaces: ClassVar[str]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of a patched trainer is a stock one: nobody could unpatch it.
        copied = memo.get(id(self.trainer), self.trainer)
        return types.MethodType(getattr(type(copied), self.replaces), copied)


def has_own_attribute(trainer: GRPOTrainer, method: str) -> bool:
    """Whether something else than the class's method, or a patch's, stands on the object."""
    present = trainer.__dict__.get(method)
    if isinstance(present, Standing):
        return False
    return present is not None and getattr(present, "__func__", None) is not getattr(type(trainer), method)


def attention_of(model: torch.nn.Module, trainer: GRPOTrainer) -> str | None:
    """The attention implementation of a model, as it is now."""
    return unwrapped(trainer, model).config.get_text_config()._attn_implementation


def unwrapped(trainer: GRPOTrainer, model: torch.nn.Module) -> torch.nn.Module:
    """A model without what accelerate wraps around it, and without its adapters."""
    # To see whether one is wrapped, accelerate walks through all modules; a wrapper has no configuration.
    wrapped = not isinstance(getattr(model, "config", None), PreTrainedConfig)
    return base_model(trainer.accelerator.unwrap_model(model) if wrapped else model)


def models_of(trainer: GRPOTrainer) -> list[torch.nn.Module]:
    """Policy, and reference where it is a model of its own."""
    models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
    return [base_model(trainer.accelerator.unwrap_model(model)) for model in models]


def packing_obstacle(trainer: GRPOTrainer) -> str:
    """Why rows of this trainer must reach the model as TRL pads them; empty where they may be left-packed."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if getattr(model, "_is_stateful", False) or getattr(base_model(model), "_is_stateful", False):
        return "the model carries state-space or linear-attention layers"
    layers = set(getattr(base_model(model).config.get_text_config(), "layer_types", None) or ())
    if layers - _ATTENTION_LAYERS:
        return f"the model has layers of type {', '.join(sorted(layers - _ATTENTION_LAYERS))}"
    if overrides(trainer, SCORING_METHOD):
        return f"{type(trainer).__name__} brings its own {SCORING_METHOD}"
    if trainer._is_vlm and not has_fused_head():
        return "this TRL scores rows with images through full logits"
    if trainer.args.neftune_noise_alpha:
        return "neftune_noise_alpha makes the size of its noise depend on the width of the rows"
    if trainer.args.torch_compile:
        return "torch_compile=True would compile anew for every width"
    return ""


def varlen_obstacle(trainer: GRPOTrainer) -> str:
    """Why rows of this trainer cannot reach the model as one row without padding; empty where they may."""
    device = trainer.accelerator.device.type
    if device not in ("cpu", "cuda"):
        return f"there is no padding-free attention for {device} yet"
    for model in models_of(trainer):
        obstacle = _model_obstacle(model) or (images_obstacle(model) if trainer._is_vlm else "")
        if not obstacle and device == "cuda":
            obstacle = _flash_obstacle(trainer, model)
        if obstacle:
            return obstacle
    return ""


def _model_obstacle(model: torch.nn.Module) -> str:
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    if not _accepts_position_ids(model):
        return "the model takes no position_ids"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "the model attends in chunks"
    if not getattr(model, "_supports_attention_backend", False):
        return "the model's attention cannot be exchanged"
    if implementation not in ALL_ATTENTION_FUNCTIONS:
        return f"attn_implementation={implementation!r} cannot be exchanged{_instead_of(implementation, model)}"
    if _attention_dropout(model):
        return f"attention dropout is {_attention_dropout(model):g}"
    return ""


def _instead_of(implementation: str, model: torch.nn.Module) -> str:
    if getattr(model, "_supports_sdpa", False):
        return "; 'sdpa' can"
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return (
            f", and the model's softcap of attention scores needs {implementation!r}: transformers has no 'sdpa' for it"
        )
    return f", and transformers has no 'sdpa' for {type(model).__name__}"


def _flash_obstacle(trainer: GRPOTrainer, model: torch.nn.Module) -> str:
    if trainer.accelerator.mixed_precision not in ("bf16", "fp16") and model.dtype not in _HALF:
        return "torch's flash kernels need bf16 or fp16"
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return "torch's flash kernels know no softcap of attention scores"
    return ""


def has_attention_window(trainer: GRPOTrainer) -> bool:
    """Whether some layer of the model sees a window of the past only."""
    config = base_model(trainer.accelerator.unwrap_model(trainer.model)).config.get_text_config()
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        return "sliding_attention" in layers
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def accepts_position_ids(trainer: GRPOTrainer) -> bool:
    """Whether the model's forward takes explicit positions. A vision-language model finds its own."""
    return not trainer._is_vlm and _accepts_position_ids(base_model(trainer.accelerator.unwrap_model(trainer.model)))


def _accepts_position_ids(model: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model under its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_model(model: torch.nn.Module, role: str) -> None:
    for name, config in getattr(model, "peft_config", {}).items():
        if config.is_prompt_learning:
            raise UnsupportedError(
                f"The {role}'s adapter {name!r} is prompt learning ({config.peft_type}), which adds virtual tokens; use LoRA."
            )
    head = base_model(model).get_output_embeddings()
    if hasattr(head, "token_adapter"):
        raise UnsupportedError(
            f"The {role}'s output head is tied to embeddings of which trainable_token_indices trains single rows; train them "
            'through modules_to_save=["embed_tokens", "lm_head"], or untie the head.'
        )
    linear = getattr(head, "modules_to_save", None)
    kinds = [type(head)] if linear is None else [type(module) for module in linear.values()]
    for kind in kinds:
        if kind is not torch.nn.Linear:
            raise UnsupportedError(
                f"The {role}'s output head is a {kind.__module__}.{kind.__name__}; only a plain torch.nn.Linear is supported. "
                'Leave "lm_head" out of the LoRA target_modules (modules_to_save=["lm_head"] trains it in full), and out of '
                "quantisation."
            )
    if isinstance(getattr(head, "weight", None), DTensor):
        raise UnsupportedError(
            f"The {role}'s output head is sharded over devices (tensor parallelism), which is not supported yet; load the "
            "model without tp_plan."
        )


def notes_on(trainer: GRPOTrainer, packed: bool, one_forward: bool) -> list[str]:
    """
    What a patched trainer does differently from what its user may expect, in sentences.

    Args:
        trainer: about to be patched.
        packed: rows reach its model in another layout than TRL's.
        one_forward: the pass for old log-probs is left out.
    """
    notes = []
    if overrides(trainer, SCORING_METHOD):
        effect = (
            "and gets fastgrpo's head inside"
            if has_fused_head()
            else "and with this TRL nothing else of the patch applies"
        )
        notes.append(f"{type(trainer).__name__} brings its own {SCORING_METHOD}: it is called, {effect}")
    if overrides(trainer, LOSS_METHOD):
        notes.append(
            f"{type(trainer).__name__} brings its own {LOSS_METHOD}: fastgrpo gives it log-probs and entropies, the loss stays "
            "its own"
        )
    if _loses_master_weights(trainer):
        notes.append(
            "use_transformers_continuous_batching makes TRL cast the float32 weights to 16 bit at the first generation, for "
            "good, so small steps are rounded away; use vLLM or transformers' own generation, or bf16=False"
        )
    random = _random_parts(trainer.model)
    if packed and random:
        notes.append(
            f"{random}: packed rows draw random numbers for fewer tokens, so a patched run is not bit-equal to an unpatched "
            "one; packing='none' makes it so"
        )
    if one_forward and random:
        notes.append(
            f"{random}: the forward for old log-probs, which drew random numbers of its own, is left out, so the ratio to them "
            "is 1, and a patched run is not bit-equal to an unpatched one"
        )
    rope = _length_dependent_rope(trainer.model)
    if packed and rope:
        notes.append(
            f"rope_type={rope!r} depends on the length of the longest row: patched, on that of real tokens; unpatched, on that "
            "of the padded batch, so results differ where only the padding is longer than the model's original context"
        )
    return notes


def _loses_master_weights(trainer: GRPOTrainer) -> bool:
    continuous = getattr(trainer.args, "use_transformers_continuous_batching", False)
    trained = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
    return continuous and (trainer.args.bf16 or trainer.args.fp16) and torch.float32 in trained


def _random_parts(model: torch.nn.Module) -> str:
    """The largest probability or size of noise that a model draws random numbers for, with its name; empty: none."""
    found = {"dropout": 0.0}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            found["dropout"] = max(found["dropout"], module.p)
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "jitter" in name):
                found[name] = max(found.get(name, 0.0), value)
    return ", ".join(f"{name} is {value:g}" for name, value in found.items() if value > 0)


def _length_dependent_rope(model: torch.nn.Module) -> str:
    parameters = getattr(base_model(model).config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return next((kind["rope_type"] for kind in kinds if kind.get("rope_type") in ("longrope", "dynamic")), "")


def _attention_dropout(model: torch.nn.Module) -> float:
    # Attention layers hold a probability themselves, or a layer of their own.
    found = [0.0]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "att" in name.split(".")[-1]:
            found.append(module.p)
        if "attention" in type(module).__name__.lower():
            found += [value for key, value in vars(module).items() if "dropout" in key and isinstance(value, float)]
    return max(found)
