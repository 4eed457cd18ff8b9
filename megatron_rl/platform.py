"""The only file that knows whether we run on CUDA or on the CPU.

Call whatever may reach into megatron-core inside `with platform.megatron():`, and vLLM never inside it: on the CPU the
context answers what megatron-core assumes of CUDA, and what it changes is changed back when the block ends.
"""

import contextlib
import logging
import os
import random
import resource
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NOISY = ("megatron", "torch.utils.cpp_extension")  # loggers that warn on import and construction


def device_type() -> str:
    """ "cuda" where a GPU is visible, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def backend() -> str:
    """The torch.distributed backend of the world group."""
    return "nccl" if device_type() == "cuda" else "gloo"


def set_device(local_rank: int) -> torch.device:
    """Makes this process's device current. ValueError where torchrun started more processes than there are GPUs."""
    if device_type() == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(f"local rank {local_rank} has no GPU, this machine shows {count}: lower --nproc_per_node")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def synchronize() -> None:
    """Waits for the device; nothing to wait for on the CPU."""
    if device_type() == "cuda":
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Gives cached, unused device memory back; nothing to give on the CPU."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()


def memory_allocated() -> int:
    """Bytes that tensors hold on the device; on the CPU the resident size of the process."""
    return torch.cuda.memory_allocated() if device_type() == "cuda" else host_memory()


def host_memory() -> int:
    """The resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def max_memory_allocated() -> int:
    """The most bytes memory_allocated has been since reset_peak_memory."""
    if device_type() == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def reset_peak_memory() -> None:
    """Starts max_memory_allocated anew (on the CPU where the kernel lets a process do it)."""
    if device_type() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def device_memory() -> tuple[int, int]:
    """(free, total) bytes of the device; of the machine's memory on the CPU."""
    if device_type() == "cuda":
        return torch.cuda.mem_get_info()
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(frozen=True)
class RngState:
    """All global generators of this process."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: Tensor | None


def rng_state() -> RngState:
    """Python's, numpy's, torch's and the current GPU's generators as they stand."""
    cuda = torch.cuda.get_rng_state() if device_type() == "cuda" else None
    return RngState(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)


def set_rng_state(state: RngState) -> None:
    """Puts the generators back to where `state` found them."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.cuda is not None and device_type() == "cuda":
        torch.cuda.set_rng_state(state.cuda)


@contextlib.contextmanager
def same_stream() -> Iterator[None]:
    """Afterwards the CUDA stream of before is the current one again: vLLM with TP leaves one of its own."""
    if device_type() != "cuda":
        yield
        return
    stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)


def is_verbose() -> bool:
    """Whether libraries may write to the console what they like."""
    return os.environ.get("MEGATRON_RL_VERBOSE") == "1"


def quiet(verbose: bool = False) -> None:
    """Keeps the warnings of megatron-core's import and construction off the console.

    `verbose`, or MEGATRON_RL_VERBOSE=1 in the environment, lets all libraries speak, from then on.
    """
    if verbose:
        os.environ["MEGATRON_RL_VERBOSE"] = "1"
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.NOTSET if is_verbose() else logging.ERROR)
    if is_verbose():
        warnings.filterwarnings("default")
        return
    warnings.filterwarnings("ignore", module=r".*megatron[./]core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")


@contextlib.contextmanager
def megatron() -> Iterator[None]:
    """megatron-core works inside. Nothing to do on CUDA; on the CPU a scoped shim, which may be nested."""
    if device_type() == "cuda" or _Shim.depth:
        yield
        return
    # Nothing may be compiled while names are swapped: on its first use torch.compile indexes torch.cuda as it is then,
    # for good. megatron-core compiles functions where it is imported, so that comes first.
    from megatron.core import jit

    jit.disable_jit_fuser()
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    own = [(megatron_random, "_set_cuda_rng_state", _set_rng), (dispatcher, "maybe_move_tensor_to_cpu", _to_host)]

    _Shim.depth += 1
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, answer in [*_answers(), *own]:
            undo.append((owner, name, vars(owner).get(name)))  # None: inherited
            setattr(owner, name, answer)
        with _OnCpu(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for owner, name, old in undo:
            delattr(owner, name) if old is None else setattr(owner, name, old)
        _Shim.depth -= 1


class _Shim:
    depth = 0  # blocks of megatron() that are open in this process


class _OnCpu(TorchFunctionMode):
    """Sends `device="cuda"` in factory calls to the CPU."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        device = kwargs.get("device") if kwargs else None
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **(kwargs or {}))


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _done(self, *args: Any) -> "_Stream":
        return self

    wait_stream = wait_event = synchronize = record_event = record = wait = _done


def _set_rng(state: Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core makes split sizes numbers where they come from a GPU only, and collectives take no tensors."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _answers() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, answer) of everything megatron-core asks of CUDA on the paths that we use."""
    tensor_type = torch.Tensor.type

    def type_as_on_cuda(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # the optimizers compare param.type() with 'torch.cuda.FloatTensor'
        if dtype is not None:
            return tensor_type(self, dtype, *args, **kwargs)
        name = tensor_type(self)  # under a function mode this comes back here
        return name if "cuda" in name else name.replace("torch.", "torch.cuda.")

    def identity(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def get_rng(*args: Any, **kwargs: Any) -> Tensor:
        return torch.get_rng_state()

    cuda = torch.cuda
    return [
        (cuda, "current_device", lambda: torch.device("cpu")),
        (cuda, "synchronize", nothing),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Stream),
        (cuda, "current_stream", _Stream),
        (cuda, "default_stream", _Stream),
        (cuda, "stream", lambda stream: contextlib.nullcontext()),
        (cuda, "set_device", nothing),
        (cuda, "get_rng_state", get_rng),
        (cuda.random, "get_rng_state", get_rng),
        (cuda, "set_rng_state", _set_rng),
        (cuda, "manual_seed", torch.manual_seed),
        (cuda.nvtx, "range_push", nothing),
        (cuda.nvtx, "range_pop", nothing),
        (torch.Tensor, "type", type_as_on_cuda),
        (torch.Tensor, "cuda", identity),
        (torch.nn.Module, "cuda", identity),
    ]


quiet()
