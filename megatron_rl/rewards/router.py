"""Which rule or reward model scores which row, with what weight; the reward of a sample is their weighted sum."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.rewards.conditions import parse_condition
from megatron_rl.rewards.pool import Job, Outcome, RulePool
from megatron_rl.rewards.rules import ROW_CHECKS, load_rule, rule_name
from megatron_rl.rewards.worker import apply_rule
from megatron_rl.weights.dist_io import hf_folder


class RewardError(ValueError):
    """A reward that is not a finite number, or a row that nothing scores; names row and rule."""


@dataclass(frozen=True)
class ScoringInput:
    """What rules see of a sample."""

    prompt_text: str
    response_text: str
    row: Mapping[str, Any]
    index: int  # Prompt.index, for messages

    def __str__(self) -> str:
        source = f" (data_source {self.row['data_source']!r})" if "data_source" in self.row else ""
        return f"row with index {self.index}{source}"


@dataclass(frozen=True)
class RewardEntry:
    """A rule, or the folder of a reward model, with the rows it scores."""

    name: str  # in metrics
    rule: str | None = None  # spec of rules.load_rule; else path is set
    path: str | None = None  # HF folder of a reward model
    weight: float = 1.0
    condition: str | None = None  # None: scores the rows that no condition matches


@dataclass(frozen=True)
class Scores:
    """Rewards of B samples."""

    total: list[float]  # B weighted sums
    by_name: dict[str, dict[int, float]]  # entry name -> place in the list -> its score before the weight

    def means(self) -> dict[str, float]:
        """Mean score of each entry over the samples it scored, before the weight."""
        return {name: sum(scores.values()) / len(scores) for name, scores in self.by_name.items() if scores}


def entries_from_specs(rules: Sequence[str], models: Sequence[str] = ()) -> tuple[RewardEntry, ...]:
    """--reward and --reward-model: each `RULE` or `DIR`, with `=WEIGHT` behind it; every one scores every row."""
    entries: list[RewardEntry] = []
    for spec in (*rules, *models):
        what, weight = _split_weight(spec)
        is_rule = len(entries) < len(rules)
        name = base = rule_name(what) if is_rule else Path(what).resolve().name
        while name in [e.name for e in entries]:
            name = f"{base}_{int(name[len(base) + 1 :] or 1) + 1}"
        entries.append(RewardEntry(name, **{"rule" if is_rule else "path": what}, weight=weight))
    return tuple(entries)


def _split_weight(spec: str) -> tuple[str, float]:
    rule, equals, weight = spec.rpartition("=")
    try:
        return (rule, float(weight)) if equals else (spec, 1.0)
    except ValueError:
        return spec, 1.0  # an equals sign of the rule's own option


def entries_from_config(file: str) -> tuple[RewardEntry, ...]:
    """--reward-config: a YAML list of entries with the fields of RewardEntry, those without a condition last."""
    import yaml

    if not Path(file).is_file():
        raise ValueError(f"--reward-config {file}: no such file")
    try:
        listed = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--reward-config {file}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"--reward-config {file}: must be a list of entries, found {type(listed).__name__}")
    return tuple(_entry(fields, f"--reward-config {file}, entry {n}") for n, fields in enumerate(listed, start=1))


_FIELDS = {"name": str, "rule": str, "path": str, "weight": (int, float), "condition": str}


def _entry(fields: Any, place: str) -> RewardEntry:
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: must have fields, found {fields!r}")
    for key, value in fields.items():
        if key not in _FIELDS:
            raise ValueError(f"{place}: no field {key!r}; fields are {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[key]) or isinstance(value, bool):
            raise ValueError(f"{place}: {key} is {value!r}, a {type(value).__name__}")
    if ("rule" in fields) == ("path" in fields):
        raise ValueError(f"{place}: needs a rule, or a path to a reward model, and not both")
    name = fields.get("name") or (rule_name(fields["rule"]) if "rule" in fields else Path(fields["path"]).name)
    return RewardEntry(**{**fields, "name": name, "weight": float(fields.get("weight", 1.0))})


class RuleRewards:
    """Scores samples by rules, and adds the scores of reward models that are computed elsewhere.

    An entry with a condition scores the rows it holds for (several may); entries without one score the rows that no
    condition holds for. With workers 0 rules run in this process, without a time limit.
    """

    def __init__(self, entries: Sequence[RewardEntry], workers: int = 0, timeout: float = 60.0) -> None:
        _check_entries(entries)
        self.entries = tuple(entries)
        self._conditions = [parse_condition(e.condition) if e.condition is not None else None for e in entries]
        specs = sorted({e.rule for e in entries if e.rule is not None})
        self._rules = {spec: load_rule(spec) for spec in specs}
        self._pool = RulePool(specs, workers, timeout) if workers else None

    @property
    def models(self) -> dict[str, str]:
        """Name -> folder of each reward model."""
        return {e.name: e.path for e in self.entries if e.path is not None}

    def check_rows(self, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """RewardError for the first of (index, row) that nothing scores, or that lacks what its rule reads; to be
        called at launch."""
        for index, row in rows:
            for entry in self._route(ScoringInput("", "", row, index)):
                if check := ROW_CHECKS.get(entry.rule or ""):
                    try:
                        check(row)
                    except ValueError as error:
                        raise RewardError(f"row with index {index}, rule {entry.rule}: {error}") from error

    def model_places(self, samples: Sequence[ScoringInput]) -> dict[str, list[int]]:
        """Which places of the list each reward model has to score."""
        routes = [self._route(sample) for sample in samples]
        return {name: [i for i, route in enumerate(routes) if name in [e.name for e in route]] for name in self.models}

    def score(
        self, samples: Sequence[ScoringInput], model_scores: Mapping[str, Sequence[float]] | None = None
    ) -> list[float]:
        """The reward of each sample."""
        return self.score_by_name(samples, model_scores).total

    def score_by_name(
        self, samples: Sequence[ScoringInput], model_scores: Mapping[str, Sequence[float]] | None = None
    ) -> Scores:
        """Rewards, and what each entry gave. `model_scores[name]` belongs to the places of model_places()[name]."""
        routes = [self._route(sample) for sample in samples]
        by_name: dict[str, dict[int, float]] = {entry.name: {} for entry in self.entries}
        for name, places in self.model_places(samples).items():
            given = (model_scores or {}).get(name, ())
            assert len(given) == len(places), f"{len(given)} scores of reward model {name} for {len(places)} samples"
            by_name[name] = dict(zip(places, map(float, given), strict=True))
        tasks = [(place, entry) for place, route in enumerate(routes) for entry in route if entry.rule is not None]
        for (place, entry), outcome in zip(tasks, self._run(samples, tasks), strict=True):
            if outcome.fault:
                raise RewardError(f"{samples[place]}: rule {entry.name} {outcome.fault}")
            by_name[entry.name][place] = outcome.value
        for name, scores in by_name.items():
            for place, value in scores.items():
                if not math.isfinite(value):
                    raise RewardError(f"{samples[place]}: reward {name} gave {value}, not a finite number")
        total = [sum(e.weight * by_name[e.name][place] for e in route) for place, route in enumerate(routes)]
        return Scores(total, by_name)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def _run(self, samples: Sequence[ScoringInput], tasks: list[tuple[int, RewardEntry]]) -> list[Outcome]:
        jobs = []
        for place, entry in tasks:
            assert entry.rule is not None, "reward models are no tasks of the rules"
            sample = samples[place]
            jobs.append(Job(entry.rule, sample.prompt_text, sample.response_text, sample.row))
        if self._pool is not None:
            return self._pool.run(jobs)
        outcomes = []
        for job in jobs:
            good, value = apply_rule(self._rules[job.rule], job.prompt, job.response, job.row)
            outcomes.append(Outcome(value=value) if good else Outcome(fault=value))
        return outcomes

    def _route(self, sample: ScoringInput) -> list[RewardEntry]:
        """The entries that score a sample."""
        try:
            matched = [
                e for e, c in zip(self.entries, self._conditions, strict=True) if c is not None and c(sample.row)
            ]
        except ValueError as error:
            raise RewardError(f"{sample}: {error} (--reward-config)") from error
        route = matched or [e for e in self.entries if e.condition is None]
        if not route:
            conditions = "; ".join(str(e.condition) for e in self.entries)
            raise RewardError(
                f"{sample}: no condition of --reward-config holds for it and there is no entry without a condition; "
                f"the conditions are {conditions}"
            )
        return route


def _check_entries(entries: Sequence[RewardEntry]) -> None:
    if not entries:
        raise ValueError("no reward: give --reward, --reward-config or --reward-model")
    names = [e.name for e in entries]
    if len(set(names)) < len(names):
        raise ValueError(f"--reward-config: entries need different names, found {', '.join(names)}")
    kinds = [e.condition is None for e in entries]
    if kinds != sorted(kinds):
        raise ValueError("--reward-config: entries without a condition come last")
    for entry in entries:
        if not math.isfinite(entry.weight):
            raise ValueError(f"the weight of reward {entry.name} is {entry.weight}, not a finite number")
        if entry.path is not None and not (hf_folder(entry.path) / "config.json").is_file():
            raise ValueError(f"reward model {entry.name}: {entry.path} has no config.json")
