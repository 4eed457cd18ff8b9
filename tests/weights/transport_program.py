"""Run under torchrun by test_transport.py: a plan's targets after transport, compared with the HF tensors."""

import sys

import torch
import torch.distributed as dist

from megatron_rl.weights.arch import Dims
from megatron_rl.weights.layouts import hf_shapes, megatron_shards, train_layout
from megatron_rl.weights.overlap import Overlap
from megatron_rl.weights.plan import Reshard, default_placement
from megatron_rl.weights.rects import Rect
from megatron_rl.weights.transport import Transport, view
from megatron_rl.weights.vllm_like import vllm_like_blocks

SIZES = Dims("qwen2", layers=6, hidden=16, ffn=24, heads=8, kv_heads=4, head_dim=4, vocab=70, tied=False)
# tp, pp, rollout tp, bucket bytes: tensors larger than a bucket, a row larger than a bucket, everything in one
CASES = [(1, 4, 1, 64), (2, 2, 1, 1000), (2, 2, 4, 17), (4, 1, 2, 1 << 20), (1, 1, 4, 333), (4, 1, 4, 100)]


DTYPES = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]


def fill(params: tuple, hf: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {}
    for param in params:
        tensors[param.key] = torch.zeros(param.shape, dtype=dtype)
        for b in param.blocks:
            whole = hf[b.hf].reshape(-1, hf[b.hf].shape[-1])
            block = whole[b.row : b.row + b.rows, b.col : b.col + b.cols]
            into = view(tensors[param.key], Rect(b.param, b.offset, b.stride, b.rows, b.cols))
            into.copy_(block.reshape(into.shape))
    return tensors


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, (tp, pp, rollout_tp, bucket) in enumerate(CASES):
        before, after = DTYPES[number % 3]
        coordinates = [(r % tp, r // (world // pp), 0) for r in range(world)]  # tp, then dp, then pp
        held, of_rank = megatron_shards(SIZES, train_layout(SIZES, tp, pp), coordinates)
        targets = [vllm_like_blocks(SIZES, t, rollout_tp) for t in range(rollout_tp)]
        overlap = Overlap(held, targets, [param.key for param in targets[0]])  # no alias: everything moves
        placement = default_placement(world, rollout_tp)
        plan = Reshard(overlap, of_rank, placement, world).plan(rank)
        mine = targets[placement[rank][1]]
        sources = fill(held[of_rank[rank]], {n: torch.zeros(s) for n, s in hf_shapes(SIZES).items()}, before)
        got = {p.key: torch.full(p.shape, float("nan"), dtype=after) for p in mine}
        transport = Transport(plan, sources, got, bucket, (before, after) if before != after else None)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            hf = {n: torch.randn(s, generator=generator) for n, s in hf_shapes(SIZES).items()}
            for name, tensor in fill(held[of_rank[rank]], hf, before).items():
                sources[name].copy_(tensor)
            moved = transport.run()
            for name, tensor in fill(mine, hf, before).items():
                assert torch.equal(got[name], tensor.to(after)), (tp, pp, rollout_tp, bucket, step, name)
            needed = sum(p.numel for p in mine) - sum(rect.numel for rect in plan.zeros)
            assert (
                moved.bytes_received / 2 + moved.bytes_permuted / after.itemsize == needed
            )  # the smaller type travels
            largest = max((p.flat.nbytes for r in transport.sends + transport.receives for p in r), default=0)
            assert largest <= bucket, (largest, bucket)
    dist.barrier()
    sys.stdout.write(f"rank {rank}: {len(CASES)} cases\n")


if __name__ == "__main__":
    main()
