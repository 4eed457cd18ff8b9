"""Run by torchrun: optimizer steps on fixed rollouts, in one layout after the other; rank 0 saves what they reported.

Arguments: an output folder, folders of policy and critic, then cases as "tp,pp,sp,dtype,size,tokens,scene": sequences
(0: any number) and tokens of a micro-batch at most; pp "2x2" is two stages of two chunks each. A scene is a fixed
batch, or a function of SCENES. Further words are modules to recompute, or "full".
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ppo_cases import BATCHES, FLAGS, fixed_batch

from megatron_rl import builders, platform
from megatron_rl.arguments import parse
from megatron_rl.batch import Batch
from megatron_rl.data.packing import PackingOptions, plan_micro_batches
from megatron_rl.flags import PPO
from megatron_rl.initialize import Topology, initialize
from megatron_rl.roles import Role, build_critic, build_policy
from megatron_rl.step import StepReport, forward_only, train_step


class Case:
    """Policy and critic in one layout."""

    def __init__(self, text: str, policy_folder: str, critic_folder: str) -> None:
        tp, pp, sp, dtype, size, tokens, _, *recompute = text.split(",")
        pp, _, vpp = pp.partition("x")
        flags = ["--hf-model", policy_folder, "--critic-hf-model", critic_folder]
        flags += ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
        flags += ["--max-tokens-per-micro-batch", tokens] + (["--micro-batch-size", size] if size != "0" else [])
        flags += (["--sequence-parallel"] if sp == "1" else []) + ([] if dtype == "bf16" else ["--no-bf16"])
        if recompute == ["full"]:
            flags += ["--recompute-granularity", "full"]
        elif recompute:
            flags += ["--recompute-granularity", "selective", "--recompute-modules", *recompute]
        self.args = parse("train_ppo.py", PPO, [*flags, *FLAGS])
        self.topology: Topology = initialize(int(tp), int(pp), int(vpp or 1))
        policy, critic = build_policy(self.args, self.topology), build_critic(self.args, self.topology)
        assert critic is not None
        self.policy, self.critic = policy, critic
        self.losses = {
            "policy": builders.policy_loss_of(self.args, self.args.kl_coef),
            "critic": builders.value_loss_of(self.args),
        }

    def batch(self, name: str) -> Batch:
        return fixed_batch(name, self.policy.folder)

    def plan(self, batch: Batch, options: PackingOptions | None = None) -> list[list[list[int]]]:
        options = options or builders.packing_options(self.args)
        return plan_micro_batches([len(s) for s in batch.sequences], self.topology.dp_size, options)

    def step(self, role: Role, batch: Batch, skip: bool = False) -> StepReport:
        return train_step(role, batch, self.plan(batch), self.losses[role.name], self.topology, skip)

    def reports(self, name: str) -> dict[str, Any]:
        """What both roles' passes give before, and what two optimizer steps of each report."""
        batch = self.batch(name)
        seen: dict[str, Any] = {"micro_batches": [len(micros) for micros in self.plan(batch)]}
        for role in (self.policy, self.critic):
            seen[f"{role.name}_forward"] = forward_only(role, batch, self.plan(batch), self.topology)
            for number in (1, 2):
                done = self.step(role, batch)
                seen[f"{role.name}_{number}"] = done.metrics | {"grad_norm": done.grad_norm}
        return seen


def ratio(case: Case) -> dict[str, Any]:
    """First optimizer step after a log-prob pass in micro-batches of one, the step's being larger."""
    batch = case.batch("spread")
    plan = case.plan(batch, PackingOptions(4096, 1))
    logprobs_BR = forward_only(case.policy, batch, plan, case.topology)[0]
    return {"first": case.step(case.policy, replace(batch, old_logprobs_BR=logprobs_BR)).metrics}


def still(case: Case) -> dict[str, Any]:
    """Steps on numbers that are not finite, and steps of learning rate 0."""
    batch = case.batch("spread")
    seen: dict[str, Any] = {}
    for role in (case.policy, case.critic):
        before = [p.detach().clone() for chunk in role.chunks for p in chunk.parameters()]

        def unchanged(role: Role = role, before: list[torch.Tensor] = before) -> bool:
            after = [p for chunk in role.chunks for p in chunk.parameters()]
            return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

        column = "advantages_BR" if role.name == "policy" else "returns_BR"
        for value in (float("nan"), float("inf")):
            bad_BR = getattr(batch, column).clone()
            bad_BR[3, 1] = value
            bad = replace(batch, **{column: bad_BR})
            try:
                case.step(role, bad)
            except FloatingPointError as error:
                seen[f"{role.name}_{value}_raised"] = str(error)
            done = case.step(role, bad, skip=True)
            seen[f"{role.name}_{value}"] = (done.updated, unchanged())
        for group in role.optimizer.param_groups:
            group["lr"] = 0.0
        seen[f"{role.name}_lr0"] = (case.step(role, batch).updated, unchanged())
        role.schedule.step(0)  # sets the learning rate of the flags again
        done = case.step(role, batch)
        seen[f"{role.name}_after"] = (done.updated, unchanged())
    old_BR = batch.old_logprobs_BR.clone()
    old_BR[3, 1] = -float("inf")
    seen["old_logprob"] = case.step(case.policy, replace(batch, old_logprobs_BR=old_BR)).grad_norm
    return seen


SCENES = {"ratio": ratio, "still": still}


def main() -> None:
    from megatron.core import parallel_state

    out, policy_folder, critic_folder, *texts = sys.argv[1:]
    found = {}
    for text in texts:
        scene = text.split(",")[6]
        case = Case(text, policy_folder, critic_folder)
        found[text] = case.reports(scene) if scene in BATCHES else SCENES[scene](case)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, str(found[text]))
        assert len(set(everywhere)) == 1, "every rank reports the same"
        with platform.megatron():
            parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        torch.save(found, Path(out) / f"{dist.get_world_size()}.pt")
    dist.barrier()


main()
