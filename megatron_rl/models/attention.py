"""Attention over packed sequences, and rotary embeddings from each token's own position.

Shape suffixes: T tokens, h query heads and g key-value heads of this TP rank, D head dimension.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.batch import MicroBatch
from megatron_rl.models.config import HFConfig, RopeScaling


class PackedAttention(MegatronModule):
    """megatron-core's core_attention: causal within each sequence of cu_seqlens, never O(s^2) memory."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T, 1, h, D], [T, 1, g, D], [T, 1, g, D] -> [T, 1, h * D]."""
        assert packed_seq_params is not None, "training data is packed, every forward pass gives its borders"
        assert attention_mask is None and attention_bias is None, "the borders are the only mask"
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0:
            out_ThD = flash_varlen(q, k, v, packed_seq_params, self.scale)
        else:
            out_ThD = attend_each(q, k, v, packed_seq_params.cu_seqlens_q.tolist(), self.scale)
        return out_ThD.reshape(out_ThD.shape[0], 1, -1)


def flash_varlen(q_ThD: Tensor, k_TgD: Tensor, v_TgD: Tensor, packed: PackedSeqParams, scale: float | None) -> Tensor:
    """torch's FlashAttention over all sequences at once. CUDA, 16 bit."""
    from torch.nn.attention.varlen import varlen_attn

    options = {"scale": scale}
    known = inspect.signature(varlen_attn).parameters
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:  # torch 2.11 groups heads without being asked
        options["enable_gqa"] = k_TgD.shape[1] != q_ThD.shape[1]
    borders = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
    return varlen_attn(q_ThD, k_TgD.contiguous(), v_TgD.contiguous(), *borders, **options)


def attend_each(q_ThD: Tensor, k_TgD: Tensor, v_TgD: Tensor, borders: list[int], scale: float | None) -> Tensor:
    """torch's SDPA, one sequence after the other. Any device, any dtype."""
    gqa = k_TgD.shape[1] != q_ThD.shape[1]
    pieces = []
    for start, end in zip(borders[:-1], borders[1:], strict=True):
        q, k, v = (t[start:end].transpose(0, 1)[None] for t in (q_ThD, k_TgD, v_TgD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


def packed_seq_params(micro: MicroBatch) -> PackedSeqParams:
    """qkv_format "sbhd" keeps megatron-core's [T, 1, h, D]; only our attention reads the borders."""
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.max_seqlen,
        max_seqlen_kv=micro.max_seqlen,
    )


class Rotary(torch.nn.Module):
    """Angles of each token's own position; takes the place of megatron-core's multimodal rotary embedding, which is
    the one that is given position ids."""

    def __init__(self, hf: HFConfig, device: torch.device) -> None:
        super().__init__()
        # not a buffer: .to(bfloat16) on the model must leave it in float32
        self.inverse_frequencies = inverse_frequencies(hf.rope_theta, hf.head_dim, hf.rope).to(device)

    def forward(self, position_ids: Tensor, mrope_section: None = None, cp_group: Any = None) -> Tensor:
        """[1, T] positions -> [T, 1, 1, D] angles in float32, each frequency twice."""
        angles = position_ids[0, :, None].float() * self.inverse_frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def inverse_frequencies(theta: float, head_dim: int, rope: RopeScaling) -> Tensor:
    """float32 [D / 2], computed as transformers does.

    llama3: wavelengths above original / low_freq_factor are stretched by `factor`, those under original /
    high_freq_factor are left, and between the two it blends (Llama 3.1).
    """
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    assert rope.kind == "llama3", f"config.py lets {rope.kind} through"
    wavelength = 2 * torch.pi / plain
    longest, shortest = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, (1 - blend) * stretched / rope.factor + blend * stretched, stretched)
