"""The reference's log-probabilities of every pair, kept on disk so that the reference runs once, not each step.

A file holds those of one data set, and the digests of what they were computed from: the pairs' token ids, and the
reference's folder with the precision it ran in. A file whose digests are others is not used. Rank 0 alone reads and
writes: the ranks may be on machines that share no disk.

Shape suffixes: N response tokens of all pairs, chosen before rejected, pair after pair; B sequences, R the longest
response among them.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.batch import PreferencePair
from megatron_rl.initialize import Topology


@dataclass(frozen=True)
class Digests:
    """What log-probabilities depend on."""

    data: str
    model: str


class KnownLogprobs:
    """Log-probabilities of a data set, by pair."""

    def __init__(self, pairs: Sequence[PreferencePair], logprobs_N: Tensor) -> None:
        self._logprobs_N, self._start, at = logprobs_N, {}, 0
        for pair in pairs:
            self._start[pair.index] = at
            at += len(pair.chosen_ids) + len(pair.rejected_ids)
        assert at == len(logprobs_N), f"{len(logprobs_N)} log-probabilities for {at} response tokens"

    def of(self, pairs: Sequence[PreferencePair]) -> Tensor:
        """[B, R], two rows a pair, padded with zeros."""
        rows: list[Tensor] = []
        for pair in pairs:
            sizes = [len(pair.chosen_ids), len(pair.rejected_ids)]
            rows += self._logprobs_N[self._start[pair.index] :][: sum(sizes)].split(sizes)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def data_digest(pairs: Sequence[PreferencePair]) -> str:
    """Of every token id, and of where one sequence ends and the next begins."""
    digest = hashlib.sha256()
    for pair in pairs:
        for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
            digest.update(array("q", (len(ids), *ids)).tobytes())
    return digest.hexdigest()


def model_digest(folder: str, numerics: dict[str, Any], topology: Topology) -> str:
    """Of config.json, of the weights' files and of `numerics` (what else changes the numbers); collective.

    The files are dealt over the ranks: reading a large model takes as long as one rank's share.
    """
    files = [Path(folder) / "config.json", *sorted(Path(folder).glob("*.safetensors"))]
    mine = {}
    for path in files[topology.rank :: topology.world_size]:
        with open(path, "rb") as file:
            mine[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    shares: list[dict[str, str]] = [{} for _ in range(topology.world_size)]
    dist.all_gather_object(shares, mine, group=topology.cpu_group)
    of_file = {name: digest for share in shares for name, digest in share.items()}
    return hashlib.sha256(json.dumps([of_file, numerics], sort_keys=True).encode()).hexdigest()


def _read(path: Path, digests: Digests) -> tuple[str, Tensor | None]:
    if not path.is_file():
        return "not there yet", None
    try:
        with safe_open(path, framework="pt") as file:
            held = file.metadata() or {}
            others = [what for what, digest in vars(digests).items() if held.get(what) != digest]
            if others:
                return f"refused, it is of another {' and another '.join(others)}", None
            return "reused", file.get_tensor("logprobs")
    except SafetensorError as error:
        return f"refused, it cannot be read ({error})", None


def read_cache(path: str | Path, digests: Digests, topology: Topology) -> tuple[str, Tensor | None]:
    """(what became of the file, [N] or None where it is to be computed); collective, equal on every rank."""
    found: list[Any] = [None]
    logprobs_N = None
    if topology.is_main:
        status, logprobs_N = _read(Path(path), digests)
        found = [(status, None if logprobs_N is None else len(logprobs_N))]
    dist.broadcast_object_list(found, src=0, group=topology.cpu_group)
    status, length = found[0]
    if length is not None:
        logprobs_N = torch.empty(length) if logprobs_N is None else logprobs_N
        dist.broadcast(logprobs_N, src=0, group=topology.cpu_group)
    return status, logprobs_N


def write_cache(path: str | Path, logprobs_N: Tensor, digests: Digests, topology: Topology) -> None:
    """Rank 0 writes; a killed run leaves the old file or the new one."""
    if topology.is_main:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        save_file({"logprobs": logprobs_N.contiguous()}, partial, metadata=dict(vars(digests)))
        os.replace(partial, path)
