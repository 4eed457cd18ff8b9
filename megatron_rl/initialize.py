"""From torchrun's environment to process groups, seeds and a Topology."""

import os
import random
import socket
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl import platform

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the training layout."""

    tp: int
    pp: int
    dp: int
    ep: int = 0  # expert-parallel rank


@dataclass(frozen=True)
class Topology:
    """The process groups and this rank's place in them. Passed in; nobody reads megatron's global state."""

    rank: int
    world_size: int
    local_rank: int
    gpus_per_node: int
    tp_size: int
    pp_size: int
    dp_size: int
    ep_size: int
    vpp_size: int  # model chunks a pipeline stage holds, 1 without virtual pipelining
    at: Coordinates
    everyone: tuple[Coordinates, ...]  # of every global rank
    groups: "ProcessGroupCollection"
    cpu_group: dist.ProcessGroup  # gloo over the world: small host tensors and objects
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.pp_size - 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def coordinates(rank: int, world_size: int, tp: int, pp: int, ep: int = 1) -> Coordinates:
    """megatron-core's default order tp-cp-ep-dp-pp, with cp 1.

    Expert-parallel ranks divide the TP x DP ranks of a stage; with EP over 1 experts are not cut over TP, so that
    neighbouring ranks, those of one TP group too, hold different experts.
    """
    dp = world_size // (tp * pp)
    return Coordinates(tp=rank % tp, pp=rank // (tp * dp), dp=rank // tp % dp, ep=rank % (tp * dp) % ep)


def _free_port() -> str:
    """For a process that torchrun did not start: two of them on one machine must not meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def initialize(
    tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, seed: int = 1234, timeout_minutes: float = 10
) -> Topology:
    """Starts torch.distributed and megatron-core's groups; every rank gets the seeds megatron gives it.

    Raises ValueError where the world size that torchrun started is not tp x pp x dp.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if world_size % (tp * pp):
        raise ValueError(
            f"{world_size} processes cannot hold --tensor-model-parallel-size {tp} x --pipeline-model-parallel-size "
            f"{pp}: start a multiple of {tp * pp} (torchrun --nproc_per_node)"
        )
    device = platform.set_device(local_rank)
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", _free_port())
        dist.init_process_group(platform.backend(), rank=rank, world_size=world_size, timeout=timeout)
        weakref.finalize(initialize, _close)  # at exit the last made comes first: vLLM closes its groups before these
    with platform.megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=tp if ep == 1 else 1,
            distributed_timeout_minutes=max(1, int(timeout_minutes)),
            create_gloo_process_groups=True,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    everyone = tuple(coordinates(r, world_size, tp, pp, ep) for r in range(world_size))
    at = everyone[rank]
    assert (groups.tp.rank(), groups.pp.rank(), groups.dp.rank()) == (at.tp, at.pp, at.dp), "megatron's rank order"
    assert groups.ep.rank() == at.ep, "megatron's order of expert-parallel ranks"
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        tp_size=tp,
        pp_size=pp,
        dp_size=world_size // (tp * pp),
        ep_size=ep,
        vpp_size=vpp,
        at=at,
        everyone=everyone,
        groups=groups,
        cpu_group=dist.new_group(backend="gloo", timeout=timeout),
        device=device,
    )
