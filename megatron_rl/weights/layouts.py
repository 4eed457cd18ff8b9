"""Which rectangle of which HF tensor lies where in a local tensor: the common ground of Megatron, vLLM and HF.

Every tensor is seen as a matrix: [rows, columns] (a vector is [1, n]). Hugging Face coordinates are (name, row, column).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """rows x cols elements of the HF tensor `hf`, from (row, col), live in `param` at element `offset`.

    Element (i, j) of the block is HF element (row + i, col + j) and lies at offset + i * stride + j of the flattened
    parameter. Vectors have rows = 1.
    """

    hf: str
    row: int
    col: int
    rows: int
    cols: int
    param: str
    offset: int
    stride: int
