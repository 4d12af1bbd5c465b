"""The pass `regroup`: Newton-Schulz on its small side; and which of its products are known to be symmetric."""

from __future__ import annotations

import textwrap

import pytest
import torch

from memkit.compiler import ir
from memkit.compiler.autodiff import vjp
from memkit.compiler.cost import count
from memkit.compiler.interpret import run
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.native.symmetric import is_symmetric
from memkit.compiler.passes import dedupe, fold
from memkit.compiler.passes.regroup import regroup
from memkit.compiler.show import show
from memkit.compiler.verify import check

SIZES = {"g": 2, "v": 3, "e": 7}
A, B, C = 3.4445, -4.775, 2.0315  # Muon's numbers


def square(x: Node) -> Node:
    return ir.einsum(x, ir.rename(x, {"v": "w"}), over=("e",))


def iterated(steps: int, cubic: bool = False, square_term: bool = True) -> Graph:
    """x <- A x + (B s + C s s) x with s = x x^T, or x <- 1.5 x - 0.5 s x."""
    x = start = ir.param("x", ("g", "v", "e"))
    for _ in range(steps):
        s = square(x)
        m = ir.mul(s, ir.const(0.5 if cubic else B))
        if square_term and not cubic:
            between = ir.rename(s, {"v": "w", "w": "w2"})
            m = ir.add(m, ir.rename(ir.mul(ir.einsum(s, between, over=("w",)), ir.const(C)), {"w2": "w"}))
        product = ir.einsum(m, ir.rename(x, {"v": "w"}), over=("w",))
        x = ir.pointwise("sub" if cubic else "add", ir.mul(x, ir.const(1.5 if cubic else A)), product)
    return Graph((start,), (x,), ("y",))


def cleaned(graph: Graph) -> Graph:
    return dedupe(fold(dedupe(graph)))


def same(before: Graph, after: Graph) -> None:
    """The same values and gradients, at sizes of singular values that the iteration keeps bounded."""
    check(after, "tensor")
    x = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x /= x.norm(dim=(-2, -1), keepdim=True)
    grad = ir.param("grad", before.results[0].axes)
    pair = []
    for graph in (before, after):
        (pulled,) = vjp(graph.results, [grad], [graph.params[0]])
        assert pulled is not None
        both = Graph((*graph.params, grad), (*graph.results, ir.in_order(pulled, graph.params[0].axes)))
        pair.append(run(both, {"x": x, "grad": x.flip(-1)}))
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cubic", (False, True))
@pytest.mark.parametrize("steps", (1, 2, 3, 5))
def test_values_and_gradients_stay(steps: int, cubic: bool) -> None:
    before = iterated(steps, cubic)
    same(before, cleaned(regroup(before, SIZES)))


def test_the_long_matrix_is_read_at_the_start_and_at_the_end() -> None:
    after = cleaned(regroup(iterated(5), SIZES))
    long = [n for n in after.nodes() if n.op is Op.EINSUM and any("e" in a.axes for a in n.args)]
    assert len(long) == 2
    assert count(after, {**SIZES, "e": 700}).products < count(iterated(5), {**SIZES, "e": 700}).products / 4


def test_golden() -> None:
    """Two steps of x <- A x + B s x."""
    before = iterated(2, square_term=False)
    assert show(cleaned(regroup(before, SIZES))) == textwrap.dedent("""\
        %0 : [g,v,e] = param(name=x)
        %1 x : [g,w,e] = rename(%0, v->w)
        %2 : [g,v,w] = einsum(%0, %1)
        %3 : [g,v,w] = mul(%2, -4.775)
        %4 : [v,w] = select(%3, axis=g, index=0)
        %5 : [v] = select(%4, axis=w, index=0)
        %6 : [v] = expand(0, %5)
        %7 I : [v,w] = decay(%6, axis=v, new=w)
        %8 : [v,w] = mul(3.4445, %7)
        %9 : [g,v,w] = add(%8, %3)
        %10 : [g,v,w_in] = rename(%9, w->w_in)
        %11 : [g,w_in,w] = rename(%2, v->w_in)
        %12 : [g,v,w] = einsum(%10, %11)
        %13 : [g,w_in,w] = rename(%12, v->w_in)
        %14 : [g,v,w] = einsum(%10, %13)
        %15 : [g,v,w] = mul(%14, -4.775)
        %16 : [v,w] = select(%15, axis=g, index=0)
        %17 : [v] = select(%16, axis=w, index=0)
        %18 : [v] = expand(0, %17)
        %19 I : [v,w] = decay(%18, axis=v, new=w)
        %20 : [v,w] = mul(3.4445, %19)
        %21 : [g,v,w] = add(%20, %15)
        %22 : [g,v,w_in] = rename(%21, w->w_in)
        %23 : [g,w_in,w] = rename(%9, v->w_in)
        %24 : [g,v,w] = einsum(%22, %23)
        %25 : [g,v,e] = einsum(%24, %1)
        return y=%25
    """)


@pytest.mark.parametrize(
    "sizes",
    ({**SIZES, "e": 4}, {"v": 3}, {"e": 7}),
    ids=("hardly longer than it has rows", "no length", "no rows"),
)
def test_stays_where_it_does_not_pay(sizes: dict[str, int]) -> None:
    graph = iterated(3)
    assert regroup(graph, sizes) is graph


def test_stays_where_the_matrix_is_no_polynomial() -> None:
    """Another matrix in the middle does not commute with x x^T."""
    x, other = ir.param("x", ("g", "v", "e")), ir.param("other", ("g", "v", "w"))
    y = ir.add(ir.mul(x, ir.const(2.0)), ir.einsum(other, ir.rename(x, {"v": "w"}), over=("w",)))
    z = ir.add(y, ir.einsum(square(y), ir.rename(y, {"v": "w"}), over=("w",)))
    graph = Graph((x, other), (z,), ("y",))
    assert regroup(graph, SIZES) is graph


def test_a_value_in_between_that_is_read_elsewhere_stays() -> None:
    inner = iterated(1)
    (x,), (y,) = inner.params, inner.results
    z = ir.add(ir.mul(y, ir.const(A)), ir.einsum(square(y), ir.rename(y, {"v": "w"}), over=("w",)))
    before = Graph((x,), (ir.add(z, y),), ("y",))
    same(before, cleaned(regroup(before, SIZES)))


def test_products_of_the_iteration_are_symmetric() -> None:
    for graph in map(cleaned, (iterated(3), regroup(iterated(3), SIZES))):
        square_ones = [n for n in graph.nodes() if n.op is Op.EINSUM and "e" not in n.axes and len(n.axes) == 3]
        assert square_ones and all(is_symmetric(n) for n in square_ones)
        for n, value in zip(square_ones, run(Graph(graph.params, tuple(square_ones)), {"x": torch.randn(2, 3, 7).double()}), strict=True):
            rows = next(i for i, a in enumerate(n.axes) if a != "g")
            torch.testing.assert_close(value, value.transpose(rows, rows + 1), rtol=1e-9, atol=1e-9)


def test_products_of_two_matrices_are_not() -> None:
    """Each is symmetric, and they do not commute."""
    x, y = ir.param("x", ("g", "v", "e")), ir.param("y", ("g", "v", "e"))
    a, b = square(x), square(y)
    assert is_symmetric(a) and is_symmetric(b)
    assert not is_symmetric(ir.einsum(a, ir.rename(b, {"v": "w", "w": "u"}), over=("w",)))
    assert not is_symmetric(ir.einsum(x, ir.rename(y, {"v": "w"}), over=("e",)))

