"""What a run will hold on each GPU, item by item, from config.json and the run's flags, without a GPU or any weights.

    python tools/estimate_memory.py --gpu-memory-gb 141 ppo --world-size 8 --hf-model DIR --train-data FILE [flags]
    python tools/estimate_memory.py --gpu-memory-gb 80 dpo --world-size 8 --hf-model DIR --train-data FILE [flags]

The flags behind ppo or dpo are those of train_ppo.py or train_dpo.py. Data need not be there. GB are 1e9 bytes. Where
the run does not fit, it says by how much, and which flags alone would make it fit.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl import unused  # noqa: E402
from megatron_rl.arguments import parse, validate_dpo, validate_ppo, world_size  # noqa: E402
from megatron_rl.failure import ending_together  # noqa: E402
from megatron_rl.flag_types import amount  # noqa: E402
from megatron_rl.flags import DPO, PPO  # noqa: E402
from megatron_rl.memory.estimate import check_fits  # noqa: E402
from megatron_rl.memory.setup import dpo_setup, ppo_setup, table  # noqa: E402
from megatron_rl.models.config import read_hf_config  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-memory-gb", type=amount, required=True, metavar="GB", help="memory of one GPU in GB")
    parser.add_argument("script", choices=["ppo", "dpo"], help="whose flags follow")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of train_ppo.py or train_dpo.py")
    own = parser.parse_args(argv)
    parts = {"ppo": (PPO, unused.PPO, validate_ppo, ppo_setup), "dpo": (DPO, unused.DPO, validate_dpo, dpo_setup)}
    groups, rules, validate, setup_of = parts[own.script]
    args = parse(f"train_{own.script}.py", groups, [*own.flags, "--dry-run"])
    hf, warnings = read_hf_config(args.hf_model), unused.unused_flags(args, groups, rules)
    there = {"dataset_class": "", "eval_data": [], "output_dir": ".", "save_hf": False, "save": args.save and "."}
    validate(argparse.Namespace(**vars(args) | there), hf)  # of the run's files only config.json need be there
    longest = 2 * args.max_length if own.script == "dpo" else args.max_prompt_length + args.max_response_length
    setup, device = setup_of(args, hf), int(own.gpu_memory_gb * 1e9)
    found = check_fits(setup, device, longest)
    sizes = setup.training.sizes
    print(
        f"{args.hf_model}: {world_size(args)} ranks = TP {sizes.tp} x PP {sizes.pp} x DP {setup.training.dp}, "
        f"{setup.training.tokens:,} tokens a micro-batch"
    )
    print("\n".join([*table(setup, found, device), *(f"warning: {text}" for text in warnings)]))


if __name__ == "__main__":
    with ending_together():
        main()
