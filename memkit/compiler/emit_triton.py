"""The emitted Triton module: kernels, and for every graph a function that makes the arrays they share and launches them in order.

Where it sits: beside `assemble` and `emit_torch`; `launch` runs what is written here. No file of this kind imports triton.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import runtime, runtime_triton
from .backward import backward
from .build import Equations
from .ir import Graph, in_order
from .kernels import functions
from .kernels.layout import EVERY, Layout
from .kernels.lengths import Lengths, lengths, start
from .kernels.memory import Buffer
from .kernels.settings import Configs, configs_for
from .kernels.text import FIRST, Source, kernel_sources, wrapped
from .passes import BACKWARD, lodge


@dataclass(frozen=True)
class Function:
    """One emitted function: its kernels and what comes in and out. `results` are those a caller sees; saved values follow them."""

    name: str
    layout: Layout
    sources: tuple[Source, ...]
    results: int


@dataclass(frozen=True)
class KernelModule:
    """The source of a rule's kernels, and its functions: chunks, chunks_saving, chunks_backward, perhaps the same for resume."""

    source: str
    functions: Mapping[str, Function]


def kernel_module(
    eq: Equations, plan: str, title: str, graphs: Mapping[str, Graph], chunk: int, configs: Configs | None = None, parallel: bool = True
) -> KernelModule:
    """Kernels for `graphs`, the last stages of a plan's. parallel: matrices for every chunk are made before the loop, not in it."""
    configs = configs or configs_for(plan, "sm_90", False, max(eq.sizes.values()), chunk)
    given = start(eq.sizes, eq.window)
    tables: dict[tuple, str] = {}
    made: dict[str, Function] = {}
    for name, graph in graphs.items():
        params = [p.attrs["name"] for p in graph.params]
        forward, back = backward(graph, params)
        for step in BACKWARD:
            back = step(back)
        plain = graph
        if not parallel:
            plain, forward, back = lodge(graph), lodge(forward), lodge(back)
        axes = {p.attrs["name"]: p.axes for p in graph.params}
        back = Graph(back.params, tuple(in_order(r, axes[n]) for r, n in zip(back.results, back.labels, strict=True)), back.labels)
        known: dict[str, Lengths] = {p.attrs["name"]: given for p in graph.params}
        made[name] = _function(name, plain, known, chunk, configs, tables, len(graph.results), {})
        saving = _function(f"{name}_saving", forward, known, chunk, configs, tables, len(graph.results), {})
        made[saving.name] = saving
        places = {label: place for label, place, _ in saving.layout.results() if label.startswith("saved_")}
        found = lengths(forward, [given] * len(forward.params))
        for label, node in zip(forward.labels, forward.results, strict=True):
            known[label if label.startswith("saved_") else f"grad_{label}"] = found[node]
        made[f"{name}_backward"] = _function(f"{name}_backward", back, known, chunk, configs, tables, len(back.results), places)
    return KernelModule(_module(eq, plan, title, chunk, made, tables), made)


def _function(
    name: str, graph: Graph, known: Mapping[str, Lengths], chunk: int, configs: Configs, tables: dict[tuple, str], results: int,
    places: Mapping[str, Buffer],
) -> Function:  # fmt: skip
    layout = Layout(graph, known, chunk, places)
    layout.names |= set(tables.values())
    sources: list[Source] = []
    for kernel in layout.kernels:
        sources += kernel_sources(layout, kernel, name, len(sources), configs.each if kernel.kind == EVERY else configs.loop, tables)
    return Function(name, layout, tuple(sources), results)


# ---- text


def _module(eq: Equations, plan: str, title: str, chunk: int, made: Mapping[str, Function], tables: Mapping[tuple, str]) -> str:
    helpers = {h for f in made.values() for s in f.sources for h in s.helpers}
    parts = [head(eq, plan, title, chunk), _tables(tables), functions.definitions(helpers)]
    parts += [inspect.getsource(f) for f in (runtime_triton.programs, runtime_triton.outside)]
    for function in made.values():
        parts += [s.text for s in function.sources]
        parts.append(_wrapper(function))
    surround = [
        runtime.pieces,
        runtime.blocks,
        runtime.in_sequence,
        *(getattr(runtime_triton, n) for n in ("view_chunks", "view_windows", "run_views", "from_views", "pack_views")),
    ]
    parts += [inspect.getsource(f) for f in surround]
    return "\n\n".join(p.strip("\n") + "\n" for p in parts if p.strip())


def head(eq: Equations, plan: str, title: str, chunk: int) -> str:
    spec = eq.rule.spec
    gates = [n for n in spec.roles() if n not in eq.rule.constants or (n == "window_gate" and eq.window > 1)]
    params = {n: tuple(eq.sizes[a] for a in axes) for n, axes in zip(eq.rule.init_params(), eq.params.values(), strict=True)}
    rule = {
        "window": eq.window, "chunk": chunk, "semantic": eq.grad_at == "chunk", "gates": tuple(gates),
        "weights": tuple(n for n in eq.weights if n not in eq.infinite), "slots": eq.slots, "params": params,
    }  # fmt: skip
    sizes = ", ".join(f"{axis}={size}" for axis, size in eq.sizes.items())
    rows = [
        f'"""{title}: Triton kernels of plan {plan}, {sizes}.', "",
        "N chunks of LT tokens each (a short last chunk is a call of its own), g = b * H + h. t and u are tokens of a chunk, s the",
        "same with the window's in front. What a program keeps for itself lies in `scratch` (called mine), what kernels share in arrays",
        "of their own; both are F, and results that are sequences X. Products take operands of the type they name (D, as sequences",
        "come, or F) with precision P, triangular systems are solved in F with precision S. nought is always 0, but given at run time,",
        "and nil a 0 of one step: added to addresses, they keep the compiler from making all of them first and holding them in registers.",
        "The parts of a long kernel go on in the same scratch, for the items from `first` on.",
        '"""',
        "",
        "import torch", "import triton", "import triton.language as tl", "from torch import Tensor", "",
        f"SCRATCH = {runtime_triton.SCRATCH}  # bytes that one kernel's programs may keep in float32",
        f"BLOCK = {runtime.BLOCK}", "RULE = {",
        *(f"    {key!r}: {value!r}," for key, value in rule.items()), "}",
    ]  # fmt: skip
    return "\n".join(rows)


def _tables(tables: Mapping[tuple, str]) -> str:
    lines = []
    for (kind, values), name in tables.items():
        dtype = "torch.float64" if kind == "number" else "torch.int32"
        literal = textwrap.fill(repr(values), 116, initial_indent="    ", subsequent_indent="    ")
        lines.append(f"{name} = torch.tensor(\n{literal},\n    dtype={dtype},\n)")
    return "\n".join(lines)


def _wrapper(function: Function) -> str:
    layout, name = function.layout, function.name
    params = [p.attrs["name"] for p in layout.graph.params]
    labels = [label for label, _, _ in layout.results()]
    what = "Gradients of " if name.endswith("_backward") else ""
    if name.startswith("resume") and any(p.startswith("anchor_") for p in params):
        what = f"In a begun chunk, where anchor_* is the memory at its start. {what}"
    lines = [
        f"def {name}({', '.join(params)}, sizes, X, how):",
        f'    """{what}{", ".join(labels)}. sizes: (N, B, H, LT); X: type of sequences; how: D, F, P, S and `constant`."""',
        "    N, B, H, LT = sizes", "    G, like, F = B * H, " + f"{params[0]}, how.number",
    ]  # fmt: skip
    written = {layout.placed[node].name: label for label, _, node in layout.results()}
    for array in layout.arrays:
        shape = f"{', '.join(array.sizes)}{',' if len(array.sizes) == 1 else ''}"
        if array.kind == "result":
            axes = tuple(x for a in array.axes for x in (("b", "h") if a == "g" else (a,)))
            dtype = "X" if written[array.name] in ("y", "q", "keys", "values") else "F"
            lines.append(f"    {array.name} = outside(like, {dtype}, {axes!r}, {shape})")
        else:
            lines.append(f"    {array.name} = torch.empty(({shape}), device=like.device, dtype=F)")
    for i, source in enumerate(function.sources):
        if source.part[0] == 0:
            lines += _launch(function.sources[i : i + source.part[1]])
    lines.append(f"    return ({', '.join(_returned(layout))},)")
    return "\n".join(lines)


def _launch(parts: Sequence[Source]) -> list[str]:
    """One kernel; or the parts of one, which go together through as many items as have scratch at once."""
    source = parts[0]
    items = "N * G" if source.kind == EVERY else "G"
    axis = source.split
    splits = -(-axis[2] // axis[1]) if axis else 1
    lines = [f"    grid = programs({items}, {source.scratch}, {splits})"]
    scratch = f"torch.empty(grid[0] * grid[1] * {source.scratch}, device=like.device, dtype=F)" if source.scratch else "like"
    if len(parts) == 1:
        return lines + _call(source, "grid", [scratch])
    lines += [
        f"    scratch = {scratch}",
        f"    for first in range(0, {items}, grid[0]):",
        f"        some = (min(grid[0], {items} - first),)",
    ]
    for part in parts:
        lines += ["    " + x for x in _call(part, "some", [FIRST, "scratch"])]
    return [*lines, "    del scratch"]


def _call(source: Source, grid: str, numbers: Sequence[str]) -> list[str]:
    names = {v for v in source.tables.values()}
    arguments = [f"how.constant({p}, like)" if p in names else p for p in source.pointers if p != "mine"]
    seen = dict.fromkeys(s.rsplit("_", 1)[0] for s in source.strides if s != FIRST)
    arguments += [*(f"*{p}.stride()" for p in seen), *numbers, "G", "H", "N", "LT", "0"]
    c = source.config
    arguments += ["D=how.D", "F=how.F", "P=how.P", "S=how.S", *(f"{name}={number}" for name, number in c.options().items())]
    return [f"    {source.name}[{grid}](", *("    " + x for x in wrapped(arguments)), "    )"]


def _returned(layout: Layout) -> Sequence[str]:
    """What a function returns for each result: an array, or the last slot of one with the batch and head axes apart."""
    kinds = {a.name: a for a in layout.arrays}
    found = []
    for label, place, _ in layout.results():
        array = kinds[place.name]
        if array.kind == "carry" and not label.startswith("saved_"):
            axis = array.axes[0]
            count = {"n": "N", "t": "LT"}.get(axis, axis)
            last = count if array.sizes[0 if axis == "n" else 1] not in ("2",) else f"{count} % 2"
            rest = ", ".join(array.sizes[2:])
            found.append(f"{array.name}[{last if axis == 'n' else ':, ' + last}].reshape(B, H, {rest}).clone()")
        else:
            found.append(array.name)
    return found
