"""What products leave out is zero, whatever goes in."""

from __future__ import annotations

import pytest
import torch

from memkit.compiler import ir
from memkit.compiler.interpret import run
from memkit.compiler.ir import Graph, Node
from memkit.compiler.native.zeros import Strip, strip

T, S, C = 7, 9, 3


def matrices() -> dict[str, tuple[Node, str, str, Strip]]:
    """A matrix, its axes, and where it may differ from zero."""
    decay = ir.decay(ir.param("x", ("t",)), "t", "s")
    band = ir.band(ir.param("w", ("u", "j")), "u", "j", "r", C)
    across = ir.rename(decay, {"t": "s", "s": "u"})
    step = ir.mul(across, ir.param("step", ("u",)))
    corner = ir.tril(ir.param("m", ("t", "s")), "t", "s", -2)
    product = ir.einsum(decay, step, ("t", "u"))
    return {
        "decay": (decay, "t", "s", Strip(most=0)),
        "decay, turned": (decay, "s", "t", Strip(least=0)),
        "band": (band, "u", "r", Strip(0, C - 1)),
        "band, turned": (band, "r", "u", Strip(1 - C, 0)),
        "below a diagonal": (corner, "t", "s", Strip(most=-2)),
        "renamed and scaled": (step, "s", "u", Strip(most=0)),
        "a product of two": (product, "t", "u", Strip(most=0)),
        "a product with a band": (ir.einsum(product, band, ("t", "r")), "t", "r", Strip(most=C - 1)),
        "a sum": (ir.add(decay, corner), "t", "s", Strip(most=0)),
        "entry by entry": (ir.mul(ir.neg(decay), corner), "t", "s", Strip(most=-2)),
        "over another": (ir.pointwise("div", corner, ir.param("d", ("t", "s"))), "t", "s", Strip(most=-2)),
        "both sides": (ir.mul(decay, ir.rename(decay, {"t": "s", "s": "t"})), "t", "s", Strip(0, 0)),
        "a sum with any": (ir.add(decay, ir.param("m", ("t", "s"))), "t", "s", Strip()),
        "exp": (ir.pointwise("exp", corner), "t", "s", Strip()),
        "one axis": (decay, "t", "v", Strip()),
    }


@pytest.mark.parametrize("case", matrices())
def test_where_entries_differ_from_zero(case: str) -> None:
    node, row, col, want = matrices()[case]
    assert strip(node, row, col) == want
    if want == Strip():
        return
    graph = Graph(tuple(n for n in ir.Graph((), (node,)).nodes() if n.op is ir.Op.PARAM), (node,))
    sizes = {"t": T, "s": T, "u": T, "j": C, "r": T + C - 1}
    inputs = {p.attrs["name"]: 1 + torch.rand([sizes[a] for a in p.axes], dtype=torch.float64) for p in graph.params}
    found = run(graph, inputs, sizes)[0]
    found = found if node.axes == (row, col) else found.T
    rows, cols = torch.meshgrid(*(torch.arange(n) for n in found.shape), indexing="ij")
    inside = (cols - rows >= want.least) & (cols - rows <= want.most)
    assert (found[~inside] == 0).all() and (found[inside] != 0).all()
