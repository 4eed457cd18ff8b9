r"""How far the trainer's log-probabilities of sampled tokens are from the engine's, and how fast both are.

    python benchmarks/engine_agreement.py --hf-model models/SmolLM2-135M-Instruct \
        --train-data examples/data/topics.jsonl --fp32-residual-connection

One rollout a line, nothing is trained. The flags are train_ppo.py's.
"""

import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl import platform  # noqa: E402
from megatron_rl.arguments import layout_sizes, parse  # noqa: E402
from megatron_rl.batch import batch_of  # noqa: E402
from megatron_rl.builders import build_engine, packing_options, prompt_options, sampling_options  # noqa: E402
from megatron_rl.data.packing import plan_micro_batches  # noqa: E402
from megatron_rl.data.prompts import load_prompts  # noqa: E402
from megatron_rl.flags import PPO, count  # noqa: E402
from megatron_rl.initialize import initialize  # noqa: E402
from megatron_rl.logprobs import LogprobOptions  # noqa: E402
from megatron_rl.roles import build_role, load_tokenizer  # noqa: E402
from megatron_rl.rollout.collect import collect  # noqa: E402
from megatron_rl.step import forward_only  # noqa: E402

DEFAULTS = "--rollout-batch-size 16 --n-samples-per-prompt 4 --max-prompt-length 64 --max-response-length 24"


def flags(group) -> None:
    group.add_argument("--rollouts", type=count, default=8, metavar="N", help="rollouts, one line each")


def main() -> None:
    groups = {name: PPO[name] for name in ("model", "layout", "data", "prompts", "batches", "rollout")}
    args = parse("engine_agreement.py", groups | {"benchmark": flags}, [*DEFAULTS.split(), *sys.argv[1:]])
    platform.quiet()
    sizes = layout_sizes(args)
    topology = initialize(sizes.tp, sizes.pp, sizes.vpp, sizes.ep, args.seed, args.distributed_timeout_minutes)
    logprobs = LogprobOptions(args.temperature, args.logprob_chunk_tokens, entropy=False)
    role = build_role("policy", args.hf_model, args, topology, logprobs=logprobs)
    prompts = load_prompts(prompt_options(args), load_tokenizer(args.hf_model))
    engine = build_engine(args, [role], topology)
    engine.sync()
    means = []
    for number in range(args.rollouts):
        asked = prompts.next_batch(args.rollout_batch_size)
        n, sampling = args.n_samples_per_prompt, sampling_options(args)
        started = time.perf_counter()
        samples = collect(engine, asked, n, sampling, args.seed, number, topology)
        generated = time.perf_counter()
        batch = batch_of(samples)
        lengths = [len(sequence) for sequence in batch.sequences]
        plan = plan_micro_batches(lengths, topology.dp_size, packing_options(args))
        ours_BR = forward_only(role, batch, plan, topology)[0]
        scored = time.perf_counter()
        off_K = (ours_BR - batch.rollout_logprobs_BR)[batch.mask_BR].abs()
        means.append(off_K.mean().item())
        speeds = len(off_K) / (generated - started), sum(lengths) / (scored - generated)
        if topology.is_main:
            print(
                f"{number}: mean {means[-1]:.5f} largest {off_K.max():.4f} of {len(off_K)} tokens; "
                f"engine {speeds[0]:.0f} tok/s, trainer's pass {speeds[1]:.0f} tok/s",
                flush=True,
            )
    if topology.is_main:
        mean = torch.tensor(means).mean()
        print(f"all: mean {mean:.5f}, a rollout's {min(means):.5f} to {max(means):.5f}", flush=True)
    os._exit(0)  # vLLM's shutdown waits for nothing that matters here


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"engine_agreement.py: {error}")
