"""What a demo shows while it runs: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

WINDOW = 10
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_EVERY_S = 10.0


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """
    Values as a line of block characters, the lowest lowest.

    Args:
        values: neighbours are averaged where there are more than `width`.
        width: characters at most.
    """
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[0] * columns
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def mean_of_last(values: Sequence[float], window: int = WINDOW) -> float:
    """Mean of the last `window` values."""
    tail = values[-window:]
    return sum(tail) / len(tail)


def clock_text(seconds: float) -> str:
    """Seconds as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Display:
    """
    Progress of a demo, phase by phase.

    Args:
        console: a terminal shows a live panel; anything else gets a line when a phase ends and every ten seconds.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._name = ""
        self._total: int | None = None
        self._began = self._last_line = 0.0
        self._rewards: list[float] = []
        self._panel: Table | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live = Live(self._view(), console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _say(self, text: Text) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def begin(self, name: str, total: int | None = None) -> None:
        """A new phase, of `total` units of work or of unknown length."""
        self._name, self._total = name, total
        self._began = self._last_line = time.perf_counter()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, count="", left="")
        self._refresh()

    def advance(self, done: int, note: str = "") -> None:
        """`done` units of the phase are done."""
        elapsed = time.perf_counter() - self._began
        left = ""
        if self._total and 0 < done < self._total:
            left = f"{clock_text(elapsed / done * (self._total - done))} left"
        count = f"{done}/{self._total}" if self._total else str(done)
        if self._live is not None:
            self._progress.update(self._task, completed=done, count=count, left=left)
            self._refresh()
        elif time.perf_counter() - self._last_line >= _PLAIN_EVERY_S:
            self._last_line = time.perf_counter()
            self._say(Text("  " + ", ".join(filter(None, [f"{self._name} {count}", note, left]))))

    def end(self, result: str = "") -> None:
        """The phase is over; its line stays."""
        seconds = time.perf_counter() - self._began
        self._panel = None
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._refresh()
        self._say(Text.assemble(("✓", "green"), f" {self._name:<26} {clock_text(seconds):>5}  {result}".rstrip()))

    def step(self, values: dict[str, Any]) -> None:
        """A training step, as `RunLogCallback` reports it."""
        reward = values["reward"]
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
        speed = []
        if values["seconds"]:
            speed.append(f"{values['seconds']:.2f} s/step")
            if values["tokens_real"]:
                speed.append(f"{values['tokens_real'] / values['seconds']:,.0f} tokens/s")
        facts = {
            "reward": _number(reward),
            f"mean of last {WINDOW}": _number(mean_of_last(self._rewards) if self._rewards else None),
            "entropy": _number(values["entropy"]),
        }
        self._panel = Table.grid(padding=(0, 3))
        self._panel.add_row(
            *(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in facts.items()),
            Text("  ".join(speed), style="dim"),
        )
        self.advance(values["step"], note=", ".join([f"{k} {v}" for k, v in facts.items()] + speed[:1]))

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._view(), refresh=True)

    def _view(self) -> Group:
        parts: list[Any] = [self._progress] if self._task is not None else []
        if self._panel is not None:
            parts += [self._panel, Text(sparkline(self._rewards), style="cyan")]
        return Group(*parts)


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"
