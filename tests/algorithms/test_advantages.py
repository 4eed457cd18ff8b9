"""Advantages against numbers worked out by hand, and the properties that every estimator keeps."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import (
    ADVANTAGES,
    NEEDS_CRITIC,
    NEEDS_GREEDY,
    NEEDS_GROUPS,
    AdvantageInputs,
    compute_advantages,
    dynamic_sampling_keep,
    overlong_penalty,
    place_on_last_token,
    reward_to_go,
    whiten,
)

FAST = settings(max_examples=25, deadline=None)


def mask_of(lengths, width=None):
    return torch.arange(width or max(lengths))[None] < torch.tensor(lengths)[:, None]


def outcome(rewards, lengths, groups, **more):
    mask_BR = mask_of(lengths)
    rewards_BR = place_on_last_token(torch.tensor(rewards), mask_BR)
    return AdvantageInputs(rewards_BR, mask_BR, torch.tensor(groups), **more)


def first_column(name, inputs):
    return compute_advantages(name, inputs).advantages_BR[:, 0].tolist()


def random_inputs(seed, groups=3, n=4, width=6):
    generator = torch.Generator().manual_seed(seed)
    size = groups * n
    mask_BR = mask_of(torch.randint(1, width + 1, (size,), generator=generator).tolist(), width)
    rewards_BR = torch.where(mask_BR, torch.randn(size, width, generator=generator), 0.0)
    order = torch.randperm(size, generator=generator)
    return AdvantageInputs(
        rewards_BR=rewards_BR,
        mask_BR=mask_BR,
        group_B=(torch.arange(size) // n)[order] * 7 + 3,
        gamma=0.9,
        lam=0.8,
        values_BR=torch.randn(size, width, generator=generator),
        greedy_rewards_B=torch.randn(size, generator=generator),
    )


def test_grpo_by_hand():
    """grpo divides by the deviation with n - 1 and leaves groups apart."""
    got = first_column("grpo", outcome([1.0, 0.0, 0.0, 0.0, 2.0, 4.0], [1, 2, 3, 1, 2, 2], [5, 5, 5, 5, 9, 9]))
    # group 5: mean 0.25, std sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5; group 9: mean 3, std sqrt(2)
    assert got == pytest.approx([1.5, -0.5, -0.5, -0.5, -1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-5)


def test_group_baselines_by_hand():
    """dr_grpo, rloo and opo subtract the mean, the mean of the others, and the length-weighted mean."""
    inputs = outcome([1.0, 0.0, 0.5], [1, 2, 5], [0, 0, 0])
    assert first_column("dr_grpo", inputs) == pytest.approx([0.5, -0.5, 0.0])
    assert first_column("rloo", inputs) == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])
    baseline = (1 * 1 + 2 * 0 + 5 * 0.5) / 8
    assert first_column("opo", inputs) == pytest.approx([1 - baseline, -baseline, 0.5 - baseline])


def test_gae_by_hand():
    """gae: returns are A + V before whitening, and advantages are their whitened differences."""
    mask_BR = mask_of([3])
    inputs = AdvantageInputs(
        torch.tensor([[0.0, 0.0, 1.0]]), mask_BR, torch.tensor([0]), 0.5, 0.5, torch.tensor([[0.2, 0.4, 0.6]])
    )
    a3 = 1 - 0.6
    a2 = 0.5 * 0.6 - 0.4 + 0.25 * a3
    a1 = 0.5 * 0.4 - 0.2 + 0.25 * a2
    got = compute_advantages("gae", inputs)
    assert got.returns_BR[0].tolist() == pytest.approx([a1 + 0.2, a2 + 0.4, a3 + 0.6])
    raw = torch.tensor([a1, a2, a3])
    assert got.advantages_BR[0].tolist() == pytest.approx(((raw - raw.mean()) / raw.std()).tolist(), abs=1e-5)


def test_gae_with_lambda_one_returns_the_reward_to_go():
    """At lambda = 1 the returns do not depend on the values."""
    inputs = replace(random_inputs(0), lam=1.0)
    expected = reward_to_go(inputs.rewards_BR, inputs.mask_BR, 0.9)
    assert torch.allclose(compute_advantages("gae", inputs).returns_BR, expected, atol=1e-6)


def test_gae_skips_tokens_outside_the_mask():
    """A gap in the mask gives what the same sequence without the gap gives."""
    whole = AdvantageInputs(
        torch.tensor([[0.1, 0.0, 1.0]]), mask_of([3]), torch.tensor([0]), 0.9, 0.7, torch.tensor([[0.3, -0.2, 0.5]])
    )
    keep = torch.tensor([True, False, False, True, True])
    gap = replace(
        whole,
        rewards_BR=torch.tensor([[0.1, 9.0, 9.0, 0.0, 1.0]]),
        mask_BR=keep[None],
        values_BR=torch.tensor([[0.3, 7.0, 7.0, -0.2, 0.5]]),
    )
    for name in ("gae", "reinforce_plus_plus"):
        a, b = compute_advantages(name, whole), compute_advantages(name, gap)
        assert torch.equal(a.advantages_BR[0], b.advantages_BR[0][keep])
        assert torch.equal(a.returns_BR[0], b.returns_BR[0][keep])


def test_reinforce_plus_plus_and_remax_by_hand():
    """Discounted reward-to-go, whitened over the batch or lowered by the greedy reward."""
    rewards_BR = torch.tensor([[-0.1, -0.1, 1.0], [-0.2, 0.0, 0.0]])
    inputs = AdvantageInputs(rewards_BR, mask_of([3, 1]), torch.tensor([0, 1]), gamma=0.5)
    to_go = [-0.1 + 0.5 * (-0.1 + 0.5), -0.1 + 0.5, 1.0, -0.2]
    mean, std = sum(to_go) / 4, torch.tensor(to_go).std().item()
    got = compute_advantages("reinforce_plus_plus", inputs)
    assert got.returns_BR[inputs.mask_BR].tolist() == pytest.approx(to_go)
    expected = [(g - mean) / std for g in to_go]
    assert got.advantages_BR[inputs.mask_BR].tolist() == pytest.approx(expected, abs=1e-5)
    greedy = replace(inputs, greedy_rewards_B=torch.tensor([0.5, -1.0]))
    got = compute_advantages("remax", greedy).advantages_BR[inputs.mask_BR].tolist()
    assert got == pytest.approx([to_go[0] - 0.5, to_go[1] - 0.5, to_go[2] - 0.5, to_go[3] + 1.0])


def test_reinforce_plus_plus_baseline_by_hand():
    """Centred by group, then whitened over tokens: the longer response weighs more in the mean."""
    got = compute_advantages("reinforce_plus_plus_baseline", outcome([1.0, 0.0], [1, 3], [0, 0]))
    # tokens: 0.5, -0.5, -0.5, -0.5: mean -0.25, unbiased variance (0.5625 + 3 * 0.0625) / 3 = 0.25
    assert got.advantages_BR[:, 0].tolist() == pytest.approx([1.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("name", sorted(NEEDS_GROUPS))
def test_one_sample_equal_and_nearly_equal_rewards_are_safe(name):
    """One sample and equal rewards give exactly 0; rewards 1e-9 apart give at most 1e-4."""
    one = compute_advantages(name, outcome([0.7, 0.2], [2, 3], [0, 1])).advantages_BR
    assert torch.equal(one, torch.zeros_like(one))
    equal = compute_advantages(name, outcome([0.35] * 7, [1, 2, 3, 4, 5, 6, 7], [0] * 7)).advantages_BR
    assert torch.equal(equal, torch.zeros_like(equal))
    for base in (0.0, 0.35, 1e-9):
        near = compute_advantages(name, outcome([base, base + 1e-9, base], [2, 3, 1], [0] * 3)).advantages_BR
        assert near.isfinite().all() and near.abs().max() < 1e-4


def test_rounding_of_large_rewards_is_not_amplified():
    """One float32 step between two rewards of 1000 is no signal for grpo."""
    got = first_column("grpo", outcome([1000.0, 1000.0001, 1000.0], [2, 2, 2], [0] * 3))
    assert got == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_names_its_sample(bad):
    """The run stops at the sample; the other rewards are not blamed."""
    inputs = outcome([1.0, 0.0, bad, 0.5], [1, 2, 3, 1], [0, 0, 1, 1])
    for name in ADVANTAGES:
        with pytest.raises(ValueError, match="reward of sample 2, response token 2"):
            compute_advantages(name, inputs)
    with pytest.raises(ValueError, match="reward of sample 1 is"):
        dynamic_sampling_keep(torch.tensor([0.0, bad]), torch.tensor([0, 0]))
    values = replace(random_inputs(0), values_BR=torch.full((12, 6), bad))
    with pytest.raises(ValueError, match="value of sample 0, response token 0"):
        compute_advantages("gae", values)


def test_the_outcome_reward_is_on_the_last_real_token():
    """A response of 5 in a width of 8: the masked rewards sum to the reward."""
    mask_BR = mask_of([5, 8, 1], 8)
    rewards_BR = place_on_last_token(torch.tensor([1.0, 2.0, 3.0]), mask_BR)
    assert (rewards_BR * mask_BR).sum(1).tolist() == [1.0, 2.0, 3.0]
    assert rewards_BR[0, 4] == 1.0 and rewards_BR[1, 7] == 2.0 and rewards_BR[2, 0] == 3.0


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@FAST
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([float("nan"), float("inf"), 1e30, -5.0]))
def test_what_the_mask_hides_never_matters(name, seed, junk):
    """Rewards and values outside the mask may be anything; advantages and returns there are 0."""
    inputs = random_inputs(seed)
    hidden = replace(
        inputs,
        rewards_BR=torch.where(inputs.mask_BR, inputs.rewards_BR, junk),
        values_BR=torch.where(inputs.mask_BR, inputs.values_BR, junk),
    )
    a, b = compute_advantages(name, inputs), compute_advantages(name, hidden)
    assert torch.equal(a.advantages_BR, b.advantages_BR) and torch.equal(a.returns_BR, b.returns_BR)
    assert a.advantages_BR.dtype == torch.float32 and a.returns_BR.dtype == torch.float32
    assert not a.advantages_BR[~inputs.mask_BR].any() and not a.returns_BR[~inputs.mask_BR].any()


@pytest.mark.parametrize("name", sorted(NEEDS_GROUPS))
@FAST
@given(seed=st.integers(0, 10**6), shift=st.floats(-5, 5), scale=st.floats(0.25, 8))
def test_group_estimators_under_shift_and_scale(name, seed, shift, scale):
    """Adding a constant to all rewards changes nothing; scaling them scales, or is divided out."""
    generator = torch.Generator().manual_seed(seed)
    rewards_B = torch.randn(12, generator=generator)
    lengths = torch.randint(1, 7, (12,), generator=generator).tolist()
    groups = (torch.arange(12) % 3).tolist()
    plain = compute_advantages(name, outcome(rewards_B.tolist(), lengths, groups)).advantages_BR
    moved = compute_advantages(name, outcome((scale * rewards_B + shift).tolist(), lengths, groups)).advantages_BR
    factor = 1.0 if name in ("grpo", "reinforce_plus_plus_baseline") else scale
    assert torch.allclose(moved, factor * plain, atol=1e-3)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@FAST
@given(seed=st.integers(0, 10**6))
def test_order_of_samples_does_not_matter(name, seed):
    """Permuting the batch permutes the advantages."""
    inputs = random_inputs(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    columns = ("rewards_BR", "mask_BR", "group_B", "values_BR", "greedy_rewards_B")
    permuted = replace(inputs, **{c: getattr(inputs, c)[order] for c in columns})
    a, b = compute_advantages(name, inputs), compute_advantages(name, permuted)
    assert torch.allclose(a.advantages_BR[order], b.advantages_BR, atol=1e-5)
    assert torch.equal(a.returns_BR[order], b.returns_BR)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "remax"])
@FAST
@given(seed=st.integers(0, 10**6))
def test_group_by_group_equals_whole(name, seed):
    """Estimators that do not whiten see one group at a time."""
    inputs = random_inputs(seed)
    whole = compute_advantages(name, inputs).advantages_BR
    for group in inputs.group_B.unique():
        index = (inputs.group_B == group).nonzero()[:, 0]
        columns = ("rewards_BR", "mask_BR", "group_B", "values_BR", "greedy_rewards_B")
        part = replace(inputs, **{c: getattr(inputs, c)[index] for c in columns})
        assert torch.allclose(compute_advantages(name, part).advantages_BR, whole[index], atol=1e-6)


@FAST
@given(seed=st.integers(0, 10**6), shift=st.floats(-1e3, 1e3), scale=st.floats(0.1, 100))
def test_whiten(seed, shift, scale):
    """Mean 0 and unbiased variance 1 over the mask, whatever shift and scale went in."""
    inputs = random_inputs(seed)
    white_BR = whiten(inputs.values_BR.double() * scale + shift, inputs.mask_BR)
    kept = white_BR[inputs.mask_BR]
    assert abs(float(kept.mean())) < 1e-5 and abs(float(kept.var()) - 1) < 1e-4
    assert torch.allclose(white_BR, whiten(inputs.values_BR, inputs.mask_BR), atol=1e-4)


def test_whiten_of_one_token_and_of_equal_tokens_is_zero():
    """No variance gives 0, not NaN."""
    assert whiten(torch.tensor([[3.0, 7.0]]), torch.tensor([[True, False]])).tolist() == [[0.0, 0.0]]
    assert not whiten(torch.full((2, 3), 0.35), mask_of([3, 2])).any()
    assert not whiten(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).any()


def test_dynamic_sampling_keeps_groups_that_vary():
    """Groups of equal rewards, and groups of one, are dropped."""
    rewards_B = torch.tensor([0.35, 1.0, 0.35, 0.0, 0.35, 5.0])
    group_B = torch.tensor([4, 2, 4, 2, 4, 8])
    assert dynamic_sampling_keep(rewards_B, group_B).tolist() == [False, True, False, True, False, False]


def test_overlong_penalty_by_hand():
    """Lengths below, inside, at the end of and beyond a buffer of 4 in 10."""
    lengths_B = torch.tensor([1, 6, 7, 9, 10, 15])
    assert overlong_penalty(lengths_B, 10, 4).tolist() == pytest.approx([0, 0, -0.25, -0.75, -1, -1])
    assert overlong_penalty(lengths_B, 10, 4, factor=2.0)[2].item() == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="change --overlong-buffer or"):
        overlong_penalty(lengths_B, 10, 11)


def test_the_name_sets_are_of_known_names():
    """Every estimator says what it needs."""
    assert NEEDS_CRITIC | NEEDS_GREEDY | NEEDS_GROUPS <= set(ADVANTAGES)
    assert set(ADVANTAGES) - NEEDS_CRITIC - NEEDS_GREEDY - NEEDS_GROUPS == {"reinforce_plus_plus"}
