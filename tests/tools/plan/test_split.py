"""What is planned as alive at once is what `fastgrpo.trl.parts.Limits` takes apart."""

from __future__ import annotations

import random

import pytest
import torch

from fastgrpo.tools.plan.settings import PlanSettings
from fastgrpo.trl.parts import Limits


def batch(settings: PlanSettings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows as long as planned; those of a group have the same prompt."""
    rows, prompt, width = (
        settings.micro_batch,
        settings.prompt_length,
        settings.prompt_length + settings.completion_length,
    )
    ids = torch.ones(rows, width, dtype=torch.long)
    ids[:, :prompt] = (torch.arange(rows) // settings.num_generations).unsqueeze(1)
    scored = torch.zeros(rows, width, dtype=torch.bool)
    scored[:, prompt:] = True
    return ids, torch.ones_like(ids), scored


def costs_of_the_largest(settings: PlanSettings) -> tuple[int, set[tuple[int, int]]]:
    """Tokens of the trainer's most expensive part, and (rows, prompts) of those that are as expensive."""
    ids, mask, scored = batch(settings)
    limits = Limits(settings.mini_batch, settings.max_tokens_per_microbatch)
    layout = "varlen" if settings.packing == "auto" else settings.packing
    parts = limits.split(ids, mask, scored, layout, settings.share_prefix)
    found = []
    for rows in parts:
        prompts = len(set(ids[rows, 0].tolist()))
        alone = prompts if settings.shares_prompts else len(rows)
        cost = alone * settings.prompt_length + len(rows) * settings.completion_length
        found.append((cost, (len(rows), alone)))
    most = max(cost for cost, _ in found)
    return most, {shape for cost, shape in found if cost == most}


def test_the_largest_part_is_the_trainers_whatever_the_limits():
    draw = random.Random(0)
    seen = set()
    for _ in range(1500):
        group, rows = draw.randint(1, 6), draw.randint(1, 14)
        settings = PlanSettings(
            num_generations=group,
            micro_batch=rows,
            prompt_length=draw.randint(1, 12),
            completion_length=draw.randint(1, 8),
            mini_batch=draw.choice([None, draw.randint(1, rows)]),
            max_tokens_per_microbatch=draw.choice([None, draw.randint(1, 90)]),
            packing=draw.choice(["auto", "varlen", "left", "none"]),
            share_prefix=draw.random() < 0.8,
        )
        tokens, shapes = costs_of_the_largest(settings)
        part = settings.part
        alone = part.prompts if settings.shares_prompts else part.sequences
        assert settings.row_tokens == tokens, settings
        assert (part.sequences, alone) in shapes, (settings, part, shapes)
        seen.add((part.prompts > 1, part.sequences % group == 0))
    assert len(seen) == 4  # whole groups and pieces of them, alone and with others


def test_a_large_micro_batch_is_split_at_once():
    settings = PlanSettings(
        micro_batch=100_000, num_generations=8, prompt_length=7, completion_length=5, max_tokens_per_microbatch=30
    )
    assert (settings.part.sequences, settings.part.prompts) == (4, 1)


@pytest.mark.parametrize("limit", [{"mini_batch": 4}, {"max_tokens_per_microbatch": 2 * 1024}])
def test_what_is_split_has_its_rows_scored_and_padded_tokens_counted(limit):
    settings = PlanSettings(micro_batch=8, prompt_length=512, completion_length=512, packing="none", **limit)
    rows = limit.get("mini_batch", 2)
    assert settings.rows == (rows, 1024)
    assert settings.scored_tokens == rows * 512
    assert not settings.in_one_pass
