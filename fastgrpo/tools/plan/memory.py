"""The terms of a run's memory, from a model's shape, its traced activations and the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastgrpo.tools.plan.advice import Alternative, find_alternatives
from fastgrpo.tools.plan.settings import PlanSettings
from fastgrpo.tools.plan.shape import ModelShape
from fastgrpo.tools.plan.trace import Activations
from fastgrpo.tools.plan.update import CASTS, HEAD, KEPT, LAYER, find_moments, head_of

GB = 1e9
WEIGHTS = "policy weights"
STATES = "adapter, gradients, optimizer states"
REFERENCE = "reference"
ENGINE = "engine and KV cache"
UPDATE = "logits and activations"
RESERVE = "reserve"
TERMS = (WEIGHTS, STATES, REFERENCE, ENGINE, UPDATE, RESERVE)

_QUANTISED_BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}
"""NF4 with an fp32 scale for each 64 weights; int8."""
_STATE_8BIT = 2 * (1 + 4 / 256)
"""Two 8-bit states, with an fp32 scale for each 256."""
_ZERO3_LIVE = 10**9
"""DeepSpeed's `stage3_max_live_parameters`."""


@dataclass(frozen=True)
class MemoryPlan:
    """
    Memory of one device, in GB (10^9 bytes).

    Attributes:
        terms: GB by name, see `TERMS`; all are always there.
        details: what a term is made of.
        total: of all terms, less `overlap`; with a sleeping engine the larger of engine and update counts.
        overlap: by how much gradients and activations together are more than what is ever alive of both: when the last
            gradient is there, most activations are gone.
        peaks: "rollout" and "update": what is alive at once in either at the most, reserve left out; comparable with
            `torch.cuda.max_memory_allocated`. "held": between two updates; "forward", "head" (its backward), "layers" (theirs,
            and the embeddings') and "optimizer": the parts of one.
        advice: the one setting that would free most, with the figure; empty where none would free anything.
        alternatives: all that would free something, the largest first; planned when first asked for.
        comparisons: what fastgrpo's head and packing change, in sentences.
        notes: assumptions, and what is wrong with the settings.
        settings, shape: what was planned.
    """

    terms: Mapping[str, float]
    details: Mapping[str, Mapping[str, float]]
    total: float
    overlap: float
    peaks: Mapping[str, float]
    settings: PlanSettings
    shape: ModelShape
    notes: tuple[str, ...] = ()
    comparisons: tuple[str, ...] = ()
    engine_starts: bool = field(default=True, repr=False)
    plan_with: Callable[[PlanSettings], MemoryPlan] | None = field(default=None, repr=False, compare=False)

    @property
    def capacity(self) -> float | None:
        """GB of the device; None where it was not given."""
        return self.settings.capacity_gb

    @property
    def free(self) -> float | None:
        """GB left; negative where it does not fit, None without a capacity."""
        return None if self.capacity is None else self.capacity - self.total

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None without a capacity."""
        return None if self.free is None else self.free >= 0 and self.engine_starts

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """What one changed setting would free, each found by planning again."""
        return find_alternatives(self) if self.plan_with is not None else ()

    @property
    def advice(self) -> str:
        """The setting that would free most."""
        if not self.alternatives:
            return ""
        best = self.alternatives[0]
        return f"{best.setting} would free {best.frees_gb:.1f} GB"

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {
            "model": dataclasses.asdict(self.shape),
            "settings": dataclasses.asdict(self.settings),
            "terms_gb": dict(self.terms),
            "details_gb": {name: dict(parts) for name, parts in self.details.items()},
            "total_gb": self.total,
            "overlap_gb": self.overlap,
            "peaks_gb": dict(self.peaks),
            "capacity_gb": self.capacity,
            "free_gb": self.free,
            "fits": self.fits,
            "advice": self.advice,
            "alternatives": [dataclasses.asdict(alternative) for alternative in self.alternatives],
            "comparisons": list(self.comparisons),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{name:<38}{size:8.1f} GB" for name, size in self.terms.items()]
        lines.append(f"{'total':<38}{self.total:8.1f} GB")
        if self.free is not None:
            lines.append(f"{'free of ' + format(self.capacity, 'g'):<38}{self.free:8.1f} GB")
        return "\n".join([*lines, self.advice] if self.advice else lines)


def assemble(settings: PlanSettings, shape: ModelShape, activations: Activations, kv_bytes: int) -> MemoryPlan:
    """
    A plan without its advice.

    Args:
        settings: of the run.
        shape: of the model, built with the settings' adapter.
        activations: of a micro-batch.
        kv_bytes: keys and values of one sequence in transformers' cache.
    """
    details: dict[str, dict[str, float]] = {
        WEIGHTS: _weights(settings, shape),
        STATES: _states(settings, shape),
        REFERENCE: {"second model": sum(_weights(settings, shape).values())} if settings.separate_reference else {},
        ENGINE: _engine(settings, kv_bytes),
        UPDATE: _update(settings, shape, activations),
        RESERVE: {"reserve": settings.reserve_gb * GB},
    }
    sizes = {name: sum(parts.values()) for name, parts in details.items()}
    gradients = details[STATES]["gradients"]
    moments = find_moments(settings, shape, activations, details[UPDATE], gradients)
    # With no gradient yet, and with all of them. The head and a layer in its backward are not alive at once.
    sizes[UPDATE] = max(moments.without_gradients, moments.peak - gradients)
    overlap = gradients + sizes[UPDATE] - moments.peak if settings.full else 0.0  # an adapter's are small
    asleep = settings.rollout == "vllm" and settings.vllm_sleep
    always = sizes[WEIGHTS] + sizes[STATES] - gradients + sizes[REFERENCE]
    rollout, update = sizes[ENGINE], gradients + sizes[UPDATE] - overlap
    together = max(rollout, update) if asleep else rollout + update
    in_update = always + (rollout if settings.rollout == "vllm" and not asleep else 0.0)
    peaks = {
        "rollout": always + rollout * (1 + 1 / shape.layers if settings.rollout == "transformers" else 1),
        "held": in_update,
        "update": in_update + moments.peak,
        "forward": in_update + moments.forward,
        "head": in_update + moments.head,
        "layers": in_update + max(moments.layers, moments.embeddings),
        "optimizer": in_update + moments.optimizer,
    }
    starts, notes = _notes(settings, shape, kv_bytes)
    return MemoryPlan(
        terms={name: sizes[name] / GB for name in TERMS},
        details={name: {part: size / GB for part, size in parts.items()} for name, parts in details.items()},
        total=(always + together + sizes[RESERVE]) / GB,
        overlap=overlap / GB,
        peaks={name: size / GB for name, size in peaks.items()},
        settings=settings,
        shape=shape,
        notes=notes,
        comparisons=_comparisons(settings, shape, activations),
        engine_starts=starts,
    )


def _weights(settings: PlanSettings, shape: ModelShape) -> dict[str, float]:
    quantised = shape.linear_parameters if settings.quantization else 0
    size = (shape.parameters - quantised) * settings.weight_bytes
    size += quantised * _QUANTISED_BYTES.get(settings.quantization or "", 0.0)
    if not _sharded(settings, "fsdp2", "zero3"):
        return {"weights": size}
    a_weight = size / shape.parameters
    if settings.sharding == "zero3":
        gathered = min(shape.parameters, _ZERO3_LIVE)
    else:
        gathered = min(shape.parameters, shape.gathered_parameters + 2 * shape.layer_parameters)
    return {"weights, a share": size / settings.world_size, "gathered for use": gathered * a_weight}


def _states(settings: PlanSettings, shape: ModelShape) -> dict[str, float]:
    trained, itemsize = _trained(settings, shape)
    everything = _share(settings, "fsdp2", "zero3")
    gradients = trained * itemsize / _share(settings, "fsdp2", "zero2", "zero3")
    if settings.sharding == "ddp" and settings.world_size > 1:
        gradients *= 2  # DDP reduces in buckets of its own
    device, _ = _optimizer_bytes(settings, shape, trained, itemsize)
    parts = {"gradients": gradients, "optimizer states": device / _share(settings, "fsdp2", "zero1", "zero2", "zero3")}
    return parts if settings.full else {"adapter": trained * itemsize / everything, **parts}


def _optimizer_bytes(settings: PlanSettings, shape: ModelShape, trained: int, itemsize: int) -> tuple[float, float]:
    """States on all devices together, and in host memory."""
    kind = settings.optimizer
    if kind == "sgd":
        return 0.0, 0.0
    deepspeed = settings.sharding.startswith("zero") and settings.world_size > 1
    if kind.endswith("8bit"):
        wide = shape.embedding_parameters if settings.full else 0  # transformers keeps those of embeddings in float32
        size = (trained - wide) * _STATE_8BIT + wide * 8
    elif kind == "adamw_fp32" or deepspeed:
        size = trained * (8 + (4 if itemsize < 4 else 0))
    else:
        size = trained * 2 * itemsize
    return (0.0, size) if kind.startswith("paged") else (size, 0.0)


def _engine(settings: PlanSettings, kv_bytes: int) -> dict[str, float]:
    if settings.rollout == "transformers":
        return {"KV cache": settings.rollouts * kv_bytes}
    if settings.rollout == "vllm":
        return {"vLLM": settings.vllm_fraction * (settings.capacity_gb or 0.0) * GB}
    return {}


def _update(settings: PlanSettings, shape: ModelShape, activations: Activations) -> dict[str, float]:
    head = head_of(settings, shape)
    working = activations.working
    if settings.quantization:
        working += shape.largest_linear * settings.compute_bytes  # dequantised one at a time
    return {
        KEPT: activations.kept - _offloaded(settings, shape),
        CASTS: activations.casts,
        HEAD: max(head.forward, head.backward),
        LAYER: working,
    }


def _offloaded(settings: PlanSettings, shape: ModelShape) -> int:
    on_device = 2  # the layer at work and the one that is fetched
    return max(0, shape.layers - on_device) * _layer_input(settings, shape) if settings.offload_activations else 0


def _layer_input(settings: PlanSettings, shape: ModelShape) -> int:
    return settings.row_tokens * shape.hidden * settings.weight_bytes


def _comparisons(settings: PlanSettings, shape: ModelShape, activations: Activations) -> tuple[str, ...]:
    heads = {
        kind: head_of(dataclasses.replace(settings, head=kind), shape).forward / GB for kind in ("fastgrpo", "full")
    }
    sentences = [
        f"head: {heads['fastgrpo']:.1f} GB with fastgrpo's chunks; all logits at once take {heads['full']:.1f} GB a matrix, "
        "and a backward has about three of them"
    ]
    tokens, padded = settings.row_tokens, settings.sequences * (settings.prompt_length + settings.completion_length)
    kept = activations.kept / GB
    if tokens < padded:
        sentences.append(
            f"packing: {tokens} tokens in the update instead of {padded} padded ones save "
            f"{kept * (padded / tokens - 1):.1f} GB of what is kept for the backward"
        )
    shared = dataclasses.replace(settings, packing="auto", share_prefix=True).row_tokens
    if not settings.shares_prompts and shared < tokens:
        sentences.append(
            f"a prompt shared by its {settings.num_generations} completions would leave {shared} of {tokens} tokens in the "
            f"update: {kept * (1 - shared / tokens):.1f} GB less kept for the backward"
        )
    return tuple(sentences)


def _notes(settings: PlanSettings, shape: ModelShape, kv_bytes: int) -> tuple[bool, tuple[str, ...]]:
    """Whether a vLLM engine starts, and what is to be said."""
    notes, starts = [], True
    if settings.rollout == "vllm":
        engine = settings.vllm_fraction * (settings.capacity_gb or 0.0) * GB
        left = engine - shape.parameters * 2
        if left < kv_bytes:
            starts = False
            notes.append(
                f"vllm_fraction={settings.vllm_fraction:g} is {engine / GB:.1f} GB: its own copy of the weights takes "
                f"{shape.parameters * 2 / GB:.1f}, and one sequence {kv_bytes / GB:.2f}: vLLM will not start"
            )
        else:
            notes.append(f"the engine's KV cache holds about {int(left // kv_bytes)} sequences of full length")
    if settings.rollout == "server":
        notes.append("the rollout server's memory is not counted; it must be on another device")
    _, paged = _optimizer_bytes(settings, shape, *_trained(settings, shape))
    if paged:
        notes.append(
            f"{paged / GB:.1f} GB of optimizer states live in host memory, and on the device while there is room"
        )
    if settings.offload_activations:
        # Mini-batches wait there too, instead of being computed again.
        waiting = dataclasses.replace(settings, mini_batch=None, max_tokens_per_microbatch=None)
        notes.append(f"{shape.layers * _layer_input(waiting, shape) / GB:.1f} GB of activations wait in host memory")
    if settings.quantization and shape.experts:
        notes.append("experts that are no linear layers of their own are counted unquantised")
    if settings.world_size > 1 and settings.sharding in ("fsdp2", "zero3"):
        notes.append(f"fastgrpo.patch refuses {settings.sharding} in this version")
    if settings.world_size == 1 and settings.sharding != "ddp":
        notes.append(f"{settings.sharding} shards nothing on one device")
    notes += _notes_on_batches(settings)
    if settings.full and settings.dtype == "float16" and settings.mixed_precision == "fp16":
        notes.append("torch's gradient scaler refuses float16 weights that train; load them with dtype='float32'")
    return starts, tuple(notes)


def _notes_on_batches(settings: PlanSettings) -> list[str]:
    notes = []
    generated = settings.rollouts * settings.world_size
    if generated % settings.num_generations:
        notes.append(
            f"{generated} sequences generated together are no multiple of num_generations={settings.num_generations}; TRL "
            "refuses that"
        )
    limit = settings.max_tokens_per_microbatch
    if limit is not None and limit < settings.row_tokens:
        notes.append(
            f"a sequence of {settings.row_tokens} tokens is more than max_tokens_per_microbatch={limit}; it runs on its own, "
            "as large as it is"
        )
    for name in ("mini_batch", "max_tokens_per_microbatch"):
        given = getattr(settings, name)
        if given is not None and dataclasses.replace(settings, **{name: None}).part == settings.part:
            notes.append(
                f"{name}={given} takes nothing apart here: the sequences alive at once are the same without it"
            )
    return notes


def _trained(settings: PlanSettings, shape: ModelShape) -> tuple[int, int]:
    """Parameters that train, and bytes of one: PEFT keeps adapters in float32, TRL those of a quantised base in bfloat16."""
    if settings.full:
        return shape.parameters, settings.weight_bytes
    return shape.adapter_parameters, 2 if settings.quantization else 4


def _sharded(settings: PlanSettings, *kinds: str) -> bool:
    return settings.world_size > 1 and settings.sharding in kinds


def _share(settings: PlanSettings, *kinds: str) -> int:
    return settings.world_size if _sharded(settings, *kinds) else 1
