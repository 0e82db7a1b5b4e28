"""The layers in the order in which they are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastgrpo.tools.doctor.case import Case, Line
from fastgrpo.tools.doctor.machine import check_device, check_kernels, check_rollouts, check_versions
from fastgrpo.tools.doctor.policy import check_policy, check_settings
from fastgrpo.tools.doctor.rewards import check_rewards
from fastgrpo.tools.doctor.smoke import STEPS, check_smoke
from fastgrpo.tools.doctor.tiny_step import check_step


def layers(step: bool = True, smoke: bool = False) -> list[tuple[str, Callable[[Case], Iterator[Line]]]]:
    """
    (what is being looked at, its check), each standing on those before it.

    Args:
        step: take the tiny step, too.
        smoke: take ten steps on the run's own rollout path, too.
    """
    checks = [
        ("device", check_device),
        ("versions", check_versions),
        ("kernels", check_kernels),
        ("trained parameters", check_policy),
        ("settings", check_settings),
        ("reward functions", check_rewards),
        ("rollout path", check_rollouts),
    ]
    checks += [("one tiny step", check_step)] if step else []
    return checks + ([(f"{STEPS} steps", check_smoke)] if smoke else [])
