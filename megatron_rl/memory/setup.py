"""From flags to a memory estimate, and its lines."""

import argparse
from collections.abc import Sequence

from megatron_rl import platform
from megatron_rl.algorithms.advantages import NEEDS_CRITIC
from megatron_rl.algorithms.preference import NO_REFERENCE
from megatron_rl.arguments import layout_sizes, world_size
from megatron_rl.memory.activations import Recompute, Training
from megatron_rl.memory.estimate import (
    FULL,
    Estimate,
    Item,
    RoleSizes,
    Rollout,
    Setup,
    kv_bytes_of_sequence,
    role_state,
    worst_stage,
)
from megatron_rl.models.config import HFConfig, check_layout, dims, read_hf_config
from megatron_rl.offload import OffloadOptions
from megatron_rl.weights.dist_io import hf_folder
from megatron_rl.weights.layouts import megatron_shards
from megatron_rl.weights.overlap import Overlap
from megatron_rl.weights.plan import Reshard, default_placement
from megatron_rl.weights.vllm_like import vllm_like_blocks


def _training(args: argparse.Namespace, units: int, longest: int) -> Training:
    """`units`: sequences, or pairs of them, of one optimizer step over all ranks; `longest`: tokens of one at most."""
    sizes = layout_sizes(args)
    dp = world_size(args) // (sizes.tp * sizes.pp)
    mine = -(-units // dp)
    tokens = min(args.max_tokens_per_micro_batch, longest * min(mine, args.micro_batch_size or mine))
    return Training(
        sizes=sizes,
        dp=dp,
        sequence_parallel=args.sequence_parallel,
        bf16=args.bf16,
        fp32_residual=args.fp32_residual_connection,
        distributed_optimizer=args.use_distributed_optimizer,
        tokens=tokens,
        micro_batches=-(-mine * longest // tokens),
        chunk_tokens=args.logprob_chunk_tokens,
        recompute=Recompute(
            args.recompute_granularity,
            args.recompute_method,
            args.recompute_num_layers,
            tuple(args.recompute_modules),
        ),
        cuda=args.dry_run or platform.device_type() == "cuda",  # a dry run speaks of the machine that will train
    )


def ppo_setup(args: argparse.Namespace, hf: HFConfig) -> Setup:
    """The roles of train_ppo.py and its engine. Reward models of --reward-config are not counted."""
    sequence = args.max_prompt_length + args.max_response_length
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    training = _training(args, args.global_batch_size or samples, sequence)
    roles = [RoleSizes("policy", hf, offload=OffloadOptions(False, args.offload_gradients, args.offload_optimizer))]
    if args.advantage_estimator in NEEDS_CRITIC:
        critic = _config(args.critic_hf_model, hf)
        away = OffloadOptions(args.offload_critic, args.offload_gradients, args.offload_optimizer)
        roles.append(RoleSizes("critic", critic, "value", offload=away))
    frozen = OffloadOptions(weights=args.offload_reference)
    if args.kl_coef:
        roles.append(RoleSizes("reference", _config(args.reference_hf_model, hf), "lm", False, frozen))
    for number, spec in enumerate(args.reward_model, start=1):
        model = _config(spec.rpartition("=")[0] or spec, hf)
        roles.append(RoleSizes(f"reward {number}", model, "value", False, frozen))
    if args.rollout_backend != "vllm":
        return Setup(training, roles)
    ranks = world_size(args)
    tp = args.rollout_tensor_parallel_size or args.tensor_model_parallel_size
    element = {"bfloat16": 2, "float16": 2}.get(args.vllm_args.get("dtype", "bfloat16" if args.bf16 else ""), 4)
    rollout = Rollout(
        tp=tp,
        sequence_tokens=sequence,
        sequences=-(-samples * tp // ranks),
        unshared=_unshared(args, hf, tp) * element,
        element=element,
        kv_cache=None if args.kv_cache_gb is None else int(args.kv_cache_gb * 1e9),
        max_num_seqs=int(args.vllm_args.get("max_num_seqs", 1024)),
    )
    return Setup(training, roles, rollout)


def dpo_setup(args: argparse.Namespace, hf: HFConfig) -> Setup:
    """The roles of train_dpo.py; a reference that computes beforehand is gone when the policy comes."""
    training = _training(args, args.global_batch_size or 32, 2 * args.max_length)
    roles = [RoleSizes("policy", hf)]
    if args.reference == "each-step" and not (args.reference_free or args.dpo_loss in NO_REFERENCE):
        roles.append(RoleSizes("reference", _config(args.reference_hf_model, hf), "lm", False))
    return Setup(training, roles)


def _config(folder: str | None, policy: HFConfig) -> HFConfig:
    return policy if folder is None else read_hf_config(hf_folder(folder))


def _unshared(args: argparse.Namespace, hf: HFConfig, tp: int) -> int:
    """Elements of the engine's weights that are not the trainer's memory, on the worst rank, neighbours together."""
    sizes, ranks = layout_sizes(args), world_size(args)
    inner = ranks // sizes.pp  # ranks of a pipeline stage
    where = [(r % sizes.tp, r // inner, r % inner % sizes.ep) for r in range(ranks)]
    shards, of_rank = megatron_shards(dims(hf), check_layout(hf, sizes, args.sequence_parallel), where)
    targets = [vllm_like_blocks(dims(hf), rank, tp) for rank in range(tp)]
    copied = [param.key for param in targets[0]] if args.rollout_weights == "copy" else []
    placement = default_placement(ranks, tp)
    traffic = Reshard(Overlap(shards, targets, copied), of_rank, placement, gpus_per_node=8).traffic()
    return int((traffic.needed - traffic.aliased).max())


# ---- text -----------------------------------------------------------------------------------------------------------


def _size(item: Item) -> int:
    return item.size if item.on_device else 0


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def summary(setup: Setup, device: int | None = None) -> list[str]:
    """A line a role and a phase for the header of a run, and a warning where `device` bytes are too few."""
    found = worst_stage(setup, device)
    where = f" of stage {found.stage}" if setup.training.sizes.pp > 1 else ""
    lines = [f"estimate  a rank{where} needs at most, with {setup.training.tokens:,} tokens in a micro-batch:"]
    for role in setup.roles:
        state = role_state(role, setup.training, found.stage)
        held = {key: state[key] for key in ("weights", "gradients") if key in state}
        held |= {"optimizer": sum(state.values()) - sum(held.values())} if role.trains else {}
        lines.append(f"          {role.name}: " + ", ".join(f"{name} {_gb(size)}" for name, size in held.items()))
    for phase in found.phases:
        own = max(
            (i for i in phase.items if i.name.endswith((": activations", ": KV cache"))), key=_size, default=None
        )
        note = "" if own is None or not own.on_device else f", {_gb(own.size)} of it {own.name.split(': ')[1]}"
        lines.append(f"          {phase.name} {_gb(phase.on_device)}{note}")
    if device is not None and found.peak.on_device > FULL * device:
        lines.append(
            f"warning: that is more than {FULL:.0%} of the device's {_gb(device)}; tools/estimate_memory.py names the "
            "flags that make it fit"
        )
    return lines


def table(setup: Setup, found: Estimate, device: int) -> list[str]:
    """Every item (rows, GB) in every phase (columns), and what to set for the engine."""
    items = {item.name: item for phase in found.phases for item in phase.items}
    held = [{item.name: item for item in phase.items} for phase in found.phases]
    lines = ["", f"{'GB on a rank of stage ' + str(found.stage):<40}" + "".join(f"{p.name:>19}" for p in found.phases)]
    for name, item in items.items():
        sizes = "".join(f"{_cell(phase.get(name)):>19}" for phase in held)
        lines.append(f"{name:<40}{sizes}" + ("" if item.counted else "   torch does not count it"))
    totals = {"on the device": [p.on_device for p in found.phases]}
    totals["in torch.cuda.max_memory_allocated"] = [p.allocated for p in found.phases]
    lines += [f"{name:<40}" + "".join(f"{size / 1e9:>19.2f}" for size in sizes) for name, sizes in totals.items()]
    lines += ["(asleep: free on the device, but torch counts it)", ""]
    lines += [f"peak: {found.peak.name}, {_gb(found.peak.on_device)} of {_gb(device)} on the device;"]
    lines += [f"torch.cuda.max_memory_allocated over whole steps: {_gb(found.allocated)}"]
    return lines + (_proposal(setup, found, device) if setup.rollout is not None else [])


def _cell(item: Item | None) -> str:
    if item is None:
        return "-"
    return f"{item.size / 1e9:.2f}" if item.on_device else f"(asleep) {item.size / 1e9:.2f}"


def _proposal(setup: Setup, found: Estimate, device: int) -> Sequence[str]:
    rollout = setup.rollout
    one = kv_bytes_of_sequence(setup.roles[0].hf, rollout.tp, rollout.sequence_tokens, rollout.element)
    used = found.phases[0].on_device
    return [
        f"KV cache: {found.max_num_seqs} of the {rollout.sequences} sequences of a replica at a time, {_gb(one)} each",
        f"proposal: --kv-cache-gb {found.kv_cache / 1e9:.2f} --vllm-args max_num_seqs={found.max_num_seqs} "
        f"gpu_memory_utilization={min(0.95, used / device):.2f}",
    ]
