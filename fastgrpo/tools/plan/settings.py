"""What a run is, as far as its memory depends on it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastgrpo.chunking import ChunkPlan
from fastgrpo.tools.plan.split import Part, largest_part

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPTIMIZERS = ("adamw", "adamw_fp32", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "sgd")
SHARDINGS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
ROLLOUTS = ("transformers", "vllm", "server")
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "dtype": tuple(BYTES),
    "mixed_precision": ("bf16", "fp16", "no"),
    "quantization": (None, "4bit", "8bit"),
    "optimizer": OPTIMIZERS,
    "reference": ("auto", "separate", "none"),
    "packing": ("auto", "varlen", "left", "none"),
    "head": ("fastgrpo", "full"),
    "rollout": ROLLOUTS,
    "sharding": SHARDINGS,
}
ALL_LINEAR = "all-linear"
_MOST = {
    "capacity_gb": 10**6,
    "chunk_bytes": 10**12,
    "lora_rank": 10**5,
    "micro_batch": 10**5,
    "reserve_gb": 10**6,
    "vllm_fraction": 1,
}
_MOST_OTHERS = 10**9
_ABOVE_ZERO = ("capacity_gb", "logit_chunk_multiplier", "vllm_fraction")
_TARGETS = "'all-linear', names of layers, or a regular expression that matches whole names"
_MOST_TOKENS = 10**10
"""Of a micro-batch: what is beyond would not be a number of bytes that torch can hold."""


@dataclass(frozen=True)
class PlanSettings:
    """
    Settings of a run; the defaults are TRL's where TRL has one.

    Args:
        capacity_gb: memory of one device, in GB (10^9 bytes); None = not judged.
        lora_rank: rank of the adapter; None = full fine-tuning.
        lora_targets: as peft's `target_modules`: "all-linear", a regular expression, or names; None = "all-linear" with an
            adapter.
        quantization: None, "4bit" (NF4, blocks of 64) or "8bit": the base's linear layers, with an adapter only.
        dtype: of the weights: "float32" (as TRL loads a model that it is given by name), "bfloat16", "float16".
        mixed_precision: products in "bf16" or "fp16" (`bf16=True`, TRL's default, or `fp16=True`), whatever `dtype` is; "no" =
            in `dtype`.
        optimizer: "adamw" = torch's, two states in the dtype of what trains, "adamw_fp32" = fp32 states and, for 16-bit
            weights, an fp32 copy, "adamw_8bit" and the "paged_" ones = bitsandbytes', "sgd" = no states.
        beta: weight of the KL term; above 0 a reference is needed.
        reference: "auto" = the disabled adapter with LoRA, else a second model; "separate" = a second model; "none".
        num_generations: G, completions of a prompt.
        prompt_length, completion_length: tokens; the longest that occur.
        longest_row: tokens of the longest prompt and completion together; None = prompt_length + completion_length. Packed
            rows are no longer than it.
        micro_batch: sequences in a forward and backward on a device (`per_device_train_batch_size`).
        accumulation: micro-batches of an optimizer step (`gradient_accumulation_steps`).
        steps_per_generation: micro-batches that are generated together; None = accumulation.
        mini_batch: sequences alive at once in the update (`Options.mini_batch_size`); None = micro_batch.
        max_tokens_per_microbatch: the same by tokens, as in `Options`: a group's prompt once where it is shared, padding where
            there is any; a longer sequence runs on its own. None = no limit.
        checkpointing: gradient checkpointing.
        offload_activations: inputs of layers in host memory (`Options.offload_activations`); needs checkpointing.
        packing: as in `Options`; "auto" is planned as "varlen", the first choice: one row without padding. "left", "none" =
            rows side by side, without and with the padding between the longest prompt and the longest completion.
        share_prefix: with "varlen", a group's prompt computed once in the update, fastgrpo's default.
        fused_layers: LoRA layers, MLPs, norms and rotary embeddings as one function each in the update, fastgrpo's default.
        head: "fastgrpo" = logits in chunks; "full" = all logits of the micro-batch at once, counted once.
        fused_head: the card is an H100 or H200 (compute capability 9.0): with bf16 products, fastgrpo's head keeps no fp32
            logits.
        chunk_bytes, num_chunks, logit_chunk_multiplier: of fastgrpo's head, as in `Options`; None = 512 MiB, as many chunks as
            that asks for.
        rollout: "transformers" in this process, "vllm" in this process (colocate), or a "server" elsewhere.
        vllm_fraction: `vllm_gpu_memory_utilization`.
        vllm_sleep: `vllm_enable_sleep_mode`: the engine's memory is free during the update.
        world_size: devices.
        sharding: "ddp", "fsdp2", "zero1", "zero2" or "zero3".
        reserve_gb: CUDA context, library workspaces, fragmentation.

    Raises:
        TypeError: a value of another type, or an unknown name.
        ValueError: a value that is not allowed, or settings that exclude each other.
    """

    capacity_gb: float | None = None
    lora_rank: int | None = None
    lora_targets: str | tuple[str, ...] | None = None
    quantization: str | None = None
    dtype: str = "float32"
    mixed_precision: str = "bf16"
    optimizer: str = "adamw"
    beta: float = 0.0
    reference: str = "auto"
    num_generations: int = 8
    prompt_length: int = 512
    completion_length: int = 512
    longest_row: int | None = None
    micro_batch: int = 8
    accumulation: int = 1
    steps_per_generation: int | None = None
    mini_batch: int | None = None
    max_tokens_per_microbatch: int | None = None
    checkpointing: bool = True
    offload_activations: bool = False
    packing: str = "auto"
    share_prefix: bool = True
    fused_layers: bool = True
    head: str = "fastgrpo"
    fused_head: bool = False
    chunk_bytes: int | None = None
    num_chunks: int | None = None
    logit_chunk_multiplier: float | None = None
    rollout: str = "transformers"
    vllm_fraction: float = 0.3
    vllm_sleep: bool = False
    world_size: int = 1
    sharding: str = "ddp"
    reserve_gb: float = 2.0

    def __post_init__(self) -> None:
        if isinstance(self.lora_targets, list):
            object.__setattr__(self, "lora_targets", tuple(self.lora_targets))
        for field in dataclasses.fields(self):
            self._check(field.name, str(field.type))
        self._check_targets()
        self._check_lengths()
        self._check_parts()
        self.chunk_plan  # noqa: B018 - raises on bad values
        if self.quantization and self.full:
            raise ValueError(f"quantization={self.quantization!r} trains nothing without an adapter; give lora_rank.")
        if self.beta > 0 and self.reference == "none" and self.full:
            raise ValueError(
                f"beta={self.beta:g} in full fine-tuning needs a second model; give reference='auto', or beta=0."
            )
        if self.offload_activations and not self.checkpointing:
            raise ValueError(
                "offload_activations=True needs checkpointing=True, which leaves only inputs of layers to be kept."
            )
        if self.rollout == "vllm" and self.capacity_gb is None:
            raise ValueError("rollout='vllm' takes a share of the device's memory; give capacity_gb.")

    def _check(self, name: str, declared: str) -> None:
        value = getattr(self, name)
        if name in CHOICES:
            if value not in CHOICES[name]:
                allowed = ", ".join(map(repr, CHOICES[name]))
                raise ValueError(f"{name} is {value!r}; choose one of {allowed}.")
        elif declared == "bool":
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; give True or False.")
        elif declared.startswith(("int", "float")) and not (value is None and declared.endswith("None")):
            self._check_number(name, value, declared.startswith("int"))

    def _check_number(self, name: str, value: Any, whole: bool) -> None:
        least, most, above = 1 if whole else 0, _MOST.get(name, _MOST_OTHERS), name in _ABOVE_ZERO
        allowed = f"a {'whole ' if whole else ''}number " + (
            f"above 0, at most {most:,}" if above else f"from {least} to {most:,}"
        )
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise TypeError(f"{name} is {value!r}; give {allowed}.")
        if not least <= value <= most or (above and not value):
            raise ValueError(f"{name} is {value}; give {allowed}.")

    def _check_targets(self) -> None:
        targets = self.lora_targets
        if targets is None:
            return
        if not isinstance(targets, str | tuple) or not all(isinstance(name, str) for name in targets):
            raise TypeError(f"lora_targets is {targets!r}; give {_TARGETS}.")
        if not targets or not all(targets):
            raise ValueError(f"lora_targets is {targets!r}, which names no layer; give {_TARGETS}.")
        if self.full:
            raise ValueError(
                f"lora_targets={targets!r} has no meaning in full fine-tuning, where everything trains; give lora_rank too, or "
                "leave it out."
            )
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    f"lora_targets={targets!r} is no regular expression: {error}. Give {_TARGETS}."
                ) from error

    def _check_lengths(self) -> None:
        together = self.prompt_length + self.completion_length
        if self.longest_row is not None and self.longest_row > together:
            raise ValueError(
                f"longest_row is {self.longest_row}, more than prompt_length + completion_length = {together}; leave it out, "
                "or give a length that occurs."
            )
        if self.longest_row is not None and self.longest_row < self.completion_length:
            raise ValueError(
                f"longest_row is {self.longest_row}, less than completion_length = {self.completion_length}; it counts prompt "
                "and completion together."
            )
        if self.rollouts * together > _MOST_TOKENS:
            raise ValueError(
                f"{self.rollouts:,} sequences generated at once, of up to {together:,} tokens each, are more than the "
                f"{_MOST_TOKENS:,} tokens that can be planned; give a smaller micro_batch or steps_per_generation, or shorter "
                "lengths."
            )

    def _check_parts(self) -> None:
        for name in ("mini_batch", "max_tokens_per_microbatch"):
            if getattr(self, name) is not None and self.sharding.startswith("zero") and self.world_size > 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} does not go with sharding={self.sharding!r}: DeepSpeed's engine takes one "
                    "forward for every backward; leave it out."
                )
        if self.mini_batch is not None and self.mini_batch > self.rollouts:
            raise ValueError(
                f"mini_batch is {self.mini_batch}, more than the {self.rollouts} sequences that a device trains on between two "
                f"generations (micro_batch={self.micro_batch} times steps_per_generation={self.together}); give at most that, "
                "or leave it out."
            )

    @property
    def full(self) -> bool:
        """Full fine-tuning."""
        return self.lora_rank is None

    @property
    def separate_reference(self) -> bool:
        """Whether a second copy of the model is loaded."""
        return self.beta > 0 and (self.reference == "separate" or (self.reference == "auto" and self.full))

    @property
    def weight_bytes(self) -> int:
        """Bytes of an unquantised weight."""
        return BYTES[self.dtype]

    @property
    def targets(self) -> str | tuple[str, ...]:
        """Layers with an adapter, where there is one."""
        return self.lora_targets or ALL_LINEAR

    @property
    def compute_dtype(self) -> str:
        """Dtype of the operands of products."""
        return {"bf16": "bfloat16", "fp16": "float16", "no": self.dtype}[self.mixed_precision]

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of a product."""
        return BYTES[self.compute_dtype]

    @property
    def autocast(self) -> bool:
        """Whether products are in a dtype of their own."""
        return self.mixed_precision != "no"

    @property
    def row_length(self) -> int:
        """Tokens of the longest row of the update."""
        together = self.prompt_length + self.completion_length
        # As TRL pads them, each is as long as the longest prompt and the longest completion.
        return together if self.packing == "none" else self.longest_row or together

    @property
    def shares_prompts(self) -> bool:
        """Whether a group's prompt is computed once."""
        return self.share_prefix and self.packing in ("auto", "varlen")

    @cached_property
    def part(self) -> Part:
        """What of a micro-batch is alive at once in the update."""
        group = self.num_generations if self.shares_prompts else 1
        return largest_part(self.micro_batch, group, self._tokens_of, self.mini_batch, self.max_tokens_per_microbatch)

    def _tokens_of(self, part: Part) -> int:
        rows = part.sequences * self.row_length
        if not self.shares_prompts:
            return rows
        return min(part.prompts * self.prompt_length + part.sequences * self.completion_length, rows)

    @property
    def sequences(self) -> int:
        """Sequences alive at once in the update."""
        return self.part.sequences

    @property
    def scored_tokens(self) -> int:
        """Completion tokens alive at once in the update."""
        return self.sequences * self.completion_length

    @property
    def rows(self) -> tuple[int, int]:
        """(rows, tokens in each) as the model sees them in the update."""
        return (1, self._tokens_of(self.part)) if self.shares_prompts else (self.sequences, self.row_length)

    @property
    def row_tokens(self) -> int:
        """Tokens that the model sees at once in the update."""
        return self._tokens_of(self.part)

    @property
    def continued_tokens(self) -> int:
        """Tokens among them that continue a prompt which is there once."""
        return min(self.scored_tokens, self.row_tokens) if self.shares_prompts else 0

    @property
    def in_one_pass(self) -> bool:
        """Whether a head that trains has its loss and gradients in one pass, as it is with TRL's default loss."""
        return self.full and self.head == "fastgrpo" and self.sequences == self.micro_batch

    @property
    def together(self) -> int:
        """Micro-batches generated together."""
        return self.steps_per_generation or self.accumulation

    @property
    def rollouts(self) -> int:
        """Sequences generated at once on a device."""
        return self.micro_batch * self.together

    @property
    def chunk_plan(self) -> ChunkPlan:
        """Chunks of fastgrpo's head."""
        return ChunkPlan(self.chunk_bytes, self.num_chunks or -1, self.logit_chunk_multiplier)
