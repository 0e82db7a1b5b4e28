"""A user's reward function: found by name, and unable to end the program, to answer in its place or to move it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from fastgrpo.tools.doctor.case import Case
from fastgrpo.tools.doctor.rewards import check_rewards
from fastgrpo.tools.doctor.tiny_step import check_step
from fastgrpo.tools.reward_functions import RewardError, contained, guarded, load_function


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        (
            "import no_such_package",
            "No module named 'no_such_package' (rewards_of_mine.py, line 1)",
            "install what provides",
        ),
        ("from json import nothing_there", "cannot import name", "correct the import"),
        ("def f(:\n    pass", "SyntaxError: invalid syntax (rewards_of_mine.py, line 1)", "correct what it does"),
        (
            "x = 1\ny = [][3]",
            "IndexError: list index out of range (rewards_of_mine.py, line 2)",
            "correct what it does",
        ),
        ("import sys\nsys.exit()", "ends the program", 'if __name__ == "__main__"'),
        ("raise KeyboardInterrupt", "ends the program", 'if __name__ == "__main__"'),
        ("f = 3", "no function f, but something of type int", "name a function"),
        ("def judge(): pass", "has no function f; it has judge", "after the colon"),
        ("", "has no function f; it has no function at all", "after the colon"),
        ("class f:\n    def __call__(self): ...", "is a class", "an instance of the class"),
        ("from . import other", "relative import", "PACKAGE.MODULE:NAME"),
    ],
    ids=["package", "name", "syntax", "raises", "exit", "interrupt", "number", "other", "empty", "class", "relative"],
)
@pytest.mark.parametrize("spec", ["rewards_of_mine.py:f", "rewards_of_mine:f"])
def test_a_module_that_cannot_be_used_is_said_with_what_to_do(spec, text, said, remedy, folder):
    write(folder, "rewards_of_mine.py", text)
    with pytest.raises(RewardError) as caught:
        load_function(spec)
    assert said in str(caught.value) and remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere.py:f", "nowhere.py cannot be imported: there is no such file"),
        ("nowhere:f", "there is no module nowhere in this folder or environment"),
        ("json.nowhere:f", "there is no module json.nowhere"),
        ("f", "'f' names no function"),
        (":f", "':f' names no function"),
    ],
)
def test_a_name_that_stands_for_nothing(spec, said, folder):
    with pytest.raises(RewardError) as caught:
        load_function(spec)
    assert said in str(caught.value) and caught.value.remedy


def test_a_file_finds_its_neighbours_and_its_dataclasses_and_is_run_once(folder):
    write(folder, "elsewhere/neighbour_of_mine.py", "VALUE = 2.0\n")
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport neighbour_of_mine\nprint('ran')\n"
        "@dataclass\nclass Part:\n    value: float = neighbour_of_mine.VALUE\n"
        "def f(completions, **_):\n    return [Part().value for _ in completions]\n"
    )
    path = write(folder, "elsewhere/mine_with_parts.py", text)
    function = load_function(f"{path}:f")
    assert function(completions=["a"]) == [2.0]
    assert load_function(f"{path}:f") is function


def test_a_package_in_the_current_folder(folder):
    write(folder, "package_of_mine/__init__.py", "")
    write(folder, "package_of_mine/part.py", "VALUE = 3.0\n")
    write(
        folder, "package_of_mine/judges.py", "from .part import VALUE\ndef f(completions, **_):\n    return [VALUE]\n"
    )
    assert load_function("package_of_mine.judges:f")(completions=["a"]) == [3.0]


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, as it does but for a shell's background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_that_was_typed_is_one(interruptible):
    with pytest.raises(KeyboardInterrupt), contained("mine"):
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(RewardError, match="mine raises KeyboardInterrupt"), contained("mine"):
        raise KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_changed_working_directory_is_hinted_at_and_changed_back(folder):
    (folder / "away").mkdir()
    write(
        folder,
        "wandering.py",
        "import os\ndef f(completions, **_):\n    os.chdir('away')\n    return [*map(len, completions)]\n",
    )
    lines = list(check_rewards(Case(rewards=("wandering.py:f",))))
    assert [line.status for line in lines] == ["hint", "ok"]
    assert "changes the working directory" in lines[0].text and str(folder / "away") in lines[0].text
    assert os.getcwd() == str(folder)


def test_weights_that_are_not_as_many_as_the_functions(folder):
    write(folder, "lengths.py", "def f(completions, **_):\n    return [*map(len, completions)]\n")
    case = Case(rewards=("lengths.py:f",), settings={"reward_weights": [1.0, 0.5]})
    line = list(check_rewards(case))[-1]
    assert line.status == "wrong" and "reward_weights has 2 numbers for 1 reward functions" in line.text


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_ends_the_program_in_a_step_is_an_error_there(kind, folder):
    # It behaves in the doctor's own two calls.
    body = "    if 'answer' not in _:\n        import sys; sys.exit('enough')\n    return [1.0]\n"
    write(folder, "leaving.py", f"{kind} f(completions, **_):\n{body}")
    assert guarded("leaving.py:f").__name__ == "f"
    (line,) = check_step(Case(rewards=("leaving.py:f",)))
    assert line.status == "wrong" and "leaving.py:f calls sys.exit('enough')" in line.text
