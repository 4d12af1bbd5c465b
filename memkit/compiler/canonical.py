"""A graph -> sums of products, by rules that are identities of real numbers; every rule that changes something is noted by name.

Where it sits: between `token_graph` and `match`. The order of operands, names of axes and shared nodes need no rule: the form has none.
As in `simplify`, 0 * x is 0, and a branch that a flag rules out counts nothing, whatever its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .identities import PAIRED, PAIRS, POINTWISE, opaque
from .ir import Graph, GraphError, Node, Op
from .terms import (
    Factor,
    Factors,
    Rewrites,
    Sum,
    Symbol,
    Table,
    bound,
    canonical,
    collect,
    constant,
    free_indices,
    multiplied,
    ordered,
    renamed,
    value_of,
)

WIDEST = 4  # terms that two sums may be multiplied out to; else each is a group, a factor of its own

ODD = frozenset(("sign", "tanh", "sin", "erf", "sinh", "atan", "reciprocal", "group"))  # f(-x) = -f(x)
EVEN = frozenset(("abs", "cos", "cosh", "zero"))
SCALELESS = frozenset(("sign", "positive", "zero"))  # f(c x) = f(x), c > 0
EXTRACTED = frozenset(("abs", "group"))  # f(c x) = c f(x), c > 0; a group is a sum taken as one factor


class Canonical:
    """The normal form of graphs under one `Table`. `form` is the way in.

    Raises:
        GraphError: for an operation that has no place in the graph of one token.
    """

    def __init__(self, table: Table, rewrites: Rewrites) -> None:
        self.table, self.rewrites = table, rewrites
        self.where = ""

    def form(self, graph: Graph, sizes: Mapping[str, Sequence[int]]) -> dict[str, Sum]:
        """Label -> the sum of each result. `sizes`: the lengths of each parameter's axes, by its name."""
        found: dict[Node, Sum] = {}
        extents: dict[Node, dict[str, int]] = {}
        for node in graph.nodes():
            self.where = node.where
            extents[node] = _extents(node, [extents[a] for a in node.args], sizes)
            found[node] = self._node(node, [found[a] for a in node.args], extents)
        return {label: found[r] for label, r in zip(graph.labels, graph.results, strict=True)}

    def _node(self, node: Node, args: list[Sum], extents: Mapping[Node, dict[str, int]]) -> Sum:
        if node.op is Op.PARAM:
            return {((self.table.symbol(Symbol("param", node.attrs["name"])), node.axes),): 1.0}
        if node.op is Op.CONST:
            return constant(node.attrs["value"])
        if node.op is Op.TENSOR:
            return self._tensor(node.attrs["values"], node.axes)
        if node.op is Op.POINTWISE:
            return POINTWISE.get(node.attrs["fn"], opaque(node.attrs["fn"]))(self, *args)
        if node.op is Op.EINSUM:
            size = {axis: n for a in node.args for axis, n in extents[a].items()}
            return self.summed(self.product(*args), [a for a in size if a not in node.axes], size)
        if node.op is Op.REDUCE:
            if node.attrs["fn"] == "sum":
                return self.summed(args[0], node.attrs["over"], extents[node.args[0]])
            return self.call("max", [args[0]], over=node.attrs["over"])
        if node.op is Op.EXPAND:
            return args[0]
        if node.op is Op.RENAME:
            return renamed(args[0], dict(node.attrs["names"]))
        if node.op in (Op.GATHER, Op.SCATTER, Op.SELECT, Op.PLACE):
            return self._moved(node, args[0], extents)
        raise GraphError(f"{node.op.value} in the graph of one token")

    # sums and products

    def add(self, *totals: Sum) -> Sum:
        terms = [item for total in totals for item in total.items()]
        found = collect(terms)
        if len(found) < len(terms):
            self.rewrites.note("a x - a x = 0" if any(f not in found for f, _ in terms) else "a x + b x = (a + b) x", self.where)
        return found

    def scale(self, total: Sum, value: float) -> Sum:
        return {factors: c * value for factors, c in total.items()} if value else {}

    def product(self, a: Sum, b: Sum) -> Sum:
        """a b, distributed over the terms of both."""
        for one, other in ((a, b), (b, a)):
            value = value_of(one)
            if value is not None:
                if value in (0.0, 1.0) and other:
                    self.rewrites.note(f"{value:g} x = {'x' if value else '0'}", self.where)
                return self.scale(other, value)
        if min(len(a), len(b)) > 1 and len(a) * len(b) > WIDEST:
            a, b = self.group(a), self.group(b)
        elif len(a) > 1 or len(b) > 1:
            self.rewrites.note("a (b + c) = a b + a c", self.where)
        found: list[Sum] = []
        for f, c in a.items():
            for g, d in b.items():
                found.append(self.scale(self.tidy(multiplied(f, g)), c * d))
        return self.collected(found)

    def group(self, total: Sum) -> Sum:
        """The sum as one factor, times what all its terms share."""
        shared = set.intersection(*(set(factors) for factors in total))
        shared = {f for f in shared if not any(isinstance(i, int) for i in f[1])}
        if shared:
            self.rewrites.note("a b + a c = a (b + c)", self.where)
        rest = {tuple(_without(factors, shared)): c for factors, c in total.items()}
        ((factors, c),) = self.call("group", [{canonical(f): c for f, c in rest.items()}]).items()
        return {canonical((*factors, *shared)): c}

    def collected(self, totals: Sequence[Sum]) -> Sum:
        return collect(item for total in totals for item in total.items())

    def summed(self, total: Sum, axes: Sequence[str], sizes: Mapping[str, int]) -> Sum:
        """The sum over axes; what lacks an axis is counted as often as the axis is long."""
        terms: list[Sum] = []
        for factors, c in total.items():
            own = free_indices([factors])
            for axis in axes:
                if axis not in own:
                    self.rewrites.note("sum_i x = n x", self.where)
                    c *= sizes[axis]
            terms.append(self.scale(self.tidy(bound(factors, [a for a in axes if a in own])), c))
        return self.collected(terms)

    def tidy(self, factors: Factors) -> Sum:
        """A product in order, with the pairs of factors that make something simpler replaced."""
        for i, (first, indices) in enumerate(factors):
            if self.table.symbols[first].op not in PAIRED:
                continue
            for j, (second, others) in enumerate(factors):
                found = None if i == j or indices != others else self._pair(first, second, indices)
                if found is not None:
                    rest = tuple(f for n, f in enumerate(factors) if n not in (i, j))
                    return self._with(rest, found)
        return {canonical(factors): 1.0}

    def _with(self, rest: Factors, found: Sum) -> Sum:
        """rest times a sum whose indices are those of `rest`."""
        return self.collected([self.scale(self.tidy(_joined(rest, factors)), c) for factors, c in found.items()])

    def _pair(self, first: str, second: str, indices: tuple) -> Sum | None:
        a, b = self.table.symbols[first], self.table.symbols[second]
        if a.args != b.args or len(a.args) != 1 or (a.op, b.op) not in PAIRS:
            return None
        name, rule = PAIRS[a.op, b.op]
        self.rewrites.note(name, self.where)
        return rule(self, self._argument(a.args[0], indices), (first, indices), (second, indices))

    def _argument(self, number: int, indices: Sequence) -> Sum:
        """The sum behind a definition, at these indices; its own summed indices stay apart from those of the product it goes into."""
        definition = self.table.definitions[number]
        names = dict(zip(definition.formals, indices, strict=True))
        return {_substituted(factors, names): c for factors, c in definition.terms}

    # functions

    def call(self, fn: str, args: Sequence[Sum], over: Sequence[str] = ()) -> Sum:
        """fn(args) as one factor, its argument brought to a form that does not depend on signs and scales the function can shed."""
        factor = 1.0
        if len(args) == 1 and not over and args[0]:
            lead = ordered(_by_formals(self.table, args[0]))[0][1]
            taken = (abs(lead) if fn in SCALELESS | EXTRACTED else 1.0) * (-1.0 if lead < 0 and fn in ODD | EVEN else 1.0)
            if taken != 1.0:
                args = [self.scale(args[0], 1 / taken)]
                factor = (abs(taken) if fn in EXTRACTED else 1.0) * (-1.0 if taken < 0 and fn in ODD else 1.0)
                self.rewrites.note(f"{fn}({taken:g} x) = {factor:g} {fn}(x)", self.where)
        numbers, indices, gone = [], [], []
        for total in args:
            n, order = self.table.define(total)
            numbers.append(n)
            gone += [f"@{i}" for i, x in enumerate(order) if x in over]
            indices += [x for x in order if x not in over]
        symbol = self.table.symbol(Symbol(fn, None, tuple(numbers), tuple(gone)))
        return {canonical(((symbol, tuple(indices)),)): factor}

    def flag(self, difference: Sum) -> Sum:
        """1 where the difference is positive, else 0."""
        value = value_of(difference)
        if value is not None:
            return constant(float(value > 0))
        inside = self._single(difference, "abs")
        if inside is not None and inside[1] > 0:
            self.rewrites.note("(|x| > 0) = 1 - (x = 0)", self.where)
            return self.add(constant(1.0), self.scale(self.call("zero", [inside[0]]), -1.0))
        return self.call("positive", [difference])

    def _single(self, total: Sum, fn: str) -> tuple[Sum, float] | None:
        """(x, c) of a sum that is c fn(x)."""
        if len(total) != 1:
            return None
        ((factors, c),) = total.items()
        if len(factors) != 1 or self.table.symbols[factors[0][0]].op != fn:
            return None
        inside = self._argument(self.table.symbols[factors[0][0]].args[0], factors[0][1])
        return {canonical(_joined((), f)): d for f, d in inside.items()}, c

    # constants and moves

    def _tensor(self, values: object, axes: Sequence[str]) -> Sum:
        flat = set(_flat(values))
        if len(flat) == 1:
            return constant(flat.pop())
        return {((self.table.symbol(Symbol("tensor", values)), tuple(axes)),): 1.0}

    def _moved(self, node: Node, x: Sum, extents: Mapping[Node, dict[str, int]]) -> Sum:
        """Entries picked, or put in place, as a product with a constant matrix of zeros and ones."""
        attrs = node.attrs
        axis = attrs["axis"]
        if node.op is Op.GATHER:
            matrix = [[float(i == at) for i in range(attrs["size"])] for at in attrs["index"]]
            return self.summed(self.product(self._tensor(_frozen(matrix), (attrs["new"], axis)), x), [axis], extents[node.args[0]])
        if node.op is Op.SCATTER:
            matrix = [[float(i == at) for at in attrs["index"]] for i in range(attrs["size"])]
            return self.summed(self.product(self._tensor(_frozen(matrix), (attrs["new"], axis)), x), [axis], extents[node.args[0]])
        length = extents[node.args[0] if node.op is Op.SELECT else node.args[1]][axis]
        line = self._tensor(tuple(float(i == attrs["index"] % length) for i in range(length)), (axis,))
        return self.summed(self.product(line, x), [axis], {axis: length}) if node.op is Op.SELECT else self.product(line, x)


def _joined(rest: Factors, factors: Factors) -> Factors:
    """Both, where `factors` may name summed indices of `rest`; its own, marked by a tuple, become new ones."""
    fresh: dict = {}
    start = 1 + max((i for _, indices in (*rest, *factors) for i in indices if isinstance(i, int)), default=-1)
    for _, indices in factors:
        for i in indices:
            if isinstance(i, tuple):
                fresh.setdefault(i, start + len(fresh))
    return (*rest, *((symbol, tuple(fresh.get(i, i) for i in indices)) for symbol, indices in factors))


def _substituted(factors: Sequence[Factor], names: Mapping) -> Factors:
    return tuple((s, tuple(("own", i) if isinstance(i, int) else names.get(i, i) for i in indices)) for s, indices in factors)  # type: ignore[misc]


def _without(factors: Factors, shared: set[Factor]) -> list[Factor]:
    """The factors less one of each that is shared."""
    rest = list(factors)
    for f in shared:
        rest.remove(f)
    return rest


def _by_formals(table: Table, total: Sum) -> Sum:
    number, _ = table.define(total)
    return dict(table.definitions[number].terms)


def _flat(values: object) -> list[float]:
    return [x for v in values for x in _flat(v)] if isinstance(values, tuple) else [float(values)]  # type: ignore[arg-type]


def _frozen(rows: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in rows)


def _extents(node: Node, args: Sequence[Mapping[str, int]], sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The length of each axis of `node`."""
    attrs = node.attrs
    if node.op is Op.PARAM:
        return dict(zip(node.axes, sizes[attrs["name"]], strict=True))
    if node.op is Op.TENSOR:
        return dict(zip(node.axes, _lengths(attrs["values"]), strict=True))
    found = {axis: n for arg in args for axis, n in arg.items()}
    if node.op is Op.RENAME:
        found = {attrs["names"].get(axis, axis): n for axis, n in found.items()}
    if node.op in (Op.GATHER, Op.SCATTER):
        found[attrs["new"]] = len(attrs["index"]) if node.op is Op.GATHER else attrs["size"]
    return {axis: n for axis, n in found.items() if axis in node.axes}


def _lengths(values: object) -> list[int]:
    return [len(values), *_lengths(values[0])] if isinstance(values, tuple) else []
