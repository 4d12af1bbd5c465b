"""Which products are known to be symmetric: those of a Newton-Schulz iteration, and no others."""

from __future__ import annotations

import pytest
import torch

from memkit.compiler import ir
from memkit.compiler.backward import backward
from memkit.compiler.interpret import run
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes import absorb, gram
from memkit.compiler.symmetric import SYMMETRIC, is_symmetric


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


def test_half_the_products_pull_the_same_gradient() -> None:
    """Of x x^T and its square, one product each; the exact rules take two."""
    graph = iterated(3)
    drawn = torch.Generator().manual_seed(1)
    values = {n: torch.randn(2, 3, 7, generator=drawn, dtype=torch.float64) for n in ("x", "grad_y")}
    values["x"] /= 3 * values["x"].norm()
    (plain,), (halved,) = (run(backward(graph, ["x"], rules=rules)[1], values) for rules in (None, SYMMETRIC))
    torch.testing.assert_close(halved, plain, rtol=1e-12, atol=1e-12)

    def products(rules) -> int:
        nodes = Graph((), backward(graph, ["x"], rules=rules)[1].results).nodes()
        return sum(n.op is Op.EINSUM for n in nodes)

    assert products(None) - products(SYMMETRIC) == 6


def test_other_products_pull_as_ever() -> None:
    """Two polynomials of one matrix commute, and y x^T of two values has no half."""
    x, y = ir.param("x", ("v", "e")), ir.param("y", ("v", "e"))
    s = square(x)
    twice = ir.rename(ir.einsum(s, ir.rename(s, {"v": "w", "w": "w2"}), over=("w",)), {"w2": "w"})
    thrice = ir.einsum(s, ir.rename(twice, {"v": "w", "w": "u"}), over=("w",))
    mixed = ir.einsum(y, ir.rename(x, {"v": "w"}), over=("e",))
    graph = Graph((x, y), (thrice, mixed), ("thrice", "mixed"))
    drawn = torch.Generator().manual_seed(2)
    shapes = {"x": (3, 5), "y": (3, 5), "grad_thrice": (3, 3), "grad_mixed": (3, 3)}
    values = {n: torch.randn(shape, generator=drawn, dtype=torch.float64) for n, shape in shapes.items()}
    found = [dict(zip("xy", run(backward(graph, ["x", "y"], rules=r)[1], values), strict=True)) for r in (None, SYMMETRIC)]
    for name in "xy":
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-12, atol=1e-12)


def test_a_polynomial_pulls_right_down_to_its_matrix() -> None:
    """Of p q, each half of p dq + dp q; no product of y's cotangent with a factor of y is left."""
    graph = gram(absorb(iterated(4)), {"v": 3, "e": 7})
    drawn = torch.Generator().manual_seed(3)
    values = {n: torch.randn(2, 3, 7, generator=drawn, dtype=torch.float64) for n in ("x", "grad_y")}
    values["x"] /= values["x"].norm()
    (want,) = run(backward(iterated(4), ["x"])[1], values)
    back = backward(graph, ["x"], rules=SYMMETRIC)[1]
    torch.testing.assert_close(run(back, values)[0], want, rtol=1e-11, atol=1e-11)
    halves = [n for n in back.nodes() if "symmetric" in n.attrs]
    assert len(halves) == 2 * 2, "of (q q) a and of p q, in each of two starts"
    for node in halves:
        i, j = node.attrs["symmetric"]
        (value,) = run(Graph(back.params, (node,)), values)
        rows, columns = node.axes.index(i), node.axes.index(j)
        torch.testing.assert_close(value, value.transpose(rows, columns), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("factor", ["a number", "a value"])
def test_factors_of_a_polynomial_have_gradients_too(factor: str) -> None:
    x, c = ir.param("x", ("v", "e")), ir.param("c", ())
    s = square(x)
    twice = ir.rename(ir.einsum(s, ir.rename(s, {"v": "w", "w": "w2"}), over=("w",)), {"w2": "w"})
    graph = Graph((x, c), (ir.mul(ir.add(ir.mul(s, ir.const(2.0) if factor == "a number" else c), twice), c),), ("y",))
    drawn = torch.Generator().manual_seed(4)
    values = {n: torch.randn(shape, generator=drawn, dtype=torch.float64) for n, shape in (("x", (3, 5)), ("c", ()), ("grad_y", (3, 3)))}
    want, got = (run(backward(graph, ["x", "c"], rules=r)[1], values) for r in (None, SYMMETRIC))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_loops_pull_polynomials_the_same_way() -> None:
    """A state w that goes to w + y(x_n), y of an iteration's polynomials, round three chunks."""
    inner = gram(absorb(iterated(2)), {"v": 3, "e": 7})
    w, x = ir.param("w", ("g", "v", "e")), ir.param("x", ("g", "v", "e"))
    (step,) = ir.inline(inner, {"x": ir.add(x, w)})
    start, xs = ir.param("w", w.axes), ir.param("x", ("n", *x.axes))
    graph = Graph((start, xs), (ir.scan(Graph((w, x), (ir.add(w, step),)), [start], [xs])[0],), ("y",))
    drawn = torch.Generator().manual_seed(5)
    values = {n: torch.randn(shape, generator=drawn, dtype=torch.float64) / 9 for n, shape in (("w", (2, 3, 7)), ("x", (3, 2, 3, 7)))}
    values["grad_y"] = torch.randn(2, 3, 7, generator=drawn, dtype=torch.float64)
    found = []
    for rules in (None, SYMMETRIC):
        forward, back = backward(graph, ["w", "x"], rules=rules)
        saved = dict(zip(forward.labels, run(forward, {n: values[n] for n in "wx"}), strict=True))
        known = {**values, **saved}
        found.append(run(back, {p.attrs["name"]: known[p.attrs["name"]] for p in back.params}))
        halves = [n for loop in back.nodes() if loop.body is not None for n in loop.body.nodes() if "symmetric" in n.attrs]
        assert bool(halves) == (rules is not None)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_a_number_may_borrow_its_axes_from_the_polynomial() -> None:
    """2 as [g], spread over an entry of each s, is a number still."""
    x = ir.param("x", ("g", "v", "e"))
    s = square(x)
    two = ir.expand(ir.const(2.0), ir.select(ir.select(s, "w", 0), "v", 0))
    twice = ir.rename(ir.einsum(s, ir.rename(s, {"v": "w", "w": "w2"}), over=("w",)), {"w2": "w"})
    graph = Graph((x,), (ir.add(ir.mul(s, two), twice),), ("y",))
    drawn = torch.Generator().manual_seed(6)
    values = {n: torch.randn(shape, generator=drawn, dtype=torch.float64) for n, shape in (("x", (2, 3, 5)), ("grad_y", (2, 3, 3)))}
    want, got = (run(backward(graph, ["x"], rules=r)[1], values)[0] for r in (None, SYMMETRIC))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
