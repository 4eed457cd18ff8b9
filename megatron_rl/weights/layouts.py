"""Which rectangle of which HF tensor lies where in a local tensor: the common ground of Megatron, vLLM and HF.

Every tensor is seen as a matrix: [rows, columns] (a vector is [1, n]). HF coordinates are (name, row, column).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm, prod

from megatron_rl.weights.arch import TIED_HEAD, Dims, Role, Row, TransformerImpl, table


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


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor of one rank, Megatron's or vLLM's, and the blocks it is made of; elements in no block are padding.

    A Megatron parameter has the key "{chunk}:{name}": chunk is the model chunk's index on its rank (0 without virtual
    pipelining), name is what `named_parameters()` of that chunk gives. A vLLM parameter has vLLM's name.
    """

    key: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


Stages = tuple[tuple[tuple[int, ...], ...], ...]  # [pipeline rank][chunk] -> numbers of its layers in the model


@dataclass(frozen=True)
class TrainLayout:
    """How Megatron cuts the model. Experts are cut over TP where EP is 1, and whole otherwise."""

    tp: int
    pp: int
    vpp: int
    ep: int
    stages: Stages


# ---- layers over pipeline stages --------------------------------------------------------------------------------


def first_and_last_layers(num_layers: int, pp: int, vpp: int = 1) -> tuple[int | None, int | None]:
    """Megatron's num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage; None where even.

    Among the splits that Megatron can express: the smallest largest stage, then the lightest first and last stage
    together (they also hold the embedding and the head), then the lightest last. 3 layers on PP 2 are 2 + 1.
    Raises ValueError where no split exists.
    """
    if num_layers % (pp * vpp) == 0:
        return None, None
    splits = []
    for first in range(vpp, num_layers, vpp):
        for last in range(vpp, num_layers - first + 1, vpp):
            rest, middles = num_layers - first - last, pp - 2
            if middles <= 0:
                fits = pp == 2 and rest == 0
            else:
                fits = rest > 0 and rest % (middles * vpp) == 0
            if fits:
                splits.append((max(first, last, rest // max(middles, 1)), first + last, last, first))
    if not splits:
        raise ValueError(
            f"{num_layers} layers cannot be spread over --pipeline-model-parallel-size {pp} with {vpp} model chunks a "
            "stage: lower one of the two"
        )
    _, _, last, first = min(splits)
    return first, (last if pp > 2 else None)


def layers_of_stage(
    num_layers: int, pp: int, vpp: int = 1, first: int | None = None, last: int | None = None
) -> Stages:
    """megatron-core's assignment of layers, given its num_layers_in_first/last_pipeline_stage (None: an equal share).

    Chunk 0 of every stage comes before chunk 1 of any. Raises ValueError where megatron-core would refuse.
    """
    rest = num_layers - (first or 0) - (last or 0)
    others = pp - (first is not None) - (last is not None)
    share, left = divmod(rest, others) if others > 0 else (0, rest)
    counts = [share] * pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    if left or others < 0 or min(counts) < 1 or any(n % vpp for n in counts):
        raise ValueError(
            f"{num_layers} layers over {pp} pipeline stages of {vpp} chunks do not come out even with "
            f"num_layers_in_first_pipeline_stage {first} and num_layers_in_last_pipeline_stage {last}"
        )
    stages: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    start = 0
    for _ in range(vpp):
        for stage, count in zip(stages, counts, strict=True):
            stage.append(tuple(range(start, start + count // vpp)))
            start += count // vpp
    return tuple(tuple(stage) for stage in stages)


def train_layout(dims: Dims, tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1) -> TrainLayout:
    """Checks that the model can be cut so. Raises ValueError with the sizes and the flag to change."""
    tp_flag, ep_flag = "--tensor-model-parallel-size", "--expert-model-parallel-size"
    cuts = [("attention heads", dims.heads, tp, tp_flag), ("columns of the MLP", dims.ffn, tp, tp_flag)]
    if dims.experts:
        cuts[1:] = [("experts", dims.experts, ep, ep_flag)]
        cuts += [("columns of an expert", dims.moe_ffn, tp, tp_flag)] if ep == 1 else []
    elif ep > 1:
        raise ValueError(f"{ep_flag} {ep} needs a model with experts; this one ({dims.family}) has none")
    for what, size, parts, flag in cuts:
        if size % parts:
            raise ValueError(f"{size} {what} cannot be divided by {flag} {parts}")
    if dims.kv_heads % tp and tp % dims.kv_heads:
        raise ValueError(f"{dims.kv_heads} key-value heads are neither a multiple nor a divisor of {tp_flag} {tp}")
    if vpp > 1 and pp == 1:
        raise ValueError(f"{vpp} model chunks a stage need --pipeline-model-parallel-size over 1")
    first, last = first_and_last_layers(dims.layers, pp, vpp)
    return TrainLayout(tp, pp, vpp, ep, layers_of_stage(dims.layers, pp, vpp, first, last))


# ---- one tensor over tensor-parallel ranks ------------------------------------------------------------------------


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of the embedding in Megatron: divisible by TP and by the 64 that vLLM pads to, so that both can agree."""
    multiple = lcm(64, tp)
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True)
class Cut:
    """What one tensor-parallel rank holds. The blocks have the index of the HF tensor for a name, and no parameter."""

    hf_shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


PAD = -1
Piece = tuple[int, int, int]  # (HF tensor or PAD, its first row, number of rows)


def _cut_rows(order: list[Piece], hf_rows: tuple[int, ...], cols: int | None, rank: int, size: int) -> Cut:
    """The rank-th of `size` equal row intervals of a matrix made of `order`'s pieces; a vector where cols is None."""
    total = sum(rows for _, _, rows in order)
    assert total % size == 0, f"{total} rows are divided over {size} ranks"
    low, high = rank * total // size, (rank + 1) * total // size
    width, blocks, at = cols or 1, [], 0
    for part, start, rows in order:
        a, b = max(at, low), min(at + rows, high)
        if a < b and part != PAD:
            row, n, offset = start + a - at, b - a, (a - low) * width
            if cols is None:
                blocks.append(Block(str(part), 0, row, 1, n, "", offset, n))
            else:
                blocks.append(Block(str(part), row, 0, n, cols, "", offset, cols))
        at += rows
    tail = () if cols is None else (cols,)
    return Cut(tuple((n, *tail) for n in hf_rows), (high - low, *tail), tuple(blocks))


def _cut_columns(rows: int, cols: int, rank: int, size: int) -> Cut:
    """The rank-th of `size` equal column intervals of one HF matrix."""
    assert cols % size == 0, f"{cols} columns are divided over {size} ranks"
    n = cols // size
    return Cut(((rows, cols),), (rows, n), (Block("0", 0, rank * n, rows, n, "", 0, n),))


def _whole(*shape: int) -> Cut:
    rows, cols = shape if len(shape) == 2 else (1, *shape)
    return Cut((shape,), shape, (Block("0", 0, 0, rows, cols, "", 0, cols),))


def _vocabulary(d: Dims, rank: int, size: int) -> Cut:
    padding = padded_vocab(d.vocab, size) - d.vocab
    return _cut_rows([(0, 0, d.vocab), (PAD, 0, padding)], (d.vocab,), d.hidden, rank, size)


def _qkv(d: Dims, cols: int | None, rank: int, size: int) -> Cut:
    """[q..q k v] of each KV head after the other, divided as a whole: within a KV head where TP is larger."""
    q, k = d.heads // d.kv_heads * d.head_dim, d.head_dim
    order = [piece for g in range(d.kv_heads) for piece in ((0, g * q, q), (1, g * k, k), (2, g * k, k))]
    return _cut_rows(order, (d.kv_heads * q, d.kv_heads * k, d.kv_heads * k), cols, rank, size)


def _gate_up(ffn: int, hidden: int, rank: int, size: int) -> Cut:
    """[gate; up] of its own columns on each rank."""
    n = ffn // size
    order = [(part, r * n, n) for r in range(size) for part in (0, 1)]
    return _cut_rows(order, (ffn, ffn), hidden, rank, size)


LAYOUTS: dict[str, Callable[[Dims, int, int], Cut]] = {
    "norm": lambda d, rank, size: _whole(d.hidden),
    "head_norm": lambda d, rank, size: _whole(d.head_dim),
    "router": lambda d, rank, size: _whole(d.experts, d.hidden),
    "value_head": lambda d, rank, size: _whole(1, d.hidden),
    "vocabulary": _vocabulary,
    "qkv": lambda d, rank, size: _qkv(d, d.hidden, rank, size),
    "qkv_bias": lambda d, rank, size: _qkv(d, None, rank, size),
    "attention_out": lambda d, rank, size: _cut_columns(d.hidden, d.heads * d.head_dim, rank, size),
    "mlp_in": lambda d, rank, size: _gate_up(d.ffn, d.hidden, rank, size),
    "mlp_out": lambda d, rank, size: _cut_columns(d.hidden, d.ffn, rank, size),
    "expert_in": lambda d, rank, size: _gate_up(d.moe_ffn, d.hidden, rank, size),
    "expert_out": lambda d, rank, size: _cut_columns(d.hidden, d.moe_ffn, rank, size),
}


# ---- one rank's model ---------------------------------------------------------------------------------------------


def megatron_blocks(
    dims: Dims,
    layout: TrainLayout,
    tp_rank: int,
    pp_rank: int,
    ep_rank: int = 0,
    role: Role = "lm",
    transformer_impl: TransformerImpl = "local",
) -> tuple[Param, ...]:
    """Every parameter that the rank (tp_rank, pp_rank, ep_rank) holds, in the table's order, chunk by chunk."""
    cuts: dict[str, Cut] = {}
    for row in table(dims.family, transformer_impl, role, dims.tied):
        expert_whole = row.layout.startswith("expert_") and layout.ep > 1
        cuts[row.layout] = LAYOUTS[row.layout](dims, *((0, 1) if expert_whole else (tp_rank, layout.tp)))
    experts = range(dims.experts // layout.ep)
    params = []
    for chunk, layers in enumerate(layout.stages[pp_rank]):
        is_first = pp_rank == 0 and chunk == 0
        is_last = pp_rank == layout.pp - 1 and chunk == layout.vpp - 1
        for row in table(dims.family, transformer_impl, role, dims.tied):
            for i, e in _instances(row, layers, experts):
                held = {"first": is_first, "layer": True, "last": is_last}[row.place]
                if held and not (row is TIED_HEAD and is_first):
                    layer = layers[i] if row.place == "layer" else 0
                    names = [n.format(i=layer, e=e + ep_rank * len(experts)) for n in row.hf]
                    params.append(_param(f"{chunk}:{row.megatron.format(i=i, e=e)}", names, cuts[row.layout]))
    return tuple(params)


def megatron_shards(
    dims: Dims,
    layout: TrainLayout,
    coordinates: Iterable[tuple[int, int, int]],
    role: Role = "lm",
    transformer_impl: TransformerImpl = "local",
) -> tuple[list[tuple[Param, ...]], list[int]]:
    """(tp, pp, ep) of every global rank -> the parameters of each kind of rank once, and each rank's index there."""
    index: dict[tuple[int, int, int], int] = {}
    of_rank = [index.setdefault(at, len(index)) for at in coordinates]
    return [megatron_blocks(dims, layout, *at, role, transformer_impl) for at in index], of_rank


def _instances(row: Row, layers: tuple[int, ...], experts: range) -> Iterator[tuple[int, int]]:
    """(layer, expert) of each parameter that the row stands for, as Megatron counts them in a chunk."""
    for i in range(len(layers)) if "{i}" in row.megatron else (0,):
        for e in experts if "{e}" in row.megatron else (0,):
            yield i, e


def _param(key: str, names: list[str], cut: Cut) -> Param:
    return Param(key, cut.shape, tuple(replace(b, hf=names[int(b.hf)], param=key) for b in cut.blocks))


def hf_shapes(dims: Dims, role: Role = "lm") -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF folder and its shape (a tied head has no tensor of its own)."""
    shapes: dict[str, tuple[int, ...]] = {}
    layers, experts = tuple(range(dims.layers)), range(dims.experts)
    for row in table(dims.family, role=role, tied=dims.tied):
        cut = LAYOUTS[row.layout](dims, 0, 1)
        for i, e in _instances(row, layers, experts):
            shapes |= {n.format(i=i, e=e): s for n, s in zip(row.hf, cut.hf_shapes, strict=True)}
    return shapes


def check_names(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raises ValueError that lists what is in one and not in the other; `where` says what was searched."""
    expected, found = set(expected), set(found)
    problems = [
        f"{what} {', '.join(sorted(names)[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        for what, names in (("lacks", expected - found), ("has the unknown", found - expected))
        if names
    ]
    if problems:
        raise ValueError(f"{where} {' and '.join(problems)}")
