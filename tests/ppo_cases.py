"""Rollouts made by hand, for the program and the tests that compare layouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import loss_weights
from megatron_rl.batch import Batch

VOCAB = 131
BATCHES = {  # name -> (prompt, response) lengths; "long": one of 500 tokens and eight of 20; "one": less than DP 2
    "spread": ((5, 60), (9, 6), (3, 30), (17, 12), (2, 45), (8, 9), (4, 6), (11, 20)),
    "long": ((20, 480), *[(10, 10)] * 8),
    "one": ((6, 11),),
}
ENTROPY, KL, CLIP, VALUE_CLIP = 0.01, 0.1, 0.2, 0.2
FLAGS = f"""--train-data none --reward length --kl-coef {KL} --kl-in loss --kl-estimator k3 --entropy-coef {ENTROPY}
    --lr 0.02 --adam-eps 0.1 --clip-grad 1.0 --value-clip {VALUE_CLIP}""".split()  # Adam's eps: no steps by sign alone


def fixed_batch(name: str, folder: str | Path) -> Batch:
    """A rollout whose old log-probabilities lie around those of the model in `folder`, as save_logprobs left them,
    and far from the clip's bounds, so that bf16 does not change sides."""
    drawn = torch.Generator().manual_seed(12)
    batch = bare_batch(name)
    shape = batch.mask_BR.shape
    logprobs_BR = torch.load(f"{folder}/{name}.pt")
    moves_BR = torch.tensor([-0.5, -0.05, 0.05, 0.5])[torch.randint(4, shape, generator=drawn)]
    return replace(
        batch,
        old_logprobs_BR=logprobs_BR + moves_BR,
        ref_logprobs_BR=logprobs_BR + 0.2 * torch.randn(shape, generator=drawn),
        values_BR=torch.randn(shape, generator=drawn),
        advantages_BR=0.5 + torch.randn(shape, generator=drawn),
        returns_BR=torch.randn(shape, generator=drawn),
        weights_BR=loss_weights(batch.mask_BR, "token-mean"),
    )


def bare_batch(name: str) -> Batch:
    """Random tokens."""
    drawn, sizes = torch.Generator().manual_seed(11), torch.tensor(BATCHES[name])
    return Batch(
        sequences=tuple(torch.randint(2, VOCAB, (int(n),), generator=drawn) for n in sizes.sum(1)),
        prompt_lengths_B=sizes[:, 0],
        response_lengths_B=sizes[:, 1],
        group_B=torch.arange(len(sizes)),
        truncated_B=torch.zeros(len(sizes), dtype=torch.bool),
    )


def per_token(model: Any, sequence: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of the response, by transformers."""
    logprobs = model(sequence[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, sequence[prompt:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@torch.no_grad()
def save_logprobs(folder: str | Path) -> None:
    """Writes transformers' log-probabilities of every batch beside the model in `folder`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name in BATCHES:
        batch = bare_batch(name)
        logprobs_BR = torch.zeros(batch.mask_BR.shape)
        for row, sequence, prompt in zip(logprobs_BR, batch.sequences, batch.prompt_lengths_B.tolist(), strict=True):
            row[: len(sequence) - prompt] = per_token(model, sequence, prompt)[0]
        torch.save(logprobs_BR, f"{folder}/{name}.pt")
