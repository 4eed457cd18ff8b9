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
BATCHES["wide"] = BATCHES["spread"] * 24  # roundings of bf16 average out over its 4512 tokens
ENTROPY, KL, CLIP, VALUE_CLIP = 0.01, 0.1, 0.2, 0.2
FLAGS = f"""--train-data none --reward length --kl-coef {KL} --kl-in loss --kl-estimator k3 --entropy-coef {ENTROPY}
    --lr 0.02 --adam-eps 0.1 --clip-grad 1.0 --value-clip {VALUE_CLIP}""".split()  # Adam's eps: no steps by sign alone


def fixed_batch(name: str, folder: str | Path) -> Batch:
    """A rollout whose old log-probabilities and values lie around those that save_outputs left in `folder`, far enough
    from the clips' bounds for the rounding of bf16 not to change sides."""
    drawn = torch.Generator().manual_seed(12)
    batch = bare_batch(name)
    shape = batch.mask_BR.shape
    logprobs_BR, values_BR = torch.load(f"{folder}/{name}.pt")
    moves_BR = torch.tensor([-0.5, -0.05, 0.05, 0.5])[torch.randint(4, shape, generator=drawn)]
    errors_BR = torch.randn(shape, generator=drawn)
    return replace(
        batch,
        old_logprobs_BR=logprobs_BR + moves_BR,
        ref_logprobs_BR=logprobs_BR + 0.2 * torch.randn(shape, generator=drawn),
        values_BR=values_BR + moves_BR.flip(1),
        advantages_BR=0.5 + torch.randn(shape, generator=drawn),
        returns_BR=values_BR + errors_BR + 0.6 * errors_BR.sign(),
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


def values_per_token(model: Any, sequence: Tensor, prompt: int) -> Tensor:
    """The score of the state before each response token, by transformers."""
    return model.score(model.model(sequence[None]).last_hidden_state)[0, prompt - 1 : -1, 0]


@torch.no_grad()
def save_outputs(policy: str | Path, critic: str | Path) -> None:
    """Writes transformers' log-probabilities and values [2, B, R] of every batch into the policy's folder."""
    import transformers

    lm = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(critic, dtype=torch.float32)
    for name in BATCHES:
        batch = bare_batch(name)
        outputs_2BR = torch.zeros(2, *batch.mask_BR.shape)
        for b, (sequence, prompt) in enumerate(zip(batch.sequences, batch.prompt_lengths_B.tolist(), strict=True)):
            length = len(sequence) - prompt
            outputs_2BR[0, b, :length] = per_token(lm, sequence, prompt)[0]
            outputs_2BR[1, b, :length] = values_per_token(scorer, sequence, prompt)
        torch.save(outputs_2BR, f"{policy}/{name}.pt")
