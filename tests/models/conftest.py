"""One process that is the whole world, for tests that need a model and no parallelism."""

import os
import socket
from collections.abc import Iterator

import pytest

from megatron_rl.initialize import Topology


@pytest.fixture(scope="module")
def alone() -> Iterator[Topology]:
    """The Topology of a world of one rank, taken down after the module's tests."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_rl import platform
    from megatron_rl.initialize import initialize

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["MASTER_PORT"] = port
    yield initialize()
    with platform.megatron():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
