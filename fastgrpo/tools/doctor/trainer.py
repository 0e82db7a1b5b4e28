"""A trainer for the doctor, from what it was told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from fastgrpo.tools.checkpoint import load_model, load_tokenizer
from fastgrpo.tools.demo.toy import toy_model, toy_tokenizer
from fastgrpo.tools.doctor.case import Case
from fastgrpo.tools.reward_functions import guarded
from fastgrpo.tools.wording import ToolError, reason

_ROWS = ({"prompt": "1+1="}, {"prompt": "12+30="})
_NOT_OURS = {"output_dir", "logging_dir", "push_to_hub", "hub_token", "resume_from_checkpoint", "deepspeed", "fsdp"}


def build_trainer(case: Case, folder: Path, *, rows: int = 2, own_settings: bool = False, **config: Any) -> GRPOTrainer:
    """
    A silent trainer on the machine's GPU, or on the CPU in float32.

    Args:
        case: model (None = a toy of 0.6 M parameters), rewards (none = number of different characters), rows and adapter.
        folder: for whatever TRL writes.
        rows: of the dataset to use, repeated where there are fewer.
        own_settings: start from the case's settings, as far as `GRPOConfig` knows them.
        config: fields of `GRPOConfig`, over everything else.
    """
    gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {"bf16": gpu and torch.cuda.is_bf16_supported()}
    if own_settings:
        known = {field.name for field in dataclasses.fields(GRPOConfig) if field.init} - _NOT_OURS
        settings |= {name: value for name, value in case.settings.items() if name in known}
    if not gpu:
        settings |= {"bf16": False, "fp16": False}
    settings |= {
        "output_dir": str(folder),
        "use_cpu": not gpu,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **config,
    }
    if not own_settings:
        settings["gradient_checkpointing"] = False
    model, tokenizer = _policy(case, gpu)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[guarded(spec) for spec in case.rewards] or _different_characters,
        args=GRPOConfig(**settings),
        train_dataset=_dataset(case, rows),
        processing_class=tokenizer,
        peft_config=_lora(case),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _policy(case: Case, gpu: bool) -> tuple[Any, Any]:
    if case.model is None:
        tokenizer = toy_tokenizer()
        return toy_model(tokenizer), tokenizer
    if gpu:
        return str(case.model), None  # TRL loads it in the checkpoint's dtype
    model = load_model(str(case.model), torch.float32)
    sees = hasattr(model.config, "vision_config")
    return model, None if sees else load_tokenizer(str(case.model))  # TRL finds the processor


def _dataset(case: Case, rows: int) -> Dataset:
    source = [{name: value for name, value in row.items() if name != "completion"} for row in case.rows or _ROWS]
    try:
        return Dataset.from_list([source[number % len(source)] for number in range(rows)])
    except pyarrow.ArrowException as error:
        raise ToolError(
            f"a column of the rows holds values of more than one kind, so they are no dataset: {reason(error)}",
            "write numbers, texts or conversations throughout a column",
        ) from error


def _lora(case: Case) -> LoraConfig | None:
    if case.model is None or case.lora_rank is None:
        return None
    targets = case.lora_targets
    return LoraConfig(r=case.lora_rank, target_modules=list(targets) if isinstance(targets, tuple) else targets)


def _different_characters(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(set(str(completion)))) for completion in completions]
