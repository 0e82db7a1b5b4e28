"""Rows of a dataset in a file: one JSON object a line, or one prompt a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastgrpo.tools.wording import ToolError, reason

TRUTHS = ("answer", "solution", "ground_truth", "target", "label")
"""Columns that may hold the right answer."""
_JSON_LINES = (".jsonl", ".ndjson")
_OTHER_FORMS = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".xlsx", ".yaml", ".yml", ".gz", ".zip", ".pkl")
_WRITE = 'write one JSON object a line, {"prompt": ..., "answer": ...}, into a .jsonl file'


def read_rows(path: Path) -> list[dict[str, Any]]:
    """
    Rows with a `prompt` each, a text or a conversation; the others are columns that rewards receive.

    Args:
        path: .jsonl, or a text file with a prompt a line.

    Raises:
        ToolError: no such file, no row, or a row that is none.
    """
    if path.suffix.lower() in _OTHER_FORMS:
        raise ToolError(f"{path} is neither a .jsonl file nor one of plain lines", _WRITE)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ToolError(f"{path} cannot be read: {error.strerror}", "correct the path") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ToolError(f"{path}, line {line} is no UTF-8: {reason(error)}", "save it as UTF-8") from error
    # Not splitlines(), which would take a text with U+2028 in it apart.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ToolError(f"{path} is empty", _WRITE)
    if path.suffix.lower() not in _JSON_LINES:
        return [{"prompt": line} for _, line in lines]
    return [_row(line, f"{path}, line {number}") for number, line in lines]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ToolError(f"{where} is no JSON: {reason(error)}", _WRITE) from error
    if not isinstance(row, dict):
        raise ToolError(f"{where} is no JSON object, but a {type(row).__name__}", _WRITE)
    if "prompt" not in row:
        columns = f"it has {', '.join(map(str, row))}" if row else "it has no column at all"
        raise ToolError(f"{where} has no prompt; {columns}", "name the column `prompt`")
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not _is_conversation(prompt):
        raise ToolError(
            f"{where}: its prompt is neither a text nor a list of messages with `role` and `content`", "correct it"
        )
    if not prompt or not (prompt if isinstance(prompt, list) else prompt.strip()):
        raise ToolError(f"{where} has an empty prompt", "give it a text, or drop the row")
    return row


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)
