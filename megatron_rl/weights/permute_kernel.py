"""The kernel of permute.py. Importing this imports Triton."""

import triton
import triton.language as tl


@triton.jit
def copy_tiles(
    table_N6,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of every row on both sides
    DIVISOR: tl.constexpr,  # of the number of words in a row
    WORDS: tl.constexpr,
):
    """One program a row of the table: addresses of source and destination, rows, words, strides in words."""
    tile = table_N6 + tl.program_id(0).to(tl.int64) * 6
    src = tl.load(tile).to(tl.pointer_type(WORD))
    dst = tl.load(tile + 1).to(tl.pointer_type(WORD))
    rows, words = tl.load(tile + 2), tl.load(tile + 3)
    src_stride, dst_stride = tl.load(tile + 4), tl.load(tile + 5)
    word = tl.arange(0, WORDS)
    inside = word < tl.multiple_of(words, DIVISOR)
    for row in range(rows):
        src_row = tl.multiple_of(src + row * src_stride, ALIGNMENT)
        dst_row = tl.multiple_of(dst + row * dst_stride, ALIGNMENT)
        tl.store(dst_row + word, tl.load(src_row + word, mask=inside), mask=inside)
