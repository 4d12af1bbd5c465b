"""A graph written as one readable torch function: the code that runs, and the code `rule.source` shows.

Where it sits: last step of the compiler. `emit_values` is the text of expressions, `emit_ops` one rule an operation; here are
names, statements, loops and modules. Nodes used once become part of their user's expression while that stays readable.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import keyword
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memkit.compiler import emit_helpers
from memkit.compiler.emit_ops import OPS, as_tensor, slope_product
from memkit.compiler.emit_values import ATOM, Value, permute, short_runs
from memkit.compiler.ir import Graph, GraphError, Node, Op
from memkit.compiler.lengths import length_of

READABLE = 60  # an expression longer than this gets a name
WIDE = 116
SUMS = ("add", "sub")
LINE = 76  # operands longer than this together are named one by one

DEFAULT_NAMES: Mapping[Op, str] = {
    **{Op.POINTWISE: "x", Op.EINSUM: "p", Op.REDUCE: "total", Op.EXPAND: "x", Op.GATHER: "f", Op.SCATTER: "f"},
    **{Op.DECAY: "decays", Op.BAND: "gates", Op.UNBAND: "slots", Op.TRIL: "low", Op.SHIFT: "before", Op.WINDOWS: "w"},
    **{Op.FOLD: "sums", Op.MERGE: "rows", Op.SPLIT: "parts", Op.PLACE: "x", Op.SOLVE: "e"},
    **{Op.MASKED_PRODUCT: "p", Op.SCAN: "loop", Op.TENSOR: "table", Op.CONST: "x", Op.GET: "y"},
}
SHAPE_ONLY = {(Op.EXPAND, 1), (Op.PLACE, 1), (Op.FOLD, 1)}  # operands of which only lengths are read


# ---- modules


Layouts = Mapping[str, Sequence[str]]


def emit(graph: Graph, name: str, layouts: Layouts | None = None) -> str:
    """The source of `def name(params in order)`, returning the tuple of results, with the helpers and constants it uses; no imports."""
    return emit_module({name: graph}, "", {name: layouts or {}})


def emit_module(graphs: Mapping[str, Graph], head: str = "import torch\n", layouts: Mapping[str, Layouts] | None = None) -> str:
    """One module with a function a graph; helpers and constants are shared and stand first.

    A result's dimensions lie in the order of its node's axes, or in the one that layouts[function][label] gives.
    """
    module = Module()
    functions = [_function(module, graph, name, (layouts or {}).get(name, {})) for name, graph in graphs.items()]
    parts = [part for part in (head, *module.head(), *functions) if part]
    return "\n\n".join(parts)


def compile_source(source: str, filename: str) -> dict[str, Any]:
    """Runs emitted source as a module and returns its names; tracebacks show its lines under `filename`."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(re.sub(r"\W+", "_", filename).strip("_"))
    module.__file__ = filename
    module.torch = torch  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module  # torch.compile looks a function's globals up by its module's name
    with torch.inference_mode(False):  # constants made under inference mode could never be saved for a backward pass
        exec(compile(source, filename, "exec"), vars(module))
    return vars(module)


@dataclass
class Module:
    """What the functions of one emitted module share."""

    helpers: set[str] = field(default_factory=set)
    constants: dict[tuple[Any, bool], tuple[str, str]] = field(default_factory=dict)  # (values, whole) -> name, statement
    taken: set[str] = field(default_factory=lambda: {*dir(builtins), *keyword.kwlist, "torch", *HELPERS})

    def constant(self, values: Any, name: str, whole: bool) -> str:
        """The name of a tensor at the head of the module: the one that has these values already, or a new one."""
        key = values, whole
        if key not in self.constants:
            self.constants[key] = name, self._table(values, name, whole)
            self.taken.add(name)
        return self.constants[key][0]

    def _table(self, values: Any, name: str, whole: bool) -> str:
        """The statement that makes a constant: its values, or, where these go on and on evenly, its runs."""
        rows = values if values and isinstance(values[0], tuple) else (values,)
        flat = [x for row in rows for x in row]
        runs = None if flat and isinstance(flat[0], tuple) else short_runs(flat)
        if runs is not None:
            self.helpers.add("from_runs")
            literal = textwrap.fill(", ".join(map(repr, runs)), 116, initial_indent="    ", subsequent_indent="    ")
            shape = f".reshape({len(rows)}, -1)" if rows is values else ""
            return f"{name} = from_runs(\n{literal},\n){shape}\n"
        literal = textwrap.fill(repr(values), 116, initial_indent="    ", subsequent_indent="    ")
        dtype = "torch.long" if whole else "torch.float64"
        line = f"{name} = torch.tensor({literal.strip()}, dtype={dtype})\n"
        return line if len(line) <= 120 else f"{name} = torch.tensor(\n{literal},\n    dtype={dtype},\n)\n"

    def head(self) -> list[str]:
        """The helpers, with those they call, and the constants."""
        wanted = self.helpers | ({"constant"} if self.constants else set())
        for _ in HELPERS:
            wanted |= {name for name in HELPERS for user in wanted if re.search(rf"(?<![\w.]){name}\(", HELPERS[user])}
        return [*(text for name, text in HELPERS.items() if name in wanted), "".join(s for _, s in self.constants.values())]


def _helpers() -> dict[str, str]:
    """Every function of `emit_helpers` as text; `constant` with the variable it keeps."""
    found = {name: inspect.getsource(f) for name, f in vars(emit_helpers).items() if inspect.isfunction(f)}
    kept = next(line for line in inspect.getsource(emit_helpers).splitlines() if line.startswith("_HERE"))
    return {**found, "constant": f"{kept}\n\n\n{found['constant']}"}


HELPERS = _helpers()


@dataclass
class Names:
    """The names used in one function; its loops share them, so that nothing is shadowed."""

    taken: set[str]

    def new(self, hint: str) -> str:
        hint = "".join(c if c.isalnum() and c.isascii() else "_" for c in hint).strip("_") or "x"
        hint = hint if hint[0].isalpha() else f"x{hint}"
        tries = (f"{hint}_{i}" if hint[-1].isdigit() else f"{hint}{i}" for i in itertools.count(2))
        name = next(name for name in itertools.chain([hint], tries) if name not in self.taken)
        self.taken.add(name)
        return name


# ---- functions


def _function(module: Module, graph: Graph, name: str, layouts: Layouts) -> str:
    body = Body(module, Names({*module.taken, name}), graph, graph.results, "    ")
    lines = [f"def {name}("]
    for node in graph.params:
        body.values[node] = Value(body.names.new(node.attrs["name"]), node.axes)
        lines.append(f"    {body.values[node].text},  # [{', '.join(node.axes)}]")
    body.like = body.values[graph.params[0]].text if graph.params else "torch.zeros((), dtype=torch.float64)"
    body.write()
    orders = [layouts.get(label, r.axes) for label, r in itertools.zip_longest(graph.labels, graph.results)]
    results = [permute(as_tensor(body, body.values[r]), axes).text for r, axes in zip(graph.results, orders, strict=True)]
    returned = f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})"
    if len(returned) > 120:
        returned = "\n".join(["    return (", *(f"        {r}," for r in results), "    )"])
    return "\n".join([*lines, "):", *body.lines, returned]) + "\n"


class Body:
    """The statements of a function or of a loop in it: the `Writer` that the rules of `emit_ops` ask."""

    def __init__(self, module: Module, names: Names, graph: Graph, results: Sequence[Node], indent: str, like: str = "") -> None:
        self.module, self.names, self.indent, self.like = module, names, indent, like
        self.lines: list[str] = []
        self.values: dict[Node, Value] = {}
        self.loops: dict[Node, list[Value]] = {}  # what each GET of a SCAN names
        self.hints: dict[Node, str] = {}
        self.need = need(graph, results)
        self.slopes = {slope for node in self.need.order for slope in [_slope(node, self.need.uses)] if slope is not None}

    def write(self) -> None:
        for node in self.need.order:
            if node in self.values or node in self.slopes:
                continue
            if node.op is Op.PARAM:
                raise GraphError(f"parameter {node.attrs['name']!r} is used but not listed")
            if node.op is Op.SCAN:
                self.loops[node] = write_loop(self, node)
            elif node.op is Op.GET:
                self.values[node] = self.loops[node.args[0]][node.attrs["index"]]
            else:
                self.values[node] = self._settle(node, self._expression(node))

    def _expression(self, node: Node) -> Value:
        slope = _slope(node, self.need.uses)
        if slope is not None:
            (other,) = (a for a in node.args if a is not slope)
            return slope_product(self, self.values[slope.args[0]], self.values[other], node.axes)
        args = [Value("") if (node.op, i) in SHAPE_ONLY else self.values[a] for i, a in enumerate(node.args)]
        if node.op is not Op.POINTWISE:  # a flag is a number everywhere else
            args = [as_tensor(self, a) if a.kind == "bool" else a for a in args]
        fn = node.attrs.get("fn")
        joins = fn == "mul" and all(a.kind == "tensor" for a in args) and self._joins(node)
        products = any(a.product for a in args)  # of matrices, which a sum takes rather than one that is elementwise
        while sum(len(a.text) for a in args) > (READABLE if joins else LINE):
            kept = [a.named or (a.product and not joins) or (a.factors and not products and fn in SUMS) for a in args]
            longest = max(range(len(args)), key=lambda i: 0 if kept[i] else len(args[i].text))
            if kept[longest]:
                break
            arg = node.args[longest]
            self.values[arg] = args[longest] = self.bind(args[longest], hint(arg))
        return OPS[node.op](self, node, args)

    def _joins(self, node: Node, *others: str) -> bool:
        """Whether a sum takes in a product, of matrices or elementwise: then it has no name, however long it is. Functions whose numbers
        must be equal to the last bit differ in what has a name."""
        return any(user.attrs.get("fn") in (*SUMS, *others) for user in self.need.order if node in user.args)

    def _settle(self, node: Node, value: Value) -> Value:
        """A name for what is read twice, or measured, or too long to read; else the expression itself."""
        if value.named or value.kind == "number":
            return value
        joins = (value.product or value.factors) and self._joins(node, *(("neg",) if value.product else ()))
        if self.need.uses[node] == 1 and node not in self.need.named and (joins or len(value.text) <= READABLE):
            return value
        return self.bind(value, self.hints.get(node) or hint(node))

    def bind(self, value: Value, hint: str = "", again: bool = False) -> Value:
        """`value` under a name of its own, unless it has one; `again` gives it one more."""
        if value.named and not again:
            return value
        name = self.names.new(hint or "x")
        self.line(f"{name} = {value.text}", value.axes)
        return Value(name, value.axes, kind=value.kind)

    def size(self, node: Node, axis: str) -> str:
        found = length_of(node, axis)
        if isinstance(found, int):
            return str(found)
        value = self.values[found[0]]
        return f"{value.text}.shape[{value.axes.index(found[1])}]"

    def helper(self, name: str) -> str:
        self.module.helpers.add(name)
        return name

    def constant(self, values: Any, hint: str, whole: bool = False) -> str:
        name = self.module.constant(values, self.names.new(hint.upper()), whole)
        return f"constant({name}, {self.like}{', torch.long' if whole else ''})"

    def line(self, text: str, *shapes: Sequence[str]) -> None:
        comment = ", ".join(f"[{', '.join(axes)}]" for axes in shapes)
        self.lines.append(self.indent + text + (f"  # {comment}" if shapes else ""))


def hint(node: Node) -> str:
    """What to call a node: its own name, or one for its operation."""
    if node.op is Op.SELECT and not node.name:
        return "last" if node.attrs["index"] else "first"
    return node.name or DEFAULT_NAMES.get(node.op, "x")


def _slope(node: Node, uses: Mapping[Node, int]) -> Node | None:
    """The gelu_slope in a product that is its only use: torch has that product in one call."""
    if node.op is Op.POINTWISE and node.attrs["fn"] == "mul":
        for slope, other in (node.args, node.args[::-1]):
            alone = slope.attrs.get("fn") == "gelu_slope" and uses.get(slope) == 1 and other is not slope
            if alone and set(slope.axes) == set(other.axes) != set():  # under vmap that call takes equal ranks only
                return slope
    return None


class Need(NamedTuple):
    """What must be computed for some results."""

    order: list[Node]  # arguments first
    uses: dict[Node, int]  # how often each node's value is written
    named: set[Node]  # read by a loop, or measured: they must stand in a variable


def need(graph: Graph, results: Sequence[Node]) -> Need:
    uses: dict[Node, int] = {}
    named: set[Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        uses[node] = uses.get(node, 0) + 1
        if uses[node] > 1:
            continue
        for i, arg in enumerate(node.args):
            if (node.op, i) in SHAPE_ONLY:
                axes = [a for a in node.axes if a not in node.args[0].axes] if node.op is Op.EXPAND else [node.attrs["axis"]]
                sources = [s for s in (length_of(arg, a) for a in axes) if not isinstance(s, int)]
                named.update(source for source, _ in sources)
                stack += [source for source, _ in sources]
            elif not (i == 1 and arg is node.args[0] and node.attrs.get("fn") == "mul"):  # x * x is written as a square
                stack.append(arg)
        if node.op is Op.SCAN:
            named.update(node.args)
    return Need([n for n in graph.nodes() if n in uses], uses, named)


# ---- loops


def write_loop(body: Body, node: Node) -> list[Value]:
    """A SCAN as a for statement. Returns what its GETs name: final carries, stacked outputs, stacked starting carries."""
    graph, attrs = node.body, node.attrs
    assert graph is not None
    k, m, total = attrs["carries"], attrs["slices"], len(graph.results)
    wanted = {n.attrs["index"] for n in body.need.order if n.op is Op.GET and n.args[0] is node}
    outputs = {i: graph.results[i] for i in range(k, total) if i in wanted}
    saved = {total + i: graph.params[i] for i in range(k) if total + i in wanted}
    inner = Body(body.module, body.names, graph, [*graph.results[:k], *outputs.values()], body.indent + "    ", body.like)
    for param, arg in zip(graph.params[k + m :], node.args[k + m :], strict=True):
        inner.values[param] = body.bind(as_tensor(body, body.values[arg]), arg.name)
    _start(body, inner, graph.params[:k], node.args[:k])
    names = {i: body.names.new(hint(n) + "s" * (i in saved)) for i, n in {**outputs, **saved}.items()}
    lists = {i: body.names.new(f"{name}_parts") for i, name in names.items()}
    inner.hints.update({n: f"{names[i]}_{attrs['axis']}" for i, n in outputs.items()})
    inner.hints.update({r: f"{inner.values[p].text}_next" for p, r in zip(graph.params, graph.results[:k], strict=False)})
    for some in (list(lists.values())[i : i + 5] for i in range(0, len(lists), 5)):
        body.line(f"{', '.join(some)} = {', '.join('[]' for _ in some)}")
    _head(body, inner, graph.params[k : k + m], node)
    for i, param in saved.items():
        inner.line(f"{lists[i]}.append({inner.values[param].text})")
    inner.write()
    stacked = {i: as_tensor(inner, inner.values[n]) for i, n in {**outputs, **saved}.items()}
    for i in outputs:
        inner.line(f"{lists[i]}.append({stacked[i].text})")
    _advance(inner, graph, k)
    body.lines += inner.lines or [f"{inner.indent}pass"]
    back = "[::-1]" if attrs["reverse"] else ""
    for i, value in stacked.items():
        stacked[i] = Value(names[i], (attrs["axis"], *value.axes))
        body.line(f"{names[i]} = torch.stack({lists[i]}{back})", stacked[i].axes)
    return [*(inner.values[p] for p in graph.params[:k]), *(stacked.get(i, Value("")) for i in range(k, total + k))]


def _start(body: Body, inner: Body, params: Sequence[Node], args: Sequence[Node]) -> None:
    """Names for the carries, with their first values."""
    for param, arg in zip(params, args, strict=True):
        first = permute(as_tensor(body, body.values[arg]), param.axes)
        if arg.op is Op.PARAM and first.text == param.name and body.need.uses[arg] == 1 and len(body.indent) == 4:
            inner.values[param] = first  # nobody else reads the argument: its name goes round the loop
            continue
        name = body.names.new(param.name or "carry")
        body.line(f"{name} = {first.text}", param.axes)
        inner.values[param] = Value(name, param.axes)


def _head(body: Body, inner: Body, params: Sequence[Node], node: Node) -> None:
    """The for statement: one name a slice."""
    axis, first = node.attrs["axis"], node.attrs["carries"]
    parts = []
    for param, arg in zip(params, node.args[first:], strict=False):
        value = as_tensor(body, body.values[arg])
        outer = value.text if value.named else param.name or "x"
        inner.values[param] = Value(body.names.new(f"{outer}_{axis}"), tuple(a for a in value.axes if a != axis))
        parts.append(f"{value.bound(ATOM)}.unbind({value.axes.index(axis)})")
    if not parts:
        raise GraphError("a SCAN without slices has no length")
    names = [inner.values[p].text for p in params]
    shapes = [inner.values[p].axes for p in params]
    steps = parts[0] if len(parts) == 1 else f"zip({', '.join(parts)}, strict=True)"
    if node.attrs["reverse"]:
        steps = f"reversed({steps if len(parts) == 1 else f'[*{steps}]'})"
    if len(f"{names}{steps}") > LINE:
        opening, closing = ("reversed([*zip(", ")])") if node.attrs["reverse"] else ("zip(", ")")
        body.line(f"for {names[0]}, in {opening}" if len(names) == 1 else f"for {', '.join(names)} in {opening}")
        if len(body.lines[-1]) > WIDE:
            listed = textwrap.wrap(f"{', '.join(names)},", WIDE - 8, initial_indent="    ", subsequent_indent="    ")
            body.lines.pop()
            for text in ("for (", *listed, f") in {opening}"):
                body.line(text)
        for part, shape in zip(parts, shapes, strict=True):
            body.line(f"    {part},", shape)
        body.line("    strict=True,")
        body.line(f"{closing}:")
        return
    body.line(f"for {', '.join(names)} in {steps}:", *shapes)


def _advance(inner: Body, graph: Graph, carries: int) -> None:
    """The carries take their new values, all at once: a later one may still read an earlier one's old value."""
    pairs = []
    for param, result in zip(graph.params[:carries], graph.results[:carries], strict=True):
        new = permute(as_tensor(inner, inner.values[result]), param.axes)
        if result is not param:
            pairs.append((inner.values[param], new))
    if sum(len(f"{old.text}{new.text}{old.axes}") for old, new in pairs) > LINE:
        carried = {old.text for old, _ in pairs}
        pairs = [(old, inner.bind(new, f"{old.text}_next", again=new.text in carried)) for old, new in pairs]
        for old, new in pairs:
            inner.line(f"{old.text} = {new.text}", old.axes)
    elif pairs:
        inner.line(f"{', '.join(o.text for o, _ in pairs)} = {', '.join(n.text for _, n in pairs)}", *(o.axes for o, _ in pairs))
