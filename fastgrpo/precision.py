"""Which precision a run trains in, from its arguments, the environment and the device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

Name = Literal["bf16", "fp16", "fp32"]

FORCE_FLOAT32 = "FASTGRPO_FORCE_FLOAT32"
ACCELERATE = "ACCELERATE_MIXED_PRECISION"
_FORCED = {"1": True, "0": False, "": False}
_ACCELERATE: dict[str, Name] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class Precision:
    """
    The precision of a run.

    Attributes:
        name: `"bf16"` = autocast to bfloat16; `"fp16"` = autocast to float16, with a gradient scaler; `"fp32"` = no autocast.
        reason: who decided, in words.
        forced: by `FASTGRPO_FORCE_FLOAT32`: weights are float32 too, whatever else was said.
    """

    name: Name
    reason: str
    forced: bool = False

    @property
    def autocast(self) -> str:
        """The name accelerate gives it."""
        return "no" if self.name == "fp32" else self.name


def choose_precision(bf16: bool | None = None, fp16: bool | None = None, *, device: str) -> Precision:
    """
    The first that says something: `FASTGRPO_FORCE_FLOAT32`, the arguments, `ACCELERATE_MIXED_PRECISION`, the device.

    Reads the environment when called. As in TRL, `bf16=False` alone means float32 where no variable asks for float16, and
    `fp16=False` alone only excludes float16.

    Args:
        bf16: autocast to bfloat16; None = not said.
        fp16: autocast to float16; None = not said.
        device: type of the device that trains, as `torch.device.type`.

    Returns:
        Precision.

    Raises:
        ValueError: both are True, or a variable has a value that is not allowed.
    """
    forced = _read(FORCE_FLOAT32, _FORCED, "1 forces float32, 0 or no value does not")
    asked = None
    if os.environ.get(ACCELERATE):
        asked = _read(ACCELERATE, _ACCELERATE, "'no', 'fp16' and 'bf16' are allowed")
    if forced:
        return Precision("fp32", f"{FORCE_FLOAT32}=1", forced=True)
    if bf16 and fp16:
        raise ValueError("bf16=True and fp16=True were given; give one of them, or neither to have it chosen.")
    if bf16 or fp16:
        return Precision("bf16" if bf16 else "fp16", f"{'bf16' if bf16 else 'fp16'}=True")
    if asked is not None and not _excluded(asked, bf16, fp16):
        unasked = (
            ", as accelerate launch sets it where nothing was chosen; bf16=True chooses" if asked == "fp32" else ""
        )
        return Precision(asked, f"{ACCELERATE}={os.environ[ACCELERATE]}{unasked}")
    if bf16 is False:
        return Precision("fp32", "bf16=False")
    best = device_precision(device)
    return Precision("fp32", "fp16=False") if _excluded(best.name, bf16, fp16) else best


def device_precision(device: str) -> Precision:
    """
    What a device is best at: bfloat16 where every visible one has it in hardware; else float16 on CUDA, float32 elsewhere.

    CPU and MPS get float32: bfloat16 saves them no time.

    Args:
        device: as `torch.device.type`.

    Returns:
        Precision.
    """
    if device in ("cpu", "mps"):
        return Precision("fp32", f"the device is {device}")
    if device != "cuda":
        supported = getattr(torch.get_device_module(device), "is_bf16_supported", lambda: False)()
        return (
            Precision("bf16", "the device has bfloat16") if supported else Precision("fp32", f"the device is {device}")
        )
    # torch.cuda.is_bf16_supported() also counts an emulation, which is slower than float32.
    if torch.version.hip or all(_major(index) >= 8 for index in range(torch.cuda.device_count())):
        return Precision("bf16", "the device has bfloat16")
    return Precision("fp16", "the device has no bfloat16")


def training_device(use_cpu: bool = False) -> str:
    """
    Type of the device that accelerate would train on.

    Args:
        use_cpu: as in `TrainingArguments`; `ACCELERATE_USE_CPU` says the same.

    Returns:
        as `torch.device.type`.
    """
    if use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t"):
        return "cpu"
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def _major(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


def _excluded(name: Name, bf16: bool | None, fp16: bool | None) -> bool:
    return {"bf16": bf16, "fp16": fp16}.get(name, True) is False


def _read(variable: str, allowed: dict, meaning: str):
    value = os.environ.get(variable, "")
    if value not in allowed:
        raise ValueError(f"{variable} is {value!r} in the environment; {meaning}. Correct it, or unset it.")
    return allowed[value]
