"""Conditions of --reward-config, such as `data_source == 'news' and level > 2`: parsed, never run as code."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ALLOWED = "row keys compared (== != < <= > >= in) with constants, joined by and, or, not"

Condition = Callable[[Mapping[str, Any]], bool]


def parse_condition(text: str) -> Condition:
    """The condition as a function of a row. ValueError where the text is anything but what _ALLOWED says.

    The function raises ValueError where the row lacks a key, or a comparison makes no sense.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"condition {text!r} cannot be read: {error}; allowed are {_ALLOWED}") from error
    _check(tree, text)

    def holds(row: Mapping[str, Any]) -> bool:
        try:
            return _boolean(tree, row)
        except KeyError as error:
            keys = ", ".join(map(repr, row))
            raise ValueError(f"condition {text!r} asks for the key {error}; the row has {keys}") from error
        except TypeError as error:
            raise ValueError(f"condition {text!r}: {error}") from error

    return holds


def _check(node: ast.expr, text: str) -> None:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check(value, text)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check(node.operand, text)
    elif isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
        for operand in (node.left, *node.comparators):
            if not isinstance(operand, ast.Name):
                _constant(operand, text)
    else:
        raise ValueError(f"condition {text!r}: {ast.unparse(node)!r} is not allowed; allowed are {_ALLOWED}")


def _constant(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)  # literals alone: names, calls and attributes raise
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"condition {text!r}: {ast.unparse(node)!r} is not a constant; allowed are {_ALLOWED}"
        ) from error


def _boolean(node: ast.expr, row: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.BoolOp):
        results = (_boolean(value, row) for value in node.values)
        return all(results) if isinstance(node.op, ast.And) else any(results)
    if isinstance(node, ast.UnaryOp):
        return not _boolean(node.operand, row)
    assert isinstance(node, ast.Compare), "_check let nothing else through"
    values = [row[n.id] if isinstance(n, ast.Name) else ast.literal_eval(n) for n in (node.left, *node.comparators)]
    pairs = zip(values, node.ops, values[1:], strict=False)
    return all(_COMPARE[type(op)](left, right) for left, op, right in pairs)
