"""Models and generation batches that updates, training runs and hand-overs of weights are measured on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import transformers

from bench.vision import Tower


@dataclass(frozen=True)
class Workload:
    """
    A model and a generation batch.

    Args:
        name: as printed.
        hidden, layers, heads, kv_heads, intermediate, vocabulary: of a model.
        prompts, completions: distinct prompts, and completions for each of them.
        micro_batch: sequences in a forward; the others follow in further accumulation steps.
        prompt_tokens: shortest and longest prompt.
        completion_median, completion_spread: of the log-normal completion lengths: tokens, and sigma of the logarithm.
        completion_max: longest completion (`max_completion_length`).
        spread: standard deviation of the weights. Scores of an attention without norms have one of about width x spread^2; far
            above 1, two bf16 runs of many layers have hardly a digit of their gradients in common.
        family: `"llama"` or `"qwen3"`.
        shared: the completions of a prompt have it in common; False = every row has an own prompt of that length.
        tied: embeddings and output head are one matrix.
        vision: the tower of a model that sees (Qwen2.5-VL, whatever the family), and the picture of a prompt; None = text.
        options: of the patch.
        cases: what is measured: (`"lora"` or `"full"`, with gradient checkpointing).
        reference: whether gradients are also compared with those of an unpatched float32 run, where the precision is another
            and memory is not short: with gradient checkpointing.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    prompts: int
    completions: int
    micro_batch: int
    prompt_tokens: tuple[int, int]
    completion_median: int
    completion_spread: float
    completion_max: int
    spread: float = 0.04
    family: str = "llama"
    shared: bool = True
    tied: bool = True
    vision: Tower | None = None
    options: tuple[tuple[str, Any], ...] = ()
    cases: tuple[tuple[str, bool], ...] = (("lora", False), ("lora", True), ("full", False), ("full", True))
    reference: bool = False

    def config(self) -> transformers.PretrainedConfig:
        """Of the model."""
        settings = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": max(8192, self.prompt_tokens[1] + self.completion_max),
            "initializer_range": self.spread,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        if self.vision is not None:
            return self.vision.config(settings)
        kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[self.family]
        return kind(head_dim=128 if self.family == "qwen3" else None, **settings)


SMOLLM2 = Workload(
    "SmolLM2-135M",
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    intermediate=1536,
    vocabulary=49152,
    prompts=2,
    completions=4,
    micro_batch=8,
    prompt_tokens=(32, 80),
    completion_median=48,
    completion_spread=0.8,
    completion_max=128,
)
QWEN3_512 = Workload(
    "Qwen3-1.7B, prompts to 512",
    hidden=2048,
    layers=28,
    heads=16,
    kv_heads=8,
    intermediate=6144,
    vocabulary=151936,
    prompts=2,
    completions=8,
    micro_batch=16,
    prompt_tokens=(256, 512),
    completion_median=300,
    completion_spread=0.8,
    completion_max=1024,
    family="qwen3",
    cases=(("lora", True), ("lora", False), ("full", True)),
    reference=True,
)
_LORA = (("lora", True),)
# Without checkpointing, stock needs more memory here than there is.
QWEN3_2048 = replace(QWEN3_512, name="Qwen3-1.7B, prompts to 2048", prompt_tokens=(1536, 2048), cases=_LORA)
# TRL's shuffle scatters the completions of a prompt over the micro-batches.
QWEN3_BY_4, QWEN3_BY_2 = (
    replace(QWEN3_512, name=f"Qwen3-1.7B, micro-batches of {size}", micro_batch=size, cases=_LORA, reference=False)
    for size in (4, 2)
)
QWEN3_EQUAL = replace(
    QWEN3_512,
    name="Qwen3-1.7B, equal lengths, nothing shared",
    prompt_tokens=(512, 512),
    completion_median=512,
    completion_spread=0.0,
    completion_max=512,
    shared=False,
    cases=_LORA,
    reference=False,
)
# The text model of Qwen2-VL-2B under the vision tower of Qwen2.5-VL, whose gated layers get adapters too.
VISION = Workload(
    "vision, 2.2B, pictures of 1024 patches",
    hidden=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    intermediate=8960,
    vocabulary=151936,
    prompts=2,
    completions=8,
    micro_batch=16,
    prompt_tokens=(384, 640),
    completion_median=300,
    completion_spread=0.8,
    completion_max=1024,
    spread=0.02,
    vision=Tower(layers=32, hidden=1280, heads=16, intermediate=3420, side=32),
    cases=_LORA,
    reference=True,
)
VISION_IN_PARTS = replace(VISION, name="vision, mini-batches of 4", options=(("mini_batch_size", 4),), reference=False)
# Beside the model's 16 GB stock TRL needs 99 GB with eight sequences in a micro-batch, and 13 with one.
LLAMA_LONG = Workload(
    "Llama-3.1-8B, 20480 tokens, offloaded",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    intermediate=14336,
    vocabulary=128256,
    prompts=1,
    completions=8,
    micro_batch=8,
    prompt_tokens=(480, 480),
    completion_median=20_000,
    completion_spread=0.0,
    completion_max=20_000,
    spread=0.02,
    tied=False,
    cases=_LORA,
    options=(("mini_batch_size", 1), ("offload_activations", True)),
)
LLAMA_RECOMPUTED = replace(
    LLAMA_LONG, name="Llama-3.1-8B, 20480 tokens, mini-batches", options=(("mini_batch_size", 1),)
)
# As stock fits: one sequence a micro-batch. Two of the eight: the memory is that of one, the time that of two.
LLAMA_ONE = replace(
    LLAMA_LONG,
    name="Llama-3.1-8B, 20480 tokens, one a micro-batch",
    completions=2,
    micro_batch=1,
    options=(("offload_activations", True),),
)
# Short enough for a float32 run, whose attention keeps its scores.
LLAMA_SHORT = replace(
    LLAMA_ONE, name="Llama-3.1-8B, 2048 tokens", completion_median=1568, completion_max=1568, reference=True
)
# Minutes each, or beside the point of most runs, so `bench update` runs them only when they are asked for.
ASKED_FOR = (LLAMA_LONG, LLAMA_RECOMPUTED, LLAMA_ONE, LLAMA_SHORT, VISION_IN_PARTS)
WORKLOADS = {"cpu": (SMOLLM2,), "cuda": (QWEN3_512, QWEN3_2048, QWEN3_EQUAL, QWEN3_BY_4, QWEN3_BY_2, VISION)}
QUICK = Workload(
    "quick",
    hidden=32,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate=64,
    vocabulary=503,
    prompts=2,
    completions=2,
    micro_batch=2,
    prompt_tokens=(4, 12),
    completion_median=8,
    completion_spread=0.8,
    completion_max=24,
    reference=True,
)
QUICK_VISION = replace(
    QUICK,
    name="quick vision",
    prompt_tokens=(8, 12),
    vision=Tower(layers=2, hidden=32, heads=2, intermediate=64, side=4),
    cases=_LORA,
)
QUICK_VISION_IN_PARTS = replace(QUICK_VISION, name="quick vision in parts", options=(("mini_batch_size", 1),))
