"""Which sequences form which micro-batch: packed to a token budget, balanced over data-parallel ranks."""

import heapq
from dataclasses import dataclass


@dataclass(frozen=True)
class PackingOptions:
    max_tokens: int  # tokens of a micro-batch at most
    max_sequences: int | None = None  # sequences of a micro-batch at most
    quadratic: float = 0.0  # cost of a sequence of n tokens is n + quadratic * n^2 (attention)


def _fill(
    units: list[tuple[int, ...]], lengths: list[int], bins: int, options: PackingOptions
) -> list[list[int]] | None:
    """Longest unit first into the cheapest micro-batch that has room; None where that does not fit."""
    cost = [n + options.quadratic * n * n for n in lengths]
    order = sorted(units, key=lambda unit: (-sum(cost[i] for i in unit), unit))
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0.0, b, 0) for b in range(bins)]  # (cost, micro-batch, tokens)
    for unit in order:
        tokens, set_aside = sum(lengths[i] for i in unit), []
        while heap:
            total, b, used = heapq.heappop(heap)
            room = options.max_sequences is None or len(filled[b]) + len(unit) <= options.max_sequences
            if used + tokens <= options.max_tokens and room:
                break
            set_aside.append((total, b, used))
        else:
            return None
        filled[b] += unit
        for entry in [*set_aside, (total + sum(cost[i] for i in unit), b, used + tokens)]:
            heapq.heappush(heap, entry)
    return filled


def plan_micro_batches(
    lengths: list[int], dp_size: int, options: PackingOptions, units: list[tuple[int, ...]] | None = None
) -> list[list[list[int]]]:
    """For each data-parallel rank its micro-batches, each a list of sequence indices; equally many on every rank.

    lengths: tokens of every sequence. units: sequences that stay together (a preference pair); default each alone.
    A rank for which nothing is left gets empty micro-batches, which step.py runs with weight 0. Deterministic, so that
    every rank computes the same plan. Raises ValueError where a unit alone exceeds the budget.
    """
    units = units if units is not None else [(i,) for i in range(len(lengths))]
    for unit in units:
        tokens = sum(lengths[i] for i in unit)
        if tokens > options.max_tokens:
            raise ValueError(
                f"sequence {unit[0]} has {tokens} tokens and --max-tokens-per-micro-batch is {options.max_tokens}"
            )
        if options.max_sequences is not None and len(unit) > options.max_sequences:
            raise ValueError(f"--micro-batch-size {options.max_sequences} is less than the {len(unit)} of one unit")
    per_rank = -(-sum(lengths) // (options.max_tokens * dp_size))
    if options.max_sequences is not None:
        per_rank = max(per_rank, -(-len(lengths) // (options.max_sequences * dp_size)))
    per_rank = max(per_rank, 1)
    while (filled := _fill(units, lengths, per_rank * dp_size, options)) is None:
        per_rank += 1
    cost = [sum(lengths[i] + options.quadratic * lengths[i] ** 2 for i in micro) for micro in filled]
    order = sorted(range(len(filled)), key=lambda b: (-cost[b], b))
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for turn in range(per_rank):  # dealt like cards, back and forth, so that every rank gets the same cost
        deal = order[turn * dp_size : (turn + 1) * dp_size]
        for rank, b in enumerate(deal if turn % 2 == 0 else reversed(deal)):
            ranks[rank].append(sorted(filled[b]))
    return ranks
