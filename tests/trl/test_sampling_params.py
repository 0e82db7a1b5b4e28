"""Claims about `vllm_sampling_params`: it reaches vLLM's sampler, and its temperature is also the one of the scores."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import trl
from sampler import fake_vllm
from tiny import tiny_trainer
from trl import TrlParser

import fastgrpo


@pytest.fixture(autouse=True)
def _patched():
    fastgrpo.patch_trl()
    yield
    fastgrpo.unpatch_trl()


def config(use_vllm=True, **given):
    return trl.GRPOConfig("out", use_cpu=True, report_to="none", use_vllm=use_vllm, **given)


def test_it_is_laid_over_the_generation_arguments():
    made = config(vllm_sampling_params={"min_tokens": 3, "top_p": 0.9}, generation_kwargs={"seed": 1, "min_tokens": 3})
    assert made.generation_kwargs == {"seed": 1, "min_tokens": 3, "top_p": 0.9}
    assert made.temperature == 1.0
    assert config(vllm_sampling_params={}).generation_kwargs is None


def test_its_temperature_becomes_the_scoring_temperature():
    made = config(vllm_sampling_params={"temperature": 0.6})
    assert made.temperature == 0.6 and made.generation_kwargs is None
    assert config(vllm_sampling_params={"temperature": 1}, temperature=1.0).temperature == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"vllm_sampling_params": {"temperature": 0.6}, "temperature": 1.0},
            "temperature is 1, and 0.6 in vllm_sampling",
        ),
        ({"vllm_sampling_params": {"temperature": 0.6}, "generation_kwargs": {"temperature": 0.7}}, "give it once"),
        ({"vllm_sampling_params": {"temperature": 0}}, "must be a finite number above 0"),
        ({"vllm_sampling_params": {"temperature": "hot"}}, "must be a finite number above 0"),
        ({"vllm_sampling_params": {"temperature": float("inf")}}, "must be a finite number above 0"),
        ({"vllm_sampling_params": {"temperature": float("nan")}}, "must be a finite number above 0"),
        ({"vllm_sampling_params": {"min_tokens": 3}, "generation_kwargs": {"min_tokens": 4}}, "'min_tokens' is 3 in"),
        ({"vllm_sampling_params": {"n": 2}}, "sets 'n', which TRL decides.*num_generations"),
        ({"vllm_sampling_params": {"max_tokens": 2}}, "max_completion_length"),
        ({"vllm_sampling_params": {"top_p": 0.9}, "use_vllm": False}, "without use_vllm=True"),
    ],
)
def test_conflicts_are_errors(given, message):
    with pytest.raises(ValueError, match=message):
        config(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([1], TypeError, r"vllm_sampling_params is a list, \[1\]; give a dict, on a command line as JSON"),
        ("[1]", TypeError, r"vllm_sampling_params is a list, \[1\]; give a dict"),
        ("null", TypeError, "vllm_sampling_params is a NoneType"),
        ("{top_k: 5", ValueError, r"vllm_sampling_params is '\{top_k: 5', which is no JSON .*; give a dict"),
        ("top_k=5", ValueError, "vllm_sampling_params is 'top_k=5', which is no JSON"),
    ],
)
def test_something_else_than_a_dict_is_an_error_that_says_what_is_wanted(given, error, message):
    with pytest.raises(error, match=message):
        config(vllm_sampling_params=given)


def test_blanks_around_the_json_of_a_command_line_do_not_matter():
    assert config(vllm_sampling_params=' {"seed": 5} ').generation_kwargs == {"seed": 5}


def rebuilt(made, changes):
    return trl.GRPOConfig(**made.to_dict() | {"generation_batch_size": None} | changes)


ROUTES = {
    "replace": lambda made, changes: dataclasses.replace(made, generation_batch_size=None, **changes),
    "to_dict": rebuilt,
    "JSON": lambda made, changes: trl.GRPOConfig(
        **json.loads(made.to_json_string()) | {"generation_batch_size": None} | changes
    ),
    "pickle": lambda made, changes: rebuilt(pickle.loads(pickle.dumps(made)), changes),
    "a copy of a copy": lambda made, changes: rebuilt(rebuilt(copy.deepcopy(made), {}), changes),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_copy_does_what_its_own_fields_say(route):
    made = config(
        vllm_sampling_params={"temperature": 0.6, "top_p": 0.7, "min_tokens": 3},
        generation_kwargs={"seed": 1, "min_tokens": 3},
    )

    def copied(**changes):
        one = ROUTES[route](made, changes)
        return one.temperature, one.generation_kwargs

    own = {"seed": 1, "min_tokens": 3}  # given in generation_kwargs too
    assert copied() == (0.6, own | {"top_p": 0.7})
    assert copied(vllm_sampling_params={"top_p": 0.2}) == (1.0, own | {"top_p": 0.2})
    assert copied(vllm_sampling_params={"temperature": 0.5}) == (0.5, own)
    assert copied(vllm_sampling_params=None) == (1.0, own)
    assert copied(vllm_sampling_params=None, use_vllm=False) == (1.0, own)
    assert copied(vllm_sampling_params=None, temperature=0.8) == (0.8, own)
    assert copied(vllm_sampling_params=None, generation_kwargs={"seed": 2}) == (1.0, {"seed": 2})
    with pytest.raises(ValueError, match=r"temperature is 0\.8, and 0\.6 in vllm_sampling_params"):
        copied(temperature=0.8)
    assert (made.temperature, made.generation_kwargs) == (0.6, own | {"top_p": 0.7})


def test_a_temperature_that_was_given_twice_stays_in_a_copy():
    made = config(vllm_sampling_params={"temperature": 0.6}, temperature=0.6)
    assert ROUTES["replace"](made, {"vllm_sampling_params": None}).temperature == 0.6


def test_what_was_merged_is_no_option_that_anyone_is_shown():
    assert "params_merged" not in TrlParser(trl.GRPOConfig).format_help()


def test_copies_and_rebuilt_configs_say_the_same():
    made = config(vllm_sampling_params={"temperature": 0.6, "seed": 2})
    replaced = dataclasses.replace(made, generation_batch_size=None)
    for one in (copy.deepcopy(made), rebuilt(made, {}), replaced):
        assert (one.temperature, one.generation_kwargs) == (0.6, {"seed": 2})


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_it_reaches_the_engine_and_the_scores(mode, tmp_path):
    with fake_vllm() as engines:
        trainer = tiny_trainer(
            tmp_path,
            use_vllm=True,
            vllm_mode=mode,
            temperature=0.8,
            vllm_sampling_params={"temperature": 0.8, "seed": 5},
            fastgrpo_sync="trl",
        )
    (engine,) = engines
    assert engine.generation_kwargs == {"seed": 5}
    assert (engine.temperature, engine.top_k, trainer.temperature) == (0.8, -1, 0.8)
