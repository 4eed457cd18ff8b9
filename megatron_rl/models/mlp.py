"""The gated MLP between its two products: silu(gate) * up in float32, rounded once, nothing but its input kept.

Shape suffixes: T tokens, f this TP rank's half of fc1's rows (gate, then up).
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_rl import platform


def _swiglu(x_T2f: Tensor) -> Tensor:
    if x_T2f.is_cuda and platform.has_triton():
        from megatron_rl.models.kernels import swiglu

        return swiglu(x_T2f)
    gate_Tf, up_Tf = x_T2f.float().chunk(2, dim=-1)
    return (F.silu(gate_Tf) * up_Tf).to(x_T2f.dtype)


def _swiglu_back(grad_Tf: Tensor, x_T2f: Tensor) -> Tensor:
    if x_T2f.is_cuda and platform.has_triton():
        from megatron_rl.models.kernels import swiglu_back

        return swiglu_back(grad_Tf, x_T2f)
    gate_Tf, up_Tf = x_T2f.float().chunk(2, dim=-1)
    grad_Tf, sigmoid_Tf = grad_Tf.float(), gate_Tf.sigmoid()
    silu_Tf = gate_Tf * sigmoid_Tf
    slope_Tf = sigmoid_Tf + silu_Tf * (1 - sigmoid_Tf)
    return torch.cat((grad_Tf * up_Tf * slope_Tf, grad_Tf * silu_Tf), dim=-1).to(x_T2f.dtype)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., 2f] -> [..., f]; Shazeer 2020 (arXiv 2002.05202), equation 6."""

    @staticmethod
    def forward(ctx: Any, x_T2f: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x_T2f)
        return _swiglu(x_T2f)

    @staticmethod
    def backward(ctx: Any, grad_Tf: Tensor) -> Tensor:  # type: ignore[override]
        return _swiglu_back(grad_Tf, *ctx.saved_tensors)


class GatedMLP(MLP):
    """megatron-core's MLP with the activation above; of models with silu, a gate and no biases, as all of ours are."""

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **kwargs: Any) -> tuple[Tensor, None]:
        assert per_token_scale is None and not self.config.add_bias_linear, "a dense MLP without biases"
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(SwiGLU.apply(gate_up))
