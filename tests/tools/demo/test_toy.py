from __future__ import annotations

import torch

from fastgrpo.tools.demo.tasks import all_sums
from fastgrpo.tools.demo.toy import LOSS_GOAL, _supervised, pretrain, toy_model, toy_tokenizer


def test_the_toy_has_about_as_many_parameters_as_it_says():
    assert 550_000 < toy_model(toy_tokenizer()).num_parameters() < 650_000


def test_text_survives_the_tokenizer_character_by_character():
    tokenizer = toy_tokenizer()
    ids = tokenizer("12+34=46")["input_ids"]
    assert len(ids) == 8
    assert tokenizer.decode(ids) == "12+34=46"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34=46"


def test_only_the_answer_and_its_end_are_learnt():
    tokenizer = toy_tokenizer()
    ids, labels = _supervised(tokenizer, all_sums("{a}+{b}=", 0)[:50])
    learnt = labels != -100
    assert torch.equal(ids[learnt], labels[learnt])
    for row, mask in zip(ids, learnt, strict=True):
        a, b = tokenizer.decode(row[~mask], skip_special_tokens=True).rstrip("=").split("+")
        answer = row[mask]
        assert answer[-1] == tokenizer.eos_token_id
        assert int(tokenizer.decode(answer[:-1])) == int(a) + int(b)


def test_pre_training_lowers_the_loss_and_is_the_same_for_the_same_seed():
    sums = all_sums("{a}+{b}=", 0)[:200]
    tokenizer = toy_tokenizer()
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = toy_model(tokenizer)
        seen = []
        pretrain(model, tokenizer, sums, seed=0, max_steps=15, progress=lambda step, loss, seen=seen: seen.append(loss))
        losses.append(seen)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 15
    assert losses[0][-1] < 0.9 * losses[0][0]


def test_pre_training_ends_at_its_goal():
    tokenizer = toy_tokenizer()
    steps = []
    pretrain(
        toy_model(tokenizer),
        tokenizer,
        all_sums("{a}+{b}=", 0)[:4],  # soon learnt by heart
        seed=0,
        progress=lambda step, loss: steps.append(loss),
    )
    assert steps[-1] <= LOSS_GOAL
    assert all(loss > LOSS_GOAL for loss in steps[:-1])
