"""The policy on held-out prompts: mean rewards and pass@k by data_source, and a file of samples to read.

Nothing of it reaches the training: samples have seeds of their own, the engine is synchronised again before it is
asked for training samples, and the random generators are put back.
"""

from collections import defaultdict
from collections.abc import Sequence

from megatron_rl import builders, report
from megatron_rl.batch import Prompt
from megatron_rl.builders import Run
from megatron_rl.metrics import timed
from megatron_rl.rollout.collect import collect
from megatron_rl.rollout.hf_backend import RolloutEngine
from megatron_rl.rollout.startup import own_rng
from megatron_rl.sampling import Scored, Scorer, score, synchronise

STEP_OF_SEEDS = -1  # no training step has it: each evaluation draws with the same seeds, and no rollout with them


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that k of n samples, drawn without putting back, hold at least one of those that passed: the unbiased
    estimator of Chen et al. 2021 (arXiv 2107.03374), equation 1, 1 - C(n - c, k) / C(n, k) as a product."""
    assert 0 <= passed <= n and 1 <= k <= n, f"k is 1 to n and c is 0 to n: n {n}, c {passed}, k {k}"
    missed = 1.0
    for i in range(n - passed + 1, n + 1):
        missed *= max(0.0, 1 - k / i)
    return 1 - missed


def ks_of(n: int) -> list[int]:
    """1, 2, 4 ... and n."""
    return sorted({1 << i for i in range(n.bit_length())} | {n})


def source_of(prompt: Prompt) -> str | None:
    return str(prompt.row["data_source"]) if "data_source" in prompt.row else None


def summary(prompts: Sequence[Prompt], rewards: Sequence[float], n: int, threshold: float) -> dict[str, float]:
    """Metrics by name, over all prompts and for each data_source; rewards[i * n : (i + 1) * n] are of prompt i."""
    members: dict[str, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        members[""].append(i)
        if (source := source_of(prompt)) is not None:
            members[f"/{source}"].append(i)
    passed = [sum(r >= threshold for r in rewards[i * n : (i + 1) * n]) for i in range(len(prompts))]
    metrics = {}
    for ending, of in members.items():
        metrics[f"eval/reward{ending}"] = sum(sum(rewards[i * n : (i + 1) * n]) for i in of) / (n * len(of))
        for k in ks_of(n):
            metrics[f"eval/pass@{k}{ending}"] = sum(pass_at_k(n, passed[i], k) for i in of) / len(of)
    return metrics


def evaluate(run: Run, engine: RolloutEngine, prompts: Sequence[Prompt], scorer: Scorer, step: int) -> None:
    """Scores the policy as it is after `step` steps. The engine may be awake or asleep; afterwards it sleeps."""
    args, n = run.args, run.args.eval_samples_per_prompt
    synchronise(run, engine)
    with timed() as seconds, own_rng(args.seed):  # a rule may draw random numbers
        options, bars = builders.evaluation_options(args), run.recorder.shows_bars
        samples = collect(engine, list(prompts), n, options, args.seed, STEP_OF_SEEDS, run.topology, bars)
        engine.sleep()
        scored = score(run, samples, scorer)
    metrics = summary(prompts, scored.scores.total, n, args.eval_pass_reward)
    report.policy_evaluation(run.recorder, step, samples, metrics, seconds[0])
    run.recorder.table(f"eval/step_{step}.jsonl", _rows(scored, step, args.eval_pass_reward))


def _rows(scored: Scored, step: int, threshold: float) -> list[dict[str, object]]:
    rows = []
    for place, (sample, text) in enumerate(zip(scored.samples, scored.texts, strict=True)):
        reward, row = scored.scores.total[place], sample.prompt.row
        parts = {name: values[place] for name, values in scored.scores.by_name.items() if place in values}
        rows.append(
            {"step": step, "row": sample.prompt.index + 1, "data_source": source_of(sample.prompt)}
            | report.sample_row(sample, text, reward)
            | {"passed": reward >= threshold, "rewards": parts, "label": row.get("label")}
        )
    return rows
