"""The kernel of capture.py: one launch a step. Importing this imports Triton.

Shape suffixes: S rows of the engine step, V vocabulary, N requests of the generate call, L most tokens of a response.
"""

import triton
import triton.language as tl


@triton.jit
def record(
    logits_SV,
    row_stride,
    sampled_S,
    slot_S,  # where vLLM keeps the row's request
    position_S,  # of the token that the row was computed from
    seed_of_slot,
    seed_N,
    prompt_N,  # tokens of the prompt
    logprobs_NL,
    requests,  # N
    longest,  # L
    vocab,  # V
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """One program a row: the sampled token's log-probability goes to its request's row and its place in the response.

    A row whose request or place is none of the call's writes nothing: chunks of a prompt, a step ahead of an end.
    """
    row = tl.program_id(0)
    slot = tl.load(slot_S + row)
    seed = tl.load(seed_of_slot + slot, mask=slot >= 0, other=-1)
    request, found = 0, 0
    for start in range(0, requests, REQUESTS):
        number = start + tl.arange(0, REQUESTS)
        same = (number < requests) & (tl.load(seed_N + number, mask=number < requests, other=0) == seed)
        request += tl.sum(tl.where(same, number, 0), 0)
        found += tl.sum(same.to(tl.int32), 0)
    place = tl.load(position_S + row) + 1 - tl.load(prompt_N + request)
    logits_V = logits_SV + row.to(tl.int64) * row_stride
    top, total = float("-inf"), 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_V + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # where top-k and top-p left nothing so far
        total = tl.exp(top - shift) * total + tl.sum(tl.exp(x - shift), 0)
        top = new_top
    logprob = tl.load(logits_V + tl.load(sampled_S + row)).to(tl.float32) - top - tl.log(total)
    at = logprobs_NL + request.to(tl.int64) * longest + place
    tl.store(at, logprob, mask=(found == 1) & (place >= 0) & (place < longest))
