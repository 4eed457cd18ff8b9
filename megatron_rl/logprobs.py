"""Vocabulary-parallel log-probabilities and entropy, in chunks, so that no [tokens, vocabulary] tensor lives.

Shape suffixes: K response tokens, C tokens of one chunk, H hidden size, v this TP rank's slice of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batch import MicroBatch


@dataclass(frozen=True)
class VocabShard:
    """This rank's slice of the vocabulary."""

    first: int  # the token id of its first row
    real: int  # rows that are tokens; those after them are padding and get probability 0
    group: dist.ProcessGroup | None  # tensor-parallel group; None where it has one rank


@dataclass(frozen=True)
class LogprobOptions:
    temperature: float = 1.0
    chunk_tokens: int = 1024  # tokens whose logits exist at one time
    entropy: bool = True  # False: the entropy row is left zero and costs nothing


def vocab_shard(vocab_size: int, rows: int, tp_rank: int, group: dist.ProcessGroup) -> VocabShard:
    """The shard that a weight of `rows` rows on `tp_rank` is, of a vocabulary of `vocab_size` tokens."""
    first = tp_rank * rows
    real = max(0, min(vocab_size - first, rows))
    return VocabShard(first=first, real=real, group=group if group.size() > 1 else None)


def _all_reduce(tensor: Tensor, shard: VocabShard, op: dist.ReduceOp.RedOpType) -> Tensor:
    if shard.group is not None:
        dist.all_reduce(tensor, op=op, group=shard.group)
    return tensor


def _chunk_logits(hidden_CH: Tensor, weight_vH: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """float32 logits of a chunk; the product is accumulated into float32, as vLLM's float32 head does."""
    if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
        logits_Cv = torch.mm(hidden_CH, weight_vH.t(), out_dtype=torch.float32)
    else:
        logits_Cv = hidden_CH.float() @ weight_vH.float().t()
    if temperature != 1.0:
        logits_Cv /= temperature
    logits_Cv[:, shard.real :] = float("-inf")
    return logits_Cv


def _local_labels(labels_C: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Row of each label in this shard (clamped) and whether it is here."""
    local_C = labels_C - shard.first
    here_C = (local_C >= 0) & (local_C < shard.real)
    return local_C.clamp(0, max(shard.real - 1, 0)), here_C


class _ChunkedLogprobs(torch.autograd.Function):
    """[2, K] float32: log p(label) and entropy of softmax(hidden @ weight^T / temperature).

    The backward pass recomputes each chunk's logits. Gradients are this rank's share: the caller sums the gradient of
    hidden over the tensor-parallel group.
    """

    @staticmethod
    def forward(ctx, hidden_KH, weight_vH, labels_K, options: LogprobOptions, shard: VocabShard):  # type: ignore[override]
        out_2K = torch.zeros(2, len(labels_K), dtype=torch.float32, device=hidden_KH.device)
        lse_K = torch.empty(len(labels_K), dtype=torch.float32, device=hidden_KH.device)
        for at in range(0, len(labels_K), options.chunk_tokens):
            chunk = slice(at, at + options.chunk_tokens)
            logits_Cv = _chunk_logits(hidden_KH[chunk], weight_vH, options.temperature, shard)
            top_C = _all_reduce(logits_Cv.amax(1), shard, dist.ReduceOp.MAX)
            local_C, here_C = _local_labels(labels_K[chunk], shard)
            target_C = torch.where(here_C, logits_Cv.gather(1, local_C[:, None])[:, 0] - top_C, 0.0)
            logits_Cv -= top_C[:, None]
            exp_Cv = logits_Cv.exp()
            sums_3C = torch.stack((exp_Cv.sum(1), torch.zeros_like(top_C), target_C))
            if options.entropy:  # padding is exp(-inf) * -inf = nan without the mask
                sums_3C[1] = (exp_Cv[:, : shard.real] * logits_Cv[:, : shard.real]).sum(1)
            total_C, weighted_C, target_C = _all_reduce(sums_3C, shard, dist.ReduceOp.SUM)
            log_total_C = total_C.log()
            out_2K[0, chunk] = target_C - log_total_C
            if options.entropy:
                out_2K[1, chunk] = log_total_C - weighted_C / total_C
            lse_K[chunk] = top_C + log_total_C
        ctx.save_for_backward(hidden_KH, weight_vH, labels_K, lse_K, out_2K)
        ctx.options, ctx.shard = options, shard
        return out_2K

    @staticmethod
    def backward(ctx, grad_2K):  # type: ignore[override]
        hidden_KH, weight_vH, labels_K, lse_K, out_2K = ctx.saved_tensors
        options, shard = ctx.options, ctx.shard
        grad_hidden_KH = torch.empty_like(hidden_KH)
        grad_weight_vH = torch.zeros_like(weight_vH, dtype=torch.float32)
        for at in range(0, len(labels_K), options.chunk_tokens):
            chunk = slice(at, at + options.chunk_tokens)
            logits_Cv = _chunk_logits(hidden_KH[chunk], weight_vH, options.temperature, shard)
            logits_Cv -= lse_K[chunk, None]  # log-probabilities
            probs_Cv = logits_Cv.exp()
            grad_Cv = probs_Cv * -grad_2K[0, chunk, None]
            local_C, here_C = _local_labels(labels_K[chunk], shard)
            grad_Cv.scatter_add_(1, local_C[:, None], torch.where(here_C, grad_2K[0, chunk], 0.0)[:, None])
            if options.entropy:  # dH/dz = -p (log p + H)
                logits_Cv[:, shard.real :] = 0.0
                grad_Cv -= probs_Cv * (logits_Cv + out_2K[1, chunk, None]) * grad_2K[1, chunk, None]
            grad_Cv /= options.temperature
            scaled_Cv = grad_Cv.to(weight_vH.dtype)
            grad_hidden_KH[chunk] = scaled_Cv @ weight_vH
            grad_weight_vH += (scaled_Cv.t() @ hidden_KH[chunk]).float()
        return grad_hidden_KH, grad_weight_vH.to(weight_vH.dtype), None, None, None


def chunked_logprobs(
    hidden_KH: Tensor, weight_vH: Tensor, labels_K: Tensor, options: LogprobOptions, shard: VocabShard
) -> Tensor:
    """[2, K] float32: log-probabilities of the labels after temperature, and entropies in nats.

    hidden_KH and weight_vH share a dtype; the matrix products run in it, everything after them in float32.
    """
    return _ChunkedLogprobs.apply(hidden_KH, weight_vH, labels_K, options, shard)


Head = Callable[[Tensor, Tensor, MicroBatch], Tensor]  # (hidden_TH, output weight, micro-batch) -> [rows, K] float32


def logprob_head(vocab_size: int, tp_rank: int, group: dist.ProcessGroup, options: LogprobOptions) -> Head:
    """The head of a language model: row 0 log-probabilities of the response tokens, row 1 entropies."""

    def head(hidden_TH: Tensor, weight_vH: Tensor, micro: MicroBatch) -> Tensor:
        shard = vocab_shard(vocab_size, weight_vH.shape[0], tp_rank, group)
        return chunked_logprobs(hidden_TH[micro.predict_K], weight_vH, micro.labels_K, options, shard)

    return head
