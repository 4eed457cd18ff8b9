import pytest
import torch
from models.cases import micro_batch
from torch import Tensor

from megatron_rl.models.attention import Rotate, RotateMixed, attend_each, flash_varlen, packed_sequences
from megatron_rl.models.mlp import SwiGLU

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
    packed = packed_sequences(micro_batch(LENGTHS, 131, seed=0), torch.ones(32), torch.bfloat16)
    packed.cu_seqlens_q, packed.cu_seqlens_kv = packed.cu_seqlens_q.cuda(), packed.cu_seqlens_kv.cuda()
    compare(lambda q, k, v: flash_varlen(q, k, v, packed, None), kv_heads, "cuda", torch.bfloat16, 3e-2)


def test_rotation_and_its_gradient():
    """A pair (a, b) of the two halves becomes (a cos - b sin, b cos + a sin); the gradient passes gradcheck."""
    x = torch.tensor([[[1.0, 2.0]]], requires_grad=True)  # one token, one head, D = 2
    angle = torch.tensor([[0.3]])
    turned = Rotate.apply(x, angle.cos(), angle.sin())
    wanted = [1 * angle.cos() - 2 * angle.sin(), 2 * angle.cos() + 1 * angle.sin()]
    torch.testing.assert_close(turned.flatten(), torch.stack(wanted).flatten())
    turned.backward(torch.tensor([[[5.0, 7.0]]]))
    back = [5 * angle.cos() + 7 * angle.sin(), 7 * angle.cos() - 5 * angle.sin()]
    torch.testing.assert_close(x.grad.flatten(), torch.stack(back).flatten())


@pytest.mark.parametrize(("groups", "ratio"), [(1, 1), (2, 3), (3, 1)])
def test_one_tensor_is_parted_and_rotated(groups: int, ratio: int):
    """Queries, keys and values out of one tensor, and its gradient, are bitwise those of parting and rotating each."""
    mixed, angles = torch.randn(5, groups, ratio + 2, 8, requires_grad=True), torch.randn(5, 4)
    angle = angles.cos(), angles.sin()
    whole = mixed.detach().clone().requires_grad_()
    query, key, value = whole[:, :, :ratio].reshape(5, -1, 8), whole[:, :, ratio], whole[:, :, ratio + 1]
    wanted = Rotate.apply(query, *angle), Rotate.apply(key, *angle), value
    got = RotateMixed.apply(mixed, *angle)
    pulls = [torch.randn_like(part) for part in wanted]
    torch.autograd.backward(wanted, pulls)
    torch.autograd.backward(got, pulls)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert torch.equal(mixed.grad, whole.grad)


def test_swiglu_equals_torch_with_gradient():
    """silu(gate) * up, forward and backward, as autograd has it; bfloat16 is rounded once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 12, generator=generator, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    gate, up = plain.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    got = SwiGLU.apply(x)
    torch.testing.assert_close(got, wanted)
    pull = torch.randn(5, 6, generator=generator)
    got.backward(pull)
    wanted.backward(pull)
    torch.testing.assert_close(x.grad, plain.grad)
    rounded = x.detach().bfloat16()
    gate, up = rounded.float().chunk(2, -1)
    assert torch.equal(SwiGLU.apply(rounded), (torch.nn.functional.silu(gate) * up).bfloat16())
