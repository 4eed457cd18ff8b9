"""Run under torchrun by test_checkpoint_layouts.py: trains, saves and loads tiny roles in one layout after the other.

    checkpoint_program.py PLAN.json

PLAN is a list of scenes: {"name", "flags", "steps"}; a scene builds policy and critic in the layout of its
flags, loads, makes so many optimizer steps, saves after each, and says what it did. "limit": files larger than so many
bytes fail from the second save on, as on a full disk; "flip": a file whose last byte is another one during the scene;
"bucket": elements of a gradient bucket, instead of all in one; "export": a folder that gets policy and critic as
Hugging Face folders at the end; "error": the scene is to fail, and says how.
"""

import json
import os
import resource
import sys
from functools import partial
from typing import Any

import torch
from megatron.core import distributed, parallel_state
from megatron.core.distributed import DistributedDataParallelConfig as DDPConfig

from megatron_rl import platform
from megatron_rl.arguments import layout_sizes, parse
from megatron_rl.batch import Batch, MicroBatch
from megatron_rl.checkpoint.load import load
from megatron_rl.checkpoint.save import open_checkpoints
from megatron_rl.data.packing import PackingOptions, plan_micro_batches
from megatron_rl.failure import ending_together
from megatron_rl.flags import PPO
from megatron_rl.initialize import Topology, initialize
from megatron_rl.roles import Role, build_critic, build_policy, export_role
from megatron_rl.step import train_step


def batch_of_step(step: int) -> Batch:
    """Eight sequences, equal in every layout."""
    drawn = torch.Generator().manual_seed(step)
    prompts, answers = torch.arange(8) % 3 + 2, torch.arange(8) % 4 + 3
    total = (prompts + answers).tolist()
    batch = Batch(
        sequences=tuple(torch.randint(3, 131, (n,), generator=drawn) for n in total),
        prompt_lengths_B=prompts,
        response_lengths_B=answers,
        group_B=torch.arange(8),
        truncated_B=torch.zeros(8, dtype=torch.bool),
    )
    weights_BR = batch.mask_BR / batch.mask_BR.sum()
    return Batch(**{**vars(batch), "weights_BR": weights_BR})


def loss(output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Likelihood of a policy's tokens; of a critic's values the distance from 1."""
    values_K = -output[0] if output.shape[0] > 1 else (output[0] - 1) ** 2
    return (values_K * micro.weights_K).sum(), {}


def play(scene: dict[str, Any]) -> None:
    distributed.DistributedDataParallelConfig = partial(DDPConfig, bucket_size=scene.get("bucket"))
    args = parse("train_ppo.py", PPO, scene["flags"])
    sizes = layout_sizes(args)
    topology = initialize(sizes.tp, sizes.pp, sizes.vpp, sizes.ep, args.seed)
    roles: list[Role | None] = [build_policy(args, topology), build_critic(args, topology)]

    def show(text: str) -> None:
        if topology.is_main:
            print(f"{scene['name']}: {text}", flush=True)

    restored = load(args, roles, topology, show)
    done = restored.step if restored else 0
    checkpoints = open_checkpoints(args, topology, show)
    if scene.get("steps", 0) == 0 and args.save:
        checkpoints.save(done, roles, restored.state if restored else {})
    for step in range(done + 1, done + scene.get("steps", 0) + 1):
        train(roles, step, topology)
        if "limit" in scene and step > done + 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (scene["limit"], resource.RLIM_INFINITY))
        checkpoints.after_step(step, roles, {"position": step}, last=step == done + scene["steps"])
    checkpoints.close()
    for role in filter(None, roles) if "export" in scene else ():
        export_role(role, f"{scene['export']}/{role.name}", topology)
    with platform.megatron():
        parallel_state.destroy_model_parallel()


def flip(file: str) -> None:
    with open(file, "r+b") as raw:
        raw.seek(-1, 2)
        (byte,) = raw.read()
        raw.seek(-1, 2)
        raw.write(bytes([byte ^ 1]))


def train(roles: list[Role | None], step: int, topology: Topology) -> None:
    batch = batch_of_step(step)
    plan = plan_micro_batches([len(s) for s in batch.sequences], topology.dp_size, PackingOptions(4096, None))
    for role in filter(None, roles):
        train_step(role, batch, plan, loss, topology)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        scenes = json.load(file)
    for scene in scenes:
        flips = [scene["flip"]] if "flip" in scene and os.environ["RANK"] == "0" else []
        try:
            for file in flips:  # before rank 0 tells the others which checkpoints there are
                flip(file)
            play(scene)
            for file in flips:
                flip(file)
        except (ValueError, OSError) as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if "error" not in scene:
                raise
            print(f"{scene['name']}: {type(error).__name__}: {error}", flush=True)
            with platform.megatron():
                parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    with ending_together():
        main()
