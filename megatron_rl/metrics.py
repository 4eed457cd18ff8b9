"""What the user sees: one console line a stage, TensorBoard and metrics.jsonl a step. Rank 0 alone writes."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.step import StepReport

# name -> (unit, meaning): what metrics.jsonl and TensorBoard hold. Logging another name is an error.
METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("1", "mean reward of the step's samples, before any KL penalty"),
    "reward/std": ("1", "standard deviation of those rewards"),
    "reward/min": ("1", "smallest of those rewards"),
    "reward/max": ("1", "largest of those rewards"),
    "reward/equal_groups": ("fraction", "samples whose group got equal rewards: no signal for group estimators"),
    "reward/overlong_penalty": ("1", "mean of what --overlong-buffer adds to them, for training alone"),
    "sampling/kept_groups": ("groups", "prompts of the step whose samples differ in reward and are trained on"),
    "sampling/dropped_groups": ("groups", "prompts that --dynamic-sampling dropped because theirs are equal"),
    "sampling/rounds": ("rounds", "rollouts until the batch was full, or --max-sampling-rounds"),
    "rollout/samples": ("samples", "responses generated"),
    "rollout/tokens": ("tokens", "response tokens generated"),
    "rollout/length_mean": ("tokens", "mean response length"),
    "rollout/truncated": ("fraction", "responses that the length limit ended"),
    "rollout/tail": ("fraction", "of the generation's time, after nine tenths of the responses had ended"),
    "rollout/seconds": ("s", "time of the generation"),
    "rollout/tokens_per_second": ("tokens/s", "response tokens over that time, all ranks together"),
    "sync/bytes_received": ("B", "weights that rank 0 got from others"),
    "sync/bytes_permuted": ("B", "weights copied within rank 0 because their order differs"),
    "sync/bytes_aliased": ("B", "engine weights of rank 0 that are the trainer's own memory"),
    "sync/seconds": ("s", "time of the weight sync"),
    "correction/kl": ("nats", "k1 estimate of KL(rollout || trainer) per token"),
    "correction/kl_k3": ("nats", "k3 estimate of it"),
    "correction/ppl_ratio": ("1", "perplexity of the responses to the trainer over that to the engine"),
    "correction/chi2_token": ("1", "mean of (p_trainer / p_rollout)^2 - 1 over tokens"),
    "correction/chi2_seq": ("1", "the same over responses"),
    "correction/logprob_diff_mean": ("nats", "mean |log p_trainer - log p_rollout| over response tokens"),
    "correction/logprob_diff_max": ("nats", "largest |log p_trainer - log p_rollout|"),
    "correction/prob_diff_mean": ("1", "mean |p_trainer - p_rollout|: under 0.005 is good, over 0.01 bad"),
    "correction/prob_diff_max": ("1", "largest |p_trainer - p_rollout|"),
    "correction/effective_sample_size": ("fraction", "1 / mean((w / mean w)^2) of the importance weights w"),
    "correction/truncated": ("fraction", "importance weights that were truncated"),
    "correction/rejected_tokens": ("fraction", "tokens that --rollout-reject left out"),
    "correction/rejected_sequences": ("fraction", "responses of which it left nothing"),
    "kl/token": ("nats", "KL estimate to the reference per response token, before the update"),
    "kl/response": ("nats", "KL estimate to the reference per response, before the update"),
    "kl/coef": ("1", "coefficient of the KL in this step"),
    "advantage/mean": ("1", "mean advantage over response tokens"),
    "advantage/std": ("1", "standard deviation of the advantages"),
    "policy/loss": ("1", "policy objective with entropy bonus and KL, mean over the step's optimizer steps"),
    "policy/grad_norm": ("1", "global gradient norm before clipping, mean over optimizer steps"),
    "policy/learning_rate": ("1", "learning rate of the last optimizer step"),
    "policy/skipped_steps": ("steps", "optimizer steps skipped because the gradient was not finite"),
    "policy/ratio": ("1", "mean importance ratio, mean over optimizer steps; 1 in the first"),
    "policy/clip_fraction": ("fraction", "tokens whose ratio was clipped, mean over optimizer steps"),
    "policy/clip_fraction_low": ("fraction", "of them by the lower bound"),
    "policy/clip_fraction_high": ("fraction", "of them by the upper bound"),
    "policy/dual_clip_fraction": ("fraction", "tokens bounded by --dual-clip"),
    "policy/approx_kl": ("nats", "k1 estimate of KL(old policy || policy) per token during the update"),
    "policy/approx_kl_k3": ("nats", "k3 estimate of it"),
    "policy/entropy": ("nats", "mean entropy of the policy per response token, before the update"),
    "policy/engine_diff": ("nats", "correction/logprob_diff_mean, where --old-logprobs update leaves its pass out"),
    "policy/engine_k3": ("nats", "correction/kl_k3, likewise"),
    "policy/kl": ("nats", "KL estimate to the reference in the loss, mean over optimizer steps"),
    "critic/loss": ("1", "value loss, mean over optimizer steps"),
    "critic/grad_norm": ("1", "global gradient norm before clipping, mean over optimizer steps"),
    "critic/learning_rate": ("1", "learning rate of the last optimizer step"),
    "critic/skipped_steps": ("steps", "optimizer steps skipped because the gradient was not finite"),
    "critic/value": ("1", "mean value"),
    "critic/return": ("1", "mean return, the critic's target"),
    "critic/value_error": ("1", "mean squared difference of value and return"),
    "critic/value_clip_fraction": ("fraction", "tokens whose value was clipped"),
    "critic/explained_variance": ("1", "1 - Var(return - value) / Var(return) of the rollout batch"),
    "dpo/loss": ("1", "mean loss of the step's pairs"),
    "dpo/reward_chosen": ("1", "beta (log p_policy - log p_reference) of the chosen completions, mean over pairs"),
    "dpo/reward_rejected": ("1", "the same of the rejected completions"),
    "dpo/reward_margin": ("1", "mean difference of the two"),
    "dpo/accuracy": ("fraction", "pairs whose chosen completion has the higher reward; equal rewards do not count"),
    "dpo/logprob_chosen": ("nats", "log-probability of the chosen completion, mean over pairs"),
    "dpo/logprob_rejected": ("nats", "the same of the rejected one"),
    "dpo/nll_chosen": ("nats", "negative log-probability of the chosen completion per token, mean over pairs"),
    "dpo/kl": ("nats", "log p_policy - log p_reference of a completion of the data, mean over both of a pair"),
    "dpo/pairs": ("pairs", "pairs of the step"),
    "dpo/tokens": ("tokens", "prompt and response tokens of the step"),
    "dpo/grad_norm": ("1", "global gradient norm before clipping"),
    "dpo/learning_rate": ("1", "learning rate of the step"),
    "dpo/skipped_steps": ("steps", "1 where the step was skipped because the gradient was not finite"),
    "eval/loss": ("1", "mean loss of the held-out pairs"),
    "eval/reward_chosen": ("1", "as dpo/reward_chosen, of the held-out pairs"),
    "eval/reward_rejected": ("1", "as dpo/reward_rejected, of the held-out pairs"),
    "eval/reward_margin": ("1", "as dpo/reward_margin, of the held-out pairs"),
    "eval/accuracy": ("fraction", "as dpo/accuracy, of the held-out pairs"),
    "eval/logprob_chosen": ("nats", "as dpo/logprob_chosen, of the held-out pairs"),
    "eval/logprob_rejected": ("nats", "as dpo/logprob_rejected, of the held-out pairs"),
    "eval/nll_chosen": ("nats", "as dpo/nll_chosen, of the held-out pairs"),
    "eval/kl": ("nats", "as dpo/kl, of the held-out pairs"),
    "eval/reward": ("1", "mean reward of the samples of --eval-data, without the overlong penalty"),
    "eval/length_mean": ("tokens", "mean response length of theirs"),
    "eval/truncated": ("fraction", "responses of theirs that the length limit ended"),
    "eval/seconds": ("s", "time of the evaluation"),
    "update/seconds": ("s", "time of log-prob passes, advantages and optimizer steps"),
    "update/tokens_per_second": ("tokens/s", "prompt and response tokens over that time, all ranks together"),
    "step/seconds": ("s", "time of the whole step"),
    "step/epoch": ("epochs", "passes over the prompts begun so far"),
    "memory/peak_gb": ("GB", "most device memory so far on rank 0 (resident memory on the CPU)"),
    "memory/host_gb": ("GB", "resident memory of rank 0's process at the end of the step"),
}
RULE_PREFIX = "reward/rule/"  # + name of a rule or reward model: its mean, unweighted
EVAL_PREFIXES = (
    "eval/pass@",  # + k: chance that one of k samples has a reward of at least --eval-pass-reward; + "/" + data_source
    "eval/reward/",  # + data_source: as eval/reward, of its rows alone
)


@dataclass
class Recorder:
    """Collects a step's values; `close_step` writes them. The folder is made by the first that writes into it."""

    writing: bool  # rank 0
    folder: str
    progress: bool = True
    values: dict[str, float] = field(default_factory=dict)
    _first: int = 1  # step of this run
    _tensorboard: Any = None

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, name), "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def start_after(self, step: int) -> None:
        """Called before the first row. Rows of steps after `step` are of a run that was killed: they are dropped.

        A run from the start (step 0) keeps an older run's files as NAME.old.
        """
        self._first = step + 1
        for path in (os.path.join(self.folder, name) for name in ("metrics.jsonl", "samples.jsonl")):
            if not self.writing or not os.path.exists(path):
                continue
            if step == 0:
                os.replace(path, path + ".old")
                continue
            with open(path, encoding="utf-8") as file:
                kept = [line for line in file if line.endswith("\n") and json.loads(line).get("step", 0) <= step]
            with open(path + ".part", "w", encoding="utf-8") as file:
                file.writelines(kept)
            os.replace(path + ".part", path)

    def stage(self, name: str, text: str, **values: float) -> None:
        """Prints `[name] text`; keeps values for the step (keyword a__b is metric a/b)."""
        self.keep({key.replace("__", "/"): value for key, value in values.items()})
        if self.writing:
            print(f"[{name}] {text}", flush=True)

    def keep(self, values: dict[str, float]) -> None:
        """Keeps values for the step without a line."""
        for name in values:
            known = name in METRICS or name.startswith((RULE_PREFIX, *EVAL_PREFIXES))
            assert known, f"{name} has no unit and meaning in METRICS"
        self.values |= {name: float(value) for name, value in values.items()}

    def close_step(self, step: int) -> None:
        """Writes what the step kept as one JSON line and as TensorBoard scalars."""
        if self.writing:
            self._append("metrics.jsonl", [{"step": step, **self.values}])
            if self._tensorboard is None:
                from torch.utils.tensorboard import SummaryWriter

                folder = os.path.join(self.folder, "tensorboard")
                self._tensorboard = SummaryWriter(folder, purge_step=self._first)
            for name, value in self.values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        self.values = {}

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rows as a file of their own, in place of an older one; what JSON does not have becomes text."""
        if self.writing:
            path = os.path.join(self.folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)

    def print(self, text: str) -> None:
        """A line from rank 0."""
        if self.writing:
            print(text, flush=True)

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows to samples.jsonl."""
        if self.writing and rows:
            self._append("samples.jsonl", rows)

    @property
    def shows_bars(self) -> bool:
        return self.writing and self.progress and sys.stderr.isatty()

    def updates(self, reports: Mapping[str, Sequence[StepReport]]) -> None:
        """One line and the metrics of the optimizer steps of each role: means over those that were not skipped."""
        for role, steps in reports.items():
            if not steps:
                continue
            taken = [report.metrics | {"grad_norm": report.grad_norm} for report in steps if report.updated]
            skipped = len(steps) - len(taken)
            means = {name: sum(m[name] for m in taken) / len(taken) for name in (taken[0] if taken else ())}
            self.keep({f"{role}/{name}": value for name, value in means.items()})
            self.keep({f"{role}/learning_rate": steps[-1].learning_rate, f"{role}/skipped_steps": skipped})
            shown = ("loss", "approx_kl_k3", "clip_fraction", "value_error", "engine_diff", "grad_norm")
            text = ", ".join(f"{name.replace('_', ' ')} {means[name]:.4g}" for name in shown if name in means)
            lost = f"{skipped} SKIPPED" if skipped else ""
            self.print(f"[{role}] {len(steps)} optimizer steps: {', '.join(filter(None, (text, lost)))}")

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Any]:
        """A progress bar on stderr that disappears; yields a function to call once per unit."""
        from tqdm import tqdm

        with tqdm(total=total, desc=text, leave=False, disable=not self.shows_bars, dynamic_ncols=True) as bar:
            yield lambda n=1: bar.update(n)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def open_recorder(folder: str, is_main: bool, progress: bool) -> Recorder:
    """The recorder of a rank. It makes the folder when it has something to write, so that bad input leaves nothing."""
    return Recorder(is_main, folder, progress)


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
