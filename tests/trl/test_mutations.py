"""Faults put into the wiring on purpose: each must make a twin comparison fail, or the twins prove nothing."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_trainer
from trl import GRPOTrainer
from twins import assert_twins, run

import fastgrpo
import fastgrpo.trl.heads as heads
import fastgrpo.trl.scoring as scoring
from fastgrpo.attention import Segment

SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"beta": 0.04},
    "lora, left-packed": {"beta": 0.04, "options": {"packing": "left"}},
    "lora, stock layout": {"beta": 0.04, "options": {"packing": "none"}},
    "full": {"lora": False},
    "entropy bonus": {"entropy_coef": 0.05},
    "scale": {"model": "cohere scale"},
    "softcap": {"model": "gemma2 softcap"},
    "bias": {"model": "phi bias"},
    "trained copy of the head": {
        "lora": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "beta": 0.04,
    },
    "mixture of experts": {"model": "qwen3 moe", "router_aux_loss_coef": 0.1},
    "mixture of experts, left-packed": {
        "model": "qwen3 moe",
        "router_aux_loss_coef": 0.1,
        "options": {"packing": "left"},
    },
}
Fault = Callable[[pytest.MonkeyPatch], None]


@functools.cache
def stock_run(setting: str) -> tuple[GRPOTrainer, dict[str, torch.Tensor]]:
    settings = {name: value for name, value in SETTINGS[setting].items() if name != "options"}
    return run(Path(tempfile.mkdtemp()), patched=False, max_steps=2, **settings)


def patched_run(setting: str, output_dir: Path, after_patching: Callable[[], None] = lambda: None) -> GRPOTrainer:
    """The patched twin; a fault that comes after patching is none that the patch-time probe could see."""
    settings = dict(SETTINGS[setting])
    options = fastgrpo.Options(**settings.pop("options", {}))
    trainer = tiny_trainer(output_dir, max_steps=2, **settings)
    fastgrpo.patch(trainer, options)
    after_patching()
    trainer.train()
    return trainer


@pytest.mark.parametrize("setting", SETTINGS)
def test_twins_are_equal_without_a_fault(setting, tmp_path):
    stock, before = stock_run(setting)
    assert_twins(stock, patched_run(setting, tmp_path), before)


def in_the_head(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Fault:
    """A fault in what reaches the head: its arguments by name, and what to make of them."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        def head(hidden: Any, weight: Any, targets: Any, bias: Any = None, **options: Any) -> Any:
            given = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, **options}
            return fastgrpo.linear_logprob(**{**given, **change(given)})

        monkeypatch.setattr(heads, "linear_logprob", head)

    return break_it


def after_the_head(change: Callable[[fastgrpo.LogProbs], fastgrpo.LogProbs]) -> Fault:
    """A fault in what comes out of the head."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(heads, "linear_logprob", lambda *a, **k: change(fastgrpo.linear_logprob(*a, **k)))

    return break_it


def in_the_packing(change: Callable[[Any], Any], layout: str = "pack") -> Fault:
    """A fault in the packed batch."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scoring, layout, lambda *a, **k: change(getattr(fastgrpo, layout)(*a, **k)))

    return break_it


def in_the_forward(
    inputs: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    labels: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Fault:
    """A fault in the model's inputs or the labels."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        def score(trainer: Any, model: Any, given: dict[str, Any], call: heads.HeadCall) -> heads.Scores:
            if inputs is not None:
                given = {**given, **inputs(given)}
            if labels is not None:
                call = replace(call, labels=labels(call.labels))
            return heads.score_with_head(trainer, model, given, call)

        monkeypatch.setattr(scoring, "score_with_head", score)

    return break_it


def after_the_forward(change: Callable[[heads.Scores], heads.Scores]) -> Fault:
    """A fault in what a forward returns."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scoring, "score_with_head", lambda *a: change(heads.score_with_head(*a)))

    return break_it


def without_the_first(labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels.view(-1)[(labels.flatten() >= 0).int().argmax()] = -100
    return labels


def always_share_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "pack", lambda ids, mask, prompts, share: fastgrpo.pack(ids, mask, prompts, True))


def blind_to_prompts(packed: Any) -> Any:
    return replace(packed, segments=[Segment(segment.start, segment.stop, 0, 0) for segment in packed.segments])


def one_long_row(packed: Any) -> Any:
    return replace(packed, segments=[Segment(0, packed.tokens.shape[1], 0, 0)])


def draw_random_numbers(scores: heads.Scores) -> heads.Scores:
    torch.rand(1)
    return scores


def reuse_the_first_head_weight() -> Callable[[dict[str, Any]], dict[str, Any]]:
    first: list[torch.Tensor] = []

    def change(given: dict[str, Any]) -> dict[str, Any]:
        first.append(given["weight"])
        return {"weight": first[0]}

    return change


FAULTS: dict[str, tuple[str, Fault]] = {
    "temperature forgotten": ("lora", in_the_head(lambda given: {"temperature": 1.0})),
    "temperature forgotten without gradient, that is in the reference": (
        "lora",
        in_the_head(lambda given: {} if torch.is_grad_enabled() else {"temperature": 1.0}),
    ),
    "scale applied twice": ("scale", in_the_head(lambda given: {"logit_scale": given["logit_scale"] ** 2})),
    "scale forgotten": ("scale", in_the_head(lambda given: {"logit_scale": 1.0})),
    "softcap forgotten": ("softcap", in_the_head(lambda given: {"softcap": None})),
    "bias forgotten": ("bias", in_the_head(lambda given: {"bias": None})),
    "entropy detached": ("entropy bonus", in_the_head(lambda given: {"entropy_requires_grad": False})),
    "entropy a tenth too large": (
        "lora",
        after_the_head(
            lambda result: result._replace(entropy=None if result.entropy is None else result.entropy * 1.1)
        ),
    ),
    "gradient of the head lost": ("full", in_the_head(lambda given: {"weight": given["weight"].detach()})),
    "gradient of the model lost": ("full", in_the_head(lambda given: {"hidden": given["hidden"].detach()})),
    "gradient doubled": ("lora", after_the_head(lambda r: r._replace(logprobs=2 * r.logprobs - r.logprobs.detach()))),
    "the trained head's copy taken for the reference's": (
        "trained copy of the head",
        in_the_head(reuse_the_first_head_weight()),
    ),
    "first token unscored": ("lora", in_the_forward(labels=without_the_first)),
    "first token unscored, left-packed": ("lora, left-packed", in_the_forward(labels=without_the_first)),
    "labels moved by one": ("full", in_the_forward(labels=lambda labels: labels.roll(-1, -1))),
    "attention mask dropped": (
        "lora, stock layout",
        in_the_forward(lambda given: {"attention_mask": torch.ones_like(given["attention_mask"])}),
    ),
    "wrong positions": ("lora", in_the_forward(lambda given: {"position_ids": given["position_ids"] // 2})),
    "wrong positions, left-packed": (
        "lora, left-packed",
        in_the_forward(lambda given: {"position_ids": given["position_ids"] // 2}),
    ),
    "hidden states of another row": (
        "lora",
        in_the_packing(lambda packed: replace(packed, index=packed.index.flip(0))),
    ),
    "rows given back in another order": (
        "lora, left-packed",
        in_the_packing(lambda packed: replace(packed, index=packed.index.flip(0)), "left_pack"),
    ),
    "completions blind to their prompt": ("lora", in_the_packing(blind_to_prompts)),
    "rows that see their neighbours": ("lora", in_the_packing(one_long_row)),
    "auxiliary loss dropped": (
        "mixture of experts",
        after_the_forward(lambda s: s._replace(aux_loss=None if s.aux_loss is None else 0 * s.aux_loss)),
    ),
    "auxiliary loss detached": (
        "mixture of experts",
        after_the_forward(lambda s: s._replace(aux_loss=None if s.aux_loss is None else s.aux_loss.detach())),
    ),
    "padding counted in the auxiliary loss": (
        "mixture of experts, left-packed",
        in_the_forward(lambda given: {"attention_mask": None}),
    ),
    "a shared prompt counted once in the auxiliary loss": ("mixture of experts", always_share_prompts),
    "random numbers drawn": ("lora", after_the_forward(draw_random_numbers)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_wiring_is_caught(fault, tmp_path, monkeypatch):
    setting, break_it = FAULTS[fault]
    stock, before = stock_run(setting)
    patched = patched_run(setting, tmp_path, after_patching=lambda: break_it(monkeypatch))
    with pytest.raises(AssertionError):
        assert_twins(stock, patched, before)


def test_a_patch_that_does_nothing_is_caught(tmp_path, monkeypatch):
    """Twins of a patch that never scores would be equal: another check must see it."""
    trainer = tiny_trainer(tmp_path, max_steps=1)
    calls: list[int] = []
    with fastgrpo.patch(trainer):
        monkeypatch.setattr(
            heads, "linear_logprob", lambda *a, **k: calls.append(1) or fastgrpo.linear_logprob(*a, **k)
        )
        trainer.train()
    assert calls
