"""What goes wrong in a demo for a reason its user can mend."""

from __future__ import annotations


class DemoError(Exception):
    """Shown as its message alone; the demo ends with exit status 1."""
