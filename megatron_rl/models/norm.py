"""RMSNorm (arXiv 1910.07467) in float32, rounded once; on the CPU the engine's norms are this one too.

Shape suffix: H hidden size; leading dimensions are free.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl import platform

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x normed and weighed, in the weight's type; 1 / root mean square of x, float32).

    For weights of 16 bit the squares are summed in float64, so that the order of the sum, which the engine's compiler
    chooses, changes no bit: one that differs in the first layer grows to the whole noise of bfloat16 by the last.
    """
    wide = x.float()
    summed = wide if weight_H.dtype == torch.float32 else wide.double()
    scale = torch.rsqrt(summed.square().mean(-1, keepdim=True) + eps).float()
    return (wide * scale * weight_H).to(weight_H.dtype), scale  # 16 bit times float32 is float32


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers that `dtype` has. For the compiler, which leaves out a cast and back, of bfloat16 by bits."""
    if dtype != torch.bfloat16 or not torch.compiler.is_compiling():
        return x.to(dtype).float()
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


class _RMSNorm(torch.autograd.Function):
    """The same with its gradient; keeps x and the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        out, scale = rms_norm(x, weight_H, eps)
        ctx.save_for_backward(x, weight_H, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight_H, scale = ctx.saved_tensors
        unit, grad = x.float() * scale, grad.float()
        pull = grad * weight_H.float()
        grad_x = scale * (pull - unit * (pull * unit).mean(-1, keepdim=True))
        grad_H = (grad * unit).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_H.to(weight_H.dtype), None


class RMSNorm(torch.nn.Module):
    """Unlike megatron-core's wrapper of torch's, it may be used with sequence parallelism."""

    def __init__(self, config: "TransformerConfig", hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        device = torch.device("cpu") if platform.device_type() == "cpu" else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads sums its gradient over TP
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x may be float32 (fp32_residual_connection); what comes out feeds a product in the weights' type."""
        if x.is_cuda or self.weight.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps).to(self.weight.dtype)
        return _RMSNorm.apply(x, self.weight, self.eps)
