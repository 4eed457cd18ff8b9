"""Pairs with the log-probabilities of an imagined reference, for the program and the test that compare layouts."""

import torch
from torch import Tensor

from megatron_rl.batch import PreferencePair

VOCAB = 131
SIZES = [(9, 7, 1), (3, 1, 12), (17, 15, 15), (4, 6, 9), (12, 2, 5)]  # tokens of prompt, chosen, rejected; odd on DP 2
LOSS_FLAGS = {
    "sigmoid": ["--dpo-loss", "sigmoid", "--beta", "0.3", "--label-smoothing", "0.1", "--rpo-alpha", "0.2"],
    "ipo": ["--dpo-loss", "ipo", "--beta", "0.5"],
    "simpo": ["--dpo-loss", "simpo", "--beta", "2.0", "--simpo-gamma", "0.3"],
}


def pairs_and_reference() -> tuple[list[PreferencePair], Tensor]:
    """The pairs, and a reference's log-probabilities [N] as the cache holds them."""
    generator = torch.Generator().manual_seed(7)
    pairs = []
    for index, sizes in enumerate(SIZES):
        prompt, chosen, rejected = (tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist()) for n in sizes)
        pairs.append(PreferencePair(index, prompt, chosen, rejected))
    tokens = sum(chosen + rejected for _, chosen, rejected in SIZES)
    return pairs, -5 + 0.2 * torch.randn(tokens, generator=generator)
