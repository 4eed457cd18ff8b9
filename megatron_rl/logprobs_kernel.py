"""The kernels of logprobs.py: one pass over a chunk's logits forward, one backward. Importing this imports Triton.

Shape suffixes: C tokens of the chunk, v this TP rank's slice of the vocabulary.
"""

import triton
import triton.language as tl


@triton.jit
def row_sums(
    logits_Cv,
    out_3C,
    count,  # C
    width,  # v
    real,  # columns that are tokens
    temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token: with x = logit / temperature, max x, sum exp(x - max) and sum exp(x - max) (x - max)."""
    token = tl.program_id(0)
    row = logits_Cv + token.to(tl.int64) * width
    top, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < real
        x = tl.load(row + column, mask=inside, other=float("-inf")) / temperature
        new_top = tl.maximum(top, tl.max(x, 0))
        shrink = tl.exp(top - new_top)  # 0 for the first block
        exp = tl.exp(x - new_top)
        if ENTROPY:
            moved = tl.where(total > 0, (top - new_top) * total, 0.0)  # inf * 0 in the first block
            weighted = shrink * (weighted + moved) + tl.sum(tl.where(inside, exp * (x - new_top), 0.0), 0)
        total = shrink * total + tl.sum(exp, 0)
        top = new_top
    tl.store(out_3C + token, top)
    tl.store(out_3C + count + token, total)
    tl.store(out_3C + 2 * count + token, weighted)


@triton.jit
def row_gradients(
    logits_Cv,
    grad_Cv,  # in the type of the products that follow
    label_C,  # its column here; -1: on another rank
    lse_C,
    entropy_C,
    pull_2C,  # gradients of log-probability and entropy
    pull_stride,
    width,  # v
    real,
    temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a token's columns: the gradient of the logits, 0 in the padding."""
    blocks = tl.cdiv(width, BLOCK)
    token = tl.program_id(0) // blocks
    at = token.to(tl.int64) * width
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    logprob = tl.load(logits_Cv + at + column, mask=column < real, other=0.0) / temperature - tl.load(lse_C + token)
    prob = tl.exp(logprob)
    pull = tl.load(pull_2C + token)
    grad = tl.where(column == tl.load(label_C + token), pull, 0.0) - prob * pull
    if ENTROPY:  # dH/dx = -p (log p + H)
        grad -= prob * (logprob + tl.load(entropy_C + token)) * tl.load(pull_2C + pull_stride + token)
    grad = tl.where(column < real, grad / temperature, 0.0)
    tl.store(grad_Cv + at + column, grad.to(grad_Cv.dtype.element_ty), mask=column < width)
