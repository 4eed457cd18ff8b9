"""The batched copy against element-by-element assignment in numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.platform import has_triton
from megatron_rl.weights.permute import BatchedCopy

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def rectangles(device: str, seed: int, number: int, widest: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(into, of, the memory of all of `into`): random rectangles, aligned and not, one-row ones as vectors."""
    generator = np.random.default_rng(seed)
    into, of, memory = [], [], []
    for i in range(number):
        dtype = DTYPES[i % 3]
        rows, cols = int(generator.integers(1, 9)), int(generator.integers(1, widest))
        if i % 4 == 0:
            cols = -(-cols // 16) * 16
        pair = []
        for gap in generator.integers(0, 3, size=2) * (16 if i % 2 else 1):
            start = int(generator.integers(0, 4)) * (16 if i % 2 else 1)
            whole = torch.zeros(start + rows * (cols + int(gap)), dtype=dtype, device=device)
            contiguous = rows == 1 or gap == 0
            shape, stride = ((rows * cols,), (1,)) if contiguous else ((rows, cols), (cols + int(gap), 1))
            pair.append((whole, whole.as_strided(shape, stride, start)))
        (target, dst), (source, src) = pair
        source.copy_(torch.from_numpy(generator.integers(0, 100, source.numel())))
        into.append(dst), of.append(src), memory.append(target)
    return into, of, memory


def check(device: str, seed: int, number: int, widest: int, use_triton: bool) -> None:
    into, of, memory = rectangles(device, seed, number, widest)
    expected = []
    for dst, src, whole in zip(into, of, memory, strict=True):
        flat = whole.float().cpu().numpy().copy()
        places = np.arange(flat.size)[dst.storage_offset() :]
        at = np.lib.stride_tricks.as_strided(places, dst.shape, [s * places.itemsize for s in dst.stride()])
        flat[at.ravel()] = src.float().cpu().numpy().ravel()
        expected.append(flat)
    copy = BatchedCopy(into, of, use_triton)
    for _ in range(2):
        copy.run()
    assert copy.nbytes == sum(t.nbytes for t in into)
    for whole, flat in zip(memory, expected, strict=True):
        assert np.array_equal(whole.float().cpu().numpy(), flat)


def test_copies_on_the_cpu() -> None:
    """Rectangles of every alignment arrive, and nothing beside them is written."""
    check("cpu", seed=1, number=60, widest=300, use_triton=False)
    BatchedCopy([], []).run()


@pytest.mark.gpu
@pytest.mark.parametrize("widest", [20, 5000, 200_000])
def test_copies_by_triton(widest: int) -> None:
    """The kernel writes what numpy writes, for rows shorter and longer than a tile and every alignment."""
    assert has_triton()
    check("cuda", seed=widest, number=60, widest=widest, use_triton=True)
    BatchedCopy([], []).run()
