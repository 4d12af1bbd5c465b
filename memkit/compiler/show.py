"""A graph as text, one line a node: the only printer, for reading, golden tests and comparing two graphs.

    %3 C : [n,g,t,s] = einsum(%1, %2)   # layer.window

Numbers are written where they are used. A loop's body follows its line, indented, with numbers of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memkit.compiler.ir import Graph, Node, Op

LONG = 12  # entries of an array or index that are printed


def show(graph: Graph) -> str:
    """The text of `graph`, ending with its results."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> list[str]:
    nodes = [n for n in graph.nodes() if n.op is not Op.CONST]
    names = {node: f"%{i}" for i, node in enumerate(nodes)}
    lines: list[str] = []
    for node in nodes:
        hint = f" {node.name}" if node.name and node.op is not Op.PARAM else ""
        axes = "" if node.op is Op.SCAN else f" : [{','.join(node.axes)}]"
        origin = f"   # {node.where}" if node.where else ""
        lines.append(f"{names[node]}{hint}{axes} = {_call(node, names)}{origin}")
        if node.body is not None:
            lines += [f"    {line}" for line in _lines(node.body)]
    labels = graph.labels or ("",) * len(graph.results)
    results = [f"{label}={_ref(r, names)}".lstrip("=") for label, r in zip(labels, graph.results, strict=True)]
    return [*lines, f"return {', '.join(results)}"]


def _ref(node: Node, names: Mapping[Node, str]) -> str:
    return f"{node.attrs['value']:g}" if node.op is Op.CONST else names[node]


def _call(node: Node, names: Mapping[Node, str]) -> str:
    """`operation(operands, attribute=value)`, a pointwise function or reduction under its own name."""
    attrs = dict(node.attrs)
    head = attrs.pop("fn") if node.op is Op.POINTWISE else node.op.value
    if node.op is Op.REDUCE:
        head = attrs.pop("fn")
    args = [_ref(a, names) for a in node.args]
    if node.op is Op.SCAN:
        operands = "; ".join(", ".join(part) for part in _parts(args, attrs))
        return f"scan over {attrs['axis']}{_flags(attrs)} ({operands})"
    return f"{head}({', '.join([*args, *(_attribute(k, v) for k, v in attrs.items())])})"


def _flags(attrs: Mapping[str, Any]) -> str:
    return "".join(f" {flag}" for flag in ("reverse", "save") if attrs[flag])


def _parts(args: list[str], attrs: Mapping[str, Any]) -> tuple[list[str], ...]:
    """The operands of a loop: carries; slices; constants."""
    k, m = attrs["carries"], attrs["slices"]
    return args[:k], args[k : k + m], args[k + m :]


def _attribute(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{old}->{new}" for old, new in value.items())
    return f"{key}={_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        shown = [_value(v) for v in value[:LONG]]
        rest = [f"..{len(value)}"] if len(value) > LONG else []
        return f"({' '.join([*shown, *rest])})"
    return f"{value:g}" if isinstance(value, float) else str(value)
