"""The scoring method against TRL's own on batches a rollout may bring: values, entropies and gradients."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_trainer

import fastgrpo

# Tokens of each row's prompt, tokens of its completion, and which prompt a row has: rows with one number share it.
BATCHES: dict[str, tuple[list[int], list[int], list[int]]] = {
    "width of one": ([3, 1, 5], [1, 1, 1], [0, 1, 2]),
    "width of one, one prompt": ([3, 3, 3], [1, 1, 1], [0, 0, 0]),
    "an empty completion": ([3, 2, 5], [0, 4, 1], [0, 1, 2]),
    "an empty completion beside others of its prompt": ([3, 3, 3], [2, 0, 4], [0, 0, 0]),
    "nothing but empty completions": ([3, 2], [0, 0], [0, 1]),
    "nothing but empty completions of one prompt": ([3, 3], [0, 0], [0, 0]),
    "nothing but a prompt of one token": ([1, 1], [0, 0], [0, 1]),
    "prompts of one token": ([1, 1, 1], [3, 5, 2], [0, 1, 0]),
    "nothing to cut": ([4, 4], [3, 3], [0, 1]),
    "longest prompt with the shortest completion": ([9, 1], [1, 9], [0, 1]),
    "scattered groups": ([3, 5, 3, 5, 3], [2, 3, 6, 1, 4], [0, 1, 0, 1, 0]),
    "one row": ([2], [6], [0]),
}
LAYOUTS = {
    "varlen": {},
    "varlen, not shared": {"share_prefix": False},
    "left": {"packing": "left"},
    "none": {"packing": "none"},
}


def batch(prompts: list[int], completions: list[int], group: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids of which pad and end may be part, the mask, and the completions' width."""
    generator = torch.Generator().manual_seed(sum(prompts) + 7 * sum(completions))
    left, width = max(prompts), max(*completions, 1)
    ids = torch.randint(0, 45, (len(prompts), left + width), generator=generator)
    ids[:, :left] = ids[group, :left]
    columns = torch.arange(left + width)
    starts, ends = left - torch.tensor(prompts)[:, None], left + torch.tensor(completions)[:, None]
    mask = ((columns >= starts) & (columns < ends)).long()
    return ids.where(mask.bool(), 0), mask, width


@pytest.mark.parametrize("rows_a_forward", [None, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "qwen3 moe"])
def test_scores_and_gradients_are_trl_s(model, layout, rows_a_forward, tmp_path):
    trainer = tiny_trainer(tmp_path, model=model, lora=False, entropy_coef=0.1)
    handle = fastgrpo.patch(trainer, fastgrpo.Options(**LAYOUTS[layout]))
    assert layout.startswith(handle.layout)
    handle.unpatch()

    def outcome(ids: torch.Tensor, mask: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
        scored = mask[:, -width:]
        weights = torch.randn(2, *scored.shape, generator=torch.Generator().manual_seed(5))
        trainer.model.zero_grad()
        logprobs, entropy, aux = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, width, rows_a_forward, compute_entropy=True, compute_aux_loss=model == "qwen3 moe"
        )
        logprobs, entropy = logprobs * scored, entropy * scored
        aux = logprobs.new_zeros(()) if aux is None else aux
        (weights[0] * logprobs + weights[1] * entropy).sum().add(aux).backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
        return {"logprobs": logprobs, "entropy": entropy, "auxiliary loss": aux, "gradient": gradient}

    for case, lengths in BATCHES.items():
        given = batch(*lengths)
        stock = outcome(*given)
        with fastgrpo.patch(trainer, fastgrpo.Options(**LAYOUTS[layout])):
            ours = outcome(*given)
        for name, theirs in stock.items():
            assert theirs.shape == ours[name].shape, (case, name)
            assert (theirs - ours[name]).abs().max() <= 1e-4 * theirs.abs().max() + 1e-6, (case, name)
