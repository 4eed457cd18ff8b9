"""Executes a plan: local copies, and flat buckets between ranks.

Everything is laid out once (views, buckets, the rounds in which they travel); a sync is then batched copies into and
out of preallocated buffers and one batch of point-to-point calls a round, while the next round is packed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import platform
from megatron_rl.weights.permute import BatchedCopy
from megatron_rl.weights.plan import Move, Plan
from megatron_rl.weights.rects import Rect

ALIGN = 16  # bytes; a bucket's share of one peer starts at a multiple


@dataclass(frozen=True)
class Moved:
    """What one execution of a plan did on this rank."""

    bytes_received: int
    bytes_permuted: int
    seconds: float


@dataclass(frozen=True)
class _Packet:
    """This rank's traffic with one peer in one round."""

    peer: int
    copy: BatchedCopy  # parameters to buffer before it is sent, buffer to parameters after it came
    flat: Tensor  # the bytes of the buffer that travel


class Transport:
    """A plan bound to this rank's tensors. Build it anew where one of them moved to other memory."""

    def __init__(
        self,
        plan: Plan,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        bucket_bytes: int,
        converts: tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        """`converts`: sources of the first dtype become targets of the second; the smaller one of them travels."""
        before, after = converts or (torch.uint8, torch.uint8)
        wire = min(before, after, key=lambda dtype: dtype.itemsize)
        for c in plan.copies:
            dtypes = sources[c.src.param].dtype, targets[c.dst.param].dtype
            assert dtypes[0] == dtypes[1] or dtypes == converts, (
                f"{c.dst.param} is {dtypes[1]}, {c.src.param} {dtypes[0]}"
            )
        self.local = BatchedCopy(
            [view(targets[c.dst.param], c.dst) for c in plan.copies],
            [view(sources[c.src.param], c.src) for c in plan.copies],
        )
        self.zeros = [view(targets[rect.param], rect) for rect in plan.zeros]
        device = next(iter(targets.values())).device
        peers = max(len({m.peer for m in plan.sends}), len({m.peer for m in plan.receives}))
        share = max(ALIGN, bucket_bytes // max(1, _highest(peers, device)) // ALIGN * ALIGN)
        of_source, of_target = ({before: wire}, {after: wire}) if converts else ({}, {})
        self.sends, sending = _rounds(plan.sends, _Wired(sources, of_source), share, device, into_buffer=True)
        self.receives, receiving = _rounds(plan.receives, _Wired(targets, of_target), share, device, into_buffer=False)
        self.bytes_buffered = sending + receiving
        self.bytes_permuted = self.local.nbytes
        self.bytes_sent, self.bytes_received = (
            sum(m.flat.nbytes for packets in rounds for m in packets) for rounds in (self.sends, self.receives)
        )

    def run(self) -> Moved:
        """Brings every target up to date with the sources of all ranks. Collective over the ranks that exchange."""
        platform.synchronize()
        started = time.perf_counter()
        travelling = self._post(0)
        self.local.run()
        if self.zeros:
            torch._foreach_zero_(self.zeros)
        for number in range(max(len(self.sends), len(self.receives))):
            ahead = self._post(number + 1)  # its buffers are free: round number - 1 is sent and unpacked
            for work in travelling:
                work.wait()
            for packet in _of(self.receives, number):
                packet.copy.run()
            travelling = ahead
        platform.synchronize()
        return Moved(self.bytes_received, self.bytes_permuted, time.perf_counter() - started)

    def _post(self, number: int) -> list[dist.Work]:
        for packet in _of(self.sends, number):
            packet.copy.run()
        operations = [dist.P2POp(dist.irecv, m.flat, m.peer) for m in _of(self.receives, number)]
        operations += [dist.P2POp(dist.isend, m.flat, m.peer) for m in _of(self.sends, number)]
        return dist.batch_isend_irecv(operations) if operations else []


def view(tensor: Tensor, rect: Rect) -> Tensor:
    """The elements of a contiguous tensor that `rect` names: a vector where they are contiguous, else a matrix."""
    assert tensor.is_contiguous(), f"{rect.param} is not contiguous"
    start = tensor.storage_offset() + rect.offset
    if rect.rows == 1 or rect.stride == rect.cols:
        return tensor.detach().as_strided((rect.rows * rect.cols,), (1,), start)
    return tensor.detach().as_strided((rect.rows, rect.cols), (rect.stride, 1), start)


def _of(rounds: list[list[_Packet]], number: int) -> list[_Packet]:
    return rounds[number] if number < len(rounds) else []


def _highest(peers: int, device: torch.device) -> int:
    """The largest number of peers that any rank has; also makes NCCL's communicator, which needs every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return peers
    highest = torch.tensor([peers], device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


@dataclass(frozen=True)
class _Wired:
    """This rank's tensors of one side, and the dtypes that travel in place of some of theirs."""

    tensors: Mapping[str, Tensor]
    wire: Mapping[torch.dtype, torch.dtype]

    def dtype(self, rect: Rect) -> torch.dtype:
        own = self.tensors[rect.param].dtype
        return self.wire.get(own, own)

    def nbytes(self, rect: Rect) -> int:
        return rect.rows * rect.cols * self.dtype(rect).itemsize


def _rounds(
    moves: Sequence[Move], tensors: _Wired, share: int, device: torch.device, into_buffer: bool
) -> tuple[list[list[_Packet]], int]:
    """Cuts what goes to each peer into packets of at most `share` bytes; round r holds the r-th packet of each.

    Gives the bytes of the buffers too. Both ends of a pair list rectangles of the same shapes in the same order, so
    they cut alike.
    """
    rounds: list[list[_Packet]] = []
    total = 0
    by_peer: dict[int, list[Rect]] = {}
    for move in moves:
        by_peer.setdefault(move.peer, []).append(move.rect)
    for peer, of_peer in sorted(by_peer.items()):
        packets = list(_cut(of_peer, tensors, share))
        largest = max(sum(map(tensors.nbytes, rects)) for rects in packets)
        largest += -largest % ALIGN
        buffers = torch.empty(min(2, len(packets)), largest, dtype=torch.uint8, device=device)
        total += buffers.nbytes
        for number, rects in enumerate(packets):
            if len(rounds) <= number:
                rounds.append([])
            rounds[number].append(_packet(peer, rects, tensors, buffers[number % 2], into_buffer))
    return rounds, total


def _packet(peer: int, rects: list[Rect], tensors: _Wired, buffer: Tensor, into_buffer: bool) -> _Packet:
    params, packed, at = [], [], 0
    for rect in rects:
        params.append(view(tensors.tensors[rect.param], rect))
        size = tensors.nbytes(rect)
        packed.append(buffer[at : at + size].view(tensors.dtype(rect)).view(params[-1].shape))
        at += size
    copy = BatchedCopy(packed, params) if into_buffer else BatchedCopy(params, packed)
    return _Packet(peer, copy, buffer[:at])


def _cut(rects: Sequence[Rect], tensors: _Wired, share: int) -> Iterator[list[Rect]]:
    packet, used = [], 0
    # wide elements first, so that every view into a buffer of bytes is aligned
    for rect in sorted(rects, key=lambda rect: -tensors.dtype(rect).itemsize):
        for piece in _pieces(rect, share // tensors.dtype(rect).itemsize):
            size = tensors.nbytes(piece)
            if packet and used + size > share:
                yield packet
                packet, used = [], 0
            packet.append(piece)
            used += size
    if packet:
        yield packet


def _pieces(rect: Rect, most: int) -> Iterator[Rect]:
    """Cuts a rectangle into rectangles of at most `most` elements: by rows, and within a row where one is too long."""
    assert most > 0, "a bucket holds at least one element"
    cols = min(rect.cols, most)
    rows = max(1, most // rect.cols)
    for row in range(0, rect.rows, rows):
        for col in range(0, rect.cols, cols):
            yield replace(
                rect,
                offset=rect.offset + row * rect.stride + col,
                rows=min(rows, rect.rows - row),
                cols=min(cols, rect.cols - col),
            )
