"""Gradients built on the graph against torch autograd through the interpreter: float64, first and second order."""

import pytest
import torch
from torch.testing import assert_close

from memkit.compiler import interpret, ir
from memkit.compiler.assemble import worth_keeping
from memkit.compiler.autodiff import vjp
from memkit.compiler.backward import backward
from memkit.compiler.ir import Graph, GraphError, Op, param
from memkit.compiler.simplify import simplify
from tests.compiler.random_graphs import Builder

SIZES = {"n": 3, "g": 2, "t": 4, "u": 4, "s": 4, "j": 2, "i": 4, "r": 8, "k": 3, "v": 2}


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(17 * seed + sum(shape)))


def gradient_graph(graph, wrt):
    """params + cotangents -> gradients; and the names of those that are not zero."""
    cots = [param(f"cot{i}_{len(graph.params)}", r.axes) for i, r in enumerate(graph.results)]
    grads = vjp(graph.results, cots, [graph.param(n) for n in wrt])
    names = [n for n, g in zip(wrt, grads, strict=True) if g is not None]
    for name, grad in zip(wrt, grads, strict=True):
        assert grad is None or set(grad.axes) == set(graph.param(name).axes)
    return Graph((*graph.params, *cots), tuple(g for g in grads if g is not None)), cots, names


def check_gradients(graph, inputs, order=2, wrt=None):
    """Raises unless every gradient of every order equals torch's."""
    wrt = list(inputs) if wrt is None else wrt
    values = {n: x.detach().clone().requires_grad_(n in wrt) for n, x in inputs.items()}
    results = interpret.run(graph, values)
    pulled, cots, names = gradient_graph(graph, wrt)
    seeds = {c.attrs["name"]: randn(*r.shape, seed=i + 1) for i, (c, r) in enumerate(zip(cots, results, strict=True))}
    live = [(r, s) for r, s in zip(results, seeds.values(), strict=True) if r.requires_grad]
    truth = [None] * len(wrt)
    if live:
        leaves = [values[n] for n in wrt]
        truth = torch.autograd.grad([r for r, _ in live], leaves, [s for _, s in live], allow_unused=True)
    if not names:
        assert all(t is None or not t.any() for t in truth)
        return
    plain = {n: x.detach() for n, x in values.items()} | seeds
    got = dict(zip(names, zip(pulled.results, interpret.run(pulled, plain), strict=True), strict=True))
    for name, expected in zip(wrt, truth, strict=True):
        expected = torch.zeros_like(values[name]) if expected is None else expected
        if name not in got:
            assert not expected.any(), f"no gradient for {name}, torch has {expected}"
            continue
        node, value = got[name]
        axes = graph.param(name).axes
        value = value.permute([node.axes.index(a) for a in axes])
        assert_close(value, expected, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"order {order}, {name}: {m}")
    if order > 1:
        check_gradients(pulled, plain, order - 1)


def make(*axes):
    """A parameter for each string of axes, and inputs for them."""
    params = [param(f"x{i}", tuple(a)) for i, a in enumerate(axes)]
    return params, {p.attrs["name"]: randn(*(SIZES[a] for a in p.axes), seed=i) for i, p in enumerate(params)}


SMOOTH = [fn for fn, count in ir.FUNCTIONS.items() if count == 1]


@pytest.mark.parametrize("fn", SMOOTH)
def test_unary(fn):
    (x,), inputs = make("tk")
    if fn in ("log", "sqrt", "rsqrt", "log1p"):
        inputs["x0"] = inputs["x0"].abs() + 0.2
    check_gradients(Graph((x,), (ir.pointwise(fn, x),)), inputs, order=3)


@pytest.mark.parametrize("fn", [fn for fn, count in ir.FUNCTIONS.items() if count == 2])
@pytest.mark.parametrize("axes", [("tk", "tk"), ("tk", "k"), ("t", "k"), ("", "tk")])
def test_binary(fn, axes):
    (a, b), inputs = make(*axes)
    if fn in ("pow", "div"):
        inputs = {n: x.abs() + 0.3 for n, x in inputs.items()}
    check_gradients(Graph((a, b), (ir.pointwise(fn, a, b),)), inputs)


def test_ties_share_the_cotangent():
    (a, b), inputs = make("t", "t")
    inputs["x1"] = inputs["x0"] + torch.tensor([0.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    for fn in ("maximum", "minimum"):
        check_gradients(Graph((a, b), (ir.pointwise(fn, a, b),)), inputs)
    inputs = {"x0": torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64)}
    x = param("x0", ("t", "k"))
    for over in ("k", "tk"):
        check_gradients(Graph((x,), (ir.reduce(x, tuple(over), "max"),)), inputs)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, 4.0, 2.5])
def test_constant_powers_are_safe_at_zero(exponent):
    x = param("x0", ("t",))
    value = torch.tensor([0.0, 1.5, 0.0, 2.0], dtype=torch.float64)
    check_gradients(Graph((x,), (ir.pointwise("pow", x, ir.const(exponent)),)), {"x0": value})


def test_powers_by_an_exponent_that_varies_are_safe_at_zero():
    (a, b), _ = make("t", "t")
    inputs = {"x0": torch.tensor([0.0, 0.0, 2.0, 3.0]).double(), "x1": torch.tensor([3.0, 0.0, 0.0, 2.0]).double()}
    graph = Graph((a, b), (ir.pointwise("pow", a, b),))
    check_gradients(graph, inputs, order=1)
    first, _, _ = gradient_graph(graph, ["x0", "x1"])
    second, _, _ = gradient_graph(first, ["x0", "x1"])  # torch itself gives nan here
    ones = {p.attrs["name"]: inputs.get(p.attrs["name"], torch.ones(4).double()) for p in second.params}
    assert all(torch.isfinite(r[[0, 2, 3]]).all() for r in interpret.run(second, ones))  # 0^0 has no slope in its base


def test_where_masks_what_is_not_taken():
    (c, a, b), inputs = make("t", "tk", "k")
    inputs["x0"] = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    check_gradients(Graph((c, a, b), (ir.pointwise("where", c, a, b),)), inputs)
    x = param("x", ("t",))
    safe = ir.pointwise("where", ir.pointwise("gt", x, ir.const(0.0)), ir.pointwise("sqrt", x), ir.const(0.0))
    (grad,) = vjp([safe], [ir.expand(ir.const(1.0), x)], [x])
    assert grad is not None


EINSUMS = [
    ("tk", "vk", "tv"), ("tk", "k", "t"), ("tk", "tk", ""), ("t", "k", "tk"), ("tk", "s", "t"), ("gtk", "gsk", "gts"),
    ("tk", "tk", "kt"),
]  # fmt: skip


@pytest.mark.parametrize("a, b, keep", EINSUMS)
def test_einsum(a, b, keep):
    (x, y), inputs = make(a, b)
    check_gradients(Graph((x, y), (ir.einsum(x, y, keep=tuple(keep)),)), inputs)


def test_einsum_of_one_node_with_itself():
    (x,), inputs = make("tk")
    gram = ir.einsum(x, ir.rename(x, {"t": "u"}))
    check_gradients(Graph((x,), (gram, ir.einsum(x, x, keep=()))), inputs)


def nonlinear(x):
    """A smooth function around the operation under test, so that second derivatives are not all zero."""
    return ir.pointwise("sin", x)


def masked(z, x, c, d):
    return ir.masked_product(z, x, c, d, ("k",), "s")


STRUCTURE = {
    "sum": (["tk"], lambda x: ir.reduce(x, ("t",))),
    "max": (["tk"], lambda x: ir.reduce(x, ("t", "k"), "max")),
    "expand": (["k", "tk"], lambda x, y: ir.expand(x, y)),
    "expand both": (["kv", "tk"], lambda x, y: ir.expand(x, y)),
    "rename": (["tk"], lambda x: ir.rename(x, {"t": "k", "k": "v"})),
    "gather": (["tk"], lambda x: ir.gather(x, "k", "f", (2, 0, 2, 2), 3)),
    "scatter": (["tk"], lambda x: ir.scatter(x, "t", "f", (1, 5, 1, 0), 6)),
    "decay": (["t"], lambda x: ir.decay(x, "t", "s")),
    "decay wide": (["gtk"], lambda x: ir.decay(x, "t", "s")),
    "decay renamed": (["u"], lambda x: ir.decay(x, "u", "s")),
    "band": (["gtj"], lambda x: ir.band(x, "t", "j", "s", 2)),
    "unband": (["gtj"], lambda x: ir.unband(nonlinear(ir.band(x, "t", "j", "s", 2)), "t", "j", "s", 2)),
    "tril": (["gts"], lambda x: ir.tril(x, "t", "s", -1)),
    "shift": (["tk", "kv"], lambda x, y: ir.shift(x, y, "t")),
    "shift back": (["tk", ""], lambda x, y: ir.shift(x, y, "t", -1)),
    "windows": (["rk"], lambda x: ir.windows(x, "r", "t", "j", 3, 2)),
    "fold": (["rk"], lambda x: ir.fold(nonlinear(w := ir.windows(x, "r", "t", "j", 3)), x, w.attrs)),
    "merge": (["tkj"], lambda x: ir.merge(x, ("t", "j"), "r", 2)),
    "split": (["rk"], lambda x: ir.split(x, "r", ("t", "j"), 2)),
    "select first": (["tk"], lambda x: ir.select(x, "t", 0)),
    "select last": (["tk"], lambda x: ir.select(x, "t", -1)),
    "place": (["k", "tk"], lambda x, y: ir.place(x, y, "t", -1)),
    "solve": (["giu", "gik"], lambda x, y: ir.solve(x, y, "i", "u")),
    "solve transposed": (["giu", "ik"], lambda x, y: ir.solve(x, y, "i", "u", True)),
    "solve one side": (["iu", "gi"], lambda x, y: ir.solve(x, y, "i", "u")),
    "solve clash": (["iu", "iu"], lambda x, y: ir.solve(x, y, "i", "u")),
    "masked product": (["gtk", "gsk", "gts", "gsv"], masked),
    "masked product, shared c": (["gtk", "gsk", "ts", "gsv"], masked),
}  # fmt: skip


@pytest.mark.parametrize("case", STRUCTURE)
def test_structure(case):
    axes, build = STRUCTURE[case]
    params, inputs = make(*axes)
    check_gradients(Graph(tuple(params), (build(*params),)), inputs)
    check_gradients(Graph(tuple(params), (nonlinear(build(*(nonlinear(p) for p in params))),)), inputs)


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_and_what_simplify_makes_of_them(seed):
    builder = Builder(seed)
    graph = builder.graph(14)
    inputs = {p.attrs["name"]: randn(*(builder.sizes[a] for a in p.axes), seed=seed) for p in graph.params}
    simpler = simplify(graph)
    for got, expected in zip(interpret.run(simpler, inputs), interpret.run(graph, inputs), strict=True):
        assert_close(got, expected, rtol=1e-9, atol=1e-10)
    check_gradients(graph, inputs, order=1)
    check_gradients(simpler, inputs)


def test_masked_product_of_operands_made_from_each_other():
    (x,), inputs = make("gsk")
    z = nonlinear(ir.rename(x, {"s": "t"}))
    c = ir.einsum(z, x)
    node = ir.masked_product(z, x, c, ir.rename(x, {"k": "v"}), ("k",), "s")
    check_gradients(Graph((x,), (node,)), inputs)


@pytest.mark.parametrize("zeros", [(), (0,), (2,), (1, 2), (0, 1, 2, 3)])
def test_decay_is_exact_at_resets(zeros):
    (x,), inputs = make("gt")
    inputs["x0"][:, list(zeros)] = 0.0
    check_gradients(Graph((x,), (nonlinear(ir.decay(x, "t", "s")),)), inputs)


def test_a_value_used_twice_and_a_chain():
    (w, x), inputs = make("vk", "k")
    h = ir.pointwise("gelu", ir.einsum(w, x, keep=("v",)))
    loss = ir.add(ir.einsum(h, h, keep=()), ir.reduce(ir.pointwise("tanh", ir.mul(h, w)), ("v", "k")))
    check_gradients(Graph((w, x), (loss, h)), inputs, order=3)


def test_gradient_of_an_inner_node_and_what_lies_above_it():
    (w, x, y), inputs = make("vk", "k", "v")
    p = ir.einsum(w, x, keep=("v",))
    r = ir.sub(p, y)
    loss = ir.mul(ir.const(0.5), ir.einsum(r, r, keep=()))
    gp, gw, nothing = vjp([loss], [ir.const(1.0)], [p, w, param("other", ("k",))])
    assert nothing is None and gp is not None and gw is not None
    got = interpret.run(Graph((w, x, y), (gp, gw)), inputs)
    r_value = inputs["x0"] @ inputs["x1"] - inputs["x2"]
    assert_close(got[0], r_value)
    assert_close(got[1], torch.outer(r_value, inputs["x1"]))


def test_a_cotangent_with_other_axes_is_refused():
    (x,), _ = make("tk")
    with pytest.raises(GraphError, match="cotangent"):
        vjp([x], [ir.const(1.0)], [x])


def test_new_nodes_keep_where():
    (x,), _ = make("tk")
    node = ir.pointwise("tanh", x).replace(where="layer.memory")
    (grad,) = vjp([ir.mul(node, node)], [param("c", ("t", "k"))], [x])
    assert grad is not None
    above = [n for n in Graph((), (grad,)).nodes() if n.op is Op.POINTWISE and n.attrs["fn"] in ("square", "sub")]
    assert above and all(n.where == "layer.memory" for n in above)


# loops


def cell(h, x, a, w):
    """h [g,v], x [g,k], a [g], w [v,k] -> (new h, output [g,v])."""
    new = ir.add(ir.mul(a, h), ir.pointwise("tanh", ir.einsum(x, w, keep=("g", "v"))))
    return new, ir.mul(new, ir.pointwise("sin", h))


def loop_graph(reverse=False, save=False, results=slice(None)):
    body_params = tuple(param(n, tuple(a)) for n, a in zip("hxaw", ("gv", "gk", "g", "vk"), strict=True))
    body = Graph(body_params, cell(*body_params))
    params, inputs = make("gv", "ngk", "ng", "vk")
    outs = ir.scan(body, params[:1], params[1:3], params[3:], reverse=reverse, save=save)
    return Graph(tuple(params), tuple(outs[results])), inputs


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("results", [slice(None), slice(0, 1), slice(1, 2)])
def test_scan(reverse, save, results):
    check_gradients(*loop_graph(reverse, save, results))


@pytest.mark.parametrize("wrt", ["x0", "x1", "x2", "x3"])
def test_scan_for_one_input_only(wrt):
    graph, inputs = loop_graph()
    check_gradients(graph, inputs, wrt=[wrt])


def test_scan_carries_only_the_cotangents_that_are_needed():
    h, c, x, w = (param(n, tuple(a)) for n, a in zip("hcxw", ("k", "k", "k", "k"), strict=True))
    body = Graph((h, c, x, w), (ir.add(h, x), ir.add(c, ir.const(1.0)), ir.mul(ir.mul(h, c), w)))
    params, inputs = make("k", "k", "nk", "k")
    outs = ir.scan(body, params[:2], params[2:3], params[3:])
    graph = Graph(tuple(params), (outs[2],))
    (grad,) = vjp(graph.results, [param("cot", ("n", "k"))], [params[2]])
    assert grad is not None
    loops = [n for n in Graph((), (grad,)).nodes() if n.op is Op.SCAN and n.attrs["reverse"]]
    assert [loop.attrs["carries"] for loop in loops] == [1]  # h alone: neither c nor w is asked for
    check_gradients(graph, inputs)
    check_gradients(graph, inputs, wrt=["x2"])


def test_scan_whose_pullback_needs_no_forward_value():
    h, x = param("h", ("k",)), param("x", ("k",))
    body = Graph((h, x), (ir.add(ir.mul(h, ir.const(0.5)), x),))
    params, inputs = make("k", "nk")
    check_gradients(Graph(tuple(params), tuple(ir.scan(body, params[:1], params[1:]))), inputs)


def test_a_loop_that_does_not_save_runs_forward_once_more_and_no_more():
    a, b, x = (param(n, ("k",)) for n in "abx")
    body = Graph((a, b, x), (ir.mul(b, x), ir.mul(a, nonlinear(x))))
    params, _ = make("k", "k", "nk")
    ends = ir.scan(body, params[:2], params[2:])
    pulled, _, _ = gradient_graph(Graph(tuple(params), tuple(ends)), ["x0", "x1", "x2"])
    assert [n.attrs["reverse"] for n in pulled.nodes() if n.op is Op.SCAN] == [False, True]


def test_outputs_of_the_forward_loop_are_read_not_computed_again():
    h, x = param("h", ("k",)), param("x", ("k",))
    y = ir.pointwise("tanh", ir.mul(h, x))
    params, inputs = make("k", "nk")
    graph = Graph(tuple(params), tuple(ir.scan(Graph((h, x), (ir.add(y, h), y)), params[:1], params[1:])))
    check_gradients(graph, inputs)
    _, back = backward(graph, ["x0", "x1"])
    (loop,) = (n for n in back.nodes() if n.op is Op.SCAN)
    assert loop.body is not None
    assert "tanh" not in [n.attrs.get("fn") for n in loop.body.nodes()]


def test_scan_with_carries_that_cross():
    a, b, x = (param(n, ("k",)) for n in "abx")
    body = Graph((a, b, x), (b, ir.mul(a, x), a))
    params, inputs = make("k", "k", "nk")
    graph = Graph(tuple(params), tuple(ir.scan(body, params[:2], params[2:])))
    check_gradients(graph, inputs)
    for i in range(3):
        check_gradients(Graph(graph.params, graph.results[i : i + 1]), inputs, wrt=["x0"])


def nested_graph():
    """For each chunk n a loop over its tokens t, inside one loop over chunks."""
    h, x, a, w = (param(n, tuple(s)) for n, s in zip("hxaw", ("gv", "gk", "g", "vk"), strict=True))
    inner = Graph((h, x, a, w), cell(h, x, a, w))
    params, inputs = make("gv", "ntgk", "ntg", "vk")
    outer_params = tuple(param(n, tuple(s)) for n, s in zip("HXAW", ("gv", "tgk", "tg", "vk"), strict=True))
    ends = ir.scan(inner, outer_params[:1], outer_params[1:3], outer_params[3:], axis="t")
    outer = Graph(outer_params, (ir.pointwise("tanh", ends[0]), ir.mul(ends[1], ends[0])))
    return Graph(tuple(params), tuple(ir.scan(outer, params[:1], params[1:3], params[3:]))), inputs


def test_nested_scan():
    check_gradients(*nested_graph())


def test_nested_scan_runs_each_inner_loop_once_in_the_backward_body():
    graph, _ = nested_graph()
    pulled, _, _ = gradient_graph(graph, ["x0", "x1", "x2", "x3"])
    (back,) = (n for n in pulled.nodes() if n.op is Op.SCAN and n.attrs["reverse"])
    assert back.body is not None
    assert sorted(n.attrs["reverse"] for n in back.body.nodes() if n.op is Op.SCAN) == [False, True]


# forward and backward as two graphs


def run_two(graph, inputs, wrt):
    """Gradients through `backward`: run forward, hand over what it saved, run backward."""
    forward, back = backward(graph, wrt)
    labels = graph.labels or tuple(f"result{i}" for i in range(len(graph.results)))
    values = interpret.run(forward, inputs)
    named = dict(zip(forward.labels, values, strict=True))
    seeds = {f"grad_{n}": randn(*named[n].shape, seed=i + 1) for i, n in enumerate(labels)}
    have = inputs | named | seeds
    got = interpret.run(back, {p.attrs["name"]: have[p.attrs["name"]] for p in back.params})
    return forward, back, seeds, dict(zip(back.labels, got, strict=True))


@pytest.mark.parametrize("make_graph", [loop_graph, nested_graph])
def test_backward_equals_torch(make_graph):
    graph, inputs = make_graph()
    wrt = list(inputs)
    forward, back, seeds, got = run_two(graph, inputs, wrt)
    live = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    truth = torch.autograd.grad(interpret.run(graph, live), list(live.values()), list(seeds.values()))
    for name, expected in zip(wrt, truth, strict=True):
        assert_close(got[name], expected, rtol=1e-9, atol=1e-10)
    # the backward graph runs no loop of the forward direction again
    assert [n.attrs["reverse"] for n in back.nodes() if n.op is Op.SCAN] == [True]
    assert forward.labels[: len(graph.results)] == ("result0", "result1")


def test_backward_saves_solves_and_names_what_has_no_gradient():
    (lower, b, c), inputs = make("giu", "gik", "k")
    x = ir.solve(lower, b, "i", "u", name="x")
    graph = Graph((lower, b, c), (nonlinear(x),), ("y",))
    forward, back, seeds, got = run_two(graph, inputs, ["x0", "x1", "x2"])
    assert back.labels == ("x0", "x1")
    assert forward.labels == ("y", "saved_0") and forward.results[1].op is Op.SOLVE
    assert [n.attrs["transpose"] for n in back.nodes() if n.op is Op.SOLVE] == [True]
    live = {n: v.clone().requires_grad_() for n, v in inputs.items()}
    truth = torch.autograd.grad(interpret.run(graph, live), [live["x0"], live["x1"]], list(seeds.values()))
    for name, expected in zip(("x0", "x1"), truth, strict=True):
        assert_close(got[name], expected, rtol=1e-9, atol=1e-10)


def test_loops_that_need_not_save_do_not():
    h, x = param("h", ("k",)), param("x", ("k",))
    body = Graph((h, x), (ir.add(h, x),))
    params, _ = make("k", "nk")
    forward, _ = backward(Graph(tuple(params), tuple(ir.scan(body, params[:1], params[1:]))), ["x0", "x1"])
    assert [n.attrs["save"] for n in forward.nodes() if n.op is Op.SCAN] == [False]


def test_a_sum_is_kept_in_place_of_a_term() -> None:
    """No gradient needs the terms of a sum; a product that goes elsewhere, too, or into an entry-wise product, is kept itself."""
    W, x, late = param("W", ("e", "f")), param("x", ("t", "f")), param("late", ("t", "e"))
    made = ir.einsum(W, x, ("t", "e"))
    total = ir.pointwise("sub", ir.add(made, late), ir.pointwise("exp", late))
    assert worth_keeping(Graph((W, x, late), (ir.pointwise("exp", total),))) == {total}
    assert worth_keeping(Graph((W, x, late), (ir.pointwise("exp", total), ir.mul(made, late)))) == {made}
    assert worth_keeping(Graph((W, x, late), (ir.mul(made, late),))) == {made}
    assert worth_keeping(Graph((W, x, late), (total, made))) == {made}, "a result is there anyway, but its sum would not give it"
