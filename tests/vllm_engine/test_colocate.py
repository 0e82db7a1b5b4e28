"""Weights into a vLLM engine of this process: after every step it is the trainer's model, and the trainer is untouched."""

from __future__ import annotations

import time

import pytest
import torch
from cpu_engine import (
    TARGETS,
    after_every_sync,
    base_weights,
    engine_logprobs,
    lora,
    save_tiny_model,
    share_engines,
    trainer_logprobs,
    vllm_trainer,
    worst_difference,
)

import fastgrpo
import fastgrpo.trl.sync as sync_module
from fastgrpo.rollout.vllm import engine_model
from fastgrpo.rollout.weights import engine_parameters, engine_weights

LIMIT = 5e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    share_engines(monkeypatch)


def timed(trainer, seconds):
    sync = trainer.vllm_generation.sync_weights

    def synced():
        began = time.perf_counter()
        sync()
        seconds.append(time.perf_counter() - began)

    trainer.vllm_generation.sync_weights = synced


@pytest.mark.parametrize("adapter", [lora(), None], ids=["LoRA", "in full"])
def test_engine_equals_trainer_after_every_step_as_with_stock_trl(model, tmp_path, adapter):
    logs, seconds = {}, {"stock": [], "patched": []}
    for kind in ("stock", "patched"):
        trainer = vllm_trainer(model, tmp_path / kind, adapter)
        if kind == "patched":
            handle = fastgrpo.patch(trainer, fastgrpo.Options(run_log=False))
            assert handle.sync.route == "merged" and not handle.slow_sync_because
        before = base_weights(trainer)
        timed(trainer, seconds[kind])
        differences = after_every_sync(trainer, lambda trainer=trainer: worst_difference(trainer))
        torch.manual_seed(7)  # the engine samples from it
        trainer.train()
        assert len(differences) == 10
        assert max(differences) < LIMIT, f"{kind}: {differences}"
        if adapter is not None and kind == "patched":
            assert all(torch.equal(weight, before[name]) for name, weight in base_weights(trainer).items())
        logs[kind] = [entry for entry in trainer.state.log_history if "loss" in entry]
        if kind == "patched":
            versions = [(entry["rollout/policy_version"], entry["rollout/policy_lag"]) for entry in logs[kind]]
            assert versions == [(step, 0) for step in range(10)]
            assert all(entry["time/sync"] > 0 and entry["time/generation"] > 0 for entry in logs[kind])
    for stock, patched in zip(logs["stock"], logs["patched"], strict=True):
        assert patched["loss"] == pytest.approx(stock["loss"], abs=1e-4), (stock, patched)
        assert patched["reward"] == stock["reward"]
    print({kind: f"median sync {sorted(times)[len(times) // 2] * 1e3:.1f} ms" for kind, times in seconds.items()})


def test_trainer_is_never_merged(model, tmp_path, monkeypatch):
    trainer = vllm_trainer(model, tmp_path, lora(), max_steps=2)

    def merged(*_, **__):
        raise AssertionError("merge_adapter was called")

    monkeypatch.setattr(type(trainer.model), "merge_adapter", merged, raising=False)
    monkeypatch.setattr(trainer.model.base_model, "merge_adapter", merged, raising=False)
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)):
        trainer.train()
    with pytest.raises(AssertionError, match="merge_adapter was called"):
        trainer.vllm_generation.sync_weights()


def write(trainer, change=lambda name, weight: weight):
    """Hands over what a later sync would, changed, through vLLM's own loader."""
    parameters = engine_parameters(trainer.model, trainer.vllm_generation._fix_param_name_to_vllm)
    changed = [(name, change(name, weight)) for name, weight in engine_weights(parameters, everything=False)]
    engine_model(trainer.vllm_generation.llm).load_weights(changed)


def test_every_matrix_under_lora_is_written_and_one_that_is_zeroed_or_left_out_is_seen(model, tmp_path):
    trainer = vllm_trainer(model, tmp_path, lora())
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)) as handle:
        trainer.vllm_generation.sync_weights()
        assert worst_difference(trainer) < LIMIT
        handle.sync.write.load = None  # from now on nothing goes through vLLM's loader, whose copies are known
        for part in (f"{'self_attn' if target[0] in 'qkvo' else 'mlp'}.{target}" for target in TARGETS):
            write(trainer, lambda name, weight, zeroed=f"1.{part}": weight * (zeroed not in name))
            assert worst_difference(trainer) > LIMIT, part
            write(trainer)
            assert worst_difference(trainer) < LIMIT, part
        for name, parameter in trainer.model.named_parameters():
            if "layers.1" in name and "lora_B" in name:
                parameter.data.mul_(3)
                assert worst_difference(trainer) > LIMIT, name
                handle.sync()
                assert worst_difference(trainer) < LIMIT, name


def test_exception_in_the_middle_of_a_write_leaves_trainer_and_engine_usable(model, tmp_path, monkeypatch):
    trainer = vllm_trainer(model, tmp_path, lora(), max_steps=3)
    before = base_weights(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)):
        trainer.vllm_generation.sync_weights()

        def breaks(*args, **kwargs):
            for index, item in enumerate(engine_weights(*args, **kwargs)):
                if index == 5:
                    raise KeyboardInterrupt
                yield item

        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(2)
        with monkeypatch.context() as broken:
            broken.setattr(sync_module, "engine_weights", breaks)
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        assert all(torch.equal(weight, before[name]) for name, weight in base_weights(trainer).items())
        differences = after_every_sync(trainer, lambda: worst_difference(trainer))
        trainer.train()
        assert len(differences) == 3 and max(differences) < LIMIT


def test_weights_that_something_else_changed_travel_with_the_next_train(model, tmp_path):
    trainer = vllm_trainer(model, tmp_path, lora(), max_steps=1)
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)):
        trainer.train()
        with torch.no_grad():
            trainer.model.get_input_embeddings().weight.add_(0.05)
        differences = after_every_sync(trainer, lambda: worst_difference(trainer))
        trainer.train()
        assert max(differences) < LIMIT


def test_cached_prefixes_of_old_weights_are_forgotten(model, tmp_path):
    trainer = vllm_trainer(model, tmp_path, lora(), prompts=["12 + 13 = " * 30, "7 - 3 = " * 40], max_steps=4)
    llm = trainer.vllm_generation.llm
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)):
        trainer.train()
    worst = [entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history if "loss" in entry]
    assert max(worst) < LIMIT, worst
    assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching


def test_unpatched_trainer_is_as_it_was(model, tmp_path):
    trainer = vllm_trainer(model, tmp_path, lora(), max_steps=2)
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)):
        trainer.train()
    assert "sync_weights" not in vars(trainer.vllm_generation) and "generate" not in vars(trainer.vllm_generation.llm)
    trainer.vllm_generation.sync_weights()
    assert worst_difference(trainer) < LIMIT


def test_merged_write_knows_rank_stabilised_scaling_patterns_and_untied_heads(tmp_path):
    config = lora(
        use_rslora=True, rank_pattern={"q_proj": 8}, alpha_pattern={"up_proj": 16}, target_modules=TARGETS[:6]
    )
    trainer = vllm_trainer(save_tiny_model(tmp_path / "model", tied=False), tmp_path, config)
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)):
        trainer.vllm_generation.sync_weights()
        assert worst_difference(trainer) < LIMIT


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 8}}], ids=["plain", "patterns"]
)
def test_adapter_as_lora_request_is_the_trainer_after_every_step(model, tmp_path, changes):
    trainer = adapter_trainer(model, tmp_path, lora(**changes), max_steps=4)
    before = base_weights(trainer)
    assert fastgrpo.backends()["weight sync"].implementation == "the adapter as a LoRARequest"
    differences = after_every_sync(trainer, lambda: worst_difference(trainer))
    trainer.train()
    assert len(differences) == 4 and max(differences) < LIMIT, differences
    assert all(torch.equal(weight, before[name]) for name, weight in base_weights(trainer).items())
    assert len(trainer.vllm_generation.llm.llm_engine.list_loras()) == 1
    fastgrpo.unpatch(trainer)
    assert "generate" not in vars(trainer.vllm_generation.llm)


def adapter_trainer(model, output, adapter, **config):
    fastgrpo.patch_trl(tuned_defaults=False)
    try:
        return vllm_trainer(model, output, adapter, fastgrpo_sync="adapter", fastgrpo_run_log=False, **config)
    finally:
        fastgrpo.unpatch_trl()


def test_engine_without_lora_cannot_take_an_adapter_and_says_why(model, tmp_path):
    trainer = vllm_trainer(model, tmp_path, lora())
    with pytest.raises(
        fastgrpo.UnsupportedError, match="sync='adapter' is not possible: the engine was built without LoRA"
    ):
        fastgrpo.patch(trainer, fastgrpo.Options(sync="adapter"))
    assert "sync_weights" not in vars(trainer.vllm_generation)
    full = vllm_trainer(model, tmp_path)
    with pytest.raises(fastgrpo.UnsupportedError, match="trained in full"):
        fastgrpo.patch(full, fastgrpo.Options(sync="adapter"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "trains biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": [*TARGETS, "embed_tokens"]}, "embed_tokens"),
    ],
)
def test_what_cannot_be_merged_out_of_place_goes_trls_way_and_says_so(tmp_path, caplog, changes, reason):
    trainer = vllm_trainer(save_tiny_model(tmp_path / "model", tied=False), tmp_path, lora(**changes), max_steps=1)
    with fastgrpo.patch(trainer, fastgrpo.Options(run_log=False)) as handle:
        assert handle.sync.route == "trl" and reason in handle.slow_sync_because
        assert reason in fastgrpo.backends()["weight sync"].reason
        assert reason in caplog.text
        trainer.vllm_generation.sync_weights()
        assert (engine_logprobs(trainer) - trainer_logprobs(trainer)).abs().max() < LIMIT
    with pytest.raises(fastgrpo.UnsupportedError, match="sync='merged' is not possible"):
        fastgrpo.patch(trainer, fastgrpo.Options(sync="merged"))
