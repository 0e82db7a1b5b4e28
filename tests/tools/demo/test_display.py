from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fastgrpo.runlog import RunLog, read_run_log
from fastgrpo.tools.demo import display as display_module
from fastgrpo.tools.demo.display import Display, clock_text, mean_of_last, sparkline
from fastgrpo.tools.demo.summary import first_and_last, print_summary
from fastgrpo.tools.demo.tasks import Sum
from fastgrpo.tools.evaluate import PassAt1

STEP = {"step": 3, "reward": 0.5, "entropy": 0.25, "seconds": 2.0, "tokens_real": 400}


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=200), st.integers(1, 80))
def test_a_sparkline_fits_and_shows_lowest_and_highest(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    if len(values) <= width and max(values) - min(values) > 1e-6:
        assert line[values.index(min(values))] == "▁"
        assert line[values.index(max(values))] == "█"


def test_nothing_has_an_empty_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 5e-324]) == "▁█"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "60:00")])
def test_seconds_are_written_as_minutes(seconds, text):
    assert clock_text(seconds) == text


def test_the_mean_looks_at_the_last_values_only():
    assert mean_of_last([100.0, *[1.0] * 10]) == 1.0
    assert mean_of_last([2.0, 4.0]) == 3.0


def drive(console: Console) -> None:
    with Display(console) as display:
        display.begin("loading")
        display.end("model")
        display.begin("training", 5)
        for step in range(1, 6):
            display.step({**STEP, "step": step})
        display.step({**dict.fromkeys(STEP), "step": 5, "reward": float("nan")})
        display.end()


def test_without_a_terminal_there_are_plain_lines(monkeypatch):
    monkeypatch.setattr(display_module, "_PLAIN_EVERY_S", 0.0)
    out = io.StringIO()
    drive(Console(file=out, width=40))
    text = out.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert "  training 2/5, reward 0.500, mean of last 10 0.500, entropy 0.250, 2.00 s/step, 0:00 left\n" in text
    assert "✓ loading" in text and "✓ training" in text


def test_plain_lines_are_few(monkeypatch):
    out = io.StringIO()
    drive(Console(file=out, width=80))
    assert len(out.getvalue().splitlines()) == 2


def test_a_terminal_shows_a_panel_and_gets_its_cursor_back():
    out = io.StringIO()
    drive(Console(file=out, force_terminal=True, width=100, color_system="standard"))
    text = out.getvalue()
    assert "mean of last 10" in text and "200 tokens/s" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    drive(Console(file=out, force_terminal=True, width=100))
    assert "✓ loading" in out.getvalue()
    assert not re.search(r"\x1b\[[\d;]*3\d[;m]", out.getvalue())


def test_names_are_no_markup():
    out = io.StringIO()
    with Display(Console(file=out)) as display:
        display.begin("loading")
        display.end("model[b].gguf [/]")
    assert "model[b].gguf [/]" in out.getvalue()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_first_and_last_are_of_one_size_and_do_not_overlap(values):
    window, first, last = first_and_last(values)
    assert window == max(1, min(10, len(values) // 2))
    assert first == pytest.approx(sum(values[:window]) / window)
    assert last == pytest.approx(sum(values[-window:]) / window)


def summary(tmp_path, before: tuple[bool, ...], after: tuple[bool, ...]) -> str:
    with RunLog(tmp_path / "log.jsonl", model="m") as log:
        for step in range(1, 21):
            log.step(step, seconds=1.5, reward=0.2 if step <= 10 else 0.5)
    out = io.StringIO()
    sums = [Sum(10 + i, 20, "") for i in range(len(before))]
    texts = tuple(f" {s.answer}\n[b]The" for s in sums)
    outcomes = [PassAt1(before, texts), PassAt1(after, texts)]
    print_summary(Console(file=out, width=120), read_run_log(tmp_path), 65.0, sums, *outcomes)
    return out.getvalue()


def test_the_summary_shows_reward_pass_at_1_and_times(tmp_path):
    text = summary(tmp_path, (False, True, False, False), (True, True, True, False))
    assert "0.200" in text and "0.500" in text and "2.50x" in text
    assert "25.0%" in text and "75.0%" in text and "3.00x" in text
    assert "1:05 in all" in text and "1.50 s per training step" in text
    assert "10 + 20" in text and "12 + 20" in text and "11 + 20" not in text  # whose verdict changed
    assert "[b]The" in text  # an answer is no markup


def test_a_summary_without_changes_or_with_nothing_right_has_no_holes(tmp_path):
    text = summary(tmp_path, (False, False), (False, False))
    assert "The first held-out sums" in text and "11 + 20" in text
    assert " - " in text
