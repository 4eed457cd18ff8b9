"""Data-parallel wrapping, optimizer and learning-rate schedule, all of them megatron-core's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_rl import platform
from megatron_rl.initialize import Topology

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


@dataclass(frozen=True)
class OptimizerOptions:
    """Steps are optimizer steps. Defaults are those of the flags of the same names."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_steps: int | None = None  # needed for every style but constant
    lr_decay_style: str = "constant"
    weight_decay: float = 0.0  # not of norms and biases
    decoupled_weight_decay: bool = True  # AdamW; False adds the decay to the gradient
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0  # 0 clips nothing
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    accumulate_allreduce_grads_in_fp32: bool = True

    def __post_init__(self) -> None:
        """ValueError for what the schedule would refuse later, with the flag to change."""
        if self.lr_decay_style not in DECAY_STYLES:
            raise ValueError(f"--lr-decay-style {self.lr_decay_style} is none of {', '.join(DECAY_STYLES)}")
        if self.lr_decay_style != "constant" and self.lr_decay_steps is None:
            raise ValueError(f"--lr-decay-style {self.lr_decay_style} needs the number of steps to decay over")
        if self.lr_decay_steps is not None and self.lr_warmup_steps >= self.lr_decay_steps:
            raise ValueError(
                f"--lr-warmup-iters {self.lr_warmup_steps} must be below the {self.lr_decay_steps} steps of the decay"
            )
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"--min-lr {self.min_lr} must be between 0 and --lr {self.lr}")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")


def wrap_ddp(
    chunks: list[torch.nn.Module], topology: Topology, options: OptimizerOptions
) -> list["DistributedDataParallel"]:
    """Chunks whose gradients are summed (not averaged) over data-parallel ranks.

    With the distributed optimizer it moves the parameters into one buffer: fill them before, alias them after.
    """
    with platform.megatron():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=options.accumulate_allreduce_grads_in_fp32,
            overlap_grad_reduce=options.overlap_grad_reduce,
            overlap_param_gather=options.overlap_param_gather,
            use_distributed_optimizer=options.use_distributed_optimizer,
        )
        assert all(chunk.config.calculate_per_token_loss for chunk in chunks), "else gradients would be averaged"
        return [
            DistributedDataParallel(
                chunk.config, config, chunk, disable_bucketing=index > 0, pg_collection=topology.groups
            )
            for index, chunk in enumerate(chunks)
        ]


def build_optimizer(
    chunks: list["DistributedDataParallel"], options: OptimizerOptions
) -> tuple["MegatronOptimizer", "OptimizerParamScheduler"]:
    """(optimizer, schedule). Copies float32 master weights: weights loaded later need optimizer.reload_model_params().

    The schedule stands at its first step, and wants `step(1)` after every optimizer step.
    """
    with platform.megatron():
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        dtype = chunks[0].module.config.params_dtype
        config = OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            decoupled_weight_decay=options.decoupled_weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=options.use_distributed_optimizer,
            overlap_param_gather=options.overlap_param_gather,
        )
        optimizer = get_megatron_optimizer(config, chunks)
        if platform.device_type() == "cuda":
            _fuse(optimizer)
        schedule = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.min_lr,
            lr_warmup_steps=options.lr_warmup_steps,
            lr_decay_steps=options.lr_decay_steps or options.lr_warmup_steps + 1,
            lr_decay_style=options.lr_decay_style,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,  # on resume the arguments count
        )
        schedule.step(1)  # megatron's step 0 of a warm-up has learning rate 0
        return optimizer, schedule


def _fuse(optimizer: "MegatronOptimizer") -> None:
    """Where torch's Adam stands in for a fused one, makes it a single kernel: its own choice on CUDA needs temporary
    memory of a float32 copy of the parameters and several passes over them."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group.update(fused=True, foreach=False)
