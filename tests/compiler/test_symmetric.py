"""Which products are known to be symmetric: those of a Newton-Schulz iteration, and no others."""

from __future__ import annotations

import torch

from memkit.compiler import ir
from memkit.compiler.interpret import run
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.symmetric import is_symmetric


def square(x: Node) -> Node:
    return ir.einsum(x, ir.rename(x, {"v": "w"}), over=("e",))


def iterated(steps: int) -> Graph:
    """x <- a x + (b s + c s s) x with s = x x^T, and Muon's numbers."""
    x = start = ir.param("x", ("g", "v", "e"))
    for _ in range(steps):
        s = square(x)
        twice = ir.rename(ir.einsum(s, ir.rename(s, {"v": "w", "w": "w2"}), over=("w",)), {"w2": "w"})
        m = ir.add(ir.mul(s, ir.const(-4.775)), ir.mul(twice, ir.const(2.0315)))
        x = ir.add(ir.mul(x, ir.const(3.4445)), ir.einsum(m, ir.rename(x, {"v": "w"}), over=("w",)))
    return Graph((start,), (x,), ("y",))


def test_products_of_the_iteration_are_symmetric() -> None:
    graph = iterated(3)
    products = [n for n in graph.nodes() if n.op is Op.EINSUM and "e" not in n.axes]
    assert len(products) == 6 and all(is_symmetric(n) for n in products)
    x = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for value in run(Graph(graph.params, tuple(products)), {"x": x / x.norm()}):
        torch.testing.assert_close(value, value.mT, rtol=1e-10, atol=1e-10)
    assert not any(is_symmetric(n) for n in graph.nodes() if n.op is Op.EINSUM and "e" in n.axes)


def test_products_of_two_matrices_are_not() -> None:
    """Each is symmetric, and they do not commute."""
    x, y = ir.param("x", ("g", "v", "e")), ir.param("y", ("g", "v", "e"))
    a, b = square(x), square(y)
    assert is_symmetric(a) and is_symmetric(b)
    assert not is_symmetric(ir.einsum(a, ir.rename(b, {"v": "w", "w": "u"}), over=("w",)))
    assert not is_symmetric(ir.einsum(x, ir.rename(y, {"v": "w"}), over=("e",)))


def test_a_weighed_square_is_not() -> None:
    """x diag(c) x^T is symmetric too, but one of its operands is another value; what is not sure is computed whole."""
    x, c = ir.param("x", ("g", "v", "e")), ir.param("c", ("g", "e"))
    assert not is_symmetric(ir.einsum(ir.mul(x, c), ir.rename(x, {"v": "w"}), over=("e",)))
