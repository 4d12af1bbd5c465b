"""The derivative of every pointwise function, in terms of those functions alone, so that every order exists.

Where it sits: `autodiff` multiplies cotangents with these slopes. `None` is a slope that is zero everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from memkit.compiler.ir import Node, Op, add, const, mul, neg, pointwise, sub

Slopes = tuple[Node | None, ...]

ONE, TWO, HALF = const(1.0), const(2.0), const(0.5)


def _f(fn: str, *args: Node) -> Node:
    return pointwise(fn, *args)


def _square(x: Node) -> Node:
    return _f("square", x)


def _normal(x: Node) -> Node:
    """The standard normal density."""
    return mul(const(1 / math.sqrt(2 * math.pi)), _f("exp", mul(const(-0.5), _square(x))))


def _silu_curve(x: Node) -> Node:
    gate = _f("sigmoid", x)
    return mul(mul(gate, sub(ONE, gate)), add(TWO, mul(x, sub(ONE, mul(TWO, gate)))))


# fn -> slope, from the operand x and the value y
UNARY: Mapping[str, Callable[[Node, Node], Node | None]] = {
    "neg": lambda x, y: const(-1.0),
    "exp": lambda x, y: y,
    "log": lambda x, y: _f("reciprocal", x),
    "sqrt": lambda x, y: _f("div", HALF, y),
    "rsqrt": lambda x, y: mul(const(-0.5), mul(y, _square(y))),
    "reciprocal": lambda x, y: neg(_square(y)),
    "abs": lambda x, y: _f("sign", x),
    "square": lambda x, y: mul(TWO, x),
    "log1p": lambda x, y: _f("reciprocal", add(ONE, x)),
    "expm1": lambda x, y: _f("exp", x),
    "tanh": lambda x, y: sub(ONE, _square(y)),
    "sigmoid": lambda x, y: mul(y, sub(ONE, y)),
    "erf": lambda x, y: mul(const(2 / math.sqrt(math.pi)), _f("exp", neg(_square(x)))),
    "sin": lambda x, y: _f("cos", x),
    "cos": lambda x, y: neg(_f("sin", x)),
    "cosh": lambda x, y: _f("sinh", x),
    "sinh": lambda x, y: _f("cosh", x),
    "gelu": lambda x, y: _f("gelu_slope", x),
    "gelu_slope": lambda x, y: mul(_normal(x), sub(TWO, _square(x))),
    "silu": lambda x, y: _f("silu_slope", x),
    "silu_slope": lambda x, y: _silu_curve(x),
    "softplus": lambda x, y: _f("sigmoid", x),
    "atan": lambda x, y: _f("reciprocal", add(ONE, _square(x))),
    **dict.fromkeys(("sign", "floor", "ceil", "round"), lambda x, y: None),
}


def _power(y: Node, a: Node, b: Node) -> Slopes:
    """d a^b: no 0 * inf at a = 0. A constant exponent gives the power one lower, and 1 and 2 give no power at all."""
    if b.op is Op.CONST:
        exponent = b.attrs["value"]
        easy = {0.0: None, 1.0: ONE, 2.0: mul(TWO, a)}
        lower = const(exponent - 1)
        return easy[exponent] if exponent in easy else mul(b, _f("pow", a, lower)), None
    zero = const(0.0)
    base = _f("where", _f("eq", b, zero), zero, mul(b, _f("pow", a, sub(b, ONE))))
    flat = mul(_f("eq", a, zero), _f("ge", b, zero))
    safe = _f("where", flat, ONE, a)
    return base, _f("where", flat, zero, mul(y, _f("log", safe)))


def _split_ties(over: str, at_least: str) -> Callable[[Node, Node, Node], Slopes]:
    """The larger (or smaller) operand takes the cotangent; equal ones take half each."""

    def slope(a: Node, b: Node) -> Node:
        return mul(HALF, add(_f(over, a, b), _f(at_least, a, b)))

    return lambda y, a, b: (slope(a, b), slope(b, a))


# fn -> slopes, from the value y and the operands; WHERE masks cotangents instead, in `autodiff`
BINARY: Mapping[str, Callable[[Node, Node, Node], Slopes]] = {
    "add": lambda y, a, b: (ONE, ONE),
    "sub": lambda y, a, b: (ONE, const(-1.0)),
    "mul": lambda y, a, b: (b, a),
    "div": lambda y, a, b: (_f("reciprocal", b), neg(_f("div", y, b))),
    "maximum": _split_ties("gt", "ge"),
    "minimum": _split_ties("lt", "le"),
    "pow": _power,
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq"), lambda y, a, b: (None, None)),
}


def slopes(node: Node) -> Slopes:
    """The slope of a POINTWISE node (all but `where`) in each of its operands."""
    fn = node.attrs["fn"]
    if fn in UNARY:
        return (UNARY[fn](node.args[0], node),)
    return BINARY[fn](node, *node.args)
