"""Claims about defaults that train stably: where nothing was said, once, with their price, and never over a choice."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import many_letters, tiny_model, tiny_tokenizer, tiny_trainer
from transformers import AutoModelForCausalLM
from trl import TrlParser

import fastgrpo
from fastgrpo.trl import tuned

PRICE = "and a second copy of the model"


@pytest.fixture(autouse=True)
def _patched():
    fastgrpo.patch_trl()
    yield
    fastgrpo.unpatch_trl()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def config(**given):
    return trl.GRPOConfig("out", use_cpu=True, report_to="none", **given)


def build(model, arguments, peft_config=None, trainer_class=None):
    return (trainer_class or trl.GRPOTrainer)(
        model,
        reward_funcs=many_letters,
        args=arguments,
        train_dataset=tiny_dataset(),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )


def tiny_dataset():
    return Dataset.from_dict({"prompt": ["1+1="]})


def test_fields_left_alone_are_tuned_and_explicit_ones_are_not_even_at_trls_own_default():
    assert (config().beta, config().top_k) == (0.001, 0)
    assert (config(use_vllm=True).beta, config(use_vllm=True).top_k) == (0.001, -1)
    given = config(beta=0.0, top_k=0, use_vllm=True)
    assert (given.beta, given.top_k) == (0.0, 0)
    assert config(top_k=50, use_vllm=True).top_k == 50
    assert config(generation_kwargs={"top_k": 20}, use_vllm=True).top_k == 0  # laid over the field anyway
    assert type(config().beta) is float and type(config(fastgrpo_tuned_defaults=False).top_k) is int
    assert config().auto_find_batch_size is False


def test_tuned_defaults_can_be_switched_off_for_all_and_for_one():
    off = config(fastgrpo_tuned_defaults=False, use_vllm=True)
    assert (off.beta, off.top_k, off.fastgrpo_tuned_defaults) == (0.0, 0, False)
    fastgrpo.patch_trl(tuned_defaults=False)
    assert config().beta == 0.0
    assert config(fastgrpo_tuned_defaults=True).beta == 0.001
    fastgrpo.patch_trl()
    assert config().beta == 0.001


def test_rows_without_an_advantage_that_are_to_be_skipped_keep_beta_0():
    assert config(fastgrpo_skip_zero_advantage=True).beta == 0.0


def test_a_command_line_and_a_yaml_file_tell_given_from_left_alone(tmp_path):
    def parse(*arguments):
        return TrlParser(trl.GRPOConfig).parse_args_and_config(["--output_dir", "out", *arguments])[0]

    assert parse().beta == 0.001 and parse("--use_vllm").top_k == -1
    assert parse("--beta", "0.0").beta == 0.0 and parse("--use_vllm", "--top_k", "0").top_k == 0
    (tmp_path / "a.yaml").write_text("beta: 0.0\n")
    assert parse("--config", str(tmp_path / "a.yaml")).beta == 0.0
    assert "--beta BETA" in TrlParser(trl.GRPOConfig).format_help()


def test_copies_pickles_and_rebuilt_configs_keep_what_was_chosen_and_are_not_tuned_again():
    for beta in (config(), config(beta=0.0)):
        value = beta.beta
        copies = [
            copy.copy(beta),
            copy.deepcopy(beta),
            pickle.loads(pickle.dumps(beta)),
            dataclasses.replace(beta, generation_batch_size=None, max_steps=3),
            trl.GRPOConfig(**beta.to_dict() | {"generation_batch_size": None}),
        ]
        assert {one.beta for one in copies} == {value}
    stock = config(fastgrpo_tuned_defaults=False)
    switched_on = dataclasses.replace(stock, generation_batch_size=None, fastgrpo_tuned_defaults=True)
    assert switched_on.beta == 0.0  # a copied value counts as given


def test_each_change_is_printed_once_with_its_price(folder, capsys):
    arguments = config(use_vllm=False)
    trainer = build(str(folder), arguments)
    size = sum(p.numel() for p in trainer.ref_model.parameters()) * 4 / 1e9
    out = capsys.readouterr().err
    assert (
        f"beta=0.001 instead of TRL's 0: one more forward without gradients for every batch, {PRICE} of {size:.3g} GB"
        in out
    )
    assert "fp32 instead of TRL's bf16: the device is cpu" in out
    assert "to keep TRL's: GRPOConfig(fastgrpo_tuned_defaults=False)" in out
    assert "top_k" not in out
    fastgrpo.unpatch(trainer)
    fastgrpo.unpatch(build(str(folder), arguments))
    assert PRICE not in capsys.readouterr().err


def test_nothing_is_printed_where_everything_was_given(folder, capsys):
    fastgrpo.unpatch(build(str(folder), config(beta=0.0, bf16=False)))
    fastgrpo.unpatch(build(str(folder), config(fastgrpo_tuned_defaults=False, bf16=False)))
    assert "instead of TRL's" not in capsys.readouterr().err


def test_a_value_changed_after_the_config_was_made_counts(folder, capsys):
    arguments = config()
    arguments.beta = 0.0
    trainer = build(str(folder), arguments)
    assert trainer.beta == 0.0 and trainer.ref_model is None
    assert "beta=" not in capsys.readouterr().err


@pytest.mark.parametrize("wrapped", [False, True])
def test_with_an_adapter_no_second_model_is_loaded_and_none_is_announced(wrapped, capsys):
    lora = LoraConfig(r=4, target_modules="all-linear")
    trainer = build(get_peft_model(tiny_model(), lora), config()) if wrapped else build(tiny_model(), config(), lora)
    assert trainer.beta == 0.001 and trainer.ref_model is None
    err = capsys.readouterr().err
    assert "no second model, since the adapter can be switched off" in err and PRICE not in err


def test_a_model_that_came_from_nowhere_keeps_beta_0(capsys):
    trainer = build(tiny_model(), config())
    assert trainer.beta == trainer.args.beta == 0.0 and trainer.ref_model is None
    err = capsys.readouterr().err
    assert "beta stays 0: this model came from no folder or hub" in err and "to keep TRL's" not in err


def test_the_default_config_of_a_trainer_is_tuned_too(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = build(str(folder), None)
    assert trainer.beta == 0.001 and trainer.args.output_dir == f"{folder.name}-GRPO"
    assert PRICE in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [None, "bfloat16", "auto"])
def test_the_size_of_the_reference_is_that_of_the_one_that_is_loaded(folder, dtype):
    init = None if dtype is None else {"dtype": dtype}
    for model in (str(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)):
        state = torch.get_rng_state()
        told = tuned.reference_gb(model, config(model_init_kwargs=init))
        assert torch.equal(torch.get_rng_state(), state)
        trainer = build(model, config(model_init_kwargs=init))
        real = sum(p.numel() * p.element_size() for p in trainer.ref_model.parameters()) / 1e9
        assert told == pytest.approx(real), (type(model), dtype)
        fastgrpo.unpatch(trainer)


def test_a_model_whose_size_cannot_be_read_is_left_to_trl_to_report(capsys):
    assert tuned.reference_gb("no/such folder", config()) is None
    with pytest.raises(Exception, match="no/such folder"):
        build("no/such folder", config())
    assert capsys.readouterr().err.count(PRICE) == 1


def test_a_tuned_run_trains_with_a_kl_term(folder, tmp_path):
    trainer = tiny_trainer(tmp_path, AutoModelForCausalLM.from_pretrained(folder), lora=False, max_steps=2)
    trainer.train()
    assert all("kl" in line for line in trainer.state.log_history if "loss" in line)
