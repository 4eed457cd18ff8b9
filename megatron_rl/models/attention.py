"""Attention over packed sequences, with rotary embeddings of each token's own position.

Shape suffixes: T tokens, h query heads and g key-value heads of this TP rank, D head dimension; s = h / g + 2 heads of
one group in the product of the projections: its queries, its key, its value.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch import MicroBatch
from megatron_rl.models.config import RopeScaling


@dataclass
class PackedSequences(PackedSeqParams):
    """What attention layers need to know of a micro-batch; qkv_format "sbhd" keeps megatron-core's [T, 1, h, D]."""

    cos_TD: Tensor | None = None  # float32, of each token's own position, D / 2 frequencies
    sin_TD: Tensor | None = None


class MixedSelfAttention(SelfAttention):
    """megatron-core's, whose queries, keys and values stay in one tensor until core attention turns and parts them.

    Where they are normed first, or a group of heads is cut over ranks, they are parted as megatron-core does.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: None = None, output_gate: bool = False, split_qkv: bool = True
    ) -> Any:
        normed = any(not isinstance(norm, IdentityOp | None) for norm in (self.q_layernorm, self.k_layernorm))
        if normed or self.config.num_query_groups < self.world_size:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        mixed, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        return mixed.view(*mixed.shape[:2], groups, -1, size), None, None


class PackedAttention(MegatronModule):
    """megatron-core's core_attention: causal within each sequence of cu_seqlens, never O(s^2) memory."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """[T, 1, h, D], [T, 1, g, D], [T, 1, g, D] or [T, 1, g, s, D], None, None -> [T, 1, h * D]."""
        assert attention_mask is None and attention_bias is None, "the borders are the only mask"
        q, k, v = rotated(query, key, value, packed_seq_params)
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0:
            out_ThD = flash_varlen(q, k, v, packed_seq_params, self.scale)
        else:
            out_ThD = attend_each(q, k, v, packed_seq_params.cu_seqlens_q.tolist(), self.scale)
        return out_ThD.reshape(out_ThD.shape[0], 1, -1)


class FusedPackedAttention(MegatronModule):
    """The same by transformer-engine's attention over packed sequences ("thd"); CUDA, 16 bit."""

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
        from megatron.core.transformer.enums import AttnMaskType

        super().__init__(config=config)
        self.mask_type = AttnMaskType.padding_causal
        self.fused = TEDotProductAttention(config=config, **(kwargs | {"attn_mask_type": self.mask_type}))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """[T, 1, h, D], [T, 1, g, D], [T, 1, g, D] or [T, 1, g, s, D], None, None -> [T, 1, h * D]."""
        assert attention_mask is None and attention_bias is None, "the borders are the only mask"
        q, k, v = rotated(query, key, value, packed_seq_params)
        borders = replace(packed_seq_params, qkv_format="thd")
        out = self.fused(q, k, v.contiguous(), None, self.mask_type, packed_seq_params=borders)
        return out.reshape(out.shape[0], 1, -1)


def rotated(
    query: Tensor, key: Tensor | None, value: Tensor | None, packed: PackedSequences | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(q_ThD, k_TgD, v_TgD), query and key turned by each token's own position."""
    assert packed is not None, "training data is packed, every forward pass gives its borders"
    angles = packed.cos_TD, packed.sin_TD
    if key is None:
        return RotateMixed.apply(query.squeeze(1), *angles)
    return Rotate.apply(query.squeeze(1), *angles), Rotate.apply(key.squeeze(1), *angles), value.squeeze(1)


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
    """torch's SDPA in float32, one sequence after the other. Any device, any dtype.

    In bfloat16 SDPA rounds the probabilities on the CPU, which vLLM's kernel does not.
    """
    dtype, (q_ThD, k_TgD, v_TgD) = q_ThD.dtype, (t.float() for t in (q_ThD, k_TgD, v_TgD))
    gqa = k_TgD.shape[1] != q_ThD.shape[1]
    pieces = []
    for start, end in zip(borders[:-1], borders[1:], strict=True):
        q, k, v = (t[start:end].transpose(0, 1)[None] for t in (q_ThD, k_TgD, v_TgD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces).to(dtype)


def packed_sequences(micro: MicroBatch, frequencies_D: Tensor, dtype: torch.dtype) -> PackedSequences:
    """Borders and rotary angles of a micro-batch, computed once for all layers.

    Cosines and sines are rounded to the model's type, as transformers and vLLM do: an error that all three share.
    """
    angles_TD = micro.positions_1T[0, :, None].float() * frequencies_D
    return PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.max_seqlen,
        max_seqlen_kv=micro.max_seqlen,
        cos_TD=angles_TD.cos().to(dtype).float(),
        sin_TD=angles_TD.sin().to(dtype).float(),
    )


def turn(x_ThD: Tensor, cos_TD: Tensor, sin_TD: Tensor, sign: float) -> Tensor:
    """Rotated by the angles, or by sign -1 back."""
    if x_ThD.is_cuda and platform.has_triton():
        from megatron_rl.models import kernels

        return kernels.turn(x_ThD, cos_TD, sin_TD, sign)
    first, second = x_ThD.float().chunk(2, dim=-1)
    cos, sin = cos_TD[:, None], sin_TD[:, None] * sign
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_ThD.dtype)


class Rotate(torch.autograd.Function):
    """Rotary embedding, RoFormer (arXiv 2104.09864), equation 34, Llama's halves: in float32, rounded once.

    The gradient is the rotation back.
    """

    @staticmethod
    def forward(ctx: Any, x_ThD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos_TD, sin_TD)
        return turn(x_ThD, cos_TD, sin_TD, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_ThD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos_TD, sin_TD = ctx.saved_tensors
        return turn(grad_ThD, cos_TD, sin_TD, -1.0), None, None


def part(mixed_TgsD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q_ThD, k_TgD, v_TgD), contiguous; queries and keys rotated by the angles."""
    if mixed_TgsD.is_cuda and platform.has_triton():
        from megatron_rl.models import kernels

        return kernels.part(mixed_TgsD, cos_TD, sin_TD)
    queries_ThD = mixed_TgsD[:, :, :-2].flatten(1, 2)
    turned = (turn(x, cos_TD, sin_TD, 1.0) for x in (queries_ThD, mixed_TgsD[:, :, -2]))
    return *turned, mixed_TgsD[:, :, -1].contiguous()


def join(q_ThD: Tensor, k_TgD: Tensor, v_TgD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """mixed_TgsD, queries and keys rotated back: what part() takes from what it gives."""
    if q_ThD.is_cuda and platform.has_triton():
        from megatron_rl.models import kernels

        return kernels.join(q_ThD, k_TgD, v_TgD, cos_TD, sin_TD)
    queries = turn(q_ThD, cos_TD, sin_TD, -1.0).unflatten(1, (k_TgD.shape[1], -1))
    return torch.cat((queries, turn(k_TgD, cos_TD, sin_TD, -1.0)[:, :, None], v_TgD[:, :, None]), dim=2)


class RotateMixed(torch.autograd.Function):
    """part(): Rotate of queries and keys, in the pass that takes them and the values out of one tensor."""

    @staticmethod
    def forward(ctx: Any, mixed_TgsD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Any:  # type: ignore[override]
        ctx.save_for_backward(cos_TD, sin_TD)
        return part(mixed_TgsD, cos_TD, sin_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return join(*grads, *ctx.saved_tensors), None, None


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
