"""A head that trains: three products in one pass, and everything else as TRL computes it."""

from __future__ import annotations

import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from products import head_products
from sampler import SampledTrainer
from test_twin_rollouts import NeverEnds, scripted_rollout
from tiny import no_two_equal, tiny_trainer
from trl import GRPOTrainer
from twins import assert_twins, run

import fastgrpo
from fastgrpo.chunking import ChunkPlan
from fastgrpo.kernels import reference
from fastgrpo.kernels.backends import Backend
from fastgrpo.objective import RowTerms
from fastgrpo.trl.fused import FusedLoss, attached
from fastgrpo.trl.heads import HeadCall
from fastgrpo.trl.loss import LossPass

PRODUCTS = ("project", "back_project", "add_weight_grad")
HEAD_COPY = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])


@pytest.fixture
def products(monkeypatch) -> list[tuple[str, int]]:
    """(which product of the head, its rows), with gradient only."""
    seen: list[tuple[str, int]] = []
    for name in PRODUCTS:
        original = getattr(reference, name)

        def counting(*args: Any, name: str = name, original: Any = original) -> Any:
            seen.append((name, args[1 if name == "add_weight_grad" else 0].shape[0]))
            return original(*args)

        monkeypatch.setattr(reference, name, counting)
    return seen


def compared(folder: Path, products: list[tuple[str, int]], options: Any = None, **settings: Any) -> Counter:
    """The products of the head in a patched training that equals stock training; statistics alone are not counted."""
    settings = {"lora": False, "max_steps": 2, "reward": no_two_equal, **settings}
    stock, before = run(folder, patched=False, **settings)
    patched, _ = run(folder, patched=True, options=options, then=products.clear, **settings)
    assert_twins(stock, patched, before)
    assert any(line.get("grad_norm", 0) > 0 for line in stock.state.log_history)
    return Counter(name for name, _ in products)


FUSED: dict[str, dict[str, Any]] = {
    "no padding": {},
    "left-packed": {"options": {"packing": "left"}},
    "as TRL pads": {"options": {"packing": "none"}},
    "tied": {"model": "qwen2 tied"},
    "bias": {"model": "phi bias"},
    "softcap": {"model": "gemma2 softcap"},
    "copy of the head": {"lora": HEAD_COPY},
    "grpo, three micro-batches": {"loss_type": "grpo", "gradient_accumulation_steps": 3},
    "dr_grpo, two-sided clipping": {"loss_type": "dr_grpo", "delta": 1.5},
    "luspo, sequence level": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "vespo": {"loss_type": "vespo"},
}


@pytest.mark.parametrize("case", FUSED)
def test_on_policy_a_micro_batch_takes_three_products(case, products, tmp_path):
    settings = dict(FUSED[case])
    counts = compared(tmp_path, products, settings.pop("options", None), **settings)
    steps = 2 * settings.get("gradient_accumulation_steps", 2)
    assert counts == dict.fromkeys(PRODUCTS, steps)
    assert fastgrpo.backends()["trainer loss"] == Backend("in one pass with its gradients", "cpu", "")


def test_every_counted_token_is_in_each_product_once_and_no_other(products, tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, max_steps=1, gradient_accumulation_steps=1, reward=no_two_equal)
    fastgrpo.patch(trainer)
    products.clear()
    trainer.train()
    tokens = int(trainer._buffered_inputs[0]["completion_mask"].sum())
    assert products == [(name, tokens) for name in PRODUCTS]


def test_every_product_with_the_head_is_counted_not_those_of_its_kernels_alone(tmp_path):
    trainer = tiny_trainer(tmp_path, model="wide head", lora=False, max_steps=2, reward=no_two_equal)
    with head_products(trainer, words=1984) as stock:
        trainer.train()
    trainer = tiny_trainer(tmp_path, model="wide head", lora=False, max_steps=2, reward=no_two_equal)
    with fastgrpo.patch(trainer), head_products(trainer, words=1984) as counts:
        trainer.train()
    # Of full logits, as TRL 1.12 has them, stock takes three too; in chunks four.
    assert counts == [3] * 4 and len(stock) == 4 and min(stock) >= 3


@pytest.mark.parametrize(
    "settings",
    [
        {"max_completion_length": np.int64(8)},
        {"use_bias_correction_kl": 1},
        {"max_completion_length": np.int64(8), "loss_type": "dr_grpo"},
    ],
    ids=["a length of numpy's", "a number for a flag", "a length that divides"],
)
def test_what_trl_takes_for_a_number_or_a_flag_changes_no_way(settings, products, tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, max_steps=1, reward=no_two_equal, **settings)
    fastgrpo.patch(trainer)
    products.clear()
    trainer.train()
    assert Counter(name for name, _ in products) == dict.fromkeys(PRODUCTS, 2)


OFF_POLICY: dict[str, dict[str, Any]] = {
    "replayed, reference": {"num_iterations": 2, "beta": 0.04, "model": "saved"},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    "a sampler's ratios, known beforehand": {
        "trainer_class": SampledTrainer,
        "steps_per_generation": 4,
        "vllm_importance_sampling_mode": "token_truncate",
    },
}


@pytest.mark.parametrize("case", OFF_POLICY)
def test_so_it_does_off_policy_at_token_level(case, products, tmp_path):
    counts = compared(tmp_path, products, max_steps=4, **OFF_POLICY[case])
    assert counts["back_project"] == counts["add_weight_grad"] == 8
    assert fastgrpo.backends()["trainer loss"].reason == ""


WITH_A_GRAPH: dict[str, tuple[dict[str, Any], str]] = {
    "entropy bonus": ({"entropy_coef": 0.05}, "the entropy bonus needs entropies with a gradient"),
    "entropy quantile": ({"top_entropy_quantile": 0.5}, "top_entropy_quantile ranks"),
    "off-policy mask": ({"off_policy_mask_threshold": 0.01}, "off_policy_mask_threshold sums over sequences"),
    "sequence level": (
        {"importance_sampling_level": "sequence", "num_iterations": 2},
        "importance_sampling_level='sequence' sums over sequences first where",
    ),
    "vespo": ({"loss_type": "vespo", "num_iterations": 2}, "loss_type='vespo' sums over sequences first where"),
    "a sampler": ({"trainer_class": SampledTrainer}, "the sampler's ratio is made of the log-probs of this pass"),
    "parts": ({"options": {"mini_batch_size": 2}}, "a micro-batch in parts"),
}


@pytest.mark.parametrize("case", WITH_A_GRAPH)
def test_where_a_token_s_coefficient_depends_on_other_tokens_the_logits_are_computed_twice(case, products, tmp_path):
    settings, reason = WITH_A_GRAPH[case]
    settings = {"max_steps": 1, "reward": no_two_equal, **settings}
    trainer = tiny_trainer(tmp_path, lora=False, **{k: v for k, v in settings.items() if k != "options"})
    fastgrpo.patch(trainer, fastgrpo.Options(**settings.get("options", {})))
    products.clear()
    trainer.train()
    counts = Counter(name for name, _ in products)
    assert counts["project"] >= 2 * counts["add_weight_grad"] > 0
    assert fastgrpo.backends()["trainer loss"].reason.startswith(reason)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize(("lora", "packing"), [(False, "varlen"), (True, "varlen"), (True, "left"), (True, "none")])
def test_tokens_of_an_environment_are_not_computed(lora, packing, products, tmp_path):
    settings = {"rollout_func": scripted_rollout, "pad_is_eos": True, "lora": lora, "max_steps": 1}
    trainer = tiny_trainer(tmp_path, gradient_accumulation_steps=1, reward=no_two_equal, **settings)
    fastgrpo.patch(trainer, fastgrpo.Options(packing=packing))
    products.clear()
    trainer.train()
    batch = trainer._buffered_inputs[0]
    counted = int((batch["completion_mask"] * batch["tool_mask"]).sum())
    assert products == [(name, counted) for name in (PRODUCTS[:2] if lora else PRODUCTS)]
    assert counted < int(batch["completion_mask"].sum())


def test_a_micro_batch_without_a_counted_token_gives_a_differentiable_zero(products, tmp_path):
    counts = compared(tmp_path, products, max_steps=3, trainer_class=NeverEnds, mask_truncated_completions=True)
    assert counts["add_weight_grad"] < 6


@pytest.mark.parametrize("packing", ["varlen", "left", "none"])
def test_with_rows_left_out_the_normalisers_stay(packing, tmp_path):
    def few(completions: list[str], **_: Any) -> list[float]:
        return [1.0 if "a" in text else 0.0 for text in completions]

    settings = {"lora": False, "reward": few, "loss_type": "grpo", "max_steps": 3}
    trainers = []
    for options in ({"packing": packing}, {"packing": packing, "skip_zero_advantage": True}):
        trainer, before = run(tmp_path, patched=True, options=options, **settings)
        trainers.append(trainer)
    for name, value in before.items():
        whole, less = (dict(trainer.model.named_parameters())[name] for trainer in trainers)
        assert (whole - less).abs().max() <= 1e-4 * (whole - value).abs().max() + 1e-7, name


class OwnWeights(GRPOTrainer):
    """Changes what TRL's loss computes from inside."""

    @staticmethod
    def get_gamma_weights(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 1.5 * GRPOTrainer.get_gamma_weights(*args, **kwargs)


def test_where_the_values_disagree_trl_s_loss_is_differentiated_from_the_first_step_on(products, caplog, tmp_path):
    counts = compared(tmp_path, products, trainer_class=OwnWeights, loss_type="vespo")
    assert caplog.text.count("the fused loss does not agree with TRL's: it is") == 1
    assert "does not agree" in fastgrpo.backends()["trainer loss"].reason
    assert counts["add_weight_grad"] == 4 + 1 and counts["project"] == 2 * 4 + 1


def test_where_the_derivatives_disagree_too(products, caplog, monkeypatch, tmp_path):
    right = FusedLoss.coefficients
    monkeypatch.setattr(FusedLoss, "coefficients", lambda self, logprobs: right(self, logprobs) * 1.01)
    compared(tmp_path, products, gradient_accumulation_steps=1)
    assert "its derivative in the log-probs differs by 0.01" in caplog.text


def test_where_no_objective_can_be_formed_trl_s_loss_is_differentiated(products, caplog, monkeypatch, tmp_path):
    def objective_of(*_: Any) -> None:
        raise ValueError("num_items_in_batch is -1; give a count of tokens, or None.")

    monkeypatch.setattr("fastgrpo.trl.fused.objective_of", objective_of)
    counts = compared(tmp_path, products, max_steps=1)
    assert counts["project"] == 2 * counts["add_weight_grad"] > 0
    reason = "num_items_in_batch is -1; give a count of tokens, or None"
    assert caplog.text.count(reason) == 1 and fastgrpo.backends()["trainer loss"].reason == reason


class LearnedGain(GRPOTrainer):
    """Advantages that have a gradient."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.gain = torch.ones((), requires_grad=True)
        return batch | {"advantages": batch["advantages"] * self.gain}


def test_advantages_with_a_gradient_get_it_from_trl_s_loss(products, caplog, tmp_path):
    settings = {"trainer_class": LearnedGain, "gradient_accumulation_steps": 1, "max_steps": 1}
    gains = []
    for patched in (False, True):
        trainer, _ = run(tmp_path, patched=patched, lora=False, reward=no_two_equal, **settings)
        gains.append(trainer.gain.grad)
    assert gains[0] != 0 and torch.allclose(*gains, rtol=1e-4)
    reason = "a gradient is wanted of advantages, and the fused loss has none but the head's"
    assert caplog.text.count(reason) == 1 and fastgrpo.backends()["trainer loss"].reason == reason


def test_a_multiple_of_the_loss_has_that_multiple_of_the_gradient(tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, max_steps=1, gradient_accumulation_steps=1, reward=no_two_equal)
    fastgrpo.patch(trainer)
    trainer.train()
    gradients = []
    for factor in (1.0, 3.0):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, trainer._buffered_inputs[0])
        (factor * loss).backward()
        gradients.append([p.grad.clone() for p in trainer.model.parameters()])
    assert loss.shape == () and all(grad.abs().max() > 0 for grad in gradients[0])
    for once, thrice in zip(*gradients, strict=True):
        assert (3 * once - thrice).norm() <= 1e-5 * thrice.norm()


def test_an_evaluation_computes_statistics_only(products, tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, eval_dataset=tiny_trainer(tmp_path).train_dataset)
    fastgrpo.patch(trainer)
    products.clear()
    trainer.evaluate()
    assert {name for name, _ in products} == {"project"}


def test_what_is_not_computed_has_a_ratio_of_one_whatever_its_old_log_prob():
    old = torch.tensor([[-1.0, -1e4]])
    terms = RowTerms(torch.ones(1, 2), torch.ones(1, 2), old_logprobs=old)
    fused = FusedLoss(fastgrpo.Objective(), terms, torch.tensor([[True, False]]), found=[torch.zeros(())])
    loss_pass = LossPass(
        {"old_per_token_logps": old}, types.SimpleNamespace(complete=lambda *_: None), None, fused=fused
    )
    logprobs, _ = loss_pass.scored(torch.tensor([[-0.5, 0.0]]), None)
    assert logprobs.tolist() == [[-0.5, -1e4]] and logprobs.requires_grad


def test_rows_that_trl_leaves_out_on_cuda_are_left_out_of_the_terms():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 8, generator=generator), torch.randn(11, 8, generator=generator, requires_grad=True)
    labels = torch.tensor([5, -100, 7, -100])
    terms = RowTerms(torch.tensor([1.0, 9.0, -3.0, 9.0]), torch.tensor([0.5, 0.0, 0.25, 0.0]))
    losses = []
    for rows in (slice(None), labels != -100):
        fused = FusedLoss(fastgrpo.Objective(), terms, labels != -100)
        call = HeadCall(ChunkPlan(), "detached", labels, fused=fused)
        call.score(hidden[rows], weight, None, labels[rows], temperature=1.0, return_entropy=True)
        losses.append(fused.found[0].item())
    # Every ratio is 1: the loss is the negative weighted sum of the advantages.
    assert losses == pytest.approx([0.25, 0.25])


def test_the_gradient_of_an_attached_loss_goes_to_one_log_prob():
    carried = torch.zeros(2, 3, requires_grad=True)
    counted = torch.tensor([[False, False, True], [True, False, True]])
    loss = attached(carried, counted, torch.tensor(7.0))
    assert loss.item() == 7.0
    (2 * loss).backward()
    assert carried.grad.tolist() == [[0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
