"""What ends a demo for a reason its user can mend."""

from __future__ import annotations

from fastgrpo.tools.process import FAILED


class Stopped(Exception):
    """
    Shown as its message alone; its name and message are the run log's `exit`.

    Args:
        text: what is wrong, what is allowed, what to do.
        status: exit status of the command.
    """

    def __init__(self, text: str, status: int = FAILED) -> None:
        super().__init__(text)
        self.status = status
