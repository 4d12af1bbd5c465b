"""A SCAN taken apart for the passes that change its parameters or results, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op


class Carry(NamedTuple):
    start: Node  # outside
    param: Node  # inside: its value at an iteration's start
    result: Node  # inside: its value at the end


class Input(NamedTuple):
    value: Node  # outside; a slice has the loop's axis
    param: Node  # inside


@dataclass(frozen=True)
class Loop:
    """One SCAN: what goes round, what comes in, what comes out. A result is known by (kind, place): ("carry" | "output" | "saved", i)."""

    node: Node
    carries: tuple[Carry, ...]
    slices: tuple[Input, ...]
    consts: tuple[Input, ...]
    outputs: tuple[Node, ...]

    @staticmethod
    def of(node: Node, body: Graph | None = None) -> Loop:
        body = body or node.body
        assert body is not None
        k, m = node.attrs["carries"], node.attrs["slices"]
        carries = tuple(Carry(*c) for c in zip(node.args[:k], body.params[:k], body.results[:k], strict=True))
        inputs = tuple(Input(*i) for i in zip(node.args[k:], body.params[k:], strict=True))
        return Loop(node, carries, inputs[:m], inputs[m:], body.results[k:])

    @property
    def axis(self) -> str:
        return self.node.attrs["axis"]

    @property
    def body(self) -> Graph:
        params = (*(c.param for c in self.carries), *(i.param for i in (*self.slices, *self.consts)))
        labels = self.node.body.labels if self.node.body and len(self.node.body.labels) == len(self.carries) + len(self.outputs) else ()
        return Graph(params, (*(c.result for c in self.carries), *self.outputs), labels)

    def with_body(self, body: Graph, slices: tuple[Input, ...], consts: tuple[Input, ...]) -> Loop:
        """The loop with another body, of as many carries, and other inputs."""
        carries = tuple(c._replace(result=r) for c, r in zip(self.carries, body.results, strict=False))
        return replace(self, carries=carries, slices=slices, consts=consts, outputs=body.results[len(carries) :])

    def kind(self, index: int) -> tuple[str, int]:
        """What the GET with this index names."""
        k, m = len(self.carries), len(self.outputs)
        return ("carry", index) if index < k else ("output", index - k) if index < k + m else ("saved", index - k - m)

    def index(self, kind: str, place: int) -> int:
        """The inverse of `kind`."""
        return place + {"carry": 0, "output": len(self.carries), "saved": len(self.carries) + len(self.outputs)}[kind]

    def rebuilt(self, save: bool | None = None) -> Node:
        """The SCAN node; the very same where nothing changed."""
        args = (*(c.start for c in self.carries), *(i.value for i in (*self.slices, *self.consts)))
        save = self.node.attrs["save"] if save is None else save
        attrs = {**self.node.attrs, "carries": len(self.carries), "slices": len(self.slices), "save": save}
        body, old = self.body, self.node.body
        assert old is not None
        if body.params == old.params and body.results == old.results:
            body = old
        same = args == self.node.args and body is old and attrs == dict(self.node.attrs)
        return self.node if same else self.node.replace(args=args, attrs=attrs, body=body)


def put_in(graph: Graph, old: Loop, new: Loop, scan: Node, instead: Mapping[tuple[str, int], Node] | None = None) -> Graph:
    """The graph with `scan`, made of `new`, for a loop; its results are found where `instead` says, or under the same kind and place."""
    instead = instead or {}

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node is old.node:
            return scan
        if node.op is Op.GET and node.args[0] is old.node:
            kind = old.kind(node.attrs["index"])
            return instead[kind] if kind in instead else node.replace(args=args, attrs={"index": new.index(*kind)})
        return node if args == node.args else node.replace(args=args)

    return ir.rebuild(graph, change)


Rewrite = Callable[[Loop, set[tuple[str, int]]], tuple[Node, Mapping[tuple[str, int], "tuple[str, int] | Node"]]]


def rewrite_loops(graph: Graph, rewrite: Rewrite) -> Graph:
    """Every SCAN, innermost first, replaced by what `rewrite` makes of it.

    rewrite(loop, the results in use) -> (new SCAN, where each result in use is found now: another result of it, or a node outside).
    """
    users = graph.users()
    moved: dict[Node, tuple[Loop, Mapping[tuple[str, int], tuple[str, int] | Node]]] = {}
    origin: dict[Node, Loop] = {}

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is Op.SCAN:
            assert node.body is not None
            body = rewrite_loops(node.body, rewrite)
            loop = Loop.of(node.replace(args=args) if args != node.args else node, body)
            new, places = rewrite(loop, {loop.kind(user.attrs["index"]) for user in users[node]})
            moved[new], origin[new] = (Loop.of(new), places), loop
            return new
        if node.op is Op.GET and args[0] in moved:
            (loop, places), old = moved[args[0]], origin[args[0]]
            place = places[old.kind(node.attrs["index"])]
            if isinstance(place, Node):
                return place
            index = loop.index(*place)
            if args == node.args and index == node.attrs["index"]:
                return node
            return node.replace(args=args, attrs={"index": index})
        return node if args == node.args else node.replace(args=args)

    return laid_out_as(graph, ir.rebuild(graph, change))


def laid_out_as(before: Graph, after: Graph) -> Graph:
    """`after` with the axes of each result in the order they have in `before`: that is what a caller sees."""
    if all(a.axes == b.axes for a, b in zip(before.results, after.results, strict=True)):
        return after
    results = [a if a.axes == b.axes else ir.einsum(a, ir.const(1.0), b.axes) for a, b in zip(after.results, before.results, strict=True)]
    return Graph(after.params, tuple(results), after.labels)


def reached(roots: Iterable[Node]) -> set[Node]:
    """The nodes some roots are made of."""
    return set(Graph((), tuple(roots)).nodes())


# these copy nothing, or only stretch what they are given: alone, they are not worth moving in or out of a loop
STAYS = (Op.PARAM, Op.CONST, Op.TENSOR, Op.RENAME, Op.EXPAND, Op.PLACE, Op.SPLIT, Op.SCAN, Op.GET)
TOKENS = ("t", "u", "s", "r", "c", "i", "j")  # axes along which tokens, window slots or rows of a system lie
MEASURES = (Op.EXPAND, Op.PLACE, Op.FOLD)  # of their second operand only lengths are read


def too_wide(axes: Iterable[str]) -> bool:
    """Whether a value with these axes is a matrix for every token: as long as a sequence, far more memory than its inputs and outputs."""
    axes = set(axes)
    return bool(axes & set(TOKENS)) and len(axes - set(ir.LEADING) - set(TOKENS)) > 1


class Outside:
    """Nodes of a loop's body made again outside it, for all iterations at once: they gain the loop's axis."""

    def __init__(self, axis: str, made: Mapping[Node, Node]) -> None:
        self.axis, self.made = axis, dict(made)

    def node(self, node: Node) -> Node:
        stack = [node]
        while stack:
            inner = stack[-1]
            missing = [a for a in inner.args if a not in self.made] if inner not in self.made else []
            stack += missing
            if not missing:
                if inner not in self.made:
                    self.made[inner] = self._lifted(inner)
                stack.pop()
        return self.made[node]

    def _lifted(self, node: Node) -> Node:
        args = [self.made[a] for a in node.args]
        if node.op in MEASURES and self.axis in args[1].axes and self.axis not in args[0].axes:
            args[1] = ir.select(args[1], self.axis, 0)  # what is the same in every iteration is made once
        lifted = ir.lift(node, args)
        return lifted.replace(axes=(self.axis, *node.axes)) if lifted is not node and self.axis in lifted.axes else lifted
