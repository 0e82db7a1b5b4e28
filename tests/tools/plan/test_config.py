"""What the plan takes as a model."""

from __future__ import annotations

import json
import socket

import pytest
from transformers import LlamaConfig

import fastgrpo.tools.plan.config as config_module
from fastgrpo.tools.plan.config import config_from_numbers, parse_numbers, read_config
from fastgrpo.tools.plan.shape import build


def test_a_folder_s_own_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "unheard_of", "auto_map": {"AutoConfig": "own.Config"}})
    )
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')\n")
    with pytest.raises(ValueError, match="no model that transformers can describe"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 0}, "layers is 0; give a whole number from 1 to 1,000"),
        ({"layers": -2}, "layers is -2"),
        ({"heads": 0}, "heads is 0"),
        ({"heads": 5}, "hidden is 64, no multiple of heads, 5"),
        ({"kv_heads": 3}, "heads is 4, no multiple of kv_heads, 3"),
    ],
)
def test_numbers_of_which_there_is_no_model_are_refused(changed, message):
    numbers = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128, "vocabulary": 100}
    with pytest.raises(ValueError, match=message):
        config_from_numbers(**{**numbers, **changed})


SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def written(folder, text):
    (folder / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers in .*config.json is 0; give a whole number from 1 to 1,000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in .* is 1000000000; give"),
        ({"hidden_size": -64}, "hidden_size in .* is -64; give a whole number from 1 to 10,000,000"),
        ({"hidden_size": "wide"}, "hidden_size in .* is 'wide'; give"),
        ({"vocab_size": 1e30}, "vocab_size in .* is 1e[+]30; give"),
        ({"num_attention_heads": True}, "num_attention_heads in .* is True; give"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size in .* is 0; give"),
        ({"model_type": 3}, "no model that transformers can describe"),
    ],
)
def test_a_config_json_whose_sizes_are_no_sizes_is_refused_by_name(changed, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_config(written(tmp_path, {"model_type": "llama", **SIZES, **changed}))


def test_names_that_only_an_architecture_knows_are_checked_too(tmp_path):
    with pytest.raises(ValueError, match=r"n_layer in .* is 0; give"):
        read_config(written(tmp_path, {"model_type": "gpt2", "n_layer": 0}))
    with pytest.raises(ValueError, match="num_hidden_layers in the configuration is 0; give"):
        read_config(LlamaConfig(num_hidden_layers=0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON: Expecting value: line 1 column 1"),
        ("{", "is no JSON"),
        ("[1]", "holds no JSON object"),
        ("{}", "no model that transformers can describe"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}', "multiple"),
    ],
)
def test_a_config_json_that_is_none_is_said(text, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        read_config(written(tmp_path, text))
    assert "Error" not in str(caught.value)


def test_numbers_that_do_not_go_together_are_said_without_the_libraries_frames(tmp_path):
    huge = {"num_attention_heads": 10**7, "head_dim": 10**7, "hidden_size": 10**7}
    _, config = read_config(written(tmp_path, {"model_type": "llama", **SIZES, **huge}))
    with pytest.raises(ValueError, match="language model of the llama architecture cannot be built") as caught:
        build(config, "bfloat16", None, "all-linear")
    assert "frame #" not in str(caught.value) and "Error" not in str(caught.value)


def test_a_folder_of_an_adapter_names_what_to_give(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter, which says nothing about its model"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)


def test_a_name_of_the_hub_is_looked_up_in_the_cache_alone(tmp_path, monkeypatch):
    def connect(*_, **__):
        pytest.fail("asked the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(ValueError) as caught:
        read_config("nosuch/model")
    said = str(caught.value)
    assert said.startswith("there is no folder or file nosuch/model here, and the local cache")
    assert said.endswith("hf download nosuch/model config.json") and "connect" not in said
    for no_name in ("a/b/c", "../nosuch", "", "x" * 300, "a\0b"):
        with pytest.raises(ValueError, match=r"there is no|cannot be read|is empty"):
            read_config(no_name)
    cached = tmp_path / "config.json"
    written(tmp_path, {"model_type": "llama", **SIZES})
    monkeypatch.setattr(config_module, "try_to_load_from_cache", lambda name, file: str(cached))
    name, config = read_config("some/model")
    assert (name, config.hidden_size) == ("some/model", 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden=64,hidden=32", "hidden is there twice"),
        ("hidden=64.0", "no NAME=NUMBER"),
        ("hidden=1e30", "no NAME=NUMBER"),
        ("hidden=" + "9" * 5000, "no NAME=NUMBER"),
        ("hidden", "no NAME=NUMBER"),
        ("=3", "a model has no number"),
        ("hidden=64,layers=2,heads=4,intermediate=128,vocabulary=100,tied=2", "tied is 2; give true or false"),
        ("hidden=true,layers=2,heads=1,intermediate=128,vocabulary=100", "hidden is True; give a whole number"),
        ("hidden=99999999999999999999,layers=2,heads=1,intermediate=1,vocabulary=1", "hidden is 9+; give a whole"),
    ],
    ids=["twice", "float", "huge-float", "endless", "none", "nameless", "tied", "true", "huge"],
)
def test_numbers_are_read_to_the_letter(text, message):
    with pytest.raises(ValueError, match=message):
        config_from_numbers(**parse_numbers(text))


@pytest.mark.parametrize(("text", "tied"), [("tied=1", True), ("tied=0", False), ("tied=true", True), ("", False)])
def test_whether_weights_are_tied_is_said_in_words_or_digits(text, tied):
    sizes = "hidden=64,layers=2,heads=4,intermediate=128,vocabulary=100,"
    assert config_from_numbers(**parse_numbers(sizes + text)).tie_word_embeddings is tied


def test_an_architecture_without_a_decoder_is_said_and_libraries_keep_to_themselves(tmp_path, capfd):
    with pytest.raises(ValueError, match="no decoder language model of the t5 architecture"):
        build(read_config(written(tmp_path, {"model_type": "t5"}))[1], "bfloat16", None, "all-linear")
    encoder = read_config(written(tmp_path, {"model_type": "bert", **SIZES}))[1]
    build(encoder, "bfloat16", None, "all-linear")  # transformers would rather have is_decoder=True
    assert capfd.readouterr().err == ""
