"""What every part of a step holds on one rank, item by item, without building anything.

Sizes are in bytes. An allowance is what no formula gives: it was seen on an H200 with vLLM 0.26 and is rounded up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.memory.activations import Recompute, Training, activations, forward_work
from megatron_rl.models.config import HFConfig, dims
from megatron_rl.offload import ALL_STAY, OffloadOptions
from megatron_rl.weights.arch import Role as Kind
from megatron_rl.weights.layouts import megatron_blocks, train_layout

CUDA_CONTEXT = 700_000_000  # of the process, with NCCL and compiled kernels
ENGINE_WORKSPACE = 400_000_000  # vLLM's own tensors beside the token counts of its sampler
CUDA_GRAPHS = 3_000_000_000  # and what vLLM's profiling leaves in the allocator's cache
KV_BLOCK = 128  # tokens that vLLM rounds a sequence up to, at most
FULL = 0.95  # of a device is as much as fragmentation lets one use


@dataclass(frozen=True)
class RoleSizes:
    """One model of the run."""

    name: str
    hf: HFConfig
    kind: Kind = "lm"
    trains: bool = True
    offload: OffloadOptions = ALL_STAY


@dataclass(frozen=True)
class Rollout:
    """The engine of the first role."""

    tp: int
    sequence_tokens: int  # of a prompt and its response at most
    sequences: int  # of a step, of one replica
    unshared: int  # bytes of weights that it does not share with the trainer, on the worst rank
    element: int = 2  # bytes of its numbers
    kv_cache: int | None = None  # --kv-cache-gb; None: what the sequences need, if there is room
    max_num_seqs: int = 1024  # vLLM's default on large GPUs


@dataclass(frozen=True)
class Setup:
    training: Training
    roles: Sequence[RoleSizes]
    rollout: Rollout | None = None


@dataclass(frozen=True)
class Item:
    name: str
    size: int
    counted: bool = True  # in torch.cuda.max_memory_allocated
    on_device: bool = True  # False: the engine sleeps and its memory is free, but torch goes on counting it


@dataclass(frozen=True)
class Phase:
    """A part of a step, and what is there at its peak."""

    name: str
    items: Sequence[Item]

    @property
    def on_device(self) -> int:
        return sum(item.size for item in self.items if item.on_device)

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated says of it."""
        return sum(item.size for item in self.items if item.counted)


@dataclass(frozen=True)
class Estimate:
    """One pipeline stage's rank."""

    stage: int
    phases: Sequence[Phase]
    kv_cache: int  # bytes
    max_num_seqs: int  # sequences that the KV cache holds at a time

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.on_device)

    @property
    def allocated(self) -> int:
        return max(phase.allocated for phase in self.phases)


def role_state(role: RoleSizes, training: Training, stage: int) -> dict[str, int]:
    """Weights, gradients, main parameters and moments of a pipeline stage's rank."""
    sizes = training.sizes
    layout = train_layout(dims(role.hf), sizes.tp, sizes.pp, sizes.vpp, sizes.ep)
    params = megatron_blocks(dims(role.hf), layout, 0, stage, 0, role.kind)
    count, experts = (sum(p.numel for p in params if part in p.key) for part in ("", ".experts."))
    found = {"weights": count * training.element}
    if not role.trains:
        return found
    shard = count
    if training.distributed_optimizer:  # experts are sharded over the ranks that hold the same ones
        shard = -(-(count - experts) // training.dp) - (-experts * sizes.ep // training.dp)
    found["gradients"] = 4 * count  # summed in float32
    if training.bf16:
        found["main parameters"] = 4 * shard
    return found | {"moments": 8 * shard}


def _stays(role: RoleSizes, part: str) -> bool:
    """Whether a part of a role is on the device while another role works."""
    gone = {"weights": role.offload.weights, "gradients": role.offload.gradients}
    return not gone.get(part, role.offload.optimizer)


def kv_bytes_of_sequence(hf: HFConfig, tp: int, tokens: int, element: int) -> int:
    """KV cache that a sequence takes on one rank of an engine of TP ranks, in whole blocks and one to grow."""
    a_token = 2 * hf.layers * max(1, hf.kv_heads // tp) * hf.head_dim * element
    return (-(-tokens // KV_BLOCK) + 1) * KV_BLOCK * a_token


def estimate(setup: Setup, stage: int, device: int | None = None) -> Estimate:
    """Of a rank of a pipeline stage. `device`: bytes of it; beyond one sequence the KV cache takes no more than the
    others leave."""
    training, rollout, policy = setup.training, setup.rollout, setup.roles[0]
    states = [role_state(role, training, stage) for role in setup.roles]
    items = [
        [Item(f"{role.name}: {part}", size) for part, size in state.items()]
        for role, state in zip(setup.roles, states, strict=True)
    ]
    resident = [
        [item for item, part in zip(own, state, strict=True) if _stays(role, part)]
        for role, own, state in zip(setup.roles, items, states, strict=True)
    ]
    fixed = [Item("CUDA context (allowance)", CUDA_CONTEXT, counted=False)] if training.cuda else []
    phases, kv_cache, count = [], 0, 0
    if rollout is not None:
        engine = _engine(policy.hf, rollout, training)
        held = [item for own in resident for item in own] + [*fixed, *engine]
        kv_cache, count = _kv_cache(policy.hf, rollout, sum(i.size for i in held), device)
        cache = Item("engine: KV cache", kv_cache)
        phases.append(Phase("rollout", [*held, cache]))
        asleep = [replace(item, on_device=not training.cuda) for item in (cache, engine[0])]
        fixed += [*asleep, *engine[1:]]
    for index, role in enumerate(setup.roles):
        away = ("main parameters", "moments") if role.offload.optimizer else ()  # they come for the step alone
        present = [item for item, part in zip(items[index], states[index], strict=True) if part not in away]
        others = [item for i, own in enumerate(resident) for item in (present if i == index else own)]
        if role.trains:
            work = activations(role.hf, role.kind, training, stage)
        else:
            work = {"work of the forward pass": forward_work(role.hf, role.kind, training)}
        verb = "update" if role.trains else "forward"
        parts = [Item(f"{role.name}: {name}", size) for name, size in work.items()]
        phases.append(Phase(f"{role.name} {verb}", [*others, *fixed, *parts]))
        if away:
            back = [item for item in items[index] if item not in present]
            phases.append(Phase(f"{role.name} step", [*others, *back, *fixed]))
    return Estimate(stage, phases, kv_cache, count)


def _engine(hf: HFConfig, rollout: Rollout, training: Training) -> list[Item]:
    """Without the KV cache; the weights come first."""
    items = [Item("engine: weights it does not share", rollout.unshared)]
    if training.cuda:
        counts = 4 * rollout.max_num_seqs * -(-hf.vocab // rollout.tp)
        items.append(Item("engine: buffers (allowance)", counts + ENGINE_WORKSPACE))
        items.append(Item("engine: CUDA graphs (allowance)", CUDA_GRAPHS, counted=False))
    return items


def _kv_cache(hf: HFConfig, rollout: Rollout, held: int, device: int | None) -> tuple[int, int]:
    """(bytes, sequences that fit): what the step's sequences need, or what the others leave of the device."""
    one = kv_bytes_of_sequence(hf, rollout.tp, rollout.sequence_tokens, rollout.element)
    if rollout.kv_cache is not None:
        return rollout.kv_cache, min(rollout.sequences, rollout.kv_cache // one)
    most = rollout.sequences if device is None else (int(FULL * device) - held) // one
    count = max(1, min(rollout.sequences, most))
    return count * one, count


def worst_stage(setup: Setup, device: int | None = None) -> Estimate:
    """The pipeline stage whose rank needs the most."""
    stages = range(setup.training.sizes.pp)
    return max((estimate(setup, stage, device) for stage in stages), key=lambda found: found.peak.on_device)


# ---- what to change ----------------------------------------------------------------------------------------------


def _offloaded(setup: Setup, **parts: bool) -> Setup:
    roles = [replace(r, offload=replace(r.offload, **parts)) if r.trains else r for r in setup.roles]
    return replace(setup, roles=roles)


def _trained(setup: Setup, **changes: object) -> Setup:
    return replace(setup, training=replace(setup.training, **changes))


def _of_rollout(setup: Setup, rollout: Rollout, device: int) -> list[tuple[str, Setup]]:
    """A smaller KV cache, and what can wait on the host for its own work."""
    found = []
    if rollout.kv_cache is not None:
        others = worst_stage(replace(setup, rollout=replace(rollout, kv_cache=0)), device).phases[0].on_device
        room = max(0, int(FULL * device) - others) // 10**8 * 10**8  # of 0.1 GB
        one = kv_bytes_of_sequence(setup.roles[0].hf, rollout.tp, rollout.sequence_tokens, rollout.element)
        if one <= room < rollout.kv_cache:
            smaller = replace(setup, rollout=replace(rollout, kv_cache=room))
            found.append((f"--kv-cache-gb {room / 1e9:.1f}", smaller))
    found.append(("--offload-optimizer --offload-gradients", _offloaded(setup, optimizer=True, gradients=True)))
    for flag, idle in (("--offload-critic", lambda role: role.name == "critic"), ("--offload-reference", _frozen)):
        roles = [replace(r, offload=replace(r.offload, weights=True)) if idle(r) else r for r in setup.roles]
        found.append((flag, replace(setup, roles=roles)))
    return found


def _frozen(role: RoleSizes) -> bool:
    return not role.trains


def remedies(setup: Setup, device: int, longest: int) -> list[str]:
    """Flags that alone make the run fit, and the peak with each; `longest`: tokens that a micro-batch must hold."""
    training, found = setup.training, []
    changes: list[tuple[str, Setup]] = []
    tokens = training.tokens // 2
    while tokens >= longest:
        changes.append((f"--max-tokens-per-micro-batch {tokens}", _trained(setup, tokens=tokens)))
        tokens //= 2
    changes.append(("--recompute-granularity full", _trained(setup, recompute=Recompute("full"))))
    if setup.rollout is not None:
        changes += _of_rollout(setup, setup.rollout, device)
    if not training.distributed_optimizer:
        changes.append(("--use-distributed-optimizer", _trained(setup, distributed_optimizer=True)))
    for factor in (2, 4, 8):
        sizes = replace(training.sizes, tp=training.sizes.tp * factor)
        if training.dp % factor == 0:
            text = f"--tensor-model-parallel-size {sizes.tp} on the same ranks"
            changes.append((text, _trained(setup, sizes=sizes, dp=training.dp // factor)))
        text = f"--tensor-model-parallel-size {sizes.tp} on {factor} times as many ranks"
        changes.append((text, _trained(setup, sizes=sizes)))
    taken: set[str] = set()
    for text, changed in changes:
        if (flag := text.split()[0]) in taken:
            continue
        try:
            peak = worst_stage(changed, device).peak.on_device
        except ValueError:  # the layout does not divide the model
            continue
        if peak <= FULL * device:
            taken.add(flag)
            found.append(f"{text} ({peak / 1e9:.1f} GB)")
    return found


def check_fits(setup: Setup, device: int, longest: int) -> Estimate:
    """The worst stage's estimate; ValueError with the flags to change where it needs more than the device has."""
    found = worst_stage(setup, device)
    peak = found.peak
    if peak.on_device <= FULL * device:
        return found
    ways = remedies(setup, device, longest)
    change = "any of: " + ", ".join(ways)
    if not ways:
        cache = "--kv-cache-gb, " if setup.rollout and setup.rollout.kv_cache else ""
        change = (
            f"several of {cache}--max-tokens-per-micro-batch, --recompute-granularity full, --offload-optimizer, and "
        )
        change += "more ranks with --tensor-model-parallel-size"
    raise ValueError(
        f"{peak.name} needs {peak.on_device / 1e9:.1f} GB on a rank of stage {found.stage}, {FULL:.0%} of "
        f"{device / 1e9:.1f} GB are usable; change {change}"
    )
