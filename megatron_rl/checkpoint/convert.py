"""Between a Hugging Face folder and a checkpoint of weights alone, tensor by tensor, in one process or many."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_rl.checkpoint import files
from megatron_rl.models.config import read_hf_config
from megatron_rl.weights.dist_io import HF, is_dist_folder
from megatron_rl.weights.dist_stream import DistFolder, write_role
from megatron_rl.weights.hf_io import HFFolder, HFWriter, check_folder, export_shapes, write_beside

ROLE_OF = {"lm": "policy", "value": "critic"}


@dataclass(frozen=True)
class Workers:
    """The processes that share a conversion; one without torchrun."""

    rank: int
    world: int

    def meet(self) -> None:
        if self.world > 1:
            dist.barrier()


def start_workers() -> Workers:
    workers = Workers(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    if workers.world > 1:
        dist.init_process_group("gloo")
    return workers


def hf_to_megatron(source: str | Path, save: str | Path, workers: Workers) -> tuple[Path, int]:
    """Writes SAVE/iter_0000000 with the role that the folder's head says; (its folder, this rank's bytes).

    ValueError that names tensors too many or too few, or of the wrong shape; nothing is left in SAVE then.
    """
    hf = read_hf_config(source)
    role = "value" if hf.head == "value" else "lm"
    opened = HFFolder(source)
    check_folder(opened, hf, role)
    name = ROLE_OF[role]
    partial = Path(save) / (files.folder_name(0) + files.PARTIAL)
    try:
        if workers.rank == 0:
            (files.begin(Path(save), 0) / name / HF).mkdir(parents=True)
            write_beside(source, partial / name / HF, hf, role, hf.dtype)
            state = {"step": 0, "state": {}, "roles": {name: {"kind": role, "schedule": None}}}
            files.write_text(
                partial / files.STATE, json.dumps(state | {"layout": {}, "arguments": {}}, indent=1) + "\n"
            )
        workers.meet()
        written = write_role(opened, hf, role, partial / name, workers.rank, workers.world)
        workers.meet()
        if workers.rank == 0:
            files.write_manifest(partial, {file: files.digest(partial / file) for file in files.contents(partial)})
            files.commit(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    workers.meet()
    return Path(save) / files.folder_name(0) / name, written


def role_folder(load: str | Path, role: str, show: Callable[[str], None] = print) -> Path:
    """A role's folder, from itself, its checkpoint, or the folder of checkpoints (the last whole one)."""
    if is_dist_folder(load):
        return Path(load)
    found = files.latest_whole(load, show)
    if found is None:
        raise ValueError(f"--load {load}: no checkpoint is there")
    if not is_dist_folder(found / role):
        roles = sorted(path.name for path in found.iterdir() if is_dist_folder(path))
        raise ValueError(f"--role {role}: {found} has {', '.join(roles) or 'no role'}")
    return found / role


def megatron_to_hf(
    load: str | Path, save: str | Path, role: str, max_shard: str, source: str | Path | None, workers: Workers
) -> tuple[Path, int]:
    """Writes the HF folder SAVE; (the role's folder that it came from, this rank's bytes).

    `source`: a folder whose config.json and tokenizer go along, instead of those that the checkpoint keeps.
    """
    folder = role_folder(load, role)
    beside = Path(source) if source is not None else folder / HF
    hf = read_hf_config(beside)
    kind = "value" if hf.head == "value" else "lm"
    opened = DistFolder(folder, hf, kind)
    shapes = export_shapes(hf, kind)
    dtypes = {name: opened.dtype(name) for name in shapes}
    written = 0
    with HFWriter(save, shapes, dtypes, max_shard, workers.rank, workers.world, workers.meet) as writer:
        for name in writer.names:
            tensor = opened.hf_tensor(name, shapes[name])
            written += tensor.nbytes
            writer.write(name, tensor)
        if workers.rank == 0:
            write_beside(beside, writer.partial, hf, kind, hf.dtype)
    return folder, written
