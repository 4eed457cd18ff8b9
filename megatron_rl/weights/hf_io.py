"""Hugging Face folders: read the slices that a rank needs, write whole folders, both through the table of arch.py.

Nothing is ever whole in memory but the tensor and the output shard at hand.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.initialize import Topology
from megatron_rl.models.config import HEADS, HFConfig, Sizes, check_layout, dims
from megatron_rl.weights.arch import VALUE_HEAD, Role, TransformerImpl
from megatron_rl.weights.layouts import Block, Param, TrainLayout, check_names, hf_shapes, megatron_blocks
from megatron_rl.weights.target import check_replaceable

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}  # as transformers counts max_shard_size
BESIDE = (  # what travels along with the weights
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
    "*.model",
)


class HFFolder:
    """The safetensors of a folder, opened but not read. ValueError where one is missing or broken."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (self.folder / "model.safetensors").is_file():
            files = ["model.safetensors"]
        else:
            raise ValueError(f"{self.folder} has neither model.safetensors nor model.safetensors.index.json")
        self._slices: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(self.folder / file, framework="pt")
            except Exception as error:  # safetensors raises its own class for a broken header, OSError for no file
                raise ValueError(f"{self.folder / file} cannot be read: {error}") from error
            self._slices |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118

    @property
    def names(self) -> set[str]:
        return set(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> torch.dtype:
        kind = self._slices[name].get_dtype()
        if kind not in DTYPES:
            raise ValueError(f"{self.folder}: {name} is stored as {kind}; {', '.join(DTYPES)} are supported")
        return DTYPES[kind]

    def read(self, block: Block) -> Tensor:
        """The block's elements [rows, cols], nothing else of the tensor."""
        tensor, columns = self._slices[block.hf], slice(block.col, block.col + block.cols)
        if len(tensor.get_shape()) == 1:
            return tensor[columns][None]
        return tensor[block.row : block.row + block.rows, columns]


@dataclass(frozen=True)
class Loaded:
    """What this rank read."""

    parameters: int
    bytes: int
    new_head: bool  # the value head is fresh: the folder is of a language model
    ignored: tuple[str, ...]  # tensors of the folder that the model has no use for


def ignorable(name: str, hf: HFConfig, role: Role) -> bool:
    """Tensors that a good folder may have besides the table's: old rotary buffers, and heads that the role has not."""
    no_head = role == "value" or hf.tied
    return name.endswith("rotary_emb.inv_freq") or (no_head and name == "lm_head.weight")


def check_folder(folder: HFFolder, hf: HFConfig, role: Role) -> tuple[bool, tuple[str, ...]]:
    """(new head wanted, names to ignore). ValueError that lists missing and unknown tensors, or wrong shapes."""
    if role == "lm" and hf.head == "value":
        raise ValueError(f"{folder.folder} is a value or reward model: it has no language-model head")
    shapes = hf_shapes(dims(hf), role)
    (score,) = VALUE_HEAD.hf
    new_head = role == "value" and hf.head == "lm" and score not in folder.names
    if new_head:
        del shapes[score]
    ignored = tuple(sorted(n for n in folder.names - shapes.keys() if ignorable(n, hf, role)))
    check_names(shapes, folder.names - set(ignored), f"{folder.folder}")
    wrong = [f"{n} is {folder.shape(n)}, not {s}" for n, s in shapes.items() if folder.shape(n) != s]
    if wrong:
        raise ValueError(f"{folder.folder}: {'; '.join(wrong[:10])}; as its config.json has it")
    return new_head, ignored


def view(tensor: Tensor, block: Block) -> Tensor:
    """The block's place [rows, cols] in its contiguous parameter."""
    assert tensor.is_contiguous(), f"{block.param} is contiguous"
    return tensor.as_strided((block.rows, block.cols), (block.stride, 1), tensor.storage_offset() + block.offset)


def fill(folder: HFFolder, params: Iterable[Param], tensors: Mapping[str, Tensor], cast: bool = False) -> int:
    """Copies every block of `params` from the folder into tensors[param.key]; padding becomes 0. Returns bytes.

    ValueError where the stored type is another than the tensor's, unless `cast`.
    """
    total = 0
    for param in params:
        tensor = tensors[param.key]
        assert tuple(tensor.shape) == param.shape, f"{param.key} is {tuple(tensor.shape)}, the table has {param.shape}"
        if sum(b.rows * b.cols for b in param.blocks) < param.numel:
            tensor.zero_()
        for block in param.blocks:
            stored = folder.dtype(block.hf)
            if stored != tensor.dtype and not cast:
                raise ValueError(f"{folder.folder}: {block.hf} is stored as {stored}, the model has {tensor.dtype}")
            view(tensor, block).copy_(folder.read(block))
            total += block.rows * block.cols * stored.itemsize
    return total


def parameters_of(chunks: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """layouts.Param's keys -> the parameters, of chunks that may be wrapped in DDP."""
    from megatron.core.utils import unwrap_model

    models = enumerate(unwrap_model(chunks))
    return {f"{i}:{name}": param for i, model in models for name, param in model.named_parameters()}


def named_tensors(chunks: list[torch.nn.Module]) -> dict[str, Tensor]:
    """The same keys -> the parameters' data as it lies now."""
    return {key: param.data for key, param in parameters_of(chunks).items()}


def blocks_of(hf: HFConfig, topology: Topology, rank: int, role: Role, impl: TransformerImpl) -> tuple[Param, ...]:
    """The table's parameters of any rank."""
    at = topology.everyone[rank]
    return megatron_blocks(dims(hf), layout_of(hf, topology), at.tp, at.pp, at.ep, role, impl)


def layout_of(hf: HFConfig, topology: Topology) -> TrainLayout:
    sizes = Sizes(topology.tp_size, topology.pp_size, topology.vpp_size, topology.ep_size)
    return check_layout(hf, sizes, sequence_parallel=topology.tp_size > 1)


def load_model(
    folder: str | Path,
    hf: HFConfig,
    chunks: list[torch.nn.Module],
    topology: Topology,
    role: Role = "lm",
    transformer_impl: TransformerImpl = "local",
    cast: bool = False,
) -> Loaded:
    """Fills this rank's chunks from a folder. Call it before the optimizer is built: that copies float32 weights.

    A value model takes its head from `score.weight`, or keeps the fresh one where the folder is a language model.
    """
    source = HFFolder(folder)
    new_head, ignored = check_folder(source, hf, role)
    tensors = named_tensors(chunks)
    params = blocks_of(hf, topology, topology.rank, role, transformer_impl)
    check_names((p.key for p in params), tensors, f"the table of {hf.family}, against the model built from it,")
    if new_head:
        params = tuple(p for p in params if p.blocks[0].hf not in VALUE_HEAD.hf)
    return Loaded(len(params), fill(source, params, tensors, cast), new_head, ignored)


# ---- writing ------------------------------------------------------------------------------------------------------


def shard_bytes(text: str | int) -> int:
    """ "5GB" -> 5,000,000,000."""
    if isinstance(text, int):
        return text
    number, unit = text[:-2].strip(), text[-2:].upper()
    if unit not in UNITS or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
        raise ValueError(f"--max-shard-size {text}: a number and one of {', '.join(UNITS)}, such as 5GB")
    return int(float(number) * UNITS[unit])


class HFWriter:
    """Writes a folder's tensors, in the order of `shapes`, into `folder`.partial, and renames it when all are there.
    ValueError where `folder` is something else than an older model, which is replaced.

    Files and index are named as transformers names them. As a context manager it leaves nothing behind on an error.
    Of several processes, which `meet` at a barrier, each writes the output shards of its `rank`.
    """

    def __init__(
        self,
        folder: str | Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | Mapping[str, torch.dtype],
        max_shard: str | int = "5GB",
        rank: int = 0,
        world: int = 1,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.shapes = Path(folder), dict(shapes)
        self.dtypes = {name: dtype if isinstance(dtype, torch.dtype) else dtype[name] for name in shapes}
        check_replaceable(self.folder)
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        limit, size = shard_bytes(max_shard), 0
        self._shards: list[list[str]] = [[]]
        for name in self.shapes:
            nbytes = self._bytes(name)
            if self._shards[-1] and size + nbytes > limit:
                self._shards.append([])
                size = 0
            self._shards[-1].append(name)
            size += nbytes
        self._rank, self._mine, self._meet = rank, range(rank, len(self._shards), world), meet
        self._held: dict[str, Tensor] = {}
        self._done = 0
        if rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        meet()

    @property
    def names(self) -> list[str]:
        """The tensors that this process writes, in order."""
        return [name for shard in self._mine for name in self._shards[shard]]

    def _bytes(self, name: str) -> int:
        return torch.Size(self.shapes[name]).numel() * self.dtypes[name].itemsize

    def write(self, name: str, tensor: Tensor) -> None:
        """Takes the next tensor; a full shard goes to the disk."""
        shard = self._mine[self._done]
        expected = self._shards[shard][len(self._held)]
        assert name == expected, f"{name} was written where {expected} comes next"
        assert tuple(tensor.shape) == self.shapes[name] and tensor.dtype == self.dtypes[name], name
        self._held[name] = tensor.contiguous()
        if len(self._held) == len(self._shards[shard]):
            path = self.partial / self._file(shard)
            save_file(self._held, path, metadata={"format": "pt"})
            path.chmod(0o644)  # safetensors leaves it to its owner alone; who serves it may be somebody else
            self._held, self._done = {}, self._done + 1

    def _file(self, shard: int) -> str:
        count = len(self._shards)
        return "model.safetensors" if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"

    def close(self) -> None:
        """Writes the index and puts the folder under its name, in place of an older one."""
        assert self._done == len(self._mine), f"{self._done} of {len(self._mine)} shards were written"
        self._meet()
        if self._rank == 0:
            self._finish()
        self._meet()

    def _finish(self) -> None:
        if len(self._shards) > 1:
            numel = sum(torch.Size(shape).numel() for shape in self.shapes.values())
            weight_map = {name: self._file(i) for i, names in enumerate(self._shards) for name in names}
            metadata = {"total_parameters": numel, "total_size": sum(map(self._bytes, self.shapes))}
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            (self.partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        old = self.folder.with_name(f".{self.folder.name}.old")  # hidden: X.old may be somebody's own
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        self.partial.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def __enter__(self) -> "HFWriter":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            shutil.rmtree(self.partial, ignore_errors=True)


def export_shapes(hf: HFConfig, role: Role) -> dict[str, tuple[int, ...]]:
    """hf_shapes in the order in which a model runs: embedding, layer after layer, final norm, head."""
    shapes = hf_shapes(dims(hf), role)
    layered = [name for name in shapes if ".layers." in name]
    before, after = next(iter(shapes)), [n for n in list(shapes)[1:] if n not in layered]
    layered.sort(key=lambda name: int(name.split(".layers.")[1].split(".")[0]))  # stable: the table's order inside
    return {name: shapes[name] for name in (before, *layered, *after)}


def export_config(hf: HFConfig, role: Role, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of an export: the source's, with the head's architecture and the type of the weights."""
    raw = dict(hf.raw)
    if dtype != hf.dtype or not ({"dtype", "torch_dtype"} & raw.keys()):
        raw["torch_dtype" if "torch_dtype" in raw else "dtype"] = str(dtype).removeprefix("torch.")
    if role == "value":
        (name,) = raw["architectures"]
        stem = next(name.removesuffix(suffix) for suffix in HEADS if name.endswith(suffix))
        raw |= {"architectures": [stem + "ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
        raw |= {"label2id": {"LABEL_0": 0}}
    return raw


def write_beside(source: str | Path, target: Path, hf: HFConfig, role: Role, dtype: torch.dtype) -> None:
    """config.json, and the source's generation config, tokenizer and chat template."""
    (target / "config.json").write_text(json.dumps(export_config(hf, role, dtype), indent=2) + "\n")
    for pattern in BESIDE:
        for path in Path(source).glob(pattern):
            if path.is_file() and not (role == "value" and path.name == "generation_config.json"):
                shutil.copyfile(path, target / path.name)


def export_model(
    chunks: list[torch.nn.Module],
    hf: HFConfig,
    topology: Topology,
    folder: str | Path,
    source: str | Path,
    role: Role = "lm",
    transformer_impl: TransformerImpl = "local",
    max_shard: str | int = "5GB",
) -> None:
    """Every rank calls it; rank 0 writes `folder`, with the config and tokenizer of `source`.

    Between the ranks travels one tensor at a time, over the CPU.
    """
    tensors = named_tensors(chunks)
    dtype = next(iter(tensors.values())).dtype
    holders = _holders(hf, topology, role, transformer_impl)
    shapes = export_shapes(hf, role)
    if topology.rank == 0:
        with HFWriter(folder, shapes, dtype, max_shard) as writer:
            for name, shape in shapes.items():
                writer.write(name, _gather(holders[name], shape, dtype, tensors, topology))
            write_beside(source, writer.partial, hf, role, dtype)
    else:
        for name in shapes:
            mine = [view(tensors[b.param], b) for rank, b in holders[name] if rank == topology.rank]
            if mine:
                flat = torch.cat([piece.reshape(-1) for piece in mine]).cpu()
                dist.send(flat.view(torch.uint8), 0, group=topology.cpu_group)
    dist.barrier(group=topology.cpu_group)


def _holders(
    hf: HFConfig, topology: Topology, role: Role, impl: TransformerImpl
) -> dict[str, list[tuple[int, Block]]]:
    """HF tensor -> (rank, block) pairs that cover it once; the lowest rank where several hold the same."""
    first: dict[tuple[int, int, int], int] = {}
    for rank, at in enumerate(topology.everyone):
        first.setdefault((at.tp, at.pp, at.ep), rank)
    found: dict[str, dict[tuple[int, int, int, int], tuple[int, Block]]] = {}
    for rank in sorted(first.values()):
        for param in blocks_of(hf, topology, rank, role, impl):
            for b in param.blocks:
                found.setdefault(b.hf, {}).setdefault((b.row, b.col, b.rows, b.cols), (rank, b))
    return {name: list(blocks.values()) for name, blocks in found.items()}


def _gather(
    holders: list[tuple[int, Block]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor],
    topology: Topology,
) -> Tensor:
    """On rank 0: one whole HF tensor from the ranks that hold its blocks."""
    whole = torch.empty(shape, dtype=dtype)
    matrix = whole.view(-1, shape[-1])
    for rank, blocks in _by_rank(holders):
        sizes = [b.rows * b.cols for b in blocks]
        if rank == topology.rank:
            pieces = [view(tensors[b.param], b) for b in blocks]
        else:
            flat = torch.empty(sum(sizes), dtype=dtype)
            dist.recv(flat.view(torch.uint8), rank, group=topology.cpu_group)
            pieces = [p.view(b.rows, b.cols) for p, b in zip(flat.split(sizes), blocks, strict=True)]
        for piece, b in zip(pieces, blocks, strict=True):
            matrix[b.row : b.row + b.rows, b.col : b.col + b.cols].copy_(piece)
    return whole


def _by_rank(holders: list[tuple[int, Block]]) -> Iterator[tuple[int, list[Block]]]:
    for rank in sorted({rank for rank, _ in holders}):
        yield rank, [block for other, block in holders if other == rank]
