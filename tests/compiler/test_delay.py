"""The pass `delay`: what a chunk's last tokens add waits for the next chunk, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.compiler import ir
from memkit.compiler.interpret import run
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes import dedupe, delay, kernel_trick
from memkit.compiler.verify import check
from memkit.specs.layer import LayerSpec
from tests.cases import spec_of

from .agree import compiled

CHUNKS, HEADS, WIDTH = 4, 2, 4
WIDE = {"f": 10_000}  # so many features that delaying what they are added to is worth it


def lowered(spec: LayerSpec) -> tuple[Graph, Graph, dict[str, int]]:
    """A spec's graph over chunks, the same with its wide states delayed, and the lengths of their axes."""
    found = compiled(spec, WIDTH, WIDTH, 64).compiled
    eq, graph = found.equations, dedupe(found.graphs["chunks"].after("lower"))
    after = delay(graph, eq.window, found.chunk, {**eq.sizes, **WIDE})
    lengths = {**eq.sizes, "n": CHUNKS, "g": HEADS, "t": found.chunk, "s": found.chunk + eq.window - 1, "j": eq.window}
    assert eq.features is not None and eq.kernel is not None
    return graph, after if after is graph else kernel_trick(after, eq.features, eq.kernel), lengths


def drawn(graph: Graph, lengths: dict[str, int]) -> dict[str, Tensor]:
    """Inputs in which neighbouring chunks see the same tokens in their windows."""
    torch.manual_seed(0)
    before, chunk = lengths["s"] - lengths["t"], lengths["t"]
    found = {}
    for p in graph.params:
        name, sizes = p.attrs["name"], [lengths[a] for a in p.axes]
        if name in ("keys", "values"):
            whole = torch.randn(HEADS, CHUNKS * chunk + before, WIDTH, dtype=torch.float64)
            x = torch.stack([whole[:, n * chunk : (n + 1) * chunk + before] for n in range(CHUNKS)])
        else:
            x = torch.rand(sizes, dtype=torch.float64) - (0.5 if name.startswith("W") else 0.0)
        found[name] = x / x.norm(dim=-1, keepdim=True) if name in ("q", "keys") else x
    return found


def wide_products(graph: Graph) -> set[tuple[str, ...]]:
    """The token axes of all products in loops that read or write a matrix of wide features."""
    found = set()
    for scan in (n for n in graph.nodes() if n.op is Op.SCAN):
        assert scan.body is not None
        for node in (n for n in scan.body.nodes() if n.op is Op.EINSUM):
            axes = {a for x in (node, *node.args) for a in x.axes}
            if any("f" in x.axes and "e" in x.axes for x in (node, *node.args)):
                found.add(tuple(a for a in ("t", "s", "j") if a in axes))
    return found


@pytest.mark.parametrize(("window", "chunk"), [(2, 6), (5, 6), (6, 5), (5, 2), (8, 1)])
@pytest.mark.parametrize("memory", ["mlp", "gated_mlp"])
def test_results_stay(window: int, chunk: int, memory: str) -> None:
    """Also where a chunk is shorter than its window, and with two wide states."""
    spec = spec_of("omeganet", {"window.size": window, "update.chunk_size": chunk, "memory.kind": memory})
    before, after, lengths = lowered(spec)
    assert after is not before
    check(after, "tensor")
    values = drawn(before, lengths)
    for x, y in zip(run(before, values), run(after, values), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10)


def test_no_product_with_a_wide_state_takes_more_tokens_than_a_chunk_has() -> None:
    before, after, _ = lowered(spec_of("omeganet", {"window.size": 5, "update.chunk_size": 6}))
    assert wide_products(before) == {("t",), ("s",)}
    assert wide_products(after) == {("t",)}


@pytest.mark.parametrize("other", [{"window.size": 1}, {"optimizer": "momentum"}, {"window.size": 2, "update.chunk_size": 16}])
def test_other_loops_stay(other: dict[str, Any]) -> None:
    """Without a window, where slots are updated, which then update the weights, and in chunks that are long beside the window."""
    before, after, _ = lowered(spec_of("omeganet", {"update.chunk_size": 6, **other}))
    assert after is before


def test_a_state_that_is_read_elsewhere_stays() -> None:
    """A result that is the state at a chunk's start would become another."""
    graph, _, lengths = lowered(spec_of("omeganet", {"window.size": 5, "update.chunk_size": 6}))
    (scan,) = (n for n in graph.nodes() if n.op is Op.SCAN)
    assert scan.body is not None
    body = Graph(scan.body.params, (*scan.body.results, scan.body.params[0]))

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        return node.replace(body=body) if node is scan else node if args == node.args else node.replace(args=args)

    more = ir.rebuild(graph, change)
    assert delay(more, 5, 6, {**lengths, **WIDE}) is more
