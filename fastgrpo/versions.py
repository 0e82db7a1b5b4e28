"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None (also for fastgrpo itself, run from a checkout)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
