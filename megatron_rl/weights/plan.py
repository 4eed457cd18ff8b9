"""From what every rank holds and what it needs to what it aliases, copies, receives and sends.

Pure: numbers in, numbers out; all units are elements. Every process builds the same Reshard, so that sender and
receiver agree on what goes between them without talking. The words shard, target and piece: see overlap.py.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

import numpy as np

from megatron_rl.weights.overlap import Alias, Overlap, Piece
from megatron_rl.weights.rects import Copy, Rect, merge

Placement = tuple[tuple[int, int], ...]  # (rollout replica, rollout tensor-parallel rank) of every global rank
MAX_ASSIGNMENT_STATES = 100_000


@dataclass(frozen=True, slots=True)
class Move:
    """A rectangle that goes to or comes from `peer`.

    The k-th rectangle that a rank sends to a peer (of Megatron's parameters) has the rows and cols of the k-th that
    the peer receives from it (of vLLM's parameters).
    """

    peer: int
    rect: Rect


@dataclass(frozen=True)
class Plan:
    """What one rank does at a sync. Aliased parameters need nothing; `zeros` are padding, written once."""

    rank: int
    aliases: Mapping[str, Alias]  # by vLLM parameter
    zeros: tuple[Rect, ...]
    copies: tuple[Copy, ...]  # within this rank
    receives: tuple[Move, ...]  # by peer, ascending
    sends: tuple[Move, ...]  # by peer, ascending


@dataclass(frozen=True)
class Traffic:
    """Elements of every rank (arrays over global ranks). Near: from or to a rank of the same node; far: another."""

    needed: np.ndarray  # elements of the vLLM parameters, padding included
    aliased: np.ndarray
    zeroed: np.ndarray
    copied: np.ndarray  # in Megatron's memory and again in vLLM's: stored twice
    received_near: np.ndarray
    received_far: np.ndarray
    sent_near: np.ndarray
    sent_far: np.ndarray

    @property
    def received(self) -> np.ndarray:
        return self.received_near + self.received_far

    @property
    def sent(self) -> np.ndarray:
        return self.sent_near + self.sent_far


def hybridflow_bound(model: int, train_ranks: int, rollout_tp: int) -> int:
    """Elements each rank must receive where all that it holds is of use to it (HybridFlow, arXiv 2409.19256).

    (tp - tg pg) / (tg pg tp) of the model: tp = `train_ranks` (TP x PP) cut it for training, tg pg = `rollout_tp`.
    """
    return max(0, model * (train_ranks - rollout_tp) // (train_ranks * rollout_tp))


@dataclass(frozen=True, slots=True)
class _Part:
    """The part-th of `parts` of the pieces with these holders goes from `sender` to `receiver`."""

    sender: int
    receiver: int
    holders: frozenset[int]
    part: int
    parts: int


class Reshard:
    """The plans of all ranks: global rank g holds shard shard_of_rank[g] and is placement[g] in the rollout."""

    def __init__(
        self, overlap: Overlap, shard_of_rank: Sequence[int], placement: Placement, gpus_per_node: int
    ) -> None:
        assert len(shard_of_rank) == len(placement), "one shard and one place a rank"
        self.overlap = overlap
        self.shard_of_rank = shard_of_rank
        self.target_of_rank = [tp_rank for _, tp_rank in placement]
        self.world = len(placement)
        self.node_of_rank = [rank // gpus_per_node for rank in range(self.world)]
        self._parts = cache(self._cut)
        self._copies = cache(self._merged)
        self._incoming: list[list[_Part]] = [[] for _ in range(self.world)]
        self._outgoing: list[list[_Part]] = [[] for _ in range(self.world)]
        self._choose_senders()

    def plan(self, rank: int) -> Plan:
        aliases, zeros, copies = self.overlap.local(self.shard_of_rank[rank], self.target_of_rank[rank])
        receives = [Move(p.sender, copy.dst) for p in self._incoming[rank] for copy in self._copies_of(p)]
        sends = [Move(p.receiver, copy.src) for p in self._outgoing[rank] for copy in self._copies_of(p)]
        by_peer = attrgetter("peer")  # sorting is stable: the order of the parts stays within a pair of ranks
        return Plan(
            rank=rank,
            aliases=aliases,
            zeros=zeros,
            copies=copies,
            receives=tuple(sorted(receives, key=by_peer)),
            sends=tuple(sorted(sends, key=by_peer)),
        )

    def traffic(self) -> Traffic:
        count = {name: np.zeros(self.world, np.int64) for name in Traffic.__dataclass_fields__}
        for rank, target in enumerate(self.target_of_rank):
            numel = {param.key: param.numel for param in self.overlap.targets[target]}
            aliases, zeros, copies = self.overlap.local(self.shard_of_rank[rank], target)
            count["needed"][rank] = sum(numel.values())
            count["aliased"][rank] = sum(numel[key] for key in aliases)
            count["zeroed"][rank] = sum(rect.numel for rect in zeros)
            count["copied"][rank] = sum(copy.dst.numel for copy in copies)
            for part in self._incoming[rank]:
                way = "near" if self.node_of_rank[part.sender] == self.node_of_rank[rank] else "far"
                n = sum(piece.target.numel for piece in self._parts(target, part.holders, part.parts)[part.part])
                count[f"received_{way}"][rank] += n
                count[f"sent_{way}"][part.sender] += n
        return Traffic(**count)

    def _choose_senders(self) -> None:
        """Every remote piece gets a sender: on the receiver's node if one is there, the least loaded among those."""
        ranks_of_shard: defaultdict[int, list[int]] = defaultdict(list)
        for rank, shard in enumerate(self.shard_of_rank):
            ranks_of_shard[shard].append(rank)
        wants = [
            [holders for holders in self.overlap.by_holders[target] if shard not in holders]
            for shard, target in zip(self.shard_of_rank, self.target_of_rank, strict=True)
        ]
        requests = Counter(holders for wanted in wants for holders in wanted)
        candidates = {holders: [rank for s in sorted(holders) for rank in ranks_of_shard[s]] for holders in requests}
        jobs = []
        for receiver, wanted in enumerate(wants):
            groups, node = self.overlap.by_holders[self.target_of_rank[receiver]], self.node_of_rank[receiver]
            for holders in wanted:
                every = candidates[holders]
                near = [rank for rank in every if self.node_of_rank[rank] == node] or every
                jobs.append(
                    (len(near), -sum(piece.target.numel for piece in groups[holders]), receiver, holders, near)
                )
        mean = -sum(job[1] for job in jobs) / max(1, len({rank for job in jobs for rank in job[-1]}))
        load = [0] * self.world
        peers: list[set[int]] = [set() for _ in range(self.world)]
        # What has the least choice and is the largest comes first; the rest evens out.
        for _, _, receiver, holders, near in sorted(jobs, key=lambda job: job[:2]):
            parts = -(-len(candidates[holders]) // requests[holders])  # idle replicas share the sending
            for index, pieces in enumerate(self._parts(self.target_of_rank[receiver], holders, parts)):
                n = sum(piece.target.numel for piece in pieces)
                # few peers are better than many, as long as none of them sends more than the mean
                known = [rank for rank in near if rank in peers[receiver] and load[rank] + n <= mean]
                sender = self._least(known or near, load, receiver)
                load[sender] += n
                peers[receiver].add(sender)
                part = _Part(sender, receiver, holders, index, parts)
                self._incoming[receiver].append(part)
                self._outgoing[sender].append(part)

    def _least(self, ranks: list[int], load: list[int], receiver: int) -> int:
        """The least loaded of the ranks, among equals the next one after the receiver."""
        return min(ranks, key=lambda rank: (load[rank], (rank - receiver) % self.world))

    def _cut(self, target: int, holders: frozenset[int], parts: int) -> list[list[Piece]]:
        """The pieces with these holders in order, cut into at most `parts` lists of about equal size."""
        pieces = self.overlap.by_holders[target][holders][::-1]
        left = sum(piece.target.numel for piece in pieces)
        lists: list[list[Piece]] = []
        for remaining in range(parts, 0, -1):
            quota, taken = -(-left // remaining), []
            left -= quota
            while pieces and quota > 0:
                piece = pieces.pop()
                if piece.target.numel > quota and remaining > 1:
                    piece, rest = piece.halves(quota)
                    pieces.append(rest)
                taken.append(piece)
                quota -= piece.target.numel
            left += quota  # a cut at a row may miss the quota by less than the row
            if taken:
                lists.append(taken)
        assert not pieces, "the last part takes what is left"
        return lists

    def _copies_of(self, part: _Part) -> tuple[Copy, ...]:
        target, shard = self.target_of_rank[part.receiver], self.shard_of_rank[part.sender]
        return self._copies(target, part.holders, part.parts, part.part, shard)

    def _merged(self, target: int, holders: frozenset[int], parts: int, part: int, shard: int) -> tuple[Copy, ...]:
        return merge(piece.copy(shard) for piece in self._parts(target, holders, parts)[part])


# ---- grouping: which ranks make a rollout replica ---------------------------------------------------------------


def default_placement(world: int, rollout_tp: int) -> Placement:
    """Consecutive ranks, as vLLM's external launcher groups them."""
    if world % rollout_tp:
        raise ValueError(f"{world} ranks cannot be divided into replicas of --rollout-tp {rollout_tp}")
    return tuple(divmod(rank, rollout_tp) for rank in range(world))


def replicas_of(placement: Placement) -> list[list[int]]:
    """The global ranks of each replica, in the order of their rollout tensor-parallel ranks."""
    replicas: list[list[int]] = [[] for _ in {replica for replica, _ in placement}]
    for rank, (replica, _) in sorted(enumerate(placement), key=lambda item: item[1]):
        replicas[replica].append(rank)
    return replicas


def best_placement(overlap: Overlap, shard_of_rank: Sequence[int], gpus_per_node: int) -> Placement:
    """The placement in which ranks already hold the most of what they need, replicas within a node (as HybridFlow).

    Exact within a node, or within consecutive ranks where a replica is larger than a node. Where the consecutive
    placement is as good, it is kept.
    """
    world, size = len(shard_of_rank), len(overlap.targets)
    default = default_placement(world, size)
    block = gpus_per_node if gpus_per_node % size == 0 and world % gpus_per_node == 0 else size
    if (block // size + 1) ** size > MAX_ASSIGNMENT_STATES:
        return default
    held = [tuple(row) for row in overlap.held.tolist()]

    @cache
    def assign(shards: tuple[int, ...]) -> tuple[int, ...]:
        return _best_assignment(tuple(held[s] for s in shards), size)

    placement: list[tuple[int, int]] = []
    for start in range(0, world, block):
        seen: Counter[int] = Counter()
        for target in assign(tuple(shard_of_rank[start : start + block])):
            placement.append((start // size + seen[target], target))
            seen[target] += 1
    return tuple(placement)


def _best_assignment(values: tuple[tuple[int, ...], ...], size: int) -> tuple[int, ...]:
    """One of `size` targets for each rank, each target equally often, for the largest sum of values."""

    @cache
    def best(rank: int, free: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        if rank == len(values):
            return 0, ()
        found: tuple[int, tuple[int, ...]] = (-1, ())
        for target in (*range(rank % size, size), *range(rank % size)):  # the consecutive one first
            if free[target]:
                value, rest = best(rank + 1, free[:target] + (free[target] - 1,) + free[target + 1 :])
                if value + values[rank][target] > found[0]:
                    found = value + values[rank][target], (target, *rest)
        return found

    value, targets = best(0, (len(values) // size,) * size)
    default = tuple(rank % size for rank in range(len(values)))
    return default if sum(v[t] for v, t in zip(values, default, strict=True)) == value else targets
