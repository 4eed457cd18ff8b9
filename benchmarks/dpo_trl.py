"""train_dpo.py beside TRL's DPOTrainer: same model, pairs, order and hyperparameters; losses and tokens per second.

    python benchmarks/dpo_trl.py --hf-model DIR --train-data pairs.jsonl [--steps 20] [--fp32] [--out FILE]

Both keep the reference resident. TRL trains float32 weights under bf16 autocast, we bf16 weights with float32 masters.
"""

import argparse
import json
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
from megatron_rl.data.preferences import load_preferences  # noqa: E402
from megatron_rl.flags import DPO  # noqa: E402
from megatron_rl.roles import load_tokenizer  # noqa: E402

Curve = list[tuple[float, float, float]]  # of each step: loss, gradient norm, tokens per second


def flags(options: argparse.Namespace, out: str) -> list[str]:
    """What train_dpo.py is started with."""
    words = ["--hf-model", options.hf_model, "--train-data", options.train_data, "--train-iters", str(options.steps)]
    words += ["--global-batch-size", str(options.pairs), "--lr", "1e-5", "--beta", "0.1", "--reference", "each-step"]
    words += ["--max-length", str(options.max_length), "--max-prompt-length", str(options.max_length // 2)]
    words += ["--max-tokens-per-micro-batch", str(options.tokens), "--no-save-hf", "--output-dir", out]
    return words + (["--no-bf16"] if options.fp32 else ["--bf16"])


def ours(options: argparse.Namespace) -> Curve:
    with tempfile.TemporaryDirectory() as out:
        launch.check(launch.torchrun(1, "train_dpo.py", *flags(options, out), timeout=3600))
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [(r["dpo/loss"], r["dpo/grad_norm"], r["dpo/tokens"] / r["update/seconds"]) for r in rows]


def trl(options: argparse.Namespace) -> Curve:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    tokenizer = load_tokenizer(options.hf_model)
    data = load_preferences(builders.pair_options(parse("train_dpo.py", DPO, flags(options, "none"))), tokenizer)
    batches = [data.next_batch(options.pairs) for _ in range(options.steps)]
    rows = [vars(pair) | {"prompt": "", "chosen": "", "rejected": ""} for batch in batches for pair in batch]
    seconds: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    class SamePairs(DPOTrainer):
        """Our ids in our order."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))  # the log has four digits
            return loss

    with tempfile.TemporaryDirectory() as out:
        config = DPOConfig(
            output_dir=out,
            per_device_train_batch_size=options.pairs,
            max_steps=options.steps,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            beta=0.1,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_length=options.max_length,
            logging_steps=1,
            bf16=not options.fp32,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        model, reference = (AutoModelForCausalLM.from_pretrained(options.hf_model, dtype="float32") for _ in range(2))
        dataset = Dataset.from_list(rows)
        trainer = SamePairs(model, reference, config, train_dataset=dataset, processing_class=tokenizer)
        trainer.add_callback(Clock())
        trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    counts = [sum(2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in batch) for batch in batches]
    return [(a, norm, n / s) for a, norm, n, s in zip(losses, norms, counts, seconds, strict=True)]


def report(options: argparse.Namespace, mine: Curve, theirs: Curve) -> str:
    lines = [f"python {' '.join(sys.argv)}", "", "step   loss ours   loss TRL   difference   norm ours   norm TRL"]
    for step, ((a, norm_a, _), (b, norm_b, _)) in enumerate(zip(mine, theirs, strict=True), start=1):
        lines.append(f"{step:4}   {a:9.5f}  {b:9.5f}   {a - b:10.5f}   {norm_a:9.3f}  {norm_b:9.3f}")
    worst = max(abs(a[0] - b[0]) for a, b in zip(mine, theirs, strict=True))
    speeds = [statistics.median(speed for _, _, speed in curve[1:]) for curve in (mine, theirs)]
    lines += ["", f"largest difference of the losses {worst:.5f}"]
    lines += [f"median tokens per second, prompts included: ours {speeds[0]:,.0f}, TRL {speeds[1]:,.0f}", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--train-data", default="examples/data/preferences.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=4, help="pairs of a step")
    parser.add_argument("--max-length", type=int, default=96, help="tokens of prompt and completion")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of our micro-batches")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--out", default=None, help="file that the result goes to, besides the standard output")
    options = parser.parse_args()
    text = report(options, ours(options), trl(options))
    print(text)
    if options.out:
        Path(options.out).write_text(text)


if __name__ == "__main__":
    main()
