"""Losses on pairs of a chosen and a rejected completion: DPO and its relatives.

Shape suffix: P pairs. A log-probability of a completion is the sum over its tokens (EOS included), in nats, given the
prompt; token counts are of the completion alone. d = log pi - log pi_ref of one completion. Losses come back per pair:
the caller weighs them with 1 / pairs of the whole optimizer batch, so micro-batches and ranks add up; metrics are per
pair too and are averaged the same way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Metrics = dict[str, Tensor]
MAX_EXPONENT = 40.0  # exp is held below 2e17: its square (ipo) is still finite in float32


@dataclass(frozen=True)
class PairLogprobs:
    chosen_P: Tensor  # summed log-probability of the chosen completion, differentiable
    rejected_P: Tensor
    chosen_tokens_P: Tensor  # tokens of the completions, at least 1
    rejected_tokens_P: Tensor
    ref_chosen_P: Tensor | None = None  # the reference's; None: reference-free, log pi_ref is taken as 0
    ref_rejected_P: Tensor | None = None


@dataclass(frozen=True)
class PreferenceOptions:
    beta: float = 0.1  # scale of the implicit reward; ipo: tau; orpo: lambda
    label_smoothing: float = 0.0  # probability that a label is flipped, in [0, 0.5): sigmoid, robust, simpo, exo_pair
    simpo_gamma: float = 0.5  # simpo: the reward margin to reach
    rpo_alpha: float = 0.0  # weight of the NLL per token of the chosen completion, added to any loss
    length_normalize: bool = False  # scores are divided by token counts (ipo, simpo and orpo always do)
    f_divergence: str = "reverse_kl"  # a name of F_DIVERGENCES
    f_alpha: float = 0.5  # alpha of alpha_divergence


# --- f-divergences ----------------------------------------------------------------------------------------------


def _reverse_kl(d_P: Tensor, options: PreferenceOptions) -> Tensor:
    """log t: DPO."""
    return d_P


def _forward_kl(d_P: Tensor, options: PreferenceOptions) -> Tensor:
    """1 - 1/t, kept apart from overflow."""
    return -torch.expm1((-d_P).clamp(max=MAX_EXPONENT))


def _js_divergence(d_P: Tensor, options: PreferenceOptions) -> Tensor:
    """log(2 t / (1 + t))."""
    return math.log(2) + F.logsigmoid(d_P)


def _alpha_divergence(d_P: Tensor, options: PreferenceOptions) -> Tensor:
    """(t^(alpha - 1) - 1) / (alpha - 1); log t where alpha is 1."""
    power = options.f_alpha - 1
    if abs(power) < 1e-6:
        return d_P
    return torch.expm1((power * d_P).clamp(max=MAX_EXPONENT)) / power


# f'(t) at t = pi / pi_ref up to a constant: f-DPO, Wang et al. 2023 (arXiv 2309.16240), table 1 and equation 14
F_DIVERGENCES: dict[str, Callable[[Tensor, PreferenceOptions], Tensor]] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "js_divergence": _js_divergence,
    "alpha_divergence": _alpha_divergence,
}


# --- scores -----------------------------------------------------------------------------------------------------


def _log_ratios(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    """d of chosen and rejected; log pi itself without a reference."""
    if pairs.ref_chosen_P is None or pairs.ref_rejected_P is None:
        return pairs.chosen_P, pairs.rejected_P
    return pairs.chosen_P - pairs.ref_chosen_P, pairs.rejected_P - pairs.ref_rejected_P


def _scores(pairs: PairLogprobs, options: PreferenceOptions, per_token: bool = False) -> tuple[Tensor, Tensor]:
    """f'(pi / pi_ref) of chosen and rejected, per token where asked for."""
    chosen_P, rejected_P = (F_DIVERGENCES[options.f_divergence](d_P, options) for d_P in _log_ratios(pairs))
    if per_token or options.length_normalize:
        return chosen_P / pairs.chosen_tokens_P, rejected_P / pairs.rejected_tokens_P
    return chosen_P, rejected_P


def _logits(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """h = beta (score of chosen - score of rejected)."""
    chosen_P, rejected_P = _scores(pairs, options)
    return options.beta * (chosen_P - rejected_P)


def _mean_logprobs(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    return pairs.chosen_P / pairs.chosen_tokens_P, pairs.rejected_P / pairs.rejected_tokens_P


def _smoothed_log_sigmoid(h_P: Tensor, eps: float) -> Tensor:
    return -(1 - eps) * F.logsigmoid(h_P) - eps * F.logsigmoid(-h_P)


# --- losses -----------------------------------------------------------------------------------------------------


def sigmoid(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """DPO, Rafailov et al. 2023 (arXiv 2305.18290), equation 7: -log sigma(h).

    With label smoothing eps it is conservative DPO, -(1 - eps) log sigma(h) - eps log sigma(-h): Mitchell 2023, "A
    note on DPO with noisy preferences and relationship to IPO", equation 3.
    """
    return _smoothed_log_sigmoid(_logits(pairs, options), options.label_smoothing)


def hinge(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """SLiC, Zhao et al. 2023 (arXiv 2305.10425), as in RSO (arXiv 2309.06657), equation 8: max(0, 1 - h)."""
    return torch.relu(1 - _logits(pairs, options))


def ipo(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """IPO, Azar et al. 2023 (arXiv 2310.12036), equation 17: (score difference - 1 / (2 beta))^2.

    Scores are per token, as the authors' own results are: a sum would make the target depend on the length.
    """
    chosen_P, rejected_P = _scores(pairs, options, per_token=True)
    return (chosen_P - rejected_P - 1 / (2 * options.beta)).square()


def robust(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """Robust DPO, Chowdhury et al. 2024 (arXiv 2403.00409), equation 12: unbiased where a share eps is flipped.

    [-(1 - eps) log sigma(h) + eps log sigma(-h)] / (1 - 2 eps).
    """
    eps, h_P = options.label_smoothing, _logits(pairs, options)
    return (-(1 - eps) * F.logsigmoid(h_P) + eps * F.logsigmoid(-h_P)) / (1 - 2 * eps)


def exo_pair(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """EXO for pairs, Ji et al. 2024 (arXiv 2402.00856), equation 16: KL of (sigma(h), sigma(-h)) to (1 - eps, eps)."""
    eps, h_P = options.label_smoothing, _logits(pairs, options)
    chosen_P = torch.sigmoid(h_P) * (F.logsigmoid(h_P) - math.log1p(-eps))
    return chosen_P + torch.sigmoid(-h_P) * (F.logsigmoid(-h_P) - math.log(eps))


def nca_pair(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """NCA for pairs, Chen et al. 2024 (arXiv 2402.05369), section 4: rewards beta d against an absolute zero.

    -log sigma(beta d_c) - 0.5 log sigma(-beta d_c) - 0.5 log sigma(-beta d_r).
    """
    chosen_P, rejected_P = (options.beta * score_P for score_P in _scores(pairs, options))
    return -F.logsigmoid(chosen_P) - 0.5 * F.logsigmoid(-chosen_P) - 0.5 * F.logsigmoid(-rejected_P)


def apo_zero(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """APO-zero, D'Oosterlinck et al. 2024 (arXiv 2408.06266), equation 7: where chosen is better than the model.

    1 - sigma(beta d_c) + sigma(beta d_r).
    """
    chosen_P, rejected_P = _scores(pairs, options)
    return torch.sigmoid(-options.beta * chosen_P) + torch.sigmoid(options.beta * rejected_P)


def apo_down(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """APO-down, D'Oosterlinck et al. 2024 (arXiv 2408.06266), equation 8: where the model is better than chosen.

    sigma(beta d_c) + 1 - sigma(beta (d_c - d_r)).
    """
    chosen_P, _ = _scores(pairs, options)
    return torch.sigmoid(options.beta * chosen_P) + torch.sigmoid(-_logits(pairs, options))


def simpo(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """SimPO, Meng et al. 2024 (arXiv 2405.14734), equation 6; no reference: -log sigma(beta mean difference - gamma).

    Mean log-probabilities per token; label smoothing as in sigmoid.
    """
    chosen_P, rejected_P = _mean_logprobs(pairs)
    h_P = options.beta * (chosen_P - rejected_P) - options.simpo_gamma
    return _smoothed_log_sigmoid(h_P, options.label_smoothing)


def orpo(pairs: PairLogprobs, options: PreferenceOptions) -> Tensor:
    """ORPO, Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7; no reference.

    NLL of chosen per token - beta log sigma(log odds_c - log odds_r); odds = p / (1 - p) of the mean log-probability.
    """
    chosen_P, rejected_P = _mean_logprobs(pairs)
    odds_P = (chosen_P - rejected_P) - (_log1mexp(chosen_P) - _log1mexp(rejected_P))
    return -chosen_P - options.beta * F.logsigmoid(odds_P)


def _log1mexp(x_P: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 in the form that keeps its digits; x is held at most -1e-6, where it is finite."""
    x_P = x_P.clamp(max=-1e-6)
    return torch.where(x_P < -math.log(2), torch.log1p(-x_P.exp()), (-torch.expm1(x_P)).log())


PREFERENCE_LOSSES: dict[str, Callable[[PairLogprobs, PreferenceOptions], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "orpo": orpo,
}
NO_REFERENCE = frozenset({"simpo", "orpo"})  # no reference model is built for them
# The other losses score a completion alone, where the partition function of an f-divergence does not cancel.
F_DIVERGENCE_LOSSES = frozenset({"sigmoid", "hinge", "ipo", "robust", "exo_pair"})
SMOOTHED_LOSSES = frozenset({"sigmoid", "robust", "exo_pair", "simpo"})


def check_preference_options(name: str, options: PreferenceOptions, reference_free: bool = False) -> None:
    """ValueError, at launch, where a loss and its options do not go together."""
    eps = options.label_smoothing
    if not 0 <= eps < 0.5:
        raise ValueError(f"--label-smoothing is {eps}: a probability of a flipped label in [0, 0.5) is needed")
    if name == "exo_pair" and eps == 0:
        raise ValueError("--dpo-loss exo_pair needs --label-smoothing above 0 (the paper's is 1e-3), it is 0")
    if eps > 0 and name not in SMOOTHED_LOSSES:
        raise ValueError(
            f"--label-smoothing is {eps} but --dpo-loss {name} has none; it is for "
            f"{', '.join(sorted(SMOOTHED_LOSSES))}"
        )
    if options.beta <= 0:
        raise ValueError(f"--beta is {options.beta}: it must be above 0")
    if options.f_divergence != "reverse_kl" and (name not in F_DIVERGENCE_LOSSES or reference_free):
        raise ValueError(
            f"--f-divergence {options.f_divergence} needs a reference (no --reference-free) and one of the losses "
            f"{', '.join(sorted(F_DIVERGENCE_LOSSES))}; --dpo-loss is {name}"
        )


def preference_loss(name: str, pairs: PairLogprobs, options: PreferenceOptions) -> tuple[Tensor, Metrics]:
    """Loss per pair [P], and metrics per pair [P], all to be averaged over the pairs of the optimizer batch.

    rpo_alpha adds alpha * NLL of chosen / its tokens: iterative RPO, Pang et al. 2024 (arXiv 2404.19733), equation 1.
    Rewards are beta d (simpo, orpo: beta times the mean log-probability). kl is the mean of d over both completions:
    how far the policy has moved on this data, not a KL of its own samples.
    """
    losses_P = PREFERENCE_LOSSES[name](pairs, options)
    nll_P = -pairs.chosen_P / pairs.chosen_tokens_P
    if options.rpo_alpha:
        losses_P = losses_P + options.rpo_alpha * nll_P
    with torch.no_grad():
        chosen_P, rejected_P = _mean_logprobs(pairs) if name in NO_REFERENCE else _log_ratios(pairs)
        metrics = {
            "reward_chosen": options.beta * chosen_P,
            "reward_rejected": options.beta * rejected_P,
            "reward_margin": options.beta * (chosen_P - rejected_P),
            "accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
            "logprob_chosen": pairs.chosen_P,
            "logprob_rejected": pairs.rejected_P,
            "nll_chosen": nll_P,
        }
        if name not in NO_REFERENCE and pairs.ref_chosen_P is not None:
            metrics["kl"] = 0.5 * (chosen_P + rejected_P)
    return losses_P, {key: value.detach() for key, value in metrics.items()}
