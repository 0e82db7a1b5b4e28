"""What `rollout_func` is given is checked before anything is sent, and a key is never shown."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastgrpo.rollout.llama_cpp import rollout_func
from fastgrpo.rollout.server_arguments import address, fields


@pytest.mark.parametrize(
    "given",
    ["se\ncret", "secret\n", " secret", "se cret", "\tsecret", "s\u0000ecret", "ключ", "", b"secret", 5],
    ids=ascii,
)
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(given):
    with pytest.raises(
        ValueError, match=r"^api_key .*; give a str of printable ASCII characters without blanks"
    ) as error:
        rollout_func("http://localhost:1", api_key=given)
    assert "ecret" not in str(error.value) and "ключ" not in str(error.value)
    assert error.value.__context__ is None and error.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        *(8080, None, b"http://x:1", "", "http://", "http:///x", "http://h h:1", " http://h:1", "http://h:1/a\nb"),
        *("http://x:99999", "http://x:0", "http://x:a", "http://[::1:80", "http://[:::1]:80", "http://x:1?a=b"),
        *("http://x:1#f", "http://x:1?", f"http://{'x' * 70}:1", "http://a..b:1", "http://a\\b:1"),
    ],
    ids=ascii,
)
def test_a_url_of_another_form_is_refused_with_what_was_given(url):
    with pytest.raises(ValueError, match=r"^url is .*give") as error:
        rollout_func(url)
    assert repr(url) in str(error.value)


def test_a_path_has_percent_signs_for_what_is_not_ascii():
    with pytest.raises(ValueError, match=r"percent signs: urllib\.parse\.quote\('/müller'\)"):
        rollout_func("http://localhost:1/müller")
    assert rollout_func("http://localhost:1/m%C3%BCller").rollout_path.endswith("/m%C3%BCller")


def test_a_url_with_a_password_is_not_shown():
    for url in ("http://me:secret@x", "http://me:secret@[::1", "me:secret@x", "http://me:secret@x:99999"):
        with pytest.raises(ValueError, match="give api_key instead") as error:
            rollout_func(url)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://localhost:8080", ("http", "localhost", 8080, "")),
        ("HTTPS://Host_1/api/", ("https", "host_1", None, "/api")),
        ("http://[::1]:80", ("http", "::1", 80, "")),
        ("http://bücher.de", ("http", "bücher.de", None, "")),
        ("http://127.0.0.1:1", ("http", "127.0.0.1", 1, "")),
    ],
)
def test_a_url_s_parts(url, parts):
    assert address(url) == parts


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        *(({"timeout": value}, "timeout is .*; give seconds above 0, at most 1,000,000") for value in (math.inf, 1e10)),
        *(({"timeout": value}, "timeout is .*; give seconds above 0") for value in (math.nan, -1, None, "5", True, 1j)),
        *(({"retries": value}, "retries is .*; give an integer, 0 or more") for value in (1.5, None, "5", True, -1)),
        *(
            ({"max_in_flight": value}, "max_in_flight is .*integer, 1 or more, or None")
            for value in (1.5, "5", True, -1)
        ),
        *(({"sampling": value}, "sampling is .*; give a dict") for value in ("x", [1], [("a", 1)], 5)),
        ({"sampling": {1: 2}}, "sampling has the key 1; give llama.cpp's names"),
        (
            {"sampling": {"bad": np.zeros(1)}},
            r"sampling\['bad'\] is a ndarray that JSON cannot say .*; give finite numbers",
        ),
        ({"sampling": {"x": math.nan}}, r"sampling\['x'\] is a float that JSON cannot say"),
        ({"sampling": {"x": [[math.inf]]}}, r"sampling\['x'\] is a list that JSON cannot say"),
    ],
    ids=repr,
)
def test_arguments_that_would_fail_in_train_are_refused_at_once(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        rollout_func("http://localhost:1", **arguments)


def test_numbers_of_numpy_are_numbers():
    rollout_func("http://x", timeout=np.float32(5), retries=np.int64(0), max_in_flight=np.int32(2))


def test_fields_are_a_copy():
    bias = [[5, -1.0]]
    copy = fields("sampling", {"logit_bias": bias})
    bias[0][1] = 0.0
    assert copy == {"logit_bias": [[5, -1.0]]} and fields("sampling", None) == {}
