"""A Qwen3 of 0.6 million parameters that reads characters, and its pre-training on sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from fastgrpo.tools.demo.tasks import Sum

LOSS_GOAL = 0.4
"""Mean cross-entropy of an answer's tokens at which about two in five sampled answers are right."""
MAX_STEPS = 600

_SPECIAL = ["<pad>", "<eos>", "<unk>"]
_BATCH = 128
_LEARNING_RATE = 4e-3
_WARMUP = 20
_SMOOTHING = 0.9


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def toy_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained model; its weights come from torch's global random numbers."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def pretrain(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    sums: Sequence[Sum],
    seed: int,
    max_steps: int = MAX_STEPS,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """
    Supervised training on sums with their answers, until the smoothed loss is down to `LOSS_GOAL`.

    Args:
        model, tokenizer: changed in place; read only.
        sums: what to learn from.
        seed: of the order of the batches.
        max_steps: of 128 sums each; training ends there at the latest.
        progress: called with (steps done, smoothed loss) after every step.
    """
    ids, labels = (values.to(model.device) for values in _supervised(tokenizer, sums))
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP))
    smoothed = None
    model.train()
    for step in range(1, max_steps + 1):
        rows = torch.randint(len(ids), (_BATCH,), generator=order).to(model.device)
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        smoothed = loss.item() if smoothed is None else _SMOOTHING * smoothed + (1 - _SMOOTHING) * loss.item()
        if progress is not None:
            progress(step, smoothed)
        if smoothed <= LOSS_GOAL:
            break


def _supervised(tokenizer: PreTrainedTokenizerFast, sums: Sequence[Sum]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, right-padded; only the answer and the end token after it are learnt."""
    rows, labels = [], []
    for problem in sums:
        prompt = tokenizer(problem.prompt)["input_ids"]
        answer = [*tokenizer(str(problem.answer))["input_ids"], tokenizer.eos_token_id]
        rows.append(prompt + answer)
        labels.append([-100] * len(prompt) + answer)
    width = max(map(len, rows))
    padded = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    return padded, torch.tensor([row + [-100] * (width - len(row)) for row in labels])
