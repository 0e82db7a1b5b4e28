"""What is alive in one update, moment by moment: forward, output head, layers, embeddings, optimizer.

Every formula counts bytes beside what is always there: weights, optimizer states, and with several micro-batches or
mini-batches the gradients of those before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastgrpo.chunking import CUDA_ROWS
from fastgrpo.kernels import cuda, fused_head
from fastgrpo.kernels.fused_head import scratch_a_row, serves_width
from fastgrpo.kernels.rows import pitch_of, rows_a_batch
from fastgrpo.tools.plan.settings import PlanSettings
from fastgrpo.tools.plan.shape import ModelShape
from fastgrpo.tools.plan.trace import Activations

_DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Head:
    """
    Bytes of the output head, its weight and what it reads left out.

    Attributes:
        forward: in its forward at the most.
        kept: from there to its backward.
        backward: in its backward at the most.
        gradient: of its weight, from there on; 0 with a frozen head.
    """

    forward: float
    kept: float
    backward: float
    gradient: float


@dataclass(frozen=True)
class Update:
    """
    Bytes at the moments where an update can be largest.

    Attributes:
        forward: at the end of the forward, in the head.
        head: in the head's backward.
        layers: in a layer's backward: the last layer's, while all others still keep their activations, or the first's, when
            all others have their gradients.
        embeddings: when the embeddings get their gradient.
        optimizer: in its step.
        without_gradients: the largest before the optimizer, but for gradients.
    """

    forward: float
    head: float
    layers: float
    embeddings: float
    optimizer: float
    without_gradients: float

    @property
    def peak(self) -> float:
        """The largest of all."""
        return max(self.forward, self.head, self.layers, self.embeddings, self.optimizer)


KEPT, CASTS, HEAD, LAYER = "kept for the backward", "weights in 16 bit", "head", "a layer at work"
"""What the update's term is made of; the first with the second and the head, or with a layer, is alive at once."""


def find_moments(
    settings: PlanSettings,
    shape: ModelShape,
    activations: Activations,
    parts: Mapping[str, float],
    gradients: float,
) -> Update:
    """
    The moments of an update.

    Args:
        settings, shape, activations: of the run.
        parts: bytes of what the update's term is made of.
        gradients: of all that trains.
    """
    head, kept, working = head_of(settings, shape), parts[KEPT], parts[LAYER]
    earlier = [settings.accumulation > 1, settings.sequences < settings.micro_batch]
    # Mini-batches are summed before they are added to the sum of earlier micro-batches.
    before = sum(earlier) * gradients
    rest = 0.0 if any(earlier) else gradients
    last = kept + head.gradient + working
    first = kept - (shape.layers - 1) * activations.a_layer + rest + working
    # A tied weight's two gradients meet here; another embedding's is among `rest`.
    embedding = shape.vocabulary * shape.hidden * settings.weight_bytes if settings.full and shape.tied else 0
    an_input = settings.row_tokens * shape.hidden * settings.weight_bytes
    in_forward = kept + parts[CASTS] + head.forward
    return Update(
        forward=before + in_forward,
        head=before + kept + head.backward,
        layers=before + max(last, first),
        embeddings=before + rest + embedding + an_input,
        optimizer=gradients,
        without_gradients=max(in_forward, kept + head.backward, kept + working),
    )


def head_of(settings: PlanSettings, shape: ModelShape) -> Head:
    """
    What the output head needs for the completion tokens that are alive at once.

    `head="full"`: one matrix of logits in the dtype of the products, the least that any head needs which materialises them.
    fastgrpo, see `fastgrpo.ops` and `fastgrpo.kernels`: hidden states of the scored tokens, and a chunk of fp32 logits
    that becomes its own gradient, or 16-bit values in its place. With a frozen head d logprob / d hidden in fp32; with one
    that trains, the gradient of its weight in fp32, and 16-bit gradients of several chunks: in the forward already, where
    loss and gradients come from one pass. Where those of all rows are the smaller, they wait for the backward instead.
    """
    tokens, width, words = settings.scored_tokens, shape.hidden, shape.vocabulary
    weight, taken = words * width, tokens * width * settings.weight_bytes
    if settings.head == "full":
        logits = tokens * words * settings.compute_bytes
        return Head(logits, logits, logits, weight * settings.weight_bytes if settings.full else 0.0)
    buffers = _buffers(settings, shape)
    # The weight as the products take it.
    cast = weight * settings.compute_bytes if settings.compute_bytes < settings.weight_bytes else 0
    slope = tokens * width * 4
    # What the model's hidden states get from those of the scored tokens.
    given_back = (tokens + settings.row_tokens) * width * settings.weight_bytes
    if not settings.full:
        return Head(taken + slope + buffers.chunk + cast, slope, max(slope + taken, given_back), 0.0)
    gradient, summed = weight * settings.weight_bytes, weight * 4
    if settings.in_one_pass and buffers.waiting:
        kept = buffers.waiting + taken + slope
        weighted = tokens * width * settings.compute_bytes
        backward = max(kept + taken + gradient + weighted + buffers.rounding, gradient + given_back)
        return Head(taken + buffers.in_one_pass + cast + slope, kept, backward, gradient)
    if settings.in_one_pass:
        kept = summed + slope
        backward = max(kept + taken + gradient, gradient + given_back)
        return Head(taken + buffers.in_one_pass + cast + kept, kept, backward, gradient)
    results = gradient + buffers.rounding
    if not buffers.waiting:
        results = summed + (gradient if settings.weight_bytes < 4 else 0)
    backward = max(2 * taken + buffers.again + cast + results, gradient + given_back)
    return Head(taken + buffers.statistics + cast, taken, backward, gradient)


@dataclass(frozen=True)
class _Buffers:
    """
    Bytes of what stands for logits, and their gradients.

    Attributes:
        chunk: with a frozen head.
        statistics: in the forward of a head that trains, where the backward computes logits again.
        in_one_pass: with a head that trains, log-probs, loss and gradients at once.
        again: in a backward that computes logits again.
        waiting: from a forward in one pass to its backward, where the product for the weight's gradient waits for that; else 0.
        rounding: beside such a product.
    """

    chunk: float
    statistics: float
    in_one_pass: float
    again: float
    waiting: float = 0.0
    rounding: float = 0.0


def _buffers(settings: PlanSettings, shape: ModelShape) -> _Buffers:
    tokens, width, words, plan = settings.scored_tokens, shape.hidden, shape.vocabulary, settings.chunk_plan
    if settings.compute_bytes > 2:
        # Torch's ops keep three buffers, two of which the budget counts.
        chunk = min(plan.rows(tokens, words * 8, _DEVICE), tokens) * words * 12
        return _Buffers(chunk, chunk, chunk, chunk)
    if settings.fused_head and serves_width(width) and settings.compute_dtype == "bfloat16":
        rows = plan.rows(tokens, words * 2, _DEVICE, CUDA_ROWS)
        few, many = min(rows, tokens), min(rows_a_batch(rows, fused_head.MOST_CHUNKS_A_BATCH), tokens)
        scratch = 4 * scratch_a_row(words)
        few_of_all, values, weighted = few * (2 * words + scratch), many * 2 * pitch_of(words), many * 2 * width
        if many == tokens and fused_head.rounds_at_once(values, words, width):
            # The sums at the targets, and the gradients that those are made of.
            rounding = pitch_of(many) * (4 * width + 2 * many) if settings.weight_bytes == 2 else 0
            return _Buffers(few_of_all, few * scratch, values + many * scratch, values, values, rounding)
        return _Buffers(few_of_all, few * scratch, values + many * scratch + weighted, values)
    rows = plan.rows(tokens, words * 4, _DEVICE, CUDA_ROWS)
    chunk = min(rows, tokens) * words * 4
    batch = chunk + min(rows_a_batch(rows, cuda.MOST_CHUNKS_A_BATCH), tokens) * words * 2
    return _Buffers(chunk, chunk, batch, batch)
