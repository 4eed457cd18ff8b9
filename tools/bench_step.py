r"""Times of training step, rollout and whole step, each beside what it is compared with; several print one table.

    python tools/bench_step.py update rollout bare --hf-model DIR [flags of train_ppo.py]
    python tools/bench_step.py whole trl --hf-model DIR --rollout-batch-size 64 --n-samples-per-prompt 8 ...

The parts run one after the other, each in a process of its own; rollout and bare at the same time, their measured runs
in turn, where --kv-cache-gb says how much each may take:
    update   log-probability pass and optimizer step on --sequences x --length random tokens, in model FLOP/s; under
             torchrun, alone, in the layout that the flags give: rates are then those of one process
    rollout  tokens per second of the colocated engine with log-probabilities, and again with vLLM's own ones;
             --rollout-backend hf measures transformers' generate, where the forced lengths are only upper limits;
             then the seconds of the engine's sleep, sync (with its wake-up of weights) and wake
    bare     the same requests given to vLLM alone, without log-probabilities, seeds or a trainer
    whole    GRPO steps of train_ppo.py on random prompts of --max-prompt-length tokens
    trl      the same steps by TRL's GRPOTrainer with its colocated vLLM
Model FLOPs are 6 x parameters without the input embedding x tokens plus causal attention (2 and a third forward); what
recomputation adds does not count. Without a GPU everything runs too, for a look at the table.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl import builders, platform  # noqa: E402
from megatron_rl.arguments import layout_sizes, parse  # noqa: E402
from megatron_rl.batch import Batch, Prompt, Response, Sample, batch_of  # noqa: E402
from megatron_rl.data.packing import plan_micro_batches  # noqa: E402
from megatron_rl.failure import ending_together  # noqa: E402
from megatron_rl.flags import PPO, count  # noqa: E402
from megatron_rl.initialize import initialize  # noqa: E402
from megatron_rl.models.config import HFConfig, read_hf_config  # noqa: E402
from megatron_rl.objectives import minibatches  # noqa: E402
from megatron_rl.roles import build_policy  # noqa: E402
from megatron_rl.step import forward_only, train_step  # noqa: E402
from tools.turns import give, run_together, wait_for_turn  # noqa: E402


def flags(group: Any) -> None:
    add = group.add_argument
    add("--sequences", type=count, default=4, metavar="N", help="update: sequences of the batch")
    add("--length", type=count, default=4096, metavar="N", help="update: tokens of a sequence")
    add("--spread", type=count, default=1, metavar="N", help="responses are 1/N to 1 times as long as the longest")
    add("--repeats", type=count, default=3, metavar="N", help="measured runs, after one that is not")
    add("--profile", action="store_true", help="update: where the time of one step goes, by kernel")
    add("--trl-micro-batch", type=count, default=16, metavar="N", help="trl: sequences of a micro-batch")


def parse_flags(argv: Sequence[str]) -> Any:
    defaults = ["--train-data", "none", "--reward", "length", "--kl-coef", "0", "--advantage-estimator", "grpo"]
    defaults += ["--max-prompt-length", "256", "--max-response-length", "512", "--output-dir", "output/bench_step"]
    defaults += [
        "--no-apply-chat-template",
        "--no-progress",
        "--no-save-hf",
        "--log-samples",
        "0",
        "--verify-weights",
        "never",
    ]
    return parse("bench_step.py", PPO | {"benchmark": flags}, [*defaults, *argv])


def parameters(hf: HFConfig) -> int:
    """Without the input embedding, with the output one."""
    attention = hf.hidden * hf.head_dim * 2 * (hf.heads + hf.kv_heads)
    return hf.layers * (attention + 3 * hf.hidden * hf.ffn) + hf.vocab * hf.hidden


def forward_flops(hf: HFConfig, lengths: Sequence[int]) -> float:
    attention = 2 * hf.layers * hf.heads * hf.head_dim * sum(n * n for n in lengths)
    return 2.0 * parameters(hf) * sum(lengths) + attention


def lengths_of(longest: int, count: int, spread: int) -> list[int]:
    """Evenly from longest / spread to longest, in a fixed shuffled order."""
    lengths = torch.linspace(longest / spread, longest, count).round().long()
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(1))].tolist()


def measured(run: Callable[[], None], repeats: int) -> float:
    """Seconds of the fastest of the runs after the first."""
    seconds = []
    for _ in range(repeats + 1):
        wait_for_turn()
        platform.synchronize()
        started = time.perf_counter()
        run()
        platform.synchronize()
        seconds.append(time.perf_counter() - started)
        print(f"{sys.argv[1]}: {seconds[-1]:.3f} s", flush=True)
    return min(seconds[1:])


def ceiling_tflops() -> float:
    """Of square bfloat16 products, the fastest of five rounds: what the machine gives in these minutes."""
    size, device = (8192, "cuda") if platform.device_type() == "cuda" else (512, "cpu")
    factor = torch.randn(size, size, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(20):
            factor @ factor

    return 20 * 2 * size**3 / measured(products, 5) / 1e12


def random_batch(hf: HFConfig, lengths: Sequence[int]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i, n in enumerate(lengths):
        ids = tuple(torch.randint(hf.vocab, (n,), generator=generator).tolist())
        samples.append(Sample(Prompt(i, ids[:1], "", {}), Response(ids[1:], (), True, 1), i))
    batch = batch_of(samples)
    return replace(batch, advantages_BR=torch.randn(batch.mask_BR.shape, generator=generator) * batch.mask_BR)


def update(args: Any) -> dict[str, Any]:
    hf, sizes = read_hf_config(args.hf_model), layout_sizes(args)
    topology = initialize(sizes.tp, sizes.pp, sizes.vpp, sizes.ep, args.seed)
    platform.quiet(args.verbose)
    policy = build_policy(args, topology)
    lengths = lengths_of(args.length, args.sequences, args.spread)
    plan = plan_micro_batches(lengths, topology.dp_size, builders.packing_options(args))
    batch = random_batch(hf, lengths)
    passes = measured(lambda: forward_only(policy, batch, plan, topology), args.repeats)
    old_BR = forward_only(policy, batch, plan, topology)[0]
    part = next(minibatches(replace(batch, old_logprobs_BR=old_BR), builders.minibatch_options(args), 1))
    plan = plan_micro_batches([len(s) for s in part.sequences], topology.dp_size, builders.packing_options(args))
    loss, norms = builders.policy_loss_of(args, 0.0), []

    def step() -> None:
        norms.append(train_step(policy, part, plan, loss, topology).grad_norm)

    platform.reset_peak_memory()
    seconds, flops = measured(step, args.repeats), forward_flops(hf, lengths) / topology.world_size
    if args.profile:
        print_profile(lambda: forward_only(policy, batch, plan, topology))
        print_profile(step)
    return {
        "sequences": args.sequences,
        "tokens": sum(lengths),
        "micro_batches": len(plan[0]),
        "logprobs_s": passes,
        "logprobs_tflops": flops / passes / 1e12,
        "step_s": seconds,
        "step_tok_s": sum(lengths) / seconds / topology.world_size,
        "step_tflops": 3 * flops / seconds / 1e12,
        "peak_gb": platform.max_memory_allocated() / 1e9,
        "ceiling_tflops": ceiling_tflops(),
        "first_grad_norm": norms[0],
    }


def print_profile(step: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if platform.device_type() == "cuda" else [])
    with profile(activities=activities) as recorded:
        step()
        platform.synchronize()
    by = "self_cuda_time_total" if len(activities) > 1 else "self_cpu_time_total"
    print(recorded.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=90))


def requests_of(args: Any, hf: HFConfig) -> list[tuple[int, ...]]:
    shape = (args.rollout_batch_size * args.n_samples_per_prompt, args.max_prompt_length)
    ids = torch.randint(hf.vocab, shape, generator=torch.Generator().manual_seed(2))
    return [tuple(row) for row in ids.tolist()]


@contextmanager
def forced_lengths(args: Any) -> Iterator[None]:
    """Every vLLM request ends at a length given here and not before: random weights would end anywhere."""
    from vllm import LLM, SamplingParams

    generate = LLM.generate

    def generate_forced(self: Any, prompts: Any, sampling_params: Any, **kwargs: Any) -> Any:
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        lengths = lengths_of(args.max_response_length, len(each), args.spread)
        keep = ("temperature", "top_p", "seed", "logprobs", "flat_logprobs", "detokenize")
        forced = [
            SamplingParams(ignore_eos=True, max_tokens=n, **{name: getattr(params, name) for name in keep})
            for params, n in zip(each, lengths, strict=True)
        ]
        return generate(self, prompts, forced, **kwargs)

    LLM.generate = generate_forced
    try:
        yield
    finally:
        LLM.generate = generate


def rollout(args: Any) -> dict[str, Any]:
    from megatron_rl.rollout.engine import GenerateRequest

    hf, sizes = read_hf_config(args.hf_model), layout_sizes(args)
    topology = initialize(sizes.tp, sizes.pp, sizes.vpp, sizes.ep, args.seed)
    platform.quiet(args.verbose)
    engine = builders.build_engine(args, [build_policy(args, topology)], topology)
    engine.sync()
    requests = [GenerateRequest(ids, 7 + 1000 * i) for i, ids in enumerate(requests_of(args, hf))]
    options, found = builders.sampling_options(args), []
    with forced_lengths(args):
        seconds = measured(lambda: found.append(engine.generate(requests, options)), args.repeats)
        result = speed(seconds, sum(len(r.token_ids) for r in found[-1]))
        result |= around_training(engine, args.repeats)
        if args.rollout_backend == "vllm" and engine.capture is not None:
            # the same seeds, so mostly the same tokens: their log-probabilities by vLLM
            ours, engine.capture = found[-1], None
            seconds = measured(lambda: found.append(engine.generate(requests, options)), 1)
            result |= {"vllm_logprobs_tok_s": result["tokens"] / seconds} | differences(ours, found[-1])
    return result


def around_training(engine: Any, repeats: int) -> dict[str, float]:
    """Seconds in which the KV cache leaves and comes back, without training between; the fastest after one."""
    found = []
    for _ in range(repeats + 1):
        times = [time.perf_counter()]
        for part in (engine.sleep, engine.sync, engine.wake):
            part()
            platform.synchronize()
            times.append(time.perf_counter())
        found.append([b - a for a, b in zip(times, times[1:], strict=False)])
    return dict(zip(("sleep_s", "sync_s", "wake_s"), map(min, zip(*found[1:], strict=True)), strict=True))


def speed(seconds: float, tokens: int) -> dict[str, float]:
    return {"tokens": tokens, "rollout_s": seconds, "tok_s": tokens / seconds}


def differences(ours: Sequence[Response], theirs: Sequence[Response]) -> dict[str, float]:
    """Of responses as far as they have the same tokens."""
    same = []
    for a, b in zip(ours, theirs, strict=True):
        rows = zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True)
        same += [abs(x - y) for _, _, x, y in takewhile(lambda row: row[0] == row[1], rows)]
    total = sum(len(r.token_ids) for r in ours)
    return {
        "same_tokens": len(same) / total,
        "logprob_diff_max": max(same),
        "logprob_diff_mean": sum(same) / len(same),
    }


def bare(args: Any) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from megatron_rl.rollout.startup import config_folder

    llm = LLM(
        model=str(config_folder(args.hf_model)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=args.max_prompt_length + args.max_response_length,
        **({"kv_cache_memory_bytes": int(args.kv_cache_gb * 1e9)} if args.kv_cache_gb else {}),
        gpu_memory_utilization=0.1 if args.kv_cache_gb else 0.5,  # with a given cache the least that must be free
        dtype="bfloat16",
        **args.vllm_args,
    )
    prompts = [{"prompt_token_ids": list(ids)} for ids in requests_of(args, read_hf_config(args.hf_model))]
    params, found = SamplingParams(max_tokens=args.max_response_length, detokenize=False), []
    with forced_lengths(args):
        seconds = measured(lambda: found.append(llm.generate(prompts, params, use_tqdm=False)), args.repeats)
    return speed(seconds, sum(len(o.outputs[0].token_ids) for o in found[-1]))


def write_prompts(args: Any) -> str:
    """Random texts of nearly --max-prompt-length tokens, one for each prompt of a step; the file's path."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.hf_model)
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    generator, path = torch.Generator().manual_seed(3), Path(args.output_dir) / "prompts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(args.rollout_batch_size):
            ids = [ordinary[i] for i in torch.randint(len(ordinary), (args.max_prompt_length,), generator=generator)]
            while len(tokenizer(text := tokenizer.decode(ids))["input_ids"]) > args.max_prompt_length:
                ids = ids[: len(ids) - 4]  # a decoded text is not cut into the same tokens again
            file.write(json.dumps({"prompt": text}) + "\n")
    return str(path)


def whole(args: Any) -> dict[str, Any]:
    import train_ppo

    args.train_data, args.train_iters = [write_prompts(args)], args.repeats + 1
    metrics = Path(args.output_dir) / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    with forced_lengths(args):
        train_ppo.train(args)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
    last = min(rows, key=lambda row: row["step/seconds"])
    return {
        "step_s": last["step/seconds"],
        "rollout_s": last["rollout/seconds"],
        "update_s": last["update/seconds"],
        "tokens": last["rollout/tokens"],
        "tok_s": last["rollout/tokens"] / last["step/seconds"],
        "peak_gb": last["memory/peak_gb"],
    }


def trl(args: Any) -> dict[str, Any]:
    from trl_steps import steps  # beside this file

    with forced_lengths(args):
        seconds, rollout_s, tokens = steps(args, write_prompts(args))
    return {
        "step_s": seconds,
        "rollout_s": rollout_s,
        "update_s": seconds - rollout_s,
        "tokens": tokens,
        "tok_s": tokens / seconds,
        "peak_gb": platform.max_memory_allocated() / 1e9,
    }


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "update": update,
    "rollout": rollout,
    "bare": bare,
    "whole": whole,
    "trl": trl,
}


def main() -> None:
    argv = sys.argv[1:]
    parts = list(takewhile(lambda word: not word.startswith("-"), argv))
    flags_given = argv[len(parts) :]
    unknown = [part for part in parts if part not in PARTS]
    args = parse_flags(flags_given)  # also --help
    if unknown or not parts:
        sys.exit(f"bench_step.py: {unknown or 'no part'}: name some of {', '.join(PARTS)}, before the flags")
    if len(parts) == 1:
        result = PARTS[parts[0]](args)
        if int(os.environ.get("RANK", 0)) == 0:
            give(result)
        return
    together = {"rollout", "bare"} if args.kv_cache_gb and {"rollout", "bare"} <= set(parts) else set()
    groups = [[part] for part in parts if part not in together] + ([sorted(together)] if together else [])
    program, results = [sys.executable, __file__], {}
    for group in groups:
        results |= run_together(program, group, flags_given)
    for part in parts:
        result = results[part]
        print(
            f"{part:<8}"
            + ", ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in result.items())
        )
    sys.exit(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    with ending_together():
        main()
