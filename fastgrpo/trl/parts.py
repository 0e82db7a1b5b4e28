"""`Options.mini_batch_size` and `max_tokens_per_microbatch`: a scoring forward in parts, one of which is alive at once.

A part is some rows of what TRL scores together. Each part but the last runs under a checkpoint of its own: of its forward
only log-probs and entropies stay, and the backward pass runs it again when it comes to it. The loss sees all rows together,
so nothing that is summed changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trl import GRPOConfig, GRPOTrainer

from fastgrpo.packing import first_with_prompt
from fastgrpo.trl.compat import SCORING_METHOD, overrides

Outputs = tuple[Tensor, Tensor | None]
"""Log-probs and entropies, `[rows, T]`."""


@dataclass(frozen=True)
class Limits:
    """What may be alive at once; None = no limit."""

    sequences: int | None = None
    tokens: int | None = None

    def __bool__(self) -> bool:
        return self.sequences is not None or self.tokens is not None

    def split(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        scored: Tensor,
        layout: str,
        share: bool,
        beside: Sequence[Hashable] | None = None,
    ) -> list[Tensor]:
        """
        Parts within the limits; rows of one prompt stay together as far as they fit.

        Args:
            input_ids, attention_mask: `[B, L]`.
            scored: `[B, L]` bool, the completions.
            layout, share: how the rows of a part reach the model, which says what they cost.
            beside: see `fastgrpo.pack`.

        Returns:
            Row numbers of each part, ascending; every row once. The last part costs most. A row that exceeds the limit on
            its own is a part of its own.
        """
        costs = _Costs(input_ids, attention_mask != 0, scored, layout, share, beside)
        parts: list[list[int]] = []
        for group in costs.groups():
            for piece in [group] if self._allow(costs, group) else [[row] for row in group]:
                homes = [part for part in parts if self._allow(costs, part + piece)]
                if homes:
                    min(homes, key=lambda part: costs(part + piece) - costs(part)).extend(piece)
                else:
                    parts.append(list(piece))
        parts.sort(key=costs)
        return [torch.tensor(sorted(part), device=input_ids.device) for part in parts]

    def _allow(self, costs: _Costs, rows: list[int]) -> bool:
        return not (
            (self.sequences is not None and len(rows) > self.sequences)
            or (self.tokens is not None and costs(rows) > self.tokens)
        )


class _Costs:
    """Tokens that the model computes for some rows together."""

    def __init__(
        self,
        input_ids: Tensor,
        real: Tensor,
        scored: Tensor,
        layout: str,
        share: bool,
        beside: Sequence[Hashable] | None,
    ) -> None:
        self.layout, self.width = layout, input_ids.shape[1]
        prompt = real & ~scored
        self.lengths, self.prompts = real.sum(1).tolist(), prompt.sum(1).tolist()
        self.owners = list(range(len(self.lengths)))
        if layout == "varlen" and share:
            prompts = [ids[kept] for ids, kept in zip(input_ids.cpu(), prompt.cpu(), strict=True)]
            self.owners = first_with_prompt(prompts, beside)

    def groups(self) -> list[list[int]]:
        """Rows that share a prompt, the longest row first; the most expensive group first."""
        found: dict[int, list[int]] = {}
        for row in sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row]):
            found.setdefault(self.owners[row], []).append(row)
        return sorted(found.values(), key=lambda group: -self(group))

    def __call__(self, rows: list[int]) -> int:
        if self.layout == "none":
            return len(rows) * self.width
        if self.layout == "left":
            return len(rows) * max(self.lengths[row] for row in rows)
        prompts = {self.owners[row]: self.prompts[row] for row in rows}
        return sum(self.lengths[row] - self.prompts[row] for row in rows) + sum(prompts.values())


def parts_obstacle(trainer: GRPOTrainer) -> str:
    """Why a forward of this trainer cannot run in parts; empty where it can."""
    if trainer.aux_loss_enabled:
        return "the auxiliary loss is no sum over rows"
    if overrides(trainer, SCORING_METHOD):
        return f"{type(trainer).__name__} brings its own {SCORING_METHOD}"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed's engine takes one forward for every backward"
    if trainer.args.torch_compile:
        return "torch_compile=True would compile anew for every part"
    if trainer.args.n_gpu > 1:
        return "torch's DataParallel takes the rows apart itself; start one process for each device"
    if trainer.args.gradient_checkpointing and (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        return "gradient_checkpointing_kwargs={'use_reentrant': True} does not nest; use False"
    return ""


def check_limits(trainer: GRPOTrainer, limits: Limits) -> None:
    """Raises `ValueError` where a trainer cannot keep within limits, or a mini-batch is more than there is to train on."""
    if not limits:
        return
    obstacle = parts_obstacle(trainer)
    if obstacle:
        given = f"mini_batch_size={limits.sequences}"
        if limits.sequences is None:
            given = f"max_tokens_per_microbatch={limits.tokens}"
        raise ValueError(f"{given} is not possible: {obstacle}; leave it None.")
    check_generated(trainer.args, limits.sequences)


def check_generated(args: GRPOConfig, mini_batch_size: int | None) -> None:
    """Raises `ValueError` where a mini-batch is more than a process trains on between two generations."""
    generated = args.per_device_train_batch_size * args.steps_per_generation
    if mini_batch_size is not None and mini_batch_size > generated:
        raise ValueError(
            f"mini_batch_size is {mini_batch_size}, more than the {generated} sequences that a process trains on between two "
            f"generations (per_device_train_batch_size {args.per_device_train_batch_size} x steps_per_generation "
            f"{args.steps_per_generation}); give at most that, or None."
        )


def score_in_parts(
    model: torch.nn.Module,
    score: Callable[[torch.nn.Module, Tensor], Outputs],
    parts: list[Tensor],
    recompute: bool = True,
) -> Outputs:
    """
    Log-probs and entropies of all rows, one part after the other.

    Args:
        model: as accelerate wrapped it. DDP's wrapper is entered once, around all parts, so ranks may have different numbers
            of them; the backward pass never enters it.
        score: of a model and the numbers of some rows; runs again in the backward pass, with the random numbers and the
            autocast of its first run, possibly in another thread.
        parts: from `Limits.split`.
        recompute: False = what a part needs for its backward pass stays.
    """

    def forward(module: torch.nn.Module) -> Outputs:
        # Their random number generators are restored along with those of the rows' device.
        devices = [torch.empty(0, device=device) for device in {p.device for p in module.parameters()}]

        def one(rows: Tensor, *devices: Tensor) -> Outputs:
            return score(module, rows)

        results = []
        for number, rows in enumerate(parts):
            # What the last part needs is needed first: the backward pass starts there.
            kept = number == len(parts) - 1 or not recompute or not torch.is_grad_enabled()
            results.append(one(rows) if kept else checkpoint(one, rows, *devices, use_reentrant=False))
        place = torch.cat(parts).argsort()
        logprobs, entropies = zip(*results, strict=True)
        return (
            torch.cat(logprobs)[place],
            None if any(x is None for x in entropies) else torch.cat(entropies)[place],
        )

    if not isinstance(model, DistributedDataParallel):
        return forward(model)
    inner = model.module
    model._modules["module"] = _StandIn(inner, forward)
    try:
        return model()
    finally:
        model._modules["module"] = inner


class _StandIn(torch.nn.Module):
    """What DDP's wrapper calls in place of the module it wraps, whose buffers it broadcasts before."""

    def __init__(self, inner: torch.nn.Module, function: Callable[[torch.nn.Module], Outputs]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self) -> Outputs:
        return self.function(self.inner)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.inner.named_buffers(*args, **kwargs)
