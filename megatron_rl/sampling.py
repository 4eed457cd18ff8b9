"""Scored samples: what the engine answers, and what its answers earn by rules and reward models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl import builders, report
from megatron_rl.algorithms.advantages import NEEDS_GREEDY, dynamic_sampling_keep, overlong_penalty
from megatron_rl.batch import Prompt, Sample
from megatron_rl.builders import Run
from megatron_rl.data.prompts import PromptDataset
from megatron_rl.metrics import timed
from megatron_rl.rewards.model import RewardModel, score_samples
from megatron_rl.rewards.router import RuleRewards, Scores, ScoringInput
from megatron_rl.rewards.share import score_shared
from megatron_rl.rollout.collect import collect
from megatron_rl.rollout.hf_backend import RolloutEngine


@dataclass(frozen=True)
class Scorer:
    """All that gives rewards."""

    rules: RuleRewards  # and their routing, and that of the models
    models: tuple[RewardModel, ...]


@dataclass(frozen=True)
class Scored:
    """Samples and what they got; equal on every rank."""

    samples: list[Sample]
    texts: list[str]  # responses without special tokens
    scores: Scores
    seconds: float  # of the scoring

    @property
    def rewards_B(self) -> Tensor:
        return torch.tensor(self.scores.total)


@dataclass(frozen=True)
class Rollout:
    """What a step trains on; equal on every rank."""

    samples: list[Sample]
    rewards_B: Tensor  # the overlong penalty included
    greedy_B: Tensor | None = None  # the reward of the greedy response to the sample's prompt (remax)


def synchronise(run: Run, engine: RolloutEngine) -> None:
    """The engine gets the trainer's weights, then its KV cache."""
    synced = engine.sync()
    if run.args.verify_weights == "every" or (run.args.verify_weights == "first" and synced.version == 1):
        engine.verify()
    engine.wake()
    report.sync(run.recorder, synced)


def score(run: Run, samples: list[Sample], scorer: Scorer) -> Scored:
    """Rewards of the samples. Rules run on a share of them on each rank, reward models on all ranks together."""
    ids = [list(s.response.token_ids) for s in samples]
    texts = run.tokenizer.batch_decode(ids, skip_special_tokens=True)
    inputs = [
        ScoringInput(s.prompt.text, t, s.prompt.row, s.prompt.index) for s, t in zip(samples, texts, strict=True)
    ]
    with timed() as seconds:
        places = scorer.rules.model_places(inputs)
        show = run.recorder
        by_models = score_samples(scorer.models, places, samples, texts, run.topology, show.bar, show.print)
        scores = score_shared(scorer.rules, inputs, run.topology, by_models)
    return Scored(samples, texts, scores, seconds[0])


def roll_out(run: Run, engine: RolloutEngine, prompts: PromptDataset, scorer: Scorer, step: int) -> Rollout:
    """The samples of a step and their rewards. The engine comes awake, and sleeps while anything else works.

    With --dynamic-sampling groups whose rewards are all equal are dropped, and further prompts asked, round after
    round, until the batch is full (DAPO, arXiv 2503.14476, section 3.2). ValueError where no group is left.
    """
    args = run.args
    rounds: list[Rollout] = []  # what is kept
    drawn: list[Scored] = []  # everything
    tails: list[float | None] = []
    seconds, kept, asked = 0.0, 0, 0
    while kept < args.rollout_batch_size and len(rounds) < (args.max_sampling_rounds if args.dynamic_sampling else 1):
        if rounds:
            synchronise(run, engine)
        chosen = prompts.next_batch(args.rollout_batch_size - kept)
        with timed() as spent:
            samples = _draw(run, engine, chosen, args.n_samples_per_prompt, step, asked)
        asked, seconds = asked + len(chosen), seconds + spent[0]
        tails.append(report.tail_of(samples))
        tail = None if None in tails else sum(tails)
        report.rollout(run.recorder, [s for part in drawn for s in part.samples] + samples, seconds, tail)
        greedy = None
        if args.advantage_estimator in NEEDS_GREEDY:
            with timed() as spent:
                greedy = _draw(run, engine, chosen, 0, step, asked)
            report.rollout(run.recorder, greedy, spent[0], greedy=True)
        engine.sleep()
        drawn.append(score(run, samples, scorer))
        rounds.append(_kept(run, drawn[-1], score(run, greedy, scorer) if greedy else None))
        kept += len(rounds[-1].samples) // args.n_samples_per_prompt
    all_ = merged(drawn)
    report.rewards(run.recorder, step, all_.samples, all_.texts, all_.scores, all_.seconds, args.log_samples)
    if args.overlong_buffer is not None:
        report.overlong(run.recorder, _penalty(run, all_.samples))
    if args.dynamic_sampling:
        report.dynamic_sampling(run.recorder, kept, asked - kept, len(rounds))
        if not kept:
            raise ValueError(
                f"--dynamic-sampling: each of the {asked} groups of {len(rounds)} rounds (--max-sampling-rounds) got "
                "equal rewards, so that nothing can be learned: look at the reward and at --n-samples-per-prompt "
                f"{args.n_samples_per_prompt}"
            )
    return Rollout(
        samples=[sample for part in rounds for sample in part.samples],
        rewards_B=torch.cat([part.rewards_B for part in rounds]),
        greedy_B=torch.cat([part.greedy_B for part in rounds]) if rounds[0].greedy_B is not None else None,
    )


def _draw(run: Run, engine: RolloutEngine, prompts: list[Prompt], n: int, step: int, asked: int) -> list[Sample]:
    """n samples of each prompt, or the greedy one where n is 0; `asked` prompts of the step came before these."""
    options, first = builders.sampling_options(run.args, greedy=n == 0), asked * n
    bars = run.recorder.shows_bars
    samples = collect(engine, prompts, max(n, 1), options, run.args.seed, step, run.topology, bars, first)
    return [replace(sample, group=sample.group + asked) for sample in samples]


def _kept(run: Run, scored: Scored, greedy: Scored | None) -> Rollout:
    """What training gets to see of a round."""
    samples, rewards_B = scored.samples, scored.rewards_B + _penalty(run, scored.samples)
    greedy_B = None
    if greedy is not None:  # in the order of the prompts
        first = samples[0].group
        greedy_B = (greedy.rewards_B + _penalty(run, greedy.samples))[[s.group - first for s in samples]]
    if not run.args.dynamic_sampling:
        return Rollout(samples, rewards_B, greedy_B)
    keep_B = dynamic_sampling_keep(scored.rewards_B, torch.tensor([s.group for s in samples]))
    kept = [sample for sample, keep in zip(samples, keep_B.tolist(), strict=True) if keep]
    return Rollout(kept, rewards_B[keep_B], None if greedy_B is None else greedy_B[keep_B])


def _penalty(run: Run, samples: list[Sample]) -> Tensor | float:
    """What --overlong-buffer adds to the rewards [B]."""
    args = run.args
    if args.overlong_buffer is None:
        return 0.0
    lengths_B = torch.tensor([len(s.response.token_ids) for s in samples])
    return overlong_penalty(lengths_B, args.max_response_length, args.overlong_buffer, args.overlong_penalty)


def merged(parts: Sequence[Scored]) -> Scored:
    """One after the other."""
    by_name: dict[str, dict[int, float]] = {name: {} for name in parts[0].scores.by_name}
    start = 0
    for part in parts:
        for name, values in part.scores.by_name.items():
            by_name[name] |= {start + place: value for place, value in values.items()}
        start += len(part.samples)
    return Scored(
        samples=[sample for part in parts for sample in part.samples],
        texts=[text for part in parts for text in part.texts],
        scores=Scores([value for part in parts for value in part.scores.total], by_name),
        seconds=sum(part.seconds for part in parts),
    )
