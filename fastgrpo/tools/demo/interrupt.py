"""Ctrl-C that stops a demo once, and cleanly."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """
    While inside, the first Ctrl-C raises `KeyboardInterrupt` and later ones are ignored, so that what follows the first,
    the log's last line and the picture, is not cut short.
    """

    def __init__(self) -> None:
        self._asked = False

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if there was one that some library swallowed."""
        if self._asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            raise KeyboardInterrupt
