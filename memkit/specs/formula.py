"""Formulas in one variable, written in YAML: a small grammar of our own, read by a recursive descent and never evaluated as Python.

Grammar::

    sum     ::= product (('+' | '-') product)*
    product ::= unary (('*' | '/') unary)*
    unary   ::= ('+' | '-') unary | power
    power   ::= atom (('^' | '**') unary)?
    atom    ::= number | 'r' | 'pi' | name '(' sum (',' sum)* ')' | '(' sum ')'
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .component import near
from .errors import SpecError


def _log_cosh(x: Tensor) -> Tensor:
    """log(cosh(x)) without overflow; `log(cosh(..))` in a formula is read as this."""
    return x.abs() + F.softplus(-2 * x.abs()) - math.log(2)


FUNCTIONS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "abs": (1, torch.abs),
    "atan": (1, torch.atan),
    "cos": (1, torch.cos),
    "cosh": (1, torch.cosh),
    "erf": (1, torch.erf),
    "exp": (1, torch.exp),
    "log": (1, torch.log),
    "log1p": (1, torch.log1p),
    "logcosh": (1, _log_cosh),
    "max": (2, torch.maximum),
    "min": (2, torch.minimum),
    "relu": (1, torch.relu),
    "sigmoid": (1, torch.sigmoid),
    "sign": (1, torch.sign),
    "sin": (1, torch.sin),
    "sinh": (1, torch.sinh),
    "softplus": (1, F.softplus),
    "sqrt": (1, torch.sqrt),
    "tanh": (1, torch.tanh),
}
TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<sign>\*\*|[-+*/^(),]))", re.ASCII
)
MAX_DEPTH = 50
MAX_LENGTH = 500
MAX_TOKENS = 200  # bounds the depth of a long sum, which nests to the left
PROBES = (-3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0)

Tree = tuple[Any, ...]  # ("number", value) | ("r",) | (operator, left, right) | ("neg", tree) | ("call", name, *trees)


class Formula:
    """A parsed formula in r; calling it with a tensor gives the value entry by entry.

    Raises:
        SpecError: on anything but numbers, r, pi, + - * / ^ **, brackets and the named functions; on constants without a finite value
            (1/0, 9^9^9, log(0)); on a formula without r; and where it, or its slope, is not finite at some r near 0 (log(r), 1/r,
            sqrt(abs(r))).
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = _parse(text)

    def __call__(self, r: Tensor) -> Tensor:
        return torch.as_tensor(_evaluate(self.tree, r), dtype=r.dtype, device=r.device).expand_as(r)

    def __str__(self) -> str:
        return self.text


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at, self.depth = text, [], 0, 0
        if len(text) > MAX_LENGTH:
            raise SpecError(f"a formula of {len(text)} characters", f"at most {MAX_LENGTH}", "", "bias.formula")
        place, stripped = 0, text.rstrip(" \t\r\n")
        while place < len(stripped):
            match = TOKEN.match(stripped, place)
            if match is None:
                rest = stripped[place:].lstrip(" \t\r\n")
                raise self.error(f"{rest[:1]!r}", len(stripped) - len(rest))
            self.tokens.append((str(match.lastgroup), match.group(match.lastgroup or 0), match.start(match.lastgroup or 0)))
            place = match.end()
            if len(self.tokens) > MAX_TOKENS:
                raise self.error(f"more than {MAX_TOKENS} numbers, names and signs", place)

    def error(self, got: str, place: int, hint: str = "") -> SpecError:
        return SpecError(
            f"{got} at column {place + 1} of formula {_shown(self.text)}",
            "numbers, r, pi, + - * / ^ **, ( ) and " + ", ".join(FUNCTIONS), hint, "bias.formula",
        )

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        if self.peek() and (not wanted or self.peek() in wanted):
            self.at += 1
            return self.tokens[self.at - 1][1]
        place = self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text)
        got = f"{self.peek()!r}" if self.peek() else "the end"
        raise self.error(f"{got} instead of {' or '.join(map(repr, wanted)) or 'a value'}", place)

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"more than {MAX_DEPTH} brackets inside each other", 0)
        tree = self.product()
        while self.peek() in ("+", "-"):
            tree = (self.take(), tree, self.product())
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        tree = self.unary()
        while self.peek() in ("*", "/"):
            tree = (self.take(), tree, self.unary())
        return tree

    def unary(self) -> Tree:
        signs = 0
        while self.peek() in ("+", "-"):
            signs += self.take() == "-"
        tree = self.power()
        return ("neg", tree) if signs % 2 else tree

    def power(self) -> Tree:
        tree = self.atom()
        if self.peek() not in ("^", "**"):
            return tree
        self.take()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"more than {MAX_DEPTH} powers inside each other", 0)
        tree = ("^", tree, self.unary())
        self.depth -= 1
        return tree

    def atom(self) -> Tree:
        if self.at >= len(self.tokens):
            raise self.error("the end instead of a value", len(self.text))
        group, word, place = self.tokens[self.at]
        self.at += 1
        if group == "number":
            return ("number", float(word))
        if word == "(":
            tree = self.sum()
            self.take(")")
            return tree
        if group == "name" and self.peek() == "(":
            return self.call(word, place)
        if word in ("r", "pi"):
            return ("r",) if word == "r" else ("number", math.pi)
        raise self.error(f"{word!r}", place, near(word, ["r", "pi", *FUNCTIONS]))

    def call(self, name: str, place: int) -> Tree:
        if name not in FUNCTIONS:
            raise self.error(f"a function {name!r}", place, near(name, FUNCTIONS))
        self.take("(")
        args = [self.sum()]
        while self.peek() == ",":
            self.take()
            args.append(self.sum())
        self.take(")")
        if len(args) != FUNCTIONS[name][0]:
            raise self.error(f"{name} with {len(args)} arguments", place, f"{name} takes {FUNCTIONS[name][0]}")
        if name == "log" and args[0][:2] == ("call", "cosh"):
            return ("call", "logcosh", args[0][2])
        return ("call", name, *args)


@lru_cache(maxsize=256)
def _parse(text: str) -> Tree:
    reader = _Reader(text)
    tree = reader.sum()
    if reader.peek():
        reader.take("the end")
    tree = _fold(tree, text)
    if tree[0] == "number":
        raise SpecError(f"formula {_shown(text)} without r", "a formula in r = prediction - target", "0.5*r^2", "bias.formula")
    for r in PROBES:
        for what, value in zip(("", "the slope of "), _value_and_slope(tree, r), strict=True):
            if not math.isfinite(value):
                got, hint = f"{what}formula {_shown(text)} is {value:g} at r = {r:g}", "abs(r) + 1e-6 in place of r" if r <= 0 else ""
                if what:
                    hint = "sqrt(r^2 + 1e-6) for a root" if r == 0 else ""
                raise SpecError(got, "a formula that is finite for every r, of either sign, and so is its slope", hint, "bias.formula")
    return tree


def _value_and_slope(tree: Tree, r: float) -> tuple[float, float]:
    """The formula and its derivative, which drives the memory, at one r."""
    with torch.inference_mode(False), torch.enable_grad():
        at = torch.tensor(r, dtype=torch.float64, requires_grad=True)
        value = _evaluate(tree, at)
        (slope,) = torch.autograd.grad(value, at) if value.requires_grad else (torch.zeros(()),)
    return float(value.detach()), float(slope)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _fold(tree: Tree, text: str) -> Tree:
    """`tree` with every part that has no r replaced by its value, which must be finite."""
    if tree[0] in ("number", "r"):
        parts: list[Tree] = []
        folded = tree
    else:
        start = 2 if tree[0] == "call" else 1
        parts = [_fold(t, text) for t in tree[start:]]
        folded = (*tree[:start], *parts)
    if tree[0] == "r" or any(part[0] != "number" for part in parts):
        return folded
    try:
        value = float(_evaluate(folded, torch.zeros((), dtype=torch.float64)))
    except (ArithmeticError, TypeError, ValueError):  # too large, divided by zero, or a complex root
        value = math.nan
    if not math.isfinite(value):
        raise SpecError(f"a constant without a finite value in formula {_shown(text)}", "finite numbers", "", "bias.formula")
    return ("number", value)


def _evaluate(tree: Tree, r: Tensor) -> Any:
    head = tree[0]
    if head == "number":
        return tree[1]
    if head == "r":
        return r
    args = [_evaluate(t, r) for t in (tree[2:] if head == "call" else tree[1:])]
    if head == "call":
        args = [torch.full_like(r, a) if isinstance(a, float) else a for a in args]
        return FUNCTIONS[tree[1]][1](*args)
    if head == "neg":
        return -args[0]
    if head == "^":
        return _power(*args)
    return {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}[head](*args)


def _power(base: Any, exponent: Any) -> Any:
    """Whole exponents become products, so that derivatives at 0 are exact."""
    if isinstance(exponent, float) and exponent == int(exponent) and 1 <= exponent <= 8:
        out = base
        for _ in range(int(exponent) - 1):
            out = out * base
        return out
    return base**exponent
