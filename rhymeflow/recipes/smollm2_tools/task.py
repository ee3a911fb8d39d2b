"""A calculator for arithmetic as a plain function, which the policy calls by a JSON object."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

LONGEST = 200
"""Characters of an expression."""

_OPERATIONS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Calculate with numbers.

    Args:
        expression: Such as "12 + 30 * 2", with + - * / and parentheses."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip().removesuffix("="), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is no expression") from None
    return f"{value:g}" if isinstance(value, float) and not value.is_integer() else f"{int(value)}"


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(operand))
    raise ValueError("only numbers, + - * / and parentheses are understood")
