"""What a plan costs: FLOPs and bytes a token of one head, counted from the lowered graph by the lengths of its axes.

A multiplication and an addition count one each, so a product of [m, n] with [n] counts 2 m n; every pointwise function counts 1 an
entry. Bytes are what a run without fusion moves in float32: each computed node reads its operands and writes itself once. Only the
forward pass is counted; training does about three times as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .build import Equations
from .facts import Facts
from .ir import Graph, Node, Op
from .passes import FORWARD, kernel_trick
from .plans import PLANS
from .plans.span import keys_look

Lengths = dict[str, int]
VIEWS = (Op.PARAM, Op.CONST, Op.TENSOR, Op.RENAME, Op.EXPAND, Op.SELECT, Op.WINDOWS, Op.GET, Op.SCAN)  # nothing is computed
TILES = (8, 16, 32, 64, 128, 256)
MAIN = ("chunks", "step", "resume")  # the graph that runs a chunk, under the first of these names
WIDTH = 4  # bytes of a float32


@dataclass(frozen=True)
class Count:
    """`products`: FLOPs of einsums and triangular solves. `others`: of everything entry by entry. `bytes`: read and written."""

    products: float = 0.0
    others: float = 0.0
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        return self.products + self.others

    def __add__(self, other: Count) -> Count:
        return Count(self.products + other.products, self.others + other.others, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Count:
        return Count(self.products * factor, self.others * factor, self.bytes * factor)


@dataclass(frozen=True)
class Cost:
    """A plan's cost for one token of one head. `growth`: what each earlier token adds to it, 0 unless the past is kept whole."""

    token: Count
    growth: Count

    def at(self, tokens: int) -> Count:
        """The mean over the tokens of a sequence."""
        return self.token + self.growth * (tokens / 2)


def count(graph: Graph, given: Mapping[str, int]) -> Count:
    """The cost of one run of `graph`; `given` has the length of every axis of its parameters."""
    return _count(graph, [{a: given[a] for a in p.axes} for p in graph.params])


def _count(graph: Graph, params: list[Lengths]) -> Count:
    lengths = {p: found for p, found in zip(graph.params, params, strict=True)}
    loops: dict[Node, list[Lengths]] = {}
    total = Count()
    for node in graph.nodes():
        if node.op is Op.SCAN:
            inside, results = _loop(node, [lengths[a] for a in node.args])
            total, loops[node], lengths[node] = total + inside, results, {}
        elif node.op is Op.GET:
            lengths[node] = loops[node.args[0]][node.attrs["index"]]
        elif node.op is not Op.PARAM:
            args = [lengths[a] for a in node.args]
            lengths[node] = _lengths(node, args)
            total = total + _cost(node, args, lengths[node])
    return total


def _loop(node: Node, args: list[Lengths]) -> tuple[Count, list[Lengths]]:
    """(cost of all rounds, lengths of each result): carries, stacked outputs, saved carries."""
    body, axis, carries, slices = node.body, node.attrs["axis"], node.attrs["carries"], node.attrs["slices"]
    assert body is not None
    rounds = next((a[axis] for a in args[carries : carries + slices]), 1)
    inner = [{n: x for n, x in a.items() if n != axis} if carries <= i < carries + slices else a for i, a in enumerate(args)]
    known: dict[Node, Lengths] = {}
    _fill(body, inner, known)
    results = [known[r] if i < carries else {axis: rounds, **known[r]} for i, r in enumerate(body.results)]
    return _count(body, inner) * rounds, results + [{axis: rounds, **inner[i]} for i in range(carries)]


def _fill(graph: Graph, params: list[Lengths], known: dict[Node, Lengths]) -> None:
    known.update(zip(graph.params, params, strict=True))
    loops: dict[Node, list[Lengths]] = {}
    for node in graph.nodes():
        if node.op is Op.SCAN:
            loops[node], known[node] = _loop(node, [known[a] for a in node.args])[1], {}
        elif node.op is Op.GET:
            known[node] = loops[node.args[0]][node.attrs["index"]]
        elif node.op is not Op.PARAM:
            known[node] = _lengths(node, [known[a] for a in node.args])


def widest(graph: Graph, given: Mapping[str, int]) -> int:
    """Numbers in the largest value that a run of `graph` computes outside its loops."""
    known: dict[Node, Lengths] = {}
    _fill(graph, [{a: given[a] for a in p.axes} for p in graph.params], known)
    return max((math.prod(known[n].values()) for n in graph.nodes() if n.op not in VIEWS), default=1)


def _lengths(node: Node, args: list[Lengths]) -> Lengths:
    """The length of each axis of a node."""
    every: Lengths = {}
    for arg in reversed(args):
        every.update(arg)
    return {axis: length for axis, length in {**every, **_made(node, args)}.items() if axis in node.axes}


def _made(node: Node, args: list[Lengths]) -> Lengths:
    """Lengths of the axes that a node makes."""
    a, x = node.attrs, args[0] if args else {}
    if node.op is Op.TENSOR:
        values, found = a["values"], {}
        for axis in node.axes:
            found[axis], values = len(values), values[0]
        return found
    if node.op is Op.RENAME:
        return {new: x[old] for old, new in a["names"].items()}
    if node.op in (Op.GATHER, Op.SCATTER):
        return {a["new"]: len(a["index"]) if node.op is Op.GATHER else a["size"]}
    if node.op is Op.DECAY:
        return {a["new"]: x[a["axis"]]}
    if node.op is Op.BAND:
        return {a["new"]: x[a["axis"]] + a["size"] - 1}
    if node.op is Op.UNBAND:
        return {a["slot"]: a["size"]}
    if node.op is Op.WINDOWS:
        return {a["outer"]: (x[a["axis"]] - a["size"]) // a["step"] + 1, a["inner"]: a["size"]}
    if node.op is Op.MERGE:
        return {a["new"]: math.prod(x[axis] for axis in a["axes"])}
    if node.op is Op.SPLIT:
        return {a["new"][0]: x[a["axis"]] // a["size"], a["new"][1]: a["size"]}
    return args[1] if node.op in (Op.PLACE, Op.FOLD) else {}


def _cost(node: Node, args: list[Lengths], own: Lengths) -> Count:
    """The cost of one node, loops apart."""
    if node.op in VIEWS:
        return Count()
    size, read = math.prod(own.values()), sum(math.prod(a.values()) for a in args)
    moved = WIDTH * (size + read)
    every = {axis: length for arg in args for axis, length in arg.items()}
    if node.op is Op.EINSUM:
        if set(every) > set(own):
            return Count(products=2 * math.prod(every.values()), bytes=moved)
        return Count(others=size, bytes=moved)
    if node.op is Op.MASKED_PRODUCT:
        return Count(*_masked(node, args), bytes=moved)
    if node.op is Op.SOLVE:
        return Count(products=size * own[node.attrs["cols" if node.attrs["transpose"] else "rows"]], bytes=moved)
    if node.op in (Op.POINTWISE, Op.DECAY):
        return Count(others=size, bytes=moved)
    return Count(others=read if node.op in (Op.REDUCE, Op.FOLD) else 0, bytes=moved)


def _masked(node: Node, args: list[Lengths]) -> tuple[int, int]:
    """(products, others) of scores, weighing and the sum against d."""
    z, x, c, d = args
    gone = set(node.attrs["contract"])
    full = {**z, **x}
    weighed = {axis: length for axis, length in {**full, **c}.items() if axis not in gone}
    scores = math.prod(weighed.values())
    return 2 * math.prod(full.values()) + 2 * math.prod({**weighed, **d}.values()), scores


# ---- plans


def given(eq: Equations, chunk: int) -> Lengths:
    """Lengths of all axes of a plan's parameters, for one chunk of one head."""
    return {**eq.sizes, "n": 1, "g": 1, "h": 1, "t": chunk, "s": chunk + eq.window - 1, "j": eq.window}


def plan_cost(eq: Equations, graphs: Mapping[str, Graph], chunk: int) -> Cost:
    """The cost of a token in chunks of `chunk` tokens, from a plan's lowered graphs."""
    sizes = given(eq, chunk)
    main = next(graphs[name] for name in MAIN if name in graphs)
    token = count(main, sizes) * (1 / chunk)
    if "history" not in graphs:
        return Cost(token, Count())
    looking = {**sizes, "t": chunk + (sizes["s"] if keys_look(main) else 0)}
    return Cost(token, count(graphs["history"], looking) * (1 / chunk))


def lowered(eq: Equations, known: Facts, plan: str) -> dict[str, Graph]:
    """A plan's graphs after all passes."""
    graphs = PLANS[plan].graphs(eq, known)
    if eq.features is not None and eq.kernel is not None:
        graphs = {name: kernel_trick(graph, eq.features, eq.kernel) for name, graph in graphs.items()}
    for step in FORWARD:
        graphs = {name: step(graph) for name, graph in graphs.items()}
    return graphs


def state_bytes(eq: Equations) -> tuple[int, int]:
    """(bytes of one head's state in float32, bytes each further token adds)."""
    copies = 1 + len(eq.slots) + (eq.grad_at == "chunk")
    finite = sum(math.prod(eq.sizes[a] for a in axes) for name, axes in eq.weights.items() if name not in eq.infinite)
    window = (eq.window - 1) * (eq.sizes["k"] + eq.sizes["v"])
    grows = sum(eq.sizes[eq.weights[name][0]] for name in eq.infinite) * copies + (eq.sizes["k"] if eq.infinite else 0)
    return WIDTH * (copies * finite + window), WIDTH * grows


def softmax_growth(eq: Equations) -> float:
    """FLOPs a token that each earlier token adds to causal softmax attention: q.k, exp, its sum and the sum of values."""
    return 2 * eq.sizes["k"] + 2 * eq.sizes["v"] + 3


def overtakes(eq: Equations, cost: Cost) -> float:
    """Length from which a sequence takes fewer FLOPs than under softmax attention (forward); infinity where it never does."""
    gain = softmax_growth(eq) - cost.growth.flops
    return math.inf if gain <= 0 else math.ceil(2 * cost.token.flops / gain)


def advice(eq: Equations, graphs: Mapping[str, Graph]) -> int:
    """The longest chunk, among powers of two, that takes at most a quarter more FLOPs a token than the one with the fewest."""
    flops = {chunk: plan_cost(eq, graphs, chunk).token.flops for chunk in TILES}
    return max(chunk for chunk in TILES if flops[chunk] <= 1.25 * min(flops.values()))


def report(eq: Equations, known: Facts, plan: str, graphs: Mapping[str, Graph], chunk: int) -> Iterator[str]:
    """Lines for `explain`: cost a token and head of the plan that runs and of every other that accepts, advice, state, cross-over."""
    rows = {plan: (dict(graphs), chunk)}
    for name, module in PLANS.items():
        if name != plan and module.refuse(known) is None:
            rows[name] = (lowered(eq, known, name), chunk if known.grad_at == "chunk" else module.tile(known))
    yield "a token of one head, the memory alone, forward, without fusion, under each plan that accepts:"
    costs = {name: plan_cost(eq, *row) for name, row in rows.items()}
    for name, cost in costs.items():
        rest = f", and {cost.growth.flops:,.0f} more for every earlier token" if cost.growth.flops else ""
        yield f"  {name:<10} {cost.token.flops:>12,.0f} FLOPs, {cost.token.bytes:>12,.0f} bytes{rest}"
    held, grows = state_bytes(eq)
    yield f"state of one head: {held:,} bytes" + (f", and {grows:,} more with every token" if grows else ", whatever the length")
    best = advice(eq, graphs)
    if plan != "scan" and best != chunk:
        meaning = "; update.chunk_size changes results" if known.grad_at == "chunk" else ""
        flops = plan_cost(eq, graphs, best).token.flops
        yield f"chunk advice: {best} is the longest within a quarter of the fewest FLOPs, {flops:,.0f} a token{meaning}"
    length = overtakes(eq, costs[plan])
    if math.isinf(length):
        yield "softmax attention takes fewer FLOPs at every length"
    else:
        yield f"fewer FLOPs than softmax attention from {length:,.0f} tokens on"

