"""How long every axis of every node is: a number, or a multiple of the tokens in a chunk, which a kernel learns when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memkit.compiler.ir import Graph, Node, Op


@dataclass(frozen=True)
class Length:
    """`times * LT + plus` where LT is the number of tokens in a chunk; the axis n has the length N."""

    plus: int = 0
    times: int = 0
    chunks: bool = False

    @property
    def text(self) -> str:
        if self.chunks:
            return "N"
        if not self.times:
            return str(self.plus)
        head = "LT" if self.times == 1 else f"LT * {self.times}"
        return head if self.times == 1 and not self.plus else f"({head}{f' + {self.plus}' if self.plus else ''})"

    def at(self, tokens: int, chunks: int = 1) -> int:
        """The length for this many tokens a chunk, and chunks."""
        return chunks if self.chunks else self.times * tokens + self.plus


CHUNKS = Length(chunks=True)
Lengths = Mapping[str, Length]


def start(sizes: Mapping[str, int], window: int) -> dict[str, Length]:
    """The lengths of the axes that parameters have: widths as given, tokens, and tokens with the window's in front."""
    found = {axis: Length(size) for axis, size in sizes.items()}
    return {**found, "t": Length(times=1), "s": Length(window - 1, 1), "j": Length(window), "n": CHUNKS, "g": Length()}


def lengths(graph: Graph, given: Sequence[Lengths]) -> dict[Node, dict[str, Length]]:
    """The length of every axis of every node of `graph`; `given` has those of its parameters. Loops' bodies are not looked into."""
    found: dict[Node, dict[str, Length]] = {p: {a: g[a] for a in p.axes} for p, g in zip(graph.params, given, strict=True)}
    for node in graph.nodes():
        if node not in found:
            found[node] = _lengths(node, found)
    return found


def body_lengths(scan: Node, found: Mapping[Node, Lengths]) -> dict[Node, dict[str, Length]]:
    """The same for the body of a loop, from the lengths outside."""
    assert scan.body is not None
    return lengths(scan.body, [found[outer] for outer in scan.args])


def _lengths(node: Node, found: Mapping[Node, Lengths]) -> dict[str, Length]:
    known: dict[str, Length] = {}
    for arg in reversed(node.args):
        known |= found[arg]
    a = node.attrs
    match node.op:
        case Op.TENSOR:
            known = dict(zip(node.axes, map(Length, shape(a["values"])), strict=True))
        case Op.RENAME:
            known = {a["names"].get(x, x): length for x, length in known.items()}
        case Op.GATHER:
            known[a["new"]] = Length(len(a["index"]))
        case Op.SCATTER:
            known[a["new"]] = Length(a["size"])
        case Op.DECAY:
            known[a["new"]] = known[a["axis"]]
        case Op.BAND:
            t = known[a["axis"]]
            known[a["new"]] = Length(t.plus + a["size"] - 1, t.times)
        case Op.UNBAND:
            known[a["slot"]] = Length(a["size"])
        case Op.WINDOWS:
            s = known[a["axis"]]
            known[a["outer"]] = Length((s.plus - a["size"]) // a["step"] + 1, s.times // a["step"])
            known[a["inner"]] = Length(a["size"])
        case Op.MERGE:
            t = known[a["axes"][0]]
            known[a["new"]] = Length(t.plus * a["size"], t.times * a["size"])
        case Op.SPLIT:
            r = known[a["axis"]]
            known[a["new"][0]], known[a["new"][1]] = Length(r.plus // a["size"], r.times // a["size"]), Length(a["size"])
        case Op.GET:
            known = _result_lengths(node, found)
    return {x: known[x] for x in node.axes}


def _result_lengths(node: Node, found: Mapping[Node, Lengths]) -> dict[str, Length]:
    """A GET's: of a final carry, a stacked output or a saved stack."""
    (scan,), index = node.args, node.attrs["index"]
    assert scan.body is not None
    inside = body_lengths(scan, found)
    results = scan.body.results
    own = inside[results[index]] if index < len(results) else inside[scan.body.params[index - len(results)]]
    k = scan.attrs["carries"]
    return {**own, scan.attrs["axis"]: found[scan.args[k]][scan.attrs["axis"]]}


def shape(values: object) -> tuple[int, ...]:
    """Of nested tuples."""
    return (len(values), *shape(values[0])) if isinstance(values, tuple | list) else ()
