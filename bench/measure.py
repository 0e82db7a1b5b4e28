"""Time and peak memory of callables that are measured side by side."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 1 << 20
Case = Callable[[], object]
Sample = dict[str, float]
"""Fields of a `Timing`, of one round."""
# 20 ms of an H200's, and more of any other's: 4 did not bring it to the state that it keeps.
_BACKLOG_SIDE, _BACKLOG_PRODUCTS = 4096, 100


@dataclass(frozen=True)
class Timing:
    """
    One case, a value a round; values at one place come from the same round.

    Attributes:
        seconds: wall clock; on CUDA between two device events.
        cpu_seconds: processor time of all threads, which other programs on the machine change far less; empty on CUDA.
        busy_seconds: of `BusyDeviceClock`; empty without it.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()
    busy_seconds: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median wall clock, seconds."""
        return statistics.median(self.seconds)

    def over(self, other: Timing) -> float:
        """Median over the rounds of this case's wall clock over the other's: what slows both in a round cancels."""
        return _paired(self.seconds, other.seconds)

    def cpu_over(self, other: Timing) -> float | None:
        """The same of the processor time; None on CUDA."""
        return _paired(self.cpu_seconds, other.cpu_seconds) if self.cpu_seconds else None

    def busy_over(self, other: Timing) -> float | None:
        """The same of the time behind other work; None where that was not measured."""
        return _paired(self.busy_seconds, other.busy_seconds) if self.busy_seconds else None

    def __str__(self) -> str:
        return f"{self.median:.3f} ({min(self.seconds):.3f}-{max(self.seconds):.3f})"


def interleave(
    cases: Mapping[str, Case],
    rounds: int,
    warm_ups: int,
    device: torch.device,
    clocks: Sequence[Callable[[Case], Sample]] | None = None,
) -> dict[str, Timing]:
    """
    Times every case once a round and clock, so that all of them meet the same states of the machine.

    Each round has an order of its own: a device at its limit of power is as fast as what ran before lets it be, so that a case
    which always follows the same other one would be measured with that one's heat.

    Args:
        cases: name -> callable.
        rounds: times that count; each goes through the cases once with each clock. Their orders are the same in every run.
        warm_ups: rounds before, not counted.
        device: where the work runs.
        clocks: what times a call, one of them its `seconds`; None = device events on CUDA, else wall clock and processor time.

    Returns:
        Name -> Timing.
    """
    if clocks is None:
        clocks = (device_clock if device.type == "cuda" else _host_clock,)
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in cases}
    orders = random.Random(0)
    for turn in range(-warm_ups, rounds):
        for clock, name in itertools.product(clocks, orders.sample(list(cases), len(cases))):
            sample = clock(cases[name])
            if turn >= 0:
                for field, value in sample.items():
                    samples[name][field].append(value)
    return {
        name: Timing(**{field: tuple(values) for field, values in sample.items()}) for name, sample in samples.items()
    }


def extra_peak_bytes(case: Case, device: torch.device) -> int:
    """
    Most bytes that torch held at once during a call, on top of what was held before it.

    On CUDA this is the caching allocator's maximum. On a CPU it is the running sum of the
    allocator's own events, temporaries inside an op included; it equals the growth of the resident set in a fresh process
    whose malloc maps every tensor (see bench/README.md), but needs no fresh process and has no noise.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        case()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        case()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _host_clock(case: Case) -> Sample:
    wall, processor = time.perf_counter(), time.process_time()
    case()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - processor}


def device_clock(case: Case) -> Sample:
    """Seconds between two device events around a call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    case()
    end.record()
    end.synchronize()
    return {"seconds": start.elapsed_time(end) / 1e3}


class BusyDeviceClock:
    """
    `device_clock` of a call that begins behind other work of the device, as in a training step.

    What the host does before a call's first launch takes none of the device's time then; what it does after a wait for the
    device takes all of it. The other work is products of matrices, as those of the layers before a head: after work that takes
    less power, a device at its limit of that would run the first ms of a call faster, and so short calls more than long ones.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._factor = torch.randn(_BACKLOG_SIDE, _BACKLOG_SIDE, device=device, dtype=torch.bfloat16)
        self._product = torch.empty_like(self._factor)

    def __call__(self, case: Case) -> Sample:
        for _ in range(_BACKLOG_PRODUCTS):
            torch.mm(self._factor, self._factor, out=self._product)
        return {"busy_seconds": device_clock(case)["seconds"]}


def _paired(numerators: tuple[float, ...], denominators: tuple[float, ...]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
