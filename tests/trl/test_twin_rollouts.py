"""Patched equals stock whatever a rollout looks like: tools, environments, end tokens inside, masked or tiny completions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import PROMPTS, tiny_tokenizer
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer
from twins import twins

EOS = 1


def count(n: int) -> str:
    """
    Counts.

    Args:
        n: how far.

    Returns:
        The numbers from 1 to n.
    """
    return "".join(map(str, range(1, n + 1)))


class Counter:
    """An environment with one tool."""

    def reset(self, **_: Any) -> None:
        self.calls = 0

    def count(self, n: int) -> str:
        """
        Counts on from the last call.

        Args:
            n: how far.

        Returns:
            The numbers from 1 to n, and the number of calls.
        """
        self.calls += 1
        return f"{count(n)}={self.calls}"


class ToolTokenizer(PreTrainedTokenizerFast):
    """Reads a tool call out of every other response, whatever it says: a random model calls nothing."""

    def parse_response(self, response: list[int], *_: Any, **__: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.decode(response, skip_special_tokens=True)}
        if sum(response) % 2:
            function = {"name": "count", "arguments": {"n": 1 + len(response) % 4}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message


class ShortTurns(GRPOTrainer):
    """Cuts a turn after two to six tokens, so that tool results fit, and ends it."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        rows, logprobs = super()._generate_single_turn(*args, **kwargs)
        return [[token for token in row[: 2 + sum(row) % 5] if token != EOS] + [EOS] for row in rows], logprobs


def tool_settings(pad_is_eos: bool) -> dict[str, Any]:
    tokenizer = tiny_tokenizer(pad_is_eos, tokenizer_class=ToolTokenizer)
    tokenizer.response_template = {"parsed by": "the class"}
    return {
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]}),
        "trainer_class": ShortTurns,
        "max_completion_length": 40,
        "max_tool_calling_iterations": 2,
    }


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
@pytest.mark.parametrize(
    ("source", "config"),
    [
        ({"tools": [count]}, {}),
        ({"tools": [count]}, {"lora": False, "num_iterations": 2, "beta": 0.0, "top_entropy_quantile": 0.5}),
        ({"environment_factory": Counter}, {"entropy_coef": 0.05}),
    ],
    ids=["tools", "tools, full, replayed", "environment"],
)
def test_tool_results_are_masked_and_their_turns_end_inside_the_row(source, config, tmp_path):
    # The pad token is the end token, so ids look like padding in the middle of a completion.
    stock, _ = twins(tmp_path, **tool_settings(pad_is_eos=True), **source, **config)
    assert any(line.get("tools/call_frequency", 0) > 0 for line in stock.state.log_history)
    assert not any(line.get("tools/failure_frequency", 0) > 0 for line in stock.state.log_history)
    batches = stock._buffered_inputs
    assert any((batch["tool_mask"] == 0).any() for batch in batches)
    assert any(
        ((batch["completion_ids"] == EOS) & (batch["completion_mask"] == 1)).sum(1).max() > 1 for batch in batches
    )


def scripted_rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[list[Any]]]:
    """Rows of any tokens, pad and end among them, with feedback of an environment in between; the same every time."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
    completions, logprobs, masks = [], [], []
    for index, _ in enumerate(prompts):
        length = 1 + int(torch.randint(0, 10, (), generator=generator)) if index else 1
        completions.append(torch.randint(0, 45, (length,), generator=generator).tolist())
        logprobs.append((-3 * torch.rand(length, generator=generator)).tolist())
        masks.append([int(position % 4 != 1) for position in range(length)])
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("config", [{}, {"off_policy_mask_threshold": 0.5, "num_iterations": 2, "lora": False}])
def test_rollouts_of_the_user_s_own_with_pads_inside_and_a_mask(config, tmp_path):
    stock, _ = twins(tmp_path, rollout_func=scripted_rollout, pad_is_eos=True, learning_rate=0.1, **config)
    assert any((batch["tool_mask"] == 0).any() for batch in stock._buffered_inputs)


class NeverEnds(GRPOTrainer):
    """The first generation has no end token, so with mask_truncated_completions nothing of it counts."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        rows, logprobs = super()._generate_single_turn(*args, **kwargs)
        if self._step == 0:
            rows = [[token if token != EOS else 5 for token in row] for row in rows]
        return rows, logprobs


@pytest.mark.parametrize("lora", [True, False])
def test_a_step_whose_completions_are_all_masked_changes_nothing(lora, tmp_path):
    settings = {"trainer_class": NeverEnds, "mask_truncated_completions": True, "lora": lora}
    stock, _ = twins(tmp_path, **settings)
    first, *rest = [line for line in stock.state.log_history if "grad_norm" in line]
    assert first["grad_norm"] == 0 and any(line["grad_norm"] > 0 for line in rest)


class PerToken(GRPOTrainer):
    """Advantages of `[B, T]`, which TRL allows subclasses, and the first row's completion taken away."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        slope = torch.linspace(1.0, 0.5, batch["completion_mask"].shape[1])
        batch["advantages"] = batch["advantages"].unsqueeze(1) * slope
        batch["completion_mask"][0] = 0
        return batch


def test_a_subclass_with_advantages_of_its_own_and_an_empty_completion(tmp_path):
    twins(tmp_path, trainer_class=PerToken)


@pytest.mark.parametrize("config", [{"pad_is_eos": True}, {"lora": False, "beta": 0.04, "model": "saved"}])
def test_a_batch_of_completions_of_one_token_each(config, tmp_path):
    stock, _ = twins(tmp_path, max_completion_length=1, max_steps=3, **config)
    assert stock._buffered_inputs[0]["completion_ids"].shape[1] == 1
