"""Vocabulary-parallel log-probabilities and entropy, in chunks, so that no [tokens, vocabulary] tensor lives.

Shape suffixes: K response tokens, C tokens of one chunk, H hidden size, v this TP rank's slice of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch import MicroBatch

FORWARD_BLOCK, BACKWARD_BLOCK = 4096, 2048  # columns that a program of the kernels holds at a time
LOWEST = -1e30  # instead of -inf, which times 0 is nan


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


def use_kernels(tensor: Tensor) -> bool:
    """Whether the chunk's own part is computed by Triton: on CUDA, where it is installed."""
    return tensor.is_cuda and platform.has_triton()


def _all_reduce(tensor: Tensor, shard: VocabShard, op: dist.ReduceOp.RedOpType) -> Tensor:
    if shard.group is not None:
        dist.all_reduce(tensor, op=op, group=shard.group)
    return tensor


def _chunk_logits(hidden_CH: Tensor, weight_vH: Tensor) -> Tensor:
    """float32 logits of a chunk; the product is accumulated into float32, as vLLM's float32 head does."""
    if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
        return torch.mm(hidden_CH, weight_vH.t(), out_dtype=torch.float32)
    return hidden_CH.float() @ weight_vH.float().t()


def _add_product(into_vH: Tensor, grad_Cv: Tensor, hidden_CH: Tensor) -> None:
    """into += grad^T hidden, in float32."""
    if hidden_CH.dtype == torch.float32:
        into_vH.addmm_(grad_Cv.t(), hidden_CH)
    elif hidden_CH.is_cuda:
        torch.addmm(into_vH, grad_Cv.t(), hidden_CH, out_dtype=torch.float32, out=into_vH)
    else:
        into_vH += (grad_Cv.t() @ hidden_CH).float()


def _main_gradient(weight_vH: Tensor) -> Tensor | None:
    """Where megatron-core's DDP collects the weight's gradient in float32; None without it."""
    if not hasattr(weight_vH, "main_grad") or weight_vH.main_grad.dtype != torch.float32:
        return None
    return weight_vH.main_grad


def _local_labels(labels_K: Tensor, shard: VocabShard) -> Tensor:
    """Column of each label in this shard, -1 where it is in another."""
    local_K = labels_K - shard.first
    return torch.where((local_K >= 0) & (local_K < shard.real), local_K, -1)


def _row_sums(logits_Cv: Tensor, options: LogprobOptions, real: int) -> Tensor:
    """[3, C]: with x = logit / temperature, max x, sum exp(x - max), sum exp(x - max) (x - max), over this shard."""
    if use_kernels(logits_Cv):
        from megatron_rl.logprobs_kernel import row_sums

        count, width = logits_Cv.shape
        out_3C = torch.empty(3, count, dtype=torch.float32, device=logits_Cv.device)
        arguments = (logits_Cv, out_3C, count, width, real, options.temperature)
        row_sums[(count,)](*arguments, ENTROPY=options.entropy, BLOCK=FORWARD_BLOCK, num_warps=8)
        return out_3C
    x_Cr = logits_Cv[:, :real] / options.temperature
    top_C = x_Cr.amax(1) if real else x_Cr.new_full((len(x_Cr),), float("-inf"))
    x_Cr -= top_C[:, None]
    exp_Cr = x_Cr.exp()
    weighted_C = exp_Cr.mul(x_Cr).sum(1) if options.entropy else torch.zeros_like(top_C)
    return torch.stack((top_C, exp_Cr.sum(1), weighted_C))


def _logit_gradients(
    logits_Cv: Tensor,
    local_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    pull_2C: Tensor,
    options: LogprobOptions,
    real: int,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits where that of (log-probability, entropy) is `pull_2C`; 0 in the padding."""
    if use_kernels(logits_Cv):
        from megatron_rl.logprobs_kernel import row_gradients

        count, width = logits_Cv.shape
        grad_Cv = torch.empty_like(logits_Cv, dtype=dtype)
        grid = (count * -(-width // BACKWARD_BLOCK),)
        vectors = (local_C, lse_C, entropy_C, pull_2C, pull_2C.stride(0))
        numbers = (width, real, options.temperature)
        row_gradients[grid](logits_Cv, grad_Cv, *vectors, *numbers, ENTROPY=options.entropy, BLOCK=BACKWARD_BLOCK)
        return grad_Cv
    logprobs_Cr = logits_Cv[:, :real] / options.temperature - lse_C[:, None]
    probs_Cr = logprobs_Cr.exp()
    grad_Cv = torch.zeros_like(logits_Cv)
    grad_Cr = grad_Cv[:, :real]
    torch.mul(probs_Cr, -pull_2C[0, :, None], out=grad_Cr)
    if real:
        grad_Cr.scatter_add_(1, local_C.clamp(min=0)[:, None], torch.where(local_C >= 0, pull_2C[0], 0.0)[:, None])
    if options.entropy:  # dH/dx = -p (log p + H)
        grad_Cr -= probs_Cr * (logprobs_Cr + entropy_C[:, None]) * pull_2C[1, :, None]
    return grad_Cv.div_(options.temperature).to(dtype)


class _ChunkedLogprobs(torch.autograd.Function):
    """[2, K] float32: log p(label) and entropy of softmax(hidden @ weight^T / temperature).

    The backward pass recomputes each chunk's logits. Where DDP keeps the weight's gradient in float32, it is never
    rounded to the weight's type. Gradients are this rank's share: the caller sums that of hidden over the
    tensor-parallel group.
    """

    @staticmethod
    def forward(ctx, hidden_KH, weight_vH, labels_K, options: LogprobOptions, shard: VocabShard):  # type: ignore[override]
        sums_3K = torch.empty(3, len(labels_K), dtype=torch.float32, device=hidden_KH.device)
        target_K, local_K = torch.empty_like(sums_3K[0]), _local_labels(labels_K, shard)
        for at in range(0, len(labels_K), options.chunk_tokens):
            chunk = slice(at, at + options.chunk_tokens)
            logits_Cv = _chunk_logits(hidden_KH[chunk], weight_vH)
            target_K[chunk] = logits_Cv.gather(1, local_K[chunk].clamp(min=0)[:, None])[:, 0]
            sums_3K[:, chunk] = _row_sums(logits_Cv, options, shard.real)
            del logits_Cv  # before the next chunk's
        own_K, total_K, weighted_K = sums_3K
        top_K = _all_reduce(own_K.clone(), shard, dist.ReduceOp.MAX)
        target_K = torch.where(local_K >= 0, target_K / options.temperature - top_K, 0.0)
        if shard.group is not None:  # sums relative to this shard's maximum -> to that of all
            moved_K, shrink_K = (own_K - top_K).clamp(min=LOWEST), (own_K - top_K).exp()
            weighted_K, total_K = shrink_K * (weighted_K + moved_K * total_K), shrink_K * total_K
        summed_3K = _all_reduce(torch.stack((total_K, weighted_K, target_K)), shard, dist.ReduceOp.SUM)
        total_K, weighted_K, target_K = summed_3K
        log_total_K = total_K.log()
        entropy_K = log_total_K - weighted_K / total_K if options.entropy else torch.zeros_like(total_K)
        out_2K, lse_K = torch.stack((target_K - log_total_K, entropy_K)), top_K + log_total_K
        ctx.save_for_backward(hidden_KH, weight_vH, labels_K, lse_K, out_2K)
        ctx.options, ctx.shard = options, shard
        return out_2K

    @staticmethod
    def backward(ctx, grad_2K):  # type: ignore[override]
        hidden_KH, weight_vH, labels_K, lse_K, out_2K = ctx.saved_tensors
        options, shard = ctx.options, ctx.shard
        local_K, grad_2K = _local_labels(labels_K, shard), grad_2K.contiguous()
        grad_hidden_KH, main_vH = torch.empty_like(hidden_KH), _main_gradient(weight_vH)
        grad_weight_vH = torch.zeros_like(weight_vH, dtype=torch.float32) if main_vH is None else main_vH
        for at in range(0, len(labels_K), options.chunk_tokens):
            chunk = slice(at, at + options.chunk_tokens)
            logits_Cv = _chunk_logits(hidden_KH[chunk], weight_vH)
            vectors = (local_K[chunk], lse_K[chunk], out_2K[1, chunk], grad_2K[:, chunk])
            grad_Cv = _logit_gradients(logits_Cv, *vectors, options, shard.real, weight_vH.dtype)
            del logits_Cv
            torch.mm(grad_Cv, weight_vH, out=grad_hidden_KH[chunk])
            _add_product(grad_weight_vH, grad_Cv, hidden_KH[chunk])
            del grad_Cv
        if main_vH is None:
            return grad_hidden_KH, grad_weight_vH.to(weight_vH.dtype), None, None, None
        weight_vH.grad_added_to_main_grad = True
        # autograd still wants one: DDP reads it for a tied embedding alone, which adds its own share to it
        unread_vH = (torch.zeros_like if getattr(weight_vH, "zero_out_wgrad", False) else torch.empty_like)(weight_vH)
        return grad_hidden_KH, unread_vH, None, None, None


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
