"""Times that all ranks agree on, and those of the plainest moves of bytes that others are compared with."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl import platform
from megatron_rl.initialize import Topology


def worst(number: float, topology: Topology) -> float:
    """The largest of all ranks' numbers."""
    value = torch.tensor(float(number), dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=topology.cpu_group)
    return value.item()


def timed(action: Callable[[], Any], topology: Topology) -> float:
    """Seconds until the last rank is through."""
    platform.synchronize()
    dist.barrier(group=topology.cpu_group)
    started = time.perf_counter()
    action()
    platform.synchronize()
    return worst(time.perf_counter() - started, topology)


def copy_seconds(nbytes: int, topology: Topology) -> float:
    """The median time of one plain copy of as many bytes on this device."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=topology.device)
    target = torch.zeros_like(source)
    return statistics.median(timed(lambda: target.copy_(source), topology) for _ in range(20))


def exchange_seconds(nbytes: int, topology: Topology) -> float:
    """The median time in which every rank sends as many bytes to the next one, and receives as many, in one piece."""
    outgoing, incoming = (torch.ones(nbytes, dtype=torch.uint8, device=topology.device) for _ in range(2))
    after, before = ((topology.rank + step) % topology.world_size for step in (1, -1))

    def exchange() -> None:
        operations = [dist.P2POp(dist.irecv, incoming, before), dist.P2POp(dist.isend, outgoing, after)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    exchange()  # connections are made
    return statistics.median(timed(exchange, topology) for _ in range(20))
