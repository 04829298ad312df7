"""Exact arithmetic for a tool that anybody's model may call, and numbers compared as numbers.

Expressions are evaluated by simpleeval with everything but numbers and seven operators taken away, over fractions, so
that `1/3*3` is 1. What remains dangerous in pure arithmetic is size, hence the limits: on the text before it is
parsed, on the depth of the tree before it is walked, and on every number before it is computed. Functions, names,
comparisons and scientific notation are left out: a model that needs them can be given another tool.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Any

from simpleeval import InvalidExpression, SimpleEval

MAX_LENGTH = 200  # characters of an expression
MAX_DEPTH = 64  # levels of its tree
MAX_PARENTHESES = 20  # open at once; CPython's parser itself stops at 200
MAX_EXPONENT = 64
MAX_BITS = 128  # of a numerator or denominator: about 3e38
MAX_NUMBER_LENGTH = 64  # characters of an answer

DECIMALS = 6
"""Digits after the point of a result that is no whole number."""

TOLERANCE = Fraction(1, 10**DECIMALS)
"""Two numbers closer than this are equal: a model can only copy what `format_number` showed it."""

_ALLOWED = re.compile(r"[0-9.+\-*/%() ]*")
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "$": "", "\n": " ", "\t": " "})
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_NUMBER = re.compile(r"([+-]?)\$?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:/([0-9]+))?")


class CalculatorError(ValueError):
    """The expression has no value here; the message is short, for the model that wrote it reads it."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression with + - * / // ** % and parentheses.

    Dollar signs and thousands separators are dropped, ×, ÷ and ^ mean *, / and **.

    Raises:
        CalculatorError: it cannot be parsed, exceeds a limit of this module, or divides by zero.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"longer than {MAX_LENGTH} characters")
    text = _THOUSANDS.sub("", expression.translate(_SPELLINGS)).strip()
    if not text:
        raise CalculatorError("empty expression")
    if not _ALLOWED.fullmatch(text):
        raise CalculatorError("only numbers and + - * / ** % ( ) are allowed")
    _check_parentheses(text)
    try:
        tree = SimpleEval.parse(text)
    except SyntaxError:
        raise CalculatorError("invalid syntax") from None
    if _depth(tree) > MAX_DEPTH:
        raise CalculatorError("too deeply nested")
    try:
        value = _evaluator().eval(text, previously_parsed=tree)
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except InvalidExpression:
        raise CalculatorError("only numbers and + - * / ** % ( ) are allowed") from None
    assert isinstance(value, Fraction)
    return value


def _check_parentheses(text: str) -> None:
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth > MAX_PARENTHESES:
            raise CalculatorError("too deeply nested")


def _depth(tree: ast.AST) -> int:
    """Levels of a tree, without recursion: it is what keeps the recursive evaluator within Python's stack."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def _evaluator() -> SimpleEval:
    operators = {
        ast.Add: _bounded(lambda a, b: a + b),
        ast.Sub: _bounded(lambda a, b: a - b),
        ast.Mult: _bounded(lambda a, b: a * b),
        ast.Div: _bounded(lambda a, b: a / b),
        ast.FloorDiv: _bounded(lambda a, b: Fraction(a // b)),
        ast.Mod: _bounded(lambda a, b: a % b),
        ast.Pow: _power,
        ast.USub: lambda a: -a,
        ast.UAdd: lambda a: a,
    }
    evaluator = SimpleEval(operators=operators, functions={}, names={})
    kept = {node: evaluator.nodes[node] for node in (ast.Expr, ast.BinOp, ast.UnaryOp)}
    evaluator.nodes = {**kept, ast.Constant: lambda node: _constant(node, evaluator.expr)}
    return evaluator


def _constant(node: ast.Constant, source: str) -> Fraction:
    if type(node.value) not in (int, float):  # an ellipsis, say
        raise CalculatorError("invalid syntax")
    # From the text, not from the float that Python made of it: 0.1 is one tenth.
    text = source[node.col_offset : node.end_col_offset]
    return _within_limits(Fraction(Decimal(text)))


def _within_limits(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("number too large")
    return value


def _bounded(operation: Callable[[Fraction, Fraction], Fraction]) -> Callable[[Fraction, Fraction], Fraction]:
    return lambda a, b: _within_limits(operation(a, b))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise CalculatorError(f"exponents are whole numbers up to {MAX_EXPONENT}")
    return _within_limits(Fraction(base ** int(exponent)))


def format_number(value: Fraction) -> str:
    """Whole numbers as such, others as decimals rounded (half to even) to DECIMALS digits: 72, 0.5, 0.333333."""
    if value.denominator == 1:
        return str(value.numerator)
    exact = Context(prec=100, rounding=ROUND_HALF_EVEN)  # digits enough for MAX_BITS and the decimals
    quotient = exact.divide(Decimal(value.numerator), Decimal(value.denominator))
    rounded = exact.quantize(quotient, Decimal(1).scaleb(-DECIMALS))
    text = format(rounded, "f").rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def parse_number(value: Any) -> Fraction | None:
    """A number as people and models write it, or None: 72, 72.0, "72.", "$1,234.50", "1/2", "-3".

    Booleans, NaN, infinities, non-ASCII digits, units and scientific notation in text are no numbers.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value) if value.bit_length() <= MAX_BITS else None
    if isinstance(value, float):
        # repr is what stood in the JSON, so 0.1 is one tenth here too
        return parse_number(format(Decimal(repr(value)), "f")) if abs(value) < 2.0**MAX_BITS else None
    if not isinstance(value, str) or len(value) > MAX_NUMBER_LENGTH:
        return None
    match = _NUMBER.fullmatch(_THOUSANDS.sub("", value.strip()))
    if match is None:
        return None
    sign, digits, divisor = match.groups()
    number = Fraction(Decimal(digits))
    if divisor is not None:
        if int(divisor) == 0:
            return None
        number /= int(divisor)
    return -number if sign == "-" else number


def same_number(left: Any, right: Any) -> bool:
    """Whether both are numbers (see `parse_number`) and closer than TOLERANCE."""
    a, b = parse_number(left), parse_number(right)
    return a is not None and b is not None and abs(a - b) < TOLERANCE
