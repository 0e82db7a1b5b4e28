"""Adapters: one head, several implementations, one interface. A peer that is not installed says so and is skipped."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastgrpo

TASKS = {
    "forward": 1,
    "frozen": 2,
    "trained": 3,
    "entropy": 3,
}
"""Task -> products of `[N, H]` by `[H, V]` that it needs. `entropy` is a frozen head whose loss holds an entropy bonus."""

OURS = "fastgrpo"
OURS_IN_ONE_PASS = "fastgrpo, fused loss"
OURS_IN_SMALL_CHUNKS = "fastgrpo, chunks of 128 MiB"
TRL_AS_CALLED = "TRL, as called"
TRL_ROWS = "TRL, scored rows"

ENTROPY_COEF = 0.01
_TRL_CHUNK = 32768
_SMALL_CHUNK = 128 << 20


@dataclass(frozen=True)
class Problem:
    """
    One micro-batch at the head.

    Args:
        hidden: `[B, T, H]`, every position of the padded batch.
        weight: `[V, H]`.
        targets: `[B, T]` int64, -100 where nothing is scored.
        advantages: `[B]` fp32.
        softcap: of the logits, or None.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    softcap: float | None = None

    @cached_property
    def scored(self) -> Tensor:
        """`[B, T]` bool."""
        return self.targets != -100

    @cached_property
    def all_scored(self) -> bool:
        """Whether every position is."""
        return bool(self.scored.all())

    @cached_property
    def rows(self) -> Tensor:
        """`[N, H]`: the hidden states that are scored."""
        return self.hidden[self.scored]

    @cached_property
    def row_targets(self) -> Tensor:
        """`[N]`."""
        return self.targets[self.scored]

    @cached_property
    def segments(self) -> Tensor:
        """`[B + 1]`: where each sequence's scored rows begin, and where the last one's end."""
        return torch.nn.functional.pad(self.scored.sum(1).cumsum(0), (1, 0))

    @cached_property
    def objective(self) -> fastgrpo.Objective:
        """On-policy dapo of all scored rows; an input as the advantages are."""
        return fastgrpo.Objective(loss_type="dapo", num_items_in_batch=float(self.rows.shape[0]))

    @cached_property
    def shares(self) -> Tensor:
        """`[B T]`: `1 / N` where a position is scored, else 0."""
        return self.scored.flatten() / self.scored.sum()

    @cached_property
    def grads(self) -> Tensor:
        """`[B T]`: d loss / d logprob of on-policy dapo, `-advantage / N`, 0 where nothing is scored."""
        return -self.advantages.repeat_interleave(self.scored.shape[1]) * self.shares

    @cached_property
    def row_grads(self) -> Tensor:
        """`[N]`: those of the scored rows."""
        return self.grads[self.scored.flatten()]


class Output(NamedTuple):
    """What a peer computed, at the N scored rows or at all B T positions; None where it does not return it."""

    logprobs: Tensor | None
    grad_hidden: Tensor | None
    grad_weight: Tensor | None

    def at_rows(self, problem: Problem) -> Output:
        """The same at the scored rows. It waits for the device, and is no part of what is measured."""

        def rows(values: Tensor | None) -> Tensor | None:
            whole = values is not None and values.shape[0] == problem.scored.numel()
            return values[problem.scored.flatten()] if whole else values

        return Output(rows(self.logprobs), rows(self.grad_hidden), self.grad_weight)


@dataclass(frozen=True)
class Peer:
    """
    An implementation of the head.

    Args:
        name: as printed.
        run: `(problem, task) -> Output`; forward, and backward unless the task is `forward`.
        tasks: what it can do.
        missing: why it cannot run here; empty where it can.
        softcaps: whether it can cap logits.
    """

    name: str
    run: Callable[[Problem, str], Output]
    tasks: tuple[str, ...] = tuple(TASKS)
    missing: str = ""
    softcaps: bool = True


Score = Callable[[Tensor, Tensor, Tensor, str, float | None], tuple[Tensor, Tensor | None]]
"""`(hidden [R, H], weight, targets [R], task, softcap) -> log-probs [R], entropy [R] or None`."""


def peers(dtype: torch.dtype, device: torch.device | None = None) -> list[Peer]:
    """All peers for inputs of a dtype on a device; `fastgrpo` and the two of TRL are always first."""
    trl_missing = _missing("trl.kernels.chunked_logprob", "trl")
    cce_missing = _missing("cut_cross_entropy", "cut-cross-entropy")
    found = [
        Peer(OURS, _fastgrpo_head),
        Peer(TRL_AS_CALLED, _scorer(_trl, compact=False), missing=trl_missing),
        Peer(TRL_ROWS, _scorer(_trl, compact=True), missing=trl_missing),
        Peer(OURS_IN_ONE_PASS, _fastgrpo_loss, ("trained",)),
    ]
    if device is not None and device.type == "cuda":
        small = partial(_fastgrpo_head, chunk_bytes=_SMALL_CHUNK)
        found.append(Peer(OURS_IN_SMALL_CHUNKS, small, ("forward", "frozen", "trained")))
    else:
        # On CUDA, float32 products are ten times slower than 16-bit ones.
        found.append(Peer("full logits, fp32", _scorer(_full_logits_fp32, compact=True)))
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        found.append(Peer(f"full logits, eager {name}", _scorer(_full_logits_eager, compact=True)))
    found += [
        Peer("Liger", _liger_loss, ("frozen", "trained"), _missing("liger_kernel", "liger-kernel"), softcaps=False),
        Peer(
            "Unsloth",
            _scorer(_unsloth, compact=True),
            ("forward", "frozen", "trained"),
            _missing("unsloth_zoo"),
            softcaps=False,
        ),
        Peer(
            "Cut Cross-Entropy",
            _scorer(partial(_cut_cross_entropy, filter_eps=None), compact=True),
            ("forward", "frozen", "trained"),
            cce_missing,
        ),
        # As it is called by default: blocks of small gradients are left out. Without gradients there is nothing to leave out.
        Peer(
            "Cut Cross-Entropy, filtered",
            _scorer(_cut_cross_entropy, compact=True),
            ("frozen", "trained"),
            cce_missing,
        ),
    ]
    return found


def floor(problem: Problem) -> Callable[[str], Callable[[], None]]:
    """Task -> a callable that does only the products the task needs, on the scored rows, in the dtype of the inputs."""
    rows, weight = problem.rows, problem.weight
    logits = torch.randn(rows.shape[0], weight.shape[0], device=rows.device).to(rows.dtype)
    outputs = torch.empty_like(logits)
    grad_hidden, grad_weight = torch.empty_like(rows), torch.empty_like(weight)

    def to_hidden() -> None:
        torch.mm(logits, weight, out=grad_hidden)

    def to_weight() -> None:
        torch.mm(logits.t(), rows, out=grad_weight)

    backward = {
        "forward": (),
        "frozen": (to_hidden,),
        "trained": (to_hidden, to_weight),
        "entropy": (to_hidden, to_hidden),
    }

    def products(task: str) -> Callable[[], None]:
        def run() -> None:
            torch.mm(rows, weight.t(), out=outputs)
            for product in backward[task]:
                product()

        return run

    return products


@torch.no_grad()
def truth(problem: Problem, task: str, block: int = 256) -> Output:
    """What the task should give, in float64 from the same inputs, `block` rows of logits at a time."""
    rows, weight, coefficients = problem.rows.double(), problem.weight.double(), problem.row_grads.double()
    logprobs = rows.new_empty(rows.shape[0])
    grad_hidden, grad_weight = torch.zeros_like(rows), torch.zeros_like(weight)
    for start in range(0, rows.shape[0], block):
        part = slice(start, start + block)
        logits, slope = rows[part] @ weight.t(), 1.0
        if problem.softcap is not None:
            capped = torch.tanh(logits / problem.softcap)
            logits, slope = problem.softcap * capped, 1 - capped.square()
        log_p = torch.log_softmax(logits, -1)
        column = problem.row_targets[part].unsqueeze(1)
        logprobs[part] = log_p.gather(1, column).squeeze(1)
        if task == "forward":
            continue
        grad = log_p.exp().mul_(-coefficients[part].unsqueeze(1))
        grad.scatter_add_(1, column, coefficients[part].unsqueeze(1))
        if task == "entropy":
            entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
            grad.add_(log_p.exp().mul_(log_p + entropy), alpha=ENTROPY_COEF / rows.shape[0])
        grad = grad * slope
        grad_hidden[part] = grad @ weight
        if task == "trained":
            grad_weight.addmm_(grad.t(), rows[part])
    if task == "forward":
        return Output(logprobs, None, None)
    return Output(logprobs, grad_hidden, grad_weight if task == "trained" else None)


def _scorer(score: Score, compact: bool) -> Callable[[Problem, str], Output]:
    """Runs a scoring function under the loss of the task, on the scored rows only (`compact`) or on every position."""

    def run(problem: Problem, task: str) -> Output:
        with_grad = task != "forward"
        if compact:
            hidden, targets, grads = problem.rows, problem.row_targets, problem.row_grads
        else:
            hidden, targets, grads = problem.hidden.flatten(0, 1), problem.targets.flatten(), problem.grads
        hidden = hidden.detach().requires_grad_(with_grad)
        weight = problem.weight.detach().requires_grad_(task == "trained")
        with torch.set_grad_enabled(with_grad):
            logprobs, entropy = score(hidden, weight, targets, task, problem.softcap)
            if not with_grad:
                return Output(logprobs, None, None)
            # Losses weigh positions, as TRL's does with its mask: to pick some out would wait for the device.
            loss = (grads * logprobs).sum()
            if task == "entropy":
                loss = loss - ENTROPY_COEF * (entropy.mean() if compact else (problem.shares * entropy).sum())
            loss.backward()
        return Output(logprobs.detach(), hidden.grad, weight.grad)

    return run


def _fastgrpo_head(problem: Problem, task: str, chunk_bytes: int | None = None) -> Output:
    # As the patched trainer calls it: where it packs, every row it passes is scored, and it says so.
    score = partial(_fastgrpo, chunk_bytes=chunk_bytes, skip_ignored=not problem.all_scored)
    return _scorer(score, compact=False)(problem, task)


def _fastgrpo(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    task: str,
    softcap: float | None,
    chunk_bytes: int | None,
    skip_ignored: bool,
) -> tuple[Tensor, Tensor | None]:
    # Entropy is logged in the loss forward, nobody asks for it in the other passes.
    return fastgrpo.linear_logprob(
        hidden,
        weight,
        targets,
        softcap=softcap,
        return_entropy=task != "forward",
        chunk_bytes=chunk_bytes,
        entropy_requires_grad=task == "entropy",
        skip_ignored=skip_ignored,
    )


def _fastgrpo_loss(problem: Problem, task: str) -> Output:
    hidden, weight = problem.rows.detach().requires_grad_(), problem.weight.detach().requires_grad_()
    loss, stats = fastgrpo.linear_grpo_loss(
        hidden, weight, problem.row_targets, problem.segments, problem.advantages, problem.objective,
        softcap=problem.softcap,
    )  # fmt: skip
    loss.backward()
    return Output(stats.logprobs, hidden.grad, weight.grad)


def _trl(
    hidden: Tensor, weight: Tensor, targets: Tensor, task: str, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    # As in `add_fused_lm_head` for `GRPOTrainer`: entropy in every pass, masked targets clamped to word 0.
    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets.clamp(min=0), 1.0, _TRL_CHUNK, softcap, 1.0, ("entropy",)
    )
    return logprobs, entropy


def _full_logits_fp32(
    hidden: Tensor, weight: Tensor, targets: Tensor, task: str, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    return _from_logits(torch.nn.functional.linear(hidden.float(), weight.float()), targets, task, softcap)


def _full_logits_eager(
    hidden: Tensor, weight: Tensor, targets: Tensor, task: str, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    return _from_logits(torch.nn.functional.linear(hidden, weight).float(), targets, task, softcap)


def _from_logits(logits: Tensor, targets: Tensor, task: str, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits, -1)
    logprobs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    if task == "forward":
        return logprobs, None
    with torch.set_grad_enabled(task == "entropy"):
        return logprobs, -(log_p.exp() * log_p).sum(-1)


def _liger_loss(problem: Problem, task: str) -> Output:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden = problem.hidden.detach().requires_grad_()
    weight = problem.weight.detach().requires_grad_(task == "trained")
    head = LigerFusedLinearGRPOLoss(beta=0.0, loss_type="dapo", use_ref_model=False)
    loss, _ = head(hidden, weight, problem.targets.clamp(min=0), problem.scored.long(), problem.advantages)
    loss.backward()
    return Output(None, hidden.grad.flatten(0, 1), weight.grad)


def _unsloth(
    hidden: Tensor, weight: Tensor, targets: Tensor, task: str, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    module = importlib.import_module("unsloth_zoo.fused_losses.fused_linear")
    return module.fused_linear_logprobs(hidden, weight, targets, temperature=1.0), None


def _cut_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, task: str, softcap: float | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none", softcap=softcap, **options), None


def _missing(module: str, distribution: str | None = None) -> str:
    try:
        version(distribution or module)
    except PackageNotFoundError:
        return "not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # a peer that cannot be imported here is a line in the table, whatever it raises
        return f"does not import: {type(error).__name__}: {error}".splitlines()[0]
    return ""
