"""Emitted code computes what the interpreter computes, on any shape, under torch's transforms, and reads well."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memkit.compiler import emit_helpers, ir
from memkit.compiler.backward import backward
from memkit.compiler.emit_helpers import from_runs
from memkit.compiler.emit_torch import compile_source, emit, emit_module
from memkit.compiler.emit_values import as_runs
from memkit.compiler.interpret import run
from memkit.compiler.ir import Graph
from memkit.compiler.simplify import simplify

from .random_graphs import inputs, random_graph


def function(graph: Graph) -> Callable[..., tuple[Tensor, ...]]:
    return compile_source(emit_module({"f": graph}), "<emitted test>")["f"]


def body(graph: Graph) -> str:
    source = emit(graph, "f")
    return source[source.index("):\n", source.index("def f(")) + 3 :]


def agree(found: tuple[Tensor, ...], expected: list[Tensor] | tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("seed", range(80))
def test_random_graphs(seed: int) -> None:
    graph, sizes = random_graph(seed)
    values = inputs(graph, sizes)
    agree(function(graph)(*values.values()), run(graph, values))


@pytest.mark.parametrize("seed", range(24))
def test_backward_graphs(seed: int) -> None:
    graph, sizes = random_graph(seed, steps=10)
    values = inputs(graph, sizes)
    forward, back = backward(graph, list(values))
    found = dict(zip(forward.labels, run(forward, values), strict=True))
    agree(function(forward)(*values.values()), list(found.values()))
    known = {**values, **found, **{f"grad_{label}": torch.randn_like(found[label]) for label in graph.labels}}
    known = {p.attrs["name"]: known[p.attrs["name"]] for p in back.params}
    agree(function(back)(*known.values()), run(back, known))
    small = simplify(back)
    agree(function(small)(*known.values()), run(small, known))


@pytest.mark.parametrize("seed", range(25))
def test_vmap(seed: int) -> None:
    graph, sizes = random_graph(seed)
    values, f = inputs(graph, sizes, batch=(2,)), function(graph)
    each = [f(*(x[i] for x in values.values())) for i in range(2)]
    agree(torch.func.vmap(f)(*values.values()), [torch.stack(pair) for pair in zip(*each, strict=True)])


@pytest.mark.parametrize("seed", range(12))
def test_torch_differentiates_it(seed: int) -> None:
    """Torch's gradients of the emitted code are the backward graph's: the fallback for second derivatives."""
    graph, sizes = random_graph(seed, steps=8)
    values = {k: x.requires_grad_() for k, x in inputs(graph, sizes).items()}
    results = function(graph)(*values.values())
    cotangents = [torch.randn_like(r) for r in results]
    if not any(r.requires_grad for r in results):
        pytest.skip("no result depends on a parameter")
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    expected = torch.autograd.grad([r for r, _ in pairs], list(values.values()), [c for _, c in pairs], allow_unused=True)
    forward, back = backward(graph, list(values))
    with torch.no_grad():
        known = {**values, **dict(zip(forward.labels, run(forward, values), strict=True))}
        known |= {f"grad_{label}": c for label, c in zip(graph.labels, cotangents, strict=True)}
        found = dict(zip(back.labels, function(back)(*(known[p.attrs["name"]] for p in back.params)), strict=True))
    for (name, value), grad in zip(values.items(), expected, strict=True):
        zero = torch.zeros_like(value)
        torch.testing.assert_close(found.get(name, zero), zero if grad is None else grad, rtol=1e-9, atol=1e-9)


def chunk_graph() -> Graph:
    """A small chunk-parallel layer: decays, a window's band, a masked product, a scan that saves, a gradient with gelu."""
    q, k = ir.param("q", ("n", "g", "t", "k")), ir.param("k", ("n", "g", "s", "k"))
    v, start = ir.param("v", ("n", "g", "s", "v")), ir.param("W", ("g", "v", "k"))
    retain, gate = ir.param("retain", ("n", "g", "t")), ir.param("gate", ("n", "g", "t", "j"))
    keep = ir.decay(retain, "t", "u", name="R")
    table = ir.einsum(keep, ir.band(ir.rename(gate, {"t": "u"}), "u", "j", "s", 4, name="Gamma"), over=("u",), name="C")
    left = ir.mul(ir.select(keep, "u", 0), ir.select(retain, "t", 0), name="a")
    w, qc, kc, vc = (ir.param(x.name, tuple(a for a in x.axes if a != "n")) for x in (start, q, k, v))
    tc, ac = ir.param("C", ("g", "t", "s")), ir.param("a", ("g", "t"))
    z = ir.einsum(kc, w, over=("k",), name="z")
    delta = ir.mul(ir.sub(ir.pointwise("gelu", z), vc), ir.pointwise("gelu_slope", z), name="delta")
    y = ir.sub(ir.mul(ac, ir.einsum(qc, w, over=("k",))), ir.masked_product(qc, kc, tc, delta, ("k",), "s"), name="y")
    row = ir.einsum(ir.mul(ir.select(tc, "t", -1), delta), kc, over=("s",))
    new = ir.sub(ir.mul(ir.select(ac, "t", -1), w), row, name="W_next")
    outs = ir.scan(Graph((w, qc, kc, vc, tc, ac), (new, y)), [start], [q, k, v, table, left])
    return Graph((q, k, v, retain, gate, start), (outs[1], outs[0]), ("y", "W"))


SIZES = {"n": 3, "g": 2, "t": 5, "s": 8, "j": 4, "k": 6, "v": 7}


def test_source_reads_well() -> None:
    expected = """
        R = decay(retain)  # [n, g, t, u]
        C = R @ band(gate)  # [n, g, t, s]
        a = R[..., 0] * retain[..., 0][..., None]  # [n, g, t]
        y_parts = []
        for q_n, k_n, v_n, C_n, a_n in zip(
            q.unbind(0),  # [g, t, k]
            k.unbind(0),  # [g, s, k]
            v.unbind(0),  # [g, s, v]
            C.unbind(0),  # [g, t, s]
            a.unbind(0),  # [g, t]
            strict=True,
        ):
            z = torch.bmm(k_n, W.mT)  # [g, s, v]
            delta = torch.ops.aten.gelu_backward(torch.nn.functional.gelu(z) - v_n, z)  # [g, s, v]
            x = a_n[..., -1][..., None, None] * W  # [g, v, k]
            W_next = torch.baddbmm(x, (C_n[:, -1][..., None] * delta).mT, k_n, alpha=-1)  # [g, v, k]
            x2 = a_n[..., None] * torch.bmm(q_n, W.mT)  # [g, t, v]
            y_n = torch.baddbmm(x2, torch.bmm(q_n, k_n.mT) * C_n, delta, alpha=-1)  # [g, t, v]
            y_parts.append(y_n)
            W = W_next  # [g, v, k]
        y = torch.stack(y_parts)  # [n, g, t, v]
        return (y, W)
    """
    assert body(chunk_graph()) == textwrap.indent(textwrap.dedent(expected).lstrip("\n"), "    ").rstrip(" ")


def test_chunk_graph_everywhere() -> None:
    graph = chunk_graph()
    values, f = inputs(graph, SIZES), function(graph)
    expected = run(graph, values)
    agree(f(*values.values()), expected)
    with torch.inference_mode():
        agree(f(*values.values()), expected)
    agree(torch.compile(f, fullgraph=True, backend="aot_eager")(*values.values()), expected)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda a, b: ir.einsum(a, b, over=("k",)), "torch.bmm(a, b.mT)"),
        (lambda a, b: ir.einsum(b, a, over=("k",)), "torch.bmm(a, b.mT)"),
        (lambda a, b: ir.einsum(a, b, keep=("g", "v", "t")), "torch.bmm(b, a.mT)"),
        (lambda a, b: ir.einsum(a, ir.rename(b, {"v": "t"}), over=("k",)), "(a * b).sum(-1)"),
        (lambda a, b: ir.einsum(a, ir.select(b, "v", 0), over=("k",)), "torch.bmm(a, b[:, 0][..., None])[..., 0]"),
        (lambda a, b: ir.einsum(ir.select(a, "t", 0), ir.select(b, "v", 0), over=("k",)), "(a[:, 0] * b[:, 0]).sum(-1)"),
        (lambda a, b: ir.einsum(a, ir.select(b, "g", 0), over=("k",)), "a @ b[0].mT"),
        (lambda a, b: ir.mul(a, a), "torch.square(a)"),
        (lambda a, b: ir.mul(a, ir.select(b, "v", -1)), "a * b[:, -1][:, None]"),
        (lambda a, b: ir.expand(ir.select(a, "k", 0), a), "a[..., 0][..., None].expand(-1, -1, a.shape[2])"),
        (lambda a, b: ir.pointwise("maximum", a, ir.const(0.0)), "a.clamp(min=0.0)"),
        (lambda a, b: ir.tril(a, "t", "k", -1), "a.tril(-1)"),
        (lambda a, b: ir.tril(a, "k", "t"), "a.triu()"),
        (lambda a, b: ir.shift(a, ir.const(0.0), "t"), "pad(a[:, :-1], -2, 1, 0)"),
        (lambda a, b: ir.windows(a, "t", "n", "t", 3, 2), "a.unfold(-2, 3, 2)"),
        (lambda a, b: ir.gather(a, "k", "i", (1, 2, 3), 6), "a[..., 1:4]"),
        (lambda a, b: ir.pointwise("where", ir.pointwise("gt", a, ir.const(0.0)), a, ir.const(0.0)), "torch.where(a > 0.0, a, 0.0)"),
    ],
)
def test_one_line_each(make: Callable[..., ir.Node], line: str) -> None:
    a, b = ir.param("a", ("g", "t", "k")), ir.param("b", ("g", "v", "k"))
    made = make(a, b)
    rows = body(Graph((a, b), (made,))).strip()
    assert rows.startswith(f"return ({line}"), rows


def test_sums_take_products_in() -> None:
    a, b, c = ir.param("a", ("g", "t", "k")), ir.param("b", ("g", "k", "v")), ir.param("c", ("g", "t", "v"))
    product = ir.einsum(a, b, over=("k",))
    half = ir.mul(ir.const(0.5), product)
    cases = {
        ir.add(c, product): "torch.baddbmm(c, a, b)",
        ir.sub(c, product): "torch.baddbmm(c, a, b, alpha=-1)",
        ir.sub(product, c): "torch.baddbmm(c, a, b, beta=-1)",
        ir.sub(c, half): "torch.baddbmm(c, a, b, alpha=-0.5)",
        ir.add(ir.neg(product), c): "torch.baddbmm(c, a, b, alpha=-1)",
    }
    for node, line in cases.items():
        assert body(Graph((a, b, c), (node,))) == f"    return ({line},)\n"


def test_sums_take_factors_in() -> None:
    a, b, c = ir.param("a", ("g", "t")), ir.param("b", ("g", "t", "v")), ir.param("c", ("g", "t", "v"))
    cases = {
        ir.add(c, ir.mul(a, b)): "torch.addcmul(c, a[..., None], b)",
        ir.sub(c, ir.mul(b, a)): "torch.addcmul(c, b, a[..., None], value=-1)",
        ir.add(ir.mul(b, c), a): "torch.addcmul(a[..., None], b, c)",
        ir.sub(ir.mul(b, c), a): "b * c - a[..., None]",
        ir.add(c, ir.mul(ir.const(2.0), b)): "c + 2.0 * b",
    }
    for node, line in cases.items():
        assert body(Graph((a, b, c), (node,))) == f"    return ({line},)\n"


def test_lengths_are_read_where_they_are_known() -> None:
    """A node that only lends its shape is not computed."""
    x, y = ir.param("x", ("g", "t")), ir.param("y", ("g", "k"))
    wide = ir.pointwise("exp", ir.mul(x, ir.pointwise("sin", y)))
    rows = body(Graph((x, y), (ir.expand(ir.select(x, "g", 0), wide),)))
    assert "torch.exp" not in rows and "y.shape[1]" in rows


def test_reverse_scan_saves_in_order() -> None:
    x, w = ir.param("x", ("n", "g")), ir.param("w", ("g",))
    part, carry = ir.param("x", ("g",)), ir.param("w", ("g",))
    new = ir.add(ir.mul(carry, ir.const(0.5)), part)
    outs = ir.scan(Graph((carry, part), (new, ir.mul(carry, part))), [w], [x], reverse=True, save=True)
    graph = Graph((x, w), tuple(outs))
    values = inputs(graph, {"n": 4, "g": 3})
    agree(function(graph)(*values.values()), run(graph, values))
    assert "for x_n in reversed(x.unbind(0)):" in emit(graph, "f")


@pytest.mark.parametrize("name", ["w", "a_rather_long_name_for_something_that_goes_round"])
def test_carries_change_places(name: str) -> None:
    x, a, b = ir.param("x", ("n", "g")), ir.param(name, ("g",)), ir.param(f"{name}_2", ("g",))
    part, first, second = ir.param("x", ("g",)), ir.param(name, ("g",)), ir.param(f"{name}_2", ("g",))
    outs = ir.scan(Graph((first, second, part), (second, ir.add(first, part))), [a, b], [x])
    graph = Graph((x, a, b), tuple(outs))
    values = inputs(graph, {"n": 3, "g": 2})
    agree(function(graph)(*values.values()), run(graph, values))


def test_constants_are_shared_and_survive_inference_mode() -> None:
    x = ir.param("x", ("k",))
    table = ir.tensor((1.0, 2.0, 4.0), ("k",), name="scale")
    graph = Graph((x,), (ir.mul(ir.gather(x, "k", "k", (2, 0, 0), 3), table),))
    source = emit_module({"f": graph, "g": graph})
    assert source.count("= torch.tensor(") == 2 and source.count("def constant(") == 1
    with torch.inference_mode():
        module = compile_source(source, "<emitted constants>")
        module["f"](torch.ones(3))
    value = torch.ones(3, requires_grad=True)
    module["g"](value)[0].sum().backward()
    torch.testing.assert_close(value.grad, torch.tensor([6.0, 0.0, 1.0]))


def test_layouts_of_results() -> None:
    x = ir.param("x", ("g", "t", "k"))
    graph = Graph((x,), (ir.neg(x),), ("y",))
    assert "return ((-x).movedim(0, 2),)" in emit(graph, "f", {"y": ("t", "k", "g")})


def test_tracebacks_show_the_source() -> None:
    a, b = ir.param("a", ("t", "k")), ir.param("b", ("k", "v"))
    f = function(Graph((a, b), (ir.einsum(a, b, over=("k",)),)))
    with pytest.raises(RuntimeError) as caught:
        f(torch.ones(2, 3), torch.ones(4, 5))
    assert "return (a @ b,)" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.long])
@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_sums_of_groups(dtype: torch.dtype, dim: int) -> None:
    """One after another on a CPU, by groups of a gather in other types: the same sums, here of whole numbers."""
    index, groups = torch.tensor([2, 0, 2, 2, 3]), 5
    sources = torch.tensor([[1, 5, 5], [5, 5, 5], [0, 2, 3], [4, 5, 5], [5, 5, 5]])
    shape = [3, 4, 2]
    shape[dim] = len(index)
    x = torch.randint(-9, 9, shape).to(dtype)
    size = [*shape]
    size[dim] = groups
    expected = torch.zeros(size, dtype=torch.float64).index_add(dim, index, x.double())
    agree((emit_helpers.sum_groups(x, index, sources, dim).double(),), [expected])
    if dim == -1:
        agree((emit_helpers.pick(x, index % 5).double(),), [x.double()[..., index % 5]])


def test_what_has_a_name_changes_no_number() -> None:
    """A long elementwise product goes into a sum in one call, whether the function also returns its factor or not."""
    a, b, c = (ir.param(name, ("g", "k")) for name in ("a_long_name", "another_long_name", "c"))
    factor = ir.pointwise("gelu", ir.pointwise("silu", ir.mul(ir.pointwise("exp", a), ir.pointwise("exp", b))))
    total = ir.add(c, ir.mul(factor, ir.pointwise("tanh", ir.add(a, b))))
    for results in ((total,), (total, factor)):
        assert body(Graph((a, b, c), results)).count("torch.addcmul(c, ") == 1


@pytest.mark.parametrize("size", [1, 2, 16, 31, 33, 64, 77])
def test_decay_is_exact_at_resets(size: int) -> None:
    x = torch.rand(3, size, dtype=torch.float64)
    x[0, size // 2] = 0.0
    x[1] = 0.0
    rows = [torch.zeros(3, size, dtype=torch.float64)]
    for t in range(size):
        row = rows[-1] * x[:, t, None]
        row[:, t] = 1.0
        rows.append(row)
    expected = torch.stack(rows[1:], 1)
    agree((emit_helpers.decay(x),), [expected])
    agree((emit_helpers.decay(x[..., None].expand(-1, -1, 2), -2),), [expected[..., None].expand(-1, -1, -1, 2)])


@pytest.mark.parametrize("size", [1, 16, 17, 40, 64, 65, 150])
@pytest.mark.parametrize("transpose", [False, True])
def test_solve_by_blocks(size: int, transpose: bool) -> None:
    lower, b = torch.randn(2, 1, size, size, dtype=torch.float64) / size**0.5, torch.randn(3, size, 4, dtype=torch.float64)
    matrix = torch.eye(size, dtype=torch.float64) + lower.tril(-1)
    expected = torch.linalg.solve(matrix.mT if transpose else matrix, b.expand(2, 3, size, 4))
    torch.testing.assert_close(emit_helpers.solve(lower, b, transpose), expected, rtol=1e-9, atol=1e-9)


def test_solve_keeps_its_digits_where_keys_repeat() -> None:
    """A system near all ones, where products of powers of the matrix would lose four digits."""
    lower = torch.ones(64, 64) + 0.01 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    b = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    expected = emit_helpers.solve(lower.double(), b.double())
    assert (emit_helpers.solve(lower, b) - expected).abs().max() < 3e-6 * expected.abs().max()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(-3, 3), st.sampled_from([0.5, 2.0**0.5]))))
def test_runs_are_the_numbers_they_were_made_of(values: list[float]) -> None:
    runs = as_runs(values)
    assert [first + step * i for first, count, step in runs for i in range(count)] == values
    if runs:
        torch.testing.assert_close(from_runs(*runs), torch.tensor(values, dtype=from_runs(*runs).dtype), rtol=0, atol=0)


def test_long_even_tables_are_written_as_runs() -> None:
    table = tuple(tuple(float(i == j) for j in range(20)) for i in range(9))
    x = ir.param("x", ("i",))
    source = emit(Graph((x,), (ir.einsum(ir.tensor(table, ("i", "j")), x, over=("i",)),)), "f")
    assert "from_runs(" in source and len(source) < 1500
    drawn = torch.randn(9, dtype=torch.float64)
    (found,) = compile_source(source, "<runs>")["f"](drawn)
    torch.testing.assert_close(found, torch.tensor(table, dtype=torch.float64).mT @ drawn, rtol=0, atol=0)
