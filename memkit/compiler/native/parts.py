"""Sums along the axis that a team shares: each member adds up what comes of its part, and one wait serves for all that are then read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels import keep
from memkit.compiler.kernels.layout import copied
from memkit.compiler.kernels.memory import packed

from . import choice
from .arena import Memory
from .choice import Chain, Choice
from .entries import Nest, View, plus, times
from .step import ALL, Step, is_small
from .stretches import write_entries

if TYPE_CHECKING:
    from .text import Function

Write = Callable[[Step, Sequence[Node], str], None]


class Parts(NamedTuple):
    """A value's terms: sums along the team's axis, what is no sum, and products that are summed along other axes."""

    sums: Sequence[Node]
    rest: Sequence[Node] = ()
    products: Sequence[Node] = ()


class Open:
    """Sums of which the members have made their parts, and which nobody has read yet."""

    def __init__(self, f: Function) -> None:
        self.f = f
        self.sums: dict[Node, Callable[[], None]] = {}
        self.read: list[Memory] = []  # of parts that were added up: free for others after a wait

    def add_up(self, read: Iterable[Node] | None = None) -> None:
        """Add up all parts, if one of `read` is made of some; without it, in any case."""
        if read is not None and not any(n in self.sums for n in read):
            return
        sums, self.sums = self.sums, {}
        for finish in sums.values():
            finish()

    def waited(self) -> None:
        """All members were waited for."""
        for memory in self.read:
            self.f.spread.give(memory)
        self.read = []


def terms(node: Node, chosen: Choice) -> Chain | None:
    """The products that a value is a sum of, and the rest of the sum; None without products."""
    return chosen.chains.get(node) or (Chain((), (node,)) if choice.is_product(node) else None)


def is_max(node: Node) -> bool:
    return node.op is Op.REDUCE and node.attrs["fn"] == "max"


def apart(f: Function, node: Node, chosen: Choice) -> list[Node]:
    """The sums along the team's axis that a value is made of: each member has one of its part, and these are added up."""
    if f.run is not None or not f.team:
        return []
    chain = terms(node, chosen)
    if chain is not None:
        return [p for p in chain.products if f.team in keep.contracted(p)]
    return [node] if f.team in keep.contracted(node) and not is_max(node) else []


def sums(f: Function, items: Sequence[Node], chosen: Choice) -> set[Node]:
    """The values that members make parts of."""
    return {n for n in items if apart(f, n, chosen)}


def in_parts(f: Function, node: Node, each: int, parts: Parts, write: Write) -> None:
    """The step in which every member makes its part; what adds the parts up comes when the value is read."""
    made = _Sum(f, node, each, parts, write)
    made.begin()
    f.open.sums[node] = made.add_up
    if parts.products or (parts.rest and not made.first):  # what these read may be gone later
        f.open.add_up()


class _Sum:
    """A value that members make parts of, each in a place of its own, the first where the value lies if all members see that.

    A small value that all members see and read again is added up by each for itself: else they would wait for it once more.
    """

    def __init__(self, f: Function, node: Node, each: int, parts: Parts, write: Write) -> None:
        self.f, self.node, self.each, self.parts, self.write = f, node, each, parts, write
        self.out, (strides, size) = f.views[node], packed(f.own(node), f.most(node))
        fits = dict(self.out.strides) == strides
        self.alone = self.out.memory.space != "own" and node in f.read and is_small(f, node, each)
        if self.alone:
            f.views[node] = f.own_scratch(node, self.out.pointer if fits else "")
        whole = f.views[node]
        self.first = whole.memory.space != "own" and fits
        self.plain = not self.first and not parts.rest and dict(whole.strides) == strides  # one member's part is all of it
        self.spread = View(f.names.new("sums"), strides, f.spread.take(size)._replace(space="spread"))

    def begin(self) -> None:
        """Make the parts."""
        f, parts, here = self.f, self.parts, self.f.names.new("sum")
        whole, name, memory = f.views[self.node].pointer, self.spread.pointer, self.spread.memory
        place = f"{name} + member * apart"
        if self.first:
            place = f"member == 0 ? {whole} : {name} + (member - 1) * apart"
        elif self.plain:
            place = f"members == 1 ? {whole} : {place}"
        f.line(f"real* const {name} = spread + {memory.start};")
        f.line(f"real* const {here} = {place};")
        shared = Node(Op.PARAM, (), self.node.axes, {"name": here})
        f.length[shared] = {a: x for n in (*parts.sums[0].args, self.node) for a, x in f.length[n].items()}
        f.views[shared] = View(here, self.spread.strides, memory)
        made = Step(f, shared, summed=True)
        if self.first:
            made.writes.append((self.out.memory, ("owner", "0")))
            made.add(["if (member == 0) {", *("    " + line for line in write_entries(made, parts.rest)), "}"] if parts.rest else [])
        self.write(made, parts.sums, "member == 0" if self.first and parts.rest else "")
        made.done()

    def add_up(self) -> None:
        """Make the value of them."""
        made = Step(self.f, self.node, self.each)
        if not self.first and not self.plain:
            made.add(write_entries(made, self.parts.rest))
        made.add(_added(made, self.spread, self.first, self.plain))
        made.lines = _of_teams(made.lines) if self.plain else made.lines
        made.reads.append((self.spread.memory, ALL))
        if self.parts.products:
            self.write(made, self.parts.products, "1")
        made.done()
        if self.alone:
            _shown(self.f, self.node, self.out)
        self.f.open.read.append(self.spread.memory)


def _of_teams(lines: Sequence[str]) -> list[str]:
    """What there is nothing to do for where one member is all."""
    return ["if (members > 1) {", *("    " + line for line in lines), "}"]


def _added(made: Step, parts: View, first: bool, plain: bool) -> list[str]:
    """Loops that add up the members' parts. first: the first one's lies where the value does. plain: it replaces what lies there."""
    found = _sum_of(made, parts, "", False) if plain else []
    return found + _sum_of(made, parts, "1" if first or plain else "0", first)


def _sum_of(made: Step, parts: View, least: str, first: bool) -> list[str]:
    """Loops that add the parts of all members from `least` on; "": that write the first one's."""
    nest, out, where = Nest(), made.out, ""
    if least:
        i = made.f.names.new("i")
        nest.enter(i, f"for (long {i} = {least}; {i} < members; ++{i})")
        where = times(f"({i} - 1)" if first else i, "apart")
    at = made.enter(nest, made.f.own(made.node))
    offset = plus(where, out.offset(at) if first else parts.offset(at))
    nest.lines[-1].append(f"{out.pointer}[{out.offset(at)}] {'+=' if least else '='} {parts.pointer}[{offset}];")
    return nest.text()


def _shown(f: Function, node: Node, out: View) -> None:
    """Every member has all of a value: together they put it where it is read from outside."""
    copy, whole = copied(node), f.views[node]
    f.length[copy], f.views[copy] = f.length[node], out
    made = Step(f, copy)
    made.add(write_entries(made, [copy]))
    if dict(out.strides) == dict(whole.strides):
        made.lines = _of_teams(made.lines)
    made.done()
