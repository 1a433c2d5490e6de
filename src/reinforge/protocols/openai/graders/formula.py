"""The formula of a `multi` grader: arithmetic over the scores of its parts.

    Formula("0.5 * a + max(b, 0.25)", ["a", "b"]).compute({"a": 1.0, "b": 0.0})   =>  0.75

`+ - * / ^`, numbers, parentheses, and min, max, abs, floor, ceil, exp, sqrt and log; nothing else.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from reinforge.bounded import refuse_depth
from reinforge.limits import get_limits

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
ARGUMENTS = {name: (1, 64) if name in ("min", "max") else (1, 1) for name in FUNCTIONS}


def compile_python(source: str, mode: str, flags: int = 0) -> Any:
    """Returns Python code that is not ours as `compile` does; raises a `ValueError` where it is none."""
    try:
        with refuse_depth():
            return compile(source, "<grader>", mode, flags, dont_inherit=True)
    except (SyntaxError, MemoryError) as error:
        raise ValueError(str(error)) from None


class FormulaError(ValueError):
    """A formula that cannot be read, or has no finite value."""


class Formula:
    """A formula, checked when it is made (`FormulaError`); `^` is a power, as at OpenAI."""

    def __init__(self, text: str, names: Collection[str]):
        self.text, self.names = text, tuple(names)
        try:
            self._tree = compile_python(text.strip().replace("^", "**"), "eval", ast.PyCF_ONLY_AST).body
        except ValueError:
            raise FormulaError(f"{text[:80]!r} is not a formula such as 0.5 * a + 0.5 * b") from None
        self._check(self._tree, 0)

    def compute(self, values: Mapping[str, float]) -> float:
        try:
            value = float(self._compute(self._tree, values))
        except (ArithmeticError, ValueError) as error:
            raise FormulaError(f"{self.text[:80]!r} has no value: {error}") from None
        if not math.isfinite(value):
            raise FormulaError(f"{self.text[:80]!r} is {value}, not a finite number")
        return value

    def _check(self, node: ast.AST, depth: int) -> None:
        if depth > get_limits().formula_depth:
            raise FormulaError("the formula is nested too deeply")
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            children: list[ast.AST] = [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            children = [node.operand]
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            children = []
        elif isinstance(node, ast.Name):
            if node.id not in self.names:
                raise FormulaError(f"{node.id} is not the name of a grader; there is {', '.join(self.names)}")
            children = []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            children = self._check_call(node.func.id, node.args)
        else:
            allowed = f"+ - * / ^, numbers, names of graders, and {', '.join(FUNCTIONS)}"
            found = ast.get_source_segment(self.text.strip().replace("^", "**"), node) or type(node).__name__
            raise FormulaError(f"{found[:80]!r} is not allowed; allowed: {allowed}")
        for child in children:
            self._check(child, depth + 1)

    def _check_call(self, name: str, arguments: list[ast.expr]) -> list[ast.AST]:
        if name not in FUNCTIONS:
            raise FormulaError(f"there is no function {name}; allowed: {', '.join(FUNCTIONS)}")
        least, most = ARGUMENTS[name]
        if not least <= len(arguments) <= most:
            raise FormulaError(f"{name} takes {least}{' or more' if most > 1 else ''}, found {len(arguments)}")
        return list(arguments)

    def _compute(self, node: Any, values: Mapping[str, float]) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self._compute(node.left, values), self._compute(node.right, values))
        if isinstance(node, ast.UnaryOp):
            value = self._compute(node.operand, values)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.Constant):
            return float(node.value)  # type: ignore[arg-type]  # `_check` allows int and float alone
        if isinstance(node, ast.Name):
            return float(values[node.id])
        return float(FUNCTIONS[node.func.id](*(self._compute(each, values) for each in node.args)))
