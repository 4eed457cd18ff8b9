"""Rollout correction: the engine that samples and the trainer that learns do not give the same probabilities.

Shape suffixes: B sequences, R the longest response. rho_t = pi_old(token) / pi_rollout(token), pi_rollout from the
engine and pi_old from the trainer before the first update; log rho is clamped to +-20. Log-probabilities in nats.
Weights and masks are constants for the loss. Without an old-log-prob pass the engine's log-probabilities are the old
ones: every rho is 1, this module changes nothing, and the ratio inside the policy loss carries the mismatch.

Sources: Ionides 2008 (truncated importance sampling); Yao et al. 2025, "Your efficient RL framework secretly brings
you off-policy RL training" (token level); Liu et al. 2025, "When speed kills stability" (sequence level, rejection).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import check_finite

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Rejection:
    """Keep what lies within the bounds, both inclusive; see REJECTIONS for what each name measures."""

    name: str
    low: float  # of the ratio; -infinity for k2 and k3
    high: float


@dataclass(frozen=True)
class CorrectionOptions:
    level: str = "none"  # a name of IMPORTANCE_LEVELS
    threshold: float = 2.0  # weights are truncated to at most this
    batch_normalize: bool = False  # divide truncated weights by their mean over what is kept
    rejections: tuple[Rejection, ...] = ()  # kept is what all of them keep


@dataclass(frozen=True)
class Correction:
    weights_BR: Tensor  # float32, multiplies the policy loss; 0 where rejected or masked, 1 elsewhere if level is none
    keep_BR: Tensor  # bool, tokens under the mask that are not rejected: the mask for loss_weights()
    metrics: dict[str, float]


def _sum(value_BR: Tensor, mask_BR: Tensor) -> Tensor:
    return torch.where(mask_BR, value_BR, 0.0).sum(1)


def _mean(value_BR: Tensor, mask_BR: Tensor) -> Tensor:
    return _sum(value_BR, mask_BR) / mask_BR.sum(1).clamp(min=1)


def _max(value_BR: Tensor, mask_BR: Tensor) -> Tensor:
    return torch.where(mask_BR, value_BR, 0.0).amax(1)


def _log_ratio(log_rho_BR: Tensor) -> Tensor:
    """log rho: bounds on the ratio are compared as logarithms."""
    return log_rho_BR


def _half_square(log_rho_BR: Tensor) -> Tensor:
    """k2 = log(rho)^2 / 2."""
    return 0.5 * log_rho_BR.square()


def _k3(log_rho_BR: Tensor) -> Tensor:
    """k3 = rho - 1 - log rho."""
    return torch.expm1(log_rho_BR) - log_rho_BR


def _token(value_BR: Tensor, mask_BR: Tensor) -> Tensor:
    return value_BR


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {"k1": _log_ratio, "k2": _half_square, "k3": _k3}
SCOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _token,  # rejects single tokens; the others reject whole sequences
    "seq_sum": _sum,
    "seq_mean": _mean,
    "seq_max": _max,
}
# Names are scope_measure. k1 bounds the ratio itself, low <= x <= high, where x is
#   token_k1: rho of the token, seq_sum_k1: the product of the sequence's rho, seq_mean_k1: their geometric mean.
# k2 and k3 have only an upper bound, x <= high, where x is the token's k2 or k3, or its sum, mean or max over the
# sequence. A largest ratio says nothing about small ones, so there is no seq_max_k1.
REJECTIONS: tuple[str, ...] = tuple(
    f"{scope}_{measure}" for scope in SCOPES for measure in MEASURES if (scope, measure) != ("seq_max", "k1")
)


def parse_rejection(text: str) -> Rejection:
    """'token_k1:0.5:2' (low:high of the ratio) or 'seq_mean_k3:0.01' (upper bound); ValueError says what is wrong."""
    name, *bounds = text.split(":")
    wanted = 2 if name.endswith("_k1") else 1
    if name not in REJECTIONS or len(bounds) != wanted:
        raise ValueError(
            f"--rollout-reject {text!r}: expected name:low:high for names in _k1 (bounds of the ratio), name:high for "
            f"the others, with a name of {', '.join(REJECTIONS)}"
        )
    try:
        numbers = [float(bound) for bound in bounds]
    except ValueError as error:
        raise ValueError(f"--rollout-reject {text!r}: a bound is not a number") from error
    exact = 1.0 if wanted == 2 else 0.0  # what a token gives where trainer and engine agree
    if not numbers[-1] >= exact or not 0 <= numbers[0] or (wanted == 2 and not numbers[0] <= exact):
        raise ValueError(f"--rollout-reject {text!r}: the bounds would reject an exact match, which is {exact:g}")
    return Rejection(name, numbers[0] if wanted == 2 else -math.inf, numbers[-1])


def rejection_keep(rejection: Rejection, log_rho_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """bool [B, R] (token scope) or [B, 1] (sequence scopes): True where the measure lies within the bounds."""
    scope, _, measure = rejection.name.rpartition("_")
    low, high = rejection.low, rejection.high
    if measure == "k1":
        low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    measured = SCOPES[scope](MEASURES[measure](log_rho_BR), mask_BR)
    keep = (measured >= low) & (measured <= high)
    return keep if scope == "token" else keep[:, None]


def _no_weights(log_rho_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """1 everywhere: no importance weight."""
    return torch.zeros_like(log_rho_BR)


def _token_weights(log_rho_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """log rho_t: biased over sequences, of low variance."""
    return log_rho_BR


def _sequence_weights(log_rho_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """log of the product of the sequence's rho, on each of its tokens: unbiased before truncation."""
    total_B = _sum(log_rho_BR, mask_BR).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return total_B[:, None].expand(log_rho_BR.shape)


IMPORTANCE_LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": _no_weights,
    "token": _token_weights,
    "sequence": _sequence_weights,
}


def mismatch_metrics(old_logprobs_BR: Tensor, rollout_logprobs_BR: Tensor, mask_BR: Tensor) -> dict[str, float]:
    """How far trainer and engine are apart, over the tokens of the mask (sequences where the name says so).

    kl, kl_k3: KL(pi_rollout || pi_old), the k1 and k3 estimates, nats per token. ppl_ratio: mean over sequences of the
    trainer's perplexity over the engine's. chi2_token = mean(rho^2) - 1, chi2_seq = mean((prod rho)^2) - 1.
    logprob_diff and prob_diff: absolute differences of log-probabilities and probabilities; a mean prob_diff under
    0.005 is good, over 0.01 is bad.
    """
    old, rollout = (torch.where(mask_BR, x.double(), 0.0) for x in (old_logprobs_BR, rollout_logprobs_BR))
    log_rho_BR = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    total_B = _sum(log_rho_BR, mask_BR).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    some_B = mask_BR.any(1)
    difference, probability = (old - rollout)[mask_BR].abs(), (old.exp() - rollout.exp())[mask_BR].abs()
    log_rho = log_rho_BR[mask_BR]
    values = {
        "kl": -log_rho.mean(),
        "kl_k3": _k3(log_rho).mean(),
        "ppl_ratio": torch.exp(-_mean(log_rho_BR, mask_BR))[some_B].mean(),
        "chi2_token": torch.expm1(2 * log_rho).mean(),
        "chi2_seq": torch.expm1(2 * total_B)[some_B].mean(),
        "logprob_diff_mean": difference.mean(),
        "logprob_diff_max": difference.max(),
        "prob_diff_mean": probability.mean(),
        "prob_diff_max": probability.max(),
    }
    return {name: float(value) for name, value in values.items()}


def rollout_correction(
    old_logprobs_BR: Tensor, rollout_logprobs_BR: Tensor, mask_BR: Tensor, options: CorrectionOptions
) -> Correction:
    """Truncated importance weights min(rho, threshold), rejection masks, and how large the mismatch is.

    The weight multiplies each token's policy loss. batch_normalize divides by the mean of the truncated weights, over
    kept tokens (token) or sequences with a kept token (sequence). Adds to mismatch_metrics(): effective sample size
    1 / mean((w / mean w)^2) in (0, 1] over the same tokens or sequences, the truncated share of them, and the shares
    of tokens and of sequences that rejections took away. ValueError names the sample of a log-probability that is not
    finite.
    """
    assert bool(mask_BR.any()), "a batch has response tokens"
    check_finite("trainer log-probability", old_logprobs_BR, mask_BR)
    check_finite("rollout log-probability", rollout_logprobs_BR, mask_BR)
    log_rho_BR = torch.where(mask_BR, old_logprobs_BR.double() - rollout_logprobs_BR.double(), 0.0)
    log_rho_BR = log_rho_BR.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    keep_BR = mask_BR
    for rejection in options.rejections:
        keep_BR = keep_BR & rejection_keep(rejection, log_rho_BR, mask_BR)
    full_BR = IMPORTANCE_LEVELS[options.level](log_rho_BR, mask_BR).exp()
    weights_BR = full_BR.clamp(max=options.threshold)
    counted_BR = keep_BR
    if options.level == "sequence":  # one weight per sequence: that of its first kept token
        counted_BR = keep_BR & (keep_BR.cumsum(1) == 1)
    counted = weights_BR[counted_BR]
    mean = counted.mean() if counted.numel() else torch.ones((), dtype=torch.float64)
    metrics = mismatch_metrics(old_logprobs_BR, rollout_logprobs_BR, mask_BR)
    shares = {
        "effective_sample_size": 1 / (counted / mean).square().mean(),
        "truncated": (full_BR[counted_BR] > options.threshold).double().mean(),
    }
    metrics |= {name: float(value) if counted.numel() else 0.0 for name, value in shares.items()}
    metrics["rejected_tokens"] = 1 - float(keep_BR.sum() / mask_BR.sum())
    metrics["rejected_sequences"] = 1 - float(keep_BR.any(1).sum() / mask_BR.any(1).sum())
    if options.batch_normalize:
        weights_BR = weights_BR / mean
    return Correction(torch.where(keep_BR, weights_BR, 0.0).float(), keep_BR, metrics)
