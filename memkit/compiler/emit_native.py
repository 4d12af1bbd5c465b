"""The emitted C++ of a rule: for every graph a function forward, one that also saves, and one backward, all chunks in one loop.

Where a state goes round the chunks there are two more: `thin` saves as `saving` does, but not the states; `states` makes these again.

Where it sits: beside `emit_triton`; `native_build` compiles what is written here, `native_rule` runs it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from .assemble import laid_out, worth_keeping
from .backward import backward
from .build import Equations
from .checkpoints import checkpoints
from .emit_values import short_runs
from .ir import Graph
from .kernels.lengths import Lengths, lengths, start
from .native.entries import number
from .native.team import parted
from .native.text import Source, source
from .passes import absorb, dedupe, fold, gram, prune, settle
from .symmetric import SYMMETRIC

PASSES = (fold, dedupe, prune, settle, fold, dedupe, absorb)  # all else stays in the loop over chunks: what a chunk computes, in the cache


@dataclass(frozen=True)
class NativeModule:
    """The C++ of a rule. head: what all functions need; functions: chunks, chunks_saving, chunks_backward, chunks_thin, .."""

    head: str
    functions: Mapping[str, Source]
    results: Mapping[str, int]  # of a forward function; saved values follow
    stacks: Mapping[str, Mapping[str, str]]  # by forward function with a thin one: label of a stack of states -> the state's name

    @property
    def source(self) -> str:
        """All of it, to be read."""
        return "\n".join([self.head, *(f.text for f in self.functions.values())])

    def unit(self, name: str) -> str:
        """The source of one function."""
        return f"{self.head}\n{self.functions[name].text}"


def native_module(eq: Equations, plan: str, title: str, graphs: Mapping[str, Graph], chunk: int) -> NativeModule:
    """C++ for `graphs`, the first stages of a plan's."""
    given = start(eq.sizes, eq.window)
    tables: dict[tuple, str] = {}
    made: dict[str, Source] = {}
    counts: dict[str, int] = {}
    stacks: dict[str, Mapping[str, str]] = {}
    for name, graph in graphs.items():
        graph = gram(passed(graph), eq.sizes)
        graph = parted(graph, [given] * len(graph.params), chunk)
        params = [p.attrs["name"] for p in graph.params]
        forward, back = backward(graph, params, worth_keeping, SYMMETRIC)
        back = laid_out(passed(back), {p.attrs["name"]: p.axes for p in graph.params})
        known: dict[str, Lengths] = {p.attrs["name"]: given for p in graph.params}
        made[name] = source(graph, name, known, chunk, tables)
        made[f"{name}_saving"] = source(forward, f"{name}_saving", known, chunk, tables)
        found = lengths(forward, [given] * len(forward.params))
        for label, node in zip(forward.labels, forward.results, strict=True):
            known[label if label.startswith("saved_") else f"grad_{label}"] = found[node]
        back = parted(back, [known[p.attrs["name"]] for p in back.params], chunk)
        made[f"{name}_backward"] = source(back, f"{name}_backward", known, chunk, tables)
        few = checkpoints(forward)
        if few is not None:
            stacks[name] = few.stacks
            for kind, one in (("thin", few.thin), ("states", few.states)):
                made[f"{name}_{kind}"] = source(one, f"{name}_{kind}", known, chunk, tables)
        counts[name] = len(graph.results)
    return NativeModule(_head(eq, plan, title, tables), made, counts, stacks)


def passed(graph: Graph) -> Graph:
    for step in PASSES:
        graph = step(graph)
    return graph


def _head(eq: Equations, plan: str, title: str, tables: Mapping[tuple, str]) -> str:
    sizes = ", ".join(f"{axis} = {size}" for axis, size in eq.sizes.items())
    head = [
        f"// {title}: plan {plan}, {sizes}.",
        "// Arrays: n chunks, g = batch * heads, t tokens of a chunk, s the same with the window's in front; N, G and LT are how many.",
        "// Every head is a loop over chunks. The members of a team share its steps: part(size, member, members) is where a share begins.",
        "// What a head keeps for itself lies in `mine`, `room` is for product, which adds A[m, k] B[k, n] to C[m, n] or writes it there:",
        "// product(M, N, K, A, its strides, B, its strides, C, its strides, whether to add, room).",
        '#include "functions.h"',
        '#include "solve.h"',
        '#include "tables.h"',
        '#include "team.h"',
        "",
    ]
    return "\n".join([*head, *(_table(name, kind, values) for (kind, values), name in tables.items())]) + "\n"


def _table(name: str, kind: str, values: tuple) -> str:
    """The statement that makes an array of constants: its numbers, or, where these go on and on evenly, its runs."""
    runs, size = short_runs(values), len(values)
    text = number if kind == "constant" else str
    kind = "real" if kind == "constant" else "int"
    if runs is None:
        begin, items = f"static const {kind} {name}[{size}]", map(text, values)
    else:
        begin, items = f"static constexpr Table<{kind}, {size}> {name}", (_run(text(first), *rest) for first, *rest in runs)
    return f"{begin} = {{\n{textwrap.fill(', '.join(items), 130, initial_indent='    ', subsequent_indent='    ')}\n}};"


def _run(first: str, count: int, step: int) -> str:
    """What `tables.h` calls a run, without what it fills in."""
    return "{" + ", ".join([first, *([str(count)] if count > 1 else []), *([str(step)] if step else [])]) + "}"
