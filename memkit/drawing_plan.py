"""The plan view: the graph a spec was compiled to, for one chunk and head, with shapes on arrows and costs in boxes."""

from __future__ import annotations

from typing import Any

from memkit.compiler.cost import MAIN, given
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.pipeline import Compiled, CompiledRule, compile_rule
from memkit.layers.memory_layer import DEFAULT_DIM
from memkit.specs.errors import SpecError, near
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule

from .drawing_cost import Sizes
from .drawing_model import Cluster, Picture
from .drawing_tangle import untangled
from .drawing_text import count
from .drawing_units import QUIET, Unit, details, source, title, units

BYTES = 4  # of a float32


def plan_picture(subject: LayerSpec | Rule, after: str = "") -> Picture:
    """The graph of a spec (at the widths of a layer of the default size) or of a compiled rule; after a pass, or the last.

    Raises:
        SpecError: for a pass that did not run.
    """
    rule = subject if isinstance(subject, CompiledRule) else compiled(subject)
    known: Compiled = rule.compiled
    name = next(name for name in (*MAIN, *known.graphs) if name in known.graphs)
    stages = dict(known.graphs[name].graphs)
    if after and after not in stages:
        raise SpecError(f"after {after!r}", "a pass that ran: " + ", ".join(stages), near(after, stages), "--after")
    graph = stages[after] if after else known.graphs[name].last
    return _Painter(rule, name, graph, after).picture


def compiled(subject: LayerSpec | Rule) -> CompiledRule:
    """The compiled rule; a spec's widths are those of a layer of the default size."""
    if isinstance(subject, Rule):
        return compile_rule(subject.spec, subject.key_dim, subject.value_dim)
    share = max(1, DEFAULT_DIM // subject.layer.heads)
    return compile_rule(subject, subject.layer.key_dim or share, subject.layer.value_dim or share)


class _Painter:
    def __init__(self, rule: CompiledRule, name: str, graph: Graph, after: str) -> None:
        known = rule.compiled
        self.sizes = Sizes(given(known.equations, known.chunk))
        self.flops, self.bytes = 0, 0
        step = f", after {after}" if after else ""
        self.picture = Picture(f"{rule.spec.name}: plan {known.choice.name}, graph {name}{step}", tight=True)
        self.place: dict[Node, str] = {}  # box of a value
        self.alias: dict[Node, Node] = {}  # what a loop's parameter stands for
        self.taken: dict[Node, str] = {}  # box of what a loop carries to the next chunk
        self.drawn: set[tuple[Node, str, str]] = set()
        self.number = 0
        self.inputs = {param: (param.attrs["name"], _kind(param, known)) for param in graph.params}
        self.graph(graph, "")
        for label, result in zip(graph.labels, graph.results, strict=True):
            if result.op is Op.GET and result.attrs["index"] < result.args[0].attrs["carries"]:
                continue  # the box of what the loop carries shows it
            box = self.picture.box(f"out_{label}", label if label == "y" else f"{label} after", kind="result" if label == "y" else "inner")
            self.arrow(result, box)
        self.picture = untangled(self.picture)
        kinds = {box.kind for box in self.picture.boxes}
        self.picture.legend = (*(k for k in ("given", "inner", "outer", "step", "fused", "again") if k in kinds), "data")
        window = rule.spec.window.size - 1
        t = f"t = {known.chunk} tokens" + (f", s = t + {window} with the window" if window else "")
        self.picture.notes += [
            f"n chunks; g batch x heads; {t}; K = {rule.key_dim}, V = {rule.value_dim}",
            f"one chunk of one head: {count(self.flops, 'FLOP')}, {count(self.bytes, 'B')} moved at float32",
        ]
        others = [other for other in known.graphs if other != name]
        if others:
            self.picture.notes.append(f"compiled too: {', '.join(others)}")

    def graph(self, graph: Graph, cluster: str) -> None:
        parts = units(graph)
        for unit in parts:
            node = unit[0]
            if node.op is Op.SCAN:
                self.loop(node, cluster)
            elif node.op is Op.MASKED_PRODUCT:
                self.fused(node, cluster)
            else:
                self.unit(unit, graph, cluster)

    def name(self, prefix: str) -> str:
        self.number += 1
        return f"{prefix}{self.number}"

    def unit(self, unit: Unit, graph: Graph, cluster: str) -> None:
        inside = set(unit)
        args = [a for n in unit for a in n.args if source(a) not in inside and source(a).op not in (Op.CONST, Op.TENSOR)]
        users = graph.users()
        outs = [n for n in unit if n in graph.results or any(u not in inside for u in _real_users(users, n))]
        flops = sum(self.sizes.flops(n) for n in unit)
        moved = BYTES * sum(self.sizes.count(n) for n in [*dict.fromkeys(args), *outs])
        more = details(unit)
        box = self.picture.box(self.name("op"), title(unit), *((more,) if more else ()), self.cost(flops, moved), cluster=cluster)
        self.place |= dict.fromkeys(unit, box)
        for arg in args:
            self.arrow(arg, box)

    def cost(self, flops: int, moved: int) -> str:
        self.flops += flops
        self.bytes += moved
        return f"{count(flops, 'FLOP')}, {count(moved, 'B')}"

    def loop(self, scan: Node, cluster: str) -> None:
        """The body in a cluster; carried values are boxes in it, other operands come in from where they were made."""
        body = scan.body
        assert body is not None
        self.sizes.enter(scan)
        name = self.name("loop")
        back = ", backwards" if scan.attrs["reverse"] else ""
        self.picture.clusters.append(Cluster(name, f"scan over {scan.attrs['axis']}: one chunk after the other{back}", "step", cluster))
        k = scan.attrs["carries"]
        for i, (param, arg) in enumerate(zip(body.params, scan.args, strict=True)):
            if i < k:
                first = arg in self.inputs
                start = (f"at first {self.inputs[arg][0]}, {self.sizes.shape(arg)}",) if first else ()
                box = self.picture.box(self.name("carry"), f"{param.attrs['name']} carried", *start, kind="inner", cluster=name)
                self.place[param] = box
                if not first:
                    self.arrow(arg, box)
            else:
                self.alias[param] = arg
        self.graph(body, name)
        for param, result in zip(body.params[:k], body.results[:k], strict=True):
            box = self.picture.box(
                self.name("next"), f"{param.attrs['name']} to the next", "and out, after the last", kind="inner", cluster=name
            )
            self.arrow(result, box)
            self.taken[result] = box

    def fused(self, node: Node, cluster: str) -> None:
        """A masked product as its three steps in one cluster: what is between them is never stored."""
        z, x, c, d = node.args
        name = self.name("fused")
        self.picture.clusters.append(Cluster(name, "", "fused", cluster))
        scores, mask, sums = self.sizes.fused(node)
        over = ", ".join(node.attrs["contract"])
        read = [BYTES * sum(self.sizes.count(n) for n in part) for part in ((z, x), (c,), (d, node))]
        first = self.picture.box(f"{name}_scores", f"scores over {over}", self.cost(scores, read[0]), kind="fused", cluster=name)
        second = self.picture.box(f"{name}_mask", "* C", self.cost(mask, read[1]), kind="fused", cluster=name)
        third = self.picture.box(f"{name}_sum", f"product over {node.attrs['cols']}", self.cost(sums, read[2]), kind="fused", cluster=name)
        square = self.sizes.shape(c)
        self.picture.arrow(first, second, "data", square, weight=3)
        self.picture.arrow(second, third, "data", square, weight=3)
        for arg, box in ((z, first), (x, first), (c, second), (d, third)):
            self.arrow(arg, box)
        self.place[node] = third

    def origin(self, node: Node) -> str:
        """The box a value comes from. Inputs get a box for every use, which keeps arrows short."""
        made = source(node)
        while made in self.alias:
            made = source(self.alias[made])
        if made.op is Op.GET:
            loop, index = made.args[0], made.attrs["index"]
            assert loop.body is not None
            results = loop.body.results
            if index < loop.attrs["carries"]:
                return self.taken[results[index]]
            return self.origin(results[index] if index < len(results) else loop.body.params[index - len(results)])
        if made in self.inputs:
            name, kind = self.inputs[made]
            return self.picture.box(self.name("in"), name, kind=kind)
        if made.op in QUIET and made not in self.place:
            text = f"{made.attrs['value']:g}" if made.op is Op.CONST else "table"
            return self.picture.box(self.name("const"), text, kind="given")
        return self.place[made]

    def arrow(self, value: Node, head: str) -> None:
        label = self.sizes.shape(value)
        base = source(value)
        while base in self.alias:
            base = source(self.alias[base])
        if (base, head, label) not in self.drawn:
            self.drawn.add((base, head, label))
            self.picture.arrow(self.origin(value), head, "data", label)


def _kind(param: Node, known: Compiled) -> str:
    name = param.attrs["name"]
    if name in ("q", "keys", "values") or name.startswith("past_"):
        return "given"
    bare = name.removeprefix("anchor_")
    if bare in known.equations.weights or bare.startswith("S_") or any(bare.endswith(f"_{w}") for w in known.equations.weights):
        return "inner"
    return "outer"


def _real_users(users: dict[Node, list[Node]], node: Node) -> list[Any]:
    """Users, through views; None stands for a result that leaves through one."""
    found: list[Any] = []
    for user in users[node]:
        if source(user) is user or user.op is Op.GET:
            found.append(user)
        else:
            found += _real_users(users, user) or [None]
    return found
