"""key=value texts -> typed values of a dataclass's fields."""

import ast
import difflib
import enum
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any


def parse_overrides(cls: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `cls`'s fields. ValueError for a field that it has not, with the nearest that it has."""
    hints, known = typing.get_type_hints(cls), {f.name for f in fields(cls) if f.init}
    values = {}
    for key, text in overrides.items():
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--transformer-config {key}: {cls.__name__} has no such field{hint}")
        values[key] = convert(key, text, hints[key])
    return values


def convert(key: str, text: Any, hint: Any) -> Any:
    """The text of key=value as the field's type; ValueError naming the type where it does not fit."""
    if not isinstance(text, str):
        return text
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        for parse in _parsers(option):
            try:
                return parse(text)
            except (ValueError, KeyError, SyntaxError):
                continue
    raise ValueError(f"--transformer-config {key}={text}: not a value of {hint}")


def _parsers(option: Any) -> list[Callable[[str], Any]]:
    if option is bool:
        return [lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()]]
    if option is type(None):
        return [lambda text: {"none": None, "null": None}[text.lower()]]
    if option in (int, float, str):
        return [option]
    if typing.get_origin(option) is typing.Literal:
        return [lambda text: {str(value): value for value in typing.get_args(option)}[text]]
    if typing.get_origin(option) in (list, tuple) or option in (list, tuple):
        kind = typing.get_origin(option) or option
        return [lambda text: kind(_sequence(text))]
    if isinstance(option, type) and issubclass(option, enum.Enum):
        return [lambda text: option[text]]
    return []


def _sequence(text: str) -> list[Any]:
    value = ast.literal_eval(text)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{text} is not a list")
    return list(value)
