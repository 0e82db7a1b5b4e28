"""Greedy pass@1: the share of problems a model solves with its one most likely answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


class HasPrompt(Protocol):
    """A problem: anything with a text `prompt`."""

    @property
    def prompt(self) -> str: ...


Problem = TypeVar("Problem", bound=HasPrompt)


@dataclass(frozen=True)
class PassAt1:
    """
    Outcome of `evaluate_pass_at_1`.

    Attributes:
        correct: which problems were solved, in their order.
        answers: the model's text for each, special tokens left out.
    """

    correct: tuple[bool, ...]
    answers: tuple[str, ...]

    @property
    def n(self) -> int:
        """Number of problems."""
        return len(self.correct)

    @property
    def rate(self) -> float:
        """Share solved, 0 to 1."""
        return sum(self.correct) / self.n


def evaluate_pass_at_1(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    is_correct: Callable[[Problem, str], bool],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> PassAt1:
    """
    Answers every problem once, greedily, and counts the right answers.

    Leaves everything as it was: the model's training mode and generation config, the tokenizer, torch's random numbers.

    Args:
        model: a causal language model, also one with PEFT adapters.
        tokenizer: its tokenizer, with a pad or an end-of-sequence token.
        problems: held-out problems; the model is given each one's `prompt` as it stands, without a chat template.
        is_correct: whether a text (without special tokens) solves a problem.
        max_new_tokens: tokens an answer may have, >= 1.
        batch_size: prompts generated at once, >= 1; they are left-padded.
        progress: called with (problems done, problems in all) after every batch.

    Returns:
        PassAt1.

    Raises:
        ValueError: no problems, an empty prompt, a size below 1, or a tokenizer that has nothing to pad with.
    """
    if not problems:
        raise ValueError("problems is empty; pass@1 needs at least one.")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError("the tokenizer has neither a pad nor an end-of-sequence token; set tokenizer.pad_token.")
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    if not all(prompts):
        raise ValueError(f"problem {prompts.index([])} has an empty prompt; there is nothing to continue.")

    greedy = _greedy_config(model, tokenizer, max_new_tokens, pad)
    answers: list[str] = []
    with _inference(model):
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            ids, mask = _left_padded(batch, pad, model.device)
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy)
            answers += tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
            if progress is not None:
                progress(len(answers), len(prompts))
    correct = (bool(is_correct(problem, answer)) for problem, answer in zip(problems, answers, strict=True))
    return PassAt1(correct=tuple(correct), answers=tuple(answers))


def _left_padded(rows: list[list[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _greedy_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, pad: int
) -> GenerationConfig:
    """The model's own special tokens and nothing else of its sampling settings."""
    own = model.generation_config
    ends: Any = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad,
        bos_token_id=own.bos_token_id,
    )


@contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    # generate() fills what its config leaves open from the model's, so that must hold no repetition penalty and the like.
    # PEFT hands its own copy down to the model it wraps.
    holders = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    own = [holder.generation_config for holder in holders]
    modes = {module: module.training for module in model.modules()}
    for holder in holders:
        holder.generation_config = GenerationConfig()
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_accelerators(model)):
            yield
    finally:
        for holder, config in zip(holders, own, strict=True):
            holder.generation_config = config
        for module, training in modes.items():
            module.training = training


def _accelerators(model: PreTrainedModel) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
