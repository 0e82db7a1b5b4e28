"""Every layout against rows alone, without padding: log-probs, loss and every gradient, in float32, for models people train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny import tiny_trainer
from torch import Tensor

import fastgrpo
from fastgrpo.trl.compat import SCORING_METHOD, base_model

MODELS = (
    "qwen2 tied",
    "qwen3",
    "llama",
    "mistral window",
    "gemma2 softcap",
    "qwen3 moe",
    "phi bias",
    "gpt2",
    "qwen2.5 vl",
)
TOLERANCE = 1e-5


def rows_alone(trainer: Any) -> Any:
    """A scoring method that runs each row through the model itself, without padding, and takes full logits."""

    def score(model: Any, ids: Tensor, mask: Tensor, width: int, *_: Any, **asked: Any) -> tuple:
        logprobs = torch.zeros(ids.shape[0], width)
        entropies = torch.zeros(ids.shape[0], width)
        for row, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True)):
            scored = row_mask[-width:].bool()
            count = int(scored.sum())
            real = row_ids[row_mask.bool()]
            logits = model(input_ids=real[None]).logits[0, len(real) - count - 1 : -1].float() / trainer.temperature
            if count == 0:
                logprobs[row, 0] = 0 * logits.sum()  # every parameter has a gradient, if of zeros
                continue
            everywhere = logits.log_softmax(-1)
            logprobs[row, scored] = everywhere.gather(1, real[-count:, None])[:, 0]
            entropies[row, scored] = -(everywhere.exp() * everywhere).sum(-1).detach()
        return logprobs, entropies, None

    return score


@st.composite
def groups(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """For each prompt: which of two texts it starts with (so that prompts repeat), its length, and its completions' lengths."""
    count = draw(st.integers(1, 2))
    size = draw(st.integers(1, 8))
    lengths = st.one_of(st.sampled_from([0, 1]), st.integers(2, 9))
    drawn = [(draw(st.integers(1, 9)), draw(st.lists(lengths, min_size=size, max_size=size))) for _ in range(count)]
    if draw(st.booleans()):
        drawn[-1] = (drawn[0][0], drawn[-1][1])
    return drawn


def batch_of(drawn: list[tuple[int, list[int]]]) -> dict[str, Tensor]:
    """What generation returns for these prompts, as TRL pads it."""
    generator = torch.Generator().manual_seed(len(drawn))
    text = torch.randint(3, 40, (16,), generator=generator)
    prompts = [text[:length] for length, completions in drawn for _ in completions]
    completions = [torch.randint(3, 40, (n,), generator=generator) for _, lengths in drawn for n in lengths]
    left, right = max(map(len, prompts)), max(1, *map(len, completions))
    rows = len(prompts)
    batch = {name: torch.zeros(rows, left, dtype=torch.int64) for name in ("prompt_ids", "prompt_mask")}
    batch |= {name: torch.zeros(rows, right, dtype=torch.int64) for name in ("completion_ids", "completion_mask")}
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        batch["prompt_ids"][row, left - len(prompt) :] = prompt
        batch["prompt_mask"][row, left - len(prompt) :] = 1
        batch["completion_ids"][row, : len(completion)] = completion
        batch["completion_mask"][row, : len(completion)] = 1
    advantages = torch.randn(rows, generator=generator)
    return batch | {"advantages": advantages, "num_items_in_batch": batch["completion_mask"].sum()}


def outcome(trainer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Log-probs, loss and all gradients of one micro-batch through TRL's own loss."""
    trainer.model.train()
    trainer.model.zero_grad(set_to_none=True)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logprobs, _, _ = getattr(trainer, SCORING_METHOD)(trainer.model, ids, mask, batch["completion_ids"].shape[1])
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs * batch["completion_mask"], "loss": loss.detach()} | gradients


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_gives_what_rows_alone_give(model, tmp_path):
    trainer = tiny_trainer(tmp_path, model=model, lora=False, importance_sampling_level="sequence", loss_type="grpo")
    trainer.current_gradient_accumulation_steps = 1
    # Of the tokens of a batch, not of a row: its own tests compare it.
    trainer.aux_loss_enabled = False
    layouts = {"none": fastgrpo.Options(packing="none"), "left": fastgrpo.Options(packing="left")}
    with fastgrpo.patch(trainer) as handle:
        varlen = handle.layout == "varlen"
    if model == "gpt2":
        # Its positions count TRL's padding; only rows that start at their first token are right.
        del layouts["none"]
    if model == "qwen2.5 vl" and handle.layout == "none":
        del layouts["left"]
    if varlen:
        layouts |= {"varlen": fastgrpo.Options(share_prefix=False), "shared": fastgrpo.Options()}
    # Newer transformers have no sdpa for Gemma 2.
    assert varlen == base_model(trainer.model)._supports_sdpa, handle.not_varlen_because

    @settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(groups())
    # What six examples rarely draw: a prompt that comes twice, large groups, one prompt alone.
    @example([(5, [0, 1, 3, 9, 1, 0, 4, 2]), (5, [2, 0, 1, 6, 1, 8, 3, 1])])
    @example([(7, [1, 0, 4, 4, 9, 2, 5])])
    @example([(3, [2, 1]), (8, [1, 7])])
    def check(drawn: list[tuple[int, list[int]]]) -> None:
        batch = batch_of(drawn)
        setattr(trainer, SCORING_METHOD, rows_alone(trainer))
        expected = outcome(trainer, batch)
        delattr(trainer, SCORING_METHOD)
        scale = max((value.abs().max() for name, value in expected.items() if "." in name), default=torch.zeros(()))
        for layout, options in layouts.items():
            with fastgrpo.patch(trainer, options):
                ours = outcome(trainer, batch)
            for name, value in expected.items():
                size = scale if "." in name else value.abs().max()
                worst = (ours[name] - value).abs().max()
                assert worst <= TOLERANCE * max(1.0, float(size)), (layout, name, float(worst), drawn)
            assert set(ours) == set(expected), (layout, set(ours) ^ set(expected))

    check()
