"""The emitted module: constants, runtime helpers, the emitted functions, their autograd.Function, and `run`. It needs torch alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

import torch

from . import ir, runtime, runtime_span, segments
from .backward import backward
from .build import Equations
from .cost import given, widest
from .emit_torch import emit_module
from .ir import Graph, GraphError, Node, Op
from .passes import BACKWARD, lodge
from .passes.loops import TOKENS
from .plans.span import keys_look
from .symmetric import SYMMETRIC

FUNCTION = '''
{upper}_NAMES = (  # of the inputs, of what a call saves, of the results' gradients
    {params},
    {saved},
    {grads},
)


class {title}(torch.autograd.Function):
    """{name} with its emitted backward: states at chunk starts and products with whole weights are kept, the rest is made again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return apart(in_segments({name}_saving, {layout}, inputs, RULE["numbers"], SEGMENT), inputs)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.save_for_backward(*inputs, *outputs[{results}:])
        ctx.mark_non_differentiable(*outputs[{results}:])
        ctx.set_materialize_grads(False)
        ctx.shapes = [x.shape for x in outputs[:{results}]]

    @staticmethod
    def backward(ctx, *grads):
        tensors = ctx.saved_tensors  # read once: under activation checkpointing each reading runs the forward again
        inputs, saved = tensors[:{inputs}], tensors[{inputs}:]
        grads = [inputs[0].new_zeros(shape) if g is None else g for g, shape in zip(grads, ctx.shapes)]
        if torch.is_grad_enabled():  # differentiated once more: let torch differentiate the forward's source
            return again(plain_{name}, inputs, grads, ctx.needs_input_grad)
        found = pulled_in_segments({name}_gradients, {layout}, {upper}_NAMES, inputs, saved, grads, RULE["numbers"], SEGMENT)
        return tuple(found.get(n) for n in {upper}_NAMES[0])


def {name}_gradients(named):
    """The gradients of {name}'s inputs by name, from its inputs, saved values and results' gradients by name."""
    found = {name}_backward(
        *(
            named[n]
            for n in {wanted}
        )
    )
    return dict(zip({labels}, found))


def plain_{name}(*inputs):
    """{name} without the emitted backward."""
    return in_segments({name}, {layout}, inputs, RULE["numbers"], SEGMENT)


def call_{name}(*inputs):
    """{name}, through {title} where a gradient will be needed."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs) and not forward_mode():
        return {title}.apply(*distinct(inputs))[:{results}]
    return plain_{name}(*inputs)
'''


def apart(outputs, inputs):
    """`outputs`, those that are an input itself (a memory that never moves) as views of it: autograd takes no input as an output."""
    return tuple(x.view_as(x) if any(x is y for y in inputs) else x for x in outputs)


def distinct(inputs):
    """`inputs`, those that were there before (a memory and that of its chunk's start) as views: torch.compile takes none twice."""
    if not torch.compiler.is_compiling():
        return inputs
    return [x.view_as(x) if any(x is y for y in inputs[:i]) else x for i, x in enumerate(inputs)]


def forward_mode():
    """Whether torch differentiates forwards: tangents pass through plain source, but not through an autograd.Function, nor its backward."""
    return torch.autograd.forward_ad._current_level >= 0


def again(function, inputs, grads, needed):
    """Gradients that can be differentiated once more."""
    wanted = [x for x, need in zip(inputs, needed) if need]

    def of(*some):
        rest = iter(some)
        return function(*(next(rest) if need else x for x, need in zip(inputs, needed)))

    found = iter(torch.func.vjp(of, *wanted)[1](tuple(grads)))
    return tuple(next(found) if need else None for need in needed)


RUN = '''
def start(weights, q, v):
    """The state before the first token of q [B, T, H, K] and v [B, T, H, V], from weights by name, [H, out, in]."""
    return first_state(RULE, weights, q, v)


def run(q, k, v, gates, params, state):
    """The rule: q, k [B, T, H, K], v [B, T, H, V], gates [B, T, H, ..] and params by name, state from `start` or an earlier call.

    Returns y [B, T, H, V] and the state after.
    """
    return {call}(RULE, q, k, v, gates, params, state)
'''


def module_source(eq: Equations, plan: str, title: str, graphs: Mapping[str, Graph], chunk: int) -> str:
    """The source of the module that runs `graphs`: `chunks` and perhaps `resume`, or `step` and `history` for infinite features."""
    functions: dict[str, Graph] = {}
    classes = []
    for name, graph in graphs.items():
        params = [p.attrs["name"] for p in graph.params]
        forward, back = backward(graph, params, worth_keeping, SYMMETRIC)
        for step in BACKWARD:
            back = step(back)
        graph, forward, back = lodge(graph), lodge(forward), lodge(back)
        back = laid_out(back, {p.attrs["name"]: p.axes for p in graph.params})
        functions |= {name: graph, f"{name}_saving": forward, f"{name}_backward": back}
        classes.append(_function(name, graph, forward, back, params))
    calls = [f"call_{name}" for name in graphs]
    segment_helpers = [f for _, f in inspect.getmembers(segments, inspect.isfunction)]
    surround = [
        *segment_helpers,
        runtime.to_chunks,
        runtime.to_windows,
        runtime.from_chunks,
        runtime.pieces,
        runtime.blocks,
        runtime.in_sequence,
        runtime.started,
        runtime.first_state,
        runtime.cut,
        runtime.newest,
    ]
    if "history" in graphs:
        call, helpers = (
            f"run_span, {', '.join(calls)}",
            [f for _, f in inspect.getmembers(runtime_span, inspect.isfunction) if f.__module__ == runtime_span.__name__],
        )
    else:
        found = [f"call_{name}" if name in graphs else "None" for name in ("chunks", "resume")]
        call, helpers = f"run_pieces, {', '.join(found)}", [runtime.run_pieces, runtime.pack]
    run = RUN.replace("{call}(RULE", call.replace(", ", "(", 1) + ", RULE")
    body = emit_module(functions, head="")
    sources = [inspect.getsource(f) for f in (*surround, *helpers, apart, distinct, forward_mode, again)]
    numbers = largest(eq, chunk if {"chunks", "history"} & {*graphs} else 1, graphs.values())
    parts = [_head(eq, plan, title, chunk, numbers, graphs.get("step")), *sources, body, *classes, run]
    return "\n\n".join(p.strip("\n") + "\n" for p in parts)


def largest(eq: Equations, chunk: int, graphs: Iterable[Graph]) -> int:
    """Numbers in the largest intermediate of `chunk` tokens of one head: of what the graphs compute, the states they stack up, the past."""
    sizes = given(eq, chunk) | {"h": runtime_span.BLOCK} if eq.infinite else given(eq, chunk)
    stacks = [sizes[out] * sizes[into] for n, (out, into) in eq.weights.items() if n not in eq.infinite]
    return max(*stacks, *(widest(graph, sizes) for graph in graphs), 1)


def worth_keeping(graph: Graph) -> set[Node]:
    """The values of one level of a graph that are cheaper kept than made again: what costs a product with a whole weight and is only as
    large as a sequence, or the sum that it goes into, if it goes nowhere else: no gradient needs the terms of a sum."""
    users, results = graph.users(), {*graph.results}
    found = set()
    for node in users:
        if not _is_narrow_product(node):
            continue
        while node not in results and len(users[node]) == 1 and _is_sum(users[node][0], node):
            (node,) = users[node]
        found.add(node)
    return found


def _is_narrow_product(node: Node) -> bool:
    gone = {axis for arg in node.args for axis in arg.axes} - {*node.axes}
    tokens, widths = ({a for a in node.axes if (a in TOKENS) == kind and a not in ("n", "g")} for kind in (True, False))
    return node.op is Op.EINSUM and len(tokens) == len(widths) == 1 and bool(gone - {*TOKENS})


def _is_sum(node: Node, term: Node) -> bool:
    return node.op is Op.POINTWISE and node.attrs["fn"] in ("add", "sub") and {*node.axes} == {*term.axes}


def laid_out(back: Graph, axes: Mapping[str, tuple[str, ...]]) -> Graph:
    """The backward graph with each gradient in the axes order of its parameter."""
    return Graph(back.params, tuple(ir.in_order(r, axes[n]) for r, n in zip(back.results, back.labels, strict=True)), back.labels)


def _function(name: str, graph: Graph, forward: Graph, back: Graph, params: Sequence[str]) -> str:
    results = len(graph.results)
    moving = {p.attrs["name"] for p in graph.params} - {r.attrs["name"] for r in graph.results if r.op is Op.PARAM}
    stale = moving & {*graph.labels} & {p.attrs["name"] for p in back.params}
    if stale and _layout(graph, params)[0]:
        raise GraphError(f"the backward of {name} reads {sorted(stale)}, of which only the first call's value is kept")
    saved = forward.labels[results:]
    grads = tuple(f"grad_{label}" for label in forward.labels[:results])
    return FUNCTION.format(
        title=name.capitalize(),
        name=name,
        upper=name.upper(),
        results=results,
        inputs=len(params),
        layout=_layout(graph, params),
        params=tuple(params),
        saved=saved,
        grads=grads,
        labels=tuple(back.labels),
        wanted=tuple(p.attrs["name"] for p in back.params),
    )


def _layout(graph: Graph, params: Sequence[str]) -> tuple[int, int]:
    """How many parameters are sequences of chunks, and how many are states: those that are results, too."""
    sequences = sum(p.axes[:1] == ("n",) for p in graph.params)
    return (sequences, sum(name in graph.labels for name in params)) if sequences else (0, 0)


def _head(eq: Equations, plan: str, title: str, chunk: int, numbers: int, step: Graph | None) -> str:
    spec = eq.rule.spec
    gates = [n for n in spec.roles() if n not in eq.rule.constants or (n == "window_gate" and eq.window > 1)]
    params = {n: tuple(eq.sizes[a] for a in axes) for n, axes in zip(eq.rule.init_params(), eq.params.values(), strict=True)}
    rule = {
        "window": eq.window,
        "chunk": chunk,
        "semantic": eq.grad_at == "chunk",
        "gates": tuple(gates),
        "numbers": numbers,
        "weights": tuple(n for n in eq.weights if n not in eq.infinite),
        "slots": eq.slots,
        "params": params,
    }
    if step is not None:
        widths = {n: eq.sizes[eq.weights[n][0]] for n in eq.infinite}
        rule |= {"infinite": widths, "scales": 3 if eq.slots else 1, "keys_look": keys_look(step)}
    sizes = ", ".join(f"{axis}={size}" for axis, size in eq.sizes.items())
    rows = [
        f'"""{title}: plan {plan}, {sizes}.',
        "",
        "Axes: n chunks, g = batch * heads, t tokens of a chunk, s the same with the window's tokens in front; widths above.",
        '"""',
        "",
        "import torch",
        "from torch import Tensor",
        "",
        f"BLOCK = {runtime_span.BLOCK if eq.infinite else runtime.BLOCK}",
        f"SEGMENT = {runtime.SEGMENT}",
        "RULE = {",
        *(f"    {key!r}: {value!r}," for key, value in rule.items()),
        "}",
    ]
    return "\n".join(rows)
