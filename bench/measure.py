"""Time and peak memory of callables that are measured side by side."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 1 << 20
Case = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """
    One case, a value a round; values at one place come from the same round.

    Attributes:
        seconds: wall clock; on CUDA between two device events.
        cpu_seconds: processor time of all threads, which other programs on the machine change far less; empty on CUDA.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()

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

    def __str__(self) -> str:
        return f"{self.median:.3f} ({min(self.seconds):.3f}-{max(self.seconds):.3f})"


def interleave(cases: Mapping[str, Case], rounds: int, warm_ups: int, device: torch.device) -> dict[str, Timing]:
    """
    Times every case once a round, so that all of them meet the same state of the machine.

    Args:
        cases: name -> callable.
        rounds: times that count; every second round goes through the cases backwards.
        warm_ups: rounds before, not counted.
        device: where the work runs.

    Returns:
        Name -> Timing.
    """
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
    clock = device_clock if device.type == "cuda" else _host_clock
    for turn in range(-warm_ups, rounds):
        for name in reversed(cases) if turn % 2 else cases:
            sample = clock(cases[name])
            if turn >= 0:
                samples[name].append(sample)
    return {name: Timing(*zip(*values, strict=True)) for name, values in samples.items()}


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


def _host_clock(case: Case) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    case()
    return time.perf_counter() - wall, time.process_time() - processor


def device_clock(case: Case) -> tuple[float]:
    """Seconds between two device events around a call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    case()
    end.record()
    end.synchronize()
    return (start.elapsed_time(end) / 1e3,)


def _paired(numerators: tuple[float, ...], denominators: tuple[float, ...]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
