"""From the pure formulas to what step.py calls: (head output, micro-batch) -> (loss, metrics)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.algorithms.kl import kl_loss
from megatron_rl.algorithms.losses import PolicyLossOptions, entropy_loss, loss_weights, policy_loss, value_loss
from megatron_rl.algorithms.preference import PairLogprobs, PreferenceOptions, preference_loss
from megatron_rl.batch import Batch, MicroBatch
from megatron_rl.step import Loss


@dataclass(frozen=True)
class PolicyObjective:
    """What is added up: the clipped surrogate, the entropy bonus, the KL to the reference."""

    name: str
    options: PolicyLossOptions
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # 0 where the KL acts in the reward, or not at all
    kl_estimator: str = "k3"
    tokens: int = 1  # response tokens of the step's only optimizer batch, where it has no old log-probabilities


def policy_objective(objective: PolicyObjective) -> Loss:
    """The policy's loss on rows (log-probabilities, entropies) of the language-model head.

    Without old log-probabilities the current ones stand for them, detached: the ratio is 1 and has its gradient.
    """

    def loss(out_2K: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_K, entropy_K = out_2K
        total, metrics = policy_loss(
            objective.name,
            logprobs_K,
            logprobs_K.detach() if micro.old_logprobs_K is None else micro.old_logprobs_K,
            micro.advantages_K,
            micro.weights_K,
            micro.sequence_K,
            micro.num_sequences,
            objective.options,
            micro.correction_K,
        )
        if micro.old_logprobs_K is None:
            difference_K = (logprobs_K.detach() - micro.rollout_logprobs_K) * (micro.weights_K != 0)  # dummies: 0
            k3_K = difference_K.expm1() - difference_K
            metrics |= {"engine_diff": difference_K.abs().sum() / objective.tokens}
            metrics |= {"engine_k3": k3_K.sum() / objective.tokens}
        if objective.entropy_coef:
            bonus, entropy = entropy_loss(entropy_K, micro.weights_K, objective.entropy_coef)
            total, metrics = total + bonus, metrics | entropy
        if objective.kl_coef:
            penalty, kl = kl_loss(
                logprobs_K, micro.ref_logprobs_K, micro.weights_K, objective.kl_coef, objective.kl_estimator
            )
            total, metrics = total + penalty, metrics | kl
        return total, metrics

    return loss


def value_objective(clip: float | None) -> Loss:
    """The critic's loss on the one row (values) of the value head."""

    def loss(out_1K: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss(out_1K[0], micro.values_K, micro.returns_K, micro.weights_K, clip)

    return loss


def preference_objective(name: str, options: PreferenceOptions) -> Loss:
    """The loss of whole pairs on row log-probabilities: sequences 2i and 2i + 1 are chosen and rejected of one pair.

    An only sequence, as a rank without work of its own is given, is no pair: the loss is then an empty sum.
    """

    def loss(out_2K: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        count = micro.num_sequences // 2

        def by_pair(values_K: Tensor) -> tuple[Tensor, Tensor]:  # sums over the tokens of chosen [P] and rejected [P]
            sums_S = values_K.new_zeros(micro.num_sequences).index_add(0, micro.sequence_K, values_K)
            return sums_S[: 2 * count : 2], sums_S[1 : 2 * count : 2]

        reference = (None, None) if micro.ref_logprobs_K is None else by_pair(micro.ref_logprobs_K)
        pairs = PairLogprobs(*by_pair(out_2K[0]), *by_pair(torch.ones_like(out_2K[0])), *reference)
        losses_P, metrics = preference_loss(name, pairs, options)
        weights_S = micro.weights_K.new_zeros(micro.num_sequences)
        weights_S[micro.sequence_K] = micro.weights_K  # equal over a sequence
        weights_P = weights_S[: 2 * count : 2]
        summed = {key: (values_P * weights_P).sum() for key, values_P in metrics.items()}
        return (losses_P * weights_P).sum(), summed

    return loss


@dataclass(frozen=True)
class MinibatchOptions:
    """How a rollout batch is cut into optimizer batches."""

    size: int | None  # sequences of an optimizer step; None: all
    epochs: int
    aggregation: str
    fixed_length: int
    seed: int


def minibatches(batch: Batch, options: MinibatchOptions, step: int) -> Iterator[Batch]:
    """The optimizer batches of every epoch, shuffled by seed and step, with their loss weights.

    What the rollout correction rejected has weight 0 and is not counted.
    """
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    for _ in range(options.epochs):
        for index in torch.randperm(len(batch), generator=generator).split(options.size or len(batch)):
            part = batch.select(index)
            mask_BR = part.mask_BR if part.correction_BR is None else part.mask_BR & (part.correction_BR != 0)
            yield replace(part, weights_BR=loss_weights(mask_BR, options.aggregation, options.fixed_length))
