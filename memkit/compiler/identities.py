"""Pointwise functions, and pairs of factors, as sums of products: each an identity of real numbers with a name.

Where it sits: `canonical` looks its rules up here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from .interpret import FUNCTION_MEANING
from .terms import Factor, Sum, Symbol, constant, value_of

if TYPE_CHECKING:
    from .canonical import Canonical


def opaque(fn: str) -> Callable[..., Sum]:
    def rule(c: Canonical, *args: Sum) -> Sum:
        values = [value_of(a) for a in args]
        if all(v is not None for v in values):
            return constant(float(FUNCTION_MEANING[fn](*(torch.tensor(v, dtype=torch.float64) for v in values))))
        return c.call(fn, args)

    return rule


def _add(c: Canonical, a: Sum, b: Sum) -> Sum:
    if not a or not b:
        c.rewrites.note("x + 0 = x", c.where)
    return c.add(a, b)


def _power(c: Canonical, a: Sum, b: Sum) -> Sum:
    exponent = value_of(b)
    if exponent is None:
        return c.call("pow", [a, b])
    if value_of(a) is not None:
        return opaque("pow")(c, a, b)
    if exponent in (0.0, 1.0):
        c.rewrites.note("x^1 = x" if exponent else "x^0 = 1", c.where)
        return a if exponent else constant(1.0)
    if exponent == int(exponent) and 0 < exponent <= 8:
        c.rewrites.note("x^n = x .. x", c.where)
        found = a
        for _ in range(int(exponent) - 1):
            found = c.product(found, a)
        return found
    named = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    return opaque(named[exponent])(c, a) if exponent in named else c.call("pow", [a, b])


def _square(c: Canonical, a: Sum) -> Sum:
    c.rewrites.note("square(x) = x x", c.where)
    return c.product(a, a)


def _div(c: Canonical, a: Sum, b: Sum) -> Sum:
    value = value_of(b)
    return c.scale(a, 1 / value) if value else c.product(a, opaque("reciprocal")(c, b))


def _where(c: Canonical, flag: Sum, a: Sum, b: Sum) -> Sum:
    c.rewrites.note("where(f, a, b) = f a + (1 - f) b", c.where)
    return c.add(c.product(flag, a), b, c.scale(c.product(flag, b), -1.0))


def _not(c: Canonical, flag: Sum) -> Sum:
    return c.add(constant(1.0), c.scale(flag, -1.0))


def difference(c: Canonical, a: Sum, b: Sum) -> Sum:
    return c.collected([a, c.scale(b, -1.0)])


def _equal(c: Canonical, a: Sum, b: Sum) -> Sum:
    value = value_of(difference(c, a, b))
    return c.call("zero", [difference(c, a, b)]) if value is None else constant(float(value == 0))


POINTWISE: Mapping[str, Callable[..., Sum]] = {
    "add": _add,
    "sub": lambda c, a, b: _add(c, a, c.scale(b, -1.0)),
    "neg": lambda c, a: c.scale(a, -1.0),
    "mul": lambda c, a, b: c.product(a, b),
    "div": _div,
    "pow": _power,
    "square": _square,
    "where": _where,
    "gt": lambda c, a, b: c.flag(difference(c, a, b)),
    "lt": lambda c, a, b: c.flag(difference(c, b, a)),
    "ge": lambda c, a, b: _not(c, c.flag(difference(c, b, a))),
    "le": lambda c, a, b: _not(c, c.flag(difference(c, a, b))),
    "eq": _equal,
    "silu": lambda c, a: c.product(a, opaque("sigmoid")(c, a)),
    "silu_slope": lambda c, a: _silu_slope(c, a, opaque("sigmoid")(c, a)),
}


def _silu_slope(c: Canonical, x: Sum, gate: Sum) -> Sum:
    return c.product(gate, c.add(constant(1.0), c.product(x, _not(c, gate))))


# pairs of functions of one argument whose product is simpler: (name, the product from the argument and both factors)

PairRule = Callable[["Canonical", Sum, Factor, Factor], Sum]


def _one(factor: Factor) -> Sum:
    return {(factor,): 1.0}


def _square_of(c: Canonical, x: Sum, a: Factor, b: Factor) -> Sum:
    """x x, the two with summed indices of their own."""
    other = {tuple((s, tuple((*i, "2") if isinstance(i, tuple) else i for i in n)) for s, n in f): k for f, k in x.items()}
    return {(*f, *g): k * m for f, k in x.items() for g, m in other.items()}  # type: ignore[misc]


def _not_zero(c: Canonical, x: Sum, a: Factor, b: Factor) -> Sum:
    (number,) = c.table.symbols[a[0]].args
    return {(): 1.0, ((c.table.symbol(Symbol("zero", None, (number,))), a[1]),): -1.0}


PAIRS: Mapping[tuple[str, str], tuple[str, PairRule]] = {
    ("abs", "abs"): ("|x| |x| = x x", _square_of),
    ("sign", "abs"): ("sign(x) |x| = x", lambda c, x, a, b: x),
    ("sign", "sign"): ("sign(x) sign(x) = 1 - (x = 0)", _not_zero),
    ("zero", "abs"): ("(x = 0) |x| = 0", lambda c, x, a, b: {}),
    ("zero", "sign"): ("(x = 0) sign(x) = 0", lambda c, x, a, b: {}),
    ("positive", "zero"): ("(x > 0) (x = 0) = 0", lambda c, x, a, b: {}),
    ("positive", "positive"): ("f f = f, f a flag", lambda c, x, a, b: _one(a)),
    ("zero", "zero"): ("f f = f, f a flag", lambda c, x, a, b: _one(a)),
}
PAIRED = frozenset(first for first, _ in PAIRS)
