"""A built trainer as a plan takes it, and the plan in its run log."""

from __future__ import annotations

import pytest
from peft import LoraConfig
from tiny import tiny_trainer

import fastgrpo
from fastgrpo.runlog import read_run_log
from fastgrpo.tools.plan.trainer import plan_trainer, settings_of
from fastgrpo.tools.report.summary import summarise
from fastgrpo.trl import runlog


def test_settings_are_read_off_a_trainer(tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, max_steps=1)
    trainer.beta, trainer.ref_model = 0.1, trainer.model
    settings = settings_of(trainer)
    trainer.beta, trainer.ref_model = 0.0, None
    assert (settings.full, settings.separate_reference, settings.dtype, settings.autocast) == (
        True,
        True,
        "float32",
        False,
    )
    assert (settings.num_generations, settings.completion_length, settings.accumulation) == (4, 12, 2)
    assert (settings.head, settings.share_prefix) == ("full", False)
    with fastgrpo.patch(trainer, fastgrpo.Options(chunk_bytes=1 << 20)):
        patched = settings_of(trainer)
    assert (patched.head, patched.share_prefix, patched.chunk_bytes) == ("fastgrpo", True, 1 << 20)
    assert plan_trainer(trainer).shape.parameters == trainer.model.num_parameters()


def test_an_adapter_is_counted_as_it_is_in_the_trainer(tmp_path):
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    trainer = tiny_trainer(tmp_path, max_steps=1, lora=lora)
    settings = settings_of(trainer)
    assert (settings.lora_rank, settings.lora_targets) == (3, ("q_proj", "v_proj"))
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert plan_trainer(trainer).shape.adapter_parameters == trained


def test_an_optimizer_the_plan_does_not_know_is_named(tmp_path):
    with pytest.raises(ValueError, match="optim is 'adafactor'; the plan knows adamw_torch"):
        settings_of(tiny_trainer(tmp_path, max_steps=1, optim="adafactor"))


def test_the_run_line_holds_the_plan_and_the_report_sets_memory_against_it(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    monkeypatch.setattr(runlog, "_PLANNED_ON", ("cpu",))
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=tmp_path / "log.jsonl")):
        expected = max(plan_trainer(trainer).peaks.values())
        trainer.train()
    record = read_run_log(tmp_path)
    assert record.run["plan"]["total_gb"] == pytest.approx(sum(record.run["plan"]["terms_gb"].values()), rel=0.2)
    assert summarise(record, "it").plan_gb == expected


def test_a_plan_that_fails_is_no_reason_not_to_train(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, max_steps=1, optim="adafactor")
    assert runlog.planned_memory(trainer) is None  # no GPU
    monkeypatch.setattr(runlog, "_PLANNED_ON", ("cpu",))
    assert runlog.planned_memory(trainer) is None
