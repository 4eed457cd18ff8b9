"""Scored samples: responses of the engine, and their rewards by rules and reward models."""

from dataclasses import dataclass

from megatron_rl.batch import Sample
from megatron_rl.builders import Run
from megatron_rl.metrics import timed
from megatron_rl.rewards.model import RewardModel, score_samples
from megatron_rl.rewards.router import RuleRewards, Scores, ScoringInput
from megatron_rl.rewards.share import score_shared


@dataclass(frozen=True)
class Scorer:
    """All that gives rewards."""

    rules: RuleRewards  # and their routing, and that of the models
    models: tuple[RewardModel, ...]


@dataclass(frozen=True)
class Scored:
    """What the samples got; equal on every rank."""

    texts: list[str]  # responses without special tokens
    scores: Scores
    seconds: float


def score(run: Run, samples: list[Sample], scorer: Scorer) -> Scored:
    """Rewards of the samples. Rules run on a share of them on each rank, reward models on all ranks together."""
    ids = [list(s.response.token_ids) for s in samples]
    texts = run.tokenizer.batch_decode(ids, skip_special_tokens=True)
    inputs = [
        ScoringInput(s.prompt.text, t, s.prompt.row, s.prompt.index) for s, t in zip(samples, texts, strict=True)
    ]
    with timed() as seconds:
        places = scorer.rules.model_places(inputs)
        by_models = score_samples(scorer.models, places, samples, texts, run.topology, run.recorder.bar)
        scores = score_shared(scorer.rules, inputs, run.topology, by_models)
    return Scored(texts, scores, seconds[0])
