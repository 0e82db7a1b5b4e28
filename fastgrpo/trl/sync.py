"""`Options.sync`: how the trainer's weights reach vLLM.

`"merged"`: only what training changes is written into the engine of this process, LoRA merged out of place. `"adapter"`: the
LoRA adapter alone travels, through a file. `"trl"`: TRL's own way. The trainer's model is only read.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from fastgrpo.rollout.lora_server import LoraServer, LoraServerError
from fastgrpo.rollout.vllm import (
    forget_old_activations,
    has_lora,
    names_in_lora_engine,
    packs_weights,
    served_rank,
    version_obstacle,
    writer,
)
from fastgrpo.rollout.weights import (
    EngineWeight,
    adapter_obstacle,
    count_lora_matrices,
    engine_parameters,
    engine_weights,
    lora_obstacle,
    merge_obstacle,
    save_adapter,
)
from fastgrpo.trl.compat import UnsupportedError
from fastgrpo.trl.probe import undisturbed

logger = logging.getLogger("fastgrpo")

_SYNC = "sync_weights"
# SHA-256, first 16 digits, of the methods that are replaced or followed: the same text in TRL 1.12 to 1.16.
_KNOWN_SOURCES = {
    _SYNC: "63d669fb32304ff5",
    "generate": "2d2ac2be5b1309c4",
    "_iter_named_params": "baab615d5c7bc3e1",
    "_fix_param_name_to_vllm": "c42c3965795e12dc",
}
_MEMORY = Path("/dev/shm")
# Mean difference of log-probs. In 16 bit, or with one side in 4 bit, the same model stays well below.
_SAME_MODEL_NATS = 0.5


class WeightSync:
    """
    A way to hand weights over: what is put over a trainer's engine, and how `backends()` and the start lines call it.

    Args:
        trainer: with `use_vllm=True`.
    """

    route = "trl"
    words = "TRL's own way"

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.generation: VLLMGeneration = trainer.vllm_generation
        self.active = True

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """(owner, attribute, value), to be set on the objects."""
        return []

    def begin(self) -> None:
        """Called when a `train()` begins."""

    def close(self) -> None:
        """Called when the trainer is unpatched."""
        self.active = False

    @property
    def rename(self) -> Callable[[str], str]:
        """The engine's name for a parameter, from transformers' name."""
        return functools.partial(self.generation._fix_param_name_to_vllm, extra_prefixes=["modules_to_save.default."])

    def wake(self) -> None:
        """The engine's memory for weights is there, as TRL makes sure of it before it writes."""
        if self.generation.enable_sleep_mode:
            empty_cache()
            self.generation.llm.wake_up(tags=["weights"])
            self.generation._llm_weights_sleeping = False


class MergedWrite(WeightSync):
    """Colocate: only what training changes is written, in one call; everything where the engine may hold something else."""

    route = "merged"

    def __init__(self, trainer: GRPOTrainer) -> None:
        super().__init__(trainer)
        count = count_lora_matrices(self.generation.model)
        self.words = (
            f"{count} LoRA matrices merged out of place, in one write" if count else "the trained weights, in one write"
        )
        self.complete = False
        self.write = writer(self.generation.llm)
        self.parameters: list[EngineWeight] = []

    def replacements(self) -> list[tuple[Any, str, Any]]:
        return [(self.generation, _SYNC, self)]

    def begin(self) -> None:
        """
        A checkpoint may have been loaded, so everything travels before the first rollout.

        TRL compares step numbers: it would take step 0 of a second `train()` for step 0 of one that stopped after it.
        """
        self.trainer._last_loaded_step = -1
        self.complete = False

    def __call__(self) -> None:
        """
        Replaces `VLLMGeneration.sync_weights`.

        All weights travel at first, after the engine slept (which discards them), after a write that did not finish, and when
        a `train()` has begun since.
        """
        if not self.active:  # someone kept it beyond the patch
            return type(self.generation).sync_weights(self.generation)
        llm = self.generation.llm
        everything = not self.complete or (self.generation.enable_sleep_mode and self.generation._llm_weights_sleeping)
        self.wake()
        if not self.complete:
            self.parameters = engine_parameters(self.generation.model, self.rename)
        self.complete = False
        self.write(engine_weights(self.parameters, everything))
        self.complete = True
        forget_old_activations(llm)


class AdapterInEngine(WeightSync):
    """Colocate: the adapter as a `LoRARequest`, under a new number each time; the engine's own LoRA kernels apply it."""

    route = "adapter"
    words = "the adapter as a LoRARequest"

    def __init__(self, trainer: GRPOTrainer) -> None:
        super().__init__(trainer)
        self.folder = AdapterFolder(_MEMORY if _in_memory() else Path(tempfile.gettempdir()))
        self.request: Any = None
        self.version = 0
        self.base_written = False

    def replacements(self) -> list[tuple[Any, str, Any]]:
        return [(self.generation, _SYNC, self), (self.generation.llm, "generate", self.generate)]

    def begin(self) -> None:
        """As in `MergedWrite`."""
        self.trainer._last_loaded_step = -1
        self.base_written = False

    def close(self) -> None:
        super().close()
        self.folder.remove()
        self.trainer._last_loaded_step = -1  # the next rollout waits for weights

    def __call__(self) -> None:
        """Replaces `VLLMGeneration.sync_weights`."""
        from vllm.lora.request import LoRARequest

        if not self.active:
            return type(self.generation).sync_weights(self.generation)
        engine = self.generation.llm.llm_engine
        slept = self.generation.enable_sleep_mode and self.generation._llm_weights_sleeping
        self.wake()
        if not merge_obstacle(self.generation.model) and (slept or not self.base_written):
            inner = names_in_lora_engine(self.generation.llm)
            base = engine_parameters(self.generation.model, lambda name: inner(self.rename(name)))
            writer(self.generation.llm)(engine_weights(base, everything=True, merge=False))
        self.base_written = True
        previous, self.version = self.request, self.version + 1
        folder = self.folder.write(self.generation.model, str(self.version))
        request = LoRARequest(lora_name=f"fastgrpo-{self.version}", lora_int_id=self.version, lora_path=str(folder))
        with self.folder.kept_if_read(str(self.version)):
            engine.add_lora(request)
        self.request = request
        if previous is not None:
            engine.remove_lora(previous.lora_int_id)
        forget_old_activations(self.generation.llm)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces `vllm.LLM.generate`: the adapter goes with every request."""
        llm = self.generation.llm
        return type(llm).generate(llm, *args, **{"lora_request": self.request if self.active else None, **kwargs})


class AdapterOnServer(WeightSync):
    """Server: the adapter under a new name each time; requests name it as their model."""

    route = "adapter"

    def __init__(self, trainer: GRPOTrainer) -> None:
        super().__init__(trainer)
        self.name: str | None = None
        self.run = secrets.token_hex(4)
        self.count = 0
        self.main = trainer.accelerator.is_main_process
        model = self.generation.model
        if self.main:
            self.client = self.generation.vllm_client
            self.server = LoraServer(
                self.client.base_url, model.name_or_path, served_rank(model), self.generation.server_timeout
            )
            self.folder = AdapterFolder(_shared_folder(trainer, self.client.base_url))
        self.words = "the adapter, to the server"

    def replacements(self) -> list[tuple[Any, str, Any]]:
        ours = [(self.generation, _SYNC, self)]
        return [*ours, (self.client, "generate", self.generate)] if self.main else ours

    def begin(self) -> None:
        """As in `MergedWrite`."""
        self.trainer._last_loaded_step = -1

    def check(self) -> None:
        """
        Before the first step: does the server answer, is its base model the trainer's, and does it take the adapter?

        Raises:
            LoraServerError: what is wrong, and how to start the server.
        """
        if not self.main:
            return
        card = self.server.models()[0]
        self._compare_base(card)
        folder = self.folder.write(self.generation.model, "check")
        with self.folder.kept_if_read("check"):
            self.server.load(f"fastgrpo-{self.run}-check", folder)
        self.server.unload(f"fastgrpo-{self.run}-check")

    def _compare_base(self, card: dict[str, Any]) -> None:
        model = self.generation.model
        tokens = _probe_tokens(model)
        theirs = torch.tensor(self.server.prompt_logprobs(card["id"], tokens))
        difference = (theirs - _base_logprobs(self.trainer, tokens)).abs().mean().item()
        if not difference <= _SAME_MODEL_NATS:
            raise LoraServerError(
                f"The vLLM server {self.server.url} serves {card.get('root') or card['id']!r}, which is not the trainer's base "
                f"model {model.name_or_path!r}: log-probs of the same tokens differ by {difference:.2g} nats on average. "
                f"Start it: {self.server.start_line}"
            )

    def close(self) -> None:
        super().close()
        if self.main:
            self.folder.remove()
            if self.name is not None:
                self._unload(self.name)
            self.name = None
            if self.client.communicator is None:
                logger.warning(
                    "fastgrpo.unpatch: the trainer was built to send its adapter over HTTP; TRL's own sync needs an NCCL group "
                    "that was not opened. Build another trainer."
                )
        self.trainer._last_loaded_step = -1  # the next rollout waits for weights

    def __call__(self) -> None:
        """Replaces `VLLMGeneration.sync_weights`."""
        if not self.active:
            return type(self.generation).sync_weights(self.generation)
        if not self.main:
            return
        self.count += 1
        name = f"fastgrpo-{self.run}-step{self.trainer.state.global_step}-{self.count}"
        folder = self.folder.write(self.generation.model, name)
        with self.folder.kept_if_read(name):
            self.server.load(name, folder)
        previous, self.name = self.name, name
        if previous is not None:
            self._unload(previous)

    def _unload(self, name: str) -> None:
        try:
            self.server.unload(name)
        except LoraServerError as error:  # it is not asked for again
            logger.warning("fastgrpo: %s", error)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces `VLLMClient.generate`: requests name the adapter as their model."""
        before = self.client.model
        self.client.model = self.name or before
        try:
            return type(self.client).generate(self.client, *args, **kwargs)
        finally:
            self.client.model = before


class AdapterFolder:
    """
    Adapters on their way, in a folder of their own that goes with this object.

    The last one that was read stays: an engine that had to drop it, for another client's adapter say, reads it again.

    Args:
        parent: where the folder is made.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="fastgrpo-adapter-", dir=parent)
        self._last: str | None = None

    def write(self, model: torch.nn.Module, name: str) -> Path:
        """Saves the model's adapter; its folder."""
        folder = Path(self._folder.name) / name
        save_adapter(model, folder)
        return folder

    @contextmanager
    def kept_if_read(self, name: str) -> Iterator[None]:
        """While inside, an adapter is read; afterwards the one before it is deleted, or this one where an error came."""
        try:
            yield
        except BaseException:
            self._delete(name)
            raise
        if self._last is not None:
            self._delete(self._last)
        self._last = name

    def _delete(self, name: str) -> None:
        shutil.rmtree(Path(self._folder.name) / name, ignore_errors=True)

    def remove(self) -> None:
        """Deletes the folder."""
        self._folder.cleanup()


def choose_sync(trainer: GRPOTrainer, wanted: str) -> tuple[WeightSync | None, str]:
    """
    How a trainer's weights will reach vLLM.

    Args:
        trainer: built; nothing on it is changed.
        wanted: `Options.sync`.

    Returns:
        The way, None without TRL's vLLM engine; and why not a faster one, empty where there is none.

    Raises:
        UnsupportedError: a vLLM out of TRL's range, a way that is not possible, or a server that cannot serve.
    """
    # Another engine under that name brings its own way.
    if not trainer.use_vllm or not isinstance(trainer.vllm_generation, VLLMGeneration):
        if wanted in ("merged", "adapter"):
            raise UnsupportedError(
                f"sync={wanted!r} is a way into TRL's vLLM engine, which this trainer does not use; leave sync='auto'."
            )
        return None, ""
    wrong = version_obstacle()
    if wrong:
        raise UnsupportedError(wrong)
    if wanted == "trl":
        return WeightSync(trainer), "sync='trl'"
    colocate = trainer.vllm_mode == "colocate"
    peft = hasattr(trainer.vllm_generation.model, "peft_config")
    unknown = _unknown_engine(trainer.vllm_generation)
    engine_runs_lora = colocate and not unknown and has_lora(trainer.vllm_generation.llm)
    obstacles = {
        "merged": unknown or _merged_obstacle(trainer, colocate, peft, engine_runs_lora),
        "adapter": unknown or _adapter_obstacle(trainer, colocate, peft, engine_runs_lora),
    }
    if wanted != "auto" and obstacles[wanted]:
        raise UnsupportedError(f"sync={wanted!r} is not possible: {obstacles[wanted]}; leave sync='auto'.")
    if not obstacles["merged"] and wanted != "adapter":
        return MergedWrite(trainer), ""
    if not obstacles["adapter"]:
        if colocate:
            return AdapterInEngine(trainer), "" if wanted == "adapter" else obstacles["merged"]
        return _server_sync(trainer, wanted)
    if engine_runs_lora:
        raise UnsupportedError(
            f"The engine was built for sync='adapter', and TRL's own way does not reach it: {obstacles['adapter']}. Build the "
            "trainer with another sync."
        )
    return WeightSync(trainer), obstacles["merged" if colocate else "adapter"]


def _server_sync(trainer: GRPOTrainer, wanted: str) -> tuple[WeightSync, str]:
    sync = AdapterOnServer(trainer)
    try:
        sync.check()
    except LoraServerError as error:
        sync.folder.remove()
        # What TRL opened when the trainer was built can carry all weights.
        if wanted == "auto" and sync.client.communicator is not None:
            return WeightSync(trainer), str(error)
        raise UnsupportedError(str(error)) from error
    return sync, ""


def _unknown_engine(generation: VLLMGeneration) -> str:
    if generation.__dict__.get(_SYNC) is not None:
        return f"the trainer's vllm_generation has an own {_SYNC}, set on the object"
    for method, digest in _KNOWN_SOURCES.items():
        source = inspect.getsource(getattr(type(generation), method))
        if hashlib.sha256(source.encode()).hexdigest()[:16] != digest:
            return f"{type(generation).__name__}.{method} is not the text that fastgrpo knows"
    return ""


def _merged_obstacle(trainer: GRPOTrainer, colocate: bool, peft: bool, engine_runs_lora: bool) -> str:
    if not colocate:
        return "the server is another process"
    if engine_runs_lora:
        return "the engine was built for sync='adapter'"
    if packs_weights(trainer.vllm_generation.llm):
        return (
            "the engine packs its weights when it has loaded them, so that no later ones reach it (TRL's way neither)"
        )
    return merge_obstacle(trainer.vllm_generation.model) if peft else ""


def _adapter_obstacle(trainer: GRPOTrainer, colocate: bool, peft: bool, engine_runs_lora: bool) -> str:
    model = trainer.vllm_generation.model
    if not peft:
        return "there is no adapter: the model is trained in full"
    obstacle = lora_obstacle(model) or adapter_obstacle(model)
    if obstacle:
        return obstacle
    if not colocate:
        written = trainer._last_loaded_step != -1
        return "TRL has already written merged weights over the server's base; restart the server" if written else ""
    if not engine_runs_lora:
        return (
            "the engine was built without LoRA, when the trainer was; call fastgrpo.patch_trl() before and set "
            "fastgrpo_sync='adapter' in the GRPOConfig"
        )
    if trainer.vllm_generation.enable_sleep_mode and merge_obstacle(model):
        return f"the engine's sleep discards its weights, and {merge_obstacle(model)}; set vllm_enable_sleep_mode=False"
    return ""


def _shared_folder(trainer: GRPOTrainer, url: str) -> Path:
    """Where trainer and server both read: memory on this machine, else the output folder, which may be on a shared disk."""
    if is_this_machine(url) and _in_memory():
        return _MEMORY
    return Path(trainer.args.output_dir).resolve() / "adapters"


def _in_memory() -> bool:
    return os.access(_MEMORY, os.W_OK)


def is_this_machine(url: str) -> bool:
    """Whether a server's address is one of this machine."""
    return urlparse(url).hostname in ("localhost", "127.0.0.1", "0.0.0.0", "::1", socket.gethostname())


def _probe_tokens(model: torch.nn.Module) -> list[int]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [(3 + 7 * index) % vocabulary for index in range(1, 9)]


def _base_logprobs(trainer: GRPOTrainer, tokens: list[int]) -> torch.Tensor:
    model = trainer.accelerator.unwrap_model(trainer.model)
    ids = torch.tensor([tokens], device=trainer.accelerator.device)
    with undisturbed(model), torch.no_grad(), model.disable_adapter(), trainer.accelerator.autocast():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1).cpu()
