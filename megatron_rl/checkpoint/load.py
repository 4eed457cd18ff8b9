"""Finds the last whole checkpoint, puts a run back to where it stood, and says what was restored."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl import platform
from megatron_rl.checkpoint import files
from megatron_rl.checkpoint.state import (
    changed_arguments,
    restore_optimizer,
    restore_rng,
    restore_schedule,
    role_state,
    trained,
)
from megatron_rl.initialize import Topology
from megatron_rl.metrics import timed
from megatron_rl.roles import Role
from megatron_rl.weights.dist_io import OPTIMIZER, fill_model, load_sharded, model_state


@dataclass(frozen=True)
class Restored:
    """Where the run stands."""

    step: int  # the last finished one; 0 where only weights were there
    state: dict[str, Any]  # what the script gave to Checkpoints.save; empty where only weights were there


def load(
    args: argparse.Namespace, roles: list[Role | None], topology: Topology, show: Callable[[str], None]
) -> Restored | None:
    """Restores the last whole checkpoint of --load into `roles`; a call that every rank makes.

    None where no checkpoint is there. Call it before the engine gets the weights. ValueError where every checkpoint is
    broken, or one does not fit this run.
    """
    if args.load is None:
        return None
    folder = _latest_whole(args.load, topology, show)
    if folder is None:
        if args.exit_on_missing_checkpoint:
            raise ValueError(f"--load {args.load}: no checkpoint is there, and --exit-on-missing-checkpoint is given")
        show(f"[load] no checkpoint in {args.load}: starting fresh")
        return None
    return restore(folder, args, roles, topology, show)


def _latest_whole(folder: str, topology: Topology, show: Callable[[str], None]) -> Path | None:
    """files.latest_whole, in which every rank checks its share of the files. All ranks see one file system."""

    def told(message: Any) -> Any:
        """Rank 0's."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=topology.cpu_group)
        return box[0]

    def check(path: Path) -> list[str]:
        found: list[list[str]] = [[] for _ in range(topology.world_size)]
        mine = files.check_files(path, topology.rank, topology.world_size)
        dist.all_gather_object(found, mine, group=topology.cpu_group)
        return list(dict.fromkeys(chain(*found)))

    if topology.is_main:
        try:
            whole = files.latest_whole(folder, show, lambda path: check(told(path)))
            answer = told({"found": whole})
        except ValueError as error:
            answer = told({"error": str(error)})
    else:
        while isinstance(answer := told(None), Path):
            check(answer)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["found"]


def restore(
    folder: Path, args: argparse.Namespace, roles: list[Role | None], topology: Topology, show: Callable[[str], None]
) -> Restored:
    """Puts `roles`, their schedules and this rank's generators to where `folder` has them."""
    saved = json.loads((folder / files.STATE).read_text(encoding="utf-8"))
    with timed() as seconds:
        done = [_restore_role(role, folder, saved["roles"]) for role in trained(roles)]
        if saved["step"]:
            layout = {"tp": topology.tp_size, "pp": topology.pp_size, "vpp": topology.vpp_size}
            layout |= {"ep": topology.ep_size, "dp": topology.dp_size, "ranks": topology.world_size}
            moved = [f"{k.upper()} {v} -> {layout[k]}" for k, v in saved["layout"].items() if layout[k] != v]
            if moved:
                done.append(f"other generators, because the layout changed ({', '.join(moved)})")
            else:
                done.append("generators of every rank" if restore_rng(folder, topology) else "new generators")
            done += [f"{name} {value}" for name, value in saved["state"].items()]
    show(f"[load] {folder}: step {saved['step']}, {'; '.join(done)}; {seconds[0]:.1f} s")
    if saved["arguments"]:
        for text in changed_arguments(saved["arguments"], args):
            show(f"warning: the checkpoint's run had other flags: {text}")
    return Restored(saved["step"], saved["state"])


def _restore_role(role: Role, folder: Path, saved: dict[str, Any]) -> str:
    if role.name not in saved and all(entry["schedule"] is None for entry in saved.values()):
        return f"{role.name} as its folder has it"
    if role.name not in saved:
        raise ValueError(f"{folder} has no {role.name}, only {', '.join(saved)}: it was saved by another kind of run")
    entry = saved[role.name]
    if entry["kind"] != role.kind:
        raise ValueError(f"{folder / role.name} is of kind {entry['kind']!r}, the {role.name} of kind {role.kind!r}")
    whole = entry["schedule"] is not None  # else the weights alone, from a converter
    with platform.megatron(), role.memory.for_forward(), role.memory.for_update():
        state = role_state(role, loading=True) if whole else model_state(role.chunks)
        loaded = load_sharded(state, folder / role.name, () if whole else (OPTIMIZER,))
        fill_model(role.chunks, loaded)
        if whole:
            restore_optimizer(role, loaded["optimizer"], entry["updates"])
            restore_schedule(role, entry["schedule"])
        else:
            role.optimizer.reload_model_params()
    what = f"weights, optimizer and schedule (optimizer step {entry['updates']})" if whole else "weights"
    return f"{role.name} {what}"
