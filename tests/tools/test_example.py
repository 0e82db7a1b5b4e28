from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_arithmetic.py"


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not part of an installed package")
@pytest.mark.parametrize("options", [[], ["--stock"]])
def test_the_example_raises_its_reward(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo_arithmetic.py", "--steps", "40", *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    first, last = map(float, re.search(r"reward: (\S+) in the first ten steps, (\S+) in the last ten", out).groups())
    assert last > first + 0.1
    assert ("trainer head" in out) == (not options)  # the table of backends
