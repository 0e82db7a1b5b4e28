"""Rows of a dataset: what cannot be read is said with its line."""

from __future__ import annotations

import pytest

from fastgrpo.tools.rows import read_rows
from fastgrpo.tools.wording import ToolError


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b'{"prompt": "1"}\n\n{"prompt": \n', "line 3 is no JSON: Expecting value"),
        ("a.jsonl", b"[1, 2]\n", "line 1 is no JSON object, but a list"),
        ("a.jsonl", b'{"question": "1", "answer": "2"}\n', "line 1 has no prompt; it has question, answer"),
        ("a.jsonl", b'{"prompt": " "}\n', "line 1 has an empty prompt"),
        ("a.jsonl", b'{"prompt": []}\n', "line 1 has an empty prompt"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1: its prompt is neither a text nor a list of messages"),
        (
            "a.jsonl",
            b'{"prompt": [{"role": "user"}]}\n',
            "neither a text nor a list of messages with `role` and `content`",
        ),
        ("a.jsonl", b'{"prompt": "1"}\n{"prompt": "\xe9"}\n', "line 2 is no UTF-8"),
        ("a.csv", b"prompt,answer\n1,2\n", "is neither a .jsonl file nor one of plain lines"),
        ("a.json", b"[]", "is neither a .jsonl file nor one of plain lines"),
    ],
)
def test_what_is_no_row_is_said_with_its_line(name, content, said, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ToolError) as caught:
        read_rows(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("name", ["nowhere.jsonl", "."])
def test_a_file_that_is_none(name, tmp_path):
    with pytest.raises(ToolError, match="cannot be read"):
        read_rows(tmp_path / name)


def test_rows_are_read_whatever_their_line_ends(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes("\ufeff".encode() + '{"prompt": "a\u2028b", "answer": 3}\r\n\r\n{"prompt": "c"}'.encode())
    assert read_rows(path) == [{"prompt": "a\u2028b", "answer": 3}, {"prompt": "c"}]
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_rows(tmp_path / "a.txt") == [{"prompt": "one"}, {"prompt": "two"}]
