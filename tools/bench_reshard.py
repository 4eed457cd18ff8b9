r"""One weight sync done in three ways in one run: ours, gathering whole HF tensors on every rank, and from a folder.

    torchrun --nproc_per_node 4 tools/bench_reshard.py --hf-model DIR --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 --rollout-tensor-parallel-size 2

A single process needs no torchrun. The flags are train_ppo.py's. The ways beside ours load into memory of their own;
after each of them, digests of what arrived are compared with the trainer's weights. Then optimizer steps (or, with
--no-optimizer, weights scaled in place) and log-probabilities of trainer and engine, before and after.
"""

import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clock import copy_seconds, exchange_seconds, timed, worst  # noqa: E402  (beside this file)

from megatron_rl import platform  # noqa: E402
from megatron_rl.arguments import layout_sizes, parse  # noqa: E402
from megatron_rl.batch import Batch, MicroBatch, Prompt, batch_of  # noqa: E402
from megatron_rl.builders import build_engine, packing_options  # noqa: E402
from megatron_rl.data.packing import plan_micro_batches  # noqa: E402
from megatron_rl.failure import ending_together  # noqa: E402
from megatron_rl.flags import PPO, count, count0  # noqa: E402
from megatron_rl.initialize import Topology, initialize  # noqa: E402
from megatron_rl.logprobs import LogprobOptions  # noqa: E402
from megatron_rl.roles import Role, build_role, export_role, optimizer_options  # noqa: E402
from megatron_rl.rollout.collect import collect  # noqa: E402
from megatron_rl.rollout.engine import Engine, SamplingOptions  # noqa: E402
from megatron_rl.rollout.verify import differing_slices  # noqa: E402
from megatron_rl.step import forward_only, train_step  # noqa: E402
from megatron_rl.weights.hf_io import HFFolder  # noqa: E402
from megatron_rl.weights.layouts import Block, Param  # noqa: E402
from megatron_rl.weights.plan import hybridflow_bound  # noqa: E402

SCALE = 1 + 2**-5  # of one step without an optimizer: every bfloat16 but 0 becomes another
Tensors = Iterator[tuple[str, Tensor]]


def flags(group: Any) -> None:
    add = group.add_argument
    add("--max-prompt-length", type=count, default=64, metavar="N", help="tokens of a prompt")
    add("--repeats", type=count, default=5, metavar="N", help="runs of each way; ours runs four times as often")
    add("--steps", type=count0, default=3, metavar="N", help="optimizer steps before log-probabilities are compared")
    add("--no-optimizer", action="store_true", help="no gradients and moments: a step scales the weights in place")
    add("--no-disk", action="store_true", help="leave reading a folder out")
    add("--write-to", default=None, metavar="DIR", help="write the folder that is read here first, and time that too")


def parse_flags(argv: Sequence[str]) -> Any:
    groups = {name: PPO[name] for name in ("model", "layout", "optimizer", "batches", "rollout")}
    cuda = platform.device_type() == "cuda"
    defaults = ["--lr", "1e-4", "--kv-cache-gb", "2" if cuda else "0.1"]
    defaults += ["--max-response-length", "32", "--rollout-batch-size", "8"]
    return parse("bench_reshard.py", groups | {"benchmark": flags}, [*defaults, *argv])


@dataclass(frozen=True)
class Setup:
    args: Any
    topology: Topology
    role: Role
    engine: Engine


@dataclass(frozen=True)
class Measured:
    """One way to sync, on the worst rank; bytes."""

    way: str
    seconds: list[float]
    received: int
    permuted: int
    aliased: int
    twice: int  # of the weights, in memory a second time
    extra: int  # buffers and temporaries beside

    def row(self) -> str:
        megabytes = (self.received, self.permuted, self.aliased, self.twice, self.extra)
        times = f"{statistics.median(self.seconds) * 1e3:>11.3f}{min(self.seconds) * 1e3:>11.3f}"
        return f"{self.way:<34}{times}" + "".join(f"{n / 1e6:>11.3f}" for n in megabytes)


HEADER = f"{'':<34}" + "".join(f"{h:>11}" for h in ("median ms", "least ms", "received", "permuted", "aliased"))
HEADER += f"{'twice':>11}{'extra MB':>11}"


# ---- the three ways -----------------------------------------------------------------------------------------------


def by_plan(setup: Setup) -> Measured:
    """Ours, as training does it."""
    engine, topology, reports = setup.engine, setup.topology, []
    engine.sync()  # kernels are compiled and connections made
    before = platform.memory_allocated()
    platform.reset_peak_memory()
    for _ in range(4 * setup.args.repeats):
        reports.append(engine.sync())
    extra = max(0, platform.max_memory_allocated() - before) + engine.transport.bytes_buffered
    engine.verify()
    last = reports[-1]
    numbers = (last.bytes_received, last.bytes_permuted, last.bytes_aliased)
    own = sum(t.nbytes for name, t in engine.live.memory.items() if name not in engine.plan.aliases)
    return Measured(
        "ours (plan, alias, permute, send)",
        [worst(r.seconds, topology) for r in reports],
        *(int(worst(n, topology)) for n in (*numbers, own, extra)),
    )


class Gather:
    """Every rank rebuilds every HF tensor: a stage's parameters go to all stages, then each is gathered over TP."""

    def __init__(self, setup: Setup) -> None:
        self.topology, self.weights = setup.topology, setup.engine.weights
        if self.topology.ep_size > 1:
            raise ValueError(f"--expert-model-parallel-size {self.topology.ep_size}: whole tensors are gathered at 1")
        self.received = 0

    def _shard(self, pp: int, tp: int) -> Sequence[Param]:
        rank = next(r for r, at in enumerate(self.topology.everyone) if (at.pp, at.tp) == (pp, tp))
        return self.weights.shards[self.weights.shard_of_rank[rank]]

    def __iter__(self) -> Tensors:
        self.received = 0
        at, tp_size, done = self.topology.at, self.topology.tp_size, set()
        for pp in range(self.topology.pp_size):
            stage = [self._shard(pp, tp) for tp in range(tp_size)]
            for params in zip(*stage, strict=True):
                names = {b.hf for param in params for b in param.blocks} - done
                if names:  # a tied embedding comes once
                    done |= names
                    yield from self._whole(params, self._gathered(params[at.tp], pp), names)

    def _gathered(self, param: Param, pp: int) -> list[Tensor]:
        """The parameter of every TP rank of stage `pp`."""
        groups, mine = self.topology.groups, self.topology.at.pp == pp
        like = next(iter(self.weights.tensors.values()))
        part = self.weights.tensors[param.key].detach() if mine else like.new_empty(param.shape)
        if self.topology.pp_size > 1:
            dist.broadcast(part, dist.get_global_rank(groups.pp, pp), group=groups.pp)
            self.received += 0 if mine else part.nbytes
        if self.topology.tp_size == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.topology.tp_size)]
        dist.all_gather(parts, part, group=groups.tp)
        self.received += part.nbytes * (len(parts) - 1)
        return parts

    def _whole(self, params: Sequence[Param], parts: Sequence[Tensor], names: set[str]) -> Tensors:
        for name in sorted(names):
            shape = self.weights.hf_shapes[name]
            pieces = [
                (b, part.as_strided((b.rows, b.cols), (b.stride, 1), part.storage_offset() + b.offset))
                for param, part in zip(params, parts, strict=True)
                for b in param.blocks
                if b.hf == name
            ]
            if pieces[0][1].numel() == torch.Size(shape).numel():  # nothing to put together
                yield name, pieces[0][1].reshape(shape)
                continue
            whole = parts[0].new_empty(shape)
            matrix = whole.view(-1, shape[-1])
            for b, piece in pieces:
                matrix[b.row : b.row + b.rows, b.col : b.col + b.cols].copy_(piece)
            yield name, whole


class Disk:
    """The tensors of an HF folder with the trainer's weights; they lie in the page cache after the first run."""

    def __init__(self, setup: Setup) -> None:
        self.folder, self.shapes = setup.args.write_to or setup.args.hf_model, setup.engine.weights.hf_shapes
        self.received = 0

    def __iter__(self) -> Tensors:
        self.received, source = 0, HFFolder(self.folder)
        for name, shape in self.shapes.items():
            rows, cols = (1, *shape) if len(shape) == 1 else shape
            tensor = source.read(Block(name, 0, 0, rows, cols, "", 0, cols)).view(shape)
            self.received += tensor.nbytes
            yield name, tensor


def by_load_weights(setup: Setup, way: str, tensors: Gather | Disk) -> Measured:
    """vLLM's own loader, fed with whole tensors, into a copy of the weights; what arrived is verified."""
    engine, topology = setup.engine, setup.topology
    copy = {name: torch.full_like(tensor, float("nan")) for name, tensor in engine.live.memory.items()}
    platform.synchronize()
    before = platform.memory_allocated()
    platform.reset_peak_memory()
    with torch.no_grad(), engine.live.on(copy) as model:
        seconds = [timed(lambda: model.load_weights(iter(tensors)), topology) for _ in range(setup.args.repeats)]
    extra = max(0, platform.max_memory_allocated() - before)
    wrong = differing_slices(engine.weights, engine.targets[engine.tp_rank], engine.targets, copy, topology)
    if wrong:
        raise RuntimeError(f"{way}: {len(wrong)} slices differ from the trainer's weights: {wrong[:3]}")
    twice = sum(tensor.nbytes for tensor in copy.values())
    return Measured(way, seconds, *(int(worst(n, topology)) for n in (tensors.received, 0, 0, twice, extra)))


# ---- log-probabilities of both sides --------------------------------------------------------------------------------


def rollout(setup: Setup, step: int) -> Batch:
    """Responses to random prompts."""
    args, generator = setup.args, torch.Generator().manual_seed(step)
    shape = (args.rollout_batch_size, args.max_prompt_length)
    rows = torch.randint(3, setup.role.hf.vocab, shape, generator=generator).tolist()
    prompts = [Prompt(i, tuple(ids), "", {}) for i, ids in enumerate(rows)]
    sampling = SamplingOptions(args.max_response_length, temperature=args.temperature, ignore_eos=True)
    return batch_of(collect(setup.engine, prompts, 1, sampling, args.seed, step, setup.topology))


def micro_batches(setup: Setup, batch: Batch) -> list[list[list[int]]]:
    lengths = [len(sequence) for sequence in batch.sequences]
    return plan_micro_batches(lengths, setup.topology.dp_size, packing_options(setup.args))


def compare(setup: Setup, step: int, batch: Batch) -> str:
    """How far the trainer's log-probabilities of the engine's tokens are from the engine's own."""
    theirs, mask = batch.rollout_logprobs_BR, batch.mask_BR
    assert theirs is not None, "the engine gives log-probabilities"
    ours = forward_only(setup.role, batch, micro_batches(setup, batch), setup.topology)[0]
    off = (ours - theirs)[mask].abs()
    mean = ours[mask].mean()
    return f"  after {step} steps: mean {off.mean():.5f}, largest {off.max():.5f}; mean log-probability {mean:.4f}"


def likelihood(output: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -(output[0] * micro.weights_K).sum(), {}


def change(setup: Setup, batch: Batch) -> None:
    """One optimizer step on the batch, or every weight scaled."""
    if setup.role.optimizer is None:
        with torch.no_grad():
            for tensor in setup.engine.weights.tensors.values():
                tensor.mul_(SCALE)
        return
    weighted = replace(batch, weights_BR=batch.mask_BR / batch.mask_BR.sum())
    train_step(setup.role, weighted, micro_batches(setup, batch), likelihood, setup.topology)


def follow(setup: Setup) -> Iterator[str]:
    """Lines: log-probabilities of both sides before the first and after each step."""
    for step in range(setup.args.steps + 1):
        batch = rollout(setup, step)
        yield compare(setup, step, batch)
        if step < setup.args.steps:
            setup.engine.sleep()
            change(setup, batch)
            setup.engine.sync()
            setup.engine.wake()
            setup.engine.verify()


def lacked(setup: Setup) -> int:
    """Bytes that this rank's engine needs and this rank's trainer does not hold, counted from the blocks alone."""
    engine, held = setup.engine, defaultdict(set)
    for param in engine.weights.shards[engine.weights.shard_of_rank[setup.topology.rank]]:
        for b in param.blocks:
            held[b.hf].add((b.row, b.col, b.rows, b.cols))
    total = 0
    for b in (b for param in engine.targets[engine.tp_rank] for b in param.blocks):
        total += b.rows * b.cols
        for row, col, rows, cols in held[b.hf]:
            down = min(b.row + b.rows, row + rows) - max(b.row, row)
            across = min(b.col + b.cols, col + cols) - max(b.col, col)
            total -= max(0, down) * max(0, across)
    return total * engine.options.dtype.itemsize


def bound(setup: Setup) -> str:
    """A line: bytes received on each rank beside the least possible."""
    engine, topology = setup.engine, setup.topology
    least, received = lacked(setup), engine.transport.bytes_received
    off = int(worst(abs(received - least), topology))
    numel = sum(torch.Size(shape).numel() for shape in engine.weights.hf_shapes.values())
    cut = topology.tp_size * topology.pp_size
    model = hybridflow_bound(numel, cut, engine.options.tensor_parallel_size) * engine.options.dtype.itemsize
    worst_least = worst(least, topology) / 1e6
    same = "every rank receives just that" if off == 0 else f"a rank receives {off:,} bytes more or less"
    return (
        f"Needed and not held: {worst_least:.3f} MB on the worst rank, {same}; HybridFlow's bound {model / 1e6:.3f} MB"
    )


# ---- the run --------------------------------------------------------------------------------------------------------


def build(args: Any) -> tuple[Setup, str]:
    """The policy, its engine, and a line on the memory that the engine took."""
    sizes = layout_sizes(args)
    topology = initialize(sizes.tp, sizes.pp, sizes.vpp, sizes.ep, args.seed, args.distributed_timeout_minutes)
    training = None if args.no_optimizer else optimizer_options(args, args.lr, max(args.steps, 1))
    logprobs = LogprobOptions(args.temperature, args.logprob_chunk_tokens, entropy=False)
    role = build_role("policy", args.hf_model, args, topology, training=training, logprobs=logprobs)
    platform.empty_cache()
    free = platform.device_memory()[0]
    engine = build_engine(args, [role], topology)
    platform.empty_cache()
    taken, cache = free - platform.device_memory()[0], int(args.kv_cache_gb * 1e9)
    needed = sum(t.nbytes for t in engine.live.memory.values())
    own = sum(t.nbytes for name, t in engine.live.memory.items() if name not in engine.plan.aliases)
    own += engine.transport.bytes_buffered
    text = f"Memory of the engine: {own / 1e9:.3f} GB beside {needed / 1e9:.3f} GB of weights ({own / needed:.2%})"
    if platform.device_type() == "cuda":
        rest = taken - cache - own
        text += f", KV cache {cache / 1e9:.3f} GB, CUDA graphs and workspaces {rest / 1e9:.3f} GB"
    return Setup(args, topology, role, engine), text


def summary(ours: Measured, others: list[Measured], setup: Setup) -> list[str]:
    """The times of the ways as multiples."""
    lines, median = [], statistics.median(ours.seconds)
    if ours.permuted:
        copy = copy_seconds(ours.permuted, setup.topology)
        permuted = f"A copy of {ours.permuted / 1e6:.1f} MB, the permuted, takes {copy * 1e3:.3f} ms"
        lines.append(f"{permuted}: ours is {median / copy:.2f} x that")
    transport = setup.engine.transport
    if busiest := int(worst(max(transport.bytes_sent, transport.bytes_received), setup.topology)):
        exchange = exchange_seconds(busiest, setup.topology)
        text = f"Sending {busiest / 1e6:.1f} MB, the busiest rank's, to the next rank takes {exchange * 1e3:.3f} ms"
        lines.append(f"{text} ({busiest / exchange / 1e9:.1f} GB/s): ours is {median / exchange:.2f} x that")
    for other in others:
        lines.append(f"{other.way}: {statistics.median(other.seconds) / median:.1f} x the time of ours")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_flags(sys.argv[1:] if argv is None else argv)
    platform.quiet()
    setup, memory = build(args)
    ours, others = by_plan(setup), [by_load_weights(setup, "whole HF tensors gathered", Gather(setup))]
    written = []
    if args.write_to:
        seconds = timed(lambda: export_role(setup.role, args.write_to, setup.topology), setup.topology)
        written.append(f"Writing the folder that is read takes {seconds * 1e3:.1f} ms, which its row leaves out")
    if not args.no_disk:
        others.append(by_load_weights(setup, "HF folder read", Disk(setup)))
    engine, topology = setup.engine, setup.topology
    table = [
        f"{Path(args.hf_model).name}, {topology.world_size} ranks: TP {topology.tp_size} PP {topology.pp_size} "
        f"DP {topology.dp_size} -> {engine.num_replicas} replicas of TP {engine.options.tensor_parallel_size}, the "
        f"first of ranks {engine.replicas[0]}; worst rank, MB",
        HEADER,
        *(way.row() for way in (ours, *others)),
        bound(setup),
        *summary(ours, others, setup),
        *written,
        memory,
        "Digests of all slices agree after each way. Log-probabilities of trainer and engine, differences:",
    ]
    for line in chain(table, follow(setup)):
        if topology.is_main:
            print(line, flush=True)
    dist.barrier(group=topology.cpu_group)
    sys.stdout.flush()
    os._exit(0)  # vLLM's shutdown waits for nothing that matters here


if __name__ == "__main__":
    with ending_together():
        main()
