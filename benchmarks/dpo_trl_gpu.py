"""TRL's DPOTrainer on one GPU on the pairs, batches and model of a train_dpo.py run; tokens per second of its steps.

    python tools/random_model.py qwen2.5-1.5b --out /tmp/q15 --tokenizer models/SmolLM2-135M-Instruct
    python benchmarks/dpo_trl_gpu.py --hf-model /tmp/q15 --train-data /tmp/pairs.jsonl
    torchrun --standalone --nproc_per_node 1 train_dpo.py --hf-model /tmp/q15 --train-data /tmp/pairs.jsonl \\
        --no-apply-chat-template --max-length 2048 --max-tokens-per-micro-batch 16384 --global-batch-size 64 \\
        --train-iters 8 --lr 1e-5 --reference each-step --no-save-hf --output-dir /tmp/dpo_ours

The file of pairs is written where it is not there: prompts of 60 words, completions of 100 to 900. TRL pads its
micro-batches, we pack ours. With both weights it runs twice: float32 under autocast has our precision (float32 masters
and moments), bfloat16 has no master weights. It begins no step after --seconds of each. Ours prints its tokens per
second in every [step] line; the first step of both warms up.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from dpo_trl import TrlOptions, run_trl, tokens  # noqa: E402

from megatron_rl import builders  # noqa: E402
from megatron_rl.arguments import parse  # noqa: E402
from megatron_rl.data.preferences import load_preferences  # noqa: E402
from megatron_rl.flags import DPO  # noqa: E402
from megatron_rl.roles import load_tokenizer  # noqa: E402

WORDS = (
    "the a of and water house light under green walks stone river many small never people when night over song".split()
)


def write_pairs(path: Path, count: int) -> None:
    choose = random.Random(1)

    def text(words: int) -> str:
        return " ".join(choose.choices(WORDS, k=words))

    with open(path, "w") as file:
        for _ in range(count):
            sizes = {"prompt": 60, "chosen": choose.randint(100, 900), "rejected": choose.randint(100, 900)}
            row = {key: (" " if key != "prompt" else "") + text(words) for key, words in sizes.items()}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-model", required=True)
    parser.add_argument("--train-data", type=Path, required=True)
    parser.add_argument("--pairs-written", type=int, default=256, help="pairs of the file, where it is written")
    parser.add_argument("--pairs", type=int, default=64, help="pairs of a step")
    parser.add_argument("--micro-pairs", type=int, default=4, help="pairs of a micro-batch of TRL")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20, help="of each run, after which no step begins")
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    options = parser.parse_args()
    if not options.train_data.exists():
        write_pairs(options.train_data, options.pairs_written)
    words = ["--hf-model", options.hf_model, "--train-data", str(options.train_data), "--no-apply-chat-template"]
    args = parse("train_dpo.py", DPO, [*words, "--max-length", str(options.max_length)])
    data = load_preferences(builders.pair_options(args), load_tokenizer(options.hf_model))
    batches = [data.next_batch(options.pairs) for _ in range(options.steps)]
    for weights in options.weights:
        how = TrlOptions(
            True,
            weights,
            options.micro_pairs,
            options.pairs // options.micro_pairs,
            options.max_length,
            options.seconds,
        )
        seconds = run_trl(options.hf_model, batches, how)[1]
        speeds = [tokens(batch) / s for batch, s in zip(batches, seconds, strict=False)]
        for step, (speed, s) in enumerate(zip(speeds, seconds, strict=True), start=1):
            print(f"TRL, {weights} weights, step {step}: {s:.2f} s, {speed:,.0f} tokens/s")
        print(f"TRL, {weights} weights: median {statistics.median(speeds[1:] or speeds):,.0f} tokens/s\n", flush=True)


if __name__ == "__main__":
    main()
