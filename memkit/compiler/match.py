"""Whether two canonical forms are the same up to names: isomorphism of graphs with matching attributes.

A vertex for every result, sum, term, factor, index and input; labels say what each is, but for weights and slots not their names: which
weight of one side stands for which of the other is found by the isomorphism, and the next value of a weight is tied to its own input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .terms import Factors, Index, Sum, Table, number

if TYPE_CHECKING:
    import networkx

STATE = ("weight", "anchor")  # inputs that are the memory's own; all others are pinned by name


def live(forms: Mapping[str, Sum], table: Table) -> dict[str, Sum]:
    """The results that an output depends on: y, the weights, and the slots that these, now or later, read."""
    kept = {label for label in forms if label.count(".") < 2}
    while True:
        read = {name for label in kept for name in inputs({label: forms[label]}, table)}
        more = {label for label in forms if label.removeprefix("next.") in read} - kept
        if not more:
            return {label: total for label, total in forms.items() if label in kept}
        kept |= more


def inputs(forms: Mapping[str, Sum], table: Table) -> set[str]:
    """The names of all inputs that the forms read."""
    found: set[str] = set()
    seen: set[int] = set()
    stack = [symbol for total in forms.values() for factors in total for symbol, _ in factors]
    while stack:
        symbol = table.symbols[stack.pop()]
        if symbol.op == "param":
            found.add(symbol.detail)
        for n in symbol.args:
            if n not in seen:
                seen.add(n)
                stack += [s for factors, _ in table.definitions[n].terms for s, _ in factors]
    return found


def to_networkx(forms: Mapping[str, Sum], table: Table, sizes: Mapping[str, tuple[int, ...]]) -> networkx.DiGraph:
    """The forms as one directed graph; every vertex has a `label`."""
    return _Builder(table, sizes).build(forms)


class _Builder:
    """Numbers vertices as they are made."""

    def __init__(self, table: Table, sizes: Mapping[str, tuple[int, ...]]) -> None:
        import networkx

        self.table, self.sizes = table, sizes
        self.graph = networkx.DiGraph()
        self.inputs: dict[str, int] = {}
        self.defined: dict[int, tuple[int, list[int]]] = {}

    def vertex(self, *label: Any, to: tuple[int, ...] = ()) -> int:
        new = len(self.graph)
        self.graph.add_node(new, label=label)
        self.graph.add_edges_from((new, other) for other in to)
        return new

    def build(self, forms: Mapping[str, Sum]) -> networkx.DiGraph:
        for label, total in forms.items():
            names = sorted({i for factors in total for _, indices in factors for i in indices if isinstance(i, str)})
            free: dict[Index, int] = {name: self.vertex("free", name) for name in names}
            form = self.sum(list(total.items()), free)
            if label.startswith("next."):
                self.vertex("next", to=(form, self.input(label.removeprefix("next."))))
            else:
                self.vertex("result", label, to=(form,))
        return self.graph

    def input(self, name: str) -> int:
        if name not in self.inputs:
            if not name.startswith(STATE):
                self.inputs[name] = self.vertex("input", name, self.sizes[name])
            elif name.startswith("weight") and "." not in name:
                self.inputs[name] = self.vertex("weight", self.sizes[name])
            else:
                owner, _, slot = name.replace("anchor", "weight").partition(".")
                kind = slot or "anchor"
                self.inputs[name] = self.vertex(kind, to=(self.input(owner),))
        return self.inputs[name]

    def sum(self, terms: list[tuple[Factors, float]], free: Mapping[Index, int]) -> int:
        return self.vertex("sum", to=tuple(self.term(factors, c, free) for factors, c in terms))

    def term(self, factors: Factors, coefficient: float, free: Mapping[Index, int]) -> int:
        bound = {i for _, indices in factors for i in indices if isinstance(i, int)}
        index = {**free, **{i: self.vertex("index") for i in bound}}
        return self.vertex("term", number(coefficient), to=tuple(self.factor(s, i, index) for s, i in factors))

    def factor(self, name: str, indices: tuple[Index, ...], index: Mapping[Index, int]) -> int:
        symbol = self.table.symbols[name]
        if not symbol.args:
            places = tuple(self.vertex("axis", n, to=(index[i],)) for n, i in enumerate(indices))
            if symbol.op == "param":
                return self.vertex("read", to=(self.input(symbol.detail), *places))
            return self.vertex("tensor", symbol.detail, to=places)
        rest, parts = iter(indices), []
        for place, n in enumerate(symbol.args):
            total, formals = self.definition(n)
            ties = []
            for formal, vertex in zip(self.table.definitions[n].formals, formals, strict=True):
                over = formal in symbol.gone
                ties.append(self.vertex("over" if over else "tie", to=(vertex,) if over else (vertex, index[next(rest)])))
            parts.append(self.vertex("argument", place, to=(total, *ties)))
        return self.vertex("call", symbol.op, to=tuple(parts))

    def definition(self, n: int) -> tuple[int, list[int]]:
        if n not in self.defined:
            found = self.table.definitions[n]
            formals = [self.vertex("formal") for _ in found.formals]
            total = self.sum(list(found.terms), dict(zip(found.formals, formals, strict=True)))
            self.defined[n] = (total, formals)
        return self.defined[n]


def isomorphic(a: networkx.DiGraph, b: networkx.DiGraph) -> bool:
    """Whether the graphs are the same up to the numbers of their vertices. Colours are refined first, which leaves few choices."""
    import networkx

    if (len(a), a.size()) != (len(b), b.size()):
        return False
    colours = _refined(a, b)
    if colours is None:
        return False
    for graph, found in zip((a, b), colours, strict=True):
        networkx.set_node_attributes(graph, found, "colour")  # a colour tells the label, too
    return networkx.vf2pp_is_isomorphic(a, b, node_label="colour")


def _refined(a: networkx.DiGraph, b: networkx.DiGraph) -> tuple[dict[int, int], dict[int, int]] | None:
    """Colours of both graphs' vertices by their neighbours, until none splits; None where the two do not have the same."""
    graphs, count = (a, b), 0
    colours: list[dict[int, Any]] = [{v: repr(g.nodes[v]["label"]) for v in g} for g in graphs]
    while True:
        names: dict[Any, int] = {}
        colours = [{v: names.setdefault(c[v], len(names)) for v in g} for g, c in zip(graphs, colours, strict=True)]
        if sorted(colours[0].values()) != sorted(colours[1].values()):
            return None
        if len(names) == count:
            return colours[0], colours[1]
        count = len(names)
        colours = [
            {v: (c[v], tuple(sorted(c[u] for u in g.successors(v))), tuple(sorted(c[u] for u in g.predecessors(v)))) for v in g}
            for g, c in zip(graphs, colours, strict=True)
        ]
