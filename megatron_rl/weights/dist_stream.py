"""Reads and writes a role's distributed checkpoint tensor by tensor, without a model, a GPU or a process group.

The names are those of arch.py's table for one rank that holds everything; of the norms transformer-engine's,
which megatron-core's local layers write too. Experts of a layer are one tensor [experts, ...] in the checkpoint.
"""

import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.models.config import HFConfig, dims
from megatron_rl.weights.arch import EMBEDDING, LM_HEAD, Role
from megatron_rl.weights.dist_io import OPTIMIZER
from megatron_rl.weights.hf_io import HFFolder, fill
from megatron_rl.weights.layouts import Param, check_names, megatron_blocks, train_layout

COMMON = "common_state/shard_0_1"  # megatron-core's place for what is not a tensor
PADDED = (EMBEDDING.megatron, LM_HEAD.megatron)  # the number of their last rows depends on the writer's TP
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Stored:
    """Where a parameter of the table lies in the checkpoint."""

    key: str
    shape: tuple[int, ...]  # of the checkpoint's tensor
    offsets: tuple[int, ...]  # of the parameter in it
    sizes: tuple[int, ...]
    param: Param


def stored_params(hf: HFConfig, role: Role) -> list[Stored]:
    d = dims(hf)
    stored = []
    for param in megatron_blocks(d, train_layout(d), 0, 0, 0, role, "transformer_engine"):
        name = param.key.partition(":")[2]
        if match := _EXPERT.fullmatch(name):
            before, expert, after = match.groups()
            offsets = (int(expert), *(0 for _ in param.shape))
            shape, sizes = (d.experts, *param.shape), (1, *param.shape)
            stored.append(Stored(f"{before}.experts.{after}", shape, offsets, sizes, param))
        else:
            stored.append(Stored(name, param.shape, tuple(0 for _ in param.shape), param.shape, param))
    return stored


# ---- writing ------------------------------------------------------------------------------------------------------


class _Planner(dcp.DefaultSavePlanner):
    """Makes each tensor when it is its turn to be written."""

    def __init__(self, items: list[WriteItem], make: Callable[[MetadataIndex], Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self._items, self._make = items, make

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._make(write_item.index)


def write_role(source: HFFolder, hf: HFConfig, role: Role, folder: Path, rank: int = 0, world: int = 1) -> int:
    """Writes the HF folder's tensors into `folder`, each rank its share; returns this rank's bytes.

    ValueError where tensors that make one parameter are stored in different types.
    """
    mine = {(s.key, s.offsets): s for s in stored_params(hf, role)[rank::world]}
    nothing = io.BytesIO()
    torch.save([{}], nothing)
    items = [_write_item(stored, source) for stored in mine.values()]
    if rank == 0:
        index = MetadataIndex(COMMON)
        items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(nothing.tell())))
        (folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )
    total = 0

    def make(index: MetadataIndex) -> Any:
        nonlocal total
        if index.fqn == COMMON:
            return nothing
        stored = mine[index.fqn, tuple(index.offset or ())]
        tensor = torch.empty(stored.param.shape, dtype=source.dtype(stored.param.blocks[0].hf))
        total += fill(source, [stored.param], {stored.param.key: tensor})
        return tensor.view(stored.sizes)

    # a file for each tensor: torch's writer keeps the tensors of a file until the file is closed
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=1)
    dcp.save({}, storage_writer=writer, planner=_Planner(items, make), no_dist=world == 1)
    return total


def _write_item(stored: Stored, source: HFFolder) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(stored.offsets), torch.Size(stored.sizes))
    properties = TensorProperties(dtype=source.dtype(stored.param.blocks[0].hf))
    index = MetadataIndex(stored.key, chunk.offsets)
    return WriteItem(
        index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, torch.Size(stored.shape))
    )


# ---- reading ------------------------------------------------------------------------------------------------------


class _Into:
    """Takes what torch's reader reads into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        return self._target[tuple(slice(a, a + n) for a, n in zip(item.dest_offsets, item.lengths, strict=True))]

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass


class DistFolder:
    """A role's weights in a checkpoint; nothing is read before `hf_tensor` asks.

    ValueError that lists names too many or too few, and wrong shapes.
    """

    def __init__(self, folder: Path, hf: HFConfig, role: Role) -> None:
        self.folder = folder
        self._reader = dcp.FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors: Mapping[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(OPTIMIZER)
        }
        stored = stored_params(hf, role)
        check_names((s.key for s in stored), self._tensors, f"{folder}")
        wrong = [f"{s.key} is {self._shape(s.key)}, not {s.shape}" for s in stored if not self._fits(s)]
        if wrong:
            raise ValueError(f"{folder}: {'; '.join(wrong[:10])}; as its config.json has it")
        self._holder = {block.hf: s for s in stored for block in s.param.blocks}
        self._cached: tuple[str, Tensor] = ("", torch.empty(0))

    def _shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].size)

    def _fits(self, stored: Stored) -> bool:
        found = self._shape(stored.key)
        if stored.key not in PADDED or len(found) != 2 or stored.param.blocks[0].rows == 1:
            return found == stored.shape
        return found[1] == stored.shape[1] and found[0] >= sum(block.rows for block in stored.param.blocks)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[self._holder[name].key].properties.dtype

    def hf_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One HF tensor; the parameter that it was read from stays until another is asked for (q, then k, then v)."""
        stored = self._holder[name]
        if self._cached[0] != stored.param.key:
            self._cached = ("", torch.empty(0))
            self._cached = (stored.param.key, self._read(stored))
        flat = self._cached[1].view(-1)
        whole = torch.empty(shape, dtype=flat.dtype)
        matrix = whole.view(-1, shape[-1])
        for b in stored.param.blocks:
            if b.hf == name:
                block = flat.as_strided((b.rows, b.cols), (b.stride, 1), b.offset)
                matrix[b.row : b.row + b.rows, b.col : b.col + b.cols].copy_(block)
        return whole

    def _read(self, stored: Stored) -> Tensor:
        """The parameter without the padding that the writer's TP gave it; rows it lacks are not asked for."""
        entry = self._tensors[stored.key]
        sizes = tuple(min(n, limit) for n, limit in zip(stored.sizes, entry.size, strict=True))
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size(stored.offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(stored.key, entry, [chunk])
        self._reader.read_data(LoadPlan(items), _Into(target))
        return target
