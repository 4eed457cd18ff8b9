"""Advantages: from token rewards to one number per response token that says how much better than expected it was.

Shape suffixes: B sequences of the rollout batch, R the longest response. Everything is padded to [B, R]; where
mask_BR is False nothing is read and 0 is written. Rewards are in the reward's own unit. B is always the whole rollout
batch, equal on every rank, so statistics over the batch need no collective. Statistics are taken in float64 (the
tensors are small and on the CPU) and given back in float32: equal rewards then equal their mean exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPS = 1e-6  # added to a group's standard deviation
WHITEN_EPS = 1e-8  # added to the variance when whitening: the deviation is taken as at least 1e-4
EQUAL_TOLERANCE = 1e-6  # rewards closer than this, times max(1, largest absolute reward), count as equal


@dataclass(frozen=True)
class AdvantageInputs:
    """What the estimators read; the outcome reward sits on the last token of the mask, KL penalties on every token."""

    rewards_BR: Tensor
    mask_BR: Tensor  # bool
    group_B: Tensor  # int64, samples of one prompt share it
    gamma: float = 1.0  # discount per token
    lam: float = 0.95  # GAE's lambda
    values_BR: Tensor | None = None  # gae: the critic's value before each token
    greedy_rewards_B: Tensor | None = None  # remax: total reward of the greedy response to the same prompt


@dataclass(frozen=True)
class Advantages:
    advantages_BR: Tensor  # float32, 0 outside the mask
    returns_BR: Tensor  # float32, the critic's target (gae), else the discounted reward-to-go; 0 outside the mask


def check_finite(name: str, value: Tensor, mask_BR: Tensor | None = None) -> None:
    """ValueError that names the first sample with a NaN or infinity in `value` ([B] or [B, R]) under the mask."""
    bad = ~torch.isfinite(value) if mask_BR is None else ~torch.isfinite(value) & mask_BR
    if bad.any():
        place = bad.nonzero()[0].tolist()
        where = f"sample {place[0]}" + (f", response token {place[1]}" if len(place) > 1 else "")
        raise ValueError(
            f"{name} of {where} is {float(value[tuple(place)])}; {int(bad.sum())} of {value.numel()} {name} values "
            "are not finite. Nothing was trained on them: look at what made them."
        )


def place_on_last_token(outcome_B: Tensor, mask_BR: Tensor) -> Tensor:
    """Outcome rewards -> rewards_BR with the reward on the last token under the mask, never on padding."""
    assert bool(mask_BR.any(1).all()), "every sequence has a response token that can carry its reward"
    positions_R = torch.arange(mask_BR.shape[1], device=mask_BR.device)
    last_B = torch.where(mask_BR, positions_R, -1).amax(1)
    rewards_BR = torch.zeros(mask_BR.shape, dtype=torch.float32, device=mask_BR.device)
    return rewards_BR.scatter(1, last_B[:, None], outcome_B.float()[:, None])


def whiten(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the mask, unbiased variance; 0 for one single token."""
    kept = values_BR[mask_BR].double()
    mean = kept.sum() / max(kept.numel(), 1)
    variance = (kept - mean).square().sum() / max(kept.numel() - 1, 1)
    whitened_BR = (values_BR.double() - mean) * torch.rsqrt(variance + WHITEN_EPS)
    return torch.where(mask_BR, whitened_BR, 0.0).float()


def reward_to_go(rewards_BR: Tensor, mask_BR: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the tokens of the mask; tokens outside it are skipped and cost no discount."""
    returns_BR = torch.zeros_like(rewards_BR, dtype=torch.float64)
    running_B = torch.zeros(rewards_BR.shape[0], dtype=torch.float64, device=rewards_BR.device)
    for t in range(rewards_BR.shape[1] - 1, -1, -1):
        running_B = torch.where(mask_BR[:, t], rewards_BR[:, t] + gamma * running_B, running_B)
        returns_BR[:, t] = running_B
    return torch.where(mask_BR, returns_BR, 0.0).float()


@dataclass(frozen=True)
class _Groups:
    """Statistics of each sample's group, spread back to the samples; float64."""

    size_B: Tensor
    mean_B: Tensor
    std_B: Tensor  # n - 1 in the denominator; 0 for one sample
    equal_B: Tensor  # bool, all rewards of the group are equal (EQUAL_TOLERANCE), or it has one sample


def _groups(rewards_B: Tensor, group_B: Tensor) -> _Groups:
    _, index_B = torch.unique(group_B, return_inverse=True)
    count = int(index_B.max()) + 1
    rewards_B = rewards_B.double()
    zeros_G = torch.zeros(count, dtype=torch.float64, device=rewards_B.device)

    def over_group(value_B: Tensor, how: str) -> Tensor:
        return zeros_G.scatter_reduce(0, index_B, value_B, how, include_self=False)[index_B]

    size_B = over_group(torch.ones_like(rewards_B), "sum")
    mean_B = over_group(rewards_B, "sum") / size_B
    square_B = over_group((rewards_B - mean_B).square(), "sum")
    high_B, low_B = over_group(rewards_B, "amax"), over_group(rewards_B, "amin")
    scale_B = torch.maximum(high_B.abs(), low_B.abs()).clamp(min=1.0)
    return _Groups(
        size_B=size_B,
        mean_B=mean_B,
        std_B=(square_B / (size_B - 1).clamp(min=1)).sqrt(),
        equal_B=high_B - low_B <= EQUAL_TOLERANCE * scale_B,
    )


def _totals(inputs: AdvantageInputs) -> Tensor:
    """R = sum of a sample's token rewards, float64 [B]."""
    return torch.where(inputs.mask_BR, inputs.rewards_BR.double(), 0.0).sum(1)


def _broadcast(advantages_B: Tensor, inputs: AdvantageInputs) -> Advantages:
    """One advantage for every token of a sample."""
    return Advantages(
        advantages_BR=torch.where(inputs.mask_BR, advantages_B[:, None], 0.0).float(),
        returns_BR=reward_to_go(inputs.rewards_BR, inputs.mask_BR, inputs.gamma),
    )


def gae(inputs: AdvantageInputs) -> Advantages:
    """Generalised advantage estimation, Schulman et al. 2016 (arXiv 1506.02438), equations 11, 12 and 16.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}; V after the last token is 0. Tokens
    outside the mask are skipped: the token after a gap is the next one. returns = A + V, taken before A is whitened
    over the batch.
    """
    assert inputs.values_BR is not None, "gae reads the critic's values"
    rewards_BR, mask_BR, values_BR = inputs.rewards_BR.double(), inputs.mask_BR, inputs.values_BR.double()
    advantages_BR = torch.zeros_like(rewards_BR)
    next_value_B = torch.zeros_like(rewards_BR[:, 0])
    running_B = torch.zeros_like(next_value_B)
    for t in range(rewards_BR.shape[1] - 1, -1, -1):
        delta_B = rewards_BR[:, t] + inputs.gamma * next_value_B - values_BR[:, t]
        running_B = torch.where(mask_BR[:, t], delta_B + inputs.gamma * inputs.lam * running_B, running_B)
        next_value_B = torch.where(mask_BR[:, t], values_BR[:, t], next_value_B)
        advantages_BR[:, t] = running_B
    returns_BR = torch.where(mask_BR, advantages_BR + values_BR, 0.0).float()
    return Advantages(advantages_BR=whiten(advantages_BR, mask_BR), returns_BR=returns_BR)


def grpo(inputs: AdvantageInputs) -> Advantages:
    """Group relative advantages, DeepSeekMath (arXiv 2402.03300), section 4.1.2: (R - mean) / (std + 1e-6), std n - 1.

    A group of one, and a group whose rewards are equal within EQUAL_TOLERANCE, gets exactly 0: dividing a difference
    of rounding by a standard deviation of rounding would give advantages of order 1 out of nothing.
    """
    rewards_B = _totals(inputs)
    groups = _groups(rewards_B, inputs.group_B)
    scaled_B = (rewards_B - groups.mean_B) / (groups.std_B + STD_EPS)
    return _broadcast(torch.where(groups.equal_B, 0.0, scaled_B), inputs)


def dr_grpo(inputs: AdvantageInputs) -> Advantages:
    """Dr. GRPO (arXiv 2503.20783), section 3.2: R - mean of the group, not divided by the deviation; 0 for n = 1.

    Its other half, dividing token sums by a constant, is the aggregation seq-mean-token-sum-norm.
    """
    rewards_B = _totals(inputs)
    return _broadcast(rewards_B - _groups(rewards_B, inputs.group_B).mean_B, inputs)


def rloo(inputs: AdvantageInputs) -> Advantages:
    """Leave-one-out baseline, Ahmadian et al. 2024 (arXiv 2402.14740), section 3.3: R_i - mean of the others.

    Written as n / (n - 1) (R - mean of the group); 0 for n = 1.
    """
    rewards_B = _totals(inputs)
    groups = _groups(rewards_B, inputs.group_B)
    factor_B = groups.size_B / (groups.size_B - 1).clamp(min=1)
    return _broadcast(factor_B * (rewards_B - groups.mean_B), inputs)


def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE++ (arXiv 2501.03262): discounted reward-to-go (KL in the token rewards), whitened over the batch."""
    returns_BR = reward_to_go(inputs.rewards_BR, inputs.mask_BR, inputs.gamma)
    return Advantages(advantages_BR=whiten(returns_BR, inputs.mask_BR), returns_BR=returns_BR)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE++-baseline (arXiv 2501.03262): R - mean of the group on every token, then whitened over the batch."""
    centred = dr_grpo(inputs)
    return Advantages(whiten(centred.advantages_BR, inputs.mask_BR), centred.returns_BR)


def remax(inputs: AdvantageInputs) -> Advantages:
    """ReMax (arXiv 2310.10505), algorithm 1: reward-to-go minus the total reward of the greedy response."""
    assert inputs.greedy_rewards_B is not None, "remax reads the rewards of the greedy responses"
    returns_BR = reward_to_go(inputs.rewards_BR, inputs.mask_BR, inputs.gamma)
    advantages_BR = torch.where(inputs.mask_BR, returns_BR - inputs.greedy_rewards_B[:, None], 0.0)
    return Advantages(advantages_BR.float(), returns_BR)


def opo(inputs: AdvantageInputs) -> Advantages:
    """Optimal reward baseline, OPO (arXiv 2505.23585), section 3.2: R - sum(length R) / sum(length) of the group."""
    rewards_B = _totals(inputs)
    lengths_B = inputs.mask_BR.sum(1).double()
    weighted = _groups(rewards_B * lengths_B, inputs.group_B).mean_B
    baseline_B = weighted / _groups(lengths_B, inputs.group_B).mean_B.clamp(min=1e-12)
    groups = _groups(rewards_B, inputs.group_B)
    return _broadcast(torch.where(groups.equal_B, 0.0, rewards_B - baseline_B), inputs)


ADVANTAGES: dict[str, Callable[[AdvantageInputs], Advantages]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
}
NEEDS_CRITIC = frozenset({"gae"})
NEEDS_GREEDY = frozenset({"remax"})  # an extra greedy response to every prompt
NEEDS_GROUPS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo"})  # n >= 2, else all 0


def compute_advantages(estimator: str, inputs: AdvantageInputs) -> Advantages:
    """Advantages by name; ValueError naming the sample where a reward or value under the mask is not finite."""
    check_finite("reward", inputs.rewards_BR, inputs.mask_BR)
    if inputs.values_BR is not None:
        check_finite("value", inputs.values_BR, inputs.mask_BR)
    if inputs.greedy_rewards_B is not None:
        check_finite("greedy reward", inputs.greedy_rewards_B)
    return ADVANTAGES[estimator](inputs)


def dynamic_sampling_keep(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """bool [B], True for samples of groups whose rewards differ: DAPO (arXiv 2503.14476), equation 11.

    Equal means within EQUAL_TOLERANCE, as in grpo; a group of one sample has nothing to differ from and is dropped.
    The fraction of False is the zero-variance fraction that the metrics show.
    """
    check_finite("reward", rewards_B)
    return ~_groups(rewards_B, group_B).equal_B


def overlong_penalty(lengths_B: Tensor, max_length: int, buffer_length: int, factor: float = 1.0) -> Tensor:
    """Soft overlong punishment, DAPO (arXiv 2503.14476), equation 13: float32 [B] in [-factor, 0], added to rewards.

    0 up to max_length - buffer_length tokens, then a line down to -factor at max_length, -factor above it.
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(
            f"the overlong buffer is {buffer_length} tokens but must be between 1 and the maximum response length "
            f"{max_length}: change --overlong-buffer or --max-response-length"
        )
    over_B = (lengths_B - (max_length - buffer_length)).float() / buffer_length
    return -factor * over_B.clamp(0.0, 1.0)
