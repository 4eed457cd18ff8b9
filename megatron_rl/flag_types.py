"""What the values of flags may be, and how they are read."""

import argparse
from typing import Any

Group = Any  # argparse's _ArgumentGroup, which it does not export


class KeyValues(argparse.Action):
    """key=value ... -> dict; values are read as YAML scalars, so 0.9 is a float and true a bool."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[override]
        import yaml

        merged = dict(getattr(namespace, self.dest) or {})
        for item in values:
            key, equals, text = item.partition("=")
            if not equals or not key:
                parser.error(f"{option_string} wants key=value, got {item!r}")
            merged[key.replace("-", "_")] = yaml.safe_load(text)
        setattr(namespace, self.dest, merged)


def switch(group: Group, flag: str, default: bool, text: str) -> None:
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)


def _positive(kind: type, text: str, zero: bool = False, infinite: bool = False) -> Any:
    value = kind(text)
    if value < 0 or (value == 0 and not zero) or value != value:
        raise argparse.ArgumentTypeError(f"{text} is not {'at least' if zero else 'above'} 0")
    if value == float("inf") and not infinite:
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _positive(int, text)


def count0(text: str) -> int:
    """A whole number of at least 0."""
    return _positive(int, text, zero=True)


def amount(text: str) -> float:
    """A number above 0."""
    return _positive(float, text)


def amount0(text: str) -> float:
    """A number of at least 0."""
    return _positive(float, text, zero=True)


def bound(text: str) -> float:
    """A number above 0; inf bounds nothing."""
    return _positive(float, text, infinite=True)


def top_k(text: str) -> int:
    """A whole number of at least 1, or -1 (also 0) for all."""
    value = int(text)
    if value < -1:
        raise argparse.ArgumentTypeError(f"{text} is neither -1 (all) nor above 0")
    return value


def seed(text: str) -> int:
    """A whole number that torch's and numpy's generators take."""
    value = _positive(int, text, zero=True)
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not below 2^32")
    return value


def decay(text: str) -> float:
    """A number from 0 to below 1."""
    value = fraction(text)
    if value == 1:
        raise argparse.ArgumentTypeError("1 would never forget: it must be below 1")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
