"""Torch's operations in terms of the graph's: one table by name, used by `trace`.

A rule takes the axis book-keeper and the operation's own arguments, tensors that depend on an input being `Value`s and
constants plain tensors; it returns a `Value`, or a tuple of them. Derivatives at the kinks follow torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memkit.compiler import ir
from memkit.compiler.ir import Node, Op, const
from memkit.compiler.trace_parts import PARTS
from memkit.compiler.trace_values import Axes, Untraceable, Value, dims_of

Rule = Callable[..., Any]

# the entries of these do not depend on the tensor they are made after
CONSTANT_LIKE = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "fill")
)

# torch has these under the graph's own names, and with the graph's meaning
SAME_NAME = (
    "mul", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "pow", "where", "square", "neg", "exp", "log", "sqrt",
    "rsqrt", "reciprocal", "abs", "sign", "log1p", "expm1", "tanh", "sigmoid", "erf", "sin", "cos", "cosh", "sinh",
    "silu", "floor", "ceil", "round", "atan",
)  # fmt: skip

# entry by entry


def _function(fn: str) -> Rule:
    return lambda t, *args, **kwargs: t.pointwise(fn, *args)


def _add(t: Axes, a: Any, b: Any, alpha: float = 1) -> Value:
    return t.pointwise("add", a, b if alpha == 1 else t.pointwise("mul", alpha, b))


def _sub(t: Axes, a: Any, b: Any, alpha: float = 1) -> Value:
    return t.pointwise("sub", a, b if alpha == 1 else t.pointwise("mul", alpha, b))


def _div(t: Axes, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    found = t.pointwise("div", a, b)
    if rounding_mode is None:
        return found
    if rounding_mode == "floor":
        return t.pointwise("floor", found)
    raise Untraceable("division that truncates", "rounding_mode 'floor'")


def _gelu(t: Axes, x: Value, approximate: str = "none") -> Value:
    if approximate == "none":
        return t.pointwise("gelu", x)
    cube = t.pointwise("mul", t.pointwise("square", x), x)
    inner = t.pointwise("add", x, t.pointwise("mul", 0.044715, cube))
    gate = t.pointwise("add", 1.0, t.pointwise("tanh", t.pointwise("mul", math.sqrt(2 / math.pi), inner)))
    return t.pointwise("mul", t.pointwise("mul", 0.5, x), gate)


def _softplus(t: Axes, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    found = t.pointwise("softplus", x if beta == 1 else t.pointwise("mul", beta, x))
    return found if beta == 1 else t.pointwise("div", found, beta)


def _positive(t: Axes, x: Value) -> Value:
    return t.pointwise("gt", x, 0.0)


def _relu(t: Axes, x: Value) -> Value:
    return t.pointwise("where", _positive(t, x), x, 0.0)


def _leaky_relu(t: Axes, x: Value, negative_slope: float = 0.01) -> Value:
    return t.pointwise("where", _positive(t, x), x, t.pointwise("mul", negative_slope, x))


def _elu(t: Axes, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    positive = _positive(t, x)
    below = t.pointwise("where", positive, 0.0, x)  # keeps exp from overflowing where it is not taken
    curve = t.pointwise("expm1", t.pointwise("mul", input_scale, below))
    found = t.pointwise("where", positive, x, t.pointwise("mul", alpha, curve))
    return found if scale == 1 else t.pointwise("mul", scale, found)


def _clamp(t: Axes, x: Any, min: Any = None, max: Any = None) -> Value:
    """At a bound the slope is 1, so a comparison is strict."""
    if min is not None:
        x = t.pointwise("where", t.pointwise("lt", x, min), min, x)
    return x if max is None else t.pointwise("where", t.pointwise("gt", x, max), max, x)


def _hardtanh(t: Axes, x: Value, min_val: float = -1, max_val: float = 1) -> Value:
    x = t.pointwise("where", t.pointwise("le", x, min_val), min_val, x)
    return t.pointwise("where", t.pointwise("ge", x, max_val), max_val, x)


def _not(t: Axes, flag: Any) -> Value:
    return t.pointwise("eq", flag, 0.0)


def _scaled(fn: str, inside: float = 1, outside: float = 1) -> Rule:
    def rule(t: Axes, x: Value) -> Value:
        found = t.pointwise(fn, x if inside == 1 else t.pointwise("mul", inside, x))
        return found if outside == 1 else t.pointwise("mul", outside, found)

    return rule


def _cast(t: Axes, x: Value, dtype: torch.dtype | None = None, **kwargs: Any) -> Value:
    if dtype is not None and not dtype.is_floating_point and dtype is not torch.bool:
        raise Untraceable(f"a cast to {dtype}", "floating-point tensors throughout")
    return x


def _detach(t: Axes, x: Value) -> Value:
    raise Untraceable("detach", "equations that are differentiated as written")


# sums, norms


def sum_node(node: Node, over: Sequence[str]) -> Node:
    """`node` summed over axes; a product that is summed is a contraction, and numbers and signs stay outside."""
    if not over or node.op is not Op.POINTWISE:
        return ir.reduce(node, over)
    fn, args = node.attrs["fn"], node.args
    if fn == "neg":
        return ir.neg(sum_node(args[0], over))
    if fn != "mul":
        return ir.reduce(node, over)
    for one, other in (args, args[::-1]):
        if not one.axes:
            return ir.mul(one, sum_node(other, over))
    return ir.einsum(*args, keep=[a for a in node.axes if a not in over])


def _fold(t: Axes, x: Value, dims: Sequence[int], keepdim: bool, fn: str) -> Value:
    over = [n for n in (x.names[d] for d in dims) if n is not None]
    node = sum_node(x.node, over) if fn == "sum" else ir.reduce(x.node, over, fn)
    repeats = math.prod(x.shape[d] for d in dims if x.names[d] is None)
    if fn == "sum" and repeats != 1:
        node = ir.mul(const(repeats), node)
    for d in reversed(dims):
        x = x.set(d, *([(None, 1)] if keepdim else []))
    return Value(node, x.names, x.shape)


def _sum(t: Axes, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return _fold(t, x, dims_of(x, dim), keepdim, "sum")


def _mean(t: Axes, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    dims = dims_of(x, dim)
    return t.pointwise("div", _fold(t, x, dims, keepdim, "sum"), math.prod(x.shape[d] for d in dims))


def _amax(t: Axes, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _fold(t, x, dims_of(x, dim), keepdim, "max")


def _amin(t: Axes, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return t.pointwise("neg", _amax(t, t.pointwise("neg", x), dim, keepdim))


def _extreme(whole: Rule, pick: str) -> Rule:
    """max and min: over everything, over one dimension (indices are not traced), or of two tensors."""

    def rule(t: Axes, x: Any, *args: Any, **kwargs: Any) -> Any:
        if args and not isinstance(args[0], int):
            return t.pointwise(pick, x, args[0])
        found = whole(t, x, *args, **kwargs)
        return (found, None) if args or kwargs else found

    return rule


def _var(t: Axes, x: Value, dim: Any = None, correction: float | None = 1, keepdim: bool = False) -> Value:
    dims = dims_of(x, dim)
    off = t.pointwise("sub", x, _mean(t, x, dims, True))
    count = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    return t.pointwise("div", _sum(t, t.pointwise("mul", off, off), dims, keepdim), count)


def _root(t: Axes, x: Value, power: float = 0.5) -> Value:
    """x^power with slope 0 at x = 0, as torch gives norms."""
    away = _positive(t, x)
    safe = t.pointwise("where", away, x, 1.0)
    return t.pointwise("where", away, t.pointwise("pow", safe, power), 0.0)


def _std(t: Axes, x: Value, *args: Any, **kwargs: Any) -> Value:
    return _root(t, _var(t, x, *args, **kwargs))


def _norm(t: Axes, x: Value, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    dims = dims_of(x, dim)
    if ord == 2:
        return _root(t, _sum(t, t.pointwise("mul", x, x), dims, keepdim))
    size = t.pointwise("abs", x)
    if ord == 1:
        return _sum(t, size, dims, keepdim)
    if math.isinf(ord) and ord > 0:
        return _amax(t, size, dims, keepdim)
    if ord <= 0:
        raise Untraceable(f"norm of order {ord}", "orders above 0")
    return _root(t, _sum(t, t.pointwise("pow", size, ord), dims, keepdim), 1 / ord)


def _softmax(t: Axes, x: Value, dim: int, *_: Any) -> Value:
    weights = t.pointwise("exp", t.pointwise("sub", x, _amax(t, x, dim, True)))
    return t.pointwise("div", weights, _sum(t, weights, dim, True))


def _logsumexp(t: Axes, x: Value, dim: Any, keepdim: bool = False) -> Value:
    weights = t.pointwise("exp", t.pointwise("sub", x, _amax(t, x, dim, True)))
    return t.pointwise("add", t.pointwise("log", _sum(t, weights, dim, keepdim)), _amax(t, x, dim, keepdim))


def _log_softmax(t: Axes, x: Value, dim: int, *_: Any) -> Value:
    return t.pointwise("sub", x, _logsumexp(t, x, dim, True))


def _layer_norm(t: Axes, x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    dims = list(range(len(x.shape) - len(shape), len(x.shape)))
    off = t.pointwise("sub", x, _mean(t, x, dims, True))
    scale = t.pointwise("rsqrt", t.pointwise("add", _mean(t, t.pointwise("mul", off, off), dims, True), eps))
    found = t.pointwise("mul", off, scale)
    found = found if weight is None else t.pointwise("mul", found, weight)
    return found if bias is None else t.pointwise("add", found, bias), None, None


# products

PRODUCTS = {
    "mm": "ik,kj->ij",
    "mv": "ik,k->i",
    "dot": "k,k->",
    "vdot": "k,k->",
    "bmm": "bik,bkj->bij",
}


def _product(spec: str) -> Rule:
    return lambda t, a, b: t.contract(spec, a, b)


def _add_product(spec: str) -> Rule:
    def rule(t: Axes, x: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Value:
        found = t.contract(spec, a, b)
        found = found if alpha == 1 else t.pointwise("mul", alpha, found)
        return t.pointwise("add", x if beta == 1 else t.pointwise("mul", beta, x), found)

    return rule


def _same(t: Axes, x: Value, *args: Any, **kwargs: Any) -> Value:
    return x


ATEN: Mapping[str, Rule] = {
    **{fn: _function(fn) for fn in SAME_NAME},
    **{name: _product(spec) for name, spec in PRODUCTS.items()},
    **PARTS,
    "sgn": _function("sign"),
    "add": _add,
    "sub": _sub,
    "rsub": lambda t, a, b, alpha=1: _sub(t, b, a, alpha),
    "div": _div,
    "gelu": _gelu,
    "softplus": _softplus,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "clamp": _clamp,
    "clamp_min": lambda t, x, low: _clamp(t, x, low),
    "clamp_max": lambda t, x, high: _clamp(t, x, None, high),
    "hardtanh": _hardtanh,
    "exp2": _scaled("exp", inside=math.log(2)),
    "log2": _scaled("log", outside=1 / math.log(2)),
    "log10": _scaled("log", outside=1 / math.log(10)),
    "tan": lambda t, x: t.pointwise("div", t.pointwise("sin", x), t.pointwise("cos", x)),
    "erfc": lambda t, x: t.pointwise("sub", 1.0, t.pointwise("erf", x)),
    "ne": lambda t, a, b: _not(t, t.pointwise("eq", a, b)),
    "logical_not": _not,
    "bitwise_not": _not,
    "logical_and": lambda t, a, b: _not(t, t.pointwise("maximum", _not(t, a), _not(t, b))),
    "bitwise_and": lambda t, a, b: t.pointwise("mul", a, b),
    "bitwise_or": lambda t, a, b: t.pointwise("maximum", a, b),
    "masked_fill": lambda t, x, mask, value: t.pointwise("where", mask, value, x),
    "_to_copy": _cast,
    "detach": _detach,
    "sum": _sum,
    "mean": _mean,
    "amax": _amax,
    "amin": _amin,
    "max": _extreme(_amax, "maximum"),
    "min": _extreme(_amin, "minimum"),
    "var": _var,
    "std": _std,
    "linalg_vector_norm": _norm,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "native_layer_norm": _layer_norm,
    "addmm": _add_product("ik,kj->ij"),
    "addmv": _add_product("ik,k->i"),
    "baddbmm": _add_product("bik,bkj->bij"),
    "clone": _same,
    "alias": _same,
    "contiguous": _same,
    "lift_fresh": _same,
    "lift_fresh_copy": _same,
}
