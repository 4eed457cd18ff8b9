"""A role's files of one rank: megatron-core plans them; they are written by threads that take digests on the way."""

import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron_rl import platform
from megatron_rl.checkpoint.files import Digest

FILES = 2  # of a role and rank, written side by side


def request(state: dict[str, Any], folder: Path) -> Any:
    """megatron-core's plan of this rank's writes into `folder`."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    folder.mkdir(exist_ok=True)
    # its writer hands results over through a queue, by default one of a server process that it starts for that
    filesystem_async._results_queue = queue.Queue()
    strategy = TorchDistSaveShardedStrategy(thread_count=FILES)
    return dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True, async_strategy="mcore")


def snapshot(request: Any, apart: bool) -> Any:
    """The request with its tensors on the host; `apart` from what training goes on to change."""
    if request.async_fn is None:
        return request
    rank, _, results = request.async_fn_args
    buckets = request.preload_fn()
    if apart and platform.device_type() == "cpu":
        buckets = [
            (path, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, key, (objects, tensors) in buckets
        ]
    return request._replace(async_fn_args=(rank, buckets, results), preload_fn=None)


def write(request: Any) -> dict[Path, Digest]:
    """Writes the request's files; their digests. The errors are those of the disk."""
    if request.async_fn is None:
        return {}
    transforms, _ = request.async_fn.args
    _, buckets, results = request.async_fn_args
    with _without_zip_checksums(), ThreadPoolExecutor(len(buckets)) as threads:
        written = list(threads.map(lambda bucket: _write_file(transforms[0], bucket), buckets))
    results.put({i: outcome for i, (outcome, _) in enumerate(written)})
    return {Path(bucket[0]): digest for bucket, (_, digest) in zip(buckets, written, strict=True)}


def _write_file(transforms: Any, bucket: Any) -> tuple[list[Any], Digest]:
    """One file of torch's format for distributed checkpoints, as its own writer writes it."""
    from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

    path, key, (objects, tensors) = bucket
    with open(path, "wb") as raw:
        file = _Digesting(raw)
        try:
            done = [
                _write_item(transforms, file, data, item, key, SerializationFormat.TORCH_SAVE)
                for item, data in (*objects, *tensors)
            ]
        except RuntimeError as failure:  # torch's zip writer says that a write failed, but not why
            if file.refused is None:
                raise
            raise OSError(file.refused.errno, file.refused.strerror, path) from failure
        raw.flush()
        os.fsync(raw.fileno())
    return done, (file.tell(), file.digest())


class _Digesting:
    """A file that is written from its start to its end, and its digest."""

    def __init__(self, raw: Any) -> None:
        self._raw, self._hash, self._size = raw, xxhash.xxh3_128(), 0
        self.refused: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._raw.write(data)
        except OSError as refusal:
            self.refused = refusal
            raise
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._raw.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """torch.save computes a CRC-32 of each tensor, which nothing reads and which takes longer than all the rest."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
