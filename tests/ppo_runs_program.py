"""Run by torchrun: runs of train_ppo.py, one after the other. Argument: a JSON list of argv lists."""

import json
import sys

import train_ppo
from megatron_rl import platform
from megatron_rl.arguments import parse
from megatron_rl.failure import ending_together
from megatron_rl.flags import PPO


def main() -> None:
    from megatron.core import parallel_state

    with open(sys.argv[1], encoding="utf-8") as file:
        runs = json.load(file)
    for argv in runs:
        train_ppo.train(parse("train_ppo.py", PPO, argv))
        with platform.megatron():
            parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    with ending_together():
        main()
