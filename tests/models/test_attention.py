import pytest
import torch
from models.cases import micro_batch
from torch import Tensor

from megatron_rl.models.attention import attend_each, flash_varlen, packed_seq_params

LENGTHS = [5, 1, 70, 33]


def by_hand(q_ThD: Tensor, k_TgD: Tensor, v_TgD: Tensor) -> Tensor:
    """softmax(q k / sqrt(D)) v with one T x T mask, in float64."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    allowed = (sequence[:, None] == sequence) & torch.ones(len(sequence), len(sequence)).tril().bool()
    q, k, v = q_ThD.double(), k_TgD.double(), v_TgD.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed.to(scores.device), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def inputs(kv_heads: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def compare(attend, kv_heads: int, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Outputs and all three gradients."""
    tensors = inputs(kv_heads, device, dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    ours, theirs = attend(*tensors), by_hand(*exact)
    up = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)).to(device)
    ours.backward(up.to(dtype))
    theirs.backward(up.double())
    for got, wanted in zip([ours, *(t.grad for t in tensors)], [theirs, *(t.grad for t in exact)], strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_stays_within_sequences(kv_heads: int):
    """Per-sequence SDPA is masked softmax attention, forward and backward, with grouped heads too."""
    borders = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    compare(lambda q, k, v: attend_each(q, k, v, borders, None), kv_heads, "cpu", torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_flash_varlen_stays_within_sequences(kv_heads: int):
    """The same of the fused kernel on CUDA, bfloat16."""
    packed = packed_seq_params(micro_batch(LENGTHS, 131, seed=0))
    packed.cu_seqlens_q, packed.cu_seqlens_kv = packed.cu_seqlens_q.cuda(), packed.cu_seqlens_kv.cuda()
    compare(lambda q, k, v: flash_varlen(q, k, v, packed, None), kv_heads, "cuda", torch.bfloat16, 3e-2)
