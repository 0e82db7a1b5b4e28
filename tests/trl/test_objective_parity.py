"""`grpo_loss` against `GRPOTrainer._compute_loss` of the installed TRL, run on the same tensors: values, gradients, metrics."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stock_loss import StockTrainer, stock_config
from torch import Tensor

from fastgrpo import AdaptiveEntropy, GRPOStats, Objective, grpo_loss, sampler_importance_ratio
from fastgrpo.objective import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES, SAMPLER_RATIO_MODES

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}
MAX_COMPLETION_LENGTH = 12
# The bonus is what TRL logs `policy_loss` for; `entropy_coef` and `aux_loss` are inputs of `grpo_loss`, not results.
NOT_FROM_THE_LOSS = {"entropy_coef", "aux_loss"}


@dataclass(frozen=True)
class Case:
    """One configuration of the loss and the shape of its data."""

    loss_type: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    bias_correction: bool = True
    old_given: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    off_policy_mask_threshold: float | None = None
    sampling_given: bool = False
    top_entropy_quantile: float = 1.0
    sampler_mode: str | None = None
    tool_mask: bool = False
    entropy_coef: float = 0.0
    aux_coef: float = 0.0
    training: bool = True
    accumulation: int = 1
    steps_per_generation: int | None = None
    num_processes: int = 1
    per_token_advantages: bool = False
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)
    width: int = 9
    empty_rows: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float32


@dataclass
class Batch:
    """Tensors of a micro-batch. Columns outside the mask hold values like any other."""

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    sampling_logprobs: Tensor
    entropy: Tensor
    advantages: Tensor
    completion_mask: Tensor
    tool_mask: Tensor
    num_items_in_batch: Tensor
    aux_loss: Tensor

    @property
    def mask(self) -> Tensor:
        return self.completion_mask * self.tool_mask


def make(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(case.seed)
    rows, width = 8, case.width

    def normal(*shape: int, spread: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=case.dtype) * spread

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    logprobs = -normal(rows, width).abs() - 0.05
    old_logprobs = logprobs + normal(rows, width, spread=0.3)
    lengths = integers(1, width + 1, rows)
    lengths[0] = width
    if case.empty_rows:
        lengths[[2, 7]] = 0
    completion_mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    tool_mask = integers(0, 4, rows, width).clamp(max=1) if case.tool_mask else torch.ones_like(completion_mask)
    ref_logprobs = logprobs + normal(rows, width, spread=0.5)
    ref_logprobs[0, 0] = logprobs[0, 0] + 4.0  # TRL does not clip its KL
    entropy = normal(rows, width).abs().float().to(case.dtype)  # TRL ranks float32
    if width == 1:
        # TRL takes a width of 1 for one value a sequence and does not mask its metrics; what it finds in padding is 0.
        logprobs, old_logprobs, ref_logprobs, entropy = (
            x * completion_mask for x in (logprobs, old_logprobs, ref_logprobs, entropy)
        )
    sampling_logprobs = old_logprobs + normal(rows, width, spread=0.4)
    sampling_logprobs[0, 0] = math.nan  # a token the sampler could not score
    advantages = normal(rows, width) if case.per_token_advantages else normal(rows)
    advantages[3] = 0.0
    items = (completion_mask * tool_mask).sum() * case.num_processes * (case.steps_per_generation or case.accumulation)
    return Batch(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        sampling_logprobs=sampling_logprobs,
        entropy=entropy,
        advantages=advantages,
        completion_mask=completion_mask,
        tool_mask=tool_mask,
        num_items_in_batch=items + 5,
        aux_loss=normal().abs(),
    )


def stock_trainer(case: Case, **options: Any) -> StockTrainer:
    config = stock_config(
        loss_type=case.loss_type,
        importance_sampling_level=case.level,
        beta=case.beta,
        use_bias_correction_kl=case.bias_correction,
        epsilon=case.epsilon,
        epsilon_high=case.epsilon_high,
        delta=case.delta,
        off_policy_mask_threshold=case.off_policy_mask_threshold,
        top_entropy_quantile=case.top_entropy_quantile,
        use_vllm=case.sampler_mode is not None,
        entropy_coef=case.entropy_coef,
        gradient_accumulation_steps=case.accumulation,
        steps_per_generation=case.steps_per_generation,
        max_completion_length=MAX_COMPLETION_LENGTH,
        sapo_temperature_pos=case.sapo_temperatures[0],
        sapo_temperature_neg=case.sapo_temperatures[1],
        **dict(zip(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), case.vespo, strict=True)),
        **options,
    )
    return StockTrainer(
        config, training=case.training, num_processes=case.num_processes, router_aux_loss_coef=case.aux_coef
    )


def our_objective(case: Case, batch: Batch, **changes: Any) -> Objective:
    settings = {
        "loss_type": case.loss_type,
        "importance_sampling_level": case.level,
        "epsilon": case.epsilon,
        "epsilon_high": case.epsilon_high,
        "delta": case.delta,
        "beta": case.beta,
        "use_bias_correction_kl": case.bias_correction,
        "off_policy_mask_threshold": case.off_policy_mask_threshold,
        "top_entropy_quantile": case.top_entropy_quantile,
        "entropy_coef": case.entropy_coef,
        "sapo_temperature_pos": case.sapo_temperatures[0],
        "sapo_temperature_neg": case.sapo_temperatures[1],
        "vespo_k_pos": case.vespo[0],
        "vespo_lambda_pos": case.vespo[1],
        "vespo_k_neg": case.vespo[2],
        "vespo_lambda_neg": case.vespo[3],
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "num_items_in_batch": batch.num_items_in_batch,
        "gradient_accumulation_steps": case.accumulation,
        "steps_per_generation": case.steps_per_generation,
        "num_processes": case.num_processes,
        "training": case.training,
    }
    return Objective(**{**settings, **changes})


def sampler_ratio(case: Case, batch: Batch) -> Tensor | None:
    if case.sampler_mode is None:
        return None
    return sampler_importance_ratio(
        batch.old_logprobs, batch.sampling_logprobs, batch.mask, case.sampler_mode, clip_min=0.6, clip_max=1.5
    )


def stock_result(
    trainer: StockTrainer, case: Case, batch: Batch
) -> tuple[Tensor, dict[str, Tensor | None], dict[str, float]]:
    leaves = leaves_of(batch)
    inputs = {"advantages": batch.advantages, "num_items_in_batch": batch.num_items_in_batch}
    if case.tool_mask:
        inputs["tool_mask"] = batch.tool_mask
    if case.old_given:
        inputs["old_per_token_logps"] = batch.old_logprobs
    if case.sampling_given:
        inputs["sampling_per_token_logps"] = batch.sampling_logprobs
    if case.beta != 0.0:
        inputs["ref_per_token_logps"] = batch.ref_logprobs
    if case.sampler_mode is not None:
        inputs["importance_sampling_ratio"] = sampler_ratio(case, batch)
    loss, metrics = trainer.loss(
        leaves["logprobs"], leaves["entropy"], batch.completion_mask, leaves["aux_loss"], **inputs
    )
    return loss.detach(), gradients(loss, leaves), metrics


def our_result(
    objective: Objective, case: Case, batch: Batch
) -> tuple[Tensor, dict[str, Tensor | None], dict[str, float], GRPOStats]:
    leaves = leaves_of(batch)
    loss, stats = grpo_loss(
        leaves["logprobs"],
        batch.advantages,
        batch.mask,
        objective,
        old_logprobs=batch.old_logprobs if case.old_given else None,
        ref_logprobs=batch.ref_logprobs if case.beta != 0.0 else None,
        sampler_ratio=sampler_ratio(case, batch),
        sampling_logprobs=batch.sampling_logprobs if case.sampling_given else None,
        entropy=leaves["entropy"],
        aux_loss=leaves["aux_loss"] if case.aux_coef else None,
        router_aux_loss_coef=case.aux_coef,
    )
    return loss.detach(), gradients(loss, leaves), stats.metrics(), stats


def leaves_of(batch: Batch) -> dict[str, Tensor]:
    return {name: getattr(batch, name).clone().requires_grad_() for name in ("logprobs", "entropy", "aux_loss")}


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def assert_close(
    name: str, ours: Tensor | float, stock: Tensor | float, tolerance: float = TOLERANCE[torch.float32]
) -> None:
    ours, stock = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, stock))
    assert ours.shape == stock.shape, f"{name}: shape {tuple(ours.shape)}, TRL has {tuple(stock.shape)}"
    assert torch.equal(ours.isnan(), stock.isnan()), f"{name}: {ours} against TRL's {stock}"
    error = ((ours - stock).abs() / (1 + stock.abs())).nan_to_num(0.0)
    assert (error <= tolerance).all(), (
        f"{name}: worst error {error.max():.2e} > {tolerance:.0e}; {ours} against {stock}"
    )


def assert_equals_trl(case: Case) -> None:
    batch = make(case)
    stock_loss, stock_grads, stock_metrics = stock_result(stock_trainer(case), case, batch)
    loss, grads, metrics, _ = our_result(our_objective(case, batch), case, batch)
    tolerance = TOLERANCE[case.dtype]
    assert_close("loss", loss, stock_loss, tolerance)
    for name in grads:
        assert_close(f"gradient of {name}", grads[name], stock_grads[name], tolerance)
    expected = set(stock_metrics) - NOT_FROM_THE_LOSS
    if case.entropy_coef == 0.0:
        expected.add("policy_loss")  # TRL logs it only beside the bonus
    assert set(metrics) == expected
    for name in expected & set(stock_metrics):
        assert_close(f"metric {name}", metrics[name], stock_metrics[name])  # TRL counts clips in float32


KL = {"no KL": (0.0, True), "KL": (0.04, True), "KL without bias correction": (0.04, False)}


@pytest.mark.parametrize("old_given", [True, False], ids=["old given", "on-policy"])
@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_and_level_equals_trl(loss_type, level, kl, old_given):
    beta, bias_correction = KL[kl]
    for seed, epsilon_high in ((1, None), (2, 0.28), (3, 5.0)):
        assert_equals_trl(
            Case(
                loss_type=loss_type,
                level=level,
                beta=beta,
                bias_correction=bias_correction,
                old_given=old_given,
                epsilon_high=epsilon_high,
                seed=seed,
            )
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "delta above the clip range": {"delta": 1.3},
    "delta inside the clip range": {"delta": 1.1},
    "delta below 1": {"delta": 0.9},
    "off-policy mask": {"off_policy_mask_threshold": 0.02},
    "off-policy mask by the sampler": {"off_policy_mask_threshold": 0.02, "sampling_given": True},
    "entropy quantile": {"top_entropy_quantile": 0.3},
    "entropy quantile 0": {"top_entropy_quantile": 0.0},
    **{f"sampler ratio {mode}": {"sampler_mode": mode} for mode in SAMPLER_RATIO_MODES},
    "tool mask": {"tool_mask": True},
    "per-token advantages": {"per_token_advantages": True},
    "evaluation": {"training": False, "accumulation": 4, "entropy_coef": 0.02, "aux_coef": 0.01},
    "accumulation": {"accumulation": 4},
    "generation batch over several steps": {"accumulation": 4, "steps_per_generation": 8},
    "generation batch in part of a step": {"accumulation": 4, "steps_per_generation": 2},
    "three processes": {"num_processes": 3, "accumulation": 4, "steps_per_generation": 8},
    "entropy bonus": {"entropy_coef": 0.02, "accumulation": 2},
    "negative entropy bonus": {"entropy_coef": -0.02},
    "entropy bonus on the quantile": {"entropy_coef": 0.02, "top_entropy_quantile": 0.4},
    "auxiliary loss": {"aux_coef": 0.01, "accumulation": 4},
    "one column": {"width": 1},
    "rows without a token": {"empty_rows": True},
    "one column, rows without a token": {"width": 1, "empty_rows": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_option_equals_trl_with_every_loss_type(loss_type, option):
    for level, old_given in itertools.product(IMPORTANCE_SAMPLING_LEVELS, (True, False)):
        assert_equals_trl(
            Case(loss_type=loss_type, level=level, old_given=old_given, beta=0.04, seed=4, **OPTIONS[option])
        )


@pytest.mark.parametrize("temperatures", [(0.5, 2.0), (1.3, 0.7)])
@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
def test_sapo_temperatures_equal_trl(level, temperatures):
    assert_equals_trl(Case(loss_type="sapo", level=level, sapo_temperatures=temperatures))


@pytest.mark.parametrize("sampler_mode", [None, *SAMPLER_RATIO_MODES])
@pytest.mark.parametrize("weights", [(1.0, 2.0, 0.5, 0.0), (4.0, 0.1, 2.0, 6.0), (0.0, 1e9, 3.0, -1.0)])
def test_vespo_weights_equal_trl_also_where_they_overflow(weights, sampler_mode):
    assert_equals_trl(Case(loss_type="vespo", vespo=weights, sampler_mode=sampler_mode))


@settings(max_examples=150)
@given(
    case=st.builds(
        Case,
        loss_type=st.sampled_from(LOSS_TYPES),
        level=st.sampled_from(IMPORTANCE_SAMPLING_LEVELS),
        beta=st.sampled_from([0.0, 0.04, 1.0]),
        bias_correction=st.booleans(),
        old_given=st.booleans(),
        epsilon=st.sampled_from([0.0, 0.2, 3e-4]),
        epsilon_high=st.sampled_from([None, 0.28, 4e-4, 5.0]),
        delta=st.sampled_from([None, 1.1, 1.5]),
        off_policy_mask_threshold=st.sampled_from([None, 0.0, 0.05]),
        sampling_given=st.booleans(),
        top_entropy_quantile=st.sampled_from([1.0, 0.2, 0.7]),
        sampler_mode=st.sampled_from([None, *SAMPLER_RATIO_MODES]),
        tool_mask=st.booleans(),
        entropy_coef=st.sampled_from([0.0, 0.01]),
        aux_coef=st.sampled_from([0.0, 0.001]),
        training=st.booleans(),
        accumulation=st.sampled_from([1, 4]),
        steps_per_generation=st.sampled_from([None, 2, 8]),
        num_processes=st.sampled_from([1, 2]),
        per_token_advantages=st.booleans(),
        width=st.integers(2, 12),
        empty_rows=st.booleans(),
        seed=st.integers(0, 2**20),
        dtype=st.just(torch.float64),
    )
)
def test_any_combination_of_options_equals_trl(case):
    """In float64, where no rounding of a sum hides a wrong term."""
    assert_equals_trl(case)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_all_masked_micro_batch_equals_trl(loss_type):
    case = Case(loss_type=loss_type, beta=0.04, entropy_coef=0.02)
    batch = make(case)
    batch.completion_mask.zero_()
    batch.num_items_in_batch.zero_()
    stock_loss, stock_grads, stock_metrics = stock_result(stock_trainer(case), case, batch)
    loss, grads, metrics, _ = our_result(our_objective(case, batch), case, batch)
    assert_close("loss", loss, stock_loss)
    for name in grads:
        assert_close(f"gradient of {name}", grads[name], stock_grads[name])
    for name in set(stock_metrics) - NOT_FROM_THE_LOSS:
        assert_close(f"metric {name}", metrics[name], stock_metrics[name])


@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("start", [0.1, 0.0, 0.29])
def test_adaptive_entropy_moves_its_coefficient_as_trl_does(start, fraction):
    """Six optimizer steps of three micro-batches, an evaluation between, entropies on both sides of the target."""
    case = Case(loss_type="grpo", accumulation=3, top_entropy_quantile=fraction)
    bounds = {"target": 0.5, "delta": 0.04, "coef_min": 0.0, "coef_max": 0.3}
    trainer = stock_trainer(
        case,
        use_adaptive_entropy=True,
        **{f"entropy_{'coef_' if name == 'delta' else ''}{name}": value for name, value in bounds.items()},
    )
    trainer.entropy_coef = start
    controller = AdaptiveEntropy(coef=start, **bounds)
    applied = []
    for step, scale in enumerate((0.3, 1.5, 0.2, 0.25, 0.3, 2.0)):
        objective_options = {"entropy_coef": controller.applied}
        applied.append(controller.applied)
        totals = torch.zeros(2)
        for micro in range(3):
            trainer.accelerator.gradient_state._set_sync_gradients(micro == 2)
            batch = make(replace(case, seed=10 * step + micro))
            batch.entropy *= scale
            stock_loss, stock_grads, stock_metrics = stock_result(trainer, case, batch)
            objective = our_objective(case, batch, **objective_options)
            loss, grads, metrics, stats = our_result(objective, case, batch)
            totals += stats.entropy_bonus
            assert_close("loss", loss, stock_loss)
            assert_close("gradient of entropy", grads["entropy"], stock_grads["entropy"])
            assert_close("policy_loss", metrics["policy_loss"], stock_metrics["policy_loss"])
            assert ("entropy_coef" in stock_metrics) == (micro == 2)
        controller = controller.after_step(*totals.tolist())
        assert_close("entropy_coef", controller.coef, stock_metrics["entropy_coef"])
        assert_close("last entropy", controller.last_entropy, trainer._last_world_entropy)
        trainer.model.eval()
        stock_loss, _, _ = stock_result(trainer, case, batch)
        evaluation = our_objective(case, batch, entropy_coef=controller.applied, training=False)
        assert_close("evaluation loss", our_result(evaluation, case, batch)[0], stock_loss)
        trainer.model.train()
    assert applied[0] == 0.0, "the first step has no measured entropy yet"
    assert 0.0 in applied[1:] and any(coef != 0.0 for coef in applied)


@pytest.mark.parametrize("scale", [0.2, 3.0], ids=["below the target", "above the target"])
@pytest.mark.parametrize("start", [0.5, -0.2])
def test_an_entropy_coefficient_outside_its_bounds_moves_as_trl_s_does(start, scale):
    """TRL bounds only the side it moves to, so a coefficient set beyond a bound is not pulled back at once."""
    case = Case(loss_type="grpo")
    options = {"entropy_target": 0.5, "entropy_coef_delta": 0.04, "entropy_coef_min": 0.0, "entropy_coef_max": 0.3}
    trainer = stock_trainer(case, use_adaptive_entropy=True, **options)
    trainer.entropy_coef = start
    batch = make(case)
    batch.entropy *= scale
    _, _, stock_metrics = stock_result(trainer, case, batch)
    *_, stats = our_result(our_objective(case, batch), case, batch)
    controller = AdaptiveEntropy(coef=start, target=0.5, delta=0.04, coef_min=0.0, coef_max=0.3)
    assert_close(
        "entropy_coef", controller.after_step(*stats.entropy_bonus.tolist()).coef, stock_metrics["entropy_coef"]
    )


def sampler_case(seed: int, with_tools: bool) -> tuple[Tensor, Tensor, list[int], Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 3, 1, 7, 2, 6, 4, 7]
    old = -torch.rand(8, 7, generator=generator)
    sampling = old + 0.4 * torch.randn(8, 7, generator=generator)
    sampling[0, 1] = sampling[6, 0] = math.nan
    sampling[3, 2] = old[3, 2] - 4.0
    tools = torch.randint(0, 4, (8, 7), generator=generator).clamp(max=1) if with_tools else None
    return old, sampling, lengths, tools


@pytest.mark.parametrize("with_tools", [False, True], ids=["all tokens", "tool mask"])
@pytest.mark.parametrize("clip", [(None, 3.0), (0.5, None), (0.7, 1.3), (None, 1.0)])
@pytest.mark.parametrize("mode", SAMPLER_RATIO_MODES)
def test_sampler_ratio_equals_trl(mode, clip, with_tools):
    """TRL's `_generate_and_score_completions` itself, on completions that a vLLM server might have returned."""
    low, high = clip
    old, sampling, lengths, tools = sampler_case(5, with_tools)
    config = stock_config(
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    stock = StockTrainer(config).scored_completions(old, sampling, lengths, tools)
    mask = stock["completion_mask"] * stock.get("tool_mask", 1)
    ours = sampler_importance_ratio(old, sampling, mask, mode, low, high)
    assert_close("sampler ratio", ours, stock["importance_sampling_ratio"])
    assert mask.sum() == stock["num_items_in_batch"]


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_a_sampler_mask_without_bounds_drops_nothing_as_in_trl(mode):
    old, sampling, lengths, _ = sampler_case(6, False)
    config = stock_config(
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=None,
    )
    stock = StockTrainer(config).scored_completions(old, sampling, lengths)
    ours = sampler_importance_ratio(old, sampling, stock["completion_mask"], mode, None, None)
    assert_close("sampler ratio", ours, stock["importance_sampling_ratio"])
    assert ours.gt(0).all()


@pytest.mark.parametrize("mode", SAMPLER_RATIO_MODES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_trl_s_generation_step_hands_on_gives_trl_s_loss(loss_type, mode):
    """Both of TRL's methods in a row: scored completions of a vLLM server go straight into the loss."""
    old, sampling, lengths, tools = sampler_case(7, True)
    config = stock_config(
        loss_type=loss_type, use_vllm=True, vllm_importance_sampling_mode=mode, max_completion_length=12
    )
    trainer = StockTrainer(config)
    scored = trainer.scored_completions(old, sampling, lengths, tools)
    step = 0.1 * torch.randn(old.shape)
    leaves = [(old + step).requires_grad_() for _ in range(2)]
    entropy = torch.rand(old.shape)
    inputs = {name: value for name, value in scored.items() if not name.startswith(("prompt", "completion"))}
    stock_loss, stock_metrics = trainer.loss(leaves[0], entropy, scored["completion_mask"], **inputs)
    mask = scored["completion_mask"] * scored["tool_mask"]
    loss, stats = grpo_loss(
        leaves[1],
        scored["advantages"],
        mask,
        Objective(loss_type=loss_type, max_completion_length=12, num_items_in_batch=scored["num_items_in_batch"]),
        old_logprobs=scored["old_per_token_logps"],
        sampler_ratio=sampler_importance_ratio(old, sampling, mask, mode),
        entropy=entropy,
    )
    assert_close("loss", loss.detach(), stock_loss.detach())
    for value in (loss, stock_loss):
        value.backward()
    assert_close("gradient", leaves[1].grad, leaves[0].grad)
    for name, value in stock_metrics.items():
        assert_close(f"metric {name}", stats.metrics()[name], value)


def test_the_options_have_trl_s_defaults():
    """Whoever builds an `Objective` from nothing gets what a `GRPOConfig` built from nothing means."""
    config, objective = stock_config(), Objective()
    for name in (
        "loss_type",
        "importance_sampling_level",
        "epsilon",
        "epsilon_high",
        "delta",
        "beta",
        "use_bias_correction_kl",
        "off_policy_mask_threshold",
        "top_entropy_quantile",
        "entropy_coef",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
    ):
        assert getattr(objective, name) == getattr(config, name), name
    adaptive = AdaptiveEntropy(coef=config.entropy_coef)
    for name in ("target", "coef_min", "coef_max"):
        assert getattr(adaptive, name) == getattr(config, f"entropy_{name}"), name
    assert adaptive.delta == config.entropy_coef_delta
    default_ratio = sampler_importance_ratio.__defaults__
    assert default_ratio == (
        config.vllm_importance_sampling_mode,
        config.vllm_importance_sampling_clip_min,
        config.vllm_importance_sampling_clip_max,
    )
