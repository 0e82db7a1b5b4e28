"""A trainer whose completions come from a sampler of its own numerics, as vLLM's do, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

EOS = 1


class FakeSampler:
    """Stands for `trainer.vllm_generation`: scripted tokens, and the policy's log-probs of them but for some noise."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.running = trainer, False

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[None, list[list[int]], list[list[list[Any]]], None]:
        trainer = self.trainer
        seed = 100 * trainer.state.global_step + trainer._step + 7 * trainer.accelerator.process_index
        generator = torch.Generator().manual_seed(seed)
        completions, logprobs = [], []
        self.running = True
        training = trainer.model.training
        trainer.model.eval()
        for prompt in prompts:
            length = int(torch.randint(1, trainer.max_completion_length, (), generator=generator))
            completion = [*torch.randint(2, 45, (length,), generator=generator).tolist(), EOS]
            with torch.no_grad():
                logits = trainer.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            log_p = (logits.float() / trainer.temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])
            noisy = log_p[:, 0] + 0.2 * torch.randn(len(completion), generator=generator)
            completions.append(completion)
            # vLLM has none where its own is NaN.
            logprobs.append([[None if i == 3 else value] for i, value in enumerate(noisy.tolist())])
        trainer.model.train(training)
        self.running = False
        return None, completions, logprobs, None


class SampledTrainer(GRPOTrainer):
    """A trainer that takes its completions from a `FakeSampler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_vllm, self.vllm_generation, self._last_loaded_step = True, FakeSampler(self), -1


@contextmanager
def policy_forwards(trainer: GRPOTrainer) -> Iterator[list[tuple[bool, bool]]]:
    """(in training, with gradient) of every forward of the policy but the sampler's."""
    seen: list[tuple[bool, bool]] = []

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        sampler = getattr(trainer, "vllm_generation", None)
        if (sampler is None or not sampler.running) and "past_key_values" not in kwargs:
            seen.append((module.training, torch.is_grad_enabled()))

    hook = trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def fake_vllm() -> Iterator[list[VLLMGeneration]]:
    """Trainers with `use_vllm` are built and trained without vLLM: yields the stand-ins for its engine, as TRL sets them up."""
    made: list[VLLMGeneration] = []

    def init(engine: VLLMGeneration) -> None:
        made.append(engine)
        engine.vllm_client = engine
        engine.state, engine._step = SimpleNamespace(global_step=0), 0
        engine.sampler = FakeSampler(engine)
        engine.get_server_info = lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(engine: VLLMGeneration, prompts: list[list[int]], **_: Any) -> Any:
        engine._step += 1
        return engine.sampler.generate(prompts)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("fastgrpo.rollout.vllm.vllm_version", lambda: "0.25.0")  # in range of every TRL
        monkeypatch.setattr(VLLMGeneration, "_init_vllm", init)
        monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda engine: None)
        monkeypatch.setattr(VLLMGeneration, "generate", generate)
        yield made
