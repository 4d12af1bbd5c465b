"""The interpreter against plain index loops and independent torch formulas, in float64."""

import pytest
import torch
from torch.testing import assert_close

from memkit.compiler import interpret, ir
from memkit.compiler.ir import Graph, GraphError, param


def run1(node, **inputs):
    """The value of one node, given its parameters by name."""
    params = tuple(n for n in Graph((), (node,)).nodes() if n.op is ir.Op.PARAM)
    return interpret.run(Graph(params, (node,)), inputs)[0]


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


POINTWISE_TRUTH = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "maximum": lambda a, b: (a + b + (a - b).abs()) / 2,
    "minimum": lambda a, b: (a + b - (a - b).abs()) / 2,
    "gt": lambda a, b: (a > b).double(),
    "ge": lambda a, b: (a >= b).double(),
    "lt": lambda a, b: (a < b).double(),
    "le": lambda a, b: (a <= b).double(),
    "eq": lambda a, b: (a == b).double(),
    "neg": lambda x: -x,
    "exp": lambda x: torch.e**x,
    "log": lambda x: torch.log2(x) * 0.6931471805599453,
    "sqrt": lambda x: x**0.5,
    "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: 1 / x,
    "abs": lambda x: torch.where(x < 0, -x, x),
    "sign": lambda x: (x > 0).double() - (x < 0).double(),
    "square": lambda x: x * x,
    "log1p": lambda x: (1 + x).log(),
    "expm1": lambda x: x.exp() - 1,
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "erf": lambda x: torch.special.erf(x),
    "sin": lambda x: torch.exp(1j * x).imag,
    "cos": lambda x: torch.exp(1j * x).real,
    "cosh": lambda x: (x.exp() + (-x).exp()) / 2,
    "sinh": lambda x: (x.exp() - (-x).exp()) / 2,
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / 2**0.5),
    "gelu_slope": lambda x: torch.func.vmap(torch.func.grad(torch.nn.functional.gelu))(x.flatten()).view_as(x),
    "silu": lambda x: x / (1 + (-x).exp()),
    "silu_slope": lambda x: torch.func.vmap(torch.func.grad(torch.nn.functional.silu))(x.flatten()).view_as(x),
    "softplus": lambda x: (1 + x.exp()).log(),
    "floor": lambda x: x - torch.remainder(x, 1),
    "ceil": lambda x: -((-x) - torch.remainder(-x, 1)),
    "round": lambda x: (x + 0.5).floor(),
    "atan": lambda x: torch.atan2(x, torch.ones_like(x)),
    "where": lambda c, a, b: c * a + (1 - c) * b,
}


@pytest.mark.parametrize("fn", ir.FUNCTIONS)
def test_pointwise_broadcasts_by_name(fn):
    args = [param(n, axes) for n, axes in zip("abc", (("t", "k"), ("k",), ("t",)), strict=False)][: ir.FUNCTIONS[fn]]
    a, b, c = randn(4, 3).abs() + 0.1, randn(3).abs() + 0.1, randn(4)
    if fn == "where":
        a = (a > 0.5).double()
    if fn == "eq":
        a[:, 0] = b[0]
    if fn == "log":
        assert_close(run1(ir.pointwise(fn, args[0]), a=a).exp(), a)
    got = run1(ir.pointwise(fn, *args), a=a, b=b, c=c)
    truth = POINTWISE_TRUTH[fn](*[a, b.expand(4, 3), c[:, None].expand(4, 3)][: len(args)])
    assert_close(got, truth.to(torch.float64), rtol=1e-12, atol=1e-12)


def test_meets_by_name_whatever_the_order():
    x, y = param("x", ("t", "k")), param("y", ("k", "t"))
    a, b = randn(4, 3), randn(3, 4)
    assert_close(run1(ir.add(x, y), x=a, y=b), a + b.T)
    assert_close(run1(ir.einsum(x, y, keep=("t",)), x=a, y=b), (a * b.T).sum(1))
    assert_close(run1(ir.einsum(x, y, over=()).replace(axes=("k", "t")), x=a, y=b), a.T * b)


def test_einsum_sums_private_axes():
    x, y = param("x", ("t", "k")), param("y", ("s",))
    a, b = randn(4, 3), randn(5)
    assert_close(run1(ir.einsum(x, y, keep=("t",)), x=a, y=b), a.sum(1) * b.sum())


def test_einsum_refuses_two_lengths_of_one_axis():
    x, y = param("x", ("t", "k")), param("y", ("k",))
    with pytest.raises(GraphError, match="axis k is both 3 and 2 long"):
        run1(ir.einsum(x, y), x=randn(4, 3), y=randn(2))


def test_reduce_expand_rename():
    x = param("x", ("t", "k"))
    a = randn(4, 3)
    assert_close(run1(ir.reduce(x, ("t",)), x=a), a.sum(0))
    assert_close(run1(ir.reduce(x, ("t", "k"), "max"), x=a), a.max())
    y = param("y", ("k",))
    assert_close(run1(ir.expand(y, x), x=a, y=a[0]), a[0].expand(4, 3))
    turned = ir.rename(x, {"t": "k", "k": "t"})
    assert_close(run1(ir.add(x, turned), x=a[:3]), a[:3] + a[:3].T)


def test_gather_and_scatter():
    x = param("x", ("t", "k"))
    a, index = randn(4, 3), (2, 0, 2, 2)
    assert_close(run1(ir.gather(x, "k", "f", index, 3), x=a), a[:, list(index)])
    truth = torch.zeros(6, 3, dtype=torch.float64)
    for i, j in enumerate(index):
        truth[j] += a[i]
    assert_close(run1(ir.scatter(x, "t", "f", index, 6), x=a), truth)
    with pytest.raises(GraphError, match="says 4"):
        run1(ir.gather(x, "k", "f", index, 4), x=a)


@pytest.mark.parametrize("wide", [False, True])
def test_decay_is_a_product_with_exact_resets(wide):
    x = param("x", ("t", "k") if wide else ("t",))
    a = torch.tensor([0.5, 0.0, 0.25, 1.0, 0.0, 3.0], dtype=torch.float64)
    a = torch.stack([a, a.flip(0)], 1) if wide else a
    got = run1(ir.decay(x, "t", "s").replace(axes=("t", "s", *x.axes[1:])), x=a)
    for t in range(6):
        for s in range(6):
            truth = torch.ones_like(a[0])
            for r in range(s + 1, t + 1):
                truth = truth * a[r]
            assert_close(got[t, s], truth if s <= t else torch.zeros_like(a[0]), rtol=0, atol=0)


def test_band_and_unband():
    x = param("x", ("g", "t", "j"))
    a = randn(2, 4, 3)
    banded = ir.band(x, "t", "j", "s", 3)
    got = run1(banded, x=a)
    assert got.shape == (2, 4, 6)
    for t in range(4):
        for s in range(6):
            assert_close(got[:, t, s], a[:, t, s - t] if 0 <= s - t < 3 else torch.zeros(2, dtype=torch.float64))
    assert_close(run1(ir.unband(banded, "t", "j", "s", 3), x=a), a)


@pytest.mark.parametrize("diagonal", [-1, 0, 1])
def test_tril(diagonal):
    x, a = param("x", ("t", "s", "k")), randn(4, 5, 2)
    got = run1(ir.tril(x, "t", "s", diagonal), x=a)
    for t in range(4):
        for s in range(5):
            assert_close(got[t, s], a[t, s] if s <= t + diagonal else torch.zeros(2, dtype=torch.float64))


def test_shift():
    x, fill, a, b = param("x", ("t", "k")), param("fill", ("k", "v")), randn(4, 3), randn(3, 2)
    forward = run1(ir.shift(x, fill, "t").replace(axes=("t", "k", "v")), x=a, fill=b)
    assert_close(forward[0], b)
    assert_close(forward[1:], a[:-1, :, None].expand(3, 3, 2))
    back = run1(ir.shift(x, ir.const(7.0), "t", -1), x=a)
    assert_close(back, torch.cat([a[1:], torch.full((1, 3), 7.0, dtype=torch.float64)]))


@pytest.mark.parametrize("step", [1, 2])
def test_windows_and_fold(step):
    x, a = param("x", ("s", "k")), randn(7, 2)
    node = ir.windows(x, "s", "t", "j", 3, step)
    got = run1(node.replace(axes=("t", "j", "k")), x=a)
    count = (7 - 3) // step + 1
    assert got.shape == (count, 3, 2)
    folded = torch.zeros_like(a)
    for o in range(count):
        assert_close(got[o], a[o * step : o * step + 3])
        folded[o * step : o * step + 3] += a[o * step : o * step + 3]
    assert_close(run1(ir.fold(node, x, node.attrs), x=a), folded)


def test_merge_split_select_place():
    x, a = param("x", ("t", "k", "j")), randn(4, 2, 3)
    merged = ir.merge(x, ("t", "j"), "r", 3)
    assert_close(run1(merged.replace(axes=("r", "k")), x=a), a.transpose(1, 2).reshape(12, 2))
    assert_close(run1(ir.split(merged, "r", ("t", "j"), 3).replace(axes=x.axes), x=a), a)
    for index in (0, -1):
        picked = ir.select(x, "t", index)
        assert_close(run1(picked, x=a), a[index])
        truth = torch.zeros_like(a)
        truth[index] = a[index]
        assert_close(run1(ir.place(picked, x, "t", index), x=a), truth)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("lower_axes, b_axes", [("gij", "gik"), ("gij", "i"), ("ij", "kij"), ("ij", "gi")])
def test_solve(transpose, lower_axes, b_axes):
    sizes = {"g": 2, "i": 5, "j": 5, "k": 3}
    a, r = randn(*(sizes[x] for x in lower_axes)), randn(*(sizes[x] for x in b_axes))
    node = ir.solve(param("lower", tuple(lower_axes)), param("b", tuple(b_axes)), "i", "j", transpose)
    got, out = run1(node, lower=a, b=r), "".join(node.axes)
    matrix = torch.eye(5, dtype=torch.float64) + a.tril(-1)
    matrix = matrix.mT if transpose else matrix
    # q is the row of the product; a column j of b is a right-hand side, not the matrix's j
    rows = lower_axes.replace("i", "q").replace("j", "i")
    back = torch.einsum(f"{rows},{out}->{out.replace('i', 'q')}", matrix, got)
    wide = torch.einsum(f"{b_axes},{lower_axes.replace('i', 'x').replace('j', 'y')}->{out}", r, torch.ones_like(a) / 25)
    assert_close(back, wide)


def test_masked_product():
    z, x, c, d = (param(n, tuple(axes)) for n, axes in zip("zxcd", ("gtk", "gsk", "gts", "gsv"), strict=True))
    values = {"z": randn(2, 3, 4), "x": randn(2, 5, 4), "c": randn(2, 3, 5), "d": randn(2, 5, 2)}
    got = run1(ir.masked_product(z, x, c, d, ("k",), "s"), **values)
    assert_close(got, ((values["z"] @ values["x"].mT) * values["c"]) @ values["d"])


def make_scan(reverse, save):
    """A linear recurrence h = a h + x with output y = h * w."""
    h, x, a, w = param("h", ("k",)), param("x", ("k",)), param("a", ()), param("w", ("k",))
    new = ir.add(ir.mul(a, h), x)
    body = Graph((h, x, a, w), (new, ir.mul(new, w)))
    outer = [param("h0", ("k",)), param("xs", ("n", "k")), param("a", ("n",)), param("w", ("k",))]
    return Graph(tuple(outer), tuple(ir.scan(body, outer[:1], outer[1:3], outer[3:], reverse=reverse, save=save)))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_is_the_loop(reverse):
    inputs = {"h0": randn(3), "xs": randn(5, 3), "a": randn(5), "w": randn(3)}
    final, ys, starts = interpret.run(make_scan(reverse, True), inputs)
    h = inputs["h0"]
    for i in reversed(range(5)) if reverse else range(5):
        assert_close(starts[i], h)
        h = inputs["a"][i] * h + inputs["xs"][i]
        assert_close(ys[i], h * inputs["w"])
    assert_close(final, h)


def test_constants_take_the_type_of_the_inputs():
    x = param("x", ("k",))
    node = ir.add(ir.mul(x, ir.const(2.0)), ir.tensor((1.0, 2.0), ("k",)))
    got = run1(node, x=torch.ones(2, dtype=torch.float32))
    assert_close(got, torch.tensor([3.0, 4.0]))
    assert run1(ir.const(2.5)).dtype == torch.float64


def test_errors_name_the_node():
    x, y = param("x", ("k",)), param("y", ("k",))
    node = ir.add(x, y, name="total").replace(where="layer.memory")
    with pytest.raises(GraphError, match=r"pointwise total.*layer\.memory.*both"):
        run1(node, x=randn(2), y=randn(3))
    with pytest.raises(GraphError, match="no input for parameter 'y'"):
        run1(node, x=randn(2))
    with pytest.raises(GraphError, match="got shape"):
        run1(node, x=randn(2, 2), y=randn(2))
    with pytest.raises(GraphError, match="axis k is 2 long, expected 3"):
        interpret.run(Graph((x,), (x,)), {"x": randn(2)}, {"k": 3})


def test_lifting_gives_every_token_its_own_result():
    f, w = param("f", ("k",)), param("w", ("v", "k"))
    one = Graph((w, f), (ir.rename(ir.pointwise("gelu", ir.einsum(w, f, keep=("v",))), {"v": "k"}),))
    wide = {"w": param("w", ("g", "v", "k")), "f": param("f", ("g", "t", "k"))}
    (lifted,) = ir.inline(one, wide)
    a, b = randn(2, 3, 3), randn(2, 4, 3)
    got = run1(lifted, w=a, f=b)
    assert lifted.axes == ("g", "t", "k")
    for g in range(2):
        for t in range(4):
            assert_close(got[g, t], interpret.run(one, {"w": a[g], "f": b[g, t]})[0])
