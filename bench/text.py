"""Text for models of random weights: a tokenizer of words, prompts, an end of text that comes now and then, and a reward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.workloads import Workload


def word_tokenizer(workload: Workload) -> transformers.PreTrainedTokenizerFast:
    """`w2`, `w3`, ... for every entry of the vocabulary but the pad and the end of text."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, workload.vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def prompts(workload: Workload, steps: int) -> Iterator[str]:
    """Random words, of lengths between the workload's; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    low, high = workload.prompt_tokens
    for _ in range(workload.prompts * steps):
        length = int(torch.randint(low, high + 1, (1,), generator=generator))
        ids = torch.randint(2, workload.vocabulary, (length,), generator=generator)
        yield " ".join(f"w{index}" for index in ids.tolist())


def end_bias(workload: Workload) -> float:
    """
    What to add to the logit of the end of text.

    Random weights end a text once in V tokens. Their logits have a variance of H times that of the initialisation, so the
    sum of V exponentials is V exp(H var / 2) about; with this bias a text ends once in `completion_median` tokens.
    """
    variance = workload.hidden * workload.config().initializer_range ** 2
    return math.log(workload.vocabulary / workload.completion_median) + variance / 2


def odd_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: the share of odd token ids."""
    return [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]
