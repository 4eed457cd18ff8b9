"""Do the engine's weights equal the trainer's? Digests of slices, taken on each side from its own memory.

The digest of a slice is a sum over its elements of a hash of (value, place in the HF tensor), so that owners of parts
of a slice add their parts up, however training cuts them. Nothing of the plan is used.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.initialize import Topology
from megatron_rl.weights.layouts import Block, Param
from megatron_rl.weights.rects import Rect
from megatron_rl.weights.transport import view

CHUNK = 1 << 24  # elements hashed at a time: a few int64 temporaries of this size
MIX = (-7046029254386353131, -4417276706812531889)  # odd 64-bit constants
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Trained(Protocol):
    """What is needed of the trainer's weights (engine.TrainedWeights)."""

    tensors: Mapping[str, Tensor]
    shards: Sequence[Sequence[Param]]
    shard_of_rank: Sequence[int]
    hf_shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Slice:
    """A rectangle of an HF tensor."""

    hf: str
    row: int
    col: int
    rows: int
    cols: int

    def __str__(self) -> str:
        rows, cols = f"{self.row}:{self.row + self.rows}", f"{self.col}:{self.col + self.cols}"
        return f"{self.hf}[{rows}, {cols}]"


def differing_slices(
    weights: Trained,
    mine: Sequence[Param],
    targets: Sequence[Sequence[Param]],
    memory: Mapping[str, Tensor],
    topology: Topology,
) -> list[str]:
    """The slices, anywhere, in which a rank's engine (`memory`, made of `mine`) differs from the trainer.

    `targets` are the vLLM parameters of every rollout TP rank. Collective over all ranks, equal result on all.
    """
    slices = list(dict.fromkeys(_slice(block) for params in targets for param in params for block in param.blocks))
    dtypes = {b.hf: memory[b.param].dtype for params in targets for param in params for b in param.blocks}
    expected = _expected(slices, weights, topology, dtypes)
    found = []
    for param in mine:
        for block in param.blocks:
            part = _slice(block)
            if _digest(memory[block.param], block, part, weights.hf_shapes, dtypes) != expected[part]:
                found.append(f"{part} in {block.param} of rank {topology.rank}")
    everywhere: list[list[str]] = [[] for _ in range(topology.world_size)]
    dist.all_gather_object(everywhere, found, group=topology.cpu_group)
    return [text for texts in everywhere for text in texts]


def _slice(block: Block) -> _Slice:
    return _Slice(block.hf, block.row, block.col, block.rows, block.cols)


def _expected(
    slices: Sequence[_Slice], weights: Trained, topology: Topology, dtypes: Mapping[str, torch.dtype]
) -> dict[_Slice, int]:
    """The trainer's digest of every slice, in the engine's dtypes: each rank adds what it is the first to hold."""
    by_hf = defaultdict(list)
    for number, part in enumerate(slices):
        by_hf[part.hf].append((number, part))
    sums = torch.zeros(len(slices), dtype=torch.int64)
    for block in _owned(weights, topology.rank):
        for number, part in by_hf[block.hf]:
            row, end_row = max(part.row, block.row), min(part.row + part.rows, block.row + block.rows)
            col, end_col = max(part.col, block.col), min(part.col + part.cols, block.col + block.cols)
            if row < end_row and col < end_col:
                common = _Slice(part.hf, row, col, end_row - row, end_col - col)
                sums[number] += _digest(weights.tensors[block.param], block, common, weights.hf_shapes, dtypes)
    dist.all_reduce(sums, group=topology.cpu_group)
    return dict(zip(slices, sums.tolist(), strict=True))


def _owned(weights: Trained, rank: int) -> list[Block]:
    """The blocks of this rank that no lower rank, and no earlier parameter of it, holds too."""
    shard = weights.shard_of_rank[rank]
    if shard in weights.shard_of_rank[:rank]:
        return []
    seen = {_slice(b) for s in set(weights.shard_of_rank[:rank]) for p in weights.shards[s] for b in p.blocks}
    owned = {}
    for param in weights.shards[shard]:
        for block in param.blocks:
            if _slice(block) not in seen:
                owned.setdefault(_slice(block), block)
    return list(owned.values())


@torch.no_grad()
def _digest(
    tensor: Tensor,
    block: Block,
    part: _Slice,
    hf_shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> int:
    """The digest of the elements of `part`, which lies in `block` of `tensor`, modulo 2^64; in its HF name's dtype."""
    offset = block.offset + (part.row - block.row) * block.stride + part.col - block.col
    width, total = hf_shapes[part.hf][-1], 0
    step = max(1, CHUNK // part.cols)
    cols = torch.arange(part.col, part.col + part.cols, device=tensor.device)
    for start in range(0, part.rows, step):
        rows = min(step, part.rows - start)
        rect = Rect(block.param, offset + start * block.stride, block.stride, rows, part.cols)
        values = view(tensor, rect).reshape(rows, part.cols).to(dtypes[part.hf])
        bits = values.view(BITS[values.element_size()]).to(torch.int64)
        first = part.row + start
        place = torch.arange(first, first + rows, device=tensor.device)[:, None] * width + cols
        hashed = (bits + 1) * MIX[0] ^ (place + 1) * MIX[1]
        hashed ^= hashed >> 29
        total += int((hashed * MIX[0]).sum())
    return (total + 2**63) % 2**64 - 2**63
