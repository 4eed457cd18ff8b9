"""The kernels of mlp.py and attention.py: one pass over their tensors, in float32. Importing this imports Triton.

Shape suffixes: N rows (tokens), f a rank's half of fc1's rows, T tokens, h heads, g groups of them that share a key and
a value, s heads of a group with its key and value, D head dimension.
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


@triton.jit
def _part(
    mixed_TgsD,
    q_ThD,
    k_TgD,
    v_TgD,
    cos_TD,
    sin_TD,
    groups,
    members,  # s
    half,
    BACK: tl.constexpr,  # q, k and v are read and the mixed tensor is written
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None]
    inside = (head < groups * members) & (place < half)
    group, member = head // members, head % members
    is_q, is_k, is_v = inside & (member < members - 2), inside & (member == members - 2), inside & (member == members - 1)
    cos = tl.load(cos_TD + token * half + place, mask=place < half, other=0.0)
    sin = tl.load(sin_TD + token * half + place, mask=place < half, other=0.0)
    sin = -sin if BACK else sin
    mixed = mixed_TgsD + (token * groups * members + head) * 2 * half + place
    q = q_ThD + (token * groups * (members - 2) + group * (members - 2) + member) * 2 * half + place
    k = k_TgD + (token * groups + group) * 2 * half + place
    v = v_TgD + (token * groups + group) * 2 * half + place
    if BACK:
        first = tl.load(q, mask=is_q, other=0.0) + tl.load(k, mask=is_k, other=0.0) + tl.load(v, mask=is_v, other=0.0)
        second = tl.load(q + half, mask=is_q, other=0.0) + tl.load(k + half, mask=is_k, other=0.0)
        second += tl.load(v + half, mask=is_v, other=0.0)
    else:
        first, second = tl.load(mixed, mask=inside, other=0.0), tl.load(mixed + half, mask=inside, other=0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    left = tl.where(is_v, first, first * cos - second * sin).to(mixed_TgsD.dtype.element_ty)
    right = tl.where(is_v, second, second * cos + first * sin).to(mixed_TgsD.dtype.element_ty)
    if BACK:
        tl.store(mixed, left, mask=inside)
        tl.store(mixed + half, right, mask=inside)
    else:
        tl.store(q, left, mask=is_q)
        tl.store(q + half, right, mask=is_q)
        tl.store(k, left, mask=is_k)
        tl.store(k + half, right, mask=is_k)
        tl.store(v, left, mask=is_v)
        tl.store(v + half, right, mask=is_v)


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


def _run_part(mixed_TgsD: Tensor, parts: tuple[Tensor, ...], cos_TD: Tensor, sin_TD: Tensor, back: bool) -> None:
    tokens, groups, members, size = mixed_TgsD.shape
    blocks = {"HEADS": triton.next_power_of_2(groups * members), "HALF": triton.next_power_of_2(size // 2)}
    warps = 8 if blocks["HEADS"] * blocks["HALF"] > 2048 else 4
    sizes = groups, members, size // 2
    _part[(tokens,)](mixed_TgsD, *parts, cos_TD, sin_TD, *sizes, BACK=back, num_warps=warps, **blocks)


def part(mixed_TgsD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mixed_TgsD = mixed_TgsD.contiguous()
    tokens, groups, members, size = mixed_TgsD.shape
    heads = groups * (members - 2), groups, groups
    q_ThD, k_TgD, v_TgD = (mixed_TgsD.new_empty(tokens, count, size) for count in heads)
    _run_part(mixed_TgsD, (q_ThD, k_TgD, v_TgD), cos_TD, sin_TD, back=False)
    return q_ThD, k_TgD, v_TgD


def join(q_ThD: Tensor, k_TgD: Tensor, v_TgD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    tokens, groups, size = k_TgD.shape
    mixed_TgsD = q_ThD.new_empty(tokens, groups, q_ThD.shape[1] // groups + 2, size)
    _run_part(mixed_TgsD, tuple(x.contiguous() for x in (q_ThD, k_TgD, v_TgD)), cos_TD, sin_TD, back=True)
    return mixed_TgsD
