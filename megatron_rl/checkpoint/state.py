"""What a checkpoint holds: weights and optimizer of each trained role as sharded tensors, generators of each rank."""

import argparse
import io
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl import platform
from megatron_rl.checkpoint.gather import gathering_once
from megatron_rl.initialize import Topology
from megatron_rl.platform import RngState
from megatron_rl.roles import Role
from megatron_rl.weights.dist_io import METADATA, model_state

# flags that leave the numbers of a run as they are
NEUTRAL = {
    *(
        "output_dir",
        "show_samples",
        "log_samples",
        "progress",
        "verbose",
        "save_hf",
        "dry_run",
        "world_size",
        "config",
    ),
    *("save", "save_interval", "keep_last", "load", "async_save", "exit_on_missing_checkpoint"),
    *("distributed_timeout_minutes", "verify_weights", "reshard_bucket_mb", "kv_cache_gb", "rollout_weights"),
    *("reward_workers", "reward_timeout", "logprob_chunk_tokens", "eval_data", "eval_interval", "reference_cache"),
    *("offload_optimizer", "offload_gradients", "offload_reference", "offload_critic"),
}


def trained(roles: Iterable[Role | None]) -> list[Role]:
    """Those that have something to save: the frozen reference comes from its folder again."""
    return [role for role in roles if role is not None and role.optimizer is not None]


def role_state(role: Role, loading: bool) -> dict[str, Any]:
    """megatron-core's sharded state of weights and optimizer; call it inside platform.megatron(), on every rank."""
    state = model_state(role.chunks)
    begin_optimizer(role.optimizer)
    with nullcontext() if loading else gathering_once(role.optimizer):
        # a copy: the optimizer pops what it has matched
        whole = role.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=dict(METADATA))
    return state | {"optimizer": whole}


def begin_optimizer(optimizer: Any) -> None:
    """Gives an optimizer that has made no step the state it has before the first: megatron-core saves no other."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if inner is None or inner.state:
            continue
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            part.init_state_fn(inner, part.config)
            continue
        for group in inner.param_groups:
            for param in group["params"]:
                moments = {key: torch.zeros_like(param.data) for key in ("exp_avg", "exp_avg_sq")}
                device = param.device if group["fused"] else "cpu"  # where torch's Adam counts
                inner.state[param] = {"step": torch.tensor(0.0, device=device), **moments}


def optimizer_step(optimizer: Any) -> int:
    """Updates so far, which are fewer than the schedule's steps where some were skipped."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for counted in (*part.optimizer.state.values(), *part.optimizer.param_groups):
            if "step" in counted:
                return int(counted["step"])
    return 0


def restore_optimizer(role: Role, state: dict[str, Any], step: int) -> None:
    """Loads what role_state asked for. Rates and decay are those of this run's flags, not of the checkpoint."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = getattr(role.optimizer, "chained_optimizers", [role.optimizer])
    for i, part in enumerate(parts):
        saved = state if len(parts) == 1 else state[i]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in part.param_groups]
        if isinstance(part, DistributedOptimizer):
            # what is not a tensor has another form where experts had an optimizer of their own: it is all known here
            part.load_state_dict({"optimizer": {"param_groups": [group | {"step": step} for group in groups]}})
            _restore_moments(part, saved["param_state"])
        else:
            inner = saved["optimizer"] if "optimizer" in saved else saved
            for here, there in zip(groups, inner["param_groups"], strict=True):
                there.update(here)
            part.load_state_dict(saved)


def _restore_moments(part: Any, moments: dict[int, Any]) -> None:
    """Of the distributed optimizer, without its count of steps: torch's Adam has one tensor a parameter for it, which
    megatron-core looks for among the moments, and which it makes one and the same for all parameters.
    """
    steps = {param: state.pop("step") for param, state in part.optimizer.state.items() if "step" in state}
    part.load_parameter_state_from_fully_reshardable(moments)
    for param, step in steps.items():
        part.optimizer.state[param]["step"] = step.clone()


def restore_schedule(role: Role, steps: int) -> None:
    role.schedule.num_steps = steps
    role.schedule.step(0)  # puts that step's rate into the optimizer


# ---- generators ---------------------------------------------------------------------------------------------------


def save_rng(folder: Path, topology: Topology) -> str:
    """Writes this rank's generators; gives the file's name within the checkpoint."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state, name = platform.rng_state(), f"rng/rank_{topology.rank:05d}.pt"
    kind, keys, *rest = state.numpy
    (folder / "rng").mkdir(exist_ok=True)
    tracked = {key: value.cpu() for key, value in get_cuda_rng_tracker().get_states().items()}
    numpy = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
    saved = {"python": state.python, "numpy": numpy, "cpu": state.cpu, "cuda": state.cuda, "megatron": tracked}
    buffer = io.BytesIO()  # torch.save does not say why it cannot write to a file
    torch.save(saved, buffer)
    (folder / name).write_bytes(buffer.getvalue())
    return name


def restore_rng(folder: Path, topology: Topology) -> bool:
    """False where the checkpoint has no generators for this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    path = folder / f"rng/rank_{topology.rank:05d}.pt"
    if not path.is_file():
        return False
    saved = torch.load(path, weights_only=True)
    kind, keys, *rest = saved["numpy"]
    cuda = saved["cuda"] if platform.device_type() == "cuda" else None
    numpy = (kind, keys.numpy().astype(np.uint32), *rest)
    platform.set_rng_state(RngState(saved["python"], numpy, saved["cpu"], cuda))
    get_cuda_rng_tracker().set_states(saved["megatron"])
    return True


# ---- arguments ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def changed_arguments(saved: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """ "--lr 1e-06 -> 2e-06" of every flag that changes the numbers of a run."""
    ignored = NEUTRAL | ({"train_iters"} if args.lr_decay_style == "constant" or args.lr_decay_iters else set())
    here = plain(vars(args))
    return [
        f"--{name.replace('_', '-')} {saved.get(name)} -> {here.get(name)}"
        for name in sorted((saved.keys() | here.keys()) - ignored)
        if saved.get(name) != here.get(name)
    ]
