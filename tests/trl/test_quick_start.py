"""Claim: TRL's documented quick-start script trains on fastgrpo with one more import, and nothing else."""

from __future__ import annotations

import re
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
import torch
import trl.rewards
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer

import fastgrpo

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def quick_start() -> str:
    """The GRPO script in the README of the installed TRL."""
    readme = metadata("trl").get_payload()
    return next(block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "GRPOTrainer(" in block)


def problems(count: int) -> Dataset:
    """What the data set of the script looks like: a conversation and a solution."""
    prompts = [[{"role": "user", "content": f"what is {n} plus 4?"}] for n in range(count)]
    return Dataset.from_dict({"prompt": prompts, "solution": [str(n + 4) for n in range(count)]})


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A tiny model in a folder, and stand-ins for the data on the hub and for a reward that needs math_verify."""
    model = tiny_model("phi bias")
    with torch.no_grad():
        model.lm_head.bias[model.config.eos_token_id] += 4  # short completions: the script allows 256 tokens
    model.save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: problems(1))

    def accuracy_reward(completions, solution, **kwargs):
        return [
            float(right in completion[0]["content"]) + len(completion[0]["content"]) / 100
            for completion, right in zip(completions, solution, strict=True)
        ]

    monkeypatch.setattr(trl.rewards, "accuracy_reward", accuracy_reward)
    monkeypatch.delitem(sys.modules, "fastgrpo.auto", raising=False)
    yield tmp_path
    fastgrpo.unpatch_trl()


def test_trls_quick_start_trains_with_one_import(offline, capsys):
    script = quick_start().replace(MODEL, str(offline / "tiny"))
    assert script != quick_start() and "fastgrpo" not in script
    namespace: dict = {}
    exec(compile("import fastgrpo.auto\n" + script, "train_grpo.py", "exec"), namespace)
    trainer = namespace["trainer"]
    assert trainer.state.global_step == trainer.state.max_steps > 0
    err = capsys.readouterr().err
    assert "fp32 instead of TRL's bf16" in err and "beta=0.001 instead of TRL's 0" in err
    assert "fastgrpo | head: " in err  # patched
    assert Path("tiny-GRPO/log.jsonl").exists()
