"""Run by torchrun: train_ppo.py with its flags, which then prints the tokens of its engine's greedy responses."""

import json
import sys

import train_ppo
from megatron_rl import report
from megatron_rl.arguments import parse
from megatron_rl.builders import Run, sampling_options
from megatron_rl.data.prompts import PromptDataset
from megatron_rl.failure import ending_together
from megatron_rl.flags import PPO
from megatron_rl.rollout.collect import collect
from megatron_rl.rollout.engine import Engine

show_samples = report.show_samples


def show_tokens(run: Run, when: str, prompts: PromptDataset, engine: Engine) -> None:
    """show_samples, and after the run a line of JSON: [prompt's tokens, response's tokens] of each prompt."""
    show_samples(run, when, prompts, engine)
    if when == "after":
        greedy = sampling_options(run.args, greedy=True)
        samples = collect(engine, prompts.items, 1, greedy, run.args.seed, 0, run.topology)
        pairs = [[list(sample.prompt.token_ids), list(sample.response.token_ids)] for sample in samples]
        run.recorder.print("tokens " + json.dumps(pairs))


if __name__ == "__main__":
    report.show_samples = show_tokens
    with ending_together():
        train_ppo.train(parse("train_ppo.py", PPO, sys.argv[1:]))
