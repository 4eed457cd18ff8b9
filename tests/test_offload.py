"""What leaves the device comes back bitwise, and while it is away its memory is free."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models.tiny import tiny_model
from ppo_cases import FLAGS, bare_batch
from torch import Tensor

from megatron_rl import builders
from megatron_rl.algorithms.losses import loss_weights
from megatron_rl.arguments import parse
from megatron_rl.batch import Batch
from megatron_rl.checkpoint.load import load
from megatron_rl.checkpoint.save import open_checkpoints
from megatron_rl.data.packing import PackingOptions, plan_micro_batches
from megatron_rl.flags import PPO
from megatron_rl.initialize import Topology
from megatron_rl.offload import Parked
from megatron_rl.roles import Role, build_critic, build_policy, build_reference
from megatron_rl.step import forward_only, train_step

OFFLOAD = ("--offload-optimizer", "--offload-gradients", "--offload-reference", "--offload-critic")
MODES = {
    "bf16": (),
    "bf16, optimizer not distributed": ("--no-use-distributed-optimizer",),
    "float32": ("--no-bf16",),  # the main parameters are the model's own, which stay
}


def test_views_survive():
    """Two tensors of one storage and one alone leave, are empty, and come back in every view; a later one joins."""
    base, alone = torch.arange(10.0), torch.full((3, 2), 7.0)
    view, tensors = base[4:6], [base[:5], base[2:], alone]
    parked = Parked(lambda: tensors)
    for new in (0.5, 0.25):
        parked.leave()
        assert base.untyped_storage().nbytes() == alone.untyped_storage().nbytes() == 0
        parked.leave()  # once more changes nothing
        parked.come_back()
        parked.wait()
        assert view.tolist() == [4.0, 5.0] and alone.eq(7).all()
        tensors.append(torch.full((4,), new))
    assert tensors[-2].eq(0.5).all()


def roles_of(folder: Path, topology: Topology, *flags: str) -> tuple[dict[str, Role], dict]:
    """Policy, critic and reference, and the losses of the first two."""
    args = parse("train_ppo.py", PPO, ["--hf-model", str(folder), *FLAGS, *flags])
    roles = (build_policy(args, topology), build_critic(args, topology), build_reference(args, topology))
    losses = {"policy": builders.policy_loss_of(args, 0.1), "critic": builders.value_loss_of(args)}
    return {role.name: role for role in roles if role is not None}, losses


def batch() -> Batch:
    bare, drawn = bare_batch("spread"), torch.Generator().manual_seed(3)
    names = ("old_logprobs_BR", "ref_logprobs_BR", "values_BR", "advantages_BR", "returns_BR")
    columns = {name: torch.randn(bare.mask_BR.shape, generator=drawn) for name in names}
    return replace(bare, **columns, weights_BR=loss_weights(bare.mask_BR, "token-mean"))


def state_of(role: Role) -> list[Tensor]:
    """Weights, main parameters and moments."""
    found = [p.detach() for chunk in role.chunks for p in chunk.parameters()]
    for part in getattr(role.optimizer, "chained_optimizers", [role.optimizer]):
        found += [p.data for group in part.optimizer.param_groups for p in group["params"]]
        found += [state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return found


def run(folder: Path, topology: Topology, *flags: str, saved: Path | None = None) -> list[Tensor]:
    """Three steps with log-prob passes between: all that was computed, and the state in the end. With `saved` the
    third step is that of new roles, which go on from a checkpoint there."""
    roles, losses = roles_of(folder, topology, *flags)
    given, seen = batch(), []
    plan = plan_micro_batches([len(s) for s in given.sequences], 1, PackingOptions(4096, 3))
    for number in range(3):
        for role in roles.values():
            role.memory.leave()
        for role in roles.values():
            seen.append(forward_only(role, given, plan, topology))
        for name, loss in losses.items():
            with roles[name].memory.for_training():
                for _ in range(2):
                    done = train_step(roles[name], given, plan, loss, topology)
                    seen.append(torch.tensor(done.grad_norm))
        if saved is not None and number == 1:
            where = ("--save", str(saved), "--load", str(saved))
            args = parse("train_ppo.py", PPO, ["--hf-model", str(folder), *FLAGS, *flags, *where])
            open_checkpoints(args, topology, lambda text: None).after_step(2, list(roles.values()), {}, last=True)
            roles, losses = roles_of(folder, topology, *flags)
            for role in roles.values():
                role.memory.leave()
            assert load(args, list(roles.values()), topology, lambda text: None).step == 2
    for name in losses:
        with roles[name].memory.for_forward(), roles[name].memory.for_update():
            seen += [tensor.cpu().clone() for tensor in state_of(roles[name])]
    return seen


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 40 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_offloaded_training_is_bitwise(mode: str, alone: Topology, tmp_path: Path):
    """With every flag, three steps of policy, critic and reference give the very bits that they give without; also
    where a run of new roles goes on from a checkpoint of the second step."""
    folder, flags = tiny_model(tmp_path / "model", "llama3", num_hidden_layers=2), MODES[mode]
    plain = run(folder, alone, *flags)
    assert same(plain, run(folder, alone, *flags, *OFFLOAD))
    assert same(plain, run(folder, alone, *flags, *OFFLOAD, saved=tmp_path / "saved"))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_it_is_on_the_device(mode: str, alone: Topology, tmp_path: Path):
    """Away, storages are empty: in bf16 of 12 bytes of state a parameter, of all gradients; policy's weights stay."""
    folder = tiny_model(tmp_path, "llama3", num_hidden_layers=2)
    roles, losses = roles_of(folder, alone, *MODES[mode], *OFFLOAD)
    policy, given = roles["policy"], batch()
    addresses = [p.data_ptr() for chunk in policy.chunks for p in chunk.parameters()]
    with policy.memory.for_training():
        train_step(policy, given, plan_micro_batches([99] * 8, 1, PackingOptions(4096)), losses["policy"], alone)
    with policy.memory.for_update():
        count = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())
        held = sum(t.nbytes for t in state_of(policy) if t.untyped_storage().nbytes()) / count
        assert held == (2 + 12 if mode.startswith("bf16") else 4 + 12)
    for role in roles.values():
        role.memory.leave()
    left = [t for t in state_of(policy) if t.untyped_storage().nbytes()]
    weights = len(addresses) if mode.startswith("bf16") else 2 * len(addresses)
    assert len(left) == weights and [t.data_ptr() for t in left[: len(addresses)]] == addresses
    for chunk in policy.chunks:
        assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in chunk.buffers)
    for name in ("critic", "reference"):
        stays = [p for chunk in roles[name].chunks for p in chunk.parameters() if p.untyped_storage().nbytes()]
        assert not stays, name


LARGER = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_offloaded_training_is_bitwise_on_cuda(mode: str, alone: Topology, tmp_path: Path):
    """The same on CUDA, where the copies run beside the computation, with a model large enough to take some time."""
    folder, flags = tiny_model(tmp_path / "model", "llama3", num_hidden_layers=4, **LARGER), MODES[mode]
    plain = run(folder, alone, *flags)
    assert same(plain, run(folder, alone, *flags)), "the kernels themselves must repeat their bits"
    assert same(plain, run(folder, alone, *flags, *OFFLOAD))
    assert same(plain, run(folder, alone, *flags, *OFFLOAD, saved=tmp_path / "saved"))


@pytest.mark.gpu
def test_device_memory_falls_by_the_predicted_bytes(alone: Topology, tmp_path: Path):
    """On CUDA 12 bytes a trained parameter leave after its step, then 4 of gradients and the 2 of the critic; nothing
    grows over ten steps."""
    before = torch.cuda.memory_allocated()
    roles, losses = roles_of(tiny_model(tmp_path, "llama3", num_hidden_layers=4, **LARGER), alone, *OFFLOAD)
    given = batch()
    plan = plan_micro_batches([len(s) for s in given.sequences], 1, PackingOptions(4096))
    counts = {name: sum(p.numel() for c in role.chunks for p in c.parameters()) for name, role in roles.items()}
    for role in roles.values():
        role.memory.leave()
    away, host = [], []
    for _ in range(10):
        for name, loss in losses.items():
            with roles[name].memory.for_training():
                train_step(roles[name], given, plan, loss, alone)
                with roles[name].memory.for_update():
                    torch.cuda.synchronize()
                    full = torch.cuda.memory_allocated()
                held = torch.cuda.memory_allocated()
            left = torch.cuda.memory_allocated()
            assert full - held == pytest.approx(12 * counts[name], rel=0.01), name
            assert held - left == pytest.approx((6 if name == "critic" else 4) * counts[name], rel=0.01), name
        forward_only(roles["reference"], given, plan, alone)
        torch.cuda.synchronize()
        away.append(torch.cuda.memory_allocated())
        with open("/proc/self/statm") as file:
            host.append(int(file.read().split()[1]))
    assert away[2:] == [away[2]] * 8
    assert away[2] - before < 2 * counts["policy"] + (100 << 20)  # the policy's weights, and what little else there is
    assert max(host[3:]) - min(host[3:]) < 2000  # pages
