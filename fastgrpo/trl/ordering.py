"""Which rows of an optimizer step share a micro-batch: those of one prompt, despite TRL's shuffle.

TRL shuffles a generation batch before it takes it apart, so a prompt would be computed in every micro-batch that has one of
its completions. Some losses are a sum over tokens, divided by what the generation batch says: there, a step's gradient does
not depend on which of its micro-batches a row is in. TRL's buffer stays as it is; the loss gets other rows.

Metrics are means over the micro-batches that TRL made. So once a step's rows are scored, TRL's loss runs on each of its own
micro-batches again, without gradient and with the log-probs at hand, and those metrics count. On every process, what is
reduced over processes is what it was, in the order it was, only later in the step.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.rollout.policy_version import VERSION_KEY
from fastgrpo.trl.compat import LOSS_METHOD, SCORING_METHOD, overrides
from fastgrpo.trl.images import PACKED_INPUTS, PackedImages

if TYPE_CHECKING:
    from fastgrpo.trl.onpolicy import StepWindow

logger = logging.getLogger("fastgrpo")

MicroBatch = dict[str, Any]
_SUMS = ("dapo", "cispo", "vespo")
_OF_A_ROW = {
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"),
    *("mm_token_type_ids", VERSION_KEY),
}
_OF_ALL = {"num_items_in_batch"}


def order_obstacle(trainer: GRPOTrainer) -> str:
    """Why rows stay in TRL's micro-batches; empty where they may change places within an optimizer step."""
    if trainer.args.per_device_train_batch_size == 1:
        return "a micro-batch has one row"
    if min(trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation) == 1:
        return "an optimizer step has all its rows in one micro-batch"
    for method in (LOSS_METHOD, SCORING_METHOD, "compute_loss", "training_step", "_prepare_inputs"):
        if overrides(trainer, method):
            return f"{type(trainer).__name__} brings its own {method}"
    return _why_the_loss_depends_on_it(trainer)


def _why_the_loss_depends_on_it(trainer: GRPOTrainer) -> str:
    if trainer.loss_type not in _SUMS:
        return f"loss_type={trainer.loss_type!r} is a mean over the rows of a micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus is a mean over the tokens of a micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile compares the entropies of a micro-batch"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss is a mean over the tokens of a micro-batch"
    return ""


class RowOrder:
    """
    The rows of a trainer's optimizer steps.

    Args:
        trainer: whose.
        window: counts the micro-batches of its steps.
    """

    def __init__(self, trainer: GRPOTrainer, window: StepWindow) -> None:
        self.trainer, self.window = trainer, window
        self._exchange: Exchange | None = None
        self._said = False

    def broken_off(self, inputs: MicroBatch) -> list[MicroBatch]:
        """
        TRL's micro-batches of a step that was broken off before all its rows were scored, and whose metrics are missing.

        Args:
            inputs: the micro-batch that has begun since.
        """
        exchange = self._exchange
        if exchange is None or not exchange.is_under_way or self._continues(exchange, inputs):
            return []
        self._exchange = None
        return exchange.stock[: len(exchange.scores)]

    def find(self, inputs: MicroBatch) -> Exchange | None:
        """What takes the place of a micro-batch that has begun; None = nothing, its rows are in place."""
        buffer, place = self.trainer._buffered_inputs, self._place
        if not isinstance(buffer, list) or place >= len(buffer) or buffer[place] is not inputs:
            return None
        if self._exchange is None or not self._continues(self._exchange, inputs):
            self._exchange = self._plan(buffer, place, min(self.window.left() + 1, len(buffer) - place))
        self._exchange.begun += 1
        return self._exchange if self._exchange.made else None

    def settle(self) -> list[tuple[MicroBatch, tuple[Tensor, Tensor]]]:
        """
        In the middle of a step, TRL gets the rows that the patch would have taken.

        Returns:
            What was computed of the step, and its log-probs and entropies: their metrics are missing.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is None or not exchange.is_under_way:
            return []
        made = [exchange.with_images(number) for number in range(len(exchange.made))]
        exchange.buffer[exchange.first : exchange.first + len(made)] = made
        return list(zip(made, exchange.scores, strict=False))

    @property
    def _place(self) -> int:
        return self.trainer._step % self.trainer.args.steps_per_generation

    def _continues(self, exchange: Exchange, inputs: MicroBatch) -> bool:
        """Whether a micro-batch is the next one of these."""
        expected = exchange.stock[exchange.begun] if exchange.begun < len(exchange.stock) else None
        return (
            expected is inputs
            and exchange.state is self.trainer.state
            and self._place == exchange.first + exchange.begun
        )

    def _plan(self, buffer: list[MicroBatch], first: int, count: int) -> Exchange:
        stock = buffer[first : first + count]
        sizes = [len(batch["prompt_ids"]) for batch in stock]
        # A callback may have changed the trainer since it was patched.
        obstacle = _why_the_loss_depends_on_it(self.trainer)
        images = _images(stock, sizes)
        of_images = set() if images is None else PACKED_INPUTS
        unknown = {key for batch in stock for key in batch} - _OF_A_ROW - _OF_ALL - of_images
        if images is not None and not images.in_every_row:
            obstacle = "some rows have no image, and a micro-batch of such rows alone would leave out the vision tower"
        if unknown:
            obstacle = f"micro-batches carry {', '.join(sorted(unknown))}, which fastgrpo does not know"
        if obstacle:
            self._say(obstacle)
        if count < 2 or obstacle:
            return Exchange(buffer, first, self.trainer.state, stock)
        whole = {key: _joined([batch[key] for batch in stock]) for key in stock[0] if key not in of_images}
        prompts = [
            tuple(ids[mask].tolist())
            for ids, mask in zip(whole["prompt_ids"].cpu(), whole["prompt_mask"].cpu().bool(), strict=True)
        ]
        if images is not None:
            # Prompts with other pictures are other prompts: a number in front says which.
            names = images.names(whole["completion_ids"].shape[1])
            prompts = [(-1 - name, *prompt) for name, prompt in zip(names, prompts, strict=True)]
        rows = together(prompts, whole["completion_mask"].sum(1).tolist(), sizes)
        as_they_are = [part.tolist() for part in torch.arange(sum(sizes)).split(sizes)]
        if _prompt_tokens(prompts, rows) >= _prompt_tokens(prompts, as_they_are):
            return Exchange(buffer, first, self.trainer.state, stock)
        taken = [torch.tensor(part, device=whole["prompt_ids"].device) for part in rows]
        made = [
            {key: value[part.to(value.device)] if key in _OF_A_ROW else value for key, value in whole.items()}
            for part in taken
        ]
        return Exchange(buffer, first, self.trainer.state, stock, made, taken, images)

    def _say(self, reason: str) -> None:
        if not self._said:
            self._said = True
            logger.warning("fastgrpo: rows stay in the micro-batches that TRL put them in: %s.", reason)


class Exchange:
    """
    The micro-batches of (a part of) an optimizer step, and what takes their places.

    Args:
        buffer, first: TRL's list of micro-batches, and which of them is the first.
        state: of the training, another one in every `train()`.
        stock: as TRL made them.
        made: what takes their places, without images, which are copied when they are needed; empty = nothing does.
        rows: of each of `made`, the numbers of its rows in `stock`.
        images: of all rows; None = there are none.
    """

    def __init__(
        self,
        buffer: list[MicroBatch],
        first: int,
        state: Any,
        stock: list[MicroBatch],
        made: Sequence[MicroBatch] = (),
        rows: Sequence[Tensor] = (),
        images: PackedImages | None = None,
    ) -> None:
        self.buffer, self.first, self.state, self.stock, self.made, self.rows = buffer, first, state, stock, made, rows
        self.images, self.begun = images, 0
        self.scores: list[tuple[Tensor, Tensor]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether some of the micro-batches were scored, and not all."""
        return 0 < len(self.scores) < len(self.made)

    @property
    def micro_batch(self) -> MicroBatch:
        """What takes the place of the one that has begun."""
        return self.with_images(self.begun - 1)

    def with_images(self, number: int) -> MicroBatch:
        """One of `made`, and the images of its rows."""
        return self.made[number] | ({} if self.images is None else self.images.part(self.rows[number]).arguments())

    def finish(self, logprobs: Tensor, entropies: Tensor) -> list[tuple[MicroBatch, tuple[Tensor, Tensor]]]:
        """
        It was scored.

        Args:
            logprobs, entropies: `[rows, T]`.

        Returns:
            Of the last one, all of TRL's micro-batches with their log-probs and entropies; before, none.
        """
        self.scores.append((logprobs.detach(), entropies.detach()))
        if len(self.scores) < len(self.made):
            return []
        place = torch.cat(self.rows).argsort()
        sizes = [len(batch["prompt_ids"]) for batch in self.stock]
        logprobs, entropies = (torch.cat(x)[place].split(sizes) for x in zip(*self.scores, strict=True))
        return list(zip(self.stock, zip(logprobs, entropies, strict=True), strict=True))


def together(prompts: list[tuple[int, ...]], lengths: list[int], sizes: list[int]) -> list[list[int]]:
    """
    Micro-batches in which rows of one prompt are together as far as they fit, with token counts near each other.

    Args:
        prompts: of each row.
        lengths: of its completion.
        sizes: rows of each micro-batch.

    Returns:
        Row numbers of each, ascending.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in sorted(range(len(prompts)), key=lambda row: -lengths[row]):
        groups.setdefault(prompts[row], []).append(row)

    def tokens(rows: list[int]) -> int:
        return sum(lengths[row] for row in rows) + sum(map(len, {prompts[row] for row in rows}))

    parts: list[list[int]] = [[] for _ in sizes]
    for group in sorted(groups.values(), key=lambda rows: (-len(rows), -tokens(rows))):
        while group:
            room = [size - len(part) for size, part in zip(sizes, parts, strict=True)]
            fitting = [number for number, space in enumerate(room) if space >= len(group)]
            if fitting:
                home = min(fitting, key=lambda number: tokens(parts[number]))
                piece = group
            else:
                home = max(range(len(room)), key=lambda number: room[number])
                # Every so many of a group that is ordered by length, so that its parts are about as long.
                piece = [group[number * len(group) // room[home]] for number in range(room[home])]
            parts[home] += piece
            group = [row for row in group if row not in piece]
    return [sorted(part) for part in parts]


def _prompt_tokens(prompts: list[tuple[int, ...]], parts: list[list[int]]) -> int:
    return sum(len(prompt) for part in parts for prompt in {prompts[row] for row in part})


def _images(stock: list[MicroBatch], sizes: list[int]) -> PackedImages | None:
    """The images of all rows; None where there are none, or not in all micro-batches."""
    parts = [
        PackedImages.of({key: batch.get(key) for key in PACKED_INPUTS}, size)
        for batch, size in zip(stock, sizes, strict=True)
    ]
    return PackedImages.joined(parts) if all(part is not None for part in parts) else None


def _joined(values: list[Any]) -> Any:
    """One tensor of the rows of all; what all have in common as it is."""
    first = values[0]
    if not isinstance(first, Tensor) or first.dim() == 0:
        return first
    return torch.cat(values)


@contextmanager
def unseen(trainer: GRPOTrainer) -> Iterator[None]:
    """While this is open, a trainer's training metrics go nowhere and mean nothing, and no process waits for another."""
    accelerator, metrics = trainer.accelerator, trainer._metrics["train"]
    trainer.accelerator, trainer._metrics["train"] = _Alone(accelerator), defaultdict(list)
    try:
        yield
    finally:
        trainer.accelerator, trainer._metrics["train"] = accelerator, metrics


class _Alone:
    """An accelerator that asks no other process, and answers zeros on the CPU, for which nobody waits for the device."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return self.gather(tensor)
