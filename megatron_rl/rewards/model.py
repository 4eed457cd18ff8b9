"""Reward models: folders of Hugging Face or of a checkpoint with a value head, run on the policy's layout on texts.

The score is the head's output at the last token of prompt and response, by length and not by token id: an EOS that was
generated counts, also where it is the padding token.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.batch import Batch, Sample
from megatron_rl.data.files import Row
from megatron_rl.data.packing import PackingOptions, plan_micro_batches
from megatron_rl.data.text import TextFormat, as_prompt_chat
from megatron_rl.initialize import Topology
from megatron_rl.models.config import HFConfig
from megatron_rl.roles import Role
from megatron_rl.step import Progress, forward_only
from megatron_rl.weights.dist_io import is_dist_folder
from megatron_rl.weights.hf_io import HFFolder, check_folder

Ids = tuple[int, ...]
Bar = Callable[[str, int], AbstractContextManager[Progress]]  # (text, total) -> what to call once a unit


@dataclass(frozen=True)
class RewardText:
    """How samples become the ids of a reward model."""

    own: TextFormat | None  # tokenises texts again; None: the policy's ids go in as they are
    limit: int  # tokens of a text; what is longer is cut from the left
    prompt_key: str = "prompt"  # of the row

    def ids(self, samples: Sequence[Sample], responses: Sequence[str]) -> list[Ids]:
        """prompt + response of each sample, not yet cut; `responses` are their texts without special tokens."""
        if self.own is None:
            return [s.prompt.token_ids + s.response.token_ids for s in samples]
        form = self.own
        pieces = zip(samples, responses, strict=True)
        if form.apply_chat_template:
            texts = [form.render([*self._chat(s), _answer(text)], self._row(s), answer=False) for s, text in pieces]
            return form.encode_prompts(texts)
        encoded = form.encode_prompts(["\n".join(m["content"] for m in self._chat(s)) + t for s, t in pieces])
        eos = form.tokenizer.eos_token_id
        ended = [eos is not None and not s.response.truncated for s in samples]
        return [(*ids, eos) if end else ids for ids, end in zip(encoded, ended, strict=True)]

    def fit(self, ids: Ids) -> Ids:
        """At most `limit` of them: the BOS and the end."""
        if len(ids) <= self.limit:
            return ids
        assert self.own is not None, "the policy's own ids were found to fit at launch"
        return self.own.shorten(ids, self.limit)

    def _row(self, sample: Sample) -> Row:
        return Row("the data", sample.prompt.index + 1, sample.prompt.row)

    def _chat(self, sample: Sample) -> list[dict[str, Any]]:
        row = self._row(sample)
        return as_prompt_chat(row.get(self.prompt_key, "--prompt-key"), row, self.prompt_key, "--prompt-key")


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class RewardModel:
    """A frozen role with a value head, and how it reads samples."""

    name: str  # in metrics
    role: Role
    text: RewardText
    packing: PackingOptions


def tokenizer_difference(policy: Any, policy_vocab: int, own: Any, own_vocab: int) -> str | None:
    """In what a reward model's tokenizer differs from the policy's; None where the policy's ids mean the same to it.

    The padding token does not count: nothing is padded. `*_vocab` are the numbers of ids that the models know.
    """
    if policy.get_vocab() != own.get_vocab():
        return "vocabulary"
    for name in ("bos", "eos"):
        here, there = getattr(policy, f"{name}_token_id"), getattr(own, f"{name}_token_id")
        if here != there:
            return f"{name.upper()} id {there}, the policy's {here}"
    if policy.chat_template != own.chat_template:
        return "chat template"
    return f"{own_vocab} ids, the policy's {policy_vocab}" if own_vocab < policy_vocab else None


def check_head(folder: str, hf: HFConfig) -> None:
    """ValueError where the folder has no head that could score, or other tensors than its config.json says (those of a
    checkpoint are compared when they are loaded)."""
    if is_dist_folder(folder):
        new_head = hf.head == "lm"
    else:
        new_head, _ = check_folder(HFFolder(folder), hf, "value")
    if new_head:
        raise ValueError(
            f"reward model {folder}: a language model without score.weight, which cannot score; --reward-model wants "
            "a sequence classification with one label"
        )


def batch_of_texts(texts: Sequence[Ids]) -> Batch:
    """Every text as a sequence whose response is its last token, the one that is scored."""
    lengths = torch.tensor([len(ids) for ids in texts])
    return Batch(
        sequences=tuple(torch.tensor(ids) for ids in texts),
        prompt_lengths_B=lengths - 1,
        response_lengths_B=torch.ones_like(lengths),
        group_B=torch.arange(len(texts)),
        truncated_B=torch.zeros(len(texts), dtype=torch.bool),
    )


def score_texts(model: RewardModel, texts: Sequence[Ids], topology: Topology, bar: Bar) -> list[float]:
    """The score of each text, on every rank; collective."""
    if not texts:
        return []
    known = model.role.hf.vocab
    if (largest := max(map(max, texts))) >= known:
        raise ValueError(f"reward model {model.name}: token id {largest} is not among the {known} of its config.json")
    batch = batch_of_texts(texts)
    plan = plan_micro_batches([len(ids) for ids in texts], topology.dp_size, model.packing)
    with bar(f"reward model {model.name}", len(plan[0])) as progress:
        return forward_only(model.role, batch, plan, topology, progress)[0, :, 0].tolist()


def score_samples(
    models: Sequence[RewardModel],
    places: Mapping[str, Sequence[int]],
    samples: Sequence[Sample],
    responses: Sequence[str],
    topology: Topology,
    bar: Bar,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """The scores of the samples that each model has to score, by `places` of rewards.router; collective.

    Texts that are too long for a model are cut from the left, and `say` is told how many.
    """
    scores = {}
    for model in models:
        chosen = places[model.name]
        ids = model.text.ids([samples[i] for i in chosen], [responses[i] for i in chosen])
        if cut := sum(len(one) > model.text.limit for one in ids):
            say(f"warning: {cut} texts longer than {model.text.limit} tokens lost their start for {model.name}")
        scores[model.name] = score_texts(model, [model.text.fit(one) for one in ids], topology, bar)
    return scores
