"""The layers in the order in which they are checked."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from fastgrpo.tools.doctor.case import Case, Line, fault
from fastgrpo.tools.doctor.configuration import check_configuration, typed_settings
from fastgrpo.tools.doctor.machine import check_device, check_kernels, check_rollouts, check_versions
from fastgrpo.tools.doctor.policy import check_policy, check_settings
from fastgrpo.tools.doctor.rewards import check_rewards
from fastgrpo.tools.doctor.smoke import STEPS, check_smoke
from fastgrpo.tools.doctor.tiny_step import check_step

Checks = list[tuple[str, Callable[[Case], Iterator[Line]]]]
"""(what is being looked at, its check)"""


def examine(case: Case, checks: Checks, busy: Callable[[str], AbstractContextManager[Any]]) -> Iterator[Line]:
    """
    The lines of all layers, up to the first that is wrong.

    Args:
        case: what is asked about.
        checks: from `layers`.
        busy: shows what is being looked at.
    """
    for name, check in checks:
        with busy(name):
            try:
                lines = list(check(case))
            except KeyboardInterrupt:
                # Reward functions that TRL still awaits in its thread would be mourned when the interpreter ends.
                logging.getLogger("asyncio").setLevel(logging.CRITICAL)
                raise
            except Exception as error:  # nothing that a check expects: a library's, or a mistake here
                lines = [fault(name, error)]
        for line in lines:
            yield line
            if line.status == "wrong":
                return
        if check is check_configuration:
            case = dataclasses.replace(case, settings=typed_settings(case))


def layers(step: bool = True, smoke: bool = False) -> Checks:
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
        ("config", check_configuration),
        ("model", check_policy),
        ("common advice", check_settings),
        ("reward functions", check_rewards),
        ("rollout path", check_rollouts),
    ]
    checks += [("one tiny step", check_step)] if step else []
    return checks + ([(f"{STEPS} steps", check_smoke)] if smoke else [])
