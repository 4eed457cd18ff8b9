"""A Hugging Face folder becomes a checkpoint of weights that train_ppo.py --load reads in any layout.

    python tools/convert_hf_to_megatron.py --hf-model DIR --save OUT
    torchrun --nproc_per_node 4 tools/convert_hf_to_megatron.py --hf-model DIR --save OUT

OUT/iter_0000000/policy (critic, for a model with score.weight) is megatron-core's distributed format: its tensors have
no layout, so TP, PP and VPP are those of the run that loads it. No GPU; one tensor in memory at a time.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl.checkpoint.convert import hf_to_megatron, start_workers  # noqa: E402
from megatron_rl.failure import ending_together  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-model", required=True, metavar="DIR", help="folder of a supported family")
    parser.add_argument("--save", required=True, metavar="DIR", help="folder of checkpoints to write into")
    args = parser.parse_args()
    workers, start = start_workers(), time.perf_counter()
    folder, written = hf_to_megatron(args.hf_model, args.save, workers)
    if workers.rank == 0:
        print(f"wrote {folder}: {written / 1e6:,.1f} MB by rank 0 in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    with ending_together():
        main()
