"""A built trainer as a plan takes it, and the plan in its run log."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_trainer
from transformers import Qwen3Config

import fastgrpo
from bench import plan as bench_plan
from fastgrpo.runlog import read_run_log
from fastgrpo.tools.plan.estimate import estimate_memory
from fastgrpo.tools.plan.memory import UPDATE
from fastgrpo.tools.plan.trainer import plan_trainer, settings_of
from fastgrpo.tools.plan.update import KEPT, head_of
from fastgrpo.tools.report.summary import summarise
from fastgrpo.trl import runlog


def test_settings_are_read_off_a_trainer(tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, max_steps=1)
    trainer.beta, trainer.ref_model = 0.1, trainer.model
    settings = settings_of(trainer)
    trainer.beta, trainer.ref_model = 0.0, None
    assert (settings.full, settings.separate_reference, settings.dtype, settings.mixed_precision) == (
        True,
        True,
        "float32",
        "no",
    )
    assert (settings.num_generations, settings.completion_length, settings.accumulation) == (4, 12, 2)
    assert (settings.head, settings.packing, settings.share_prefix) == ("full", "none", False)
    with fastgrpo.patch(trainer, fastgrpo.Options(chunk_bytes=1 << 20)):
        patched = settings_of(trainer)
    assert (patched.head, patched.share_prefix, patched.chunk_bytes) == ("fastgrpo", True, 1 << 20)
    assert plan_trainer(trainer).shape.parameters == trainer.model.num_parameters()


def test_what_the_options_bound_is_planned(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, gradient_checkpointing=True, gradient_accumulation_steps=1)
    options = {"mini_batch_size": 2, "max_tokens_per_microbatch": 40, "offload_activations": True, "num_chunks": 3}
    with fastgrpo.patch(trainer, fastgrpo.Options(packing="left", **options)):
        settings = settings_of(trainer)
    assert (settings.mini_batch, settings.max_tokens_per_microbatch, settings.num_chunks) == (2, 40, 3)
    assert (settings.packing, settings.offload_activations, settings.checkpointing) == ("left", True, True)
    assert settings.accumulation == 1 and settings.steps_per_generation == trainer.args.steps_per_generation


def test_an_adapter_is_counted_as_it_is_in_the_trainer(tmp_path):
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    trainer = tiny_trainer(tmp_path, max_steps=1, lora=lora)
    settings = settings_of(trainer)
    assert (settings.lora_rank, settings.lora_targets) == (3, ("q_proj", "v_proj"))
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert plan_trainer(trainer).shape.adapter_parameters == trained


def test_an_adapter_that_the_plan_would_count_wrongly_is_refused(tmp_path):
    lora = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    with pytest.raises(ValueError, match="does not know what modules_to_save of an adapter need"):
        settings_of(tiny_trainer(tmp_path, max_steps=1, lora=lora))


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


class _Norm(torch.autograd.Function):
    """Saves what torch's CUDA kernel saves: the input, the weight, a number a row."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = x.float().square().mean(-1).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd.unsqueeze(-1)).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        rows = tuple(range(grad.dim() - 1))
        return grad * weight, (grad * x).sum(rows).to(weight.dtype) if ctx.needs_input_grad[1] else None


@pytest.mark.parametrize(("full", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_what_a_patched_trainers_forward_saves_is_what_is_predicted(full, dtype, tmp_path):
    """Unique storages that autograd saved in the loss of a real trainer on a CPU under bf16 autocast, parameters left out."""
    setting = bench_plan.Setting("tiny", full, dtype, False, 64, 96)
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        vocab_size=2000,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    trainer = bench_plan.build_trainer(setting, config, torch.device("cpu"), True, str(tmp_path))
    saved: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)):
        plan = plan_trainer(trainer)
        parameters = {p.untyped_storage()._cdata for p in trainer.model.parameters()}
        trainer._get_per_token_logps_and_entropies.fused.rms_norm = lambda x, _, weight, __: (_Norm.apply(x, weight),)
        trainer.current_gradient_accumulation_steps = 1
        inputs = trainer._prepare_inputs([{"prompt": "<eos>"}] * 8)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = trainer.compute_loss(trainer.model, inputs)
    loss.detach_()
    settings = dataclasses.replace(plan.settings, prompt_length=64, completion_length=96)
    again = estimate_memory(config, settings=settings)
    predicted = again.details[UPDATE][KEPT] * 1e9 + head_of(settings, again.shape).kept
    assert predicted == pytest.approx(sum(saved.values()), rel=0.08), predicted / sum(saved.values())
