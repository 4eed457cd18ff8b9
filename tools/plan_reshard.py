r"""What a weight sync from a training layout to a rollout layout will move, without a GPU, vLLM or any weights.

    python tools/plan_reshard.py --hf-model benchmarks/models/Qwen2.5-72B \
        --train-tp 8 --train-pp 4 --train-dp 32 --rollout-tp 8

Only config.json is read. vLLM's layout comes from weights/vllm_like.py; in training it is recorded from vLLM itself.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl.failure import ending_together  # noqa: E402
from megatron_rl.flag_types import amount  # noqa: E402
from megatron_rl.models.config import dims, read_hf_config  # noqa: E402
from megatron_rl.weights.arch import Dims  # noqa: E402
from megatron_rl.weights.layouts import hf_shapes, megatron_shards, train_layout  # noqa: E402
from megatron_rl.weights.overlap import Overlap  # noqa: E402
from megatron_rl.weights.plan import (  # noqa: E402
    Placement,
    Reshard,
    Traffic,
    best_placement,
    default_placement,
    hybridflow_bound,
)
from megatron_rl.weights.vllm_like import vllm_like_blocks  # noqa: E402


@dataclass(frozen=True)
class Links:
    """Gigabytes a second and rank, each way, within a node and between nodes."""

    nvlink_gbs: float
    ib_gbs: float


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hf-model", required=True, help="folder with the model's config.json")
    for name, what in (("tp", "tensor-model"), ("pp", "pipeline-model"), ("dp", "data"), ("ep", "expert-model")):
        names = f"--train-{name}", f"--{what}-parallel-size"  # the second is that of train_ppo.py
        parser.add_argument(*names, type=_positive, default=1, help=f"{what}-parallel size of training")
    parser.add_argument("--train-vpp", type=_positive, default=1, help="model chunks of a pipeline stage")
    parser.add_argument("--rollout-tp", type=_positive, default=1, help="tensor-parallel size of a vLLM replica")
    parser.add_argument("--rollout-weights", choices=("alias", "copy"), default="alias", help="as in train_ppo.py")
    parser.add_argument("--dtype-bytes", type=_positive, default=2, help="bytes of an element on both sides")
    parser.add_argument("--gpus-per-node", type=_positive, default=8, help="consecutive ranks that share a node")
    parser.add_argument("--nvlink-gbs", type=amount, default=450, help="GB/s of a rank within a node, each way")
    parser.add_argument("--ib-gbs", type=amount, default=50, help="GB/s of a rank between nodes, each way")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def overlap_of(args: argparse.Namespace, d: Dims) -> tuple[Overlap, list[int]]:
    """What the shards hold of what the rollout ranks need, and the shard of every global rank."""
    tp, dp, ep = args.train_tp, args.train_dp, args.train_ep
    if tp * dp % ep:
        raise ValueError(f"--train-ep {ep} must divide --train-tp {tp} x --train-dp {dp}")
    layout = train_layout(d, tp, args.train_pp, args.train_vpp, ep)
    ranks = range(tp * dp * args.train_pp)
    shards, shard_of_rank = megatron_shards(d, layout, [(r % tp, r // (tp * dp), r % (tp * dp) % ep) for r in ranks])
    targets = [vllm_like_blocks(d, rank, args.rollout_tp) for rank in range(args.rollout_tp)]
    copied = [param.key for param in targets[0]] if args.rollout_weights == "copy" else []
    return Overlap(shards, targets, copied), shard_of_rank


def seconds(traffic: Traffic, dtype_bytes: int, links: Links) -> float:
    """Of the slowest rank: each link carries both directions at once, and the two links work side by side."""
    near = np.maximum(traffic.received_near, traffic.sent_near) / links.nvlink_gbs
    far = np.maximum(traffic.received_far, traffic.sent_far) / links.ib_gbs
    return float(np.maximum(near, far).max()) * dtype_bytes / 1e9


def report(traffic: Traffic, bound: int, dtype_bytes: int, links: Links) -> list[str]:
    """One line a quantity: GB of the mean and of the worst rank."""
    rows = {
        "vLLM's weights": traffic.needed,
        "aliased (stored once)": traffic.aliased,
        "permuted on the rank (stored twice)": traffic.copied,
        "received": traffic.received,
        "  from the same node": traffic.received_near,
        "  from other nodes": traffic.received_far,
        "sent": traffic.sent,
        "  to the same node": traffic.sent_near,
        "  to other nodes": traffic.sent_far,
        "memory beside Megatron's weights": traffic.needed - traffic.aliased,
    }
    gb = dtype_bytes / 1e9
    lines = [f"{'GB a rank':<38}{'mean':>10}{'worst':>10}"]
    lines += [f"{name:<38}{x.mean() * gb:>10.3f}{x.max() * gb:>10.3f}" for name, x in rows.items()]
    lines.append(f"{'least possible received (HybridFlow)':<38}{bound * gb:>10.3f}")
    lines.append(f"{'estimated time of a sync, ms':<38}{seconds(traffic, dtype_bytes, links) * 1e3:>20.1f}")
    return lines


def describe(placement: Placement, rollout_tp: int) -> str:
    """The ranks of the first replica, in the order of its tensor-parallel ranks."""
    ranks = sorted((tp_rank, rank) for rank, (replica, tp_rank) in enumerate(placement) if replica == 0)
    assert len(ranks) == rollout_tp, "a replica has one rank for each tensor-parallel rank"
    return ", ".join(str(rank) for _, rank in ranks)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    d = dims(read_hf_config(args.hf_model))
    start = time.perf_counter()
    overlap, shard_of_rank = overlap_of(args, d)
    world, model = len(shard_of_rank), sum(prod(shape) for shape in hf_shapes(d).values())
    usual = default_placement(world, args.rollout_tp)
    best = best_placement(overlap, shard_of_rank, args.gpus_per_node)
    bound = hybridflow_bound(model, args.train_tp * args.train_pp, args.rollout_tp)
    print(
        f"{Path(args.hf_model).name}: {model:,} parameters, {world} ranks, TP {args.train_tp} PP {args.train_pp} "
        f"DP {args.train_dp} -> {world // args.rollout_tp} replicas of TP {args.rollout_tp}"
    )
    placements = {"consecutive ranks": usual} | ({"ranks that overlap most": best} if best != usual else {})
    for name, placement in placements.items():
        traffic = Reshard(overlap, shard_of_rank, placement, args.gpus_per_node).traffic()
        print(f"\nReplicas of {name}; the first is {describe(placement, args.rollout_tp)}")
        print("\n".join(report(traffic, bound, args.dtype_bytes, Links(args.nvlink_gbs, args.ib_gbs))))
    if best == usual:
        print("\nNo other grouping within a node receives less.")
    print(f"\nPlanned in {time.perf_counter() - start:.2f} s.")


if __name__ == "__main__":
    with ending_together():
        main()
