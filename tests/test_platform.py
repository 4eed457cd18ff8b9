import inspect
from pathlib import Path

import pytest
import torch
from launch import check, run

from megatron_rl import platform

OWNERS = (torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module)


def attributes() -> list[dict]:
    return [dict(inspect.getmembers_static(owner)) for owner in OWNERS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA nothing is swapped")
def test_shim_is_undone():
    """After the block, also a nested one or one that raised, every attribute that it swapped is the object it was."""
    with platform.megatron():
        pass  # first use imports megatron-core, which may add to torch
    before = attributes()
    with pytest.raises(RuntimeError), platform.megatron(), platform.megatron():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(1, device="cuda").device.type == "cpu" and torch.zeros(1).cuda().device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        raise RuntimeError
    after = attributes()
    assert all(a[k] is b[k] for a, b in zip(before, after, strict=True) for k in a)
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_generators_are_restored():
    """set_rng_state puts python's, numpy's and torch's generators back."""
    import random

    import numpy as np

    state = platform.rng_state()
    drawn = [(random.random(), np.random.rand(), torch.rand(2).tolist()) for _ in range(2)]
    platform.set_rng_state(state)
    assert [(random.random(), np.random.rand(), torch.rand(2).tolist()) for _ in range(2)] == drawn


def test_memory_numbers_are_plausible():
    """Free is below total, and the peak is at least what is held."""
    free, total = platform.device_memory()
    assert 0 < free <= total
    platform.reset_peak_memory()
    if platform.device_type() == "cpu":
        held = torch.ones(30_000_000)
        assert platform.memory_allocated() > held.nbytes
    assert platform.max_memory_allocated() >= 0.9 * platform.memory_allocated()


def test_importing_and_building_is_quiet(tmp_path: Path):
    """megatron-core's warnings stay off the console unless MEGATRON_RL_VERBOSE=1."""
    code = "import megatron_rl.initialize as i; t = i.initialize(); from megatron.core.models.gpt import GPTModel"
    program = tmp_path / "program.py"
    program.write_text(code)
    import socket
    import sys

    def output(verbose: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        result = run(sys.executable, program, env={"MASTER_PORT": port, "MEGATRON_RL_VERBOSE": verbose})
        check(result)
        return result.stdout + result.stderr

    assert "Apex" not in output("0") and "Transformer Engine" not in output("0")
    assert "Apex is not installed" in output("1") or platform.device_type() == "cuda"
