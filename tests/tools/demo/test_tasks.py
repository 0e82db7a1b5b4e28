from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.tools.demo.recipe import SMOLLM2, TOY
from fastgrpo.tools.demo.tasks import Sum, all_sums, exact_reward, is_correct, reward_of, rule_reward

answers = st.integers(20, 198)
words = st.text(st.characters(exclude_categories=("N", "Z", "C", "P")), min_size=1, max_size=8)


@given(answers, st.sampled_from(["", " ", "\n"]), st.sampled_from(["", " ", "\n\n"]))
def test_the_right_number_alone_earns_most(answer, before, after):
    assert reward_of(f"{before}{answer}{after}", answer) == 1.0


@given(answers, words)
def test_the_right_number_with_words_around_earns_less(answer, word):
    assert reward_of(f"{answer} {word}", answer) == reward_of(f"{word} {answer}", answer) == 0.6


@given(answers, answers)
def test_another_number_alone_earns_a_little(answer, other):
    if answer != other:
        assert reward_of(f" {other}", answer) == 0.2


@given(answers, answers, words)
def test_a_wrong_number_with_words_earns_nothing(answer, other, word):
    if answer != other:
        assert reward_of(f"{other} {word}", answer) == 0.0


@given(st.text(), answers)
def test_any_text_has_a_reward_of_the_scale_and_a_right_one_beats_a_wrong_one(text, answer):
    reward = reward_of(text, answer)
    assert reward in (0.0, 0.2, 0.6, 1.0)
    assert (reward >= 0.6) == is_correct(Sum(answer, 0, ""), text)


@given(st.lists(st.text()), answers)
def test_reward_functions_score_each_completion_for_itself(texts, answer):
    extra = {"prompts": [""] * len(texts), "trainer_state": None}
    assert rule_reward(texts, answer=[answer] * len(texts), **extra) == [reward_of(text, answer) for text in texts]
    assert exact_reward(texts, answer=[answer] * len(texts), **extra) == [float(text == str(answer)) for text in texts]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("46", True),
        (" 46\nThe", True),
        ("it is 46.", True),
        ("46 or 47", True),
        ("47 or 46", False),
        ("", False),
        ("146", False),
    ],
)
def test_pass_at_1_looks_at_the_first_number(text, right):
    assert is_correct(Sum(12, 34, "12+34="), text) is right


def test_sums_are_all_different_and_their_order_depends_on_the_seed_alone():
    first = all_sums("{a}+{b}=", 0)
    assert len(set(first)) == len(first) == 8100
    assert first == all_sums("{a}+{b}=", 0)
    assert first != all_sums("{a}+{b}=", 1)
    assert sorted(first, key=str) == sorted(all_sums("{a}+{b}=", 1), key=str)
    assert first[0].answer == first[0].a + first[0].b
    assert first[0].prompt == f"{first[0].a}+{first[0].b}="


@pytest.mark.parametrize("recipe", [SMOLLM2, TOY])
def test_an_answer_and_its_end_fit_into_a_completion(recipe):
    # A space, three digits and the end token.
    assert recipe.max_completion_length >= 4 + (recipe is SMOLLM2)
