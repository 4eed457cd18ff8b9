"""What is computed from the last hidden states: `head(hidden_TH, weight, micro) -> tensor`.

Shape suffixes: T tokens of the micro-batch, K places whose next token is a response token, H hidden, V vocabulary,
v this TP rank's slice of the padded vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.batch import MicroBatch

Head = Callable[[Tensor, Tensor, MicroBatch], Tensor]


class ValueHead(torch.nn.Module):
    """One number a token; takes the place of GPTModel's output layer. The weight is whole on every TP rank.

    A new head is zero: it says nothing, where random numbers would say something wrong until they are unlearned.
    """

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype, device=device))


def value_head(hidden_TH: Tensor, weight_1H: Tensor, micro: MicroBatch) -> Tensor:
    """float32 values_K: of the state before each response token."""
    return hidden_TH[micro.predict_K].float() @ weight_1H[0].float()


def score_head(hidden_TH: Tensor, weight_1H: Tensor, micro: MicroBatch) -> Tensor:
    """float32 scores_K: of each response token itself, where value_head gives the state before it."""
    return hidden_TH[micro.predict_K + 1].float() @ weight_1H[0].float()


def all_values(hidden_TH: Tensor, weight_1H: Tensor, micro: MicroBatch) -> Tensor:
    """float32 values_T, of every token; a reward model's score is the one at its sequence's last token."""
    return hidden_TH.float() @ weight_1H[0].float()


def full_logits(vocab: int) -> Head:
    """A head for tests and tools: float32 logits_TV, gathered over TP, without the padding of the vocabulary."""

    def head(hidden_TH: Tensor, weight_vH: Tensor, micro: MicroBatch) -> Tensor:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        logits_Tv = (hidden_TH @ weight_vH.T).float()
        return gather_from_tensor_model_parallel_region(logits_Tv)[:, :vocab]

    return head
