"""vLLM's norm and activation on the CPU, with the trainer's arithmetic: float32 inside, rounded where it rounds.

vLLM's own round in between, in other places when it is compiled than when it is not. Importing this imports vLLM.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from megatron_rl.models.norm import rms_norm, rounded

FP32_RESIDUAL = "fp32_residual"  # key of vLLM's additional_config, which is part of its compilation cache's key


@RMSNorm.register_oot(name="RMSNorm")
class TrainersRMSNorm(RMSNorm):
    """Takes the place of vLLM's when a model is built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp32_residual = get_current_vllm_config().additional_config.get(FP32_RESIDUAL, False)

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight = self.weight.data
        if residual is None:
            return rms_norm(x, weight, self.variance_epsilon)[0]
        total = x.float() + residual
        if self.fp32_residual:
            return rms_norm(total, weight, self.variance_epsilon)[0], total
        total = rounded(total, weight.dtype)
        return rms_norm(total, weight, self.variance_epsilon)[0], total.to(weight.dtype)

    forward_cpu = forward_native


@SiluAndMul.register_oot(name="SiluAndMul")
class TrainersSiluAndMul(SiluAndMul):
    """Takes the place of vLLM's when a model is built."""

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate.float()) * up).to(x.dtype)

    def forward_cpu(self, x: Tensor) -> Tensor:
        return self.forward_native(x)
