"""`Options`: what a patched trainer does differently, and how much memory it may use for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fastgrpo.chunking import ChunkPlan
from fastgrpo.trl.parts import Limits

PACKING_CHOICES = ("auto", "varlen", "left", "none")
STALE_CHOICES = ("warn", "error", "ignore")
SYNC_CHOICES = ("auto", "merged", "adapter", "trl")


_SWITCH_WORDS = ("true", "false", "yes", "no", "y", "n", "t", "f", "on", "off", "none", "null")


def names_a_path(text: str) -> bool:
    """Whether a text given where True, False or a path is allowed is a path: it says neither yes nor no, and is no number."""
    said = text.strip().lower()
    return bool(said) and said not in _SWITCH_WORDS and not re.fullmatch(r"[-+]?\d+(\.\d*)?", said)


@dataclass(frozen=True)
class Options:
    """
    Options of `fastgrpo.patch`. None of them changes a loss or a gradient, but for the masks of dropout, where there is any.

    Args:
        chunk_bytes: device bytes for the logits alive at once, or what stands in for them; None = 512 MiB, on a CPU 128 MiB.
        num_chunks: -1 = as many chunks of logits as `chunk_bytes` asks for; n >= 1 = exactly n.
        logit_chunk_multiplier: multiplies the automatic number of chunks.
        mini_batch_size: sequences of a micro-batch whose activations are alive at once; the others' forward runs again in the
            backward pass. None = all of them.
        max_tokens_per_microbatch: the same by tokens, as the model sees them: padding where the layout has any, a shared prompt
            once. A longer sequence runs on its own. None = no limit.
        packing: how a micro-batch reaches the model: `"varlen"` = its real tokens as one row, no padding; `"left"` = real
            tokens at the left, padding shared by all rows cut; `"none"` = as TRL pads it; `"auto"` = the first of these
            that is right for the model.
        share_prefix: with `"varlen"`, a prompt that several completions continue is computed once.
        skip_zero_advantage: rows with an advantage of 0, or with nothing in their loss mask, stay out of the gradient
            forward. Loss and gradients stay the same; `entropy` and `sampling/*`, metrics, become means over the other rows.
        fused_layers: LoRA layers, gated MLPs, RMS norms and rotary embeddings run as one function each while log-probs are
            computed.
        offload_activations: inputs of layers, and whatever else is kept for the backward pass, wait for it in pinned host
            memory; mini-batches are kept there too instead of computed again. Needs gradient checkpointing. On a CPU
            nothing changes.
        run_log: where every `train()` writes its run log: True = `log.jsonl` in the trainer's output folder, a path = that
            `.jsonl` file or `log.jsonl` in that folder, False = nowhere. A log that is there is kept; the new one gets a
            number.
        on_stale: what happens where a batch is used whose weights are not those the algorithm expects, or unknown: `"warn"`,
            `"error"` = `StaleRolloutError` before the update, `"ignore"`.
        sync: how weights reach vLLM: `"merged"` = into the engine of this process, only what training changes, LoRA merged
            out of place; `"adapter"` = the LoRA adapter alone, to a server or (built so by `patch_trl`) to the engine;
            `"trl"` = as TRL does; `"auto"` = the first of these that is possible.

    Raises:
        ValueError: a value that is not allowed.
        TypeError: an unknown name, or no number for `chunk_bytes`, `num_chunks` or `logit_chunk_multiplier`.
    """

    chunk_bytes: int | None = None
    num_chunks: int = -1
    logit_chunk_multiplier: float | None = None
    mini_batch_size: int | None = None
    max_tokens_per_microbatch: int | None = None
    packing: str = "auto"
    share_prefix: bool = True
    skip_zero_advantage: bool = False
    fused_layers: bool = True
    offload_activations: bool = False
    run_log: str | Path | bool = True
    on_stale: str = "warn"
    sync: str = "auto"

    def __post_init__(self) -> None:
        self.chunk_plan  # noqa: B018 - raises on bad values
        for name in ("mini_batch_size", "max_tokens_per_microbatch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} is {value!r}; give a whole number from 1 on, or None.")
        for name, choices in (("packing", PACKING_CHOICES), ("on_stale", STALE_CHOICES), ("sync", SYNC_CHOICES)):
            if getattr(self, name) not in choices:
                allowed = ", ".join(map(repr, choices))
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {allowed}.")
        for name in ("share_prefix", "skip_zero_advantage", "fused_layers", "offload_activations"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False.")
        if not isinstance(self.run_log, str | Path | bool) or (
            isinstance(self.run_log, str) and not names_a_path(self.run_log)
        ):
            raise ValueError(
                f"run_log is {self.run_log!r}; give a path, True or False. A folder of such a name is './NAME'."
            )

    @property
    def chunk_plan(self) -> ChunkPlan:
        """The chunk options as the head takes them."""
        return ChunkPlan(self.chunk_bytes, self.num_chunks, self.logit_chunk_multiplier)

    @property
    def limits(self) -> Limits:
        """What of a micro-batch may be alive at once."""
        return Limits(self.mini_batch_size, self.max_tokens_per_microbatch)
