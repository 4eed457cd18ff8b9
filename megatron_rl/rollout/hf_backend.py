"""Rollout by transformers' generate in place of vLLM, for comparison: the same interface, a whole model on every rank.

The model has memory of its own, which a sync fills from the live Megatron weights by the plan that vLLM's engine has
too, with HF's tensors as the targets. Sampling is ours, inside generate's loop, so that every sample has its own seed.

Shape suffixes: N requests of a batch, P longest prompt, S prompt and response so far, V vocabulary.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from megatron_rl import platform
from megatron_rl.batch import Response
from megatron_rl.initialize import Topology
from megatron_rl.rollout import startup
from megatron_rl.rollout.engine import Engine, EngineOptions, SyncReport, TrainedWeights
from megatron_rl.rollout.generate import GenerateRequest, SamplingOptions, check_requests
from megatron_rl.rollout.verify import differing_slices
from megatron_rl.weights.layouts import Block, Param
from megatron_rl.weights.overlap import Overlap
from megatron_rl.weights.plan import Reshard, default_placement
from megatron_rl.weights.transport import Transport

BATCH = 64  # requests generated at a time; padding and keys and values of that many are in memory


class HFEngine:
    """Engine's interface (engine.py, where the order of calls stands); each rank is a replica of its own."""

    def __init__(
        self, hf_folder: str | Path, options: EngineOptions, topology: Topology, weights: TrainedWeights
    ) -> None:
        """Raises ValueError for a model that transformers holds in other tensors than its folder has (experts)."""
        from transformers import AutoTokenizer

        assert options.tensor_parallel_size == 1, "validate_ppo refuses other sizes"
        self.options, self.topology, self.weights = options, topology, weights
        self.replica, self.tp_rank, self.num_replicas = topology.rank, 0, topology.world_size
        self.version = 0
        self.eos_token_ids = startup.eos_token_ids(hf_folder)
        self.tokenizer = AutoTokenizer.from_pretrained(hf_folder) if options.with_tokenizer else None
        device = next(iter(weights.tensors.values())).device
        with startup.own_rng(options.seed):
            self.model = _build(hf_folder, options.dtype, device)
        self.memory = {name: param.data for name, param in self.model.named_parameters()}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.memory.items()}
        if shapes != dict(weights.hf_shapes):
            differ = sorted({name for name, _ in shapes.items() ^ dict(weights.hf_shapes).items()})
            raise ValueError(
                f"--rollout-backend hf: transformers does not hold {hf_folder} as its folder does ({differ[0]} and "
                f"{len(differ) - 1} more tensors are others): take vllm"
            )
        self.params = [_whole(name, shape) for name, shape in shapes.items()]
        overlap = Overlap(weights.shards, [self.params], shapes)  # every tensor is copied, none is shared
        placement = default_placement(topology.world_size, 1)
        reshard = Reshard(overlap, weights.shard_of_rank, placement, topology.gpus_per_node)
        self.plan = reshard.plan(topology.rank)
        self._awake = True
        self._not_ready: str | None = "it has no weights yet: call sync() first"

    def sync(self) -> SyncReport:
        """Copies the trainer's weights, on all ranks together. After an exception generate() refuses."""
        self._not_ready = f"weight sync {self.version + 1} failed or is not finished"
        platform.synchronize()
        dist.barrier(group=self.topology.cpu_group)
        started = time.perf_counter()
        with torch.no_grad():  # the trainer's tensors may have moved: they are found anew each time
            moved = Transport(self.plan, self.weights.tensors, self.memory, self.options.bucket_bytes).run()
        platform.synchronize()
        self.version += 1
        self._not_ready = None
        return SyncReport(
            bytes_received=moved.bytes_received,
            bytes_permuted=moved.bytes_permuted,
            bytes_aliased=0,
            bytes_stored_twice=moved.bytes_permuted,
            seconds=time.perf_counter() - started,
            version=self.version,
        )

    def sleep(self) -> None:
        """Until the next sync() and wake() generate() refuses; keys and values are freed after each call anyway."""
        if self._awake:
            self._awake = False
            self._not_ready = "its weights may be older than the trainer's: call sync() after training"
            platform.empty_cache()

    def wake(self) -> None:
        if self._not_ready is not None:
            raise RuntimeError(f"the engine cannot wake up: {self._not_ready}")
        self._awake = True

    def verify(self) -> None:
        """As Engine.verify: RuntimeError on every rank where a slice differs from the trainer's."""
        wrong = differing_slices(self.weights, self.params, [self.params], self.memory, self.topology)
        if wrong:
            self._not_ready = "its weights differ from the trainer's"
            raise RuntimeError(f"{len(wrong)} slices differ from the trainer's weights: {'; '.join(wrong[:5])}")

    def generate(
        self, requests: Sequence[GenerateRequest], options: SamplingOptions, progress: Any = False
    ) -> list[Response]:
        """One response for each request, in order; a rank may ask for nothing. Raises as Engine.generate does."""
        from tqdm import tqdm

        if self._not_ready is not None or not self._awake:
            raise RuntimeError(f"the engine cannot generate: {self._not_ready or 'it is asleep, call wake()'}")
        if options.stop and self.tokenizer is None:
            raise ValueError("--stop texts need an engine with a tokenizer: build it with with_tokenizer=True")
        check_requests(requests, options, self.options.max_model_len, self.model.config.vocab_size)
        batches = [requests[i : i + BATCH] for i in range(0, len(requests), BATCH)]
        return [r for batch in tqdm(batches, disable=not progress) for r in self._generate(batch, options)]

    @torch.no_grad()
    def _generate(self, requests: Sequence[GenerateRequest], options: SamplingOptions) -> list[Response]:
        from transformers import GenerationConfig

        ids_NP, mask_NP = _left_padded([request.token_ids for request in requests], self.model.device)
        ends = options.stop_token_ids + (() if options.ignore_eos else self.eos_token_ids)
        sampler = _Sampler([request.seed for request in requests], ids_NP, options, ends, self.tokenizer)
        config = GenerationConfig(max_new_tokens=options.max_tokens, do_sample=False, pad_token_id=0)
        self.model.generate(
            ids_NP,
            attention_mask=mask_NP,
            generation_config=config,
            logits_processor=[sampler.choose],
            stopping_criteria=[sampler.ended],
        )
        return sampler.responses(self.version)


RolloutEngine = Engine | HFEngine  # what --rollout-backend chooses from


class _Sampler:
    """Chooses each next token inside generate, and knows where each response ends.

    The row of a response that has ended goes on until all have: what follows its length is never read.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        ids_NP: Tensor,
        options: SamplingOptions,
        ends: tuple[int, ...],
        tokenizer: Any,
    ) -> None:
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        self.options, self.tokenizer = options, tokenizer
        self.generators = [torch.Generator(ids_NP.device).manual_seed(seed) for seed in seeds]
        self.ends = torch.tensor(ends, dtype=torch.int64, device=ids_NP.device)
        self.warpers = [TemperatureLogitsWarper(options.temperature)] if options.temperature else []
        self.warpers += [TopKLogitsWarper(options.top_k)] if options.temperature and options.top_k else []
        self.warpers += [TopPLogitsWarper(options.top_p)] if options.temperature and options.top_p < 1 else []
        self.tokens_N1: list[Tensor] = []  # of each step
        self.logprobs_N1: list[Tensor] = []
        self.lengths: list[int | None] = [None] * len(seeds)  # of responses that ended by themselves

    def choose(self, ids_NS: Tensor, logits_NV: Tensor) -> Tensor:
        """A logits processor: all but the chosen token get -inf, so that generate's argmax takes it."""
        if len(self.tokens_N1) < self.options.min_tokens:
            logits_NV = logits_NV.index_fill(1, self.ends, -torch.inf)
        for warp in self.warpers:
            logits_NV = warp(ids_NS, logits_NV)
        if self.options.temperature:
            probs_NV = logits_NV.softmax(-1)
            drawn = [torch.multinomial(p, 1, generator=g) for p, g in zip(probs_NV, self.generators, strict=True)]
            tokens_N1 = torch.stack(drawn)
        else:
            tokens_N1 = logits_NV.argmax(-1, keepdim=True)
        self.tokens_N1.append(tokens_N1)
        self.logprobs_N1.append(logits_NV.log_softmax(-1).gather(1, tokens_N1))
        return torch.full_like(logits_NV, -torch.inf).scatter(1, tokens_N1, 0.0)

    def ended(self, ids_NS: Tensor, scores: Any, **more: Any) -> Tensor:
        """A stopping criterion [N]: end tokens, and stop texts as vLLM finds them, in the response's text alone."""
        count = len(self.tokens_N1)
        at_end_N = torch.isin(self.tokens_N1[-1][:, 0], self.ends).tolist()
        for n, length in enumerate(self.lengths):
            if length is None and (at_end_N[n] or self._has_stop(ids_NS[n, -count:].tolist())):
                self.lengths[n] = count
        return torch.tensor([length is not None for length in self.lengths], device=ids_NS.device)

    def _has_stop(self, tokens: list[int]) -> bool:
        """One of the texts ends after the first min_tokens tokens."""
        least = self.options.min_tokens
        if not self.options.stop or len(tokens) <= least:
            return False
        text, before = (
            self.tokenizer.decode(part, skip_special_tokens=True) if part else "" for part in (tokens, tokens[:least])
        )
        return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in self.options.stop)

    def responses(self, weight_version: int) -> list[Response]:
        tokens = torch.cat(self.tokens_N1, dim=1).tolist()
        logprobs = torch.cat(self.logprobs_N1, dim=1).tolist()
        return [
            Response(
                token_ids=tuple(tokens[n][:length]),
                logprobs=tuple(logprobs[n][:length]) if self.options.logprobs else (),
                truncated=length is None,
                weight_version=weight_version,
            )
            for n, length in enumerate(self.lengths)
        ]


class _UnroundedHead(nn.Module):
    """The language-model head in float32, as trainer and vLLM engine have it."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden_NSH: Tensor) -> Tensor:
        return linear(hidden_NSH.float(), self.weight.float())


def _build(hf_folder: str | Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model of config.json, its values yet to come."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(hf_folder)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.lm_head = _UnroundedHead(model.lm_head)
    model.generation_config = GenerationConfig()  # the config's end tokens would act beside ours
    return model.eval().requires_grad_(False)


def _whole(name: str, shape: tuple[int, ...]) -> Param:
    """An HF tensor as one block."""
    rows, cols = (1, *shape)[-2:]
    return Param(name, shape, (Block(name, 0, 0, rows, cols, name, 0, cols),))


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, attention mask) [N, P]; the mask comes from the lengths."""
    widest = max(map(len, prompts))
    ids_NP = torch.tensor([[0] * (widest - len(p)) + list(p) for p in prompts], device=device)
    lengths_N = torch.tensor([len(p) for p in prompts], device=device)
    mask_NP = torch.arange(widest, device=device) >= widest - lengths_N[:, None]
    return ids_NP, mask_NP.long()
