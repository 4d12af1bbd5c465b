"""Positional tensors on a graph of named axes: the book-keeping under `trace`.

A `Value` is a node and, for each dimension torch sees, the axis that stands for it. Transposes, added dimensions and
broadcasts change only that list. A dimension without an axis is one the node does not depend on (length 1 or repeated).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from memkit.compiler import ir
from memkit.compiler.ir import GraphError, Node, Op, const


class Untraceable(GraphError):
    """A function that uses what the graph has no operation for."""

    def __init__(self, step: str, works: str) -> None:
        super().__init__(f"{step} cannot be traced; what works: {works}")
        self.step, self.works = step, works


@dataclass(frozen=True)
class Value:
    """What a traced tensor is: `names[d]` is the axis of dimension d, or None where the node has none."""

    node: Node
    names: tuple[str | None, ...]
    shape: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(n for n in self.names if n is not None)

    def dim(self, dim: int) -> int:
        return dim % max(len(self.shape), 1)

    def set(self, dim: int, *new: tuple[str | None, int]) -> Value:
        """The same node with dimension `dim` replaced by the pairs (axis, length)."""
        names = (*self.names[:dim], *(n for n, _ in new), *self.names[dim + 1 :])
        return Value(self.node, names, (*self.shape[:dim], *(s for _, s in new), *self.shape[dim + 1 :]))


def broadcast(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape torch gives the result of an entrywise operation."""
    shapes = list(shapes)
    rank = max(map(len, shapes))
    columns = zip(*([1] * (rank - len(s)) + list(s) for s in shapes), strict=True)
    return tuple(max(c) if 0 not in c else 0 for c in columns)


def dims_of(x: Value, dim: Any) -> list[int]:
    """The dimensions torch means by `dim`: one, several, or all where there is none."""
    if dim is None or dim == []:
        return list(range(len(x.shape)))
    return sorted(x.dim(d) for d in ([dim] if isinstance(dim, int) else dim))


class Axes:
    """Makes values and brings them together; hands out axis names no one has used."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = set(taken)

    def fresh(self, hint: str | None = None) -> str:
        base = hint or "a"
        name = next(n for n in (base, *(f"{base}{i}" for i in range(2, len(self.taken) + 3))) if n not in self.taken)
        self.taken.add(name)
        return name

    def lift(self, x: Any) -> Value:
        """A number or constant tensor as a value; one with equal entries everywhere needs no axes."""
        if isinstance(x, Value):
            return x
        if not isinstance(x, Tensor):
            return Value(const(float(x)), (), ())
        shape = tuple(x.shape)
        flat = x.detach().double().flatten().tolist()
        if all(v == flat[0] for v in flat[1:]) and flat:
            return Value(const(flat[0]), (None,) * len(shape), shape)
        names = tuple(self.fresh() if size != 1 else None for size in shape)
        values = _nested(flat, [size for size in shape if size != 1])
        return Value(ir.tensor(values, [n for n in names if n]), names, shape)

    def rename(self, x: Value, names: Sequence[str | None]) -> Value:
        """`x` with its axes called `names`, dimension by dimension; None keeps a dimension's name."""
        new = tuple(old if old is None or to is None else to for old, to in zip(x.names, names, strict=True))
        if new == x.names:
            return x
        mapping = {old: to for old, to in zip(x.names, new, strict=True) if old is not None and to is not None}
        if x.node.op is Op.TENSOR:
            return Value(x.node.replace(axes=tuple(mapping[a] for a in x.node.axes)), new, x.shape)
        return Value(ir.rename(x.node, mapping), new, x.shape)

    def drop(self, x: Value, dim: int) -> Value:
        """`x` with an axis of length 1 taken off dimension `dim`, which stays."""
        name = x.names[dim]
        if name is None:
            return x
        return replace(x.set(dim, (None, 1)), node=ir.select(x.node, name, 0))

    def solid(self, x: Value, dim: int) -> Value:
        """`x` with an axis of its own for dimension `dim`."""
        if x.names[dim] is not None:
            return x
        name, length = self.fresh(), x.shape[dim]
        ones = ir.tensor((1.0,) * length, (name,))
        return replace(x.set(dim, (name, length)), node=ir.expand(x.node, ones))

    def align(self, *operands: Value) -> tuple[list[Value], tuple[str | None, ...], tuple[int, ...]]:
        """The operands with one name per dimension of their broadcast shape, that of the first which has one."""
        shape = broadcast(x.shape for x in operands)
        padded = []
        for x in operands:
            missing = len(shape) - len(x.shape)
            x = Value(x.node, (None,) * missing + x.names, (1,) * missing + x.shape)
            for dim, size in enumerate(shape):
                x = self.drop(x, dim) if x.shape[dim] == 1 < size else x
            padded.append(x)
        names: list[str | None] = []
        for dim in range(len(shape)):
            # constants come last: their axes have no meaning to keep
            found = [x.names[dim] for x in sorted(padded, key=lambda x: x.node.op is Op.TENSOR) if x.names[dim]]
            free = next((n for n in found if n not in names), None)
            names.append(free or (self.fresh(found[0]) if found else None))
        return [self.rename(x, names) for x in padded], tuple(names), shape

    def pointwise(self, fn: str, *operands: Any) -> Value:
        aligned, names, shape = self.align(*(self.lift(x) for x in operands))
        node = ir.pointwise(fn, *(x.node for x in aligned))
        return Value(node, tuple(n if n in node.axes else None for n in names), shape)

    def contract(self, spec: str, a: Any, b: Any) -> Value:
        """`spec` as in einsum: a letter for each dimension of two operands and of the result."""
        a, b = self.lift(a), self.lift(b)
        left, right, out = spec.replace("->", ",").split(",")
        length = dict(zip(left + right, a.shape + b.shape, strict=True))
        name = dict(zip(left, a.names, strict=True))
        for letter, own in zip(right, b.names, strict=True):
            if name.get(letter) is None:
                name[letter] = self.fresh(own) if own is not None and own in name.values() else own
        b = self.rename(b, [name[letter] for letter in right])
        keep = [n for n in (name[letter] for letter in out) if n is not None]
        times = math.prod(length[x] for x in set(left + right) - set(out) if name[x] is None)
        node = ir.einsum(a.node, b.node, keep=keep)
        node = node if times == 1 else ir.mul(const(times), node)
        return Value(node, tuple(name[x] for x in out), tuple(length[x] for x in out))

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """`x` in another shape, reading dimensions in order: MERGE and SPLIT where lengths other than 1 change."""
        for dim in [d for d, size in enumerate(x.shape) if size == 1]:
            x = self.drop(x, dim)
        keep = [d for d, size in enumerate(x.shape) if size != 1]
        x = Value(x.node, tuple(x.names[d] for d in keep), tuple(x.shape[d] for d in keep))
        done, rest = 0, [size for size in shape if size != 1]
        while done < len(rest):
            old, new = 1, 1  # the fewest dimensions on each side with one product
            while (here := math.prod(x.shape[done : done + old])) != (there := math.prod(rest[done : done + new])):
                old, new = (old + 1, new) if here < there else (old, new + 1)
            x = self._regroup(x, done, old, rest[done : done + new])
            done += new
        names = iter(x.names)
        return Value(x.node, tuple(None if size == 1 else next(names) for size in shape), tuple(shape))

    def _regroup(self, x: Value, at: int, count: int, new: Sequence[int]) -> Value:
        if count == 1 and len(new) == 1:
            return x
        if all(n is None for n in x.names[at : at + count]):
            return Value(
                x.node, (*x.names[:at], *(None for _ in new), *x.names[at + count :]),
                (*x.shape[:at], *new, *x.shape[at + count :]),
            )  # fmt: skip
        x = self.merge(x, at, count)
        for size in reversed(new[1:]):
            name, left, right = x.names[at], self.fresh(), self.fresh()
            assert name is not None
            node = ir.split(x.node, name, (left, right), size)
            x = replace(x.set(at, (left, x.shape[at] // size), (right, size)), node=node)
        return x

    def merge(self, x: Value, at: int, count: int) -> Value:
        """`x` with `count` dimensions from `at` on made one, which has an axis."""
        x = self.solid(x, at)
        for _ in range(count - 1):
            x = self.solid(x, at + 1)
            left, right, name = x.names[at], x.names[at + 1], self.fresh()
            assert left is not None and right is not None
            node = ir.merge(x.node, (left, right), name, x.shape[at + 1])
            length = x.shape[at] * x.shape[at + 1]
            x = replace(x.set(at, (name, length)).set(at + 1), node=node)
        return x


def _nested(flat: list[float], shape: Sequence[int]) -> Any:
    if len(shape) <= 1:
        return tuple(flat)
    step = len(flat) // shape[0]
    return tuple(_nested(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))
