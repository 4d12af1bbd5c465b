"""`memkit equiv --lattice`: which preset becomes which when knobs are switched off, proved, as a table and as a drawing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from memkit.equivalence import canonical_form, prove
from memkit.given import Side, under
from memkit.specs.errors import MemkitError
from memkit.specs.io import load_spec, presets
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule

if TYPE_CHECKING:
    import graphviz

# each switches something off; what does not change a preset is not tried on it
KNOBS: Mapping[str, Any] = {
    "window.size": 1,
    "gates.momentum": 0,
    "gates.retain": 1,
    "gates.step_size": 1,
    "update.chunk_size": 1,
    "update.read": "after",
    "memory": "linear",
    "features": "identity",
    "optimizer": "gd",
}
WIDTH = 4


@dataclass(frozen=True)
class Reduction:
    """`start` under `given` is the rule `end`; `given` is as small as can be. Empty where two presets are one rule."""

    start: str
    end: str
    given: Mapping[str, Any]

    def under(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.given.items()) or "always"


def lattice(names: Sequence[str] | None = None) -> list[Reduction]:
    """Every reduction between presets under some of KNOBS, smallest sets first. Each is proved at two pairs of widths."""
    from memkit.compiler.terms import Table

    names, table = names or presets(), Table()
    specs = {name: load_spec(name) for name in names}
    shapes = {name: _shape(spec) for name, spec in specs.items()}
    keys: dict[str, Any] = {}

    def key(spec: LayerSpec) -> Any:
        text = _text(spec)
        if text not in keys:
            keys[text] = canonical_form(Side(spec), WIDTH, WIDTH, table).key()
        return keys[text]

    goals: dict[Any, list[str]] = {}
    for name in names:
        goals.setdefault(key(specs[name]), []).append(name)
    found: list[Reduction] = []
    for start in names:
        done: dict[str, list[set[str]]] = {}
        for given, spec in _variants(specs[start]):
            if _shape(spec) not in shapes.values():
                continue
            for end in goals.get(key(spec), ()):
                smaller = done.setdefault(end, [])
                if end != start and not any(s <= set(given) for s in smaller):
                    smaller.append(set(given))
                    if prove(Side(spec), Side(specs[end])) is not None:
                        found.append(Reduction(start, end, given))
    return found


def _text(spec: LayerSpec) -> str:
    """What of a spec is its rule."""
    return spec.model_dump_json(exclude={"name", "source", "layer"})


def _shape(spec: LayerSpec) -> Any:
    """What equal rules nearly always share, told without building anything: weights and gates of the call, entrywise steps or not."""
    rule = Rule(spec, WIDTH, WIDTH)
    return len(rule.spec.memory.shapes(WIDTH, WIDTH)), rule.finite, frozenset(rule.gates), spec.optimizer.elementwise()


def _variants(spec: LayerSpec) -> Iterator[tuple[dict[str, Any], LayerSpec]]:
    """The spec under every set of the knobs that change it, small sets first."""
    useful = [k for k, v in KNOBS.items() if _changed(spec, {k: v})]
    seen: set[str] = set()
    for size in range(len(useful) + 1):
        for chosen in combinations(useful, size):
            given = {k: KNOBS[k] for k in chosen}
            found = _changed(spec, given) if given else spec
            if found is not None and _text(found) not in seen:
                seen.add(_text(found))
                yield given, found


def _changed(spec: LayerSpec, given: Mapping[str, Any]) -> LayerSpec | None:
    """The spec under `given`; None where it has no such knob, cannot take it or stays as it was."""
    try:
        found = under(spec, given)[0].spec
    except MemkitError:
        return None
    return None if _text(found) == _text(spec) else found


def table(found: Sequence[Reduction]) -> str:
    """The reductions as lines of three columns."""
    rows = [("from", "to", "given"), *((r.start, r.end, r.under()) for r in found)]
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c}" for a, b, c in rows)


def nearest(found: Sequence[Reduction]) -> list[Reduction]:
    """The reductions that are not a way over a preset in between: one for each pair, the smallest."""
    best: dict[tuple[str, str], Reduction] = {}
    for r in found:
        if (r.start, r.end) not in best or len(r.given) < len(best[r.start, r.end].given):
            best[r.start, r.end] = r
    ends: dict[str, set[str]] = {}
    for start, end in best:
        ends.setdefault(start, set()).add(end)
    over = {(a, c) for a in ends for b in ends[a] for c in ends.get(b, ()) if a != c and a not in ends.get(b, ())}
    return [r for pair, r in best.items() if pair not in over]


def drawing(found: Sequence[Reduction]) -> graphviz.Digraph:
    """The nearest reductions as a graph, general rules above special ones."""
    import graphviz

    graph = graphviz.Digraph("reductions", comment="an edge: the upper rule is the lower one under what the edge says")
    graph.attr(rankdir="TB", nodesep="0.35", ranksep="0.7", fontname="Helvetica")
    graph.attr("node", shape="box", style="rounded", fontname="Helvetica", fontsize="12")
    graph.attr("edge", fontname="Helvetica", fontsize="9")
    shown = nearest(found)
    for name in dict.fromkeys(n for r in shown for n in (r.start, r.end)):
        graph.node(name, label=name)
    for r in shown:
        graph.edge(r.start, r.end, label="".join(rf"  {text}\l" for text in r.under().split(", ")))
    return graph
