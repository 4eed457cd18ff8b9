"""Many copies between tensors of one device as one: a Triton kernel over a table of tiles, or torch's batched copy.

torch._foreach_copy_ launches a kernel for every pair of strided views; a model has hundreds. The table is made once,
so that a sync launches one kernel for each width of word, without synchronising.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from megatron_rl import platform

WORDS = 2048  # of a row that a program copies at a time
TILE_BYTES = 1 << 15  # that a program copies at most, unless one chunk of a row is more
WORD_BYTES = {16: 8, 8: 8, 4: 4, 2: 2, 1: 1}  # by alignment


class BatchedCopy:
    """into[i].copy_(of[i]) for all i: vectors or matrices, columns contiguous, no overlaps; dtypes are converted.

    The tensors' memory must stay where it is.
    """

    def __init__(self, into: Sequence[Tensor], of: Sequence[Tensor], use_triton: bool | None = None) -> None:
        pairs = [_same_shape(a, b) for a, b in zip(into, of, strict=True)]
        self.into, self.of = [a for a, _ in pairs], [b for _, b in pairs]
        self.nbytes = sum(t.nbytes for t in self.into)
        if use_triton is None:
            use_triton = bool(self.into) and self.into[0].is_cuda and platform.has_triton()
            use_triton &= all(a.dtype == b.dtype for a, b in zip(self.into, self.of, strict=True))  # it moves bytes
        self._tables = _tables(self.into, self.of) if use_triton else None

    def run(self) -> None:
        """Enqueues the copies on the current stream."""
        if self._tables is None:
            if self.into:
                torch._foreach_copy_(self.into, self.of)
            return
        import triton.language as tl

        from megatron_rl.weights.permute_kernel import copy_tiles

        for alignment, table_N6 in self._tables.items():
            bits = 8 * WORD_BYTES[alignment]
            divisor = 8 * alignment // bits  # words that one vector load takes
            copy_tiles[(len(table_N6),)](table_N6, getattr(tl, f"int{bits}"), alignment, divisor, WORDS, num_warps=8)


def _same_shape(into: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """Where one of them is seen as a vector, because it is contiguous, it gets the shape of the other."""
    assert into.device == of.device, "copies stay on a device"
    if into.ndim != of.ndim:
        into, of = (into, of.view(into.shape)) if into.ndim > of.ndim else (into.view(of.shape), of)
    return into, of


def _tables(into: Sequence[Tensor], of: Sequence[Tensor]) -> dict[int, Tensor]:
    """Alignment in bytes -> [N, 6] int64: addresses of source and destination, rows, words, strides in words."""
    tiles: dict[int, list[np.ndarray]] = {}
    for dst, src in zip(into, of, strict=True):
        if dst.numel() == 0:
            continue
        size = dst.element_size()
        assert dst.stride(-1) == 1 or dst.shape[-1] == 1, "columns are contiguous"
        rows, cols = (1, dst.numel()) if dst.ndim == 1 else dst.shape
        strides = [0, 0] if rows == 1 else [t.stride(0) * size for t in (src, dst)]
        alignment = gcd(16, src.data_ptr(), dst.data_ptr(), cols * size, *strides)
        width = WORD_BYTES[alignment]
        words = cols * size // width
        height = max(1, TILE_BYTES // (width * min(words, WORDS)))  # rows of a tile
        row, word = np.meshgrid(np.arange(0, rows, height), np.arange(0, words, WORDS), indexing="ij")
        row, word = row.ravel(), word.ravel()
        table_N6 = np.empty((len(row), 6), np.int64)
        table_N6[:, 0] = src.data_ptr() + row * strides[0] + word * width
        table_N6[:, 1] = dst.data_ptr() + row * strides[1] + word * width
        table_N6[:, 2] = np.minimum(height, rows - row)
        table_N6[:, 3] = np.minimum(WORDS, words - word)
        table_N6[:, 4:] = np.array(strides) // width
        tiles.setdefault(alignment, []).append(table_N6)
    device = into[0].device if into else "cpu"
    return {alignment: torch.from_numpy(np.concatenate(parts)).to(device) for alignment, parts in tiles.items()}
