"""Rewards of a rollout batch, each rank scoring its share, so that every rank holds all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_rl.initialize import Topology
from megatron_rl.rewards.router import RuleRewards, Scores, ScoringInput


def score_shared(
    rewards: RuleRewards,
    samples: Sequence[ScoringInput],
    topology: Topology,
    model_scores: Mapping[str, Sequence[float]] | None = None,
) -> Scores:
    """Scores of all samples on every rank. `model_scores`, equal on every rank, are those of rewards.model_places().

    A RewardError on one rank ends the run.
    """
    mine = list(range(topology.rank, len(samples), topology.world_size))
    given = {}
    for name, places in rewards.model_places(samples).items():
        scored = dict(zip(places, (model_scores or {}).get(name, ()), strict=True))
        given[name] = [scored[i] for i in mine if i in scored]
    part = rewards.score_by_name([samples[i] for i in mine], given)
    parts: list[Any] = [None] * topology.world_size
    dist.all_gather_object(parts, (mine, part), group=topology.cpu_group)
    total = [0.0] * len(samples)
    by_name: dict[str, dict[int, float]] = {entry.name: {} for entry in rewards.entries}
    for places, scores in parts:
        for place, value in zip(places, scores.total, strict=True):
            total[place] = value
        for name, values in scores.by_name.items():
            by_name[name] |= {places[i]: value for i, value in values.items()}
    return Scores(total, by_name)
