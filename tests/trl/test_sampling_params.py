"""Claims about `vllm_sampling_params`: it reaches vLLM's sampler, and its temperature is also the one of the scores."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import trl
from sampler import fake_vllm
from tiny import tiny_trainer

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
        ({"vllm_sampling_params": {"temperature": 0}}, "must be a number above 0"),
        ({"vllm_sampling_params": {"temperature": "hot"}}, "must be a number above 0"),
        ({"vllm_sampling_params": {"min_tokens": 3}, "generation_kwargs": {"min_tokens": 4}}, "'min_tokens' is 3 in"),
        ({"vllm_sampling_params": {"n": 2}}, "sets 'n', which TRL decides.*num_generations"),
        ({"vllm_sampling_params": {"max_tokens": 2}}, "max_completion_length"),
        ({"vllm_sampling_params": {"top_p": 0.9}, "use_vllm": False}, "without use_vllm=True"),
    ],
)
def test_conflicts_are_errors(given, message):
    with pytest.raises(ValueError, match=message):
        config(**given)


def test_something_else_than_a_dict_is_an_error():
    with pytest.raises(TypeError, match="vllm_sampling_params is a list"):
        config(vllm_sampling_params=[1])


def test_copies_and_rebuilt_configs_say_the_same():
    made = config(vllm_sampling_params={"temperature": 0.6, "seed": 2})
    rebuilt = trl.GRPOConfig(**made.to_dict() | {"generation_batch_size": None})
    replaced = dataclasses.replace(made, generation_batch_size=None)
    for one in (copy.deepcopy(made), rebuilt, replaced):
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
