"""Degree and entrywise dependence, and the simplifications that make them visible."""

import math

import pytest
import torch
from torch.testing import assert_close

from memkit.compiler import interpret, ir
from memkit.compiler.autodiff import vjp
from memkit.compiler.degree import degree, is_pointwise, simplify, uniform
from memkit.compiler.ir import Graph, GraphError, Op, const, param, pointwise

P, V, W, X = param("p", ("v",)), param("target", ("v",)), param("W", ("v", "f")), param("x", ("f",))
HALF, ONE, ZERO = const(0.5), const(1.0), const(0.0)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def total(x):
    return ir.reduce(x, x.axes)


def gradient(loss, wrt=P):
    (found,) = vjp([loss], [ONE], [wrt])
    return ZERO if found is None else simplify(Graph((P, V), (found,))).results[0]


def root(n):
    return pointwise("sqrt", total(pointwise("square", n)))


R = ir.sub(P, V)
SIZE = pointwise("abs", R)
# loss -> (degree of its gradient in p, entry by entry)
LOSSES = {
    "inner product": (ir.neg(ir.einsum(P, V, keep=())), 0, True),
    "half squares": (ir.mul(HALF, ir.einsum(R, R, keep=())), 1, True),
    "half squares, other forms": (ir.pointwise("div", total(pointwise("square", R)), const(2.0)), 1, True),
    "powers": (total(pointwise("pow", R, const(2.0))), 1, True),
    "cubes": (total(pointwise("pow", pointwise("abs", R), const(3.0))), math.inf, True),
    "two pieces": (
        total(pointwise("where", pointwise("le", SIZE, ONE), pointwise("square", R), SIZE)),
        math.inf,
        True,
    ),
    "log cosh": (total(pointwise("log", pointwise("cosh", R))), math.inf, True),
    "cosine": (pointwise("div", ir.einsum(P, V, keep=()), root(P)), math.inf, False),
    "weighted squares": (total(ir.mul(V, pointwise("square", R))), 1, True),
    "squares across": (pointwise("square", total(R)), 1, False),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_degree_and_entrywise_of_losses(loss):
    node, expected, alone = LOSSES[loss]
    slope = gradient(node)
    assert degree(slope, P) == expected
    assert is_pointwise(slope, P, "v") is alone


def test_second_derivative_of_half_squares_is_the_number_one():
    slope = gradient(LOSSES["half squares"][0])
    second = gradient_of_vector(slope)
    assert uniform(second) == 1.0
    second = gradient_of_vector(gradient(LOSSES["half squares, other forms"][0]))
    assert uniform(second) == 1.0


def gradient_of_vector(slope):
    (found,) = vjp([slope], [ir.expand(ONE, slope)], [P])
    assert found is not None
    return simplify(Graph((P, V), (found,))).results[0]


DEGREES = {
    "itself": (P, 1),
    "absent": (X, 0),
    "shape only": (ir.expand(X, ir.einsum(W, P, keep=("f", "v"))), 0),
    "affine": (ir.add(ir.mul(const(3.0), P), V), 1),
    "square": (ir.mul(P, P), math.inf),
    "over a number": (pointwise("div", P, const(3.0)), 1),
    "under": (pointwise("div", V, P), math.inf),
    "times another": (ir.einsum(W, P, keep=("f",)), 1),
    "chosen by another": (pointwise("where", V, P, ZERO), 1),
    "chosen by itself": (pointwise("where", P, V, ZERO), math.inf),
    "largest": (ir.reduce(P, ("v",), "max"), math.inf),
    "moved": (ir.shift(ir.gather(P, "v", "f", (1, 0), 2), ZERO, "f"), 1),
    "solved for": (ir.solve(param("L", ("v", "s")), P, "v", "s"), 1),
    "solved with": (ir.solve(ir.mul(param("L", ("v", "s")), P), V, "v", "s"), math.inf),
    "decayed": (ir.decay(P, "v", "s"), math.inf),
}


@pytest.mark.parametrize("case", DEGREES)
def test_degree(case):
    node, expected = DEGREES[case]
    assert degree(node, P) == expected


def test_degree_through_a_loop_is_unknown():
    h, x = param("h", ("v",)), param("x", ("v",))
    ends = ir.scan(Graph((h, x), (ir.add(h, x),)), [P], [param("xs", ("n", "v"))])
    assert degree(ends[0], P) == math.inf
    assert not is_pointwise(ends[0], P, "v")
    assert degree(ends[0], V) == 0


ENTRYWISE = {
    "function": (pointwise("gelu", P), True),
    "renamed": (ir.rename(pointwise("exp", P), {"v": "e"}), True),
    "renamed twice": (ir.add(ir.rename(P, {"v": "e"}), ir.rename(V, {"v": "e"})), True),
    "against itself": (ir.mul(P, ir.rename(P, {"v": "e"})), False),
    "summed": (ir.mul(total(P), V), False),
    "outer": (ir.einsum(P, X, keep=("v", "f")), True),
    "matrix": (ir.einsum(param("M", ("e", "v")), P, keep=("e",)), False),
    "gathered": (ir.gather(P, "v", "f", (1, 0), 2), False),
    "masked": (ir.tril(ir.mul(P, X), "v", "f"), True),
    "shifted along": (ir.shift(P, ZERO, "v"), False),
    "shifted across": (ir.shift(ir.mul(P, X), ZERO, "f"), True),
    "independent": (X, True),
}


@pytest.mark.parametrize("case", ENTRYWISE)
def test_is_pointwise(case):
    node, expected = ENTRYWISE[case]
    assert is_pointwise(node, P, "v") is expected


def test_is_pointwise_needs_the_axis():
    with pytest.raises(GraphError, match="no axis f"):
        is_pointwise(P, P, "f")


# simplify: before -> after, by operation, and always equal in value

A, B, C = param("a", ("t", "k")), param("b", ("k",)), param("c", ("t",))
M = param("m", ("t", "s"))
SIMPLER = {
    "times one": (ir.mul(A, ONE), A),
    "one times": (ir.mul(ONE, A), A),
    "plus zero": (ir.add(ZERO, A), A),
    "minus zero": (ir.sub(A, ZERO), A),
    "zero minus": (ir.sub(ZERO, A), "neg"),
    "minus itself": (ir.sub(A, A), 0.0),
    "times zero": (ir.mul(A, ZERO), 0.0),
    "minus minus": (ir.neg(ir.neg(A)), A),
    "plus minus": (ir.add(A, ir.neg(B)), "sub"),
    "minus minus one": (ir.sub(A, ir.neg(B)), "add"),
    "signs in a product": (ir.mul(ir.neg(A), ir.neg(B)), "mul"),
    "factors": (ir.mul(const(2.0), ir.mul(A, HALF)), A),
    "over one": (pointwise("div", A, ONE), A),
    "power one": (pointwise("pow", A, ONE), A),
    "power two": (pointwise("pow", A, const(2.0)), "square"),
    "constants": (pointwise("exp", ZERO), 1.0),
    "chosen": (pointwise("where", ONE, A, B), A),
    "same choice": (pointwise("where", C, A, A), A),
    "repeated": (ir.mul(ir.expand(B, A), A), "mul"),
    "renames": (ir.rename(ir.rename(A, {"k": "v"}), {"v": "k"}), A),
    "sums": (ir.reduce(ir.reduce(A, ("t",)), ("k",)), Op.REDUCE),
    "product with ones": (ir.einsum(A, ir.expand(ONE, B), keep=("t",)), Op.REDUCE),
    "split of a merge": (ir.split(ir.merge(A, ("t", "k"), "r", 3), "r", ("t", "k"), 3), A),
    "selected from a place": (ir.select(ir.place(B, A, "t", 0), "t", 0), B),
    "masked zero": (ir.tril(ir.expand(ZERO, M), "t", "s"), 0.0),
    "sign out of a product": (ir.einsum(ir.neg(A), B, keep=("t",)), "neg"),
}


@pytest.mark.parametrize("case", SIMPLER)
def test_simplify(case):
    before, expected = SIMPLER[case]
    graph = Graph((A, B, C, M), (before,))
    after = simplify(graph)
    (node,) = after.results
    if isinstance(expected, float):
        assert uniform(node) == expected
    elif isinstance(expected, str):
        assert node.attrs["fn"] == expected
    else:
        assert node is expected or node.op is expected
    inputs = {"a": randn(4, 3), "b": randn(3), "c": randn(4), "m": randn(4, 5)}
    assert set(node.axes) == set(before.axes)
    values = [interpret.Named(interpret.run(g, inputs)[0], g.results[0].axes) for g in (graph, after)]
    assert_close(values[1].to(before.axes), values[0].value)


def test_a_split_that_does_not_undo_the_merge_stays():
    node = ir.split(ir.merge(A, ("t", "k"), "r", 3), "r", ("t", "k"), 2)
    assert simplify(Graph((A,), (node,))).results[0] is node


def test_equal_nodes_become_one():
    twice = ir.add(pointwise("exp", A), pointwise("exp", A))
    assert sum(n.op is Op.POINTWISE for n in simplify(Graph((A,), (twice,))).nodes()) == 2


def test_shapes_are_lent_by_what_lies_deepest():
    busy = pointwise("exp", pointwise("tanh", A))
    (node,) = simplify(Graph((A, B), (ir.expand(B, busy),))).results
    assert node.op is Op.EXPAND and node.args == (B, A)


def test_same_graph_comes_back_when_nothing_changes():
    graph = simplify(Graph((A, B), (ir.einsum(pointwise("exp", A), B, keep=("t",)),)))
    assert simplify(graph) is graph


def test_results_keep_their_layout():
    turned = [ir.mul(A, ONE).replace(axes=("k", "t")), ir.add(pointwise("exp", A), ZERO).replace(axes=("k", "t"))]
    graph = simplify(Graph((A,), tuple(turned)))
    assert [r.axes for r in graph.results] == [("k", "t")] * 2
    assert simplify(graph) is graph
    a = randn(4, 3)
    for got, truth in zip(interpret.run(graph, {"a": a}), (a.T, a.T.exp()), strict=True):
        assert_close(got, truth)


def test_names_and_origins_stay():
    node = ir.add(ir.mul(A, ONE), ir.neg(B), name="sum").replace(where="layer.memory")
    (after,) = simplify(Graph((A, B), (node,))).results
    assert (after.name, after.where, after.attrs["fn"]) == ("sum", "layer.memory", "sub")


def test_loop_bodies_are_simplified():
    h, x = param("h", ("k",)), param("x", ("k",))
    ends = ir.scan(Graph((h, x), (ir.add(ir.mul(h, ONE), x),)), [B], [A], axis="t")
    graph = simplify(Graph((A, B), tuple(ends)))
    (loop,) = (n for n in graph.nodes() if n.op is Op.SCAN)
    assert loop.body is not None and len(loop.body.nodes()) == 3
    inputs = {"a": randn(4, 3), "b": randn(3)}
    assert_close(interpret.run(graph, inputs)[0], inputs["b"] + inputs["a"].sum(0))
