"""`python -m bench rows`: the row kernels alone, bytes a second against a copy of the same size in the same round."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench import report
from bench.measure import Case, Sample, device_clock, interleave

_BYTES = 1 << 30
_COLUMNS = ("", "of the copy's bandwidth", "GB/s", "bytes a logit", "median ms")


@dataclass(frozen=True)
class Rows:
    """Rows of logits, as many as fill about a gibibyte."""

    rows: int
    vocabulary: int

    @property
    def pitch(self) -> int:
        """Elements from row to row."""
        return -(-self.vocabulary // 64) * 64


SHAPES = tuple(
    Rows(_BYTES // (4 * vocabulary), vocabulary) for vocabulary in (32000, 50257, 128256, 151936, 152064, 262144)
)
QUICK_SHAPES = (Rows(64, 5003),)


def run(device: torch.device, rounds: int, warm_ups: int, quick: bool) -> dict[str, Any]:
    """
    Measures every length and kernel, and prints the table.

    Args:
        device: a CUDA device.
        rounds, warm_ups: rounds that count, and rounds before them.
        quick: one small shape.

    Returns:
        The run, see `report.record`.

    Raises:
        SystemExit: not a CUDA device, or no library.
    """
    from fastgrpo.kernels.select import why_reference

    reason = why_reference(device.type, torch.bfloat16)
    if reason:
        raise SystemExit(f"the row kernels do not run here: {reason}")
    lines: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    shapes = QUICK_SHAPES if quick else SHAPES
    for shape in shapes:
        samples = _measure(shape, rounds, warm_ups, device)
        copied = samples.pop("copy")
        for name, (size, seconds) in samples.items():
            rate = statistics.median(
                (size / own) / (copied[0] / copy) for own, copy in zip(seconds, copied[1], strict=True)
            )
            ratios[f"V {shape.vocabulary}/{name}: copy's bandwidth over fastgrpo's"] = 1 / rate
            lines.append({**asdict(shape), "kernel": name, "bytes": size, "seconds": seconds, "share_of_copy": rate})
        lines.append(
            {**asdict(shape), "kernel": "copy", "bytes": copied[0], "seconds": copied[1], "share_of_copy": 1.0}
        )
    report.table("row kernels alone", _COLUMNS, (_cells(line) for line in lines))
    settings = {"shapes": [asdict(shape) for shape in shapes], "rounds": rounds, "warm_ups": warm_ups}
    return report.record("rows", device, settings, lines, ratios)


def _measure(shape: Rows, rounds: int, warm_ups: int, device: torch.device) -> dict[str, tuple[int, tuple[float, ...]]]:
    """Name -> bytes that the task must move, and seconds of every round."""
    count, vocabulary, pitch = shape.rows, shape.vocabulary, shape.pitch
    source = torch.randn(count, pitch, device=device) * 3
    buffer, spare = source.clone(), torch.empty_like(source)
    logits, halves = buffer[:, :vocabulary], buffer.view(torch.bfloat16)
    first, second = halves[:, :vocabulary], halves[:, pitch : pitch + vocabulary]
    targets = torch.randint(vocabulary, (count,), device=device)
    logprobs, lse, entropy, grad = torch.randn(4, count, device=device)
    elements = count * vocabulary

    def row_pass(*grads: Tensor | None, softcap: float | None = None) -> Case:
        head = logits, targets, None, 1.0, 1.0, softcap
        return lambda: torch.ops.fastgrpo.row_pass(*head, logprobs, lse, entropy, *grads, 1.0)

    def row_grad() -> None:
        head = logits, targets, None, 1.0, 1.0, None
        torch.ops.fastgrpo.row_grad(*head, logprobs, lse, entropy, grad, None, first, 1.0)

    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (8 * count * pitch, lambda: spare.copy_(source)),
        "statistics": (4 * elements, row_pass(None, None)),
        "statistics and gradient": (6 * elements, row_pass(first, None)),
        "statistics and gradient, softcap": (6 * elements, row_pass(first, None, softcap=30.0)),
        "statistics and both gradients": (8 * elements, row_pass(first, second)),
        "gradient from saved statistics": (6 * elements, row_grad),
    }

    def clock(case: Case) -> Sample:
        buffer.copy_(source)  # in place means the logits are gone after each case
        return device_clock(case)

    timings = interleave({name: case for name, (_, case) in cases.items()}, rounds, warm_ups, device, (clock,))
    return {name: (size, timings[name].seconds) for name, (size, _) in cases.items()}


def _cells(line: dict[str, Any]) -> list[str]:
    seconds = statistics.median(line["seconds"])
    elements = line["rows"] * line["vocabulary"]
    return [
        f"V {line['vocabulary']}, {line['rows']} rows, {line['kernel']}",
        f"{line['share_of_copy']:.2f}",
        f"{line['bytes'] / seconds / 1e9:.0f}",
        f"{line['bytes'] / elements:.0f}",
        f"{seconds * 1e3:.3f}",
    ]
