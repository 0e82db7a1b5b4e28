"""GRPO on completions of a llama.cpp server: a real one where `xllamacpp` is installed, and a fake one for bad weather."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import PROMPTS, tiny_model, tiny_tokenizer, tiny_trainer
from tiny_gguf import write_gguf
from trl import GRPOTrainer
from twins import trained_parameters
from weather import FakeLlama, dripping, fake_llama, truncated

import fastgrpo
from fastgrpo.rollout import json_client, llama_cpp
from fastgrpo.rollout.json_client import RolloutServerError
from fastgrpo.rollout.llama_cpp import rollout_func
from fastgrpo.rollout.policy_version import StaleRolloutError
from fastgrpo.runlog import read_run_log

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")


_SERVE = """
import sys, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.port, parameters.verbosity = 256, 4, 0, 0
parameters.warmup = False
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
# Flash attention rounds to 16 bits, which shows as 7e-4 nats.
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(parameters)
print("listens:", server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def llama_server(file: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """Url and process of llama.cpp's own HTTP server; in a process of its own, since it answers no one who stops it."""
    pytest.importorskip("xllamacpp")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    patience = threading.Timer(60, process.kill)
    patience.start()
    try:
        lines = []
        while not (lines and lines[-1].startswith("listens: ")):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        patience.cancel()
        yield lines[-1].split()[1], process
    finally:
        patience.cancel()
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("qwen3"), tiny_tokenizer())


@pytest.fixture(scope="module")
def url(gguf_file: Path) -> Iterator[str]:
    with llama_server(gguf_file) as (url, _):
        yield url


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLlama]:
    monkeypatch.setattr(json_client, "_FIRST_PAUSE_SECONDS", 0.01)
    with fake_llama(tiny_tokenizer().decode) as server:
        yield server


def logprobs_of(trainer: GRPOTrainer, prompt: list[int], completion: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / trainer.temperature, -1).gather(1, torch.tensor(completion)[:, None])[
        :, 0
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ids_and_log_probs_are_those_of_the_trainer_s_model(temperature, url, tmp_path):
    trainer = tiny_trainer(tmp_path, model="qwen3", temperature=temperature)
    output = rollout_func(url)(PROMPTS * 2, trainer)
    assert output["prompt_ids"] == trainer.processing_class(text=PROMPTS * 2)["input_ids"]
    completions = output["completion_ids"]
    assert len({tuple(row) for row in completions}) > len(PROMPTS)  # the same prompt is continued in different ways
    assert any(row[-1] == 1 for row in completions) or any(len(row) == 12 for row in completions)
    worst = 0.0
    for prompt, row, logprobs in zip(output["prompt_ids"], completions, output["logprobs"], strict=True):
        worst = max(worst, (logprobs_of(trainer, prompt, row) - torch.tensor(logprobs)).abs().max().item())
    assert worst < 1e-5, worst


def test_truncated_distributions_are_scored_as_they_were_sampled_from(url, tmp_path):
    trainer = tiny_trainer(tmp_path, model="qwen3", top_k=3, repetition_penalty=1.3, rollout_func=lambda *_: None)
    output = rollout_func(url)(PROMPTS, trainer)
    for prompt, row, logprobs in zip(output["prompt_ids"], output["completion_ids"], output["logprobs"], strict=True):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1].float()
        for position, (token, logprob) in enumerate(zip(row, logprobs, strict=True)):
            seen = torch.tensor(sorted({*prompt, *row[:position]}))
            scores = logits[position]
            scores[seen] = torch.where(scores[seen] > 0, scores[seen] / 1.3, scores[seen] * 1.3)
            best = (scores / trainer.temperature).topk(3)
            assert token in best.indices
            expected = torch.log_softmax(best.values, 0)[best.indices.tolist().index(token)]
            assert logprob == pytest.approx(expected.item(), abs=1e-5)


def test_five_steps_of_grpo_are_staler_from_step_to_step(url, tmp_path):
    sample = rollout_func(url)
    outputs = []

    def recorded(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        outputs.append(sample(prompts, trainer))
        return outputs[-1]

    trainer = tiny_trainer(tmp_path, model="qwen3", max_steps=5, rollout_func=recorded)
    before = trained_parameters(trainer)
    with fastgrpo.patch(trainer):
        scores = [logprobs_of(trainer, ids, [5]) for ids in trainer.processing_class(text=PROMPTS)["input_ids"]]
        trainer.train()
        assert torch.isfinite(torch.cat(scores)).all()
        batch = trainer._buffered_inputs[0]
        assert batch["policy_version"].tolist() == [0] * 4 and "sampling_per_token_logps" in batch
    assert any(not torch.equal(value, before[name]) for name, value in trained_parameters(trainer).items())
    record = read_run_log(tmp_path)
    assert [(line["policy_version"], line["policy_lag"], line["stale"]) for line in record.steps] == [
        (0, lag, True) for lag in range(5)
    ]
    assert all(line["time_generation"] > 0 and line["time_sync"] is None for line in record.steps)
    assert len(outputs) == 5 and len(outputs[0]["completion_ids"]) == 8
    # Sampled differently in every step, also where prompts are the same.
    assert len({str(output["completion_ids"]) for output in outputs}) == 5


def test_the_log_and_the_start_lines_name_the_server(url, tmp_path, capsys):
    trainer = tiny_trainer(tmp_path, model="qwen3", max_steps=1, rollout_func=rollout_func(url))
    with fastgrpo.patch(trainer):
        trainer.train()
    words = f"llama.cpp server {url}"
    assert read_run_log(tmp_path).run["rollout_path"] == words
    assert f"rollouts: {words}; 4 completions" in capsys.readouterr().err


def test_a_server_that_stops_in_the_middle_of_a_step_leaves_a_trainer_that_goes_on(
    gguf_file, url, tmp_path, monkeypatch
):
    monkeypatch.setattr(json_client, "_FIRST_PAUSE_SECONDS", 0.01)
    seen: list[dict[str, torch.Tensor]] = []
    answered = []
    with llama_server(gguf_file) as (mortal, process):
        sample = rollout_func(mortal, retries=1, max_in_flight=1)
        parse = llama_cpp.parse_completion

        def stopping(*args: Any) -> Any:
            answered.append(1)
            if len(answered) == 8 + 3:  # the third of the second step's
                seen.append(trained_parameters(trainer))
                process.kill()
                process.wait()
            return parse(*args)

        monkeypatch.setattr(llama_cpp, "parse_completion", stopping)
        trainer = tiny_trainer(tmp_path, model="qwen3", max_steps=2, rollout_func=sample)
        with fastgrpo.patch(trainer):
            down = rf"{mortal}: POST /completion for row 3 of 8 .*was not answered \(tried 2 times\): .*is the server running"
            with pytest.raises(RolloutServerError, match=down):
                trainer.train()
            assert trainer.state.global_step == 1
            assert all(torch.equal(value, seen[0][name]) for name, value in trained_parameters(trainer).items())
            trainer.rollout_func = rollout_func(url)
            trainer.train()
    assert trainer.state.global_step == 2


def test_a_gguf_of_another_vocabulary_is_refused_before_the_first_step(tmp_path):
    other = tiny_tokenizer()
    words = other.convert_ids_to_tokens
    other.convert_ids_to_tokens = lambda index: words(index if index < 3 else len(other) + 2 - index)
    trainer = tiny_trainer(tmp_path, model="qwen3")
    with llama_server(write_gguf(tmp_path / "other.gguf", tiny_model("qwen3"), other)) as (url, _):
        trainer.rollout_func = rollout_func(url)
        with pytest.raises(RolloutServerError, match=r"other\.gguf has another vocabulary than the trainer's"):
            trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("bad", [truncated, dripping])
def test_after_bad_weather_in_the_second_step_training_goes_on_as_if_it_had_not_been(bad, fake, tmp_path):
    def train(weather: Any) -> GRPOTrainer:
        sample = rollout_func(fake.url, timeout=0.5)

        def maybe(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
            fake.completion = weather if trainer.state.global_step == 1 else fake.good
            return sample(prompts, trainer)

        trainer = tiny_trainer(tmp_path, max_steps=2, rollout_func=maybe, reward=by_row, lr_scheduler_type="constant")
        with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="ignore", run_log=False)):
            if weather == fake.good:
                trainer.args.max_steps = 1
                trainer.train()
            else:
                with pytest.raises(RolloutServerError, match="POST /completion for row"):
                    trainer.train()
            assert trainer.state.global_step == 1
            weather = fake.good
            trainer.args.max_steps = 2
            trainer.train()
        return trainer

    broken, whole = trained_parameters(train(bad)), trained_parameters(train(fake.good))
    assert all(torch.equal(value, whole[name]) for name, value in broken.items())


def by_row(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within a group, since the fake server's completions do not."""
    return [float(index % 3) for index, _ in enumerate(completions)]


def test_a_server_that_cannot_follow_stops_a_run_that_asked_for_it(fake, tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=3, rollout_func=rollout_func(fake.url), reward=by_row)
    with (
        fastgrpo.patch(trainer, fastgrpo.Options(on_stale="error")),
        pytest.raises(StaleRolloutError, match=r"optimizer step 1 .* weights of optimizer step 0.*cannot take new"),
    ):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_second_train_samples_anew_and_knows_how_old_the_file_is(fake, tmp_path):
    def trained(sample: Any, *, evaluates: bool = False) -> tuple[GRPOTrainer, list[int]]:
        trainer = tiny_trainer(tmp_path, max_steps=2, rollout_func=sample, reward=by_row)
        with fastgrpo.patch(trainer, fastgrpo.Options(on_stale="ignore", run_log=False)):
            if evaluates:
                trainer.evaluate(Dataset.from_dict({"prompt": PROMPTS[:1] * 8}))
            fake.bodies.clear()
            trainer.train()
            trainer.train()
        return trainer, [body["seed"] for body in fake.bodies]

    trainer, seeds = trained(rollout_func(fake.url, max_in_flight=1))
    assert len(set(seeds)) == len(seeds) == 32
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [(line["rollout/policy_version"], line["rollout/policy_lag"]) for line in lines] == [(-2, 2), (-2, 3)]
    assert trained(rollout_func(fake.url, max_in_flight=1), evaluates=True)[1] == seeds


def test_ctrl_c_while_completions_are_awaited_ends_them(fake, tmp_path, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> Any:
        time.sleep(0.1)
        raise KeyboardInterrupt

    fake.completion = lambda handler, body: time.sleep(0.5)
    monkeypatch.setattr("fastgrpo.rollout.llama_cpp.wait", interrupted)
    trainer = tiny_trainer(tmp_path, max_steps=1, rollout_func=rollout_func(fake.url))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(fake.bodies) <= 3 and time.monotonic() - began < 30
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastgrpo-llama-cpp")]
