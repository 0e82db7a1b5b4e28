"""`python -m bench head`: the head alone, beside its peers and the products it cannot do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench import report
from bench.measure import MIB, BusyDeviceClock, Timing, device_clock, extra_peak_bytes, interleave
from bench.peers import (
    OURS,
    OURS_IN_ONE_PASS,
    OURS_IN_SMALL_CHUNKS,
    TASKS,
    TRL_AS_CALLED,
    TRL_ROWS,
    Output,
    Problem,
    floor,
    peers,
    truth,
)

FLOOR = "floor: products alone"
DATA = {"mixed": (0.0, 16.0), "random": (0.0, 0.0), "peaked": (12.0, 24.0)}
"""Data set -> least and largest push of a target's logit; `mixed` pushes half of the targets, `peaked` every one."""


@dataclass(frozen=True)
class Shape:
    """
    A head and a micro-batch.

    Args:
        name: as printed.
        hidden, vocabulary: H, V.
        sequences, width: B, T of the padded micro-batch.
        masked: fraction of its positions that is not scored (prompt and padding); 0: all are.
        softcap: of the logits, or None.
        data: a key of `DATA`.
    """

    name: str
    hidden: int
    vocabulary: int
    sequences: int
    width: int
    masked: float = 0.4
    softcap: float | None = None
    data: str = "mixed"

    def of(self, data: str) -> Shape:
        """The same with another data set, which its name tells unless it is `mixed`: ratios of two sets never meet."""
        plain = self.name.removesuffix(f", {self.data}")
        return replace(self, name=plain if data == "mixed" else f"{plain}, {data}", data=data)


CPU_SHAPES = (
    Shape("SmolLM2-135M", hidden=576, vocabulary=49152, sequences=8, width=256),
    Shape("odd V", hidden=320, vocabulary=10007, sequences=4, width=128),
)
CUDA_SHAPES = (
    *(
        Shape(f"{rows} x {hidden} x {vocabulary}", hidden, vocabulary, sequences=8, width=rows // 8, masked=0.0)
        for rows, hidden, vocabulary in (
            (8192, 896, 151936),
            (16384, 1024, 151936),
            (8192, 2048, 151936),
            (16384, 2048, 151936),
            (2048, 4096, 128256),
            (8192, 4096, 128256),
            (8192, 5120, 152064),
            (32768, 1024, 151936),
        )
    ),
    Shape("Gemma, softcap 30", hidden=2304, vocabulary=262144, sequences=8, width=1024, masked=0.0, softcap=30.0),
    # Llama 3.2 with one word added to it.
    Shape("8192 x 2048 x 128257, odd V", hidden=2048, vocabulary=128257, sequences=8, width=1024, masked=0.0),
    Shape("Qwen3-1.7B, 40 % masked", hidden=2048, vocabulary=151936, sequences=16, width=1024),
    *(
        Shape("8192 x 4096 x 128256", hidden=4096, vocabulary=128256, sequences=8, width=1024, masked=0.0).of(data)
        for data in ("random", "peaked")
    ),
)
QUICK_SHAPES = (Shape("quick", hidden=64, vocabulary=1009, sequences=4, width=32),)
_TITLES = {
    "forward": "forward only",
    "frozen": "frozen head, forward + backward",
    "trained": "trained head, forward + backward",
    "entropy": "frozen head, entropy bonus",
}
_BUSY = "busy / floor"
_COLUMNS = (
    "",
    "time / floor",
    _BUSY,
    "time / ours",
    "CPU time / ours",
    "memory / ours",
    "extra MiB",
    "max |dlogp|",
    "dH error",
    "dW error",
    "median s (min-max)",
)


def run(
    device: torch.device,
    dtypes: list[torch.dtype],
    rounds: int,
    warm_ups: int,
    quick: bool,
    only: list[str] | None = None,
    tasks: list[str] | None = None,
    data: str | None = None,
    busy: bool = False,
    so_far: Callable[[dict], None] = lambda run: None,
) -> dict[str, Any]:
    """
    Measures every shape, dtype, task and peer, and prints the tables.

    Args:
        device: where to run.
        dtypes: of hidden states and weight.
        rounds, warm_ups: see `interleave`.
        quick: one tiny shape, to see that everything works.
        only: parts of the names of the shapes to run; None = all.
        tasks: names of tasks; None = all.
        data: a key of `DATA`, for every shape; None = as each shape says.
        busy: time every case behind other work of the device, too (CUDA).
        so_far: given what there is of the run after each table.

    Returns:
        The run, see `report.record`.
    """
    shapes = QUICK_SHAPES if quick else CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES
    if data is not None:
        # Shapes that differ in their data alone become one.
        shapes = tuple(dict.fromkeys(shape.of(data) for shape in shapes))
    if only is not None:
        every, shapes = shapes, tuple(shape for shape in shapes if any(part in shape.name for part in only))
        if not shapes:
            raise SystemExit(f"no shape's name holds {' or '.join(only)}; they are {', '.join(s.name for s in every)}")
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    settings = {"shapes": [asdict(shape) for shape in shapes], "rounds": rounds, "warm_ups": warm_ups, "busy": busy}
    settings |= {"tasks": list(tasks or TASKS), "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes]}
    for shape in shapes:
        for dtype in dtypes:
            problem = make_problem(shape, dtype, device)
            dtype_name = str(dtype).removeprefix("torch.")
            by_task = {task: _measure(problem, task, dtype, rounds, warm_ups, device, busy) for task in tasks or TASKS}
            for task, lines in by_task.items():
                ratios |= _ratios(f"{shape.name}/{dtype_name}/{task}", lines)
                rows += [{"shape": shape.name, "dtype": dtype_name, "task": task, **line} for line in lines]
            columns = [column for column in _COLUMNS if busy or column != _BUSY]
            report.table(_title(shape, problem, dtype_name), columns, _cells(by_task, columns))
            for note in _notes(by_task):
                report.say(note)
            so_far(report.record("head", device, settings, rows, ratios))
    return report.record("head", device, settings, rows, ratios)


def make_problem(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
    """
    Random hidden states over a padded micro-batch; logits spread by about 1.5, and the targets are as likely as `DATA` says.

    Args:
        shape: sizes and data set.
        dtype: of hidden states and weight.
        device: where they live.
        seed: of the generator.

    Returns:
        Problem.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight = normal(shape.vocabulary, shape.hidden) * 1.5 / shape.hidden**0.5
    hidden = normal(shape.sequences, shape.width, shape.hidden)
    targets = torch.randint(shape.vocabulary, hidden.shape[:2], generator=generator, device=device)
    # A push along the target's row of the weight lifts its logit. Up to 16 lead to a probability between 0 and 1, 12 to 24
    # to one that is mostly near 1, as a trained policy's is. Every set draws the same numbers.
    least, largest = DATA[shape.data]
    push = torch.rand(hidden.shape[:2], generator=generator, device=device).mul_(largest - least).add_(least)
    half = normal(*hidden.shape[:2]) > 0
    if shape.data == "mixed":
        push = push.where(half, 0.0)
    direction = weight[targets]
    hidden += (push / direction.square().sum(-1)).unsqueeze(-1) * direction
    del direction

    # Completions of 1/2 to 3/2 of the mean length, one behind the other's prompt: first and last columns are masked.
    mean = (1 - shape.masked) * shape.width
    lengths = (mean * torch.linspace(0.5, 1.5, shape.sequences)).round().long().clamp(max=shape.width - 1).to(device)
    if shape.masked == 0.0:
        lengths.fill_(shape.width)
    start = ((shape.width - lengths) // 2).unsqueeze(1)
    columns = torch.arange(shape.width, device=device)
    scored = (columns >= start) & (columns < start + lengths.unsqueeze(1))
    return Problem(
        hidden.to(dtype),
        weight.to(dtype),
        targets.masked_fill(~scored, -100),
        normal(shape.sequences),
        shape.softcap,
    )


def _measure(
    problem: Problem, task: str, dtype: torch.dtype, rounds: int, warm_ups: int, device: torch.device, busy: bool
) -> list[dict[str, Any]]:
    wanted = truth(problem, task)
    products = floor(problem)(task)
    cases = {FLOOR: products}
    lines: dict[str, dict[str, Any]] = {FLOOR: {"peer": FLOOR, "note": ""}}
    for peer in peers(dtype, device):
        if task not in peer.tasks:
            continue
        note = peer.missing or ("" if peer.softcaps or problem.softcap is None else "has no softcap")
        line = {"peer": peer.name, "note": note}
        lines[peer.name] = line
        if not note:
            try:
                line |= _accuracy(peer.run(problem, task).at_rows(problem), wanted)
                line["extra_mib"] = extra_peak_bytes(lambda peer=peer: peer.run(problem, task), device) / MIB
            except Exception as error:  # a peer that fails here is a line in the table, ours is an error
                if peer.name.startswith(OURS):
                    raise
                line["note"] = f"fails: {type(error).__name__}: {error}".splitlines()[0][:120]
                continue
            cases[peer.name] = lambda peer=peer: peer.run(problem, task)
    timings = interleave(cases, rounds, warm_ups, device, (device_clock, BusyDeviceClock(device)) if busy else None)
    for name, timing in timings.items():
        lines[name] |= {
            "seconds": timing.seconds,
            "cpu_seconds": timing.cpu_seconds,
            "busy_seconds": timing.busy_seconds,
            "time_over_floor": timing.over(timings[FLOOR]),
            "busy_time_over_floor": timing.busy_over(timings[FLOOR]),
            "time_over_fastgrpo": timing.over(timings[OURS]),
            "cpu_time_over_floor": timing.cpu_over(timings[FLOOR]),
            "cpu_time_over_fastgrpo": timing.cpu_over(timings[OURS]),
        }
    return list(lines.values())


def _accuracy(output: Output, wanted: Output) -> dict[str, float | None]:
    def relative(got: Tensor | None, reference: Tensor | None) -> float | None:
        if got is None or reference is None:
            return None
        return ((got.double() - reference).norm() / reference.norm()).item()

    return {
        "max_logprob_error": None
        if output.logprobs is None
        else (output.logprobs.double() - wanted.logprobs).abs().max().item(),
        "grad_hidden_error": relative(output.grad_hidden, wanted.grad_hidden),
        "grad_weight_error": relative(output.grad_weight, wanted.grad_weight),
    }


def _ratios(key: str, lines: list[dict[str, Any]]) -> dict[str, float]:
    by_peer = {line["peer"]: line for line in lines}
    ours = by_peer[OURS]
    ratios = {f"{key}/time: fastgrpo over floor": ours["time_over_floor"]}
    for name in (TRL_AS_CALLED, TRL_ROWS):
        if "seconds" not in by_peer[name]:
            continue
        ratios[f"{key}/time: fastgrpo over {name}"] = 1 / by_peer[name]["time_over_fastgrpo"]
        ratios[f"{key}/memory: fastgrpo over {name}"] = ours["extra_mib"] / by_peer[name]["extra_mib"]
    for name in (OURS_IN_ONE_PASS, OURS_IN_SMALL_CHUNKS):
        if name in by_peer:
            ratios[f"{key}/time: {name} over floor"] = by_peer[name]["time_over_floor"]
    trl = by_peer[TRL_ROWS]
    if "seconds" not in trl:
        return ratios
    # The one pass takes rows, so TRL's numbers are those on rows.
    if OURS_IN_ONE_PASS in by_peer:
        in_one_pass = Timing(by_peer[OURS_IN_ONE_PASS]["seconds"]).over(Timing(trl["seconds"]))
        ratios[f"{key}/time: {OURS_IN_ONE_PASS} over {TRL_ROWS}"] = in_one_pass
    for name in (OURS_IN_ONE_PASS, OURS_IN_SMALL_CHUNKS):
        if name in by_peer:
            ratios[f"{key}/memory: {name} over {TRL_ROWS}"] = by_peer[name]["extra_mib"] / trl["extra_mib"]
    return ratios


def _title(shape: Shape, problem: Problem, dtype: str) -> str:
    scored = f"{problem.rows.shape[0]} of {shape.sequences * shape.width} positions scored"
    return f"{shape.name}, H {shape.hidden}, V {shape.vocabulary}, {scored}, {dtype}"


def _notes(by_task: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Why peers are not in the table, each reason once."""
    notes = (f"{line['peer']}: {line['note']}" for lines in by_task.values() for line in lines if line["note"])
    return list(dict.fromkeys(notes))


def _cells(by_task: dict[str, list[dict[str, Any]]], columns: list[str]) -> Iterator[list[str]]:
    def number(value: float | None, style: str) -> str:
        return "" if value is None else format(value, style)

    for task, lines in by_task.items():
        yield [_TITLES[task], *[""] * (len(columns) - 1)]
        ours = next(line for line in lines if line["peer"] == OURS)
        for line in lines:
            if line["note"]:
                continue
            memory = line.get("extra_mib")
            yield [
                f"  {line['peer']}",
                number(line["time_over_floor"], ".2f"),
                *([number(line["busy_time_over_floor"], ".2f")] if _BUSY in columns else []),
                number(line["time_over_fastgrpo"], ".2f"),
                number(line["cpu_time_over_fastgrpo"], ".2f"),
                number(None if memory is None else memory / ours["extra_mib"], ".2f"),
                number(memory, ".0f"),
                number(line.get("max_logprob_error"), ".1e"),
                number(line.get("grad_hidden_error"), ".1e"),
                number(line.get("grad_weight_error"), ".1e"),
                str(Timing(line["seconds"])),
            ]
        yield []
