"""The check at patch time: fastgrpo's forward of one tiny batch against the model's own, row by row without padding.

It finds what no list of model types can: an output transform of a model nobody has tried, positions that depend on the
layout, an attention that ignores or needs a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer

from fastgrpo.trl.scoring import Layouts

# Which prompt, its tokens and those of its completion, row by row: unequal, so that both sides have padding; the first
# and the last continue the same prompt, so that it can be shared.
_ROWS = ((0, 2, 5), (1, 5, 3), (0, 2, 4))
# Token ids of the rows lie below.
_IDS = 256
# Largest relative difference of the gradients of the embedded tokens; 16-bit models round at every layer.
_GRADIENT_LIMIT = {"exact": 1e-2, "rounded": 0.3}


class Scored(NamedTuple):
    """What one way of scoring says of the completions' tokens, one after the other, and of the whole rows' gradients."""

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor
    """Of a fixed weighted sum of log-probs, with respect to the embedded tokens, summed for each token id: `[256, H]`."""


@dataclass(frozen=True)
class Finding:
    """
    What the check found.

    Attributes:
        layout: the first of the layouts asked for that agrees.
        rejected: layout -> how it differs, for those tried before it.
        head: how the head differs from the model's own on rows without padding; empty where it agrees.
        skipped: why nothing could be compared; empty where it was.
        difference: largest difference of a log-prob (nats) among what agrees.
    """

    layout: Layouts = "none"
    rejected: dict[str, str] = field(default_factory=dict)
    head: str = ""
    skipped: str = ""
    difference: float = 0.0


ScoreRows = Callable[[Tensor, Tensor, int, Layouts], tuple[Tensor, Tensor]]
"""(input_ids, attention_mask, logits_to_keep, layout) -> log-probs and entropies, `[B, logits_to_keep]`."""


def probe(trainer: GRPOTrainer, score_rows: ScoreRows, layouts: list[Layouts]) -> Finding:
    """
    Compares fastgrpo's scoring of three short rows with the forward of the model itself.

    No random number is drawn, no gradient is left behind, and the modes of all modules are restored.

    Args:
        trainer: whose policy is run, in evaluation mode.
        score_rows: fastgrpo's scoring.
        layouts: to try in this order, on all rows padded as TRL pads them; `"none"` is TRL's own and not compared.

    Returns:
        Finding.
    """
    model = trainer.model
    rejected: dict[str, str] = {}
    with undisturbed(model):
        try:
            rows = _rows(model)
            expected = [_stock(trainer, model, row, completion) for row, completion in rows]
        except Exception as error:  # whatever a model raises here is no reason not to patch it
            return Finding(layout=layouts[0], skipped=_first_line(error))
        try:
            alone = [
                _ours(model, score_rows, row[None], torch.ones_like(row[None]), completion, "none")
                for row, completion in rows
            ]
            head = _difference(trainer, _joined(alone), _joined(expected))
            if head.reason:
                return Finding(head=head.reason, difference=head.worst)
            ids, mask, width = _as_trl_pads(rows)
            for layout in layouts:
                if layout == "none":
                    break
                try:
                    together = _difference(
                        trainer, _ours(model, score_rows, ids, mask, width, layout), _joined(expected)
                    )
                except NotImplementedError as error:
                    rejected[layout] = str(error)
                    continue
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # a hook or a forward that wants the inputs as TRL gives them
                    rejected[layout] = f"a forward in this layout raises {_first_line(error)}"
                    continue
                if not together.reason:
                    return Finding(layout, rejected, difference=max(head.worst, together.worst))
                rejected[layout] = f"it changes this model's results: {together.reason}"
        except torch.OutOfMemoryError as error:
            return Finding(layout=layouts[0], skipped=_first_line(error))
    return Finding("none", rejected, difference=head.worst)


def _rows(model: torch.nn.Module) -> list[tuple[Tensor, int]]:
    """(token ids of a row, length of its completion); ids that mean something to the model's config are left out."""
    embedding = model.get_input_embeddings().weight
    config = model.config
    special = {
        value
        for part in (config, config.get_text_config())
        for name, value in part.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    vocabulary = min(embedding.shape[0], model.get_output_embeddings().weight.shape[0])
    plain = [token for token in range(min(vocabulary, _IDS)) if token not in special] or [0]
    rows = []
    for number, (name, prompt, completion) in enumerate(_ROWS):
        seeds = [7 * column + 11 * name for column in range(prompt)]
        seeds += [7 * (prompt + column) + 11 * number + 3 for column in range(completion)]
        ids = [plain[seed % len(plain)] for seed in seeds]
        rows.append((torch.tensor(ids, device=embedding.device), completion))
    return rows


def _as_trl_pads(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, int]:
    before = max(len(row) - completion for row, completion in rows)
    after = max(completion for _, completion in rows)
    ids = rows[0][0].new_zeros(len(rows), before + after)
    mask = torch.zeros_like(ids)
    for number, (row, completion) in enumerate(rows):
        start = before - (len(row) - completion)
        ids[number, start : start + len(row)] = row
        mask[number, start : start + len(row)] = 1
    return ids, mask, after


def _stock(trainer: GRPOTrainer, model: torch.nn.Module, row: Tensor, completion: int) -> Scored:
    with _embedded(model) as embedded:
        with trainer.accelerator.autocast():
            logits = model(input_ids=row[None], attention_mask=torch.ones_like(row[None]), use_cache=False).logits
        log_p = (logits[0, -completion - 1 : -1].double() / trainer.temperature).log_softmax(-1)
        logprobs = log_p.gather(1, row[-completion:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
        gradient = _gradient(logprobs * _weights(logprobs), embedded)
    return Scored(logprobs.detach(), entropy.detach(), gradient)


def _ours(
    model: torch.nn.Module, score_rows: ScoreRows, ids: Tensor, mask: Tensor, completion: int, layout: Layouts
) -> Scored:
    scored = mask[:, -completion:].bool()
    with _embedded(model) as embedded:
        logprobs, entropy = score_rows(ids, mask, completion, layout)
        gradient = _gradient((logprobs * _weights(logprobs))[scored], embedded)
    return Scored(logprobs[scored].detach().double(), entropy[scored].detach().double(), gradient)


def _weights(logprobs: Tensor) -> Tensor:
    """What a completion's tokens count in the differentiated sum: the same in every row, different in every column."""
    return torch.arange(1, logprobs.shape[-1] + 1, device=logprobs.device).mul(1.7).cos()


def _gradient(terms: Tensor, embedded: list[tuple[Tensor, Tensor]]) -> Tensor:
    ids, leaf = embedded[-1]
    (gradient,) = torch.autograd.grad(terms.sum(), leaf, materialize_grads=True)
    gradient = gradient.double().flatten(0, -2)
    return gradient.new_zeros(_IDS, gradient.shape[-1]).index_add_(0, ids.flatten(), gradient)


def _joined(parts: list[Scored]) -> Scored:
    logprobs, entropy, gradient = zip(*parts, strict=True)
    return Scored(torch.cat(logprobs), torch.cat(entropy), sum(gradient))


class _Comparison(NamedTuple):
    worst: float
    reason: str


def _difference(trainer: GRPOTrainer, ours: Scored, expected: Scored) -> _Comparison:
    """The largest difference of a log-prob, and in words what is out of bounds."""
    rounding = _rounding(trainer)
    exact = rounding < 1e-5
    largest = max(float(expected.logprobs.abs().max()), float(expected.entropy.abs().max()))
    limit = max(1e-3, rounding * (1 + largest))
    worst = 0.0
    for name, found, truth in (
        ("log-probs", ours.logprobs, expected.logprobs),
        ("entropies", ours.entropy, expected.entropy),
    ):
        difference = (found - truth).abs()
        if name == "log-probs":
            worst = float(difference.max())
        if not float(difference.mean()) <= limit:
            return _Comparison(worst, f"{name} differ by {float(difference.mean()):.2g} nats on average")
    norm = expected.gradient.norm()
    relative = float((ours.gradient - expected.gradient).norm() / norm) if norm > 0 else 0.0
    if not relative <= _GRADIENT_LIMIT["exact" if exact else "rounded"]:
        return _Comparison(worst, f"gradients differ by {relative:.2g} of their size")
    return _Comparison(worst, "")


def _rounding(trainer: GRPOTrainer) -> float:
    """Relative rounding of the coarsest numbers the model computes with."""
    model = trainer.model
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    quantised = getattr(getattr(model, "config", None), "quantization_config", None)
    dtypes.add(getattr(quantised, "bnb_4bit_compute_dtype", None) or torch.float32)
    dtypes.add({"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision, torch.float32))
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes)
    if any(parameter.is_cuda for parameter in model.parameters()) and torch.get_float32_matmul_precision() != "highest":
        rounding = max(rounding, 2.0**-10)  # TF32
    return rounding


@contextmanager
def _embedded(model: torch.nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """(ids, embedded tokens) of every forward while this is open; the latter are leaves that take a gradient."""
    captured: list[tuple[Tensor, Tensor]] = []

    def capture(module: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        captured.append((args[0], leaf))
        return leaf.clone()  # a leaf must not be written to, and some models do

    hook = model.get_input_embeddings().register_forward_hook(capture)
    try:
        yield captured
    finally:
        hook.remove()


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and gradients on; modes and random numbers are afterwards what they were."""
    training = [module for module in model.modules() if module.training]
    devices = {p.device.index or 0 for p in model.parameters() if p.is_cuda}
    autocast = torch.autocast(
        "cuda" if devices else "cpu", enabled=False
    )  # the caller's; the trainer's own comes inside
    with torch.inference_mode(False), torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad(), autocast:
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
