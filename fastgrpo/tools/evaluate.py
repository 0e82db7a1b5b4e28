"""Pass@1: the share of problems a model solves with one answer, its most likely one or, on average, a sampled one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.tools.wording import ToolError, reason


class HasPrompt(Protocol):
    """A problem: anything with a `prompt`, a text or a conversation."""

    @property
    def prompt(self) -> str | Sequence[Mapping[str, str]]: ...


Problem = TypeVar("Problem", bound=HasPrompt)


@dataclass(frozen=True)
class PassAt1:
    """
    Outcome of `evaluate_pass_at_1`.

    Attributes:
        correct: which answers were right, problem by problem; None = not judged.
        answers: the model's texts, special tokens left out.
        samples: answers to each problem.
    """

    correct: tuple[bool | None, ...]
    answers: tuple[str, ...]
    samples: int = 1

    @property
    def n(self) -> int:
        """Number of problems, without those of which no answer was judged."""
        return len(self._judged)

    @property
    def rate(self) -> float:
        """Share of right answers among those that were judged, 0 to 1; NaN where none was."""
        judged = [right for problem in self._judged for right in problem]
        return sum(judged) / len(judged) if judged else math.nan

    @property
    def error(self) -> float:
        """Standard error of `rate` as an estimate for all such problems; NaN where all problems went alike, or there is one."""
        rates = [sum(problem) / len(problem) for problem in self._judged]
        return statistics.stdev(rates) / math.sqrt(self.n) if len(set(rates)) > 1 else math.nan

    @property
    def _judged(self) -> list[list[bool]]:
        starts = range(0, len(self.correct), self.samples)
        problems = [[c for c in self.correct[i : i + self.samples] if c is not None] for i in starts]
        return [problem for problem in problems if problem]


def evaluate_pass_at_1(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    is_correct: Callable[[Problem, str], bool | None],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    samples: int = 1,
    temperature: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> PassAt1:
    """
    Answers every problem, greedily or by sampling, and counts the right answers.

    Leaves everything as it was: the model's training mode and generation config, the tokenizer, torch's random numbers.

    Args:
        model: a causal language model, also one with PEFT adapters.
        tokenizer: its tokenizer, with a pad or an end-of-sequence token.
        problems: held-out problems; the model is given each one's `prompt`, a text as it stands, a conversation through the
            tokenizer's chat template.
        is_correct: whether a text (without special tokens) solves a problem; None = it does not say.
        max_new_tokens: tokens an answer may have, >= 1.
        batch_size: answers generated at once, >= 1; prompts are left-padded.
        samples: answers to each problem, >= 1.
        temperature: of the sampling, from all tokens; None = greedy.
        seed: of the sampling.
        progress: called with (problems done, problems in all) after every batch.

    Returns:
        PassAt1.

    Raises:
        ValueError: no problems, an empty prompt, a size below 1, or a tokenizer that has nothing to pad with or is another
            model's.
    """
    if not problems:
        raise ValueError("problems is empty; pass@1 needs at least one.")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    if temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; give a number above 0, or None for greedy answers.")
    if temperature is None and samples > 1:
        raise ValueError(f"samples is {samples}, and greedy answers are all the same; give a temperature.")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ToolError(
            "the tokenizer has neither a pad nor an end-of-sequence token",
            "set tokenizer.pad_token, and save it beside the model",
        )
    embeddings = model.get_input_embeddings()
    prompts = tokenised(tokenizer, [problem.prompt for problem in problems], len(embeddings.weight))

    config = _generation_config(model, tokenizer, max_new_tokens, pad, temperature)
    config.num_return_sequences = samples
    at_once = max(1, batch_size // samples)
    answers: list[str] = []
    correct: list[bool | None] = []
    with _inference(model):
        if temperature is not None:
            _seed(model, seed)
        for start in range(0, len(prompts), at_once):
            batch = prompts[start : start + at_once]
            ids, mask = _left_padded(batch, pad, model.device)
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
            asked = (problem for problem in problems[start : start + at_once] for _ in range(samples))
            with torch.random.fork_rng(devices=_accelerators(model)):  # what a judge draws changes no answer
                judged = [is_correct(problem, text) for problem, text in zip(asked, texts, strict=True)]
            answers += texts
            correct += [None if right is None else bool(right) for right in judged]
            if progress is not None:
                progress(start + len(batch), len(prompts))
    return PassAt1(correct=tuple(correct), answers=tuple(answers), samples=samples)


def tokenised(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Sequence[Mapping[str, str]]], vocabulary: int | None
) -> list[list[int]]:
    """
    Ids of prompts: of a text as it stands, of a conversation as the chat template writes it.

    Args:
        tokenizer: of the model.
        prompts: texts or conversations.
        vocabulary: tokens that the model knows; None = not looked at.

    Raises:
        ToolError: a prompt that cannot be written, is empty, or has a token that the model does not know.
    """
    rows = []
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = _ids(tokenizer, prompt)
        except ToolError:
            raise
        except Exception as error:  # a template raises what it likes
            raise ToolError(
                f"prompt {number} cannot be tokenised: {reason(error)}",
                "correct the prompt, or the tokenizer's chat template",
            ) from error
        if not ids:
            raise ToolError(f"prompt {number} is empty: there is nothing to continue", "give it a text, or drop it")
        if vocabulary is not None and max(ids) >= vocabulary:
            raise ToolError(
                f"prompt {number} has token {max(ids)}, and the model knows {vocabulary}: the tokenizer is another model's",
                "save the model's own tokenizer beside it",
            )
        rows.append(ids)
    return rows


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if not isinstance(prompt, Sequence):
        raise TypeError(f"it is of type {type(prompt).__name__}, neither a text nor a conversation")
    if tokenizer.chat_template is None:
        raise ToolError(
            "the prompts are conversations, and the tokenizer has no chat template to write them with",
            "give prompts that are texts, or set tokenizer.chat_template and save it beside the model",
        )
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return ids["input_ids"]


def _left_padded(rows: list[list[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, pad: int, temperature: float | None
) -> GenerationConfig:
    """The model's own special tokens and nothing else of its sampling settings."""
    own = model.generation_config
    ends: Any = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    sampling = {} if temperature is None else {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        do_sample=temperature is not None,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad,
        bos_token_id=own.bos_token_id,
        **sampling,
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


def _seed(model: PreTrainedModel, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    for device in _accelerators(model):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _accelerators(model: PreTrainedModel) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
