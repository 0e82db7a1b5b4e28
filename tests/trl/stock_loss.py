"""TRL's own loss and its own sampler ratio on tensors of the test's choice: TRL's code, no model, no generation."""

from __future__ import annotations

from collections import defaultdict
from math import isnan
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

_COPIED_FROM_ARGS = (
    "beta",
    "entropy_coef",
    "importance_sampling_level",
    "loss_type",
    "mask_truncated_completions",
    "max_completion_length",
    "multi_objective_aggregation",
    "num_generations",
    "num_iterations",
    "off_policy_mask_threshold",
    "pad_to_multiple_of",
    "scale_rewards",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_vllm",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)
_PAD = 0


def stock_config(**options: Any) -> GRPOConfig:
    """A GRPOConfig for a CPU; the batch size only has to satisfy TRL's check on generation groups."""
    settings = {
        "output_dir": "unused",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        **options,
    }
    return GRPOConfig(**settings)


class _Accelerator(Accelerator):
    """A single-process accelerator that can be told to count more processes; accelerate's own state stays as it is."""

    num_processes = 1


class StockTrainer(GRPOTrainer):
    """
    A GRPOTrainer in the state that `GRPOTrainer.__init__` leaves for its loss, built without model, data or optimizer.

    Args:
        args: a real configuration.
        training: False evaluates.
        num_processes: data-parallel processes that the normaliser counts; reductions stay in this process.
        router_aux_loss_coef: above 0 the model counts as a mixture of experts.
    """

    def __init__(
        self, args: GRPOConfig, *, training: bool = True, num_processes: int = 1, router_aux_loss_coef: float = 0.0
    ) -> None:
        # Building a GRPOConfig resets accelerate's shared state, so the accelerator must come after it.
        self.args = args
        self.accelerator = _Accelerator(cpu=True)
        self.accelerator.num_processes = num_processes
        self.model = torch.nn.Identity().train(training)
        self.model.is_gradient_checkpointing = False
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        for name in _COPIED_FROM_ARGS:
            setattr(self, name, getattr(args, name))
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        self.router_aux_loss_coef = router_aux_loss_coef
        self.aux_loss_enabled = router_aux_loss_coef != 0.0
        self._entropy_bonus_enabled = self.entropy_coef != 0.0 or self.use_adaptive_entropy
        self._last_world_entropy = float("inf")
        self._entropy_window_stats = None
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._scores: tuple[Tensor, Tensor | None, Tensor | None] | None = None

    def _get_per_token_logps_and_entropies(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self._scores

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    def loss(
        self, logprobs: Tensor, entropy: Tensor, completion_mask: Tensor, aux_loss: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """
        `GRPOTrainer._compute_loss` on given scores.

        Args:
            logprobs, entropy: `[B, T]`, what TRL's scoring method would return.
            completion_mask: `[B, T]` int.
            aux_loss: 0-d load-balancing loss.
            inputs: the other entries of the micro-batch under TRL's names.

        Returns:
            The loss, and the metrics that this call appended.
        """
        self._scores = (logprobs, entropy, aux_loss)
        self._metrics[self.mode].clear()
        ids = torch.zeros_like(completion_mask)
        batch = {
            "prompt_ids": ids[:, :0],
            "prompt_mask": ids[:, :0],
            "completion_ids": ids,
            "completion_mask": completion_mask,
            **inputs,
        }
        loss = self._compute_loss(self.model, batch)
        metrics = self._metrics[self.mode]
        assert all(len(values) == 1 for values in metrics.values())
        return loss, {name: values[0] for name, values in metrics.items()}

    def scored_completions(
        self, old_logprobs: Tensor, sampling_logprobs: Tensor, lengths: list[int], tool_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """
        `GRPOTrainer._generate_and_score_completions` on completions as a vLLM server would have returned them.

        Args:
            old_logprobs, sampling_logprobs: `[B, T]`; a NaN of the sampler is a token it could not score.
            lengths: tokens of each completion, the longest one `T`.
            tool_mask: `[B, T]` int, 0 on tokens that a tool wrote.

        Returns:
            The generation batch, with `importance_sampling_ratio` and `num_items_in_batch`.
        """
        rows = range(len(lengths))
        sampled = [[None if isnan(x) else x for x in sampling_logprobs[i, : lengths[i]].tolist()] for i in rows]
        tools = None if tool_mask is None else [tool_mask[i, : lengths[i]].tolist() for i in rows]
        generated = (
            [[1]] * len(lengths),
            [[1] * n for n in lengths],
            tools,
            [""] * len(lengths),
            sampled,
            {},
            None,
            None,
        )
        self._generate = lambda prompts: generated
        self._calculate_rewards = lambda *args: torch.arange(len(lengths), dtype=torch.float32).unsqueeze(1)
        self._scores = (old_logprobs, None, None)
        self._tokenizer = type("Tokenizer", (), {"pad_token_id": _PAD})
        # TRL 1.12 to 1.14 decode what the sampler returned, for the log.
        self.processing_class = type("Decoder", (), {"batch_decode": lambda self, ids, **_: [""] * len(ids)})()
        self.environment_factories = self.environments = self.tools = self.ref_model = None
        self.reward_funcs, self.reward_func_names, self.reward_weights = [None], ["reward"], torch.ones(1)
        self.log_multimodal = False
        self._pending_extra_logs, self._pending_metrics = {}, {}
        self._logs = {"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": [], "extra": {}}
        return self._generate_and_score_completions([{"prompt": ""} for _ in lengths])
