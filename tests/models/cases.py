"""Micro-batches and losses that the layout tests compute on both sides: here and in transformers."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.batch import MicroBatch

LENGTHS = [[40, 7, 17], [30, 10], [15, 9, 20], [22, 2]]  # tokens of the sequences of four micro-batches; all even sums
LR, CLIP = 0.5, 1.0
EPS = 1.0  # of Adam: large, so that an element with next to no gradient does not step by the sign of rounding


def micro_batches(vocab: int) -> list[MicroBatch]:
    """Random tokens; every token but a sequence's first is predicted."""
    return [micro_batch(lengths, vocab, seed) for seed, lengths in enumerate(LENGTHS)]


def micro_batch(lengths: list[int], vocab: int, seed: int) -> MicroBatch:
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    borders = torch.tensor([0, *lengths]).cumsum(0)
    predict = torch.cat([torch.arange(a, b - 1) for a, b in zip(borders[:-1], borders[1:], strict=True)])
    return MicroBatch(
        tokens_1T=tokens[None],
        positions_1T=torch.cat([torch.arange(n) for n in lengths])[None],
        cu_seqlens=borders.int(),
        max_seqlen=max(lengths),
        predict_K=predict,
        labels_K=tokens[predict + 1],
        sequence_K=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) - 1),
        num_sequences=len(lengths),
    )


def padded(micro: MicroBatch, length: int) -> MicroBatch:
    """The micro-batch with a last sequence that nobody reads, of what is missing to `length` tokens."""
    missing = length - micro.tokens_1T.shape[1]
    if not missing:
        return micro
    return replace(
        micro,
        tokens_1T=torch.nn.functional.pad(micro.tokens_1T, (0, missing)),
        positions_1T=torch.cat([micro.positions_1T, torch.arange(missing)[None]], dim=1),
        cu_seqlens=torch.cat([micro.cu_seqlens, torch.tensor([length], dtype=torch.int32)]),
        max_seqlen=max(micro.max_seqlen, missing),
    )


def lm_loss(logits_TV: Tensor, micro: MicroBatch) -> Tensor:
    logprobs_KV = logits_TV[micro.predict_K].log_softmax(-1)
    return -0.01 * logprobs_KV.gather(1, micro.labels_K[:, None]).sum()


def value_loss(values_T: Tensor, micro: MicroBatch) -> Tensor:
    return 0.01 * (values_T[micro.predict_K] - 1).pow(2).sum()


LOSSES: dict[str, Callable[[Tensor, MicroBatch], Tensor]] = {"lm": lm_loss, "value": value_loss}
