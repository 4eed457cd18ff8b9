"""train_dpo.py beside TRL's DPOTrainer: same model, pairs, order and hyperparameters; losses and tokens per second.

    python benchmarks/dpo_trl.py [--hf-model DIR] [--train-data pairs.jsonl] [--steps 20] [--seeds 1234 ...] [--out F]

Both keep the reference resident. In float32 the two are one curve. In bfloat16 they round in different places: TRL
runs float32 weights under autocast (residual stream, norms and input embedding in float32, logits in bfloat16), we
bfloat16 weights with float32 masters (residual stream in bfloat16, or in float32 by flag; logits in float32). Each is
compared with float32, and so is TRL with all of its weights read in bfloat16 ("rounded"), with and without autocast.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import launch  # noqa: E402

from megatron_rl import builders  # noqa: E402
from megatron_rl.arguments import parse  # noqa: E402
from megatron_rl.batch import PreferencePair  # noqa: E402
from megatron_rl.data.preferences import load_preferences  # noqa: E402
from megatron_rl.flags import DPO  # noqa: E402
from megatron_rl.roles import load_tokenizer  # noqa: E402

Curve = list[tuple[float, float]]  # of each step: loss, tokens per second (prompts included)
OURS = {"fp32": ["--no-bf16"], "bf16": ["--bf16"], "bf16+residual": ["--bf16", "--fp32-residual-connection"]}


def flags(options: argparse.Namespace, seed: int, out: str) -> list[str]:
    """What train_dpo.py is started with, but for the precision."""
    words = ["--hf-model", options.hf_model, "--train-data", options.train_data, "--train-iters", str(options.steps)]
    words += ["--global-batch-size", str(options.pairs), "--lr", "1e-5", "--beta", "0.1", "--reference", "each-step"]
    words += ["--max-length", str(options.max_length), "--max-prompt-length", str(options.max_length // 2)]
    words += ["--max-tokens-per-micro-batch", str(options.tokens), "--no-save-hf", "--output-dir", out]
    return [*words, "--seed", str(seed)]


def ours(options: argparse.Namespace, seed: int, precision: str) -> Curve:
    with tempfile.TemporaryDirectory() as out:
        words = flags(options, seed, out) + OURS[precision]
        launch.check(launch.torchrun(1, "train_dpo.py", *words, timeout=3600))
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [(r["dpo/loss"], r["dpo/tokens"] / r["update/seconds"]) for r in rows]


@dataclass(frozen=True)
class TrlOptions:
    """How TRL runs; everything else is the same for both."""

    bf16: bool  # autocast
    weights: str = "float32"  # dtype of the model, and of Adam's state
    pairs: int = 2  # of a micro-batch
    micro_batches: int = 1  # of a step
    max_length: int = 96
    rounded: bool = False  # all weights are read in bfloat16, those too that autocast leaves in float32
    max_seconds: float = math.inf  # no step begins later than this after the first one began


def read_rounded(model: Any) -> None:
    """Every weight is read as bfloat16, as products do it under autocast; gradients pass through."""
    import torch

    def rounded(weight: Any) -> Any:
        return weight + (weight.bfloat16().float() - weight).detach()

    def norm(module: Any, x: Any) -> Any:
        x = x.float()
        return rounded(module.weight) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))

    def product(module: Any, x: Any) -> Any:
        return torch.nn.functional.linear(x, rounded(module.weight), module.bias)

    model.get_input_embeddings().register_forward_hook(lambda module, given, out: rounded(out))
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = partial(norm, module)
        elif isinstance(module, torch.nn.Linear):
            module.forward = partial(product, module)


def run_trl(folder: str, batches: list[list[PreferencePair]], how: TrlOptions) -> tuple[list[float], list[float]]:
    """(loss of every micro-batch, seconds of every step) of DPOTrainer on these pairs in this order."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    seconds: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.start)
            control.should_training_stop |= sum(seconds) > how.max_seconds

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
            per_device_train_batch_size=how.pairs,
            gradient_accumulation_steps=how.micro_batches,
            max_steps=len(batches),
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            beta=0.1,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_length=how.max_length,
            logging_steps=1,
            bf16=how.bf16,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        model, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=how.weights) for _ in range(2))
        if how.rounded:
            read_rounded(model)
        rows = [vars(pair) | {"prompt": "", "chosen": "", "rejected": ""} for batch in batches for pair in batch]
        rest = {"train_dataset": Dataset.from_list(rows), "processing_class": load_tokenizer(folder)}
        trainer = SamePairs(model, reference, config, **rest)
        trainer.add_callback(Clock())
        trainer.train()
    return losses, seconds


def tokens(batch: list[PreferencePair]) -> int:
    return sum(2 * len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids) for pair in batch)


def trl(options: argparse.Namespace, seed: int, bf16: bool, rounded: bool = False) -> Curve:
    args = parse("train_dpo.py", DPO, flags(options, seed, "none"))
    data = load_preferences(builders.pair_options(args), load_tokenizer(options.hf_model))
    batches = [data.next_batch(options.pairs) for _ in range(options.steps)]
    how = TrlOptions(bf16, pairs=options.pairs, max_length=options.max_length, rounded=rounded)
    losses, seconds = run_trl(options.hf_model, batches, how)
    return [(loss, tokens(batch) / s) for loss, batch, s in zip(losses, batches, seconds, strict=True)]


def distance(curve: Curve, exact: Curve) -> str:
    apart = [a[0] - b[0] for a, b in zip(curve, exact, strict=True)]
    mean, size, most = sum(apart) / len(apart), sum(map(abs, apart)) / len(apart), max(map(abs, apart))
    return f"mean {mean:+.5f}, mean size {size:.5f}, most {most:.5f}"


def report(seed: int, curves: dict[str, Curve]) -> str:
    lines = [f"seed {seed}", "step " + "".join(f"{name:>20}" for name in curves)]
    for step, row in enumerate(zip(*curves.values(), strict=True), start=1):
        lines.append(f"{step:4} " + "".join(f"{loss:20.5f}" for loss, _ in row))
    exact = curves["ours fp32"]
    lines += [f"loss minus ours fp32, {name}: {distance(curve, exact)}" for name, curve in curves.items()][1:]
    for name, curve in curves.items():
        lines.append(f"tokens per second, {name}: {statistics.median(speed for _, speed in curve[1:]):,.0f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--train-data", default="examples/data/preferences.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="of the order of the pairs; a run each")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of a step")
    parser.add_argument("--max-length", type=int, default=96, help="tokens of prompt and completion")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of our micro-batches")
    parser.add_argument("--out", default=None, help="file that the result goes to, besides the standard output")
    options = parser.parse_args()
    texts = [f"python {' '.join(sys.argv)}\n"]
    for seed in options.seeds:
        curves = {"ours fp32": ours(options, seed, "fp32"), "TRL fp32": trl(options, seed, bf16=False)}
        curves |= {"ours bf16": ours(options, seed, "bf16"), "TRL bf16": trl(options, seed, bf16=True)}
        curves["ours bf16+residual"] = ours(options, seed, "bf16+residual")
        for name, bf16 in {"TRL bf16 rounded": True, "TRL fp32 rounded": False}.items():
            curves[name] = trl(options, seed, bf16, rounded=True)
        texts.append(report(seed, curves))
        print(texts[-1], flush=True)
        if options.out:
            Path(options.out).write_text("\n".join(texts))


if __name__ == "__main__":
    main()
