"""The kernels of mlp.py and attention.py: one pass over their tensors, in float32. Importing this imports Triton.

Shape suffixes: N rows (tokens), f a rank's half of fc1's rows, T tokens, h heads, D head dimension.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gate(x_N2f, out_Nf, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_N2f + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_N2f + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_Nf + row * width + column, out.to(out_Nf.dtype.element_ty), mask=inside)


@triton.jit
def _gate_back(grad_Nf, x_N2f, out_N2f, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_N2f + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_N2f + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_Nf + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate, grad_up = grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu
    out = out_N2f + row * 2 * width + column
    tl.store(out, grad_gate.to(out_N2f.dtype.element_ty), mask=inside)
    tl.store(out + width, grad_up.to(out_N2f.dtype.element_ty), mask=inside)


@triton.jit
def _turn(
    x_ThD,
    out_ThD,
    cos_TD,
    sin_TD,
    token_stride,
    head_stride,
    heads,
    half,
    sign,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None]
    inside = (head < heads) & (place < half)
    cos = tl.load(cos_TD + token * half + place, mask=place < half, other=0.0)
    sin = tl.load(sin_TD + token * half + place, mask=place < half, other=0.0) * sign
    source = x_ThD + token * token_stride + head * head_stride + place
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out_ThD + (token * heads + head) * 2 * half + place
    tl.store(target, (first * cos - second * sin).to(out_ThD.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * cos + first * sin).to(out_ThD.dtype.element_ty), mask=inside)


def swiglu(x_N2f: Tensor) -> Tensor:
    x_N2f = x_N2f.contiguous()
    width = x_N2f.shape[-1] // 2
    out_Nf = x_N2f.new_empty(*x_N2f.shape[:-1], width)
    _gate[(x_N2f.numel() // (2 * width), triton.cdiv(width, 1024))](x_N2f, out_Nf, width, BLOCK=1024)
    return out_Nf


def swiglu_back(grad_Nf: Tensor, x_N2f: Tensor) -> Tensor:
    grad_Nf, x_N2f = grad_Nf.contiguous(), x_N2f.contiguous()
    width = grad_Nf.shape[-1]
    out_N2f = torch.empty_like(x_N2f)
    _gate_back[(grad_Nf.numel() // width, triton.cdiv(width, 1024))](grad_Nf, x_N2f, out_N2f, width, BLOCK=1024)
    return out_N2f


def turn(x_ThD: Tensor, cos_TD: Tensor, sin_TD: Tensor, sign: float) -> Tensor:
    """x may be a view whose last dimension is contiguous; the result is contiguous."""
    if x_ThD.stride(-1) != 1:
        x_ThD = x_ThD.contiguous()
    tokens, heads, size = x_ThD.shape
    out_ThD, half = x_ThD.new_empty(tokens, heads, size), size // 2
    blocks = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(half)}
    strides = x_ThD.stride(0), x_ThD.stride(1)
    _turn[(tokens,)](x_ThD, out_ThD, cos_TD, sin_TD, *strides, heads, half, sign, **blocks)
    return out_ThD
