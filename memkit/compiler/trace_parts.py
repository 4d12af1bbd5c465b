"""Torch's views, indices and joins in terms of the graph's: the second half of the table in `trace_ops`.

Views change only the list of names. Indices are constants; joining is adding up pieces that were moved to their places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memkit.compiler import ir
from memkit.compiler.ir import const
from memkit.compiler.trace_values import Axes, Untraceable, Value, broadcast, dims_of

Rule = Callable[..., Any]


def _permute(t: Axes, x: Value, dims: Sequence[int]) -> Value:
    order = [x.dim(d) for d in dims]
    return Value(x.node, tuple(x.names[d] for d in order), tuple(x.shape[d] for d in order))


def _transpose(t: Axes, x: Value, a: int, b: int) -> Value:
    order = list(range(len(x.shape)))
    a, b = x.dim(a), x.dim(b)
    order[a], order[b] = b, a
    return _permute(t, x, order)


def _t(t: Axes, x: Value) -> Value:
    return _permute(t, x, range(len(x.shape))[::-1])


def _unsqueeze(t: Axes, x: Value, dim: int) -> Value:
    dim %= len(x.shape) + 1
    return Value(x.node, (*x.names[:dim], None, *x.names[dim:]), (*x.shape[:dim], 1, *x.shape[dim:]))


def _squeeze(t: Axes, x: Value, dim: Any = None) -> Value:
    for d in reversed(dims_of(x, dim)):
        if x.shape[d] == 1:
            x = t.drop(x, d).set(d)
    return x


def _view(t: Axes, x: Value, shape: Sequence[int]) -> Value:
    total = math.prod(x.shape)
    return t.reshape(x, [total // -math.prod(shape) if s == -1 else s for s in shape])


def _expand(t: Axes, x: Value, shape: Sequence[int], implicit: bool = False) -> Value:
    lead = len(shape) - len(x.shape)
    sizes = [x.shape[d - lead] if s == -1 else s for d, s in enumerate(shape)]
    blank = Value(const(0.0), (None,) * len(sizes), tuple(sizes))
    (found, _), names, size = t.align(x, blank)
    return Value(found.node, names, size)


# parts of tensors: constant indices only


def _pick(t: Axes, x: Value, dim: int, index: Sequence[int]) -> Value:
    """Entries `index` along `dim`."""
    name = x.names[dim]
    if list(index) == list(range(x.shape[dim])):
        return x
    if name is None:
        return x.set(dim, (None, len(index)))
    new = t.fresh(name)
    node = ir.gather(x.node, name, new, index, x.shape[dim])
    return Value(node, x.set(dim, (new, len(index))).names, x.set(dim, (new, len(index))).shape)


def _select(t: Axes, x: Value, dim: int, index: int) -> Value:
    dim = x.dim(dim)
    index %= x.shape[dim]
    name = x.names[dim]
    if name is not None and index in (0, x.shape[dim] - 1):
        return Value(ir.select(x.node, name, 0 if index == 0 else -1), x.set(dim).names, x.set(dim).shape)
    return t.drop(_pick(t, x, dim, [index]), dim).set(dim)


def _slice(t: Axes, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    dim = x.dim(dim)
    return _pick(t, x, dim, range(x.shape[dim])[slice(start, end, step)])


def _flip(t: Axes, x: Value, dims: Sequence[int]) -> Value:
    for d in dims_of(x, dims):
        x = _pick(t, x, d, range(x.shape[d])[::-1])
    return x


def _unbind(t: Axes, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(_select(t, x, dim, i) for i in range(x.shape[x.dim(dim)]))


def _split_with_sizes(t: Axes, x: Value, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(_slice(t, x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True))


def _split(t: Axes, x: Value, size: int, dim: int = 0) -> tuple[Value, ...]:
    length = x.shape[x.dim(dim)]
    return _split_with_sizes(t, x, [min(size, length - at) for at in range(0, length, size)], dim)


def _index(t: Axes, x: Any, indices: Sequence[Any]) -> Value:
    """x[.., i, j, ..] with constant integer (or one boolean) tensors on neighbouring dimensions."""
    x = t.lift(x)
    dims = [d for d, i in enumerate(indices) if i is not None]
    if any(isinstance(i, Value) for i in indices):
        raise Untraceable("an index that depends on the inputs", "constant integer indices")
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise Untraceable("indices on dimensions that are not neighbours", "one index, or several side by side")
    whole = [indices[d] for d in dims]
    whole = [i.nonzero(as_tuple=True)[0] if i.dtype in (torch.bool, torch.uint8) else i for i in whole]
    shape, flat = broadcast(i.shape for i in whole), torch.zeros((), dtype=torch.long)
    for d, i in zip(dims, whole, strict=True):
        flat = flat * x.shape[d] + i % x.shape[d]
    x = t.merge(x, dims[0], len(dims))
    x = _pick(t, x, dims[0], flat.expand(shape).flatten().tolist())
    return t.reshape(x, (*x.shape[: dims[0]], *shape, *x.shape[dims[0] + 1 :]))


def _index_select(t: Axes, x: Value, dim: int, index: Tensor) -> Value:
    return _index(t, x, [None] * x.dim(dim) + [index])


def _cat(t: Axes, pieces: Sequence[Any], dim: int = 0) -> Value:
    """The sum of the pieces, each moved to its place."""
    values = [t.lift(p) for p in pieces]
    values = [v for v in values if v.shape != (0,)]
    dim = values[0].dim(dim)
    total, start = sum(v.shape[dim] for v in values), 0
    moved: list[Value] = []
    for v in values:
        name, length, new = v.names[dim], v.shape[dim], t.fresh()
        if name is None:
            mask = tuple(float(start <= i < start + length) for i in range(total))
            node = ir.mul(v.node, ir.tensor(mask, (new,)))
        else:
            node = ir.scatter(v.node, name, new, range(start, start + length), total)
        placed = v.set(dim, (new, total))
        moved.append(Value(node, placed.names, placed.shape))
        start += length
    found = moved[0]
    for v in moved[1:]:
        found = t.pointwise("add", found, v)
    return found


def _stack(t: Axes, pieces: Sequence[Any], dim: int = 0) -> Value:
    return _cat(t, [_unsqueeze(t, t.lift(p), dim) for p in pieces], dim)


def _triangle(lower: bool) -> Rule:
    def rule(t: Axes, x: Value, diagonal: int = 0) -> Value:
        ones = torch.ones(x.shape[-2:])
        return t.pointwise("mul", x, ones.tril(diagonal) if lower else ones.triu(diagonal))

    return rule


PARTS: Mapping[str, Rule] = {
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "expand": _expand,
    "select": _select,
    "slice": _slice,
    "flip": _flip,
    "unbind": _unbind,
    "split": _split,
    "split_with_sizes": _split_with_sizes,
    "index": _index,
    "index_select": _index_select,
    "cat": _cat,
    "stack": _stack,
    "tril": _triangle(True),
    "triu": _triangle(False),
}
