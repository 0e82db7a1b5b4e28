from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from fastgrpo.rollout.policy_version import UNKNOWN, Rollout, allowed_lag, in_words, rollout_of


@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize("uses", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
def test_the_allowed_lag_is_the_largest_that_replaying_shows(phase, uses, accumulation):
    if phase < accumulation:
        seen = {(phase + use) // accumulation for use in range(uses)}
        assert allowed_lag(phase, uses, accumulation) == max(seen)


def test_aligned_generation_allows_no_lag():
    assert allowed_lag(phase=0, uses=4, accumulation=4) == 0


@pytest.mark.parametrize(
    "given", [3, np.int64(3), torch.tensor(3), [3, 3], (4, 3), np.array([3, 5]), torch.tensor([3, 3])]
)
def test_a_version_is_an_integer_or_one_a_row(given):
    assert rollout_of({"policy_version": given}, 2, "it").oldest == 3


def test_what_says_nothing_is_unknown_and_not_current():
    assert rollout_of({}, 2, "it").oldest is None
    assert rollout_of({"policy_version": None, "stale": True}, 2, "it") == Rollout(None, static=True, source="it")
    assert Rollout((3, UNKNOWN)).oldest is None


@pytest.mark.parametrize(
    "given", [True, 1.0, "3", [1], [1, 2, 3], [1, None], [True, False], {}, torch.tensor([1.0, 2.0])]
)
def test_a_version_of_another_kind_is_refused(given):
    with pytest.raises(ValueError, match="give one integer, or one for each"):
        rollout_of({"policy_version": given}, 2, "it")


@pytest.mark.parametrize("given", ["yes", 1, None, [True, True], np.array([True]), torch.tensor(1), 1.0])
def test_stale_is_true_or_false(given):
    with pytest.raises(ValueError, match=r"returned stale=.*; give True where"):
        rollout_of({"stale": given}, 2, "it")


@pytest.mark.parametrize(
    "given", [2**70, -(2**63) - 1, 2**63, [3, 2**70], np.uint64(2**63), 10**5000], ids=lambda _: ""
)
def test_a_version_beyond_64_bits_is_refused(given):
    with pytest.raises(
        ValueError, match=r"it returned policy_version with .*does not fit into 64 bits; give trainer\.state"
    ):
        rollout_of({"policy_version": given}, 2, "it")


@pytest.mark.parametrize("given", [np.bool_(True), np.array(True), torch.tensor(True)])
def test_truth_of_numpy_and_torch_is_truth(given):
    assert rollout_of({"stale": given, "policy_version": np.array(3)}, 2, "it") == Rollout(3, static=True, source="it")
    with pytest.raises(ValueError, match="give one integer"):
        rollout_of({"policy_version": given}, 2, "it")


def test_versions_in_words():
    assert [in_words(version) for version in (3, 0, -1, -2)] == [
        "optimizer step 3",
        "optimizer step 0",
        "1 optimizer step before this train() began",
        "2 optimizer steps before this train() began",
    ]


def test_rollouts_import_no_trl():
    code = (
        "import fastgrpo.rollout.policy_version, sys; sys.exit('trl' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
