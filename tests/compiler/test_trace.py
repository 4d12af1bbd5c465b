"""Traced graphs against the functions they come from: values and gradients in float64, and what cannot be traced."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from memkit.compiler import interpret, ir
from memkit.compiler.autodiff import vjp
from memkit.compiler.ir import Graph, Op
from memkit.compiler.trace import Untraceable, trace

SIZES = {"k": 4, "k2": 4, "v": 3, "f": 4, "e": 6, "one": 1}
PAIRS = torch.triu_indices(4, 4)
NEIGHBOURS = torch.tensor([[0, 1], [1, 2]])


def newton(matrix, steps=2):
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * (gram @ gram)) @ x
    return x


def rms(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def in_place(x):
    y = x * 2
    y += 1
    y.mul_(x)
    return y


# name -> (function, axes of its inputs)
CASES = {
    "matrix times vector": (lambda w, x: w @ x, ["vk", "k"]),
    "linear": (lambda w, x: F.linear(x, w), ["vk", "k"]),
    "linear with bias": (lambda w, x, b: F.linear(x, w, b), ["vk", "k", "v"]),
    "einsum": (lambda w, x: torch.einsum("vk,k->v", w, x), ["vk", "k"]),
    "einsum of three": (lambda w, x, y: torch.einsum("vk,k,v->", w, x, y), ["vk", "k", "v"]),
    "two layers": (lambda a, b, f, x: x + b @ F.gelu(a @ f), ["ef", "ke", "f", "k"]),
    "gated layers": (lambda a, c, b, f: b @ (F.silu(a @ f) * (c @ f)), ["ef", "ef", "ve", "f"]),
    "axes that do not match by name": (lambda a, x: torch.tanh(a @ x), ["ef", "k"]),
    "gram": (lambda w: w @ w.T, ["vk"]),
    "gram, other side": (lambda w: w.T @ w @ w.T, ["vk"]),
    "newton schulz": (newton, ["vk"]),
    "dot": (torch.dot, ["k", "k"]),
    "batched": (lambda w, x: torch.bmm(w.expand(2, -1, -1), x.expand(2, 4)[..., None]).sum(0).squeeze(-1), ["vk", "k"]),
    "addmm": (lambda w, x: torch.addmm(w, w, x, beta=2, alpha=3), ["vk", ("k", "k2")]),
    "half squares": (lambda p, v: 0.5 * ((p - v) ** 2).sum(), ["v", "v"]),
    "products": (lambda p, v: -(p * v).sum(), ["v", "v"]),
    "powers": (lambda p, v: ((p - v).abs() ** 3).sum() / 3, ["v", "v"]),
    "two pieces": (
        lambda p, v: torch.where((p - v).abs() <= 0.5, 0.5 * (p - v) ** 2, 0.5 * ((p - v).abs() - 0.25)).sum(),
        ["v", "v"],
    ),
    "huber": (lambda p, v: F.huber_loss(p, v, reduction="sum", delta=0.7), ["v", "v"]),
    "mse": (F.mse_loss, ["v", "v"]),
    "smooth l1": (F.smooth_l1_loss, ["v", "v"]),
    "cross entropy": (lambda p, v: -(F.log_softmax(p, -1) * v).sum(), ["v", "v"]),
    "cosine": (lambda p, v: 1 - F.cosine_similarity(p, v, dim=0), ["v", "v"]),
    "log cosh": (lambda p, v: torch.log(torch.cosh(p - v)).sum(), ["v", "v"]),
    "softmax": (lambda x: torch.softmax(x, -1), ["k"]),
    "softmax of rows": (lambda x: torch.softmax(x, 0), ["vk"]),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), ["vk"]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), ["k", "k", "k"]),
    "layer norm of rows": (lambda x: F.layer_norm(x, (4,)), ["vk"]),
    "rms norm": (lambda x: F.rms_norm(x, (4,)), ["k"]),
    "rms norm by hand": (rms, ["vk"]),
    "normalize": (lambda x: F.normalize(x, dim=-1), ["vk"]),
    "norms": (lambda x: x.norm() + x.norm(1) + x.norm(3) + x.norm(float("inf")), ["k"]),
    "norm of rows": (lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True) * x, ["vk"]),
    "moments": (lambda x: x.std() + x.var(0).sum() + x.var(unbiased=False) + x.mean() + x.std(1, True), ["vk"]),
    "extremes": (lambda x: x.max() + x.min() + x.amax(0).sum() + x.max(1).values.sum() + x.amin((0, 1)), ["vk"]),
    "sums": (lambda x: x.sum(0, keepdim=True) * x.sum() + x.sum((0, 1)), ["vk"]),
    "sum of a repeated dimension": (lambda x: x[None].expand(5, 4).sum(0) + x.expand(3, 4).mean(0), ["k"]),
    "product over a repeated dimension": (lambda x: torch.dot(x.sum().expand(4), torch.ones(4).to(x)) * x, ["k"]),
    "activations": (
        lambda x: (
            F.elu(x)
            + F.relu(x)
            + F.softplus(x)
            + F.hardtanh(x)
            + F.logsigmoid(x)
            + F.mish(x)
            + F.selu(x)
            + F.leaky_relu(x)
            + F.celu(x, 0.5)
            + F.softsign(x)
            + F.hardswish(x)
            + F.silu(x)
            + F.gelu(x)
        ),
        ["k"],
    ),
    "tanh gelu": (lambda x: F.gelu(x, approximate="tanh"), ["k"]),
    "softplus with beta": (lambda x: F.softplus(x, beta=2.0), ["k"]),
    "functions": (
        lambda x: (
            x.exp()
            + x.expm1()
            + x.sin()
            + x.cos()
            + x.tan()
            + x.sinh()
            + x.cosh()
            + x.tanh()
            + x.erf()
            + x.erfc()
            + x.atan()
            + x.sigmoid()
            + x.abs()
            + x.sign()
            + x.square()
            + x.floor()
            + x.ceil()
            + x.round()
            + torch.exp2(x)
        ),
        ["k"],
    ),
    "functions of positive values": (
        lambda x: (
            (y := x * x + 0.5).log()
            + y.sqrt()
            + y.rsqrt()
            + y.reciprocal()
            + y.log1p()
            + y.log2()
            + y.log10()
            + y**0.5
            + y**-1.5
            + 2**x
            + y**x
            + 1 / y
            + y**2
            + y**-1
        ),
        ["k"],
    ),
    "arithmetic": (lambda x, y: 1 - x + y / 3 - 2 * x + torch.add(x, y, alpha=2) - torch.sub(x, y, alpha=3), "kk"),
    "bounds": (lambda x: x.clamp(min=0) + x.clamp(-0.5, 0.5) + x.clamp(max=0.1) + torch.maximum(x, x * x), ["k"]),
    "flags": (
        lambda x, y: ((x > 0) & ~(y > 0)).to(x.dtype) + torch.logical_or(x > y, x == y) * x + (x != y) * y + x.masked_fill(x < 0, 2.0),
        ["k", "k"],
    ),
    "where with numbers": (lambda x: torch.where(x > 0, x, 0.0) + torch.where(x > 0, 1.0, x), ["k"]),
    "monomials": (lambda x: torch.outer(x, x)[PAIRS[0], PAIRS[1]], ["k"]),
    "monomials, flat": (lambda x: torch.outer(x, x).flatten()[[0, 1, 5]], ["k"]),
    "monomials, inside": (lambda x: torch.outer(x, x)[torch.triu_indices(4, 4).unbind()], ["k"]),
    "monomials of degree 3": (
        lambda x: (p := torch.cat([x, torch.ones_like(x[:1])]))[[0, 1, 4]] * p[[0, 4, 4]] * torch.tensor([1.0, 2, 3]),
        ["k"],
    ),
    "pairs one by one": (lambda x: torch.stack([x[i] * x[j] for i in range(4) for j in range(i, 4)]), ["k"]),
    "joined": (lambda x, y: torch.cat([x, y.square(), torch.ones(2)]), ["k", "v"]),
    "joined rows": (lambda w, x: torch.cat([w, x[None]]), ["vk", "k"]),
    "joined columns": (lambda w, y: torch.cat([w, y[:, None], w], 1), ["vk", "v"]),
    "entries": (lambda x: x[0] + x[-1] * x[1] + x[1:3].sum() + x[::2].sum() + x[[True, False, True, False]].sum(), "k"),
    "entries of a matrix": (lambda w: w[1] * w[:, 2].sum() + w[:, 1:3].sum() + w[NEIGHBOURS].sum((0, 1)), ["vk"]),
    "parts": (lambda x: (p := x.chunk(2))[0] * p[1] + x.split([1, 3])[1].sum() + x.unbind()[2], ["k"]),
    "reversed": (lambda x: x.flip(0) * x, ["k"]),
    "shapes": (lambda w: w.reshape(2, 6).sum(0).view(3, 2) @ w.reshape(-1)[:2], ["vk"]),
    "reshaped to and fro": (lambda w: w.T.reshape(2, 2, 3).permute(2, 0, 1).flatten(1) * w, ["vk"]),
    "added dimensions": (lambda x, y: (x[:, None] * y[None, :]).sum(0) + (x[None] + y.unsqueeze(1)).sum(1), ["k", "v"]),
    "lower triangle": (lambda w: (w @ w.T).tril(-1) + (w @ w.T).triu(), ["vk"]),
    "outer product": (lambda y, x: -torch.outer(y, x), ["v", "k"]),
    "transposed result": (lambda w: w.T, ["vk"]),
    "constant matrix": (lambda x: torch.arange(12).to(x).view(3, 4) @ x + torch.eye(3).to(x) @ x[:3], ["k"]),
    "constant vector first": (lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x, ["k"]),
    "axis of length one": (lambda w, x: (w @ x) + x.sum() * w.squeeze(0).sum(), [("one", "k"), "k"]),
    "repeated length one": (lambda w, x: w * x + w.expand(3, 4), [("one", "k"), "k"]),
    "in place on a fresh tensor": (in_place, ["k"]),
    "number": (lambda x: x * math.pi, ["k"]),
    "an input as it is": (lambda x, y: (x, x + y, y), ["k", "k"]),
    "constant result": (lambda x: (torch.zeros_like(x), torch.ones(2), torch.tensor(3.0)), ["k"]),
    "scalar gate": (lambda w, a: a * w, ["vk", ""]),
    "channel gate": (lambda w, a: w * a, ["vk", "k"]),
}


def named(axes):
    return {f"x{i}": tuple(a) for i, a in enumerate(axes)}


def samples(axes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn([SIZES[a] for a in group], generator=generator, dtype=torch.float64) for group in axes]


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    fn, axes = CASES[case]
    graph = trace(fn, named(axes), SIZES)
    values = [x.requires_grad_() for x in samples(axes, 7)]
    expected = [r.double() for r in as_tuple(fn(*values))]
    inputs = {p.attrs["name"]: x.detach() for p, x in zip(graph.params, values, strict=True)}
    got = interpret.run(graph, inputs)
    for node, a, b in zip(graph.results, got, expected, strict=True):
        assert len(node.axes) == b.ndim
        assert_close(a, b.detach(), rtol=1e-10, atol=1e-10)
    live = [(n, r) for n, r in zip(graph.results, expected, strict=True) if r.requires_grad]
    if not live:
        return
    seeds = [torch.cos(torch.arange(r.numel()).double()).view_as(r) for _, r in live]
    truth = torch.autograd.grad([r for _, r in live], values, seeds, allow_unused=True)
    cots = [ir.param(f"cot{i}", n.axes) for i, (n, _) in enumerate(live)]
    grads = vjp([n for n, _ in live], cots, graph.params)
    inputs |= {c.attrs["name"]: s for c, s in zip(cots, seeds, strict=True)}
    for node, grad, want in zip(graph.params, grads, truth, strict=True):
        if grad is None:
            assert want is None or not want.any()
            continue
        (value,) = interpret.run(Graph((*graph.params, *cots), (grad,)), inputs)
        value = value.permute([grad.axes.index(a) for a in node.axes])
        assert_close(value, torch.zeros_like(value) if want is None else want, rtol=1e-9, atol=1e-9)


KINKS = {
    "relu": F.relu,
    "leaky": F.leaky_relu,
    "clamp": lambda x: x.clamp(-1, 1),
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "abs": torch.abs,
    "norm": torch.norm,
    "std": torch.std,
    "norm of rows": lambda x: x.view(2, 3).norm(dim=1),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "extreme": torch.amax,
    "cube": lambda x: x**3,
    "power": lambda x: x.abs() ** 2.5,
}


@pytest.mark.parametrize("case", KINKS)
@pytest.mark.parametrize("point", [0.0, 1.0, -1.0])
def test_gradients_at_kinks_are_torchs(case, point):
    fn = KINKS[case]
    graph = trace(fn, {"x": ("e",)}, SIZES)
    x = torch.full((6,), point, dtype=torch.float64, requires_grad=True)
    out = fn(x)
    (truth,) = torch.autograd.grad(out.sum(), x)
    (grad,) = vjp(graph.results, [ir.expand(ir.const(1.0), graph.results[0])], graph.params)
    assert grad is not None
    assert_close(interpret.run(Graph(graph.params, (grad,)), {"x": x.detach()})[0], truth)


def ops(graph):
    return [n.attrs["fn"] if n.op is Op.POINTWISE else n.op.value for n in graph.nodes() if n.op is not Op.PARAM]


def test_transposes_and_views_leave_no_trace():
    inputs = {"w": ("v", "k"), "x": ("k",)}
    graph = trace(lambda w, x: (w.T.contiguous().T @ x.view(1, 4).squeeze(0)).clone(), inputs, SIZES)
    assert ops(graph) == ["einsum"]
    assert graph.results[0].axes == ("v",)


def test_a_summed_product_is_a_contraction():
    for fn in (lambda p, v: (p * v).sum(), lambda p, v: -(p * v).sum(), lambda p, v: 0.5 * (p * v).sum()):
        assert "einsum" in ops(trace(fn, {"p": ("v",), "v": ("v",)}, SIZES))
        assert "reduce" not in ops(trace(fn, {"p": ("v",), "v": ("v",)}, SIZES))


def test_the_first_operand_names_the_axes():
    graph = trace(lambda x, y: x + y, {"x": ("k",), "y": ("f",)}, SIZES)
    assert graph.results[0].axes == ("k",)
    graph = trace(lambda y: torch.arange(4.0) * y, {"y": ("f",)}, SIZES)
    assert graph.results[0].axes == ("f",)


def test_gelu_and_silu_stay_whole():
    assert ops(trace(lambda x: F.gelu(F.silu(x)), {"x": ("k",)}, SIZES)) == ["silu", "gelu"]


def test_labels_and_several_results():
    graph = trace(lambda x: (x * 2, x.sum()), {"x": ("k",)}, SIZES, labels=("twice", "total"))
    assert graph.labels == ("twice", "total") and [r.axes for r in graph.results] == [("k",), ()]


def aliased(x):
    y = torch.zeros_like(x)
    y[0] = x[1]
    return y


def written_under_a_view(x):
    y = x * 2
    z = y[:2]
    y.mul_(3)
    return z


UNTRACEABLE = {
    "branch": (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense|is_nonzero"),
    "item": (lambda x: x * x[0].item(), "_local_scalar_dense|item"),
    "random": (lambda x: x + torch.randn(4), "randn"),
    "dropout": (lambda x: F.dropout(x), "bernoulli|dropout"),
    "sorted": (lambda x: x.sort().values, "sort"),
    "own index": (lambda x: x[x.argmax()], "argmax"),
    "second result": (lambda x: x * x.max(0).indices, "second result of max"),
    "written into": (aliased, "no writing into tensors"),
    "written into under a view": (written_under_a_view, "no writing into tensors"),
    "numpy": (lambda x: x * float(x.numpy()[0] > 0), "no operation on tensors|detach"),
    "list": (lambda x: x * sum(x.tolist()), "a step that is no operation on tensors"),
    "detached": (lambda x: x.detach() * x, "detach"),
    "whole numbers": (lambda x: x.long() * x, "int64"),
}


@pytest.mark.parametrize("case", UNTRACEABLE)
def test_untraceable(case):
    fn, message = UNTRACEABLE[case]
    with pytest.raises(Untraceable, match=message):
        trace(fn, {"x": ("k",)}, SIZES)


def test_untraceable_says_what_would_work():
    with pytest.raises(Untraceable) as error:
        trace(lambda x: x.sort().values, {"x": ("k",)}, SIZES)
    assert error.value.step == "sort" and "what works:" in str(error.value)


def test_errors_of_the_function_itself_come_through():
    def wrong(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(wrong, {"x": ("k",)}, SIZES)
