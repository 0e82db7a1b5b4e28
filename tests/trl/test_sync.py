"""How weights reach vLLM, without vLLM: what is chosen, refused and said. tests/vllm_engine has the real engine."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tiny_trainer
from trl import GRPOConfig
from trl.generation.vllm_generation import VLLMGeneration

import fastgrpo
import fastgrpo.rollout.vllm as engine
import fastgrpo.trl.engine as fitted
import fastgrpo.trl.sync as sync
from fastgrpo.trl.compat import UnsupportedError
from fastgrpo.versions import installed_version

RANGES = {"1.12": ("0.19.0", "0.27.1"), "1.14": ("0.20.0", "0.30.0"), "1.16": ("0.22.0", "0.31.0")}


def test_supported_range_is_the_one_of_the_installed_trl():
    low, high = RANGES[".".join(installed_version("trl").split(".")[:2])]
    supported = engine.supported_range()
    assert Version(low) in supported and Version(high) in supported
    assert Version("0.18.5") not in supported and Version("0.32.0") not in supported


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (None, "needs vLLM, which is not installed"),
        ("0.18.0", "vllm 0.18.0 is installed"),
        ("1.0", "vllm 1.0 is installed"),
    ],
)
def test_missing_or_unsupported_vllm_is_refused_before_anything_is_loaded(monkeypatch, tmp_path, installed, words):
    monkeypatch.setattr(engine, "vllm_version", lambda: installed)
    args = GRPOConfig(output_dir=str(tmp_path), use_vllm=True, use_cpu=True, bf16=False)
    range_and_remedy = r'pip install "vllm>=0\.\d+\.0,<=0\.\d+\.\d"'
    with pytest.raises(UnsupportedError, match=range_and_remedy) as refused, fitted.fitted_engine(args, "auto"):
        raise AssertionError("a trainer would be built here")
    assert words in str(refused.value)
    with fitted.fitted_engine(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False), "auto"):
        pass


def test_a_local_version_is_in_range_as_its_release_is(monkeypatch):
    high = RANGES[".".join(installed_version("trl").split(".")[:2])][1]
    monkeypatch.setattr(engine, "vllm_version", lambda: f"{high}+cu129")
    assert engine.version_obstacle() == ""


def test_trls_engine_is_the_text_that_is_followed():
    for method, _ in sync._KNOWN_SOURCES.items():
        assert inspect.getsource(getattr(VLLMGeneration, method))
    assert sync._unknown_engine(object.__new__(VLLMGeneration)) == ""
    other = type("Other", (VLLMGeneration,), {"generate": VLLMGeneration.sync_weights})
    assert "Other.generate" in sync._unknown_engine(object.__new__(other))


def test_ways_into_vllm_are_refused_without_it_and_auto_is_silent(tmp_path):
    trainer = tiny_trainer(tmp_path)
    for way in ("merged", "adapter"):
        with pytest.raises(UnsupportedError, match=f"sync='{way}' is a way into TRL's vLLM engine, which this trainer"):
            fastgrpo.patch(trainer, fastgrpo.Options(sync=way))
    with fastgrpo.patch(trainer) as handle:
        assert handle.sync is None and "weight sync" not in fastgrpo.backends()
    with pytest.raises(ValueError, match="sync is 'fast'; choose one of 'auto', 'merged', 'adapter', 'trl'"):
        fastgrpo.Options(sync="fast")


@pytest.mark.parametrize("url", [None, "http://localhost:8000"])
def test_one_gpu_for_server_and_full_training_is_an_error_that_names_colocate(monkeypatch, tmp_path, url):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("0000:01:00.0")]))
    generation = SimpleNamespace(
        server_base_url=url,
        server_host="0.0.0.0",
        server_port=8000,
        accelerator=SimpleNamespace(device=SimpleNamespace(type="cuda")),
    )
    with pytest.raises(UnsupportedError, match="vllm_mode='colocate'"):
        fitted._refuse_one_gpu(generation)
    generation.server_base_url = "http://elsewhere:8000"
    fitted._refuse_one_gpu(generation)


def test_an_engine_that_packs_its_weights_is_named(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.weight.data = torch.empty(0)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))
    llm = SimpleNamespace(llm_engine=llm_engine)
    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(llm=llm))
    assert "packs its weights" in sync._merged_obstacle(trainer, colocate=True, peft=False, engine_runs_lora=False)
    model.weight.data = torch.zeros(2, 2)
    assert sync._merged_obstacle(trainer, colocate=True, peft=False, engine_runs_lora=False) == ""


def test_the_adapter_an_engine_read_last_stays_until_the_next_and_one_it_could_not_read_goes(tmp_path):
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(r=2, target_modules=["q_proj"]))
    folder = sync.AdapterFolder(tmp_path / "adapters")
    first = folder.write(model, "1")
    with folder.kept_if_read("1"):
        pass
    broken = folder.write(model, "2")
    with pytest.raises(KeyboardInterrupt), folder.kept_if_read("2"):
        raise KeyboardInterrupt
    assert first.exists() and not broken.exists()
    second = folder.write(model, "3")
    with folder.kept_if_read("3"):
        assert first.exists()
    assert second.exists() and not first.exists()
    folder.remove()
    assert not list((tmp_path / "adapters").iterdir())
