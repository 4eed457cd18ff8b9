"""Policy and value losses on packed response tokens, and the weights that aggregate them.

Shape suffixes: K response tokens of a micro-batch, S its sequences, B sequences of an optimizer batch, R the longest
response. A loss is sum(term_K * weights_K). weights_K come from loss_weights(): they hold the mask, the aggregation
and the division by the count over the whole optimizer batch and all data-parallel ranks, so losses, gradients and
metrics of micro-batches and ranks are added, and nothing downstream divides. Every metric is sum(x_K * weights_K) too:
the mean of x as the aggregation counts it. Log-probabilities are in nats. A token of weight 0 is masked: nothing at it
matters, not even NaN, and it does not count in the means over a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # log-ratios are clamped to +-20 (ratio 5e8): beyond it the gradient is 0, not infinity

Metrics = dict[str, Tensor]


# --- aggregation ------------------------------------------------------------------------------------------------


def _token_mean(mask_BR: Tensor, sequences: Tensor, fixed_length: int | None) -> Tensor:
    """sum over tokens / tokens of the batch: DAPO (arXiv 2503.14476), equation 12."""
    return mask_BR / mask_BR.sum().clamp(min=1)


def _seq_mean_token_sum(mask_BR: Tensor, sequences: Tensor, fixed_length: int | None) -> Tensor:
    """Mean over sequences of the sum over their tokens: the likelihood-ratio gradient itself."""
    return mask_BR / sequences


def _seq_mean_token_mean(mask_BR: Tensor, sequences: Tensor, fixed_length: int | None) -> Tensor:
    """Mean over sequences of the mean over their tokens: GRPO (arXiv 2402.03300), equation 3."""
    return mask_BR / mask_BR.sum(1, keepdim=True).clamp(min=1) / sequences


def _seq_mean_token_sum_norm(mask_BR: Tensor, sequences: Tensor, fixed_length: int | None) -> Tensor:
    """Mean over sequences of the sum over their tokens / a fixed length: Dr. GRPO (arXiv 2503.20783), appendix A."""
    if fixed_length is None or fixed_length < 1:
        raise ValueError(
            f"aggregation seq-mean-token-sum-norm divides by a fixed length, which is {fixed_length}: "
            "set --loss-fixed-length to a number of tokens of at least 1, for example that of --max-response-length"
        )
    return mask_BR / fixed_length / sequences


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, int | None], Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}


def loss_weights(mask_BR: Tensor, mode: str, fixed_length: int | None = None, keep_B: Tensor | None = None) -> Tensor:
    """Weights of the tokens of one optimizer batch, float32 [B, R]; 0 outside the mask.

    B are all sequences of the optimizer batch over all data-parallel ranks, whatever micro-batches follow: one count.
    keep_B (bool) leaves out dummy sequences that only pad the batch. A sequence without a token under the mask counts
    as left out; tokens that a correction rejects are left out by giving mask_BR & keep_BR.
    """
    if keep_B is not None:
        mask_BR = mask_BR & keep_B[:, None]
    sequences = mask_BR.any(1).sum().clamp(min=1)
    return AGGREGATIONS[mode](mask_BR.float(), sequences, fixed_length)


# --- policy -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLossOptions:
    """Bounds of the policy losses; which ones a loss reads is in its docstring."""

    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]; gmpo: the log-ratio's bounds
    clip_high: float = 0.2
    dual_clip: float | None = None  # ppo: for negative advantages the loss is at most -advantage * dual_clip, > 1


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss sees of a micro-batch; masked tokens have been made harmless (ratio 1, advantage 0)."""

    logprobs_K: Tensor
    log_ratio_K: Tensor  # log pi - log pi_old, clamped
    advantages_K: Tensor
    counted_K: Tensor  # float32, 1 where the token counts
    sequence_K: Tensor  # int64, 0 .. num_sequences - 1
    num_sequences: int


def _sequence_mean(value_K: Tensor, tokens: PolicyTokens) -> Tensor:
    """The mean of value_K over the counted tokens of each token's sequence, at every token; [K]."""
    zeros_S = torch.zeros(tokens.num_sequences, dtype=value_K.dtype, device=value_K.device)
    sum_S = zeros_S.index_add(0, tokens.sequence_K, value_K * tokens.counted_K)
    count_S = zeros_S.index_add(0, tokens.sequence_K, tokens.counted_K.to(value_K.dtype))
    return (sum_S / count_S.clamp(min=1))[tokens.sequence_K]


def _clipped_surrogate(ratio_K: Tensor, advantages_K: Tensor, options: PolicyLossOptions) -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r)) and where the clip bites."""
    clipped_K = ratio_K.clamp(1 - options.clip_low, 1 + options.clip_high)
    plain_K, bounded_K = -advantages_K * ratio_K, -advantages_K * clipped_K
    bites_K = bounded_K > plain_K
    metrics = {
        "clip_fraction": bites_K.float(),
        "clip_fraction_low": (bites_K & (advantages_K < 0)).float(),
        "clip_fraction_high": (bites_K & (advantages_K > 0)).float(),
    }
    return torch.maximum(plain_K, bounded_K), metrics


def ppo(tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, Schulman et al. 2017 (arXiv 1707.06347), equation 7, with DAPO's two bounds.

    term = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); r = pi / pi_old per token. dual_clip = c bounds it by
    -A c for A < 0: dual-clip PPO, Ye et al. 2020 (arXiv 1912.09729), equation 5.
    """
    advantages_K = tokens.advantages_K
    term_K, metrics = _clipped_surrogate(tokens.log_ratio_K.exp(), advantages_K, options)
    if options.dual_clip is not None:
        bound_K = -advantages_K * options.dual_clip
        bites_K = (advantages_K < 0) & (term_K > bound_K)
        metrics["dual_clip_fraction"] = bites_K.float()
        term_K = torch.where(bites_K, bound_K, term_K)
    return term_K, metrics


def gspo(tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Metrics]:
    """GSPO-token (arXiv 2507.18071), equations 13 and 14; equal to GSPO, equation 5, where A is one per sequence.

    The ratio is s = exp(mean over the sequence of log pi - log pi_old) at every token, clipped as in ppo; its gradient
    reaches each token through its own log-probability: s = sg[s] pi / sg[pi]. The paper's bounds are 3e-4 and 4e-4,
    and its aggregation is seq-mean-token-mean.
    """
    mean_K = _sequence_mean(tokens.log_ratio_K, tokens).detach()
    ratio_K = (mean_K + tokens.logprobs_K - tokens.logprobs_K.detach()).exp()
    return _clipped_surrogate(ratio_K, tokens.advantages_K, options)


def cispo(tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Metrics]:
    """CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5: -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi.

    Every token keeps a gradient. The paper leaves the lower bound open: clip_low = 1. With the engine's
    log-probabilities as the old ones and clip_low = 1, clip_high = C - 1, it is REINFORCE with importance weights
    truncated at C.
    """
    ratio_K = tokens.log_ratio_K.exp().detach()
    clipped_K = ratio_K.clamp(1 - options.clip_low, 1 + options.clip_high)
    metrics = {
        "clip_fraction": (clipped_K != ratio_K).float(),
        "clip_fraction_low": (clipped_K > ratio_K).float(),
        "clip_fraction_high": (clipped_K < ratio_K).float(),
    }
    return -clipped_K * tokens.advantages_K * tokens.logprobs_K, metrics


def gmpo(tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Metrics]:
    """GMPO (arXiv 2507.20673), equation 4: -A times the geometric mean of the sequence's clipped ratios.

    Each token's log-ratio is clipped to [-clip_low, clip_high] on the side where the clip lowers the objective: from
    above where A > 0, from below where A < 0. The bounds are log-ratios; the paper's are 0.4 and 0.4. Every token of
    a sequence has the sequence's term; the paper's aggregation is seq-mean-token-mean.
    """
    log_ratio_K, advantages_K = tokens.log_ratio_K, tokens.advantages_K
    clipped_K = torch.where(
        advantages_K > 0, log_ratio_K.clamp(max=options.clip_high), log_ratio_K.clamp(min=-options.clip_low)
    )
    bites_K = (clipped_K != log_ratio_K) & (advantages_K != 0)
    metrics = {
        "clip_fraction": bites_K.float(),
        "clip_fraction_low": (bites_K & (advantages_K < 0)).float(),
        "clip_fraction_high": (bites_K & (advantages_K > 0)).float(),
    }
    return -advantages_K * _sequence_mean(clipped_K, tokens).exp(), metrics


def reinforce(tokens: PolicyTokens, options: PolicyLossOptions) -> tuple[Tensor, Metrics]:
    """REINFORCE, Williams 1992, section 5: -A log pi. No ratio, no option: right for one update per rollout."""
    return -tokens.advantages_K * tokens.logprobs_K, {}


POLICY_LOSSES: dict[str, Callable[[PolicyTokens, PolicyLossOptions], tuple[Tensor, Metrics]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "reinforce": reinforce,
}


def policy_loss(
    name: str,
    logprobs_K: Tensor,
    old_logprobs_K: Tensor,
    advantages_K: Tensor,
    weights_K: Tensor,
    sequence_K: Tensor,
    num_sequences: int,
    options: PolicyLossOptions,
    correction_K: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """sum(term_K * correction_K * weights_K) as a scalar, and metrics that add up over micro-batches as it does.

    correction_K are the detached importance weights of the rollout correction. Sequences never cross a micro-batch,
    so means over a sequence are whole. approx_kl and approx_kl_k3 estimate KL(pi_old || pi), Schulman's k1 and k3.
    """
    counted_K = weights_K != 0
    logprobs_K = torch.where(counted_K, logprobs_K, 0.0)
    log_ratio_K = (logprobs_K - torch.where(counted_K, old_logprobs_K, 0.0)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    tokens = PolicyTokens(
        logprobs_K=logprobs_K,
        log_ratio_K=log_ratio_K,
        advantages_K=torch.where(counted_K, advantages_K, 0.0),
        counted_K=counted_K.float(),
        sequence_K=sequence_K,
        num_sequences=num_sequences,
    )
    term_K, metrics = POLICY_LOSSES[name](tokens, options)
    if correction_K is not None:
        term_K = term_K * torch.where(counted_K, correction_K.detach(), 0.0)
    detached_K = log_ratio_K.detach()
    metrics["ratio"] = detached_K.exp()
    metrics["approx_kl"] = -detached_K
    metrics["approx_kl_k3"] = torch.expm1(detached_K) - detached_K
    return (term_K * weights_K).sum(), {key: (value.detach() * weights_K).sum() for key, value in metrics.items()}


def entropy_loss(entropy_K: Tensor, weights_K: Tensor, coefficient: float) -> tuple[Tensor, Metrics]:
    """-coefficient times the aggregated entropy (nats): added to the policy loss it rewards entropy."""
    entropy = (torch.where(weights_K != 0, entropy_K, 0.0) * weights_K).sum()
    return -coefficient * entropy, {"entropy": entropy.detach()}


# --- value ------------------------------------------------------------------------------------------------------


def value_loss(
    values_K: Tensor, old_values_K: Tensor, returns_K: Tensor, weights_K: Tensor, clip: float | None
) -> tuple[Tensor, Metrics]:
    """0.5 max((V - G)^2, (V_clipped - G)^2), V_clipped = V kept within +-clip of the old value; None: no clip.

    The clipped value loss of PPO's reference code, Engstrom et al. 2020 (arXiv 2005.12729), section 3. Units are the
    reward's.
    """
    counted_K = weights_K != 0
    values_K, old_values_K, returns_K = (torch.where(counted_K, x, 0.0) for x in (values_K, old_values_K, returns_K))
    squares_K = (values_K - returns_K).square()
    bites_K = torch.zeros_like(counted_K)
    if clip is not None:
        clipped_K = torch.clamp(values_K, old_values_K - clip, old_values_K + clip)
        clipped_squares_K = (clipped_K - returns_K).square()
        bites_K = clipped_squares_K > squares_K
        squares_K = torch.maximum(squares_K, clipped_squares_K)
    metrics = {
        "value_clip_fraction": bites_K.float(),
        "value": values_K.detach(),
        "return": returns_K,
        "value_error": (values_K.detach() - returns_K).square(),
    }
    return (0.5 * squares_K * weights_K).sum(), {key: (value * weights_K).sum() for key, value in metrics.items()}


def explained_variance(values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns) over the tokens of the mask; 0 where the returns do not vary.

    1: the critic knows the returns; 0: no better than their mean; below 0: worse. Of the whole batch: it does not add
    up over micro-batches.
    """
    values, returns = values_BR[mask_BR].double(), returns_BR[mask_BR].double()
    variance = returns.var(correction=0)
    explained = 1 - (returns - values).var(correction=0) / variance
    return torch.where(variance > 0, explained, 0.0).float()
