"""csrc/math/objective.h against autograd of fastgrpo.objective, which is itself tested against TRL."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.objective import (
    CLIPPED_LOSS_TYPES,
    LOSS_TYPES,
    Objective,
    sampler_importance_ratio,
    token_terms,
    vespo_weights,
)

PRECISIONS = pytest.mark.parametrize("precision", ["f32", "f64"])
DTYPES = {"f32": np.float32, "f64": np.float64}
# The exponentials of two libraries may differ in the last bit: nothing is compared where that bit decides a branch.
BRANCH_MARGIN = 1e-6


def objective(loss_type: str, **options: Any) -> Objective:
    return Objective(loss_type=loss_type, max_completion_length=16, **options)


def params(csrc_math: ModuleType, options: Objective) -> Any:
    made = csrc_math.ObjectiveParams()
    made.loss_type = getattr(csrc_math.LossType, options.loss_type)
    made.epsilon_low = options.epsilon
    made.epsilon_high = options.upper_epsilon
    made.delta = math.inf if options.delta is None else options.delta
    made.beta = options.beta
    made.bias_correct_kl = options.use_bias_correction_kl
    made.sapo_temperature_pos = options.sapo_temperature_pos
    made.sapo_temperature_neg = options.sapo_temperature_neg
    return made


def run(csrc_math: ModuleType, precision: str, options: Objective, **fields: np.ndarray) -> dict[str, np.ndarray]:
    n = len(fields["logprob"])
    blank = {"old_logprob": fields["logprob"], "ref_logprob": np.full(n, np.nan), "multiplier": np.ones(n)}
    blank |= {"phi": np.full(n, np.nan)}
    return getattr(csrc_math, precision).token_terms(params(csrc_math, options), **(blank | fields))


def autograd(options: Objective, **fields: np.ndarray) -> dict[str, np.ndarray]:
    """What torch makes of the same inputs in float64, gradient included."""
    given_ = {name: torch.as_tensor(np.asarray(value, dtype=np.float64)) for name, value in fields.items()}
    logprob = given_["logprob"].requires_grad_()
    terms = token_terms(
        options,
        logprob,
        given_["advantage"],
        logprob - given_["old_logprob"],
        given_["ref_logprob"],
        given_["multiplier"],
        given_["phi"],
    )
    (grad,) = torch.autograd.grad(terms.loss.sum(), logprob)
    kl = torch.zeros_like(grad) if terms.kl is None else terms.kl
    ratio, advantage = terms.ratio.detach().numpy(), fields["advantage"]
    clips, caps = options.loss_type in CLIPPED_LOSS_TYPES, options.loss_type == "cispo"
    return {
        "loss": terms.loss.detach().numpy(),
        "grad": grad.numpy(),
        "ratio": ratio,
        "kl": kl.detach().numpy(),
        "low_clipped": clips & (ratio < 1 - options.epsilon) & (advantage < 0),
        "high_clipped": clips & (ratio > 1 + options.upper_epsilon) & (advantage > 0),
        "cispo_clipped": caps & (ratio > options.upper_epsilon) & (advantage > 0),
    }


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float) -> None:
    for name, value in expected.items():
        if value.dtype == bool:
            assert (found[name] == value).all(), f"{name}: {found[name]} against {value}"
            continue
        error = np.abs(found[name] - value) / (1 + np.abs(value))
        assert (error <= rtol).all(), f"{name}: worst error {error.max():.3g} > {rtol:.3g} at {error.argmax()}"


def away_from_branches(options: Objective, log_ratio: np.ndarray) -> np.ndarray:
    bounds = [1 - options.epsilon, 1 + options.upper_epsilon, options.upper_epsilon, options.delta or math.inf]
    distance = np.abs(np.exp(log_ratio)[:, None] - np.array(bounds))
    return (distance > BRANCH_MARGIN).all(1) | (log_ratio == 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Objective, dict[str, np.ndarray]]:
    temperature = st.floats(0.5, 2.0, width=32)  # torch.where of two Python numbers is float32, whatever the inputs are
    options = objective(
        draw(st.sampled_from(LOSS_TYPES)),
        epsilon=draw(st.sampled_from([0.0, 0.1, 0.2])),
        epsilon_high=draw(st.sampled_from([None, 0.0, 0.28, 5.0])),
        delta=draw(st.sampled_from([None, 0.9, 1.0, 1.2, 4.0])),
        beta=draw(st.sampled_from([0.0, 0.04, 1.0])),
        use_bias_correction_kl=draw(st.booleans()),
        sapo_temperature_pos=draw(temperature),
        sapo_temperature_neg=draw(temperature),
    )

    def column(element: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(draw(st.lists(element, min_size=12, max_size=12)), dtype=np.float32)

    logprob = column(st.floats(-12, 0, width=32))
    step = column(st.just(0.0) | st.floats(-3, 3, width=32))
    old_logprob = logprob - step
    keep = away_from_branches(options, (logprob - old_logprob).astype(np.float64))
    fields = {
        "logprob": logprob,
        "old_logprob": old_logprob,
        "ref_logprob": logprob + column(st.floats(-4, 4, width=32)),
        "advantage": column(st.sampled_from([0.0, -0.0, 1.0, -1.0]) | st.floats(-3, 3, width=32)),
        "multiplier": column(st.sampled_from([0.0, 1.0]) | st.floats(0, 3, width=32)),
        "phi": column(st.floats(0, 8, width=32)),
    }
    return options, {name: value[keep] for name, value in fields.items()}


def test_loss_types_are_numbered_as_in_python(csrc_math: ModuleType) -> None:
    numbered = sorted(csrc_math.LossType.__members__.items(), key=lambda item: int(item[1]))
    assert tuple(name for name, _ in numbered) == LOSS_TYPES
    assert [int(value) for _, value in numbered] == list(range(len(LOSS_TYPES)))


@PRECISIONS
@given(case=cases())
def test_token_equals_autograd_of_the_torch_objective(
    csrc_math: ModuleType, precision: str, case: tuple[Objective, dict[str, np.ndarray]]
) -> None:
    options, fields = case
    if not len(fields["logprob"]):
        return
    assert_same(
        run(csrc_math, precision, options, **fields), autograd(options, **fields), 1e-13 if precision == "f64" else 2e-5
    )


@PRECISIONS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_on_policy_ratio_is_exactly_one_and_carries_the_gradient(
    csrc_math: ModuleType, precision: str, loss_type: str, beta: float
) -> None:
    options = objective(loss_type, beta=beta, epsilon_high=1.0 if loss_type == "cispo" else None)
    logprob = np.array([-0.1, -2.0, -7.5, -1e4])
    advantage = np.array([1.0, -1.0, 2.0, -0.5])
    found = run(
        csrc_math, precision, options, logprob=logprob, advantage=advantage, ref_logprob=logprob, phi=np.ones(4)
    )
    assert (found["ratio"] == 1).all()
    # SAPO's gate has slope 1 at ratio 1 for every temperature: 4 * sigmoid'(0).
    assert found["grad"] == pytest.approx(-advantage, abs=1e-6)
    assert not (found["low_clipped"] | found["high_clipped"] | found["cispo_clipped"]).any()


@pytest.mark.parametrize("loss_type", CLIPPED_LOSS_TYPES)
@pytest.mark.parametrize("delta", [None, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (0.0, 0.2), (0.2, 0.0)])
def test_ties_and_bounds_take_the_subgradient_that_torch_takes(
    csrc_math: ModuleType, loss_type: str, delta: float | None, low: float, high: float
) -> None:
    # A ratio of exactly 1 sits on the clip bound where epsilon is 0, and on delta where that is 1.
    options = objective(loss_type, epsilon=low, epsilon_high=high, delta=delta)
    logprob, advantage = np.full(3, -1.5), np.array([1.0, -1.0, 0.0])
    fields = {"logprob": logprob, "old_logprob": logprob, "ref_logprob": logprob, "advantage": advantage}
    fields |= {"multiplier": np.ones(3), "phi": np.ones(3)}
    assert_same(run(csrc_math, "f64", options, **fields), autograd(options, **fields), 0.0)


def test_tie_that_rounding_makes_splits_the_gradient_as_torch_splits_it(csrc_math: ModuleType) -> None:
    # The ratio lies one bit above the clip bound, so clamp passes no gradient on, but both products round to one number.
    ratio = torch.tensor(-1.0 + 1.6, dtype=torch.float64).exp().item()
    bound = math.nextafter(ratio, 0)
    advantage = next(a for a in np.linspace(1.1, 1.2, 101) if ratio * a == bound * a)
    options = objective("grpo", epsilon_high=bound - 1)
    fields = {"logprob": np.array([-1.0]), "old_logprob": np.array([-1.6]), "advantage": np.array([advantage])}
    fields |= {"ref_logprob": np.zeros(1), "multiplier": np.ones(1), "phi": np.ones(1)}
    expected = autograd(options, **fields)
    assert expected["grad"] == pytest.approx(-ratio * advantage / 2)
    assert_same(run(csrc_math, "f64", options, **fields), expected, 1e-15)


@PRECISIONS
def test_multiplier_acts_on_the_policy_term_and_not_on_kl(csrc_math: ModuleType, precision: str) -> None:
    options = objective("grpo", beta=0.5, use_bias_correction_kl=False)
    token = {"logprob": np.array([-1.0]), "ref_logprob": np.array([-2.0]), "advantage": np.array([3.0])}
    found = run(csrc_math, precision, options, multiplier=np.zeros(1), **token)
    assert found["loss"] == pytest.approx(0.5 * math.exp(-1))
    assert found["grad"] == pytest.approx(0.5 * (1 - math.exp(-1)))


@PRECISIONS
def test_kl_is_not_clipped(csrc_math: ModuleType, precision: str) -> None:
    options = objective("grpo", beta=1.0, use_bias_correction_kl=False)
    found = run(
        csrc_math, precision, options, logprob=np.array([-5.0]), ref_logprob=np.array([-1.0]), advantage=np.zeros(1)
    )
    assert found["grad"] == pytest.approx(1 - math.exp(4), rel=1e-6)


@PRECISIONS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_reference_is_not_read_without_beta(csrc_math: ModuleType, precision: str, loss_type: str) -> None:
    found = run(
        csrc_math,
        precision,
        objective(loss_type),
        logprob=np.array([-1.0]),
        ref_logprob=np.array([np.nan]),
        advantage=np.ones(1),
        phi=np.ones(1),
    )
    assert np.isfinite(found["loss"])
    assert np.isfinite(found["grad"])
    assert found["kl"] == 0


@PRECISIONS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nan_logprob_makes_the_loss_nan(csrc_math: ModuleType, precision: str, loss_type: str) -> None:
    token = {"logprob": np.array([np.nan]), "old_logprob": np.array([-1.0]), "advantage": np.ones(1), "phi": np.ones(1)}
    assert np.isnan(run(csrc_math, precision, objective(loss_type), **token)["loss"])


@PRECISIONS
@given(data=st.data())
def test_vespo_phi_equals_the_torch_weights(csrc_math: ModuleType, precision: str, data: st.DataObject) -> None:
    ops, tokens = getattr(csrc_math, precision), 5
    element = st.floats(-4, 4, width=32) | st.sampled_from([-300.0, 300.0, 0.0])
    log_ratio = np.array(data.draw(st.lists(element, min_size=tokens, max_size=tokens)))
    mask = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=tokens, max_size=tokens)))
    sampler = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=tokens, max_size=tokens)))
    advantage = data.draw(st.sampled_from([-1.0, 0.0, 2.0]))
    options = objective("vespo", vespo_k_pos=1.5, vespo_lambda_neg=0.0)

    log_w = ((ops.vespo_log_ratio(log_ratio) + ops.vespo_log_sampler(sampler)) * mask).sum()
    found = ops.vespo_phi(log_w, advantage, 1.5, options.vespo_lambda_pos, options.vespo_k_neg, 0.0)
    expected = vespo_weights(
        options,
        torch.tensor(log_ratio)[None],
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.tensor(mask)[None],
        torch.tensor(sampler)[None],
    ).item()
    assert found == pytest.approx(expected, rel=2e-3 if precision == "f32" else 1e-10, abs=1e-30)


@PRECISIONS
def test_vespo_phi_is_zero_where_it_is_not_finite(csrc_math: ModuleType, precision: str) -> None:
    phi = getattr(csrc_math, precision).vespo_phi(np.array([math.nan, 0.0]), 1.0, 2.0, np.array([3.0, 1e30]), 3.0, 2.0)
    assert phi[0] == 0
    assert phi[1] in (0, 1)


@PRECISIONS
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
@pytest.mark.parametrize(("low", "high"), [(None, None), (None, 3.0), (0.5, 2.0)])
def test_sampler_ratio_equals_the_torch_one(
    csrc_math: ModuleType, precision: str, mode: str, low: float | None, high: float | None
) -> None:
    gap = np.array([-200.0, -1.0, -0.1, 0.0, 0.1, 1.0, 2.0, 50.0, math.nan])
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    found = getattr(csrc_math, precision).sampler_ratio(gap, mode == "token_truncate", *bounds)
    zeros = torch.zeros(1, len(gap), dtype=torch.float64)
    expected = sampler_importance_ratio(torch.tensor(gap)[None], zeros, zeros + 1, mode, low, high)[0].numpy()
    assert found == pytest.approx(expected, rel=1e-5 if precision == "f32" else 1e-14)
