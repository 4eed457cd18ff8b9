"""A role of a checkpoint, of any layout, becomes a Hugging Face folder that transformers and vLLM load.

    python tools/convert_megatron_to_hf.py --load CHECKPOINTS --save OUT
    torchrun --nproc_per_node 4 tools/convert_megatron_to_hf.py --load CHECKPOINTS --save OUT --role critic

Config, tokenizer and chat template are those that the checkpoint keeps. No GPU; in memory at a time are one tensor and
one output shard.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl.checkpoint.convert import megatron_to_hf, start_workers  # noqa: E402
from megatron_rl.failure import ending_together  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="folder of checkpoints, or one, or a role's in it"
    )
    parser.add_argument("--save", required=True, metavar="DIR", help="HF folder to write")
    parser.add_argument("--role", default="policy", help="policy or critic (default: policy)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of an output file (default: 5GB)")
    parser.add_argument("--hf-model", default=None, metavar="DIR", help="config and tokenizer from here instead")
    args = parser.parse_args()
    workers, start = start_workers(), time.perf_counter()
    source, written = megatron_to_hf(args.load, args.save, args.role, args.max_shard_size, args.hf_model, workers)
    if workers.rank == 0:
        took = time.perf_counter() - start
        print(f"wrote {args.save} from {source}: {written / 1e6:,.1f} MB by rank 0 in {took:.1f} s")


if __name__ == "__main__":
    with ending_together():
        main()
