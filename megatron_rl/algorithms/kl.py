"""KL divergence from the reference: estimators per token, their use in the reward or in the loss, and the coefficient.

Shape suffixes: B sequences, R the longest response, K packed response tokens; [...] either. Log-probabilities in nats;
tokens are samples of the policy. d = log pi - log pi_ref, clamped to +-20 so that exp stays finite in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def k1(d: Tensor) -> Tensor:
    """d: unbiased, of high variance, may be negative. As a loss its expected gradient is 0: use it in the reward."""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: biased, of low variance. As a loss its gradient is that of the KL, in expectation and on policy."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative. GRPO's KL term (arXiv 2402.03300, equation 4)."""
    return torch.expm1(-d) + d


def absolute(d: Tensor) -> Tensor:
    """|d|: a distance, not an estimate of the KL."""
    return d.abs()


# Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), for k1, k2, k3
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def kl_per_token(estimator: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(pi || pi_ref) at each token, [...]; differentiable in logprobs."""
    return KL_ESTIMATORS[estimator]((logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


@dataclass(frozen=True)
class PenalisedRewards:
    rewards_BR: Tensor  # float32, rewards - coefficient * kl; 0 outside the mask
    kl: float  # mean over sequences of the summed KL of a response, nats: what the adaptive controller reads
    kl_token: float  # mean over tokens, nats


def kl_in_reward(
    rewards_BR: Tensor,
    logprobs_BR: Tensor,
    ref_logprobs_BR: Tensor,
    mask_BR: Tensor,
    coefficient: float,
    estimator: str = "k1",
) -> PenalisedRewards:
    """r_t - coefficient * kl_t on every response token: Ziegler et al. 2019 (arXiv 1909.08593), equation 2.

    logprobs_BR are the policy's before the update (the old ones): the penalty is a constant, not differentiated.
    """
    kl_BR = torch.where(mask_BR, kl_per_token(estimator, logprobs_BR, ref_logprobs_BR), 0.0)
    return PenalisedRewards(
        rewards_BR=torch.where(mask_BR, rewards_BR - coefficient * kl_BR, 0.0).float(),
        kl=float(kl_BR.double().sum() / mask_BR.any(1).sum().clamp(min=1)),
        kl_token=float(kl_BR.double().sum() / mask_BR.sum().clamp(min=1)),
    )


def kl_loss(
    logprobs_K: Tensor, ref_logprobs_K: Tensor, weights_K: Tensor, coefficient: float, estimator: str = "k3"
) -> tuple[Tensor, dict[str, Tensor]]:
    """coefficient * sum(kl_K * weights_K), added to the policy loss, GRPO (arXiv 2402.03300), equation 3.

    weights_K as in losses.py: tokens of weight 0 never matter, and metrics add up over micro-batches.
    """
    counted_K = weights_K != 0
    logprobs_K, ref_logprobs_K = (torch.where(counted_K, x, 0.0) for x in (logprobs_K, ref_logprobs_K))
    kl = (kl_per_token(estimator, logprobs_K, ref_logprobs_K) * weights_K).sum()
    return coefficient * kl, {"kl": kl.detach()}


@dataclass(frozen=True)
class FixedKL:
    coefficient: float


@dataclass(frozen=True)
class AdaptiveKL:
    """The coefficient that keeps the KL near a target; the whole state is `coefficient`: it goes in the checkpoint."""

    coefficient: float
    target: float  # nats per response
    horizon: int  # samples over which the coefficient moves by at most a fifth

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(
                f"adaptive KL needs a positive target and horizon, got {self.target} and {self.horizon}: "
                "change --kl-target or --kl-horizon"
            )


KLController = FixedKL | AdaptiveKL


def update_kl(controller: KLController, kl: float, num_samples: int) -> KLController:
    """The controller after a rollout batch of num_samples whose measured KL is `kl` (nats per response).

    Adaptive: coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1)), Ziegler et al.
    2019 (arXiv 1909.08593), section 2.2. Fixed: unchanged. ValueError where kl is not finite.
    """
    if not math.isfinite(kl):
        raise ValueError(f"the measured KL is {kl}: a log-probability of policy or reference is not finite")
    match controller:
        case FixedKL():
            return controller
        case AdaptiveKL():
            error = min(max(kl / controller.target - 1, -0.2), 0.2)
            # a batch larger than the horizon moves by a fifth too: five horizons would turn the coefficient to 0
            share = min(num_samples / controller.horizon, 1.0)
            return replace(controller, coefficient=controller.coefficient * (1 + error * share))
