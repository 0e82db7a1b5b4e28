"""How a forward of TRL's model comes to fastgrpo's head instead of its own.

TRL 1.15 and later give the model a fused head: `model(..., labels=labels, fused_lm_head=True)` returns log-probs, and looks
its kernel up by name at every call. There, `HeadDispatcher` stands under that name. Earlier releases take full logits
from the model; there, the output layer scores its input itself, and returns log-probs instead of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.chunking import ChunkPlan
from fastgrpo.head import LogProbs, linear_logprob
from fastgrpo.packing import take_rows
from fastgrpo.trl.compat import has_fused_head, unwrapped
from fastgrpo.trl.fused import FusedLoss

_FUSED_OUTPUTS = {"log_probs", "entropy"}
Entropy = Literal["none", "detached", "differentiable"]


class Scores(NamedTuple):
    """What a scoring forward returns."""

    logprobs: Tensor
    """`[B, L - 1]`: of every token but the first, 0 where its label is -100."""
    entropy: Tensor | None
    aux_loss: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Scores:
        """Applies a function to log-probs and entropies."""
        return Scores(function(self.logprobs), None if self.entropy is None else function(self.entropy), self.aux_loss)


@dataclass(frozen=True)
class HeadCall:
    """What the scoring method knows and TRL's forward does not pass on."""

    plan: ChunkPlan
    entropy: Entropy
    labels: Tensor | None = None
    """`[rows]`, -100 where nothing is scored; None = as TRL passes them."""
    source: Tensor | None = None
    """`[S]`, the row of hidden states that each of S labels is predicted from; None = `labels` lie beside the rows."""
    fused: FusedLoss | None = None
    """The loss, laid out as `labels`, where a head that trains may compute it in the same pass."""

    def score(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: Any) -> LogProbs:
        """Log-probs of `[rows, H]` hidden states; with `source`, of its S labels, and 0 in the rows after them."""
        rows, fused = hidden.shape[0], self.fused
        if self.source is not None:
            hidden, targets = take_rows(hidden, self.source), self.labels
        elif self.labels is not None and self.labels.shape == targets.shape:
            targets = self.labels
        elif fused is not None:
            scored = (self.labels != -100).nonzero().squeeze(1)
            fused = fused.map(lambda x: x[scored])
        options |= {
            "chunk_bytes": self.plan.chunk_bytes,
            "num_chunks": self.plan.num_chunks,
            "logit_chunk_multiplier": self.plan.logit_chunk_multiplier,
        }
        if fused is not None and (weight.requires_grad or (bias is not None and bias.requires_grad)):
            result = fused.score(hidden, weight, targets, bias, **options)
        else:
            differentiable = self.entropy == "differentiable"
            # Picked rows are scored, all of them.
            options["skip_ignored"] = self.source is None
            result = linear_logprob(hidden, weight, targets, bias, entropy_requires_grad=differentiable, **options)
        if self.source is None:
            return result
        return LogProbs(*(None if x is None else torch.nn.functional.pad(x, (0, rows - x.shape[0])) for x in result))


_current_call: ContextVar[HeadCall | None] = ContextVar("fastgrpo_head_call", default=None)


@contextmanager
def head_call(call: HeadCall) -> Iterator[None]:
    """While this is open, `HeadDispatcher` answers with fastgrpo's head."""
    token = _current_call.set(call)
    try:
        yield
    finally:
        _current_call.reset(token)


class HeadDispatcher:
    """Stands for TRL's fused log-prob function: fastgrpo's head inside `head_call`, TRL's own otherwise."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Takes and returns what TRL's function does; entropy None where nobody asked for it."""
        call = _current_call.get()
        if call is None or outputs is None or not set(outputs) <= _FUSED_OUTPUTS:
            # Releases differ in how many arguments there are, so nothing is passed that was not given.
            rest = () if outputs is None else (outputs,)
            return self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, *rest
            )
        result = call.score(
            hidden,
            weight,
            bias,
            targets,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            return_entropy=call.entropy != "none" and "entropy" in outputs,
        )
        return result.logprobs, result.entropy, None, None, None


def score_with_head(trainer: GRPOTrainer, model: torch.nn.Module, inputs: dict[str, Any], call: HeadCall) -> Scores:
    """
    One forward of the model with fastgrpo's head.

    Args:
        trainer: whose temperature and autocast apply.
        model: policy or reference, as accelerate wrapped it.
        inputs: arguments of its forward, without labels.
        call: chunking, entropy, and `labels` of the rows `[B, L - 1]` or, with `source`, of single tokens.

    Returns:
        Scores.
    """
    shape = inputs["input_ids"][:, 1:].shape
    if call.source is None:
        # TRL leaves out what a label of -100 stands beside; `source` says itself what is scored.
        labels = torch.nn.functional.pad(call.labels, (1, 0), value=-100)
        call = replace(call, labels=call.labels.reshape(-1))
    else:
        labels = torch.zeros_like(inputs["input_ids"], dtype=torch.int64)
    if has_fused_head():
        with trainer.accelerator.autocast(), head_call(call):
            outputs = model(**inputs, labels=labels, fused_lm_head=True)
        return Scores(outputs.log_probs, outputs.entropy, outputs.aux_loss)

    base = unwrapped(trainer, model)
    head = base.get_output_embeddings()
    scale, softcap = logit_transform(base.config)
    fp32 = trainer.args.cast_lm_head_to_fp32

    def score(hidden: Tensor) -> LogProbs:
        hidden = hidden[:, :-1].reshape(-1, hidden.shape[-1])
        return call.score(
            hidden.float() if fp32 else hidden,
            head.weight,
            head.bias,
            call.labels,
            temperature=trainer.temperature,
            logit_scale=scale,
            softcap=softcap,
            return_entropy=call.entropy != "none",
            compute_dtype=torch.float32 if fp32 else None,
        )

    with trainer.accelerator.autocast(), _head_replaced(head, score) as results:
        outputs = model(**inputs, use_cache=False)
    entropy = None if results[0].entropy is None else results[0].entropy.view(shape)
    return Scores(results[0].logprobs.view(shape), entropy, getattr(outputs, "aux_loss", None))


def logit_transform(config: Any) -> tuple[float, float | None]:
    """
    Scale and softcap that a model's own forward applies to the output of its head.

    Args:
        config: the model's configuration; nested text configurations are followed.

    Returns:
        (factor, softcap or None).
    """
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        factor = getattr(text, name, None)
        if factor is not None:
            return float(factor), softcap
    divisor = getattr(text, "logits_scaling", None)
    if divisor is None:
        return 1.0, softcap
    # HyperCLOVA X multiplies by what Granite and MiniCPM3 divide by.
    return (float(divisor) if text.model_type == "hyperclovax" else 1.0 / divisor), softcap


@contextmanager
def _head_replaced(head: torch.nn.Module, score: Callable[[Tensor], LogProbs]) -> Iterator[list[LogProbs]]:
    """
    While this is open, the head scores its input, and its output is log-probs, which nobody reads.

    The model must return something that depends on the head and on all below: DDP follows the graph of what a forward
    returns, and takes a parameter that it does not meet there for unused.
    """
    results: list[LogProbs] = []

    def forward(hidden: Tensor) -> Tensor:
        results.append(score(hidden))
        return results[-1].logprobs.view(hidden.shape[0], hidden.shape[1] - 1, 1)

    own_forward = head.__dict__.get("forward")
    head.forward = forward
    try:
        yield results
    finally:
        if own_forward is None:
            del head.forward
        else:
            head.forward = own_forward
