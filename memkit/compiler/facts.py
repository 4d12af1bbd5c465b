"""Facts: what is true of a spec's formulas, inferred from their graphs, never declared. Plans are chosen by facts alone."""

from __future__ import annotations

from dataclasses import dataclass

from . import ir
from .autodiff import vjp
from .build import Equations
from .degree import degree, is_pointwise
from .ir import Graph, Node, Op
from .simplify import simplify, uniform


@dataclass(frozen=True)
class Product:
    """One place where a weight multiplies activations: `node` = weight times `operand`, over the weight's axis `into`."""

    weight: str
    node: Node
    operand: Node
    out: str  # the weight's axis that stays
    into: str  # the weight's axis that is summed


@dataclass(frozen=True)
class Linear:
    """Coefficients of a linear inner optimizer, as graphs over the gates: W += p S + u G and S' = m S + w G."""

    p: Node | None
    u: Node
    m: Node | None
    w: Node | None


@dataclass(frozen=True)
class Facts:
    """What the plans ask about a spec.

    gradient_degree: degree of the inner gradient in the prediction (0, 1 or infinity).
    gradient_slope: its constant derivative where the degree is at most 1 and every entry stands alone, else None.
    products: the places where weights meet activations, or a sentence why there are others.
    memory_linear: the prediction is one weight times something, plus something free of weights.
    retention: "kept", "scalar", "diagonal" or "other". optimizer: coefficients of a linear one, else None.
    features_direct: the features meet nothing but weights.
    slot: m and w of the one slot S' = m S + w G, where it is linear; without a slot the gradient itself (m = 0, w = 1).
    step: weight name -> the move as a graph of (slot_after, gates), where that is all it needs.
    """

    gradient_degree: float
    gradient_slope: float | None
    products: tuple[Product, ...] | str
    memory_linear: bool
    retention: str
    optimizer: Linear | None
    slot: tuple[Node, Node] | None
    step: dict[str, Graph] | None
    finite: bool
    features_direct: bool
    grad_at: str
    window: int
    read_before: bool


def facts(eq: Equations) -> Facts:
    """Infer everything the plans ask, from the graphs of `eq`."""
    slope = eq.slope
    p, result = slope.param("p"), slope.results[0]
    gradient_degree = degree(result, p)
    products = find_products(eq)
    return Facts(
        gradient_degree=gradient_degree,
        gradient_slope=_constant_slope(slope) if gradient_degree <= 1 else None,
        products=products,
        memory_linear=_memory_linear(eq, products),
        retention=_retention(eq),
        optimizer=_optimizer(eq),
        slot=_slot(eq),
        step=_step(eq),
        finite=not eq.infinite,
        features_direct=_features_direct(eq, products),
        grad_at=eq.grad_at,
        window=eq.window,
        read_before=eq.read_before,
    )


def _constant_slope(slope: Graph) -> float | None:
    """d slope / d p where it is one constant for every entry, else None."""
    p, result = slope.param("p"), slope.results[0]
    if not is_pointwise(result, p, "v"):
        return None
    (gradient,) = vjp([result], [ir.expand(ir.const(1.0), result)], [p])
    if gradient is None:
        return 0.0
    return uniform(simplify(Graph(slope.params, (gradient,))).results[0])


def depends(graph: Graph, roots: set[Node]) -> set[Node]:
    """Every node of `graph` that one of `roots` reaches, roots included."""
    reached = set(roots)
    for node in graph.nodes():
        if any(a in reached for a in node.args):
            reached.add(node)
    return reached


def find_products(eq: Equations) -> tuple[Product, ...] | str:
    """The products of weights with activations in `predict`, or why weights enter otherwise."""
    graph = eq.predict
    weights = {graph.param(name): name for name in eq.weights}
    from_weights: dict[Node, str] = dict(weights)
    found: list[Product] = []
    for node in graph.nodes():
        if node in weights:
            continue
        used = [a for a in node.args if a in from_weights]
        if not used:
            continue
        weight = from_weights[used[0]]
        if node.op is Op.RENAME:
            from_weights[node] = weight
            continue
        other = [a for a in node.args if a is not used[0]]
        gone = [a for a in used[0].axes if a not in node.axes]
        if node.op is not Op.EINSUM or len(used) != 1 or len(other) != 1 or len(gone) != 1 or set(other[0].axes) != set(gone):
            return f"weight {weight} enters the memory's equation other than as a matrix times activations ({node.op.value})"
        out = next(a for a in used[0].axes if a != gone[0])
        found.append(Product(weight, node, other[0], out, gone[0]))
    missing = [n for n in eq.weights if n not in {p.weight for p in found}]
    return f"weight {missing[0]} is never used" if missing else tuple(found)


def _features_direct(eq: Equations, products: tuple[Product, ...] | str) -> bool:
    """Whether the features meet nothing but weights."""
    if isinstance(products, str):
        return False
    f = eq.predict.param("f")
    own = {f} | {n for n in eq.predict.nodes() if n.op is Op.RENAME and n.args[0] is f}
    places = {p.node for p in products}
    return all(n in own or n in places for n in eq.predict.nodes() if any(a in own for a in n.args)) and eq.predict.results[0] not in own


def _memory_linear(eq: Equations, products: tuple[Product, ...] | str) -> bool:
    if isinstance(products, str) or len(products) != 1:
        return False
    graph, product = eq.predict, products[0]
    result = graph.results[0]
    if product.operand in depends(graph, {graph.param(product.weight)}) or not is_pointwise(result, product.node, product.out):
        return False
    (gradient,) = vjp([result], [ir.expand(ir.const(1.0), result)], [product.node])
    if gradient is None:
        return False
    return uniform(simplify(Graph(graph.params, (gradient,))).results[0]) == 1.0


def coefficient(graph: Graph, result: int, of: str, linear_in: tuple[str, ...]) -> Node | None:
    """The factor of parameter `of` in a result that is linear and entrywise in `linear_in`; None where it is not so, or not a scalar."""
    node = graph.results[result]
    for name in linear_in:
        entry = graph.param(name)
        if degree(node, entry) > 1 or not all(is_pointwise(node, entry, axis) for axis in entry.axes):
            return None
    ones = {name: ir.const(1.0 if name == of else 0.0) for name in linear_in}
    zeros = {name: ir.const(0.0) for name in linear_in}
    (at_one,) = substitute(Graph(graph.params, (node,)), ones)
    (at_zero,) = substitute(Graph(graph.params, (node,)), zeros)
    if uniform(at_zero) != 0.0:
        return None
    return at_one


def substitute(graph: Graph, values: dict[str, Node]) -> list[Node]:
    """The simplified results of `graph` with scalars put for parameters; axes that only those parameters had disappear."""
    new: dict[Node, Node] = {}
    for node in graph.nodes():
        args = tuple(new[a] for a in node.args)
        if node.op is Op.PARAM:
            new[node] = values.get(node.attrs["name"], node)
        elif node.op is Op.POINTWISE:
            new[node] = ir.pointwise(node.attrs["fn"], *args)
        elif node.op in (Op.RENAME, Op.EXPAND) and not args[0].axes:
            new[node] = args[0]
        elif node.op is Op.EINSUM and all(set(a.axes) <= set(node.axes) for a in args):
            new[node] = ir.mul(args[0], args[1])
        else:
            new[node] = ir.lift(node, args)
    kept = tuple(p for p in graph.params if p.attrs["name"] not in values)
    return list(simplify(Graph(kept, tuple(new[r] for r in graph.results))).results)


def _retention(eq: Equations) -> str:
    kinds = set()
    for name, graph in eq.retain.items():
        factor = coefficient(graph, 0, "W", ("W",))
        if factor is None:
            return "other"
        if uniform(factor) == 1.0:
            kinds.add("kept")
        elif not factor.axes:
            kinds.add("scalar")
        elif factor.axes == ("f",) and eq.weights[name][1] == "f":
            kinds.add("diagonal")
        else:
            return "other"
    return kinds.pop() if len(kinds) == 1 else "other"


def retain_factor(eq: Equations) -> Node:
    """The factor kept, a node over the gate `retain`; CONST 1 where all is kept."""
    node = coefficient(next(iter(eq.retain.values())), 0, "W", ("W",))
    if node is None:
        raise ir.GraphError("retention is not a factor")
    return node


def _inputs(eq: Equations) -> tuple[str, ...]:
    return ("grad", *(f"slot_{s}" for s in eq.slots))


def _optimizer(eq: Equations) -> Linear | None:
    """Coefficients of the whole step, where it is linear with at most one slot."""
    if len(eq.slots) > 1:
        return None
    graph, names = next(iter(eq.update.values())), _inputs(eq)
    wanted = [(0, "grad")] if not eq.slots else [(0, "grad"), (0, names[1]), (1, names[1]), (1, "grad")]
    found = [coefficient(graph, result, of, names) for result, of in wanted]
    nodes = [n for n in found if n is not None]
    if len(nodes) < len(found):
        return None
    u, *rest = simplify(Graph(_gate_params(graph, names), tuple(nodes))).results  # equal coefficients become one node
    return Linear(rest[0], u, rest[1], rest[2]) if rest else Linear(None, u, None, None)


def _gate_params(graph: Graph, inputs: tuple[str, ...]) -> tuple[Node, ...]:
    return tuple(p for p in graph.params if p.attrs["name"] not in inputs)


def _slot(eq: Equations) -> tuple[Node, Node] | None:
    if not eq.slots:
        return ir.const(0.0), ir.const(1.0)
    if len(eq.slots) > 1:
        return None
    graph, names = next(iter(eq.update.values())), _inputs(eq)
    m, w = coefficient(graph, 1, names[1], names), coefficient(graph, 1, "grad", names)
    return None if m is None or w is None else (m, w)


def _step(eq: Equations) -> dict[str, Graph] | None:
    """For each weight the move as a function of the new slot (without slots, of the gradient) and the gates, where it is one."""
    if len(eq.slots) > 1:
        return None
    found = {}
    for name, graph in eq.update.items():
        move, after = graph.results[0], graph.results[1] if eq.slots else graph.param("grad")
        cut = ir.param("slot_after", after.axes)
        new: dict[Node, Node] = {after: cut}
        for node in graph.nodes():
            if node not in new:
                new[node] = ir.lift(node, [new[a] for a in node.args])
        step = Graph((cut, *_gate_params(graph, _inputs(eq))), (new[move],), ("move",))
        if any(n.op is Op.PARAM and n not in step.params for n in step.nodes()):
            return None
        found[name] = step
    return found
