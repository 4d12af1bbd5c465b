"""Random small graphs over every operation, for tests that compare two ways of running the same graph."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node

SIZES = {"n": 2, "g": 3, "t": 4, "k": 5, "v": 2}
UNARY = ("neg", "tanh", "sigmoid", "gelu", "gelu_slope", "silu", "silu_slope", "sin", "abs", "square", "exp", "erf", "softplus", "sign")
BINARY = ("add", "sub", "mul", "mul", "maximum", "minimum", "gt", "le")


class Builder:
    """A pool of nodes that grows by one random operation at a time; `sizes` knows the length of every axis."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sizes = dict(SIZES)
        axes = (("n", "g", "t", "k"), ("g", "t", "v"), ("g", "v", "k"), ("n", "t"), ("t", "k"), ("g",))
        self.params = [ir.param(f"p{i}", a) for i, a in enumerate(axes)]
        self.pool: list[Node] = [*self.params, ir.const(0.5), ir.const(-2.0), ir.tensor(((1.0, 2.0), (0.0, -1.0), (3.0, 0.5)), ("g", "v"))]

    def graph(self, steps: int) -> Graph:
        while len(self.pool) < len(self.params) + 3 + steps:
            node = self.random.choice(STEPS)(self)
            if node is not None and len(node.axes) <= 5:
                self.pool.append(ir.pointwise("tanh", node) if node.op in (ir.Op.EINSUM, ir.Op.SOLVE) else node)
        results = self.random.sample(self.pool[-steps:], 3)
        return Graph(tuple(self.params), tuple(results), ("a", "b", "c"))

    def any(self, *needed: str, least: int = 0) -> Node | None:
        fits = [x for x in self.pool if set(needed) <= set(x.axes) and len(x.axes) >= least]
        return self.random.choice(fits) if fits else None

    def axis(self, node: Node) -> str:
        return self.random.choice(node.axes)

    def fresh(self, size: int) -> str:
        name = f"a{len(self.sizes)}"
        self.sizes[name] = size
        return name


def _unary(b: Builder) -> Node | None:
    x = b.any()
    return x and ir.pointwise(b.random.choice(UNARY), x)


def _binary(b: Builder) -> Node | None:
    x, y = b.any(), b.any()
    return x and y and ir.pointwise(b.random.choice(BINARY), x, y)


def _where(b: Builder) -> Node | None:
    c, x, y = b.any(least=1), b.any(), b.any()
    return c and x and y and ir.pointwise("where", ir.pointwise("gt", c, ir.const(0.0)), x, y)


def _slope(b: Builder) -> Node | None:
    x, y = b.any(least=1), b.any()
    return x and y and ir.mul(ir.pointwise("gelu_slope", x), y)


def _einsum(b: Builder) -> Node | None:
    x, y = b.any(least=1), b.any(least=1)
    if x is None or y is None:
        return None
    both = ir.order_axes(x.axes, y.axes)
    return ir.einsum(x, y, over=[a for a in both if b.random.random() < 0.4])


def _sum_with_product(b: Builder) -> Node | None:
    product, other = _einsum(b), b.any()
    return product and other and ir.pointwise(b.random.choice(("add", "sub")), *b.random.sample([ir.mul(ir.const(0.5), product), other], 2))


def _reduce(b: Builder) -> Node | None:
    x = b.any(least=2)
    return x and ir.reduce(x, [b.axis(x)], b.random.choice(("sum", "max")))


def _expand(b: Builder) -> Node | None:
    x, like = b.any(), b.any(least=2)
    return x and like and ir.expand(x, like)


def _rename(b: Builder) -> Node | None:
    x = b.any(least=1)
    if x is None:
        return None
    axis = b.axis(x)
    return ir.rename(x, {axis: b.fresh(b.sizes[axis])})


def _gather(b: Builder) -> Node | None:
    x = b.any(least=1)
    if x is None:
        return None
    axis = b.axis(x)
    size = b.sizes[axis]
    index = b.random.choice(([b.random.randrange(size) for _ in range(3)], list(range(size))[1:size], list(range(size))[::2]))
    return ir.gather(x, axis, b.fresh(len(index)), index, size) if index else None


def _scatter(b: Builder) -> Node | None:
    x = b.any(least=1)
    if x is None:
        return None
    axis, size = b.axis(x), b.random.randrange(3, 7)
    length = b.sizes[axis]
    index = [b.random.randrange(size) for _ in range(length)] if b.random.random() < 0.7 else list(range(length))
    return ir.scatter(x, axis, b.fresh(max(size, length)), index, max(size, length))


def _decay(b: Builder) -> Node | None:
    x = b.any(least=1)
    if x is None:
        return None
    axis = b.axis(x)
    return ir.decay(x, axis, b.fresh(b.sizes[axis]))


def _band(b: Builder) -> Node | None:
    x = b.any(least=2)
    if x is None:
        return None
    axis, slot = b.random.sample(x.axes, 2)
    return ir.band(x, axis, slot, b.fresh(b.sizes[axis] + b.sizes[slot] - 1), b.sizes[slot])


def _unband(b: Builder) -> Node | None:
    x = b.any(least=2)
    pairs = [(t, s) for t in x.axes for s in x.axes if t != s and b.sizes[s] >= b.sizes[t]] if x else []
    if x is None or not pairs:
        return None
    axis, cols = b.random.choice(pairs)
    size = b.sizes[cols] - b.sizes[axis] + 1
    return ir.unband(x, axis, b.fresh(size), cols, size)


def _tril(b: Builder) -> Node | None:
    x = b.any(least=2)
    return x and ir.tril(x, *b.random.sample(x.axes, 2), diagonal=b.random.choice((-1, 0, 1)))


def _shift(b: Builder) -> Node | None:
    x = b.any(least=1)
    if x is None:
        return None
    axis = b.axis(x)
    fills = [f for f in b.pool if axis not in f.axes]
    return ir.shift(x, b.random.choice(fills), axis, b.random.choice((1, -1)))


def _windows(b: Builder) -> Node | None:
    x = b.any(least=1)
    if x is None:
        return None
    axis = b.axis(x)
    size, step = b.random.choice(((2, 1), (1, 1), (2, 2), (3, 2)))
    if size > b.sizes[axis]:
        return None
    outer = b.fresh((b.sizes[axis] - size) // step + 1)
    taken = ir.windows(x, axis, outer, b.fresh(size), size, step)
    return taken if b.random.random() < 0.5 else ir.fold(ir.pointwise("sin", taken), x, taken.attrs)


def _merge(b: Builder) -> Node | None:
    x = b.any(least=2)
    if x is None:
        return None
    pair = tuple(b.random.sample(x.axes, 2))
    size = b.sizes[pair[1]]
    row = b.fresh(b.sizes[pair[0]] * size)
    merged = ir.merge(x, (pair[0], pair[1]), row, size)
    return merged if b.random.random() < 0.5 else ir.split(merged, row, (b.fresh(b.sizes[pair[0]]), b.fresh(size)), size)


def _select(b: Builder) -> Node | None:
    x = b.any(least=1)
    if x is None:
        return None
    axis, index = b.axis(x), b.random.choice((0, -1))
    taken = ir.select(x, axis, index)
    return taken if b.random.random() < 0.5 else ir.place(ir.pointwise("sin", taken), x, axis, index)


def _solve(b: Builder) -> Node | None:
    x = b.any(least=2)
    if x is None:
        return None
    rows = b.axis(x)
    cols = b.fresh(b.sizes[rows])
    lower = ir.mul(ir.pointwise("tanh", x), ir.pointwise("sin", ir.rename(ir.reduce(x, [a for a in x.axes if a != rows]), {rows: cols})))
    right = b.any(rows)
    return right and ir.solve(lower, right, rows, cols, b.random.random() < 0.5)


def _masked_product(b: Builder) -> Node | None:
    z, c, d = b.any(least=2), b.any(), b.any()
    if z is None or c is None or d is None:
        return None
    axis = b.axis(z)
    x = ir.rename(z, {a: b.fresh(b.sizes[a]) for a in z.axes if a not in ("g", axis)})
    free = [a for a in x.axes if a not in z.axes]
    if not free or axis in c.axes + d.axes:
        return None
    return ir.masked_product(z, x, c, ir.mul(d, ir.reduce(ir.rename(x, {}), (axis,))), (axis,), free[0])


def _scan(b: Builder) -> Node | None:
    carry, const, part = b.params[2], b.params[4], b.params[0]
    w, x, c = ir.param("w", carry.axes), ir.param("x", ("g", "t", "k")), ir.param("c", const.axes)
    read = ir.einsum(x, w, over=("k",), name="read")
    read = ir.mul(read, ir.reduce(ir.pointwise("sin", c), ("k",)))
    new = ir.sub(ir.mul(w, ir.const(0.5)), ir.einsum(ir.pointwise("tanh", read), x, over=("t",)), name="w")
    outs = ir.scan(Graph((w, x, c), (new, read)), [carry], [part], [const], reverse=b.random.random() < 0.5, save=True)
    return b.random.choice(outs)


STEPS: tuple[Callable[[Builder], Node | None], ...] = (
    *(_unary, _binary, _binary, _where, _slope, _einsum, _einsum, _sum_with_product, _reduce, _expand, _rename, _gather),
    *(_scatter, _decay, _band, _unband, _tril, _shift, _windows, _merge, _select, _solve, _masked_product, _scan),
)


def random_graph(seed: int, steps: int = 14) -> tuple[Graph, dict[str, int]]:
    builder = Builder(seed)
    return builder.graph(steps), builder.sizes


def inputs(graph: Graph, sizes: dict[str, int], seed: int = 0, batch: tuple[int, ...] = ()) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {p.attrs["name"]: (*batch, *(sizes[a] for a in p.axes)) for p in graph.params}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
