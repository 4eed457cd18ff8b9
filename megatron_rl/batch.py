"""The data that crosses module borders, as frozen dataclasses.

Shape suffixes: B sequences of a batch, R the longest response among them, T tokens of a packed micro-batch,
K response tokens among those T, S sequences in a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt data, tokenised."""

    index: int  # row number over all files, stable between epochs and runs
    token_ids: tuple[int, ...]  # exactly what the engine is given, BOS included where the tokenizer has one
    text: str  # the text that token_ids spell
    row: Mapping[str, Any]  # the whole row as it stood in the file; rewards read label and data_source from it


@dataclass(frozen=True)
class Response:
    """What the engine generated for one prompt."""

    token_ids: tuple[int, ...]  # EOS included where it was generated; never empty
    logprobs: tuple[float, ...]  # log-probability of each token after temperature; empty where not asked for
    truncated: bool  # the length limit ended it, not EOS or a stop string
    weight_version: int  # number of the weight sync whose weights generated it
    seconds: float = 0.0  # from the start of the generation to its last token; 0 where the engine does not tell


@dataclass(frozen=True)
class Sample:
    """A prompt with one of its responses."""

    prompt: Prompt
    response: Response
    group: int  # samples of one prompt in one rollout share it


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with a preferred and a dispreferred completion (token ids of the completions alone)."""

    index: int
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """B sequences (prompt + response) on the CPU, equal on every rank; columns are padded to [B, R] with zeros.

    Column r of sequence b belongs to its r-th response token. Masks come from lengths, never from token ids.
    """

    sequences: tuple[Tensor, ...]  # B int64 tensors, prompt then response
    prompt_lengths_B: Tensor  # int64
    response_lengths_B: Tensor  # int64, at least 1
    group_B: Tensor  # int64, samples of one prompt share it
    truncated_B: Tensor  # bool
    rollout_logprobs_BR: Tensor | None = None  # float32, from the engine, after temperature
    old_logprobs_BR: Tensor | None = None  # float32, from the trainer before the first update
    ref_logprobs_BR: Tensor | None = None
    values_BR: Tensor | None = None  # the critic's value of the state before each response token
    advantages_BR: Tensor | None = None
    returns_BR: Tensor | None = None
    correction_BR: Tensor | None = None  # importance weights of the rollout correction, detached
    weights_BR: Tensor | None = None  # the loss is sum(term * weight): weights hold mask, aggregation and count

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def mask_BR(self) -> Tensor:
        """bool, True on response tokens."""
        width = int(self.response_lengths_B.max())
        return torch.arange(width)[None] < self.response_lengths_B[:, None]

    def select(self, index: Tensor) -> "Batch":
        """The sequences that `index` (int64) names, in that order, columns cut to their longest response."""
        width = int(self.response_lengths_B[index].max())
        taken: dict[str, Any] = {"sequences": tuple(self.sequences[i] for i in index.tolist())}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                taken[field.name] = value[index][:, :width] if value.ndim == 2 else value[index]
        return replace(self, **taken)


def batch_of(samples: list[Sample]) -> Batch:
    """Samples -> Batch; rollout log-probabilities are kept where every response carries them."""
    lengths = torch.tensor([len(s.response.token_ids) for s in samples])
    assert int(lengths.min()) > 0, "a response has at least one token"
    logprobs = None
    if all(len(s.response.logprobs) == len(s.response.token_ids) for s in samples):
        logprobs = torch.zeros(len(samples), int(lengths.max()))
        for row, sample in zip(logprobs, samples, strict=True):
            row[: len(sample.response.logprobs)] = torch.tensor(sample.response.logprobs)
    return Batch(
        sequences=tuple(torch.tensor(s.prompt.token_ids + s.response.token_ids) for s in samples),
        prompt_lengths_B=torch.tensor([len(s.prompt.token_ids) for s in samples]),
        response_lengths_B=lengths,
        group_B=torch.tensor([s.group for s in samples]),
        truncated_B=torch.tensor([s.response.truncated for s in samples]),
        rollout_logprobs_BR=logprobs,
    )


def batch_of_pairs(pairs: Sequence[PreferencePair], total: int | None = None) -> Batch:
    """Pairs -> Batch: sequence 2i is the chosen half of pair i, 2i + 1 the rejected one.

    Every token of a pair has the pair's weight: 1 / the pairs of the optimizer batch, which `total` gives where these
    are only some of them.
    """
    assert pairs, "a batch has at least one pair"
    halves = [(p.prompt_ids, ids) for p in pairs for ids in (p.chosen_ids, p.rejected_ids)]
    batch = Batch(
        sequences=tuple(torch.tensor(prompt + ids) for prompt, ids in halves),
        prompt_lengths_B=torch.tensor([len(prompt) for prompt, _ in halves]),
        response_lengths_B=torch.tensor([len(ids) for _, ids in halves]),
        group_B=torch.arange(len(pairs)).repeat_interleave(2),
        truncated_B=torch.zeros(len(halves), dtype=torch.bool),
    )
    return replace(batch, weights_BR=batch.mask_BR / (total or len(pairs)))


@dataclass(frozen=True)
class MicroBatch:
    """S sequences packed end to end without padding between them, on the device.

    A token attends only to its own sequence, positions restart with it. `predict_K` are the places whose next token
    is a response token: log-probabilities, entropies and values are taken there and nowhere else.
    Tokens after cu_seqlens[-2] may be padding that makes T divisible (sequence parallelism): a sequence nobody reads.
    """

    tokens_1T: Tensor  # int64
    positions_1T: Tensor  # int64, from 0 within each sequence
    cu_seqlens: Tensor  # int32, borders of the sequences, from 0 to T
    max_seqlen: int
    predict_K: Tensor  # int64, index into T
    labels_K: Tensor  # int64, the token that follows predict_K
    sequence_K: Tensor  # int64, 0 .. S-1
    num_sequences: int  # S
    rollout_logprobs_K: Tensor | None = None  # the columns of Batch at the same tokens
    old_logprobs_K: Tensor | None = None
    ref_logprobs_K: Tensor | None = None
    values_K: Tensor | None = None
    advantages_K: Tensor | None = None
    returns_K: Tensor | None = None
    correction_K: Tensor | None = None
    weights_K: Tensor | None = None


COLUMNS = (
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantages",
    "returns",
    "correction",
    "weights",
)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy from pageable memory would first wait for all that the device has to do."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def pack(batch: Batch, index: list[int], device: torch.device, multiple: int = 1) -> MicroBatch:
    """Packs the sequences `index` of a batch, in that order, padding T up to a multiple of `multiple`."""
    chosen = [batch.sequences[i] for i in index]
    lengths = [len(s) for s in chosen]
    total = sum(lengths)
    padding = -total % multiple
    pieces = chosen + ([torch.zeros(padding, dtype=torch.int64)] if padding else [])
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    responses = batch.response_lengths_B[index]
    first = starts + batch.prompt_lengths_B[index] - 1  # the last prompt token predicts the first response token
    predict = torch.cat([torch.arange(int(f), int(f + r)) for f, r in zip(first, responses, strict=True)])
    tokens = torch.cat(pieces)
    mask = torch.arange(int(responses.max()))[None] < responses[:, None]
    columns = {}
    for name in COLUMNS:
        column_BR = getattr(batch, name + "_BR")
        if column_BR is not None:
            columns[name + "_K"] = _sent(column_BR[index][:, : mask.shape[1]][mask], device)
    return MicroBatch(
        tokens_1T=_sent(tokens[None], device),
        positions_1T=_sent(torch.cat([torch.arange(len(p)) for p in pieces])[None], device),
        cu_seqlens=_sent(torch.tensor([0, *map(len, pieces)]).cumsum(0, dtype=torch.int32), device),
        max_seqlen=max(map(len, pieces)),
        predict_K=_sent(predict, device),
        labels_K=_sent(tokens[predict + 1], device),
        sequence_K=_sent(torch.repeat_interleave(torch.arange(len(index)), responses), device),
        num_sequences=len(index),
        **columns,
    )
