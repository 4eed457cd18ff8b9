"""forward_only() and train_step(): one pass over a batch through megatron-core's pipeline schedules.

The loss of a micro-batch is sum(term_K * weights_K), where the weights already hold the mask, the aggregation and the
division by the count of the whole optimizer batch over all data-parallel ranks. So gradients are plain sums over
micro-batches and ranks, and neither the schedule nor DDP nor finalize_model_grads may divide: every model's config has
calculate_per_token_loss, its loss function returns a third value (a token count of 0 that nobody reads), and
finalize_model_grads is called without a count.

Shape suffixes: B sequences, R longest response, K response tokens of a micro-batch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch import Batch, MicroBatch, pack
from megatron_rl.initialize import Topology
from megatron_rl.models.gpt import forward
from megatron_rl.roles import Role

Plan = list[list[list[int]]]  # of every data-parallel rank: its micro-batches, each a list of sequences
Loss = Callable[
    [Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]
]  # (head output, micro-batch) -> (loss, metrics)
Progress = Callable[[], None]  # called after each micro-batch


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did. Metrics are sums over all micro-batches and ranks, equal on every rank."""

    metrics: dict[str, float]
    grad_norm: float  # before clipping
    updated: bool  # False where the gradient was not finite and the step was skipped
    learning_rate: float


def _share(plan: Plan, topology: Topology) -> list[list[int]]:
    """This data-parallel rank's micro-batches; virtual stages take them in groups of as many as there are stages."""
    mine = plan[topology.at.dp]
    return mine + [[]] * (-len(mine) % topology.pp_size if topology.vpp_size > 1 else 0)


def _micro_batches(batch: Batch, mine: list[list[int]], topology: Topology) -> list[MicroBatch]:
    """Packs this rank's micro-batches; an empty one becomes the shortest sequence with weight 0."""
    multiple = topology.tp_size  # sequence parallelism cuts T over the tensor-parallel ranks
    shortest = min(range(len(batch)), key=lambda i: len(batch.sequences[i]))
    if topology.vpp_size > 1:  # the interleaved schedule exchanges one shape: all are padded to the longest
        longest = max(sum(len(batch.sequences[i]) for i in index or [shortest]) for index in mine)
        multiple *= -(-longest // multiple)
    micros = []
    for index in mine:
        micro = pack(batch, index or [shortest], topology.device, multiple)
        if not index and micro.weights_K is not None:
            micro = replace(micro, weights_K=torch.zeros_like(micro.weights_K))
        micros.append(micro)
    return micros


def _run_schedule(
    chunks: list[torch.nn.Module], micros: list[MicroBatch], topology: Topology, forward_step: Any, forward_only: bool
) -> list[Any]:
    """megatron-core's schedule for this layout; gives what the last stage collected, in micro-batch order."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.utils import get_model_config

    schedule = get_forward_backward_func(
        pp_size=topology.pp_size, vp_size=topology.vpp_size if len(chunks) > 1 else None
    )
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(micros) for _ in chunks],
        model=chunks,
        num_microbatches=len(micros),
        seq_length=max(micro.tokens_1T.shape[1] for micro in micros),  # shapes are exchanged: variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        p2p_communicator=P2PCommunicator(topology.groups.pp, get_model_config(chunks[0])),
        pg_collection=topology.groups,
    )


def forward_only(
    role: Role, batch: Batch, plan: Plan, topology: Topology, progress: Progress = lambda: None
) -> Tensor:
    """[rows, B, R] float32 on the CPU of every rank: what the head gives for each response token, padded with zeros.

    Rows of a language model: log-probabilities and entropies; of a value model: values.
    """
    chunks = role.chunks
    mine = _share(plan, topology)
    micros = _micro_batches(batch, mine, topology)

    def forward_step(micro_iterator: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        micro = next(micro_iterator)
        output = forward(chunk, micro, role.head)
        progress()
        return output, lambda out, non_loss_data: out.detach()

    with role.memory.for_forward(), platform.megatron(), torch.no_grad():
        _set_mode(chunks, training=False)
        outputs = _run_schedule(chunks, micros, topology, forward_step, forward_only=True)
    mask_BR = batch.mask_BR
    rows = torch.zeros(1, dtype=torch.int64)
    if topology.is_last_stage:
        rows[0] = outputs[0].shape[0]
    dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=topology.cpu_group)
    result = torch.zeros(int(rows), *mask_BR.shape, device=topology.device)
    if topology.is_last_stage and topology.at.tp == 0:
        for index, output in zip(mine, outputs, strict=True):
            at = 0
            for i in index:
                length = int(batch.response_lengths_B[i])
                result[:, i, :length] = output[:, at : at + length]
                at += length
    dist.all_reduce(result)  # each sequence was filled by one rank, the others hold zeros: the sum is exact
    return result.cpu()


def train_step(
    role: Role,
    batch: Batch,
    plan: Plan,
    loss: Loss,
    topology: Topology,
    skip_non_finite: bool = False,
    progress: Progress = lambda: None,
) -> StepReport:
    """One optimizer step over `batch`, whose weights_BR hold the loss weights.

    Raises FloatingPointError where the gradient norm is not finite, or skips the update with `skip_non_finite`.
    """
    chunks, optimizer = role.chunks, role.optimizer

    def forward_step(micro_iterator: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        micro = next(micro_iterator)
        output = forward(chunk, micro, role.training_head)
        progress()

        def loss_and_metrics(out: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            value, metrics = loss(out, micro)
            nobody_reads = torch.zeros((), dtype=torch.int, device=out.device)
            return value, nobody_reads, {"loss": value.detach()} | {k: v.detach() for k, v in metrics.items()}

        return output, loss_and_metrics

    role.memory.check_trains()
    with platform.megatron():
        _prepare(chunks)
        optimizer.zero_grad()
        micros = _micro_batches(batch, _share(plan, topology), topology)  # while the device clears the gradients
        collected = _run_schedule(chunks, micros, topology, forward_step, forward_only=False)
        with role.memory.for_update():
            optimizer.prepare_grads()
            # listed before the norm, for which the host waits: after it the device waits for the host
            gradients = [param.grad for param in optimizer.get_parameters() if param.grad is not None]
            grad_norm = float(optimizer.get_grad_norm())
            updated = math.isfinite(grad_norm)
            if not updated and not skip_non_finite:
                raise FloatingPointError(
                    f"the gradient norm is {grad_norm}; nothing was updated. --skip-non-finite-steps skips such steps"
                )
            learning_rate = float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0
            if updated:
                largest = optimizer.config.clip_grad
                if gradients and 0 < largest < grad_norm + 1e-6:  # as megatron-core clips
                    torch._foreach_mul_(gradients, largest / (grad_norm + 1e-6))
                optimizer.step_with_ready_grads()
        role.schedule.step(1)
    return StepReport(_sum_metrics(collected, topology), grad_norm, updated, learning_rate)


def _prepare(chunks: list[torch.nn.Module]) -> None:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    def finalize(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        finalize_model_grads(model, None, **kwargs)

    config = get_model_config(chunks[0])
    assert config.calculate_per_token_loss, "the schedule must not divide the loss"
    config.finalize_model_grads_func = finalize
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    _set_mode(chunks, training=True)
    for chunk in chunks:
        chunk.zero_grad_buffer()


def _set_mode(chunks: list[torch.nn.Module], training: bool) -> None:
    """Through all of its modules only where a chunk has the other one: the device waits meanwhile."""
    for chunk in chunks:
        if chunk.training != training:
            chunk.train(training)


def _sum_metrics(collected: list[dict[str, Tensor]], topology: Topology) -> dict[str, float]:
    """Sums over micro-batches and data-parallel ranks on the last stage, then tells every rank."""
    summed: list[dict[str, float] | None] = [None]
    if topology.is_last_stage:
        names = list(collected[0])
        values = torch.stack([torch.stack([micro[name].double() for name in names]) for micro in collected]).sum(0)
        dist.all_reduce(values, group=topology.groups.dp)
        summed = [dict(zip(names, values.tolist(), strict=True))]
    last = topology.world_size - 1  # the last stage is the last block of ranks
    dist.broadcast_object_list(summed, src=last, group=topology.cpu_group)
    assert summed[0] is not None
    return summed[0]
