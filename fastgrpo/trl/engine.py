"""The engine that TRL builds with a trainer, fitted to `Options.sync`; for `patch_trl`, since afterwards it is too late."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trl.generation.vllm_generation as engines
import trl.trainer.grpo_trainer as trainers
from trl import GRPOConfig
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from fastgrpo.rollout.vllm import lora_arguments, version_obstacle
from fastgrpo.rollout.weights import adapter_obstacle, lora_obstacle, merge_obstacle
from fastgrpo.trl.compat import UnsupportedError
from fastgrpo.trl.sync import is_this_machine


@contextmanager
def fitted_engine(args: GRPOConfig, sync: str) -> Iterator[None]:
    """
    While inside, a `GRPOTrainer` that is built gets an engine that `Options.sync` can be had with.

    In this process, that is an engine with LoRA for `sync="adapter"`, or for `"auto"` where the base is quantised. With a
    server, a LoRA adapter travels over HTTP, so that no NCCL group is opened: the server may be on the trainer's own GPU.

    Args:
        args: what the trainer is built with.
        sync: `Options.sync`.

    Raises:
        UnsupportedError: vLLM is not installed or out of TRL's range (before a model is loaded); later, an adapter that
            cannot travel, or a model trained in full with a server on the only GPU.
    """
    if not args.use_vllm:
        yield
        return
    wrong = version_obstacle()
    if wrong:
        raise UnsupportedError(wrong)
    present = trainers.VLLMGeneration
    trainers.VLLMGeneration = type("FittedGeneration", (_FittedGeneration,), {"sync": sync})
    try:
        yield
    finally:
        trainers.VLLMGeneration = present


class _FittedGeneration(VLLMGeneration):
    sync = "auto"

    def _init_vllm(self) -> None:
        with _fitted(self):
            super()._init_vllm()


def _fitted(generation: _FittedGeneration) -> Any:
    model, wanted = generation.model, generation.sync
    peft = hasattr(model, "peft_config")
    obstacle = (lora_obstacle(model) or adapter_obstacle(model)) if peft else "the model is trained in full"
    if wanted == "adapter" and obstacle:
        raise UnsupportedError(f"sync='adapter' is not possible: {obstacle}; leave sync='auto'.")
    if generation.mode == "colocate":
        with_lora = wanted == "adapter" or (wanted == "auto" and not obstacle and bool(merge_obstacle(model)))
        return (
            _replaced(engines, "LLM", functools.partial(engines.LLM, **lora_arguments(model)))
            if with_lora
            else _as_is()
        )
    if not obstacle and wanted != "trl":
        return _replaced(engines, "VLLMClient", _HttpClient)
    _refuse_one_gpu(generation)
    return _as_is()


class _HttpClient(VLLMClient):
    """TRL's client without a NCCL group."""

    def init_communicator(self, device: Any = 0) -> None:
        pass


def _refuse_one_gpu(generation: VLLMGeneration) -> None:
    url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
    cards = Path("/proc/driver/nvidia/gpus")
    if generation.accelerator.device.type == "cuda" and is_this_machine(url) and len(list(cards.glob("*"))) == 1:
        raise UnsupportedError(
            f"The vLLM server {url} and the trainer share this machine's only GPU; TRL hands all weights over through NCCL, "
            "which needs two. Use vllm_mode='colocate', or train a LoRA adapter, which travels over HTTP (sync='adapter')."
        )


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    present = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, present)


@contextmanager
def _as_is() -> Iterator[None]:
    yield
