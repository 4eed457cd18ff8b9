"""Run under torchrun by test_engine.py: engines on Megatron parameters cut from HF folders; saves what it saw.

The trainer here is its parameters alone: plain tensors, cut by layouts.py from the HF tensors, changed in place.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.initialize import Topology, initialize
from megatron_rl.models.config import dims, read_hf_config
from megatron_rl.rollout.engine import Engine, EngineOptions, GenerateRequest, SamplingOptions, TrainedWeights
from megatron_rl.weights.layouts import Param, hf_shapes, megatron_shards, train_layout
from megatron_rl.weights.overlap import Overlap
from megatron_rl.weights.plan import best_placement
from megatron_rl.weights.vllm_like import vllm_like_blocks

PROMPTS = (tuple(range(5, 40)), tuple(range(60, 80)))
STEPS = 3
kept: list[tuple["Loaded", TrainedWeights, tuple[Param, ...]]] = []  # every engine of this process


def values(folder: str, step: int) -> dict[str, Tensor]:
    """The HF tensors after `step` optimizer steps: other values each time, the same on every rank.

    vLLM's loader runs with the engine's dtype as torch's default, so the noise names its own.
    """
    hf = load_file(f"{folder}/model.safetensors")
    generator = torch.Generator().manual_seed(step)
    noise = {n: torch.randn(t.shape, generator=generator, dtype=torch.float32) for n, t in sorted(hf.items())}
    return {n: hf[n] + 0.02 * step * noise[n] for n in noise}


def cut(params: tuple[Param, ...], hf: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Megatron parameters made of HF tensors; padding is zero."""
    tensors = {}
    for param in params:
        flat = torch.zeros(param.numel, dtype=dtype)
        for b in param.blocks:
            whole = hf[b.hf].to(dtype)
            whole = whole[None] if whole.ndim == 1 else whole
            into = flat.as_strided((b.rows, b.cols), (b.stride, 1), b.offset)
            into.copy_(whole[b.row : b.row + b.rows, b.col : b.col + b.cols])
        tensors[param.key] = flat.view(param.shape)
    return tensors


class Loaded(Engine):
    """An engine that also keeps what vLLM's own load_weights makes of the HF tensors of every step."""

    folder: str
    own: list[dict[str, Tensor]]

    def _bind(self, model: torch.nn.Module) -> dict[str, Tensor]:
        params = dict(model.named_parameters())
        for param in params.values():
            param.untyped_storage().resize_(param.numel() * param.element_size())
        self.own = []
        for step in range(STEPS):
            for param in params.values():
                param.data.fill_(float("nan"))
            tensors = values(self.folder, step).items()
            model.load_weights((name, tensor.to(self.weights.dtype)) for name, tensor in tensors)
            self.own.append({name: param.data.clone() for name, param in params.items()})
        return super()._bind(model)


def message_of(call: Callable[[], Any]) -> str | None:
    """The message of the exception that the call raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def steps(engine: Loaded, weights: TrainedWeights, mine: tuple[Param, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Three syncs with other weights and a rollout after each."""
    asked = SamplingOptions(max_tokens=12)
    seen: dict[str, Any] = {"reports": [], "drawn": [], "differ": [], "rng_kept": True}

    def draw(seed: int) -> list:
        first = 1000 * seed + 100 * engine.replica
        requests = [GenerateRequest(prompt, first + i) for i, prompt in enumerate(PROMPTS * 2)]
        rng = torch.get_rng_state()
        responses = engine.generate(requests, asked)
        seen["rng_kept"] &= torch.equal(rng, torch.get_rng_state())
        return responses

    seen["refused_before_sync"] = message_of(lambda: draw(0))
    for step in range(STEPS):
        if step:
            engine.sleep()
            seen["refused_asleep"] = message_of(lambda: draw(0))
            seen["refused_wake"] = message_of(engine.wake)
            for name, tensor in cut(mine, values(engine.folder, step), dtype).items():
                weights.tensors[name].copy_(tensor)
        seen["reports"].append(engine.sync())
        engine.wake()
        engine.verify()
        own = engine.own[step]
        seen["differ"] += [n for n, t in engine.live.memory.items() if not torch.equal(t, own[n])]
        seen["differ"] += sorted(own.keys() ^ engine.live.memory.keys())
        seen["drawn"].append(draw(0))
    seen["again"], seen["other_seed"] = draw(0), draw(1)
    last = engine.replica == engine.num_replicas - 1
    seen["uneven"] = len(engine.generate([] if last else [GenerateRequest(PROMPTS[0], 1)], asked))
    return seen


def faults(engine: Loaded, weights: TrainedWeights) -> dict[str, Any]:
    """What must be seen and refused; leaves the engine usable."""
    ask = SamplingOptions(max_tokens=4)
    seen: dict[str, Any] = {}
    aliased = next(iter(engine.plan.aliases.values())).param
    copied = engine.plan.copies[0].src.param
    kept = weights.tensors[aliased].data
    weights.tensors[aliased].data = kept.clone()
    seen["moved_alias"] = message_of(engine.sync)
    seen["refused_after_failure"] = message_of(lambda: engine.generate([GenerateRequest(PROMPTS[0], 1)], ask))
    weights.tensors[aliased].data = kept
    weights.tensors[copied].data = weights.tensors[copied].data.clone() + 1
    engine.sync()
    engine.verify()
    seen["after_move"] = len(engine.generate([GenerateRequest(PROMPTS[0], 1)], ask))
    engine.live.memory[engine.plan.copies[0].dst.param].view(-1)[3] += 1
    seen["corrupt"] = message_of(engine.verify)
    seen["refused_corrupt"] = message_of(lambda: engine.generate([GenerateRequest(PROMPTS[0], 1)], ask))
    engine.sync()
    many = [GenerateRequest((i, *range(3, 112)), i) for i in range(3, 43)]  # more than vLLM takes into one step
    seen["many"] = [len(response.token_ids) for response in engine.generate(many, ask)]
    for name, request, options in (
        ("empty", GenerateRequest((), 1), ask),
        ("long", GenerateRequest((5,) * 127, 1), ask),
        ("foreign", GenerateRequest((500,), 1), ask),
        ("stop", GenerateRequest((5,), 1), SamplingOptions(max_tokens=4, stop=("x",))),
    ):
        seen[name] = message_of(lambda r=request, o=options: engine.generate([r], o))
    greedy = engine.generate([GenerateRequest(PROMPTS[0], 1)], SamplingOptions(max_tokens=8, temperature=0))[0]
    stop = SamplingOptions(max_tokens=8, temperature=0, stop_token_ids=(greedy.token_ids[2],))
    seen["greedy"], seen["stopped"] = greedy, engine.generate([GenerateRequest(PROMPTS[0], 1)], stop)[0]
    return seen


def run(folder: str, args: argparse.Namespace, topology: Topology) -> dict[str, Any]:
    """Builds an engine for the folder, and all that it went through."""
    sizes, dtype = dims(read_hf_config(folder)), getattr(torch, args.dtype)
    layout = train_layout(sizes, args.tp, args.pp, args.vpp, args.ep)
    held, of_rank = megatron_shards(sizes, layout, [(c.tp, c.pp, c.ep) for c in topology.everyone])
    mine = held[of_rank[topology.rank]]
    weights = TrainedWeights(cut(mine, values(folder, 0), dtype), held, of_rank, hf_shapes(sizes))
    like = [vllm_like_blocks(sizes, r, args.rollout_tp) for r in range(args.rollout_tp)]
    options = EngineOptions(
        max_model_len=128,
        dtype=getattr(torch, args.engine_dtype or args.dtype),
        tensor_parallel_size=args.rollout_tp,
        kv_cache_bytes=1 << 24,
        share_weights=not args.copy,
        bucket_bytes=args.bucket_bytes,
        placement=best_placement(Overlap(held, like), of_rank, topology.world_size) if args.place else None,
        vllm_args={"enforce_eager": True, "max_num_seqs": 64},
    )
    rng = torch.get_rng_state()
    Loaded.folder = folder
    engine = Loaded(folder, options, topology, weights)
    rng_kept = torch.equal(rng, torch.get_rng_state())
    seen = steps(engine, weights, mine, dtype)
    seen |= {"replica": engine.replica, "replicas": engine.replicas, "rng_kept_by_start": rng_kept}
    kept.append((engine, weights, mine))
    if args.faults:
        seen["faults"] = faults(engine, weights)
        for name, other, vllm_args in (
            ("bad_vllm_args", dtype, {"enforce_eagre": True}),
            ("quantized", dtype, {"quantization": "fp8"}),
            ("other_dtype", torch.float16, {}),
        ):
            bad = EngineOptions(128, other, vllm_args=vllm_args)
            seen[name] = message_of(lambda bad=bad: Engine(folder, bad, topology, weights))
    return seen


def first_again(folder: str) -> dict[str, Any]:
    """The first engine, after others were built in this process, with the weights of step 1 again."""
    engine, weights, mine = kept[0]
    engine.sleep()
    for name, tensor in cut(mine, values(folder, 1), weights.dtype).items():
        weights.tensors[name].copy_(tensor)
    engine.sync()
    engine.wake()
    engine.verify()
    differ = [name for name, t in engine.live.memory.items() if not torch.equal(t, engine.own[1][name])]
    requests = [GenerateRequest(prompt, 100 * engine.replica + i) for i, prompt in enumerate(PROMPTS * 2)]
    return {"differ_again": differ, "drawn_again": engine.generate(requests, SamplingOptions(max_tokens=12))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("folders", nargs="+")
    for flag in ("tp", "pp", "vpp", "ep", "rollout-tp"):
        parser.add_argument(f"--{flag}", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine-dtype", default=None)
    parser.add_argument("--bucket-bytes", type=int, default=1 << 20)
    for flag in ("copy", "place", "faults"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args()
    topology = initialize(args.tp, args.pp, args.vpp, args.ep)
    seen = {folder: run(folder, args, topology) for folder in args.folders}
    seen[args.folders[0]] |= first_again(args.folders[0])
    torch.save(seen, f"{args.out}/{topology.rank}.pt")
    dist.barrier()
    os._exit(0)  # vLLM's shutdown is not what is tested


if __name__ == "__main__":
    main()
