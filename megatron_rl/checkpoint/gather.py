"""The distributed optimizer's state brought to its data-parallel rank 0 for a checkpoint, touched once.

megatron-core's own way makes seven copies on the host, also where one rank holds it all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

State = dict[int, dict[Any, dict[str, Any]]]  # [gradient buffer][its dtypes]["param", "exp_avg", ...]


@contextmanager
def gathering_once(optimizer: Any) -> Iterator[None]:
    """Inside, sharded_state_dict() of a distributed optimizer takes its state from gathered_state()."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    parts = [part for part in parts if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part.get_parameter_state_dp_zero = partial(gathered_state, part)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


class _Slices:
    """The parameters' own tensors in place of a flat buffer that they would be sliced from."""

    def __init__(self, by_start: dict[int, Tensor]) -> None:
        self._by_start = by_start

    def __getitem__(self, span: slice) -> Tensor:
        tensor = self._by_start[span.start]
        assert tensor.numel() == span.stop - span.start, "a slice is a whole parameter"
        return tensor


def gathered_state(part: Any, *_: Any, **__: Any) -> State | None:
    """What get_parameter_state_dp_zero gives: of every buffer the whole main parameters and moments, on data-parallel
    rank 0. Where that rank is alone they are its own tensors, on their device.
    """
    whole: State = {}
    alone = part.data_parallel_group_gloo.size() == 1
    for index, of_dtypes in enumerate(part.gbuf_ranges):
        ((dtype, buckets),) = of_dtypes.items()
        buffer = part.buffers[index]
        keys = ("param", *part.optimizer_state_keys)
        if alone:
            own = {param: part._get_main_param_and_optimizer_states(param) for param in buffer.param_index_map}
            starts = {start: own[param] for param, (start, _, _) in buffer.param_index_map.items()}
            whole[index] = {dtype: {key: _Slices({at: t[key].detach() for at, t in starts.items()}) for key in keys}}
        else:
            whole[index] = {dtype: {key: _gather(part, buffer, buckets, key) for key in keys}}
    return whole if part.data_parallel_group_gloo.rank() == 0 else None


def _gather(part: Any, buffer: Any, buckets: list[dict[str, Any]], key: str) -> Tensor | None:
    """One kind of tensor of a buffer, flat as the buffer is, padding included, on data-parallel rank 0."""
    group = part.data_parallel_group_gloo
    rank, size = group.rank(), group.size()
    whole = torch.empty(buffer.numel, dtype=torch.float32) if rank == 0 else None
    for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
        share = bucket.grad_data.numel() // size
        mine = (
            torch.empty(share, dtype=torch.float32) if whole is None else whole[bucket.offset : bucket.offset + share]
        )
        for param, span in ranges["param_map"].items():
            local = span["gbuf_local"]
            mine[local.start : local.end].copy_(part._get_main_param_and_optimizer_states(param)[key].detach())
        if whole is None:
            dist.send(mine, group=group, group_dst=0)
            continue
        for other in range(1, size):
            start = bucket.offset + other * share
            dist.recv(whole[start : start + share], group=group, group_src=other)
    return whole
