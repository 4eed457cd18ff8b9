"""What the user sees: one console line a stage, TensorBoard and metrics.jsonl a step. Rank 0 alone writes."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# name -> (unit, meaning): what metrics.jsonl and TensorBoard hold. Logging another name is an error.
METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("1", "mean reward of the step's samples, before any KL penalty"),
    "reward/std": ("1", "standard deviation of those rewards"),
    "reward/min": ("1", "smallest of those rewards"),
    "reward/max": ("1", "largest of those rewards"),
    "reward/zero_variance_groups": (
        "fraction",
        "prompts whose samples all got the same reward (no learning signal with group estimators)",
    ),
    "rollout/samples": ("samples", "responses generated"),
    "rollout/tokens": ("tokens", "response tokens generated"),
    "rollout/length_mean": ("tokens", "mean response length"),
    "rollout/truncated": ("fraction", "responses that the length limit ended"),
    "rollout/seconds": ("s", "time of the generation"),
    "rollout/tokens_per_second": ("tokens/s", "response tokens over that time, all ranks together"),
    "sync/bytes_received": ("B", "weights this rank got from others, busiest rank"),
    "sync/bytes_permuted": ("B", "weights copied within a rank because their order differs, busiest rank"),
    "sync/bytes_aliased": ("B", "engine weights that are the trainer's own memory, rank 0"),
    "sync/seconds": ("s", "time of the weight sync, slowest rank"),
    "correction/logprob_diff_mean": ("nats", "mean |log p_trainer - log p_rollout| over response tokens"),
    "correction/logprob_diff_max": ("nats", "largest |log p_trainer - log p_rollout|"),
    "correction/prob_diff_mean": ("1", "mean |p_trainer - p_rollout| (others call under 0.005 good, over 0.01 bad)"),
    "correction/k3": ("nats", "k3 estimate of KL(rollout || trainer) per token"),
    "policy/loss": ("1", "policy objective with entropy bonus and KL, mean over the step's optimizer steps"),
    "policy/grad_norm": ("1", "global gradient norm before clipping, mean over optimizer steps"),
    "policy/clip_fraction": ("fraction", "tokens whose ratio was clipped"),
    "policy/approx_kl": ("nats", "k3 estimate of KL(old policy || policy) per token during the update"),
    "policy/ratio_mean": ("1", "mean importance ratio; 1 in the first optimizer step"),
    "policy/entropy": ("nats", "mean entropy of the policy per response token"),
    "policy/learning_rate": ("1", "learning rate of the last optimizer step"),
    "policy/skipped_steps": ("steps", "optimizer steps skipped because the gradient was not finite"),
    "critic/loss": ("1", "value loss, mean over optimizer steps"),
    "critic/grad_norm": ("1", "global gradient norm before clipping, mean over optimizer steps"),
    "critic/clip_fraction": ("fraction", "tokens whose value was clipped"),
    "critic/explained_variance": ("1", "1 - Var(returns - values) / Var(returns) of the rollout batch"),
    "critic/learning_rate": ("1", "learning rate of the last optimizer step"),
    "critic/skipped_steps": ("steps", "optimizer steps skipped because the gradient was not finite"),
    "kl/ref_mean": ("nats", "KL estimate to the reference per response token"),
    "kl/ref_sequence": ("nats", "KL estimate to the reference per response"),
    "kl/coef": ("1", "coefficient of that KL"),
    "advantage/mean": ("1", "mean advantage over response tokens"),
    "advantage/std": ("1", "standard deviation of the advantages"),
    "update/seconds": ("s", "time of log-prob passes and optimizer steps"),
    "update/tokens_per_second": ("tokens/s", "prompt and response tokens trained over that time, all ranks together"),
    "step/seconds": ("s", "time of the whole step"),
    "step/epoch": ("epochs", "passes over the prompts begun so far"),
    "memory/peak_gb": ("GB", "most memory held on the device so far, busiest rank (resident memory on the CPU)"),
}
RULE_PREFIX = "reward/rule/"  # + rule name: mean of that rule, unweighted


@dataclass
class Recorder:
    """Collects a step's values; `close_step` writes them."""

    writing: bool  # rank 0
    folder: str
    progress: bool = True
    values: dict[str, float] = field(default_factory=dict)
    _tensorboard: Any = None

    def stage(self, name: str, text: str, **values: float) -> None:
        """Prints `[name] text`; keeps values for the step (keyword a__b is metric a/b)."""
        self.keep({key.replace("__", "/"): value for key, value in values.items()})
        if self.writing:
            print(f"[{name}] {text}", flush=True)

    def keep(self, values: dict[str, float]) -> None:
        """Keeps values for the step without a line."""
        for name in values:
            assert name in METRICS or name.startswith(RULE_PREFIX), f"{name} has no unit and meaning in METRICS"
        self.values |= {name: float(value) for name, value in values.items()}

    def close_step(self, step: int) -> None:
        """Writes what the step kept as one JSON line and as TensorBoard scalars."""
        if self.writing:
            with open(os.path.join(self.folder, "metrics.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **self.values}) + "\n")
            for name, value in self.values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        self.values = {}

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows to samples.jsonl."""
        if self.writing and rows:
            with open(os.path.join(self.folder, "samples.jsonl"), "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Any]:
        """A progress bar on stderr that disappears; yields a function to call once per unit."""
        from tqdm import tqdm

        show = self.writing and self.progress and sys.stderr.isatty()
        with tqdm(total=total, desc=text, leave=False, disable=not show, dynamic_ncols=True) as bar:
            yield lambda n=1: bar.update(n)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def open_recorder(folder: str, is_main: bool, progress: bool) -> Recorder:
    """Makes the output folder on rank 0 and opens its TensorBoard file."""
    if not is_main:
        return Recorder(False, folder)
    from torch.utils.tensorboard import SummaryWriter

    os.makedirs(folder, exist_ok=True)
    return Recorder(True, folder, progress, _tensorboard=SummaryWriter(os.path.join(folder, "tensorboard")))


@contextmanager
def timed() -> Iterator[list[float]]:
    """Seconds of the block, device work included, as the one element of the list after it."""
    from megatron_rl import platform

    seconds = [0.0]
    start = time.perf_counter()
    yield seconds
    platform.synchronize()
    seconds[0] = time.perf_counter() - start


def bytes_text(count: float) -> str:
    """31457280 -> '31.5 MB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("units end with TB")
