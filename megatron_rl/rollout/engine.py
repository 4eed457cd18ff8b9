"""The vLLM engine inside the training processes: built on live Megatron weights, synced in place, fail-closed."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch import Response
from megatron_rl.initialize import Topology
from megatron_rl.rollout import startup
from megatron_rl.rollout.capture import capture_of
from megatron_rl.rollout.generate import (
    GenerateRequest,
    SamplingOptions,
    check_requests,
    generate,
    requests_hash,
)
from megatron_rl.rollout.scheduling import shorten_walk
from megatron_rl.rollout.verify import differing_slices
from megatron_rl.weights.layouts import Param
from megatron_rl.weights.overlap import Overlap
from megatron_rl.weights.plan import Placement, Plan, Reshard, default_placement, replicas_of
from megatron_rl.weights.transport import Transport

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Engine", "EngineOptions", "GenerateRequest", "SamplingOptions", "SyncReport", "TrainedWeights"]


@dataclass(frozen=True)
class EngineOptions:
    """What the engine is built with; every rank has the same."""

    max_model_len: int  # tokens of a prompt and its response together
    dtype: torch.dtype  # the trainer's; another one where no weights are shared
    tensor_parallel_size: int = 1
    kv_cache_bytes: int | None = None  # of this rank; None: 512 MB on the CPU, else gpu_memory_utilization decides
    gpu_memory_utilization: float = 0.6  # of the GPU's memory, used where kv_cache_bytes is None
    share_weights: bool = True  # parameters with the same bytes on both sides are the trainer's memory
    placement: Placement | None = None  # (replica, rollout TP rank) of every rank; None: consecutive ranks
    bucket_bytes: int = 256 << 20  # of packed weights that travel at a time, in each direction
    fp32_residual: bool = False  # the trainer's residual stream is float32: so is the engine's, on the CPU
    sleeps: bool = True  # the KV cache can be freed around training (CUDA)
    with_tokenizer: bool = False  # needed for stop strings
    seed: int = 1234
    vllm_args: Mapping[str, Any] = field(default_factory=dict)  # passed through


@dataclass(frozen=True)
class TrainedWeights:
    """The policy as training holds it: this rank's tensors, and what every rank's tensors are made of."""

    tensors: Mapping[str, Tensor]  # by Param.key
    shards: Sequence[Sequence[Param]]  # the parameters of each kind of rank
    shard_of_rank: Sequence[int]  # by global rank
    hf_shapes: Mapping[str, tuple[int, ...]]  # of every tensor of the HF folder

    @property
    def dtype(self) -> torch.dtype:
        """Of (nearly) all of them."""
        return Counter(tensor.dtype for tensor in self.tensors.values()).most_common(1)[0][0]


@dataclass(frozen=True)
class SyncReport:
    """One weight sync on this rank."""

    bytes_received: int  # from other ranks
    bytes_permuted: int  # copied within this rank, because the order differs
    bytes_aliased: int  # the engine reads the trainer's memory: nothing to do
    bytes_stored_twice: int  # held by the trainer on this rank and again by the engine
    seconds: float
    version: int  # of the weights, counted from 1


class Engine:
    """One rank's part of a rollout replica. Methods are collective over the replica, sync and verify over all ranks.

    Order around training: sleep(), train, sync(), wake(), generate(). generate() refuses in any other.
    """

    def __init__(
        self, hf_folder: str | Path, options: EngineOptions, topology: Topology, weights: TrainedWeights
    ) -> None:
        """Starts vLLM from config.json and the live weights. Raises ValueError for arguments that cannot work.

        Call it after the trainer's tensors have their final memory; nothing may move them later.
        """
        if topology.world_size % options.tensor_parallel_size:
            raise ValueError(
                f"--rollout-tensor-parallel-size {options.tensor_parallel_size} does not divide the "
                f"{topology.world_size} ranks"
            )
        if options.share_weights and options.dtype != weights.dtype:
            raise ValueError(
                f"an engine of {options.dtype} cannot share the memory of training's {weights.dtype}: "
                "--rollout-weights alias must be copy"
            )
        self.options, self.topology, self.weights = options, topology, weights
        self.version = 0
        self.targets: Sequence[Sequence[Param]] = ()  # the vLLM parameters of each rollout TP rank
        self.plan: Plan | None = None
        self._not_ready: str | None = "it has no weights yet: call sync() first"
        self._awake = True
        self.sleeps = options.sleeps and platform.device_type() == "cuda"
        startup.prepare_environment(topology, self.sleeps)
        from megatron_rl.rollout.vllm_weights import register_live_loader

        startup.check_vllm_args(options.vllm_args)
        self._place(options.placement or default_placement(topology.world_size, options.tensor_parallel_size))
        self.eos_token_ids = startup.eos_token_ids(hf_folder)
        self.live = register_live_loader(self._bind)
        self.llm = self._start(hf_folder)
        self.vocab_size = self.llm.model_config.get_vocab_size()
        self.capture = capture_of(self.llm)
        shorten_walk(self.llm)
        self._connect()

    def _place(self, placement: Placement) -> None:
        self.placement = placement
        self.replica, self.tp_rank = placement[self.topology.rank]
        self.num_replicas = self.topology.world_size // self.options.tensor_parallel_size
        self.replicas = replicas_of(placement)
        if not startup.can_place(self.replicas):
            raise ValueError(
                f"this torch cannot make replicas of ranks in the order {self.replicas}: use consecutive ones"
            )
        self.replica_group = None
        for ranks in self.replicas:
            group = dist.new_group(ranks, backend="gloo")
            if self.topology.rank in ranks:
                self.replica_group = group

    def _start(self, hf_folder: str | Path) -> Any:
        from vllm import LLM

        from megatron_rl.rollout.vllm_weights import LOAD_FORMAT

        options, on_cpu, cpus_own = self.options, platform.device_type() == "cpu", {}
        if on_cpu:
            from megatron_rl.rollout import vllm_ops  # registers the trainer's arithmetic

            cpus_own = {
                "additional_config": {vllm_ops.FP32_RESIDUAL: options.fp32_residual},
                "enable_chunked_prefill": False,  # its sampler cannot take back what a part of a prompt drew by seed
                "max_num_batched_tokens": max(4096, options.max_model_len),
            }
        arguments = dict(
            model=str(startup.config_folder(hf_folder)),
            load_format=LOAD_FORMAT,
            skip_tokenizer_init=not options.with_tokenizer,
            tokenizer=str(hf_folder) if options.with_tokenizer else None,
            generation_config="vllm",
            dtype=options.dtype,
            tensor_parallel_size=options.tensor_parallel_size,
            distributed_executor_backend="external_launcher",
            max_model_len=options.max_model_len,
            kv_cache_memory_bytes=options.kv_cache_bytes or (512 << 20 if on_cpu else None),
            gpu_memory_utilization=self._memory_utilization(),
            enable_sleep_mode=self.sleeps,
            logprobs_mode="processed_logprobs",
            disable_custom_all_reduce=True,
            hf_overrides={"head_dtype": "float32"},  # logits unrounded, as the trainer's are
            seed=options.seed,
            **cpus_own,
        )
        with (
            startup.hushed(),
            platform.same_stream(),
            startup.own_rng(options.seed),
            startup.unique_shared_memory(),
            startup.groups_of(self.replicas),
        ):
            try:
                return LLM(**(arguments | dict(options.vllm_args)))
            except (TypeError, ValueError) as error:
                if not options.vllm_args:
                    raise
                given, why = ", ".join(f"{k}={v}" for k, v in options.vllm_args.items()), " ".join(str(error).split())
                raise ValueError(f"vLLM does not start with --vllm-args {given}: {why}") from error

    def _memory_utilization(self) -> float:
        """vLLM refuses to start where less than this share of the device is free, also when it is told its cache."""
        if self.options.kv_cache_bytes is None:
            return self.options.gpu_memory_utilization
        free, total = platform.device_memory()
        return 0.9 * free / total

    def _bind(self, model: "nn.Module") -> dict[str, Tensor]:
        """Called by vLLM's loader: learns the layout, plans, and gives each vLLM parameter its memory."""
        from megatron_rl.rollout.recorder import record

        mine = record(model, self.weights.hf_shapes, self.options.dtype)
        gathered: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(gathered, mine if self.replica == 0 else None, group=self.topology.cpu_group)
        self.targets = [gathered[rank] for rank in self.replicas[0]]
        names = [param.key for param in self.targets[0]]
        overlap = Overlap(self.weights.shards, self.targets, () if self.options.share_weights else names)
        shard_of_rank, node = self.weights.shard_of_rank, self.topology.gpus_per_node
        self.plan = Reshard(overlap, shard_of_rank, self.placement, node).plan(self.topology.rank)
        memory = {}
        for name, param in model.named_parameters():
            alias = self.plan.aliases.get(name)
            if alias is None:
                memory[name] = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
            else:
                whole = self.weights.tensors[alias.param].detach().view(-1)
                memory[name] = whole[alias.offset : alias.offset + param.numel()].view(param.shape)
        return memory

    def _connect(self) -> None:
        self._pointers = {key: tensor.data_ptr() for key, tensor in self.weights.tensors.items()}
        converts = (self.weights.dtype, self.options.dtype)
        self.transport = Transport(
            self.plan,
            self.weights.tensors,
            self.live.memory,
            self.options.bucket_bytes,
            converts if converts[0] != converts[1] else None,
        )

    def _follow_moved_tensors(self) -> None:
        """The trainer may have offloaded and reloaded tensors: those that are read are found again."""
        moved = {key for key, tensor in self.weights.tensors.items() if tensor.data_ptr() != self._pointers[key]}
        for name, alias in self.plan.aliases.items():
            if alias.param in moved:
                raise RuntimeError(f"{alias.param} moved to other memory, but the engine's {name} is where it was")
        if moved:
            self._connect()

    def sync(self) -> SyncReport:
        """Brings the engine's weights up to date with the trainer's, on all ranks together, and empties its cache.

        Wakes the weights (not the KV cache) of a sleeping engine. After an exception generate() refuses.
        """
        self._not_ready = f"weight sync {self.version + 1} failed or is not finished"
        if not self._awake and self.sleeps:
            platform.empty_cache()  # what training has freed and torch still caches is what vLLM is about to map
            self.llm.wake_up(tags=["weights"])
        platform.synchronize()
        dist.barrier(group=self.topology.cpu_group)  # so that the time is the sync's, not what a rank waits for others
        started = time.perf_counter()
        self._follow_moved_tensors()
        with torch.no_grad():
            moved = self.transport.run()
            self.live.repack()
        platform.synchronize()
        seconds = time.perf_counter() - started
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self.version += 1
        self._not_ready = None
        own = sum(t.nbytes for name, t in self.live.memory.items() if name not in self.plan.aliases)
        return SyncReport(
            bytes_received=moved.bytes_received,
            bytes_permuted=moved.bytes_permuted,
            bytes_aliased=sum(t.nbytes for t in self.live.memory.values()) - own,
            bytes_stored_twice=moved.bytes_permuted,
            seconds=seconds,
            version=self.version,
        )

    def sleep(self) -> None:
        """Frees the KV cache (on CUDA) for training; what the engine owns of the weights goes to the host."""
        if not self._awake:
            return
        self._awake = False
        self._not_ready = "its weights may be older than the trainer's: call sync() after training"
        if self.sleeps:
            self.llm.sleep(level=1)

    def wake(self) -> None:
        """Gives the KV cache its memory back. The weights come first: call sync() before."""
        if self._awake:
            return
        if self._not_ready is not None:
            raise RuntimeError(f"the engine cannot wake up: {self._not_ready}")
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self._awake = True

    def generate(
        self, requests: Sequence[GenerateRequest], options: SamplingOptions, progress: Any = False
    ) -> list[Response]:
        """This replica's responses, in order. All ranks of a replica ask for the same; a replica may ask for nothing.

        Raises ValueError for requests that the model cannot take, RuntimeError where the weights are not what the
        trainer last synced.
        """
        if self._not_ready is not None or not self._awake:
            raise RuntimeError(f"the engine cannot generate: {self._not_ready or 'it is asleep, call wake()'}")
        if options.stop and not self.options.with_tokenizer:
            raise ValueError("--stop texts need an engine with a tokenizer: build it with with_tokenizer=True")
        check_requests(requests, options, self.options.max_model_len, self.vocab_size)
        self._assert_same_requests(requests, options)
        with startup.own_rng(self.options.seed + self.version):
            return generate(self.llm, requests, options, self.eos_token_ids, self.version, self.capture, progress)

    def _assert_same_requests(self, requests: Sequence[GenerateRequest], options: SamplingOptions) -> None:
        number = requests_hash(requests, options)
        extremes = torch.tensor([number, -number])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.replica_group)
        assert extremes.tolist() == [number, -number], "all ranks of a replica generate the same requests in one order"

    def verify(self) -> None:
        """Compares what the trainer's owners hold with what the engine holds, for every slice of every HF tensor.

        Collective over all ranks. Raises RuntimeError on every rank, naming the first slices that differ.
        """
        wrong = differing_slices(
            self.weights, self.targets[self.tp_rank], self.targets, self.live.memory, self.topology
        )
        if wrong:
            self._not_ready = "its weights differ from the trainer's"
            raise RuntimeError(f"{len(wrong)} slices differ from the trainer's weights: {'; '.join(wrong[:5])}")
