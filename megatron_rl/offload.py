"""What leaves the device while it is idle: a role's optimizer state, gradient buffers and weights.

Nothing is re-pointed: a tensor's storage is emptied and filled again, so that every view of it stays valid. On CUDA
the host memory is pinned and taken once, and the copies run on a stream of their own beside the computation. On the
CPU the same happens between two places of host memory.
"""

import contextlib
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl import platform


@dataclass(frozen=True)
class OffloadOptions:
    """Which parts of a role stay on the device only while they are used."""

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False  # float32 main parameters and moments


ALL_STAY = OffloadOptions()
PAGE = resource.getpagesize()


class Parked:
    """Tensors that leave the device and come back, in whole storages and always in the same order.

    `tensors` is asked each time they leave: an optimizer has its moments only after its first step. The host copy of
    tensors that never change (`constant`) is written once.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], constant: bool = False) -> None:
        self._tensors, self._constant = tensors, constant
        self._away: list[tuple[torch.UntypedStorage, torch.device]] = []
        self._host: list[Tensor] = []  # bytes of each storage
        self._written = False
        self._coming = False

    def leave(self) -> None:
        """Enqueues the copies and gives the memory back; where nothing is on the device it does nothing."""
        if self._away:
            return
        tensors = list({t.untyped_storage().data_ptr(): t for t in self._tensors() if t.numel()}.values())
        sizes = [t.untyped_storage().nbytes() for t in tensors]
        known = [host.nbytes for host in self._host]
        assert known == sizes[: len(known)], "tensors keep their order and sizes; new ones come last"
        if len(sizes) > len(known):
            self._host += self._more_host_memory(sizes[len(known) :])
        with _beside_computation(after_it=True):
            for tensor, host in zip(tensors, self._host, strict=True):
                storage = tensor.untyped_storage()
                on_device = _bytes_of(storage, tensor.device)
                if not (self._constant and self._written):
                    host.copy_(on_device, non_blocking=True)
                if on_device.is_cuda:
                    on_device.record_stream(torch.cuda.current_stream())
                del on_device
                storage.resize_(0)
                self._away.append((storage, tensor.device))
        self._written = True

    def _more_host_memory(self, sizes: list[int]) -> list[Tensor]:
        """Byte tensors of these sizes in one piece of memory, pinned where there is CUDA.

        Registered with the driver by hand: torch rounds the pinned memory that it allocates up to a power of two.
        """
        whole = -(-sum(sizes) // PAGE) * PAGE
        memory = torch.empty(whole + PAGE, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % PAGE :][:whole]  # no page is registered twice
        if platform.device_type() == "cuda" and whole:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), whole, 0))
            weakref.finalize(self, _unregister, memory.data_ptr()).atexit = False
        return list(memory[: sum(sizes)].split(sizes))

    def come_back(self) -> None:
        """Enqueues the copies to the device; call wait() before the first use."""
        with _beside_computation(after_it=False):
            for (storage, device), host in zip(self._away, self._host, strict=bool(self._away)):
                storage.resize_(host.nbytes)
                _bytes_of(storage, device).copy_(host, non_blocking=True)
        self._coming = self._coming or bool(self._away)
        self._away = []

    def wait(self) -> None:
        """What is enqueued on the device from now on finds the tensors there."""
        if self._coming and platform.device_type() == "cuda":
            torch.cuda.current_stream().wait_stream(_copy_stream(torch.cuda.current_device()))
        self._coming = False


class Residence:
    """When the parts of one role are on the device. At first all are; leave() sends away what the options say."""

    def __init__(self, chunks: list[torch.nn.Module], optimizer: Any, options: OffloadOptions) -> None:
        self.options, self._chunks = options, chunks
        self._trains = False
        self._weights = Parked(lambda: _weights(chunks), constant=optimizer is None)
        self._state = Parked(lambda: _optimizer_state(chunks, optimizer))

    def leave(self) -> None:
        """What is not used now gives its memory back; gradients are lost."""
        if self.options.gradients:
            for buffer in _gradient_buffers(self._chunks):
                buffer.offload_to_cpu(move_params=False, move_grads=True)
        if self.options.optimizer:
            self._state.leave()
        if self.options.weights:
            self._weights.leave()

    @contextlib.contextmanager
    def for_forward(self) -> Iterator[None]:
        """The weights are on the device inside."""
        self._weights.come_back()
        self._weights.wait()
        yield
        if self.options.weights and not self._trains:
            self._weights.leave()

    @contextlib.contextmanager
    def for_training(self) -> Iterator[None]:
        """Weights and gradients, zero at first, are on the device inside; the optimizer's state in for_update() only,
        so that it is not there together with activations."""
        self._weights.come_back()
        self._weights.wait()
        if self.options.gradients:
            for buffer in _gradient_buffers(self._chunks):
                buffer.reload_from_cpu(move_params=False, move_grads=True)
        self._trains = True
        yield
        self._trains = False
        self.leave()

    @contextlib.contextmanager
    def for_update(self) -> Iterator[None]:
        """The optimizer's state is on the device inside. It comes while the backward pass that is enqueued still runs,
        and leaves beside what follows."""
        self._state.come_back()
        self._state.wait()
        yield
        if self.options.optimizer:
            self._state.leave()

    def check_trains(self) -> None:
        assert self._trains or self.options == ALL_STAY, "what is offloaded trains inside for_training()"


def _weights(chunks: list[torch.nn.Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from (param.data for param in chunk.parameters())


def _optimizer_state(chunks: list[torch.nn.Module], optimizer: Any) -> Iterator[Tensor]:
    """Main parameters, then moments; without float32 parameters that are the model's own, and without step counts."""
    own = {tensor.untyped_storage().data_ptr() for tensor in _weights(chunks)}
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    parts = [part for part in parts if part is not None]  # megatron-core has none where a rank trains nothing
    mains = [p.data for part in parts for group in part.param_groups for p in group["params"]]
    values = [value for part in parts for state in part.state.values() for value in state.values()]
    for tensor in (*mains, *(value for value in values if isinstance(value, Tensor) and value.ndim)):
        if tensor.untyped_storage().data_ptr() not in own:
            yield tensor


def _gradient_buffers(chunks: list[torch.nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),))


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # nothing copies any more
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


@cache
def _copy_stream(device: int) -> torch.cuda.Stream:
    """One a device, so that what leaves makes room for what comes."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _beside_computation(after_it: bool) -> Iterator[None]:
    """What is enqueued inside runs on the copy stream, after all that computes now where that is asked for.

    Memory that is taken there is given back there too, in the order of that stream.
    """
    if platform.device_type() == "cpu":
        yield
        return
    stream = _copy_stream(torch.cuda.current_device())
    if after_it:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
