"""Rectangles in flattened tensors: the arithmetic under the planner."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_rl.weights.layouts import Block


@dataclass(frozen=True, slots=True)
class Rect:
    """rows x cols elements of a parameter: element (i, j) lies at offset + i * stride + j of the flattened tensor."""

    param: str
    offset: int
    stride: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class Copy:
    """Element (i, j) of `src` goes to element (i, j) of `dst`; both have the same rows and cols."""

    src: Rect
    dst: Rect


def merge(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """The same copies in the same element order as fewer, larger ones.

    What is contiguous on both sides becomes one row; rows of one length at a constant distance become one rectangle
    (that is what a QKV permutation is: one rectangle each for q, k and v).
    """
    merged: list[Copy] = []
    for copy in map(_flat, copies):
        joined = _join(merged[-1], copy) if merged else None
        if joined is None:
            merged.append(copy)
        else:
            merged[-1] = joined
    return tuple(merged)


def _flat(copy: Copy) -> Copy:
    """One row, where both sides are contiguous."""
    a, b = copy.src, copy.dst
    if a.rows > 1 and not (a.stride == b.stride == a.cols):
        return copy
    n = a.numel
    return Copy(Rect(a.param, a.offset, n, 1, n), Rect(b.param, b.offset, n, 1, n))


def _join(first: Copy, second: Copy) -> Copy | None:
    """first with second after it, where that is one rectangle on both sides."""
    (a, b), (c, d) = (first.src, first.dst), (second.src, second.dst)
    if (a.param, b.param, c.rows) != (c.param, d.param, 1):
        return None
    if a.rows == 1 and a.offset + a.cols == c.offset and b.offset + b.cols == d.offset:
        n = a.cols + c.cols
        return Copy(replace(a, cols=n, stride=n), replace(b, cols=n, stride=n))
    if a.cols != c.cols:
        return None
    if a.rows == 1:  # the second row decides the stride
        a, b = replace(a, stride=c.offset - a.offset), replace(b, stride=d.offset - b.offset)
    follows = c.offset == a.offset + a.rows * a.stride and d.offset == b.offset + b.rows * b.stride
    if follows and min(a.stride, b.stride) >= a.cols:
        return Copy(replace(a, rows=a.rows + 1), replace(b, rows=b.rows + 1))
    return None


def runs(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """[start, end) of every contiguous run of the blocks, sorted. Raises ValueError where two overlap."""
    found = []
    for b in blocks:
        if b.rows == 1 or b.stride == b.cols:
            found.append((b.offset, b.offset + b.rows * b.cols))
        else:
            found += [(at, at + b.cols) for at in range(b.offset, b.offset + b.rows * b.stride, b.stride)]
    found.sort()
    for (_, end), (start, _) in zip(found, found[1:], strict=False):
        if end > start:
            raise ValueError(f"two blocks of one parameter overlap at element {start}: {blocks}")
    return found


def uncovered(param: str, numel: int, blocks: Sequence[Block]) -> tuple[Rect, ...]:
    """The elements in no block. Raises ValueError where blocks overlap or reach past the end."""
    gaps, at = [], 0
    for start, end in [*runs(blocks), (numel, numel)]:
        if start > at:
            gaps.append(Rect(param, at, start - at, 1, start - at))
        at = end
    if at > numel:
        raise ValueError(f"a block of {param} reaches past its {numel} elements")
    return tuple(copy.dst for copy in merge(Copy(gap, gap) for gap in gaps))
