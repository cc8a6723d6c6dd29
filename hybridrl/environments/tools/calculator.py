"""Arithmetic for the policy: numbers and operators from the syntax tree, nothing is executed."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARS = 500
MAX_BITS = 4096
"""Largest whole number on the way; a power of two more digits would take the machine with it."""


def _rounded(value: int | float, digits: int = 0) -> int | float:
    if abs(digits) > 300:  # of a whole number, it would compute that power of ten
        raise ValueError(f"round takes at most 300 digits, got {digits}")
    return round(value, digits) if digits else round(value)


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _rounded, "min": min, "max": max, "sqrt": math.sqrt, "floor": math.floor, "ceil": math.ceil,
    "exp": math.exp, "log": math.log, "sin": math.sin, "cos": math.cos, "tan": math.tan}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """
    Compute an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, for instance "(3 + 4) * 12"
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression must have at most {MAX_CHARS} characters, got {len(expression)}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression[:80]!r} is no arithmetic expression") from None
    return _text(_value(tree.body))


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _apply(_BINARY[type(node.op)], _value(node.left), _value(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise ValueError(f"{node.func.id} takes no named arguments")
        return _apply(_FUNCTIONS[node.func.id], *map(_value, node.args))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise ValueError("^ is not supported, ** is the power")
    raise ValueError(f"only numbers, + - * / // % **, parentheses and {', '.join([*_FUNCTIONS, *_CONSTANTS])} are "
                     f"allowed, got {ast.unparse(node)[:80]!r}")


def _apply(function: Callable[..., Any], *values: int | float) -> int | float:
    if function is operator.pow and all(isinstance(value, int) for value in values):
        base, exponent = values
        if (int(base).bit_length() - 1) * abs(exponent) >= MAX_BITS:
            raise ValueError("the power is too large")
    try:
        return _bounded(function(*values))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    except TypeError as error:
        raise ValueError(str(error)) from None


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex) or value != value:
        raise ValueError("the result is no real number")
    if abs(value) == math.inf or isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the result is too large")
    return value


def _text(value: int | float) -> str:
    """Whole results without a point; others with 12 digits, which hides that 0.1 + 0.2 is not 0.3."""
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
