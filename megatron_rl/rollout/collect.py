"""One rollout: prompts dealt to the engine replicas, responses gathered so that every rank holds all samples."""

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batch import Prompt, Response, Sample
from megatron_rl.initialize import Topology
from megatron_rl.rollout.engine import GenerateRequest, SamplingOptions
from megatron_rl.rollout.hf_backend import RolloutEngine


def sample_seed(seed: int, step: int, sample: int) -> int:
    """The seed of one sample, 62 bits: the same on all ranks of a replica, another for every sample, step and run."""
    digest = hashlib.sha256(f"{seed}/{step}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def deal(prompts: int, n: int, replicas: int) -> list[list[int]]:
    """Sample numbers (prompt * n + k) of each replica: samples of a prompt together where possible."""
    if prompts >= replicas:
        return [[p * n + k for p in range(r, prompts, replicas) for k in range(n)] for r in range(replicas)]
    return [list(range(r, prompts * n, replicas)) for r in range(replicas)]


def collect(
    engine: RolloutEngine,
    prompts: list[Prompt],
    n: int,
    options: SamplingOptions,
    seed: int,
    step: int,
    topology: Topology,
    progress: bool = False,
    first: int = 0,
) -> list[Sample]:
    """n samples of each prompt, in order, equal on every rank. The ranks of a replica generate together.

    `first` samples of the step came before these: their seeds are not used again.
    """
    dealt = deal(len(prompts), n, engine.num_replicas)
    mine = dealt[engine.replica]
    requests = [GenerateRequest(prompts[i // n].token_ids, sample_seed(seed, step, first + i)) for i in mine]
    responses = engine.generate(requests, options, progress)
    speaks = engine.tp_rank == 0
    packed = _Packed.of(mine, responses) if speaks else _Packed.of([], [])
    everything: dict[int, Response] = {}
    for part in packed.all_gather(topology):
        everything |= part.responses()
    assert len(everything) == len(prompts) * n, f"{len(everything)} of {len(prompts) * n} samples came back"
    return [Sample(prompts[i // n], everything[i], group=i // n) for i in range(len(prompts) * n)]


@dataclass(frozen=True)
class _Packed:
    """Responses as two flat tensors, so that gathering them serialises no objects."""

    integers: Tensor  # int64: per response (sample number, length, truncated, version), then all token ids
    floats: Tensor  # float32: per response its seconds, then all log-probabilities
    count: int

    @staticmethod
    def of(numbers: list[int], responses: list[Response]) -> "_Packed":
        heads = [
            [i, len(r.token_ids), int(r.truncated), r.weight_version] for i, r in zip(numbers, responses, strict=True)
        ]
        tokens = [t for r in responses for t in r.token_ids]
        integers = torch.tensor([x for head in heads for x in head] + tokens, dtype=torch.int64)
        floats = [r.seconds for r in responses] + [x for r in responses for x in r.logprobs]
        return _Packed(integers, torch.tensor(floats).float(), len(responses))

    def all_gather(self, topology: Topology) -> list["_Packed"]:
        sizes = torch.tensor([len(self.integers), len(self.floats), self.count])
        all_sizes = [torch.zeros_like(sizes) for _ in range(topology.world_size)]
        dist.all_gather(all_sizes, sizes, group=topology.cpu_group)
        widest = torch.stack(all_sizes).amax(0).tolist()
        gathered = []
        for mine, width in ((self.integers, widest[0]), (self.floats, widest[1])):
            padded = torch.zeros(width, dtype=mine.dtype)
            padded[: len(mine)] = mine
            parts = [torch.empty_like(padded) for _ in range(topology.world_size)]
            dist.all_gather(parts, padded, group=topology.cpu_group)
            gathered.append(parts)
        rows = zip(all_sizes, *gathered, strict=True)
        return [_Packed(i[: int(s[0])], f[: int(s[1])], int(s[2])) for s, i, f in rows]

    def responses(self) -> dict[int, Response]:
        heads = self.integers[: 4 * self.count].view(-1, 4).tolist()
        tokens, floats, at = self.integers[4 * self.count :].tolist(), self.floats.tolist(), 0
        seconds, logprobs = floats[: self.count], floats[self.count :]
        found = {}
        for (number, length, truncated, version), ended in zip(heads, seconds, strict=True):
            part = slice(at, at + length)
            found[number] = Response(tuple(tokens[part]), tuple(logprobs[part]), bool(truncated), version, ended)
            at += length
        return found
