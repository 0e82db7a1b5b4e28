"""What the plan takes as a model."""

from __future__ import annotations

import json

import pytest

from fastgrpo.tools.plan.shape import config_from_numbers, read_config


def test_a_folder_s_own_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "unheard_of", "auto_map": {"AutoConfig": "own.Config"}})
    )
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')\n")
    with pytest.raises(ValueError, match="no model that transformers can describe"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 0}, "layers is 0; give 1 or more"),
        ({"layers": -2}, "layers is -2"),
        ({"heads": 0}, "heads is 0"),
        ({"heads": 5}, "hidden is 64, no multiple of heads, 5"),
        ({"kv_heads": 3}, "heads is 4, no multiple of kv_heads, 3"),
    ],
)
def test_numbers_of_which_there_is_no_model_are_refused(changed, message):
    numbers = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128, "vocabulary": 100}
    with pytest.raises(ValueError, match=message):
        config_from_numbers(**{**numbers, **changed})
