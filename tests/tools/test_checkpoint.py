"""What is wrong with a model's folder is said in words, before anything is loaded; no weight is ever random."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import LlamaConfig

from fastgrpo.tools.checkpoint import (
    check_weights,
    context_of,
    folder_of,
    load_model,
    load_tokenizer,
    read_model_config,
)
from fastgrpo.tools.demo.toy import toy_model, toy_tokenizer
from fastgrpo.tools.wording import ToolError


@pytest.fixture
def toy(tmp_path):
    tokenizer = toy_tokenizer()
    toy_model(tokenizer).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def looked_at(folder):
    folder = folder_of(folder)
    check_weights(folder, read_model_config(folder))


def refused(folder):
    with pytest.raises(ToolError) as caught:
        looked_at(folder)
    assert caught.value.remedy
    return str(caught.value)


def test_a_whole_folder_is_all_right_and_nothing_of_it_is_read_twice(toy):
    looked_at(toy)
    assert len(load_tokenizer(str(toy))) == 15
    assert load_model(str(toy), torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0, of which there is no model"),
        ({"hidden_size": -128}, "hidden_size=-128, of which there is no model"),
        ({"vocab_size": 9}, "1 tensor of another shape than its config.json says: model.embed_tokens.weight"),
        ({"num_hidden_layers": 4, "layer_types": None}, "lack 11 tensors that its config.json describes"),
        ({"hidden_size": "large"}, "describes no model that transformers"),
        ({"model_type": "its-own", "auto_map": {"AutoConfig": "own.Config"}}, "wants code of its own to be run"),
        ({"architectures": None}, "names no architectures"),
        ({"architectures": ["ItsOwnForCausalLM"]}, "is a ItsOwnForCausalLM, which transformers"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "does not write text"),
    ],
    ids=["layers", "hidden", "vocabulary", "more-layers", "text", "own-code", "no-class", "own-class", "classifier"],
)
def test_a_configuration_of_no_model_or_of_another(values, said, toy):
    change(toy / "config.json", **values)
    assert said in refused(toy)


def test_code_in_a_models_folder_is_never_run(toy, tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Config: ...\nclass Tokenizer: ...\n"
    (toy / "own.py").write_text(code)
    change(
        toy / "config.json",
        model_type="its-own",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    change(toy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", None]}, tokenizer_class="Own")
    assert "wants code of its own" in refused(toy)
    for load in (lambda: load_model(str(toy), torch.float32), lambda: load_tokenizer(str(toy))):
        with contextlib.suppress(ToolError):
            load()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["qwen2 tied", "qwen3 moe", "gpt2", "qwen2.5 vl"])
def test_whole_models_of_other_families_are_all_right(name, tmp_path):
    tiny_model(name).save_pretrained(tmp_path)
    looked_at(tmp_path)
    assert load_model(str(tmp_path), torch.float32).generation_config is not None


def test_weights_that_are_missing_cut_short_or_only_pointed_at(toy):
    weights = toy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "is damaged or cut short" in refused(toy)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a Git LFS pointer" in refused(toy)
    weights.unlink()
    assert "has no weights: neither model.safetensors nor pytorch_model.bin" in refused(toy)
    (toy / "toy.gguf").write_bytes(b"GGUF")
    assert "(it has toy.gguf)" in refused(toy)
    (toy / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and no end")
    assert "is damaged or cut short" in refused(toy)
    (toy / "pytorch_model.bin").unlink()
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (toy / "model.safetensors.index.json").write_text(json.dumps(index))
    (toy / "model-1-of-2.safetensors").write_bytes(whole)
    assert "lacks 1 of the 2 files that model.safetensors.index.json names: model-2-of-2" in refused(toy)


def test_a_missing_tensor_is_never_made_up(toy):
    tensors = load_file(toy / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    del tensors[name]
    save_file(tensors, toy / "model.safetensors", metadata={"format": "pt"})
    assert f"which would be random: {name}" in refused(toy)
    with pytest.raises(ToolError, match="which would be random"):
        load_model(str(toy), torch.float32)


@pytest.mark.parametrize("name", ["nowhere", "toy/config.json", "model.gguf", "an/impossible//name"])
def test_a_model_that_is_no_folder(name, toy, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / name) in refused(tmp_path / name)


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "the/base"}')
    assert "holds an adapter and no model" in refused(tmp_path)


def test_a_tokenizer_that_is_not_there_or_wants_code_or_is_empty(toy):
    change(toy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", None]}, tokenizer_class="Own")
    (toy / "tokenizer.json").unlink()
    with pytest.raises(ToolError, match="has no tokenizer: none of"):
        load_tokenizer(str(toy))
    (toy / "tokenizer_config.json").unlink()
    with pytest.raises(ToolError, match="has no tokenizer: none of"):
        load_tokenizer(str(toy))
    (toy / "vocab.json").write_text("no json")
    with pytest.raises(ToolError, match="the tokenizer of"):
        load_tokenizer(str(toy))


def test_the_context_follows_a_stretched_rope():
    assert context_of(LlamaConfig(max_position_embeddings=512)) == 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    assert context_of(LlamaConfig(max_position_embeddings=512, rope_parameters=yarn)) == 2048
    final = yarn | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert context_of(LlamaConfig(max_position_embeddings=1024, rope_parameters=final)) == 1024
