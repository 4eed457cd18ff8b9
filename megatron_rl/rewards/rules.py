"""Rule rewards: plain functions of prompt, response and the data row. Imported by workers: neither torch nor megatron.

A rule is named on the command line as `name`, as `name:option` where OPTIONS has the name, or as `file.py:function`.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from megatron_rl.data.files import load_object

Rule = Callable[[str, str, Mapping[str, Any]], float]

TAGS = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def label_of(row: Mapping[str, Any]) -> Any:
    if "label" not in row or row["label"] is None:
        raise ValueError(f"the row has no 'label', only {', '.join(map(repr, row))} (give --label-key)")
    return row["label"]


def exact_match(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """1 where the response is the label (or one of them, where it is a list), spaces around them aside; else 0."""
    label = label_of(row)
    labels = label if isinstance(label, list) else [label]
    return float(response.strip() in [str(one).strip() for one in labels])


def format_match(prompt: str, response: str, row: Mapping[str, Any], option: re.Pattern[str] = TAGS) -> float:
    """1 where the whole response matches the regular expression (`.` matches line ends too); else 0."""
    return float(option.fullmatch(response) is not None)


def math_verify(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """1 where the last mathematical expression of the response equals the label's; else 0.

    One that takes math-verify more than 3 seconds to parse or compare counts as wrong.
    """
    from math_verify import parse, verify

    label = str(label_of(row))
    gold = parse(label if "$" in label or "\\boxed" in label else f"${label}$", parsing_timeout=3)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the label {label!r}")
    return float(verify(gold, parse(response, parsing_timeout=3), timeout_seconds=3))


def length(prompt: str, response: str, row: Mapping[str, Any], option: int = 200) -> float:
    """1 at `option` characters, falling linearly to 0 at none and at twice as many."""
    return max(0.0, 1 - abs(len(response) - option) / option)


def sentiment(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """VADER's compound sentiment of the response, from -1 (gloomy) to 1 (cheerful)."""
    return float(_sentiment_analyzer().polarity_scores(response)["compound"])


def check_entry(row: Mapping[str, Any]) -> None:
    missing = [key for key in ("answer", "metadata") if key not in row]
    if missing:
        raise ValueError(f"the row has no {' and no '.join(missing)}: it must carry those of the reasoning-gym entry")


def reasoning_gym(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """The verifier of the row's own reasoning-gym task, usually from 0 to 1.

    The row carries `answer` and `metadata` of the entry (a dict, or JSON text: parquet has no free-form dicts);
    metadata["source_dataset"] names the task. Scored is what stands in the last <answer></answer>, or else the whole
    response.
    """
    check_entry(row)
    metadata = json.loads(row["metadata"]) if isinstance(row["metadata"], str) else row["metadata"]
    task = metadata["source_dataset"]
    if task in ("arc_agi", "rearc"):  # their verifiers compare with tuples, which JSON turned into lists
        metadata = {key: _tuples(value) for key, value in metadata.items()}
    answers = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    answer = (answers[-1] if answers else response).strip()
    return float(_reasoning_gym_verifier(task)(answer, {**row, "metadata": metadata}))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def _sentiment_analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


@cache
def _reasoning_gym_verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


RULES: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "format": format_match,
    "math_verify": math_verify,
    "length": length,
    "sentiment": sentiment,
    "reasoning_gym": reasoning_gym,
}


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("not a positive number of characters")
    return int(text)


# Rules that take an option after the colon, and how its text is read.
OPTIONS: dict[str, Callable[[str], Any]] = {"format": _regex, "length": _positive}
# What a rule imports when it is first called: the package and its module.
PACKAGES = {
    "math_verify": ("math-verify", "math_verify"),
    "sentiment": ("vaderSentiment", "vaderSentiment.vaderSentiment"),
    "reasoning_gym": ("reasoning-gym", "reasoning_gym"),
}


# what a rule wants of every row, so that a row without it is found at launch
ROW_CHECKS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "exact_match": label_of,
    "math_verify": label_of,
    "reasoning_gym": check_entry,
}


def rule_name(spec: str) -> str:
    """A short name for metrics: the rule's or the function's."""
    name, _, option = spec.partition(":")
    return name if name in RULES else spec.rpartition(":")[2]


def load_rule(spec: str, flag: str = "--reward") -> Rule:
    """The function that `name`, `name:option` or `file.py:function` names. ValueError where there is none."""
    name, colon, option = spec.partition(":")
    if name in RULES:
        return _with_option(name, option, flag) if colon else _installed(name, flag)
    if ".py:" not in spec:
        raise ValueError(f"{flag} {spec}: no such rule; known are {', '.join(RULES)}, and file.py:function")
    function = load_object(spec, flag)
    if not callable(function):
        raise ValueError(f"{flag} {spec}: is a {type(function).__name__}, not a function (prompt, response, row)")
    return function


def _with_option(name: str, option: str, flag: str) -> Rule:
    if name not in OPTIONS:
        raise ValueError(f"{flag} {name}:{option}: {name} takes no option; those that do: {', '.join(OPTIONS)}")
    try:
        return partial(RULES[name], option=OPTIONS[name](option))
    except ValueError as error:
        raise ValueError(f"{flag} {name}:{option}: {error}") from error


def _installed(name: str, flag: str) -> Rule:
    package, module = PACKAGES.get(name, ("", "re"))
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ValueError(f"{flag} {name} needs the package {package}: pip install {package}")
    return RULES[name]


def warm_up(spec: str) -> None:
    """Imports what the rule needs, so that its first call is as quick as the others."""
    name = spec.partition(":")[0]
    if name in PACKAGES:
        importlib.import_module(PACKAGES[name][1])
