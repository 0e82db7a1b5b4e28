from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig, get_peft_model
from successor import successor_model

from fastgrpo.tools.demo.toy import toy_tokenizer
from fastgrpo.tools.evaluate import evaluate_pass_at_1


@dataclass(frozen=True)
class Digit:
    prompt: str
    answer: str


PROBLEMS = [
    Digit("0", "1"),
    Digit("1234", "5"),
    Digit("12+6", "7"),
    Digit("3=8", "9"),
    Digit("7+2", "4"),
    Digit("5", "6"),
]


def is_correct(problem: Digit, text: str) -> bool:
    return text == problem.answer


def test_answers_and_verdicts_of_a_model_made_by_hand():
    outcome = evaluate_pass_at_1(successor_model(), toy_tokenizer(), PROBLEMS, is_correct, max_new_tokens=3)
    assert outcome.answers == ("1", "5", "7", "9", "3", "")
    assert outcome.correct == (True, True, True, True, False, False)
    assert outcome.n == 6
    assert outcome.rate == pytest.approx(4 / 6)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
def test_the_batch_size_changes_nothing(batch_size):
    torch.manual_seed(5)
    model = successor_model()
    with torch.no_grad():  # attention that matters, so wrong padding would show
        for parameter in model.model.layers.parameters():
            parameter.normal_(std=0.5) if parameter.dim() > 1 else parameter.fill_(1.0)
    tokenizer = toy_tokenizer()
    one_by_one = [
        evaluate_pass_at_1(model, tokenizer, [problem], is_correct, max_new_tokens=4).answers[0] for problem in PROBLEMS
    ]
    together = evaluate_pass_at_1(model, tokenizer, PROBLEMS, is_correct, max_new_tokens=4, batch_size=batch_size)
    assert list(together.answers) == one_by_one
    assert len(set(one_by_one)) > 1


def test_progress_counts_problems():
    seen = []
    evaluate_pass_at_1(
        successor_model(),
        toy_tokenizer(),
        PROBLEMS,
        is_correct,
        max_new_tokens=2,
        batch_size=4,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(4, 6), (6, 6)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_everything_is_left_as_it_was(training, lora):
    model = successor_model()
    base = model
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5))
    model.train(training)
    base.lm_head.eval()  # a mode that differs from the rest
    base.generation_config.suppress_tokens = [toy_tokenizer().convert_tokens_to_ids("1")]
    configs = (model.generation_config, base.generation_config)
    tokenizer = toy_tokenizer()
    tokenizer.padding_side = "right"
    modes = [module.training for module in model.modules()]
    torch.manual_seed(1)
    state = torch.get_rng_state()

    outcome = evaluate_pass_at_1(model, tokenizer, PROBLEMS, is_correct, max_new_tokens=2)

    assert outcome.answers[0] == "1"
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert model.generation_config is configs[0]
    assert base.generation_config is configs[1]
    assert base.generation_config.suppress_tokens
    assert tokenizer.padding_side == "right"


def test_the_answer_is_greedy_whatever_the_model_samples_with():
    model = successor_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)  # nearly uniform: sampling would be wrong most of the time
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0
    assert evaluate_pass_at_1(model, toy_tokenizer(), PROBLEMS, is_correct, max_new_tokens=3).rate == pytest.approx(
        4 / 6
    )


def test_the_model_is_restored_when_a_callback_fails():
    model = successor_model().train()
    config = model.generation_config

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_pass_at_1(model, toy_tokenizer(), PROBLEMS, is_correct, max_new_tokens=2, progress=fail)
    assert model.training
    assert model.generation_config is config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problems": []}, "problems is empty"),
        ({"problems": [*PROBLEMS, Digit("", "1")]}, "prompt 7 is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"samples": 2}, "greedy answers are all the same; give a temperature"),
        ({"temperature": 0.0}, "temperature is 0.0; give a number above 0"),
    ],
)
def test_bad_input_is_a_clear_error(changes, message):
    arguments = {"problems": PROBLEMS, "is_correct": is_correct, "max_new_tokens": 2, **changes}
    with pytest.raises(ValueError, match=message):
        evaluate_pass_at_1(successor_model(), toy_tokenizer(), **arguments)


def test_a_tokenizer_without_anything_to_pad_with_is_an_error():
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a pad nor an end-of-sequence token"):
        evaluate_pass_at_1(successor_model(), tokenizer, PROBLEMS, is_correct, max_new_tokens=2)


def test_sampled_answers_are_means_over_samples_and_the_seed_fixes_them():
    model = successor_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    settings = {"max_new_tokens": 1, "samples": 16, "temperature": 1.0}
    first, again, other, in_small_batches = (
        evaluate_pass_at_1(model, toy_tokenizer(), PROBLEMS, is_correct, **settings, **changes)
        for changes in ({}, {}, {"seed": 1}, {"batch_size": 16})
    )
    assert first == again != other
    assert first.n == in_small_batches.n == 6 and len(first.correct) == 96
    assert 0 < first.rate < 4 / 6
    assert first.error > 0
    warm = evaluate_pass_at_1(model, toy_tokenizer(), PROBLEMS, is_correct, **settings | {"temperature": 0.01})
    assert warm.rate == pytest.approx(4 / 6)


def test_sampling_leaves_torchs_random_numbers_alone():
    model, state = successor_model(), torch.get_rng_state()
    evaluate_pass_at_1(model, toy_tokenizer(), PROBLEMS, is_correct, max_new_tokens=1, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_answers_are_judged_batch_by_batch_and_what_a_judge_draws_changes_none():
    settings = {"max_new_tokens": 2, "samples": 2, "temperature": 1.0, "batch_size": 2}
    model = successor_model()
    undisturbed = evaluate_pass_at_1(model, toy_tokenizer(), PROBLEMS, is_correct, **settings)

    def drawing(problem, text):
        torch.rand(3)
        return is_correct(problem, text)

    assert evaluate_pass_at_1(model, toy_tokenizer(), PROBLEMS, drawing, **settings).answers == undisturbed.answers
    batches = []

    def failing(problem, text):
        raise RuntimeError("a judge that fails at once")

    with pytest.raises(RuntimeError, match="at once"):
        evaluate_pass_at_1(
            model, toy_tokenizer(), PROBLEMS, failing, progress=lambda done, _: batches.append(done), **settings
        )
    assert batches == []
