"""What of vLLM's parameters lies where in Megatron's shards: geometry, no ranks yet. All units are elements.

Words: a *shard* is the set of Megatron parameters that the ranks of one (TP, PP, EP) coordinate hold; a *target* is
the set of vLLM parameters of one rollout tensor-parallel rank; a *piece* is the largest rectangle of an HF tensor that
lies in one block of a target and one block of a shard.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from megatron_rl.weights.layouts import Block, Param
from megatron_rl.weights.rects import Copy, Rect, merge, runs, uncovered


@dataclass(frozen=True)
class Alias:
    """The vLLM parameter is the memory of a Megatron parameter, from element `offset` on."""

    param: str
    offset: int


@dataclass(frozen=True, slots=True)
class Region:
    """One rectangle of an HF tensor as Megatron cuts it, and the block of each shard that holds it."""

    places: dict[int, Block]
    holders: frozenset[int]  # the shards


@dataclass(frozen=True, slots=True)
class Piece:
    region: Region
    row: int  # within the region
    col: int
    target: Rect

    def copy(self, shard: int) -> Copy:
        b, t = self.region.places[shard], self.target
        return Copy(Rect(b.param, b.offset + self.row * b.stride + self.col, b.stride, t.rows, t.cols), t)

    def halves(self, numel: int) -> "tuple[Piece, Piece]":
        """Cut after about `numel` elements: at a row, or within the row where it is the only one."""
        t = self.target
        if t.rows == 1:
            a = replace(t, cols=numel)
            return replace(self, target=a), replace(
                self, col=self.col + numel, target=replace(t, cols=t.cols - numel, offset=t.offset + numel)
            )
        rows = min(max(1, numel // t.cols), t.rows - 1)
        b = replace(t, rows=t.rows - rows, offset=t.offset + rows * t.stride)
        return replace(self, target=replace(t, rows=rows)), replace(self, row=self.row + rows, target=b)


def _regions(sources: Sequence[Sequence[Param]]) -> dict[str, list[Region]]:
    """By HF tensor. Two shards hold the same rectangle or disjoint ones (_pieces asserts it)."""
    places: defaultdict[tuple[str, int, int, int, int], dict[int, Block]] = defaultdict(dict)
    for shard, params in enumerate(sources):
        for param in params:
            for b in param.blocks:
                places[b.hf, b.row, b.col, b.rows, b.cols].setdefault(shard, b)
    holders: dict[tuple[int, ...], frozenset[int]] = {}  # one object for equal sets
    regions: defaultdict[str, list[Region]] = defaultdict(list)
    for key, blocks in sorted(places.items()):
        shards = tuple(blocks)
        regions[key[0]].append(Region(blocks, holders.setdefault(shards, frozenset(shards))))
    return regions


def _pieces(param: Param, regions: Mapping[str, list[Region]]) -> list[Piece]:
    """What the target parameter is made of. Raises ValueError where an element is not held exactly once."""
    pieces = []
    for want in param.blocks:
        if want.hf not in regions:
            raise ValueError(f"vLLM's {param.key} wants {want.hf}, which no Megatron parameter holds")
        missing = want.rows * want.cols
        for region in regions[want.hf]:
            have = next(iter(region.places.values()))
            row, end_row = max(want.row, have.row), min(want.row + want.rows, have.row + have.rows)
            col, end_col = max(want.col, have.col), min(want.col + want.cols, have.col + have.cols)
            if row < end_row and col < end_col:
                offset = want.offset + (row - want.row) * want.stride + col - want.col
                target = Rect(param.key, offset, want.stride, end_row - row, end_col - col)
                pieces.append(Piece(region, row - have.row, col - have.col, target))
                missing -= target.numel
        if missing:
            raise ValueError(f"{missing} of the elements of {want.hf} that vLLM's {param.key} wants are not held once")
    return pieces


class Overlap:
    """Which part of each target lies in which shard; no ranks yet.

    sources[s] are the parameters of shard s, targets[t] those of rollout tensor-parallel rank t. `copied` names vLLM
    parameters that must have memory of their own (another dtype, a layout vLLM changes after loading).
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Param]],
        targets: Sequence[Sequence[Param]],
        copied: Collection[str] = frozenset(),
    ) -> None:
        self.sources = [{param.key: param for param in params} for params in sources]
        self.targets = targets
        self.copied = frozenset(copied)
        regions = _regions(sources)
        self.pieces = [[_pieces(param, regions) for param in params] for params in targets]
        self.padding = [[uncovered(p.key, p.numel, p.blocks) for p in params] for params in targets]
        # Remote pieces of one set of holders travel together; sets with the least choice are served first.
        self.by_holders: list[dict[frozenset[int], list[Piece]]] = []
        for of_params in self.pieces:
            groups: defaultdict[frozenset[int], list[Piece]] = defaultdict(list)
            for piece in (piece for pieces in of_params for piece in pieces):
                groups[piece.region.holders].append(piece)
            self.by_holders.append(dict(sorted(groups.items(), key=lambda item: len(item[0]))))
        self.local = cache(self._local)

    @cached_property
    def held(self) -> np.ndarray:
        """[shard, target]: elements of the target that the shard holds."""
        held = np.zeros((len(self.sources), len(self.targets)), np.int64)
        for t, groups in enumerate(self.by_holders):
            for holders, pieces in groups.items():
                held[sorted(holders), t] += sum(piece.target.numel for piece in pieces)
        return held

    def _local(self, shard: int, target: int) -> tuple[dict[str, Alias], tuple[Rect, ...], tuple[Copy, ...]]:
        """(aliases, zeros, copies) of a rank that holds `shard` and needs `target`."""
        aliases, zeros, copies = {}, [], []
        for param, pieces, padding in zip(
            self.targets[target], self.pieces[target], self.padding[target], strict=True
        ):
            mine = [piece.copy(shard) for piece in pieces if shard in piece.region.holders]
            whole = len(mine) == len(pieces) and param.key not in self.copied
            alias = self._alias(shard, param, mine) if whole else None
            if alias:
                aliases[param.key] = alias
            else:
                zeros += padding
                copies += mine
        return aliases, tuple(zeros), merge(copies)

    def _alias(self, shard: int, param: Param, copies: list[Copy]) -> Alias | None:
        """Where every element lies one distance further on in one Megatron parameter, and padding lies on padding."""
        shifts = {(c.src.param, c.src.offset - c.dst.offset) for c in copies}
        if len(shifts) != 1 or any(c.src.stride != c.dst.stride and c.src.rows > 1 for c in copies):
            return None
        ((key, shift),) = shifts
        source, end = self.sources[shard][key], shift + param.numel
        if shift < 0 or end > source.numel:
            return None
        real = sum(max(0, min(b, end) - max(a, shift)) for a, b in runs(source.blocks))
        return Alias(key, shift) if real == sum(c.dst.numel for c in copies) else None
