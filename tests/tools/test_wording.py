"""What libraries say, as a sentence."""

from __future__ import annotations

import pytest

from fastgrpo.tools.wording import reason


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("first\n  second."), "first second"),
        (ValueError("Field 'x':\n    TypeError: expected int"), "Field 'x': expected int"),
        (
            RuntimeError(
                'failed with "Overflow\nException raised from f at a.h:79 (most recent call first):\nframe #0'
            ),
            None,
        ),
        (ValueError("Class validation error for validator 'validate_rope':\n    RoPEError: odd"), "odd"),
        (KeyError("llama9"), "llama9 is missing"),
        (AssertionError(), "AssertionError"),
    ],
    ids=["lines", "class", "frames", "validator", "key", "nothing"],
)
def test_a_message_is_one_sentence_without_what_only_programs_need(error, said):
    assert reason(error) == (said or 'failed with "Overflow"')


def test_a_long_message_ends_at_a_word_and_says_that_it_goes_on():
    text = reason(ValueError("word " * 200))
    assert len(text) < 420 and text.endswith("word ...")
