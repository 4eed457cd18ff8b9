"""GRPO of train_ppo.py beside TRL's GRPOTrainer on a CPU: same model, prompts, batch, learning rate, steps, sampling.

    python benchmarks/grpo_trl_cpu.py ours --seed 1     one run, appended to grpo_trl_cpu.jsonl beside this file
    python benchmarks/grpo_trl_cpu.py trl --seed 1
    python benchmarks/grpo_trl_cpu.py replay --seed 1   our trainer on the samples that trl --record FILE left
    python benchmarks/grpo_trl_cpu.py table             the runs of that file as a table

The task: one whole sentence, begun with a capital and ended by the model itself within the limit of tokens.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import launch  # noqa: E402

from megatron_rl import builders  # noqa: E402
from megatron_rl.arguments import parse  # noqa: E402
from megatron_rl.data.prompts import load_prompts  # noqa: E402
from megatron_rl.flags import PPO  # noqa: E402
from megatron_rl.rewards.rules import load_rule  # noqa: E402
from megatron_rl.roles import load_tokenizer  # noqa: E402

RESULTS = Path(__file__).with_suffix(".jsonl")
REWARD = r"format:[A-Z][^.!?]*[.!?]"


def flags(options: argparse.Namespace, out: str) -> list[str]:
    """What train_ppo.py is started with; TRL gets the same from parse() of them."""
    text = f"""--hf-model {options.hf_model} --train-data examples/data/topics.jsonl --max-prompt-length 64
        --rollout-batch-size {options.prompts} --n-samples-per-prompt {options.samples} --temperature 1.0
        --max-response-length {options.tokens} --advantage-estimator grpo --clip-low 0.2 --clip-high 0.2
        --loss-aggregation token-mean --kl-coef 0 --lr {options.lr} --adam-beta2 0.95 --clip-grad 1.0
        --train-iters {options.steps} --seed {options.seed} --vllm-args enforce_eager=true --no-save-hf
        --kv-cache-gb 0.2
        --max-tokens-per-micro-batch 2048 {"--no-bf16" if options.fp32 else "--bf16"} --output-dir {out}"""
    return [*text.split(), "--reward", REWARD]


def ours(options: argparse.Namespace) -> list[dict[str, float]]:
    return _metrics("train_ppo.py", options)


def replay(options: argparse.Namespace) -> list[dict[str, float]]:
    """Our trainer on samples that TRL drew: nothing random is left between the two."""
    return _metrics("benchmarks/grpo_replay.py", options, options.record)


def _metrics(script: str, options: argparse.Namespace, *before: str) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as out:
        launch.check(launch.torchrun(1, script, *before, *flags(options, out), timeout=1800))
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    keys = {"reward": "reward/mean", "length": "rollout/length_mean", "norm": "policy/grad_norm"}
    keys |= {"loss": "policy/loss", "seconds": "step/seconds"}
    return [{k: row[name] for k, name in keys.items()} for row in rows]


def trl(options: argparse.Namespace) -> list[dict[str, float]]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    args = parse("train_ppo.py", PPO, flags(options, "none"))
    tokenizer, rule = load_tokenizer(args.hf_model), load_rule(REWARD)
    data = load_prompts(builders.prompt_options(args), tokenizer)
    prompts = [p for _ in range(args.train_iters) for p in data.next_batch(args.rollout_batch_size)]
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    drawn: list[list[list[int]]] = []

    class Recorded(GRPOTrainer):
        """Keeps the ids of its completions."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            ids, *rest = super()._generate_single_turn(*args, **kwargs)
            drawn.append([list(map(int, completion)) for completion in ids])
            return ids, *rest

    def reward(prompts: list, completions: list, **more: Any) -> list[float]:
        return [rule("", completion[0]["content"], {}) for completion in completions]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=args.rollout_batch_size * args.n_samples_per_prompt,
            num_generations=args.n_samples_per_prompt,
            max_completion_length=args.max_response_length,
            temperature=args.temperature,
            max_steps=args.train_iters,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            adam_beta2=args.adam_beta2,
            weight_decay=args.weight_decay,
            max_grad_norm=args.clip_grad,
            beta=0.0,
            epsilon=args.clip_low,
            epsilon_high=args.clip_high,
            loss_type="dapo",
            scale_rewards="group",
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=args.bf16,
            seed=args.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        model = AutoModelForCausalLM.from_pretrained(args.hf_model, dtype=torch.float32)
        rows = Dataset.from_list([{"prompt": prompt.row["prompt"]} for prompt in prompts])
        trainer = Recorded(model, reward, config, train_dataset=rows, processing_class=tokenizer)
        trainer.add_callback(Clock())
        trainer.train()
    if options.record:
        Path(options.record).write_text(json.dumps(drawn))
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(log) == len(seconds) == args.train_iters, "one row of the log a step"
    keys = {"reward": "reward", "length": "completions/mean_length", "norm": "grad_norm", "loss": "loss"}
    return [
        {k: float(entry[name]) for k, name in keys.items()} | {"seconds": s}
        for entry, s in zip(log, seconds, strict=True)
    ]


def table(width: int = 4) -> str:
    """Mean reward of every `width` steps, and the times, of each run and of each side's mean."""
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    runs.sort(key=lambda run: (run["side"], run["seed"]))
    steps = len(runs[0]["steps"])
    ranges = [slice(i, min(i + width, steps)) for i in range(0, steps, width)]
    heads = [f"steps {part.start + 1} to {part.stop}" for part in ranges]
    lines = ["| run | " + " | ".join(heads) + " | last length | s a step, median | s in all | CPU s in all |"]
    lines.append("|---" * (len(heads) + 5) + "|")
    for side in ("ours", "trl"):
        mine = [run for run in runs if run["side"] == side]
        cells = [_cells(run, ranges) for run in mine]
        lines += [
            f"| {side}, seed {run['seed']} | " + _format(row) + " |" for run, row in zip(mine, cells, strict=True)
        ]
        lines.append(f"| **{side}, mean** | " + _format(_mean(cells)) + " |")
    found = {(run["side"], run["seed"]): run["steps"] for run in runs}
    lines += ["", "| seed | step | loss ours | loss TRL | norm ours | norm TRL |", "|---" * 6 + "|"]
    for (side, seed), mine in found.items():
        pairs = zip(mine, found["trl", seed], strict=True) if side == "replay" else ()
        for step, (a, b) in enumerate(pairs, start=1):
            cells = f"{a['loss']:.4f} | {b['loss']:.4f} | {a['norm']:.3f} | {b['norm']:.3f}"
            lines.append(f"| {seed} | {step} | {cells} |")
    return "\n".join(lines)


def _cells(run: dict[str, Any], ranges: list[slice]) -> list[float | None]:
    means = [statistics.mean(step["reward"] for step in run["steps"][part]) for part in ranges]
    length = statistics.mean(step["length"] for step in run["steps"][ranges[-1]])
    median = statistics.median(step["seconds"] for step in run["steps"])
    return [*means, length, median, run["seconds"], run["cpu_seconds"]]


def _mean(rows: list[list[float | None]]) -> list[float | None]:
    """By column, of what is known."""
    known = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [statistics.mean(values) if values else None for values in known]


def _format(cells: list[float | None]) -> str:
    *means, length, median, total, cpu = cells
    times = [f"{length:.1f}", f"{median:.1f}", *("-" if s is None else f"{s:.0f}" for s in (total, cpu))]
    return " | ".join([*(f"{mean:.3f}" for mean in means), *times])


def cpu_seconds() -> float:
    """Of this process and of those that it waited for: other work on the machine does not change it much."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ours", "trl", "replay", "table"])
    parser.add_argument("--hf-model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=1, help="of data order and sampling")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a response at most")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--record", default=None, help="file of TRL's completions: trl writes it, replay reads it")
    options = parser.parse_args()
    if options.what == "table":
        return print(table())
    start = time.perf_counter()
    steps = {"ours": ours, "trl": trl, "replay": replay}[options.what](options)
    times = {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds()}
    run = {"side": options.what, **times, **vars(options), "steps": steps}
    del run["what"]
    with RESULTS.open("a") as file:
        file.write(json.dumps(run) + "\n")
    print(json.dumps(run))


if __name__ == "__main__":
    main()
