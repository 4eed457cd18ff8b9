"""From argv to a namespace that is parsed once, validated once and never written again. The flags are in flags.py."""

import argparse
import difflib
import os
from collections.abc import Sequence
from typing import Any

import megatron_rl

class _Formatter(argparse.HelpFormatter):
    """Every help text ends with its default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=119)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS, [], {}) or action.option_strings[:1] == ["--help"]:
            return action.help
        return f"{action.help} (default: %(default)s)"


def build_parser(prog: str, groups: dict[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, formatter_class=_Formatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megatron_rl {megatron_rl.__version__}")
    parser.add_argument("--config", metavar="FILE.yaml", help="defaults for any flag: 'flag-name: value' lines; flags on the command line win")
    for name, add_flags in groups.items():
        add_flags(parser.add_argument_group(name))
    return parser


def parse(prog: str, groups: dict[str, Any], argv: Sequence[str]) -> argparse.Namespace:
    """argv -> namespace. Unknown flags, values and config keys end the program with one line (exit code 2)."""
    parser = build_parser(prog, groups)
    config, _ = argparse.ArgumentParser(add_help=False, allow_abbrev=False), None
    config.add_argument("--config")
    path = config.parse_known_args(argv)[0].config
    argv = [*(_config_flags(parser, path) if path else []), *argv]
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [option for action in parser._actions for option in action.option_strings]
        hints = [f"{u}{_did_you_mean(u.split('=')[0], names)}" for u in unknown if u.startswith("-")] or unknown
        parser.error("unknown: " + ", ".join(hints))
    return known


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _config_flags(parser: argparse.ArgumentParser, path: str) -> list[str]:
    """The flags that a YAML file spells, as if typed before the others."""
    import yaml

    if not os.path.isfile(path):
        parser.error(f"--config {path}: no such file")
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
    except yaml.YAMLError as error:
        parser.error(f"--config {path}: not YAML: {str(error).splitlines()[0]}")
    if not isinstance(values, dict):
        parser.error(f"--config {path}: wants 'flag-name: value' lines, found a {type(values).__name__}")
    actions = {option.removeprefix("--"): action for action in parser._actions for option in action.option_strings}
    flags: list[str] = []
    for key, value in values.items():
        name = str(key).replace("_", "-")
        if name not in actions or name in ("config", "help", "version"):
            parser.error(f"--config {path}: unknown key {key}{_did_you_mean(name, list(actions))}")
        if isinstance(value, bool):
            switch = isinstance(actions[name], argparse.BooleanOptionalAction)
            flags += [f"--{name}"] if value else [f"--no-{name}"] if switch else []
        elif isinstance(value, dict):
            flags += [f"--{name}", *(f"{k}={v}" for k, v in value.items())]
        elif value is not None:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags
