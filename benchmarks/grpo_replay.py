"""train_ppo.py with recorded completions in place of an engine; grpo_trl_cpu.py starts it, under torchrun on one rank.

torchrun --nproc_per_node 1 benchmarks/grpo_replay.py COMPLETIONS.json [train_ppo.py's flags]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_ppo  # noqa: E402
from megatron_rl import builders  # noqa: E402
from megatron_rl.arguments import parse  # noqa: E402
from megatron_rl.batch import Response  # noqa: E402
from megatron_rl.flags import PPO  # noqa: E402
from megatron_rl.rollout.engine import GenerateRequest, SyncReport  # noqa: E402
from megatron_rl.rollout.startup import eos_token_ids  # noqa: E402


class Replay:
    """Answers each step with the next recorded completions, without log-probabilities: correction/* says nothing."""

    num_replicas, replica, tp_rank = 1, 0, 0

    def __init__(self, steps: list[list[list[int]]], ends: tuple[int, ...]) -> None:
        self.steps, self.ends, self.version = iter(steps), ends, 0

    def sync(self) -> SyncReport:
        self.version += 1
        return SyncReport(0, 0, 0, 0, 0.0, self.version)

    def nothing(self) -> None:
        pass

    verify = wake = sleep = nothing

    def generate(self, requests: Sequence[GenerateRequest], *options: Any) -> list[Response]:
        drawn = next(self.steps)
        assert len(drawn) == len(requests), "a step has as many completions as requests"
        return [Response(tuple(ids), (0.0,) * len(ids), ids[-1] not in self.ends, self.version) for ids in drawn]


def main() -> None:
    recorded, *argv = sys.argv[1:]
    args = parse("train_ppo.py", PPO, argv)
    engine = Replay(json.loads(Path(recorded).read_text()), eos_token_ids(args.hf_model))
    builders.build_engine = lambda *_: engine
    train_ppo.train(args)


if __name__ == "__main__":
    main()
