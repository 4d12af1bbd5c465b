"""The meaning of every operation: a graph run node by node in plain torch, slow and without tricks.

Where it sits: tests compare passes, plans and emitted code with it; constant folding calls it. Data meets by name, so
the order of a node's axes is layout only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkit.compiler.ir import Graph, GraphError, Node, Op, order_axes


class Named(NamedTuple):
    """A tensor and the name of each of its dimensions."""

    value: Tensor
    axes: tuple[str, ...]

    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.value.shape, strict=True))

    def to(self, axes: Sequence[str]) -> Tensor:
        """The value in the order of `axes`, with length 1 for those it lacks."""
        if not set(self.axes) <= set(axes):
            raise GraphError(f"a value with axes {self.axes} does not fit {tuple(axes)}")
        value = self.value.permute([self.axes.index(a) for a in axes if a in self.axes])
        return value[tuple(slice(None) if a in self.axes else None for a in axes)]

    def last(self, *names: str) -> Named:
        """The same value with the axes `names` moved to the end."""
        axes = (*(a for a in self.axes if a not in names), *names)
        return Named(self.to(axes), axes)


def run(graph: Graph, inputs: Mapping[str, Tensor], sizes: Mapping[str, int] | None = None) -> list[Tensor]:
    """The results of `graph`, each with its node's axes in order as dimensions. `sizes` checks the inputs' lengths."""
    args = []
    for node in graph.params:
        name = node.attrs["name"]
        if name not in inputs:
            raise GraphError(f"no input for parameter {name!r}")
        value = inputs[name]
        if value.ndim != len(node.axes):
            raise GraphError(f"parameter {name!r} has axes {node.axes}, got shape {tuple(value.shape)}")
        for axis, length in zip(node.axes, value.shape, strict=True):
            if sizes is not None and sizes.get(axis, length) != length:
                raise GraphError(f"parameter {name!r}: axis {axis} is {length} long, expected {sizes[axis]}")
        args.append(Named(value, node.axes))
    like = next((a.value for a in args if a.value.is_floating_point()), torch.zeros((), dtype=torch.float64))
    return [r.value for r in run_named(graph, args, like.new_zeros(()))]


def run_named(graph: Graph, args: Sequence[Named], like: Tensor) -> list[Named]:
    """As `run`, on named tensors in the order of the parameters; `like` gives constants their type and device."""
    env: dict[Node, Any] = {p: Named(a.to(p.axes), p.axes) for p, a in zip(graph.params, args, strict=True)}
    for node in graph.nodes():
        if node in env:
            continue
        if node.op is Op.PARAM:
            raise GraphError(f"parameter {node.attrs['name']!r} is used but not listed")
        try:
            found = MEANING[node.op](node, [env[a] for a in node.args], like)
            env[node] = found if node.op is Op.SCAN else _settle(found, node.axes)
        except (GraphError, RuntimeError, ValueError, IndexError) as error:
            at = f" at {node.where}" if node.where else ""
            raise GraphError(f"{node!r}{at}: {error}") from error
    return [env[r] for r in graph.results]


def _settle(x: Named, axes: tuple[str, ...]) -> Named:
    if set(x.axes) != set(axes):
        raise GraphError(f"computed axes {x.axes}, the node says {axes}")
    return Named(x.to(axes), axes)


def _common(args: Sequence[Named]) -> dict[str, int]:
    """The length of every axis of the operands; two lengths for one name are an error."""
    sizes: dict[str, int] = {}
    for arg in args:
        for axis, length in arg.sizes().items():
            if sizes.setdefault(axis, length) != length:
                raise GraphError(f"axis {axis} is both {sizes[axis]} and {length} long")
    return sizes


def _zeros(sizes: Mapping[str, int], axes: Sequence[str], like: Tensor) -> Tensor:
    return like.new_zeros([sizes[a] for a in axes])


# pointwise functions: a flag (gt, eq, ..) is 1 or 0 in the type of its operands


def _flag(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: compare(a, b).to(a.dtype)


def _gelu_slope(x: Tensor) -> Tensor:
    normal = torch.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    return 0.5 * (1 + torch.erf(x * 0.7071067811865476)) + x * normal


def _silu_slope(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


FUNCTION_MEANING: Mapping[str, Callable[..., Tensor]] = {
    **{fn: getattr(torch, fn) for fn in ("add", "sub", "mul", "div", "maximum", "minimum", "pow")},
    **{fn: _flag(getattr(torch, fn)) for fn in ("gt", "ge", "lt", "le", "eq")},
    **{fn: getattr(torch, fn) for fn in ("neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "sign", "square")},
    **{fn: getattr(torch, fn) for fn in ("log1p", "expm1", "tanh", "sigmoid", "erf", "sin", "cos", "cosh", "sinh")},
    **{fn: getattr(torch, fn) for fn in ("floor", "ceil", "round", "atan")},
    "gelu": torch.nn.functional.gelu,
    "gelu_slope": _gelu_slope,
    "silu": torch.nn.functional.silu,
    "silu_slope": _silu_slope,
    "softplus": torch.nn.functional.softplus,
    "where": lambda flag, a, b: torch.where(flag != 0, a, b),
}


def _pointwise(node: Node, args: list[Named], like: Tensor) -> Named:
    _common(args)
    axes = order_axes(*(a.axes for a in args))
    return Named(FUNCTION_MEANING[node.attrs["fn"]](*(a.to(axes) for a in args)), axes)


# contractions and bookkeeping of axes


def _contract(a: Named, b: Named, keep: Sequence[str]) -> Named:
    letters = {axis: i for i, axis in enumerate(_common((a, b)))}
    ids = [[letters[x] for x in axes] for axes in (a.axes, b.axes, keep)]
    return Named(torch.einsum(a.value, ids[0], b.value, ids[1], ids[2]), tuple(keep))


def _einsum(node: Node, args: list[Named], like: Tensor) -> Named:
    a, b = args
    return _contract(a, b, node.axes)


def _reduce(node: Node, args: list[Named], like: Tensor) -> Named:
    (x,), over = args, node.attrs["over"]
    fold = {"sum": torch.sum, "max": torch.amax}[node.attrs["fn"]]
    return Named(fold(x.value, dim=[x.axes.index(a) for a in over]), tuple(a for a in x.axes if a not in over))


def _expand(node: Node, args: list[Named], like: Tensor) -> Named:
    sizes = _common(args)
    return Named(args[0].to(node.axes).expand([sizes[a] for a in node.axes]), node.axes)


def _rename(node: Node, args: list[Named], like: Tensor) -> Named:
    (x,), names = args, node.attrs["names"]
    return Named(x.value, tuple(names.get(a, a) for a in x.axes))


def _renamed(x: Named, axis: str, new: Sequence[str], value: Tensor) -> Named:
    at = x.axes.index(axis)
    return Named(value, (*x.axes[:at], *new, *x.axes[at + 1 :]))


def _gather(node: Node, args: list[Named], like: Tensor) -> Named:
    (x,), attrs = args, node.attrs
    at = x.axes.index(attrs["axis"])
    if x.value.shape[at] != attrs["size"]:
        raise GraphError(f"axis {attrs['axis']} is {x.value.shape[at]} long, the node says {attrs['size']}")
    index = torch.tensor(attrs["index"], dtype=torch.long, device=like.device)
    return _renamed(x, attrs["axis"], (attrs["new"],), x.value.index_select(at, index))


def _scatter(node: Node, args: list[Named], like: Tensor) -> Named:
    (x,), attrs = args, node.attrs
    at = x.axes.index(attrs["axis"])
    shape = [attrs["size"] if i == at else length for i, length in enumerate(x.value.shape)]
    index = torch.tensor(attrs["index"], dtype=torch.long, device=like.device)
    return _renamed(x, attrs["axis"], (attrs["new"],), x.value.new_zeros(shape).index_add(at, index, x.value))


# structure along time


def _decay(node: Node, args: list[Named], like: Tensor) -> Named:
    """Running products down each column; ones above the diagonal's end keep resets (x = 0) exact."""
    axis, new = node.attrs["axis"], node.attrs["new"]
    x = args[0].last(axis)
    length = x.value.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=like.device).tril(-1)
    value = torch.where(below, x.value[..., :, None], like.new_ones(())).cumprod(-2).tril()
    return Named(value, (*x.axes, new))


def _band_index(tokens: int, slots: int, like: Tensor) -> Tensor:
    return torch.arange(tokens, device=like.device)[:, None] + torch.arange(slots, device=like.device)


def _band(node: Node, args: list[Named], like: Tensor) -> Named:
    axis, slot, new = (node.attrs[a] for a in ("axis", "slot", "new"))
    x = args[0].last(axis, slot)
    *_, tokens, slots = x.value.shape
    if slots != node.attrs["size"]:
        raise GraphError(f"axis {slot} is {slots} long, the node says {node.attrs['size']}")
    index = _band_index(tokens, slots, like).expand(x.value.shape)
    zeros = x.value.new_zeros(*x.value.shape[:-1], tokens + slots - 1)
    return Named(zeros.scatter(-1, index, x.value), (*x.axes[:-1], new))


def _unband(node: Node, args: list[Named], like: Tensor) -> Named:
    axis, slot, new = (node.attrs[a] for a in ("axis", "slot", "new"))
    x = args[0].last(axis, new)
    *batch, tokens, columns = x.value.shape
    slots = node.attrs["size"]
    if columns != tokens + slots - 1:
        raise GraphError(f"axis {new} is {columns} long, expected {tokens} + {slots} - 1")
    return Named(x.value.gather(-1, _band_index(tokens, slots, like).expand(*batch, -1, -1)), (*x.axes[:-1], slot))


def _tril(node: Node, args: list[Named], like: Tensor) -> Named:
    x = args[0].last(node.attrs["rows"], node.attrs["cols"])
    return Named(x.value.tril(node.attrs["diagonal"]), x.axes)


def _shift(node: Node, args: list[Named], like: Tensor) -> Named:
    (x, fill), axis, by = args, node.attrs["axis"], node.attrs["by"]
    sizes = _common(args)
    axes = (*(a for a in order_axes(x.axes, fill.axes) if a != axis), axis)
    value = x.to(axes).expand([sizes[a] for a in axes])
    edge = fill.to(axes).expand([*value.shape[:-1], 1])
    pieces = {1: (edge, value[..., :-1]), -1: (value[..., 1:], edge)}[by]
    return Named(torch.cat(pieces, -1), axes)


def _windows(node: Node, args: list[Named], like: Tensor) -> Named:
    attrs = node.attrs
    x = args[0].last(attrs["axis"])
    value = x.value.unfold(-1, attrs["size"], attrs["step"])
    return Named(value, (*x.axes[:-1], attrs["outer"], attrs["inner"]))


def _fold(node: Node, args: list[Named], like: Tensor) -> Named:
    (x, shape), attrs = args, node.attrs
    axis = attrs["axis"]
    x = x.last(attrs["outer"], attrs["inner"])
    out = x.value.new_zeros(*x.value.shape[:-2], shape.sizes()[axis])
    for o in range(x.value.shape[-2]):
        start = o * attrs["step"]
        pad = (start, out.shape[-1] - start - attrs["size"])
        out = out + torch.nn.functional.pad(x.value[..., o, :], pad)
    return Named(out, (*x.axes[:-2], axis))


def _merge(node: Node, args: list[Named], like: Tensor) -> Named:
    x = args[0].last(*node.attrs["axes"])
    if x.value.shape[-1] != node.attrs["size"]:
        raise GraphError(f"axis {x.axes[-1]} is {x.value.shape[-1]} long, the node says {node.attrs['size']}")
    return Named(x.value.flatten(-2), (*x.axes[:-2], node.attrs["new"]))


def _split(node: Node, args: list[Named], like: Tensor) -> Named:
    x = args[0].last(node.attrs["axis"])
    size = node.attrs["size"]
    return Named(x.value.unflatten(-1, (x.value.shape[-1] // size, size)), (*x.axes[:-1], *node.attrs["new"]))


def _select(node: Node, args: list[Named], like: Tensor) -> Named:
    x = args[0].last(node.attrs["axis"])
    return Named(x.value[..., node.attrs["index"]], x.axes[:-1])


def _place(node: Node, args: list[Named], like: Tensor) -> Named:
    (x, shape), axis = args, node.attrs["axis"]
    length = shape.sizes()[axis]
    here = torch.arange(length, device=like.device) == node.attrs["index"] % length
    return Named(torch.where(here, x.value[..., None], like.new_zeros(())), (*x.axes, axis))


# systems, fused products, loops


def _solve(node: Node, args: list[Named], like: Tensor) -> Named:
    """One unit-triangular system per shared axis; what only b has are right-hand sides."""
    (lower, b), (rows, cols) = args, (node.attrs["rows"], node.attrs["cols"])
    sides = tuple(a for a in b.axes if a != rows and (a not in lower.axes or a == cols))
    shared = (a for a in b.axes if a != rows and a not in sides)
    batch = order_axes(shared, (a for a in lower.axes if a not in (rows, cols)))
    sizes = {**lower.sizes(), **b.sizes()}
    matrix = lower.to((*batch, rows, cols)).tril(-1)
    matrix = matrix + torch.eye(matrix.shape[-1], dtype=like.dtype, device=like.device)
    right = b.to((*batch, rows, *sides))
    shape = [*(sizes[a] for a in batch), *right.shape[len(batch) :]]
    right = right.expand(shape).reshape([*shape[: len(batch) + 1], -1])
    if node.attrs["transpose"]:
        value = torch.linalg.solve_triangular(matrix.mT, right, upper=True, unitriangular=True)
    else:
        value = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
    return Named(value.reshape(shape), (*batch, rows, *sides))


def _masked_product(node: Node, args: list[Named], like: Tensor) -> Named:
    z, x, c, d = args
    scores = _contract(z, x, [a for a in order_axes(z.axes, x.axes) if a not in node.attrs["contract"]])
    _common((scores, c))
    axes = order_axes(scores.axes, c.axes)
    return _contract(Named(scores.to(axes) * c.to(axes), axes), d, node.axes)


def _scan(node: Node, args: list[Named], like: Tensor) -> list[Named]:
    """The loop: final carries, outputs stacked by position, with `save` the carries each iteration started from."""
    assert node.body is not None
    axis, k, m = node.attrs["axis"], node.attrs["carries"], node.attrs["slices"]
    carries, slices, consts = args[:k], [a.last(axis) for a in args[k : k + m]], args[k + m :]
    lengths = {s.value.shape[-1] for s in slices}
    if len(lengths) != 1 or 0 in lengths:
        raise GraphError(f"slices of lengths {sorted(lengths)}; a scan needs one length, at least 1")
    length = lengths.pop()
    stacked: list[tuple[Named, ...]] = []
    for i in reversed(range(length)) if node.attrs["reverse"] else range(length):
        here = [Named(s.value[..., i], s.axes[:-1]) for s in slices]
        found = run_named(node.body, [*carries, *here, *consts], like)
        started = [Named(c.to(p.axes), p.axes) for c, p in zip(carries, node.body.params, strict=False)]
        stacked.append((*found[k:], *(started if node.attrs["save"] else ())))
        carries = found[:k]
    if node.attrs["reverse"]:
        stacked.reverse()
    columns = zip(*stacked, strict=True)
    return [*carries, *(Named(torch.stack([o.value for o in c]), (axis, *c[0].axes)) for c in columns)]


MEANING: Mapping[Op, Callable[[Node, list[Any], Tensor], Any]] = {
    Op.CONST: lambda node, args, like: Named(like.new_tensor(node.attrs["value"]), ()),
    Op.TENSOR: lambda node, args, like: Named(like.new_tensor(node.attrs["values"]), node.axes),
    Op.POINTWISE: _pointwise,
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
    Op.SCAN: _scan,
    Op.GET: lambda node, args, like: args[0][node.attrs["index"]],
}
