"""Libraries that keep to themselves, for as long as a demo's own display speaks."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import datasets
import transformers

_LOGGERS = ("accelerate", "datasets", "matplotlib", "peft", "torch", "trl")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silences warnings, log messages and progress bars of the libraries, and gives them their voice back."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        # The bar of the GGUF reader knows no switch. A crash's traceback is printed after this.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars[0]:
            transformers.logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
