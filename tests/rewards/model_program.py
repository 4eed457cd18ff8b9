"""Run by torchrun: scores of reward models on fixed samples, in one layout after the other; rank 0 saves them.

Arguments: an output file, the policy's folder, the reward models' folders joined by commas, then "tp,pp,sp" layouts.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from rewards.model_cases import samples

from megatron_rl import builders, platform
from megatron_rl.arguments import parse
from megatron_rl.builders import Run
from megatron_rl.flags import PPO
from megatron_rl.initialize import initialize
from megatron_rl.metrics import open_recorder
from megatron_rl.models.config import read_hf_config
from megatron_rl.rewards.model import score_samples
from megatron_rl.rewards.router import RuleRewards, entries_from_specs
from megatron_rl.roles import load_tokenizer


def main() -> None:
    from megatron.core import parallel_state

    out, policy, folders, *layouts = sys.argv[1:]
    tokenizer, found = load_tokenizer(policy), {}
    taken = samples(tokenizer)
    responses = tokenizer.batch_decode([list(s.response.token_ids) for s in taken], skip_special_tokens=True)
    rewards = RuleRewards(entries_from_specs([], folders.split(",")))
    for layout in layouts:
        tp, pp, sp = layout.split(",")
        flags = ["--hf-model", policy, "--train-data", "none", "--no-bf16", "--max-tokens-per-micro-batch", "120"]
        flags += ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
        args = parse("train_ppo.py", PPO, flags + (["--sequence-parallel"] if sp == "1" else []))
        topology = initialize(int(tp), int(pp))
        run = Run(args, topology, open_recorder(out, dist.get_rank() == 0, progress=False), tokenizer)
        models = builders.build_reward_models(run, rewards, read_hf_config(policy))
        places = {name: range(len(taken)) for name in rewards.models}
        found[layout] = score_samples(models, places, taken, responses, topology, run.recorder.bar, print)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, str(found[layout]))
        assert len(set(everywhere)) == 1, "every rank has the same scores"
        with platform.megatron():
            parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.barrier()


main()
