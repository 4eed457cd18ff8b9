"""Rollout correction against hand-worked numbers: bounds mean what they say, metrics are those of the definition."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.corrections import (
    IMPORTANCE_LEVELS,
    REJECTIONS,
    CorrectionOptions,
    Rejection,
    parse_rejection,
    rollout_correction,
)

FAST = settings(max_examples=25, deadline=None)
MASK_BR = torch.tensor([[True, True, False], [True, True, True]])
RHO = torch.tensor([[4.0, 0.5, 7.0], [1.0, 0.8, 1.0]])


def correct(options, rho=RHO, mask_BR=MASK_BR, rollout=-1.0):
    rollout_BR = torch.full(rho.shape, rollout, dtype=torch.float64)
    return rollout_correction(rollout_BR + rho.double().log(), rollout_BR, mask_BR, options)


def kept(text):
    return correct(CorrectionOptions(rejections=(parse_rejection(text),))).keep_BR.tolist()


def test_token_weights_by_hand():
    """min(rho, C) on each token, 0 outside the mask."""
    got = correct(CorrectionOptions("token", threshold=2.0))
    assert got.weights_BR.tolist() == [pytest.approx([2, 0.5, 0]), pytest.approx([1, 0.8, 1])]
    assert got.weights_BR.dtype == torch.float32 and torch.equal(got.keep_BR, MASK_BR)
    assert got.metrics["truncated"] == pytest.approx(0.2)
    mean, square = (2 + 0.5 + 1 + 0.8 + 1) / 5, (4 + 0.25 + 1 + 0.64 + 1) / 5
    assert got.metrics["effective_sample_size"] == pytest.approx(mean**2 / square)
    normal = correct(CorrectionOptions("token", threshold=2.0, batch_normalize=True))
    assert torch.allclose(normal.weights_BR, got.weights_BR / mean)


def test_sequence_weights_by_hand():
    """min(prod rho, C) broadcast; its mean counts sequences, not tokens."""
    got = correct(CorrectionOptions("sequence", threshold=1.5))
    assert got.weights_BR.tolist() == [pytest.approx([1.5, 1.5, 0]), pytest.approx([0.8] * 3)]
    assert got.metrics["truncated"] == pytest.approx(0.5)
    assert got.metrics["effective_sample_size"] == pytest.approx(1.15**2 / ((2.25 + 0.64) / 2))
    normal = correct(CorrectionOptions("sequence", threshold=1.5, batch_normalize=True))
    assert normal.weights_BR[:, 0].tolist() == pytest.approx([1.5 / 1.15, 0.8 / 1.15])


def test_metrics_by_hand():
    """Each metric from its definition on five tokens in two sequences."""
    metrics = correct(CorrectionOptions()).metrics
    rho = [4.0, 0.5, 1.0, 0.8, 1.0]
    assert metrics["kl"] == pytest.approx(-sum(map(math.log, rho)) / 5)
    assert metrics["kl_k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in rho) / 5)
    assert metrics["ppl_ratio"] == pytest.approx((2 ** (-1 / 2) + 0.8 ** (-1 / 3)) / 2)
    assert metrics["chi2_token"] == pytest.approx(sum(r * r for r in rho) / 5 - 1)
    assert metrics["chi2_seq"] == pytest.approx((2.0**2 + 0.8**2) / 2 - 1)
    assert metrics["logprob_diff_mean"] == pytest.approx(sum(abs(math.log(r)) for r in rho) / 5)
    assert metrics["logprob_diff_max"] == pytest.approx(math.log(4))
    assert metrics["prob_diff_mean"] == pytest.approx(math.exp(-1) * sum(abs(r - 1) for r in rho) / 5)
    assert metrics["prob_diff_max"] == pytest.approx(math.exp(-1) * 3)
    assert metrics["rejected_tokens"] == metrics["rejected_sequences"] == 0


def test_bounds_of_k1_are_bounds_of_the_ratio():
    """low <= rho <= high, not its inverse: 4 is kept by [0.5, 5] and 0.5 by [0.4, 1.1]."""
    assert kept("token_k1:0.6:5") == [[True, False, False], [True, True, True]]
    assert kept("token_k1:0.4:1.1") == [[False, True, False], [True, True, True]]
    assert kept("token_k1:0:1") == [[False, True, False], [True, True, True]]
    # products 2 and 0.8, geometric means 2^(1/2) and 0.8^(1/3) = 0.928
    assert kept("seq_sum_k1:0.9:2.1") == [[True, True, False], [False] * 3]
    assert kept("seq_sum_k1:0.7:1.9") == [[False] * 3, [True] * 3]
    assert kept("seq_mean_k1:0.93:1.5") == [[True, True, False], [False] * 3]
    assert kept("seq_mean_k1:0.92:1.4") == [[False] * 3, [True] * 3]


def test_bounds_of_k2_and_k3_are_upper_bounds():
    """token, sum, mean and max of k2 = log(rho)^2 / 2 and k3 = rho - 1 - log rho."""
    k2 = [0.5 * math.log(4) ** 2, 0.5 * math.log(2) ** 2]  # 0.961, 0.240; second sequence: 0, 0.0249, 0
    assert kept("token_k2:0.5") == [[False, True, False], [True] * 3]
    assert kept("token_k2:0.97") == [[True, True, False], [True] * 3]
    assert kept(f"seq_sum_k2:{sum(k2) - 0.01}") == [[False] * 3, [True] * 3]
    assert kept(f"seq_sum_k2:{sum(k2) + 0.01}") == [[True, True, False], [True] * 3]
    assert kept(f"seq_mean_k2:{sum(k2) / 2 + 0.01}") == [[True, True, False], [True] * 3]
    assert kept("seq_mean_k2:0.0083") == [[False] * 3, [True] * 3]
    assert kept("seq_mean_k2:0.0082") == [[False] * 3, [False] * 3]
    assert kept("seq_max_k2:0.95") == [[False] * 3, [True] * 3]
    k3 = [3 - math.log(4), -0.5 + math.log(2)]  # 1.614, 0.193
    assert kept("token_k3:0.2") == [[False, True, False], [True] * 3]
    assert kept(f"seq_sum_k3:{sum(k3) + 0.01}") == [[True, True, False], [True] * 3]
    assert kept(f"seq_max_k3:{k3[0] - 0.01}") == [[False] * 3, [True] * 3]
    assert kept(f"seq_mean_k3:{sum(k3) / 2 - 0.01}") == [[False] * 3, [True] * 3]


def test_bounds_are_inclusive():
    """rho exactly 1 is kept by [1, 1]; k2 of 0 by an upper bound of 0."""
    assert kept("token_k1:1:1") == [[False, False, False], [True, False, True]]
    assert kept("token_k2:0") == [[False, False, False], [True, False, True]]


def test_several_rejections_and_weights_together():
    """Kept is what all keep; weights of what is rejected are 0 and leave the normalisation."""
    rejections = (parse_rejection("token_k1:0.6:5"), parse_rejection("seq_sum_k1:0.9:2.1"))
    got = correct(CorrectionOptions("token", 3.0, batch_normalize=True, rejections=rejections))
    assert got.keep_BR.tolist() == [[True, False, False], [False] * 3]
    assert got.weights_BR.tolist() == [[1.0, 0, 0], [0] * 3]
    assert got.metrics["rejected_tokens"] == pytest.approx(0.8)
    assert got.metrics["rejected_sequences"] == pytest.approx(0.5)
    nothing = correct(CorrectionOptions("token", batch_normalize=True, rejections=(Rejection("token_k2", 0, -1),)))
    assert not nothing.weights_BR.any() and nothing.metrics["effective_sample_size"] == 0


WRONG = "token_k1:2 token_k2:0:1 seq_max_k1:0.5:2 tokens:1 token_k1:2:0.5 token_k1:1.1:2 token_k3:-1 "
WRONG += "token_k3:x token_k3:nan token_k1:-1:2"


@pytest.mark.parametrize("text", WRONG.split())
def test_wrong_rejections_are_refused(text):
    """The message shows the text and names the flag."""
    with pytest.raises(ValueError, match="--rollout-reject"):
        parse_rejection(text)


def test_names():
    """Eleven rejections, and their syntax."""
    assert len(REJECTIONS) == 11 and "seq_max_k3" in REJECTIONS and "seq_max_k1" not in REJECTIONS
    assert parse_rejection("seq_mean_k1:0.999:1.001") == Rejection("seq_mean_k1", 0.999, 1.001)
    assert parse_rejection("token_k3:0.1") == Rejection("token_k3", -math.inf, 0.1)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_log_probability_that_is_not_finite_names_its_sample(bad):
    """From the trainer or from the engine; under the mask anything goes."""
    good_BR = torch.zeros(2, 3)
    bad_BR = good_BR.clone()
    bad_BR[1, 2] = bad
    with pytest.raises(ValueError, match="trainer log-probability of sample 1, response token 2"):
        rollout_correction(bad_BR, good_BR, MASK_BR, CorrectionOptions())
    with pytest.raises(ValueError, match="rollout log-probability of sample 1, response token 2"):
        rollout_correction(good_BR, bad_BR, MASK_BR, CorrectionOptions())


def random_case(seed):
    g = torch.Generator().manual_seed(seed)
    mask_BR = torch.arange(6)[None] < torch.randint(1, 7, (5, 1), generator=g)
    rollout_BR = -2 * torch.rand(5, 6, generator=g)
    return rollout_BR + 0.3 * torch.randn(5, 6, generator=g), rollout_BR, mask_BR


REJECT = (parse_rejection("token_k1:0.6:1.8"), parse_rejection("seq_mean_k3:0.1"))
OPTIONS = CorrectionOptions("token", 1.5, rejections=REJECT)


@pytest.mark.parametrize("level", sorted(IMPORTANCE_LEVELS))
@FAST
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([float("nan"), float("inf"), 30.0]), shift=st.floats(-2, 2))
def test_the_mask_hides_and_only_differences_count(level, seed, junk, shift):
    """Values outside the mask, and a shift of both log-probabilities, change no weight and no kept token."""
    old_BR, rollout_BR, mask_BR = random_case(seed)
    options = replace(OPTIONS, level=level, batch_normalize=True)
    plain = rollout_correction(old_BR, rollout_BR, mask_BR, options)
    hidden = rollout_correction(
        torch.where(mask_BR, old_BR, junk), torch.where(mask_BR, rollout_BR, junk), mask_BR, options
    )
    assert torch.equal(plain.weights_BR, hidden.weights_BR) and torch.equal(plain.keep_BR, hidden.keep_BR)
    assert plain.metrics == hidden.metrics
    moved = rollout_correction(old_BR.double() + shift, rollout_BR.double() + shift, mask_BR, options)
    assert torch.allclose(plain.weights_BR, moved.weights_BR, atol=1e-5)
    assert not plain.weights_BR[~mask_BR].any()


@pytest.mark.parametrize("level", sorted(IMPORTANCE_LEVELS))
@FAST
@given(seed=st.integers(0, 10**6))
def test_sequences_one_by_one_equal_the_whole(level, seed):
    """Without batch normalisation no sequence sees another."""
    old_BR, rollout_BR, mask_BR = random_case(seed)
    options = replace(OPTIONS, level=level)
    whole = rollout_correction(old_BR, rollout_BR, mask_BR, options)
    for b in range(5):
        part = rollout_correction(old_BR[b : b + 1], rollout_BR[b : b + 1], mask_BR[b : b + 1], options)
        assert torch.equal(part.weights_BR[0], whole.weights_BR[b])
        assert torch.equal(part.keep_BR[0], whole.keep_BR[b])


@pytest.mark.parametrize("level", sorted(IMPORTANCE_LEVELS))
def test_equal_log_probabilities_change_nothing(level):
    """Weights 1, all kept, divergences 0, effective sample size 1: so it is without an old-log-prob pass."""
    rollout_BR = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, -3.0, -0.1]])
    got = rollout_correction(rollout_BR, rollout_BR, MASK_BR, replace(OPTIONS, level=level, batch_normalize=True))
    assert torch.equal(got.weights_BR, MASK_BR.float()) and torch.equal(got.keep_BR, MASK_BR)
    ones = {"ppl_ratio", "effective_sample_size"}
    assert all(value == (1 if name in ones else 0) for name, value in got.metrics.items())


@pytest.mark.parametrize("level", sorted(IMPORTANCE_LEVELS))
def test_extreme_differences_stay_finite(level):
    """Log-probabilities 300 apart: finite weights and metrics."""
    old_BR, rollout_BR = torch.tensor([[-300.0, -1.0], [-1.0, -1.0]]), torch.tensor([[-1.0, -1.0], [-300.0, -300.0]])
    got = rollout_correction(old_BR, rollout_BR, torch.ones(2, 2, dtype=torch.bool), CorrectionOptions(level))
    assert got.weights_BR.isfinite().all() and all(map(math.isfinite, got.metrics.values()))
