"""How each operation is written in torch: one table, Op -> function from the node and its operands to a `Value`.

The functions ask their `Writer` for what is not in the operands: a name for an expression that is read twice, the length
of an axis, a constant at the head of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from memkit.compiler.emit_values import (
    COMPARE,
    PRODUCT,
    SUM,
    UNARY,
    Value,
    arrange,
    broadcast_order,
    call,
    contract,
    dims,
    index,
    infix,
    number,
    permute,
    times,
)
from memkit.compiler.ir import Node, Op


class Writer(Protocol):
    """What an operation may ask of the function being written."""

    like: str  # a tensor that new ones take their type and device from

    def bind(self, value: Value, hint: str = "") -> Value: ...

    def size(self, node: Node, axis: str) -> str: ...

    def helper(self, name: str) -> str: ...

    def constant(self, values: Any, hint: str, whole: bool = False) -> str: ...


def as_tensor(w: Writer, value: Value) -> Value:
    """A number becomes a tensor without dimensions, a flag a number."""
    if value.kind == "number":
        return Value(f"{w.like}.new_full((), {value.text})")
    return Value(f"{value.bound(UNARY + 1)}.to({w.like}.dtype)", value.axes) if value.kind == "bool" else value


def _counted(x: Value, axis: str) -> str:
    """The dimension of `axis`, counted from the end."""
    return str(x.axes.index(axis) - len(x.axes))


# ---- pointwise

INFIX = {
    **{"add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT)},
    **{"gt": (">", COMPARE), "ge": (">=", COMPARE), "lt": ("<", COMPARE), "le": ("<=", COMPARE), "eq": ("==", COMPARE)},
}
FLAGS = ("gt", "ge", "lt", "le", "eq")
CLAMPS = {"maximum": "min", "minimum": "max"}
IN_FUNCTIONAL = ("gelu", "silu", "softplus")
OWN = ("gelu_slope", "silu_slope")


def pointwise(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    fn = node.attrs["fn"]
    if fn == "mul" and node.args[0] is node.args[1]:
        fn, args = "square", args[:1]
    args = _ready(w, fn, args)
    if all(a.kind == "number" for a in args):
        if fn not in ("add", "sub", "mul", "div"):
            args = [as_tensor(w, args[0]), *args[1:]]
        else:
            return replace(infix(*INFIX[fn], args[0], args[1], ()), kind="number")
    taken = _take_product(fn, args) or _take_factors(fn, args)
    if taken is not None:
        return taken
    order = broadcast_order([a for a in args if a.kind != "number"], node.axes)
    return _write(w, fn, [arrange(a, order) for a in args], order)


def _ready(w: Writer, fn: str, args: Sequence[Value]) -> list[Value]:
    """Flags stay flags where torch takes them as they are: as a condition, and as a factor of something that is none."""
    if fn == "where":
        flag = as_tensor(w, args[0]) if args[0].kind == "number" else args[0]
        flag = flag if flag.kind == "bool" else infix("!=", COMPARE, flag, number(0.0), flag.axes)
        rest = [as_tensor(w, a) if a.kind == "bool" else a for a in args[1:]]
        return [flag, as_tensor(w, rest[0]) if all(a.kind == "number" for a in rest) else rest[0], rest[1]]
    keep = fn == "mul" and any(a.kind == "tensor" for a in args)
    return [a if keep or a.kind != "bool" else as_tensor(w, a) for a in args]


def _write(w: Writer, fn: str, args: list[Value], axes: Sequence[str]) -> Value:
    kinds = [a.kind for a in args]
    if fn in INFIX:
        out = times(args[0], args[1], axes) if fn == "mul" else infix(*INFIX[fn], args[0], args[1], axes)
        return replace(out, kind="bool") if fn in FLAGS else out
    if fn == "neg":
        return Value(f"-{args[0].bound(UNARY)}", tuple(axes), UNARY)
    if fn == "pow":
        if args[1].text == "2.0":
            return call("torch.square", args[:1], axes)
        return Value(f"{args[0].bound(UNARY + 1)} ** {args[1].bound(UNARY)}", tuple(axes), UNARY)
    if fn in CLAMPS and "number" in kinds:
        x, bound = args if kinds[1] == "number" else reversed(args)
        return x.then(f".clamp({CLAMPS[fn]}={bound.text})", axes)
    name = w.helper(fn) if fn in OWN else f"torch.nn.functional.{fn}" if fn in IN_FUNCTIONAL else f"torch.{fn}"
    return call(name, args, axes)


def _take_product(fn: str, args: Sequence[Value]) -> Value | None:
    """A sum with a batched matrix product in one call, and a number's product with one, which the sum may still take in."""
    if fn == "neg" or (fn == "mul" and args[0].kind == "number" and args[1].product):
        product, factor = args[-1].product, -1.0 if fn == "neg" else float(args[0].text)
        if product is None:
            return None
        scaled = product._replace(scale=product.scale * factor)
        plain = f"-{args[-1].bound(UNARY)}" if fn == "neg" else f"{args[0].text} * {args[-1].bound(PRODUCT + 1)}"
        return Value(plain, args[-1].axes, UNARY if fn == "neg" else PRODUCT, product=scaled)
    if fn == "mul" and args[1].kind == "number" and args[0].product:
        return _take_product(fn, [args[1], args[0]])
    if fn not in ("add", "sub"):
        return None
    for other, own, first in ((args[0], args[1], 1.0), (args[1], args[0], -1.0 if fn == "sub" else 1.0)):
        if own.product and other.kind == "tensor" and set(other.axes) <= set(own.axes):
            scale = own.product.scale * (-1.0 if fn == "sub" and own is args[1] else 1.0)
            factors = [f"{key}={value:g}" for key, value in (("beta", first), ("alpha", scale)) if value != 1.0]
            left, right, axes = own.product.left, own.product.right, own.axes
            if other.axes == (*axes[:-2], axes[-1], axes[-2]):  # a product is turned for nothing, a sum that lies across costs a copy
                left, right, axes = right.then(".mT", ()), left.then(".mT", ()), other.axes
            return call("torch.baddbmm", [arrange(other, axes), left, right, *factors], axes)
    return None


def _take_factors(fn: str, args: Sequence[Value]) -> Value | None:
    """A sum with an elementwise product in one call, which saves a pass over memory."""
    if fn not in ("add", "sub"):
        return None
    for other, own in ((args[0], args[1]), (args[1], args[0])):
        if not own.factors or other.kind != "tensor" or not set(other.axes) <= set(own.axes) or (fn == "sub" and own is args[0]):
            continue
        a, b = own.factors
        into = arrange(other, own.axes)
        if {a.kind, b.kind} == {"tensor"}:
            return call("torch.addcmul", [into, a, b, *(["value=-1"] if fn == "sub" else [])], own.axes)
    return None


def slope_product(w: Writer, x: Value, other: Value, axes: Sequence[str]) -> Value:
    """other * gelu_slope(x), for which torch has one call."""
    other = as_tensor(w, other)
    order = broadcast_order((other, x), axes)
    return call("torch.ops.aten.gelu_backward", [arrange(other, order), arrange(x, order)], order)


# ---- contraction, repetition, choice


def _einsum(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    a, b = args
    if a.kind == b.kind == "number":
        a = as_tensor(w, a)
    return contract(a, b, node.axes, w.bind)


def _masked_product(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    z, x, c, d = args
    gone = node.attrs["contract"]
    axes = [a for a in (*z.axes, *(a for a in x.axes if a not in z.axes)) if a not in gone]
    cols = node.attrs["cols"]
    axes = [*(a for a in axes if a != cols), *(a for a in axes if a == cols)]
    scores = contract(z, x, axes, w.bind)
    wide = [*axes, *(a for a in c.axes if a not in axes)]
    order = broadcast_order((scores, c), wide)
    weighed = times(scores, c, order)
    return contract(weighed, d, node.axes, w.bind)


def _reduce(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, over = as_tensor(w, args[0]), node.attrs["over"]
    method = {"sum": "sum", "max": "amax"}[node.attrs["fn"]]
    return x.then(f".{method}({dims(x, over)})", [a for a in x.axes if a not in over])


def _expand(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, like = args[0], node.args[1]
    kept = x.axes if x.kind != "number" else ()
    sizes = ["-1" if a in kept else w.size(like, a) for a in node.axes]
    if not kept:
        text = as_tensor(w, x).text if x.kind != "number" else x.text
        if x.kind == "number":
            return Value(f"{w.like}.new_full(({', '.join(sizes)},), {text})", node.axes)
        return Value(f"{text}.expand({', '.join(sizes)})", node.axes)
    return arrange(as_tensor(w, x), node.axes).then(f".expand({', '.join(sizes)})", node.axes)


def _rename(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    names = node.attrs["names"]
    return replace(args[0], axes=tuple(names.get(a, a) for a in args[0].axes))


def _swap(x: Value, old: str, *new: str) -> tuple[str, ...]:
    at = x.axes.index(old)
    return (*x.axes[:at], *new, *x.axes[at + 1 :])


def _gather(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, axis, at = args[0], node.attrs["axis"], node.attrs["index"]
    axes = _swap(x, axis, node.attrs["new"])
    run = _as_slice(at)
    if run is not None:
        return index(x, axis, run, axes)
    name = w.constant(at, node.name or "index", whole=True)
    if x.axes[-1] == axis:
        return call(w.helper("pick"), [x, name], axes)
    return x.then(f".index_select({_counted(x, axis)}, {name})", axes)


def _as_slice(at: Sequence[int]) -> str | None:
    """The indices as a slice, where they rise by a constant step."""
    step = at[1] - at[0] if len(at) > 1 else 1
    if step < 1 or list(at) != list(range(at[0], at[-1] + 1, step)):
        return None
    return f"{at[0]}:{at[-1] + 1}" + (f":{step}" if step > 1 else "")


def _scatter(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    """Every target sums its sources, with the same result on each run."""
    x, axis, at, size = args[0], node.attrs["axis"], node.attrs["index"], node.attrs["size"]
    axes, dim = _swap(x, axis, node.attrs["new"]), _counted(x, axis)
    if list(at) == list(range(at[0], at[0] + len(at))):
        return call(w.helper("pad"), [x, dim, at[0], size - at[-1] - 1], axes)
    sources: list[list[int]] = [[] for _ in range(size)]
    for position, target in enumerate(at):
        sources[target].append(position)
    most, name = max(map(len, sources)), w.constant(at, node.name or "index", whole=True)
    if most * size > 4 * len(at) + 64:  # a few targets take most sources: padding the rest would cost more than it saves
        x = w.bind(x)
        shape = ", ".join(str(size) if a == axis else f"{x.text}.shape[{i}]" for i, a in enumerate(x.axes))
        return Value(f"{x.text}.new_zeros(({shape},)).index_add({dim}, {name}, {x.text})", axes)
    table = tuple((*found, *[len(at)] * (most - len(found))) for found in sources)
    return call(w.helper("sum_groups"), [x, name, w.constant(table, node.name or "sources", whole=True), dim], axes)


# ---- structure along time


def _decay(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, axis = args[0], node.attrs["axis"]
    axes = _swap(x, axis, axis, node.attrs["new"])
    return call(w.helper("decay"), [x] if x.axes[-1] == axis else [x, _counted(x, axis)], axes)


def _last(x: Value, *names: str) -> Value:
    return permute(x, [*(a for a in x.axes if a not in names), *names])


def _band(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x = _last(args[0], node.attrs["axis"], node.attrs["slot"])
    return call(w.helper("band"), [x], [*x.axes[:-1], node.attrs["new"]])


def _unband(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x = _last(args[0], node.attrs["axis"], node.attrs["new"])
    return call(w.helper("unband"), [x, node.attrs["size"]], [*x.axes[:-1], node.attrs["slot"]])


def _tril(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, rows, cols, diagonal = args[0], node.attrs["rows"], node.attrs["cols"], node.attrs["diagonal"]
    if x.axes[-2:] == (cols, rows):
        return x.then(f".triu({-diagonal or ''})", x.axes)
    x = _last(x, rows, cols)
    return x.then(f".tril({diagonal or ''})", x.axes)


def _shift(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    (x, fill), axis, by = args, node.attrs["axis"], node.attrs["by"]
    lacking = [a for a in node.axes if a not in x.axes]
    if lacking:
        order = [*lacking, *x.axes]
        sizes = [w.size(node.args[1], a) if a in lacking else "-1" for a in order]
        x = x.then(f".expand({', '.join(sizes)})", order)
    if fill.kind == "number":
        kept = index(x, axis, ":-1" if by > 0 else "1:", x.axes)
        ends = ["1", "0"] if by > 0 else ["0", "1"]
        value = [] if fill.text == "0.0" else [fill]
        return call(w.helper("pad"), [kept, _counted(x, axis), *ends, *value], x.axes)
    fill = arrange(as_tensor(w, fill), [a for a in x.axes if a != axis])
    return call(w.helper("shift"), [x, fill, _counted(x, axis), by], x.axes)


def _windows(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, attrs = args[0], node.attrs
    axes = [*_swap(x, attrs["axis"], attrs["outer"]), attrs["inner"]]
    return x.then(f".unfold({_counted(x, attrs['axis'])}, {attrs['size']}, {attrs['step']})", axes)


def _fold(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, attrs = args[0], node.attrs
    outer, inner = attrs["outer"], attrs["inner"]
    rest = [a for a in node.axes if a != attrs["axis"]]
    at = node.axes.index(attrs["axis"])
    x = permute(x, [*rest[:at], outer, inner, *rest[at:]])
    length = w.size(node.args[1], attrs["axis"])
    return call(w.helper("overlap_add"), [x, _counted(x, inner), length, attrs["step"]], node.axes)


def _merge(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, (first, second) = args[0], node.attrs["axes"]
    at = x.axes.index(first)
    if x.axes[at : at + 2] != (first, second):
        rest = [a for a in x.axes if a != second]
        at = rest.index(first)
        x = permute(x, [*rest[: at + 1], second, *rest[at + 1 :]])
    return x.then(f".flatten({at}, {at + 1})", [*x.axes[:at], node.attrs["new"], *x.axes[at + 2 :]])


def _split(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, axis = args[0], node.attrs["axis"]
    return x.then(f".unflatten({_counted(x, axis)}, (-1, {node.attrs['size']}))", _swap(x, axis, *node.attrs["new"]))


def _select(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, axis = args[0], node.attrs["axis"]
    return index(x, axis, str(node.attrs["index"]), [a for a in x.axes if a != axis])


def _place(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    x, axis, at = args[0], node.attrs["axis"], node.attrs["index"]
    length = w.size(node.args[1], axis)
    x = arrange(as_tensor(w, x), [a for a in node.axes if a != axis])
    before, after = (str(at), f"{length} - {at + 1}") if at >= 0 else (f"{length} - {-at}", str(-at - 1))
    dim = node.axes.index(axis) - len(node.axes)
    return call(w.helper("pad"), [x.then(f".unsqueeze({dim})", node.axes), str(dim), before, after], node.axes)


def _solve(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    """What only b has are right-hand sides, merged into one axis; batch axes that b lacks are broadcast."""
    (lower, b), (rows, cols) = args, (node.attrs["rows"], node.attrs["cols"])
    batch = [a for a in lower.axes if a not in (rows, cols)]
    sides = [a for a in b.axes if a != rows and a not in batch]
    lower = permute(lower, [*batch, rows, cols])
    out = [*batch, rows, *sides]
    b = arrange(b, out)
    if len(sides) > 1:
        b = w.bind(b)
        right = b.then(f".flatten({-len(sides)})", out)
    else:
        right = b if sides else b.then("[..., None]", out)
    found = call(w.helper("solve"), [lower, right, *(["transpose=True"] if node.attrs["transpose"] else [])], out)
    if len(sides) > 1:
        return found.then(f".unflatten(-1, {b.text}.shape[{-len(sides)}:])", out)
    return found if sides else found.then("[..., 0]", out)


def _tensor(w: Writer, node: Node, args: Sequence[Value]) -> Value:
    return Value(w.constant(node.attrs["values"], node.name or "table"), node.axes)


OPS: Mapping[Op, Callable[[Writer, Node, Sequence[Value]], Value]] = {
    Op.CONST: lambda w, node, args: number(node.attrs["value"]),
    Op.TENSOR: _tensor,
    Op.POINTWISE: pointwise,
    Op.EINSUM: _einsum,
    Op.REDUCE: _reduce,
    Op.EXPAND: _expand,
    Op.RENAME: _rename,
    Op.GATHER: _gather,
    Op.SCATTER: _scatter,
    Op.DECAY: _decay,
    Op.BAND: _band,
    Op.UNBAND: _unband,
    Op.TRIL: _tril,
    Op.SHIFT: _shift,
    Op.WINDOWS: _windows,
    Op.FOLD: _fold,
    Op.MERGE: _merge,
    Op.SPLIT: _split,
    Op.SELECT: _select,
    Op.PLACE: _place,
    Op.SOLVE: _solve,
    Op.MASKED_PRODUCT: _masked_product,
}
