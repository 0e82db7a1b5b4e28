"""What a run is, as far as its memory depends on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from fastgrpo.chunking import ChunkPlan

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPTIMIZERS = ("adamw", "adamw_fp32", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "sgd")
SHARDINGS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
ROLLOUTS = ("transformers", "vllm", "server")
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "dtype": tuple(BYTES),
    "quantization": (None, "4bit", "8bit"),
    "optimizer": OPTIMIZERS,
    "reference": ("auto", "separate", "none"),
    "head": ("fastgrpo", "full"),
    "rollout": ROLLOUTS,
    "sharding": SHARDINGS,
}


@dataclass(frozen=True)
class PlanSettings:
    """
    Settings of a run; the defaults are TRL's where TRL has one.

    Args:
        capacity_gb: memory of one device, in GB (10^9 bytes); None = not judged.
        lora_rank: rank of the adapter; None = full fine-tuning.
        lora_targets: as peft's `target_modules`: "all-linear", a regular expression, or names.
        quantization: None, "4bit" (NF4, blocks of 64) or "8bit": the base's linear layers, with an adapter only.
        dtype: of the weights: "bfloat16", "float16", "float32".
        autocast: products in 16 bit (`bf16=True` or `fp16=True`, TRL's default), whatever `dtype` is.
        optimizer: "adamw" = torch's, two states in the dtype of what trains, "adamw_fp32" = fp32 states and, for 16-bit
            weights, an fp32 copy, "adamw_8bit" and the "paged_" ones = bitsandbytes', "sgd" = no states.
        beta: weight of the KL term; above 0 a reference is needed.
        reference: "auto" = the disabled adapter with LoRA, else a second model; "separate" = a second model; "none".
        num_generations: G, completions of a prompt.
        prompt_length, completion_length: tokens; the longest that occur.
        longest_row: tokens of the longest prompt and completion together; None = prompt_length + completion_length. Packed
            rows are no longer than it.
        micro_batch: sequences in a forward and backward on a device (`per_device_train_batch_size`).
        accumulation: micro-batches that are generated together (`steps_per_generation`).
        mini_batch: sequences alive at once in the update (`Options.mini_batch_size`); None = micro_batch.
        checkpointing: gradient checkpointing.
        offload_activations: inputs of layers in host memory (`Options.offload_activations`); needs checkpointing.
        share_prefix: a group's prompt computed once in the update, fastgrpo's default where it is right for the model.
        fused_layers: LoRA layers, MLPs, norms and rotary embeddings as one function each in the update, fastgrpo's default.
        head: "fastgrpo" = logits in chunks; "full" = all logits of the micro-batch at once, counted once.
        chunk_bytes: of fastgrpo's head; None = 512 MiB.
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
    lora_targets: str | tuple[str, ...] = "all-linear"
    quantization: str | None = None
    dtype: str = "bfloat16"
    autocast: bool = True
    optimizer: str = "adamw"
    beta: float = 0.0
    reference: str = "auto"
    num_generations: int = 8
    prompt_length: int = 512
    completion_length: int = 256
    longest_row: int | None = None
    micro_batch: int = 8
    accumulation: int = 1
    mini_batch: int | None = None
    checkpointing: bool = True
    offload_activations: bool = False
    share_prefix: bool = True
    fused_layers: bool = True
    head: str = "fastgrpo"
    chunk_bytes: int | None = None
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
        if not 0 < self.vllm_fraction <= 1:
            raise ValueError(
                f"vllm_fraction is {self.vllm_fraction}; give a share of the device, above 0 and at most 1."
            )
        if self.longest_row is not None and self.longest_row > self.prompt_length + self.completion_length:
            raise ValueError(
                f"longest_row is {self.longest_row}, more than prompt_length + completion_length = "
                f"{self.prompt_length + self.completion_length}; leave it out, or give a length that occurs."
            )
        if self.longest_row is not None and self.longest_row < self.completion_length:
            raise ValueError(
                f"longest_row is {self.longest_row}, less than completion_length = {self.completion_length}; it counts prompt "
                "and completion together."
            )
        if self.quantization and self.lora_rank is None:
            raise ValueError(f"quantization={self.quantization!r} trains nothing without an adapter; give lora_rank.")
        if self.beta > 0 and self.reference == "none" and self.lora_rank is None:
            raise ValueError(
                f"beta is {self.beta}, and full fine-tuning needs a second model for it; use reference='auto', or beta=0."
            )
        if self.offload_activations and not self.checkpointing:
            raise ValueError("offload_activations needs checkpointing, which leaves only inputs of layers to be kept.")
        if self.rollout == "vllm" and self.capacity_gb is None:
            raise ValueError("rollout='vllm' takes a share of the device; give capacity_gb.")

    def _check(self, name: str, declared: str) -> None:
        value = getattr(self, name)
        if name in CHOICES:
            if value not in CHOICES[name]:
                allowed = ", ".join(map(repr, CHOICES[name]))
                raise ValueError(f"{name} is {value!r}; choose one of {allowed}.")
        elif declared == "bool":
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; give True or False.")
        elif declared.startswith(("int", "float")):
            if value is None and declared.endswith("None"):
                return
            whole = declared.startswith("int")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise TypeError(f"{name} is {value!r}; give a {'whole ' if whole else ''}number.")
            if value < (1 if whole else 0) or (name == "capacity_gb" and value == 0) or value != value:
                raise ValueError(
                    f"{name} is {value}; give {'at least 1' if whole else 'no negative number, nor nothing'}."
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
    def compute_bytes(self) -> int:
        """Bytes of an element of a product."""
        return 2 if self.autocast else self.weight_bytes

    @property
    def row_length(self) -> int:
        """Tokens of the longest row of the update."""
        return self.longest_row or self.prompt_length + self.completion_length

    @property
    def sequences(self) -> int:
        """Sequences alive at once in the update."""
        return min(self.mini_batch or self.micro_batch, self.micro_batch)

    @property
    def scored_tokens(self) -> int:
        """Completion tokens alive at once in the update."""
        return self.sequences * self.completion_length

    @property
    def rows(self) -> tuple[int, int]:
        """(rows, tokens in each) as the model sees them in the update."""
        if not self.share_prefix:
            return self.sequences, self.row_length
        prompts = -(-self.sequences // self.num_generations)
        return 1, min(prompts * self.prompt_length + self.scored_tokens, self.sequences * self.row_length)

    @property
    def row_tokens(self) -> int:
        """Tokens that the model sees at once in the update."""
        rows, length = self.rows
        return rows * length

    @property
    def continued_tokens(self) -> int:
        """Tokens among them that continue a prompt which is there once."""
        return min(self.scored_tokens, self.row_tokens) if self.share_prefix else 0

    @property
    def in_one_pass(self) -> bool:
        """Whether a head that trains has its loss and gradients in one pass, as it is with TRL's default loss."""
        return self.full and self.head == "fastgrpo" and self.sequences == self.micro_batch

    @property
    def rollouts(self) -> int:
        """Sequences generated at once on a device."""
        return self.micro_batch * self.accumulation

    @property
    def chunk_plan(self) -> ChunkPlan:
        """Chunks of fastgrpo's head."""
        return ChunkPlan(self.chunk_bytes)
