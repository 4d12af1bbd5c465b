"""Every rule of the grammar: one graph that breaks it, and the words it is refused with."""

import pytest

from memkit.compiler import ir
from memkit.compiler.autodiff import vjp
from memkit.compiler.backward import backward
from memkit.compiler.ir import Graph, GraphError, Node, Op, const, param
from memkit.compiler.verify import AXES, OPERANDS, check
from tests.compiler.test_autodiff import STRUCTURE, loop_graph, make, nested_graph

X, Y, W = param("x", ("t", "k")), param("y", ("k",)), param("w", ("v", "k"))
SQUARE, G = param("square", ("t", "s")), param("g", ("t", "j"))


def graph_of(*results, params=(X, Y, W, SQUARE, G), labels=()):
    return Graph(tuple(params), tuple(results), labels)


@pytest.mark.parametrize("case", STRUCTURE)
def test_good_nodes_and_their_gradients_pass(case):
    axes, build = STRUCTURE[case]
    params, _ = make(*axes)
    node = build(*params)
    cot = param("cot", node.axes)
    grads = vjp([node], [cot], params)
    check(Graph((*params, cot), (node, *(g for g in grads if g is not None))), "tensor")


@pytest.mark.parametrize("make_graph", [loop_graph, nested_graph])
def test_good_loops_and_their_gradients_pass(make_graph):
    graph, inputs = make_graph()
    for part in (graph, *backward(graph, list(inputs))):
        check(part, "tensor")


def test_every_operation_has_a_rule():
    assert set(AXES) == set(Op)
    assert set(OPERANDS) | {Op.POINTWISE, Op.SCAN} == set(Op)


def with_attrs(node, **attrs):
    return node.replace(attrs={**node.attrs, **attrs})


def loop(body, start, items, consts=(), **attrs):
    outs = ir.scan(body, start, items, consts, axis="t")
    return ir.get(with_attrs(outs[0].args[0], **attrs), 0, outs[0].axes)


H, XT, C = param("h", ("k",)), param("xt", ("k",)), param("c", ())
STEP = Graph((H, XT), (ir.add(H, XT), ir.mul(H, XT)))
WRONG_CARRY = Graph((H, XT), (ir.reduce(ir.add(H, XT), ("k",)),))
OPEN = Graph((H, XT), (ir.mul(ir.add(H, XT), C),))
SCALED = Graph((H, XT, C), (ir.mul(H, C),))
LOOP = ir.scan(STEP, [Y], [X], axis="t")[0].args[0]
PARTS = ir.windows(X, "t", "u", "j", 2)
BAD_NODE_IN_BODY = Graph((H, XT), (ir.add(H, XT).replace(axes=("v",)),))

BAD = {
    "axes that do not follow": (ir.add(X, Y).replace(axes=("t",)), r"says axes \['t'\], computed \['k', 't'\]"),
    "axes that repeat": (ir.add(X, Y).replace(axes=("t", "k", "k")), "repeat"),
    "too few operands": (ir.einsum(X, Y).replace(args=(X,)), "1 operands, expected 2"),
    "an unknown function": (with_attrs(ir.neg(X), fn="cube"), "no function 'cube'"),
    "too many operands of a function": (ir.neg(X).replace(args=(X, Y)), "neg with 2 operands"),
    "a product that keeps too much": (ir.einsum(X, Y).replace(axes=("v",)), r"keeps axes \['v'\]"),
    "an unknown reduction": (with_attrs(ir.reduce(X, ("k",)), fn="mean"), "no reduction 'mean'"),
    "a reduction over nothing": (with_attrs(ir.reduce(X, ("k",)), over=()), "reduces over nothing"),
    "a reduction over another axis": (with_attrs(ir.reduce(X, ("k",)), over=("v",)), "has no axis v"),
    "a rename of nothing": (with_attrs(ir.rename(X, {"k": "v"}), names={"z": "v"}), "has no axis z"),
    "a rename that joins": (with_attrs(ir.rename(X, {"k": "v"}), names={"k": "t"}), "renames"),
    "an index outside": (with_attrs(ir.gather(Y, "k", "f", (0, 1), 3), index=(0, 3)), r"outside 0\.\.2"),
    "a scatter outside": (with_attrs(ir.scatter(Y, "k", "f", (0, 1), 3), size=1), r"outside 0\.\.0"),
    "a gather onto an axis": (with_attrs(ir.gather(X, "k", "f", (0,), 3), new="t"), "already has axis t"),
    "a decay along nothing": (with_attrs(ir.decay(X, "t", "s"), axis="u"), "has no axis u"),
    "a decay onto an axis": (with_attrs(ir.decay(X, "t", "s"), new="k"), "already has axis k"),
    "a band without slots": (with_attrs(ir.band(G, "t", "j", "s", 2), slot="k"), "has no axis k"),
    "a band without size": (with_attrs(ir.band(G, "t", "j", "s", 2), size=0), "size 0"),
    "a band of another axis": (with_attrs(ir.unband(SQUARE, "t", "j", "s", 2), axis="u"), "has no axis u"),
    "a triangle of a vector": (with_attrs(ir.tril(SQUARE, "t", "s"), cols="u"), "has no axis u"),
    "a triangle on one axis": (with_attrs(ir.tril(SQUARE, "t", "s"), cols="t"), "one axis"),
    "a shift by two": (with_attrs(ir.shift(X, Y, "t"), by=2), "shifts by 2"),
    "a shift whose fill has the axis": (ir.shift(X, Y, "t").replace(args=(X, X)), "already has axis t"),
    "windows without step": (with_attrs(ir.windows(X, "t", "u", "j", 2), step=0), "size 0"),
    "a fold like something else": (ir.fold(PARTS, Y, PARTS.attrs).replace(axes=("t", "k")), "has no axis t"),
    "a merge of one": (with_attrs(ir.merge(X, ("t", "k"), "r", 3), axes=("t", "t")), "expected two axes"),
    "a split into one": (with_attrs(ir.split(X, "t", ("u", "j"), 2), new=("u", "u")), "expected two axes"),
    "a selection in the middle": (with_attrs(ir.select(X, "t", 0), index=1), "expected 0 or -1"),
    "a place in the middle": (with_attrs(ir.place(Y, X, "t", 0), index=1), "expected 0 or -1"),
    "a place on its own axis": (with_attrs(ir.place(Y, X, "t", 0), axis="k"), "already has axis k"),
    "a solve without rows": (with_attrs(ir.solve(SQUARE, X, "t", "s"), rows="s", cols="t"), "has no axis s"),
    "a solve on one axis": (with_attrs(ir.solve(SQUARE, X, "t", "s"), cols="t"), "one axis"),
    "a masked product that leaks": (ir.masked_product(X, W, SQUARE, W, ("k",), "s"), "has no axis s"),
    "a missing attribute": (ir.neg(X).replace(attrs={}), "attribute 'fn' is missing"),
    "a constant that is no float": (const(1.0).replace(attrs={"value": "one"}), "no float"),
    "an array of another rank": (ir.tensor((1.0, 2.0), ("k", "v")), "nested 1 deep"),
    "a parameter that is not listed": (ir.neg(param("other", ())), "not among the graph's parameters"),
    "symmetric in an axis that is not there": (ir.symmetric(ir.add(X, X), "t", "v"), r"symmetric in \('t', 'v'\)"),
    "symmetric in one axis": (ir.symmetric(ir.add(X, X), "t", "t"), "no two axes"),
    "a body on a plain node": (ir.neg(X).replace(body=STEP), "has a body"),
    "a loop without a body": (Node(Op.GET, (Node(Op.SCAN),), (), {"index": 0}), "without a body"),
    "a loop with too few operands": (ir.get(LOOP.replace(args=(Y,)), 0, ("k",)), "1 operands for 2"),
    "a loop without slices": (loop(STEP, [Y], [X], slices=0), "needs a slice"),
    "a loop with too many carries": (loop(STEP, [Y], [X], carries=2), "do not fit"),
    "a slice without the axis": (loop(STEP, [Y], [X], axis="u"), "has no axis u"),
    "a carry of other axes": (loop(STEP, [C], [X]), r"carry 'h' has axes \['k'\], is given \[\]"),
    "a constant of other axes": (loop(SCALED, [Y], [X], [Y]), r"constant 'c' has axes \[\]"),
    "a carry that changes": (loop(WRONG_CARRY, [Y], [X]).replace(axes=()), r"its next value \[\]"),
    "a body that looks outside": (loop(OPEN, [Y], [X]), "in the body of .*not among"),
    "a bad node in a body": (loop(BAD_NODE_IN_BODY, [Y], [X]), r"in the body of|next value"),
    "a pick too far": (ir.get(LOOP, 2, ("k",)), "picks result 2 of 2"),
    "a pick with other axes": (ir.get(LOOP, 1, ("k",)), r"computed \['k', 't'\]"),
    "a pick from no loop": (ir.get(X, 0, ("t", "k")), "no SCAN"),
    "a loop used directly": (ir.neg(LOOP), "picked by GET"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_nodes_are_refused(case):
    node, message = BAD[case]
    params = (X, Y, W, SQUARE, G, C)
    with pytest.raises(GraphError, match=message):
        check(Graph(params, (node,)), "tensor")


def test_the_origin_is_named():
    node = ir.add(X, Y, name="total").replace(axes=("t",), where="layer.memory")
    with pytest.raises(GraphError, match=r"<pointwise total\[t\]> at layer\.memory: says axes"):
        check(graph_of(node), "tensor")


def test_interfaces():
    with pytest.raises(GraphError, match=r"share a name: \['x'\]"):
        check(graph_of(X, params=(X, param("x", ()))), "tensor")
    with pytest.raises(GraphError, match="listed as a parameter"):
        check(graph_of(X, params=(X, const(1.0))), "tensor")
    with pytest.raises(GraphError, match="1 labels for 2 results"):
        check(graph_of(X, Y, labels=("a",)), "tensor")
    with pytest.raises(GraphError, match="share a label"):
        check(graph_of(X, Y, labels=("a", "a")), "tensor")
    with pytest.raises(GraphError, match="is a result"):
        check(graph_of(LOOP), "tensor")


def test_vocabularies():
    check(graph_of(ir.pointwise("gelu", ir.einsum(W, Y, keep=("v",)))), "memory")
    with pytest.raises(GraphError, match="tril is not in vocabulary 'memory'"):
        check(graph_of(ir.tril(SQUARE, "t", "s")), "memory")
    with pytest.raises(GraphError, match="no vocabulary 'loops'"):
        check(graph_of(X), "loops")


def test_kernel_vocabulary():
    a, b = param("a", ("g", "t", "k")), param("b", ("g", "s", "k"))
    check(graph_of(ir.einsum(a, b, over=("k",)), params=(a, b)), "kernel")
    wide = param("wide", ("g", "t", "j", "k"))
    with pytest.raises(GraphError, match="brings 3 axes"):
        check(graph_of(ir.einsum(wide, b, over=("k",)), params=(wide, b)), "kernel")
    with pytest.raises(GraphError, match="gather is not in vocabulary 'kernel'"):
        check(graph_of(ir.gather(Y, "k", "f", (0,), 3)), "kernel")
    with pytest.raises(GraphError, match="a SCAN inside a SCAN"):
        check(nested_graph()[0], "kernel")
    check(loop_graph()[0], "kernel")
