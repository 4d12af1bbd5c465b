"""Every pass: the graph's text before and after, the interpreter before and after, the same object where there is nothing to do."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memkit.compiler import ir
from memkit.compiler.backward import backward
from memkit.compiler.interpret import run
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes.absorb import absorb
from memkit.compiler.passes.dedupe import dedupe
from memkit.compiler.passes.fold import fold
from memkit.compiler.passes.fuse import fuse
from memkit.compiler.passes.gram import gram
from memkit.compiler.passes.hoist import hoist, settle
from memkit.compiler.passes.kernel_trick import kernel_trick
from memkit.compiler.passes.lodge import lodge
from memkit.compiler.passes.prune import prune
from memkit.compiler.passes.sink import sink
from memkit.compiler.show import show
from memkit.compiler.verify import check

from .random_graphs import inputs, random_graph

SIZES = {"n": 3, "g": 2, "t": 4, "s": 4, "u": 4, "j": 1, "k": 5, "f": 5, "v": 3, "w": 3}


def wide_gram(graph: Graph) -> Graph:
    return gram(graph, SIZES)


wide_gram.__doc__ = gram.__doc__
Pass = Callable[[Graph], Graph]
PASSES: tuple[Pass, ...] = (fold, dedupe, prune, hoist, sink, fuse, lodge, absorb, wide_gram, settle)


def by_name(graph: Graph, values: dict[str, Tensor]) -> list[Tensor]:
    """The results with their axes in alphabetical order: the order of axes is layout, passes may change it."""
    pairs = zip(graph.results, run(graph, values), strict=True)
    return [x.permute([node.axes.index(a) for a in sorted(node.axes)]) for node, x in pairs]


def same(before: Graph, after: Graph, sizes: dict[str, int] = SIZES) -> None:
    check(after, "tensor")
    assert [r.axes for r in after.results] == [r.axes for r in before.results]
    values = inputs(before, sizes)
    for a, b in zip(by_name(before, values), by_name(after, values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)


def golden(change: Pass, before: Graph, expected: str) -> Graph:
    after = change(before)
    assert show(after) == textwrap.dedent(expected).lstrip("\n")
    same(before, after)
    assert change(after) is after
    return after


@pytest.mark.parametrize("seed", range(30))
def test_passes_keep_random_graphs(seed: int) -> None:
    graph, sizes = random_graph(seed, steps=10)
    values = inputs(graph, sizes)
    forward, back = backward(graph, list(values), (lambda level: {n for n in level.nodes() if n.op is Op.EINSUM}) if seed % 2 else None)
    found = dict(zip(forward.labels, run(forward, values), strict=True))
    known = {**values, **found, **{f"grad_{label}": torch.randn_like(found[label]) for label in graph.labels}}
    for now, given in ((graph, values), (back, {p.attrs["name"]: known[p.attrs["name"]] for p in back.params})):
        expected, layout = by_name(now, given), [r.axes for r in now.results]
        for change in (*PASSES, *PASSES):
            now = change(now)
            check(now, "tensor")
            assert [r.axes for r in now.results] == layout, change.__name__
            assert change(now) is now, change.__name__
        for a, b in zip(expected, by_name(now, given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("change", PASSES)
def test_same_object_if_nothing_to_do(change: Pass) -> None:
    x, y = ir.param("x", ("g", "t")), ir.param("y", ("g",))
    graph = Graph((x, y), (ir.add(x, y),))
    assert change(graph) is graph


@pytest.mark.parametrize("change", PASSES)
def test_docstrings_say_what_is_rewritten_and_kept(change: Pass) -> None:
    assert "rewrite:" in (change.__doc__ or "") and "keeps:" in (change.__doc__ or "")


# ---- loops


def loop(new: Callable[..., Node], out: Callable[..., Node]) -> Graph:
    """W [g,v,k] -> new(W, x, c), y = out(W, x, c) over chunks x [n,g,t,k], with a constant c [g,k]."""
    w, x, c = ir.param("W", ("g", "v", "k")), ir.param("x", ("g", "t", "k")), ir.param("c", ("g", "k"))
    outer = [ir.param("W", w.axes), ir.param("x", ("n", *x.axes)), ir.param("c", c.axes)]
    outs = ir.scan(Graph((w, x, c), (new(w, x, c), out(w, x, c))), [outer[0]], [outer[1]], [outer[2]])
    return Graph(tuple(outer), tuple(outs[:2]))


def total(x: Node) -> Node:
    return ir.reduce(x, ("t",))


def test_prune_drops_what_nobody_reads() -> None:
    graph = loop(lambda w, x, c: ir.add(w, total(x)), lambda w, x, c: ir.mul(x, c, name="y"))
    golden(
        prune,
        Graph(graph.params, graph.results[:1]),
        """
        %0 : [g,v,k] = param(name=W)
        %1 : [n,g,t,k] = param(name=x)
        %2 : [g,k] = param(name=c)
        %3 = scan over n (%0; %1; )
            %0 : [g,v,k] = param(name=W)
            %1 : [g,t,k] = param(name=x)
            %2 : [g,k] = sum(%1, over=(t))
            %3 : [g,v,k] = add(%0, %2)
            return %3
        %4 : [g,v,k] = get(%3, index=0)
        return %4
        """,
    )


def test_prune_makes_fixed_carries_constants() -> None:
    graph = loop(lambda w, x, c: w, lambda w, x, c: ir.einsum(x, w, over=("k",), name="y"))
    after = prune(graph)
    same(graph, after)
    (scan,) = (n for n in after.nodes() if n.op is Op.SCAN)
    assert scan.attrs["carries"] == 0 and after.results[0] is after.params[0]


def test_prune_merges_equal_inputs() -> None:
    a, b, w = ir.param("a", ("g",)), ir.param("b", ("g",)), ir.param("w", ("g",))
    x, start = ir.param("x", ("n", "g")), ir.param("w", ("g",))
    graph = Graph((x, start), (ir.scan(Graph((w, a, b), (ir.add(w, ir.mul(a, b)),)), [start], [x, x])[0],))
    after = prune(graph)
    same(graph, after)
    (scan,) = (n for n in after.nodes() if n.op is Op.SCAN)
    assert len(scan.args) == 2


def test_hoist_moves_work_without_carries_out() -> None:
    def new(w: Node, x: Node, c: Node) -> Node:
        return ir.add(w, total(ir.pointwise("exp", ir.mul(x, ir.pointwise("tanh", c)), name="f")), name="W")

    graph = loop(new, lambda w, x, c: ir.neg(x, name="y"))
    golden(
        hoist,
        graph,
        """
        %0 : [g,v,k] = param(name=W)
        %1 : [n,g,t,k] = param(name=x)
        %2 : [g,k] = param(name=c)
        %3 : [g,k] = tanh(%2)
        %4 : [n,g,t,k] = mul(%1, %3)
        %5 f : [n,g,t,k] = exp(%4)
        %6 : [n,g,k] = sum(%5, over=(t))
        %7 = scan over n (%0; %6; )
            %0 : [g,v,k] = param(name=W)
            %1 : [g,k] = param(name=x0)
            %2 W : [g,v,k] = add(%0, %1)
            return %2
        %8 W : [g,v,k] = get(%7, index=0)
        %9 y : [n,g,t,k] = neg(%1)
        return %8, %9
        """,
    )


def test_settle_moves_what_no_iteration_changes() -> None:
    """Of the values without a carry, that of the constant leaves the loop, those of the slice stay."""

    def new(w: Node, x: Node, c: Node) -> Node:
        return ir.add(w, total(ir.mul(ir.pointwise("exp", x, name="f"), ir.pointwise("tanh", c, name="still"))), name="W")

    golden(
        settle,
        loop(new, lambda w, x, c: ir.neg(x, name="y")),
        """
        %0 : [g,v,k] = param(name=W)
        %1 : [n,g,t,k] = param(name=x)
        %2 : [g,k] = param(name=c)
        %3 still : [g,k] = tanh(%2)
        %4 = scan over n (%0; %1; %3)
            %0 : [g,v,k] = param(name=W)
            %1 : [g,t,k] = param(name=x)
            %2 : [g,k] = param(name=still)
            %3 f : [g,t,k] = exp(%1)
            %4 : [g,t,k] = mul(%3, %2)
            %5 : [g,k] = sum(%4, over=(t))
            %6 W : [g,v,k] = add(%0, %5)
            %7 y : [g,t,k] = neg(%1)
            return %6, %7
        %5 W : [g,v,k] = get(%4, index=0)
        %6 y : [n,g,t,k] = get(%4, index=1)
        return %5, %6
        """,
    )


def test_hoist_keeps_matrices_a_token_inside() -> None:
    x = ir.param("x", ("t", "v", "k"))
    w, part = ir.param("w", ("v", "k")), ir.param("x", ("v", "k"))
    graph = Graph((x, w), (ir.scan(Graph((w, part), (ir.add(w, ir.pointwise("exp", part)),)), [w], [x], axis="t")[0],))
    assert hoist(graph) is graph


def test_lodge_makes_matrices_where_they_are_read() -> None:
    w, g = ir.param("W", ("g", "v", "k")), ir.param("G", ("g", "v", "k"))
    d, x = ir.param("d", ("n", "g", "t", "v")), ir.param("x", ("n", "g", "t", "k"))
    outer = ir.einsum(d, x, over=("t",), name="G")
    graph = Graph((w, d, x), (ir.scan(Graph((w, g), (ir.add(w, g, name="W"),)), [w], [outer])[0],))
    golden(
        lodge,
        graph,
        """
        %0 : [g,v,k] = param(name=W)
        %1 : [n,g,t,v] = param(name=d)
        %2 : [n,g,t,k] = param(name=x)
        %3 = scan over n (%0; %1, %2; )
            %0 : [g,v,k] = param(name=W)
            %1 : [g,t,v] = param(name=d)
            %2 : [g,t,k] = param(name=x)
            %3 G : [g,v,k] = einsum(%1, %2)
            %4 W : [g,v,k] = add(%0, %3)
            return %4
        %4 W : [g,v,k] = get(%3, index=0)
        return %4
        """,
    )


def test_sink_moves_outputs_behind_the_loop() -> None:
    def signal(w: Node, x: Node) -> Node:
        return ir.pointwise("tanh", ir.einsum(x, w, over=("k",)), name="d")

    graph = loop(
        lambda w, x, c: ir.sub(w, ir.einsum(signal(w, x), x, over=("t",)), name="W"),
        lambda w, x, c: ir.mul(ir.einsum(ir.mul(x, c), w, over=("k",)), signal(w, x), name="y"),
    )
    golden(
        sink,
        dedupe(graph),
        """
        %0 : [g,v,k] = param(name=W)
        %1 : [n,g,t,k] = param(name=x)
        %2 : [g,k] = param(name=c)
        %3 = scan over n save (%0; %1; )
            %0 : [g,v,k] = param(name=W)
            %1 : [g,t,k] = param(name=x)
            %2 : [g,t,v] = einsum(%1, %0)
            %3 d : [g,t,v] = tanh(%2)
            %4 : [g,v,k] = einsum(%3, %1)
            %5 W : [g,v,k] = sub(%0, %4)
            return %5, %3
        %4 W : [g,v,k] = get(%3, index=0)
        %5 : [n,g,t,k] = mul(%1, %2)
        %6 W : [n,g,v,k] = get(%3, index=2)
        %7 : [n,g,t,v] = einsum(%5, %6)
        %8 d : [n,g,t,v] = get(%3, index=1)
        %9 y : [n,g,t,v] = mul(%7, %8)
        return %4, %9
        """,
    )


def test_sink_leaves_token_loops_alone() -> None:
    w, x = ir.param("w", ("v", "k")), ir.param("x", ("k",))
    start, xs = ir.param("w", ("v", "k")), ir.param("x", ("t", "k"))
    outs = ir.scan(Graph((w, x), (ir.add(w, x), ir.einsum(w, x, over=("k",)))), [start], [xs], axis="t")
    graph = Graph((start, xs), tuple(outs))
    assert sink(graph) is graph


def test_nested_loops() -> None:
    w, x, c = ir.param("w", ("g", "k")), ir.param("x", ("g", "t", "k")), ir.param("c", ("g",))
    iw, ix, ic = ir.param("w", ("g", "k")), ir.param("x", ("g", "k")), ir.param("c", ("g",))
    inner = Graph((iw, ix, ic), (ir.add(iw, ir.mul(ix, ir.pointwise("exp", ic))), ir.mul(iw, ix)))
    deep = ir.scan(inner, [w], [x], [c], axis="t")
    outer = (ir.param("w", w.axes), ir.param("x", ("n", *x.axes)), ir.param("c", c.axes))
    outs = ir.scan(Graph((w, x, c), tuple(deep)), [outer[0]], [outer[1]], [outer[2]])
    graph = Graph(outer, (outs[0],))
    after = hoist(prune(graph))
    same(graph, after)
    assert any(n.attrs.get("fn") == "exp" for n in after.nodes())
    assert sum(len(n.body.results) for n in after.nodes() if n.body) == 1


# ---- products


def scores(sign: Callable[[Node], Node], swap: bool, twist: bool) -> Graph:
    q, k = ir.param("q", ("g", "t", "k")), ir.param("k", ("g", "s", "k"))
    c, v = ir.param("c", ("g", "t", "s")), ir.param("v", ("g", "s", "v"))
    product = ir.einsum(*((k, q) if twist else (q, k)), over=("k",))
    weighed = ir.mul(c, sign(product)) if swap else ir.mul(sign(product), c)
    return Graph((q, k, c, v), (ir.einsum(*((v, weighed) if twist else (weighed, v)), over=("s",), name="y"),))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("twist", [False, True])
@pytest.mark.parametrize("sign", [lambda x: x, ir.neg, lambda x: ir.mul(ir.const(0.5), x)])
def test_fuse_finds_masked_products(sign: Callable[[Node], Node], swap: bool, twist: bool) -> None:
    graph = scores(sign, swap, twist)
    after = fuse(graph)
    same(graph, after)
    assert [n.op for n in after.nodes() if n.op in (Op.EINSUM, Op.MASKED_PRODUCT)] == [Op.MASKED_PRODUCT]
    assert after.results[0].name == "y" and after.results[0].axes == graph.results[0].axes


def test_fuse_text() -> None:
    golden(
        fuse,
        scores(ir.neg, False, False),
        """
        %0 : [g,t,k] = param(name=q)
        %1 : [g,s,k] = param(name=k)
        %2 : [g,t,s] = param(name=c)
        %3 : [g,s,v] = param(name=v)
        %4 : [g,t,v] = masked_product(%0, %1, %2, %3, contract=(k), cols=s)
        %5 y : [g,t,v] = neg(%4)
        return %5
        """,
    )


def test_fuse_leaves_shared_scores_and_weights_alone() -> None:
    graph = scores(lambda x: x, False, False)
    weighed = graph.results[0].args[0]
    shared = Graph(graph.params, (*graph.results, weighed))
    assert fuse(shared) is shared
    w, d = ir.param("w", ("g", "v", "k")), ir.param("d", ("g", "s", "v"))
    c, z = ir.param("c", ("g", "s", "k")), ir.param("z", ("g", "s", "f"))
    update = Graph((w, d, c, z), (ir.einsum(ir.mul(ir.einsum(d, w, over=("v",)), c), z, over=("s",)),))
    assert fuse(update) is update


# ---- kernels


def monomials(width: int) -> tuple[Graph, Graph]:
    """The squares and mixed products of a token's entries with a learned factor; and their kernel, factor^2 (a.b)^2."""
    x, factor = ir.param("x", ("k",)), ir.param("factor", ("p",))
    pairs = [(i, j) for i in range(width) for j in range(i, width)]
    weights = ir.tensor(tuple(1.0 if i == j else 2.0**0.5 for i, j in pairs), ("f",))
    first, second = (ir.gather(x, "k", "f", [p[i] for p in pairs], width) for i in (0, 1))
    phi = ir.mul(ir.mul(ir.mul(first, second), weights), ir.select(factor, "p", 0))
    a, b = ir.param("a", ("k",)), ir.param("b", ("k2",))
    square = ir.pointwise("square", ir.einsum(a, ir.rename(b, {"k2": "k"}), over=("k",)))
    kernel = ir.mul(square, ir.pointwise("square", ir.select(factor, "p", 0)))
    return Graph((x, factor), (phi,)), Graph((a, b, factor), (kernel,))


@pytest.mark.parametrize("window", [0, 2])
def test_kernel_trick(window: int) -> None:
    features, kernel = monomials(3)
    q, k, v = ir.param("q", ("g", "t", "k")), ir.param("k", ("g", "s", "k")), ir.param("v", ("g", "t", "v"))
    factor = ir.param("factor", ("g", "p"))
    fq, fk = (ir.inline(features, {"x": x, "factor": factor})[0] for x in (q, k))
    keys = ir.merge(ir.windows(fk, "s", "t", "j", window), ("t", "j"), "r", window) if window else ir.rename(fk, {"s": "r"})
    graph = Graph((q, k, v, factor), (ir.einsum(fq, keys, over=("f",), name="scores"), ir.einsum(fq, v, over=("t",))))
    after = kernel_trick(graph, features, kernel)
    same(graph, after, {"g": 2, "t": 4, "s": 4 + max(window, 1) - 1, "k": 3, "v": 2, "p": 1})
    assert not any("f" in n.axes for n in Graph((), after.results[:1]).nodes() if n.op is not Op.TENSOR)
    assert after.results[1] is graph.results[1] and after.results[0].name == "scores"
    assert kernel_trick(after, features, kernel) is after


def test_kernel_trick_leaves_other_products_alone() -> None:
    features, kernel = monomials(3)
    q, w, factor = ir.param("q", ("g", "t", "k")), ir.param("W", ("g", "v", "f")), ir.param("factor", ("g", "p"))
    (phi,) = ir.inline(features, {"x": q, "factor": factor})
    other = ir.inline(features, {"x": q, "factor": ir.param("other", ("g", "p"))})[0]
    graph = Graph((q, w, factor, ir.param("other", ("g", "p"))), (ir.einsum(phi, w, over=("f",)),))
    assert kernel_trick(graph, features, kernel) is graph
    mixed = Graph((q, factor, other.args[1].args[0]), (ir.einsum(phi, ir.rename(other, {"t": "s"}), over=("f",)),))
    assert kernel_trick(mixed, features, kernel) is mixed


# ---- algebra


def test_dedupe_ignores_the_order_of_operands_and_axes() -> None:
    a, b = ir.param("a", ("g", "t", "k")), ir.param("b", ("g", "s", "k"))
    one, two = ir.einsum(a, b, over=("k",)), ir.einsum(b, a, keep=("s", "g", "t"))
    graph = Graph((a, b), (ir.add(ir.pointwise("exp", one), ir.pointwise("sin", two)),))
    after = dedupe(graph)
    same(graph, after)
    assert sum(n.op is Op.EINSUM for n in after.nodes()) == 1


def test_dedupe_keeps_the_layout_of_results() -> None:
    a, b = ir.param("a", ("g", "t")), ir.param("b", ("g", "t"))
    graph = Graph((a, b), (ir.add(a, b), ir.add(b, a).replace(axes=("t", "g"))))
    after = dedupe(graph)
    assert [r.axes for r in after.results] == [("g", "t"), ("t", "g")]
    same(graph, after)


def test_fold_adds_multiples() -> None:
    a, b = ir.param("a", ("g", "k")), ir.param("b", ("g", "k"))
    half = ir.mul(ir.const(0.5), ir.sub(a, b))
    assert show(fold(Graph((a, b), (ir.add(half, half),)))) == show(Graph((a, b), (ir.sub(a, b),)))
    assert fold(Graph((a,), (ir.sub(ir.neg(a), ir.neg(a)),))).results[0].op is not Op.POINTWISE


def test_fold_moves_numbers_out_of_products() -> None:
    a, b = ir.param("a", ("g", "t", "k")), ir.param("b", ("g", "s", "k"))
    graph = Graph((a, b), (ir.einsum(ir.mul(ir.const(2.0), a), ir.neg(ir.mul(ir.const(3.0), b)), over=("k",)),))
    golden(
        fold,
        graph,
        """
        %0 : [g,t,k] = param(name=a)
        %1 : [g,s,k] = param(name=b)
        %2 : [g,t,s] = einsum(%0, %1)
        %3 : [g,t,s] = mul(-6, %2)
        return %3
        """,
    )


def test_absorb_makes_one_product() -> None:
    """Newton-Schulz: a x + m x."""
    x, m = ir.param("x", ("g", "v", "k")), ir.param("m", ("g", "v", "w"))
    graph = Graph((x, m), (ir.add(ir.mul(ir.const(3.0), x), ir.einsum(m, ir.rename(x, {"v": "w"}), over=("w",))),))
    golden(
        absorb,
        graph,
        """
        %0 : [g,v,k] = param(name=x)
        %1 : [g,v,w] = param(name=m)
        %2 : [v,w] = select(%1, axis=g, index=0)
        %3 : [v] = select(%2, axis=w, index=0)
        %4 : [v] = expand(0, %3)
        %5 I : [v,w] = decay(%4, axis=v, new=w)
        %6 : [v,w] = mul(3, %5)
        %7 : [g,v,w] = add(%1, %6)
        %8 x : [g,w,k] = rename(%0, v->w)
        %9 : [g,v,k] = einsum(%7, %8)
        return %9
        """,
    )


@pytest.mark.parametrize("other", ["another value", "another axis", "read twice", "no number"])
def test_absorb_leaves_other_sums_alone(other: str) -> None:
    x, m, y = ir.param("x", ("g", "v", "w")), ir.param("m", ("g", "v", "u")), ir.param("y", ("g", "v", "w"))
    product = ir.einsum(m, ir.rename(x, {"v": "u"}), over=("u",))
    if other == "another axis":  # m x^T
        product = ir.einsum(m, ir.rename(x, {"v": "w", "w": "u"}), over=("u",))
    multiple = ir.mul(y if other == "no number" else ir.const(2.0), y if other == "another value" else x)
    results = (ir.add(multiple, product), *([product] if other == "read twice" else []))
    graph = Graph((x, m, y), results)
    assert absorb(graph) is graph


def times_square(x: Node, i: int, factor: float = 2.0, row: str = "v") -> Node:
    """(factor x x^T) x, of x [g,v,k]."""
    other = ir.rename(x, {row: f"w{i}"})
    return ir.einsum(ir.mul(ir.einsum(x, other, over=("k",)), ir.const(factor)), other, over=(f"w{i}",))


def test_gram_multiplies_squares() -> None:
    x = ir.param("x", ("g", "v", "k"))
    golden(
        wide_gram,
        Graph((x,), (times_square(times_square(x, 1), 2, 3.0),)),
        """
        %0 : [g,v,k] = param(name=x)
        %1 x : [g,w1,k] = rename(%0, v->w1)
        %2 : [g,v,w1] = einsum(%0, %1)
        %3 : [g,v,w1] = mul(%2, 2)
        %4 : [g,v,v2] = rename(%3, w1->v2)
        %5 : [g,v2,v3] = rename(%3, v->v2 w1->v3)
        %6 : [g,v,v3] = einsum(%4, %5)
        %7 : [g,v3,w2] = rename(%2, v->v3 w1->w2)
        %8 : [g,v,w2] = einsum(%6, %7)
        %9 : [g,v,w2] = mul(%8, 3)
        %10 : [g,v,w22] = rename(%9, w2->w22)
        %11 : [g,w22,w1] = rename(%3, v->w22)
        %12 : [g,v,w1] = einsum(%10, %11)
        %13 : [g,v,k] = einsum(%12, %1)
        return %13
        """,
    )


def test_gram_starts_anew() -> None:
    """After two factors x x^T is made of x again: of five iterations, three are."""
    x = start = ir.param("x", ("g", "v", "k"))
    for i in range(5):
        x = times_square(x, i, 0.1)
    graph = Graph((start,), (x,))
    after = wide_gram(graph)
    same(graph, after)
    wide = [n for n in after.nodes() if n.op is Op.EINSUM and "k" in n.args[1].axes]
    assert len(wide) == 2 * 3 and sum("k" in n.axes for n in wide) == 3
    assert wide_gram(after) is after


def unlike(case: str) -> Graph:
    """What looks like two factors times a wide matrix."""
    x, y = ir.param("x", ("g", "v", "k")), ir.param("y", ("g", "v", "k"))
    once = times_square(x, 1)
    other, narrow = ir.rename(once, {"v": "w"}), ir.einsum(x, ir.rename(x, {"k": "f"}), over=("v",))
    steep = ir.einsum(cube(x), ir.rename(x, {"v": "w"}), over=("w",))
    result = {
        "not wide": lambda: ir.einsum(narrow, ir.einsum(narrow, x, over=("k",)), over=("f",)),
        "a square of another value": lambda: ir.einsum(ir.einsum(y, ir.rename(y, {"v": "w"}), over=("k",)), other, over=("w",)),
        "over rows": lambda: ir.einsum(once, ir.rename(once, {"k": "f"}), over=("v",)),
        "another matrix": lambda: ir.einsum(once, ir.rename(y, {"v": "w"}), over=("k",)),
        "too steep": lambda: ir.einsum(steep, ir.rename(steep, {"v": "u"}), over=("k",)),
    }[case]()
    return Graph((x, y), (result,))


def cube(x: Node) -> Node:
    """(x x^T)^3, of axes v and w."""
    a = ir.einsum(x, ir.rename(x, {"v": "w"}), over=("k",))
    for _ in range(2):
        a = ir.rename(ir.einsum(a, ir.rename(a, {"v": "w", "w": "u"}), over=("w",)), {"u": "w"})
    return a


@pytest.mark.parametrize("case", ["not wide", "a square of another value", "over rows", "another matrix", "too steep"])
def test_gram_leaves_other_products_alone(case: str) -> None:
    graph = unlike(case)
    assert wide_gram(graph) is graph


def test_fold_knows_windows_of_one_slot() -> None:
    x = ir.param("x", ("g", "t"))
    taken = ir.windows(x, "t", "t", "j", 1)
    graph = Graph((x,), (ir.fold(ir.pointwise("exp", taken), x, taken.attrs),))
    after = fold(graph)
    same(graph, after)
    assert not {Op.WINDOWS, Op.FOLD} & {n.op for n in after.nodes()}


def test_fold_knows_decays_of_constants() -> None:
    x = ir.param("x", ("n", "g", "t"))
    for value in (1.0, 0.5, 0.0):
        graph = Graph((x,), (ir.mul(x, ir.decay(ir.expand(ir.const(value), x), "t", "s")),))
        after = fold(graph)
        same(graph, after)
        assert all(n.axes == ("t", "s") for n in after.nodes() if n.op is Op.DECAY)


def test_fold_keeps_all_axes_of_a_constant_decay() -> None:
    """What decays may be stretched along an axis that the last stretch does not name."""
    y, z = ir.param("y", ("t", "k")), ir.param("z", ("t", "v"))
    graph = Graph((y, z), (ir.decay(ir.expand(ir.expand(ir.const(0.5), y), z), "t", "u"),))
    same(graph, fold(graph))
