"""What the doctor is asked about, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastgrpo.tools.wording import ToolError, named

Status = Literal["ok", "hint", "wrong", "skipped"]


@dataclass(frozen=True)
class Line:
    """
    What was found in a layer.

    Attributes:
        layer: its name.
        status: "ok", "hint" (works, but look at it), "wrong" (the run would fail or learn nothing) or "skipped".
        text: what was found.
        remedy: what to do; empty where there is nothing to do.
    """

    layer: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Case:
    """
    A run to be.

    Attributes:
        model: local folder of the policy; None = nothing about it is checked.
        rewards: `MODULE:NAME` or `FILE.py:NAME` of reward functions.
        rows: of the dataset, with at least a `prompt`; others are columns that rewards receive.
        settings: as TRL's configuration files name them: `lora_r`, `lora_target_modules`, `use_peft`, `use_vllm`, `vllm_mode`,
            `max_completion_length`, `max_steps`, `delta`, `epsilon`, ...
        server: URL of a rollout server; None = none.
    """

    model: Path | None = None
    rewards: tuple[str, ...] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None

    @property
    def lora_rank(self) -> int | None:
        """Rank of the adapter; None = full fine-tuning."""
        return int(self.settings.get("lora_r") or 16) if self.settings.get("use_peft") else None

    @property
    def lora_targets(self) -> str | tuple[str, ...] | None:
        """As peft's `target_modules`; a list of one is taken as its only entry, as TRL does; None = peft's for the model."""
        targets = self.settings.get("lora_target_modules")
        if targets is None or isinstance(targets, str):
            return targets
        return targets[0] if len(targets) == 1 and targets[0] == "all-linear" else tuple(targets)


def fault(layer: str, error: Exception) -> Line:
    """The line of a layer that raised: this program's own words, or those of the library that gave up."""
    if isinstance(error, ToolError):
        return Line(layer, "wrong", str(error), error.remedy)
    return Line(layer, "wrong", named(error), "training would stop here too: correct what it names")


def read_settings(path: Path) -> dict[str, Any]:
    """
    A configuration file as `trl grpo --config` takes it, YAML or JSON.

    Raises:
        ValueError: no such file, or no mapping in it.
    """
    import yaml

    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML or JSON: {str(error).splitlines()[0]}.") from error
    if settings is None:
        raise ValueError(f"{path} is empty; give a file of names and values, or leave --config out.")
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__}; give a file of names and values.")
    odd = next((name for name in settings if not isinstance(name, str)), None)
    if odd is not None:
        raise ValueError(f"{path} names a setting {odd!r}, which is no text; write NAME: VALUE.")
    if not isinstance(settings.get("env", {}), dict):
        raise ValueError(f"{path}: env is {settings['env']!r}; give a mapping of variables to values.")
    return settings


def read_rows(path: Path) -> list[dict[str, Any]]:
    """
    Rows of a dataset: one JSON object a line (.jsonl), or one prompt a line.

    Raises:
        ValueError: no such file, no row, or a row without a prompt.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        rows = [json.loads(line) if path.suffix == ".jsonl" else {"prompt": line} for line in lines]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    if not rows or not all(isinstance(row, dict) and row.get("prompt") for row in rows):
        raise ValueError(
            f"{path} has a row without a prompt; give one JSON object with a `prompt` a line, or plain lines."
        )
    return rows
