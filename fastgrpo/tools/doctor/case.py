"""What the doctor is asked about, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastgrpo.tools.wording import ToolError, named, origin, reason

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
        processes: that the run is started in.
    """

    model: Path | None = None
    rewards: tuple[str, ...] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None
    processes: int = 1

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
    return Line(layer, "wrong", named(error) + origin(error), _remedy(error))


def _remedy(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "install what it names, or choose a setting that does without"
    if "out of memory" in str(error):
        return "`fastgrpo plan` says what takes the memory, and which setting frees most"
    if "probability tensor contains" in str(error):
        return "the weights are not finite any more: is learning_rate too high?"
    return "training would stop here too: correct what it names"


def rewards_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """`MODULE:NAME` of the `reward_funcs` of a configuration: names of TRL's own, or dotted paths."""
    names = settings.get("reward_funcs") or []
    names = [names] if isinstance(names, str) else names if isinstance(names, list) else []
    return tuple(":".join(str(name).rsplit(".", 1)) if "." in str(name) else f"trl.rewards:{name}" for name in names)


def read_settings(path: Path) -> dict[str, Any]:
    """
    A configuration file as `trl grpo --config` takes it, YAML or JSON.

    Raises:
        ToolError: no such file, or no mapping in it.
    """
    import yaml

    lines = "write NAME: VALUE, one a line, as for `trl grpo --config`"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ToolError(f"{path} cannot be read: {error.strerror}", "correct the path") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ToolError(f"{path} is neither YAML nor JSON: {reason(error)}", lines) from error
    if settings is None:
        raise ToolError(f"{path} is empty", f"{lines}, or leave --config out")
    if not isinstance(settings, dict):
        raise ToolError(f"{path} holds a {type(settings).__name__}, no names and values", lines)
    odd = next((name for name in settings if not isinstance(name, str)), None)
    if odd is not None:
        raise ToolError(f"{path} names a setting {odd!r}, which is no text", lines)
    if not isinstance(settings.get("env", {}), dict):
        raise ToolError(f"{path}: env is {settings['env']!r}", "give a mapping of variables to values")
    return settings
