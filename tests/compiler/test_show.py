"""The printed form, whole."""

from memkit.compiler import ir
from memkit.compiler.ir import Graph, param
from memkit.compiler.show import show

X, W = param("x", ("g", "t", "k")), param("w", ("g", "v", "k"))


def test_plain_nodes():
    product = ir.einsum(W, X, over=("k",), name="p").replace(where="layer.memory")
    node = ir.mul(ir.const(0.5), ir.pointwise("gelu", product), name="h")
    graph = Graph((X, W), (node, ir.const(2.0)), ("y", "two"))
    assert show(graph) == (
        "%0 : [g,t,k] = param(name=x)\n"
        "%1 : [g,v,k] = param(name=w)\n"
        "%2 p : [g,t,v] = einsum(%1, %0)   # layer.memory\n"
        "%3 : [g,t,v] = gelu(%2)\n"
        "%4 h : [g,t,v] = mul(0.5, %3)\n"
        "return y=%4, two=2\n"
    )


def test_attributes():
    nodes = [
        ir.reduce(X, ("t", "k"), "max"),
        ir.rename(X, {"k": "f", "t": "u"}),
        ir.gather(X, "k", "f", range(14), 3),
        ir.tensor(((1.0, 2.5), (0.0, -1.0)), ("a", "b")),
        ir.decay(ir.select(X, "k", -1), "t", "s"),
    ]
    assert show(Graph((X,), tuple(nodes))) == (
        "%0 : [g,t,k] = param(name=x)\n"
        "%1 : [g] = max(%0, over=(t k))\n"
        "%2 x : [g,u,f] = rename(%0, k->f t->u)\n"
        "%3 : [g,t,f] = gather(%0, axis=k, new=f, index=(0 1 2 3 4 5 6 7 8 9 10 11 ..14), size=3)\n"
        "%4 : [a,b] = tensor(values=((1 2.5) (0 -1)))\n"
        "%5 : [g,t] = select(%0, axis=k, index=-1)\n"
        "%6 : [g,t,s] = decay(%5, axis=t, new=s)\n"
        "return %1, %2, %3, %4, %6\n"
    )


def test_loops_are_indented_with_numbers_of_their_own():
    h, x, a = param("h", ("k",)), param("x", ("k",)), param("a", ())
    body = Graph((h, x, a), (ir.add(ir.mul(a, h), x), h))
    outer = [param("h0", ("k",)), param("xs", ("n", "k")), param("a", ())]
    final, ys, starts = ir.scan(body, outer[:1], outer[1:2], outer[2:], reverse=True, save=True)
    assert show(Graph(tuple(outer), (final, ys, starts))) == (
        "%0 : [k] = param(name=h0)\n"
        "%1 : [n,k] = param(name=xs)\n"
        "%2 : [] = param(name=a)\n"
        "%3 = scan over n reverse save (%0; %1; %2)\n"
        "    %0 : [k] = param(name=h)\n"
        "    %1 : [k] = param(name=x)\n"
        "    %2 : [] = param(name=a)\n"
        "    %3 : [k] = mul(%2, %0)\n"
        "    %4 : [k] = add(%3, %1)\n"
        "    return %4, %0\n"
        "%4 : [k] = get(%3, index=0)\n"
        "%5 h : [n,k] = get(%3, index=1)\n"
        "%6 h : [n,k] = get(%3, index=2)\n"
        "return %4, %5, %6\n"
    )
