"""A plain torch function of one token -> a graph, by watching the tensor operations it performs.

Where it sits: `build` traces every formula of a spec with it. The function runs once, in float64, on made-up inputs;
each operation it reaches below autograd is converted by the table in `trace_ops`. The finished graph is run against the
function on other inputs, so what the watching cannot see (a detour through numpy or lists) is found, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from memkit.compiler import interpret, ir
from memkit.compiler.ir import Graph, GraphError, Node, in_order
from memkit.compiler.simplify import simplify
from memkit.compiler.trace_ops import ATEN, CONSTANT_LIKE
from memkit.compiler.trace_values import Axes, Untraceable, Value

__all__ = ["Untraceable", "trace"]


def trace(
    fn: Callable[..., Any],
    inputs: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    labels: Sequence[str] = (),
) -> Graph:
    """The graph of `fn(*tensors)`: one tensor for each entry of `inputs`, returning a tensor or a tuple of them.

    `inputs` gives each tensor's axes by name; the same name in two inputs is the same axis. A result's axes are in the
    order of its dimensions, with the names of the first operand that has one.

    Raises:
        Untraceable: on an operation without a rule, or a function whose course depends on values.
    """
    params = [ir.param(name, axes) for name, axes in inputs.items()]
    first, second = (_samples(params, sizes, seed) for seed in (1, 2))
    watcher = Watcher(Axes({*sizes, *(a for p in params for a in p.axes)}))
    for node, value in zip(params, first, strict=True):
        watcher.know(value, Value(node, node.axes, tuple(value.shape)))
    with torch.enable_grad(), watcher:
        found = fn(*first)
    results = tuple(watcher.result(r) for r in _flat(found))
    graph = simplify(Graph(tuple(params), results, tuple(labels)))
    _check(graph, fn, second)
    return graph


def _samples(params: Sequence[Node], sizes: Mapping[str, int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn([sizes[a] for a in p.axes], generator=generator, dtype=torch.float64) for p in params]


def _flat(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple | list) else [found]


def _check(graph: Graph, fn: Callable[..., Any], inputs: list[Tensor]) -> None:
    """Run the graph and the function on inputs the tracing has not seen."""
    names = [p.attrs["name"] for p in graph.params]
    with torch.no_grad():
        got = interpret.run(graph, dict(zip(names, (x.clone() for x in inputs), strict=True)))
        expected = [torch.as_tensor(r, dtype=torch.float64) for r in _flat(fn(*inputs))]
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True):
            raise Untraceable(
                "a step that is no operation on tensors",
                "no branch on values and no way out of torch (numpy, tolist, item)",
            )


class Watcher(TorchDispatchMode):
    """Converts each operation that involves an input into nodes; all others are constants, and simply run."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        self.values: dict[int, Value] = {}
        self.opaque: dict[int, str] = {}  # outputs that have no value here, such as the index of a maximum
        self.seen: dict[int, Tensor] = {}  # keeps every tensor alive, so that an id stays its own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, the default, imports the whole of torch.compile on first use

    def know(self, tensor: Tensor, value: Value | None) -> None:
        self.seen[id(tensor)] = tensor
        if value is not None:
            self.values[id(tensor)] = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        flat = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        for tensor in flat:
            self.know(tensor, None)
            if id(tensor) in self.opaque:
                raise Untraceable(f"the second result of {self.opaque[id(tensor)]}", "its first result alone")
        if not torch.is_grad_enabled() and name != "clamp_min_":  # torch's own cosine_similarity keeps norms off 0 in this way
            raise Untraceable("no_grad, or an autograd.Function", "equations that are differentiated as written")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Untraceable(name, "no random numbers")
        if not any(id(a) in self.values for a in flat):
            return self._remember(name, func(*args, **kwargs), None)
        if func._schema.is_mutable:
            return self._in_place(func, name, args, kwargs)
        if name in CONSTANT_LIKE:
            return self._remember(name, func(*args, **kwargs), None)
        if name not in ATEN or func.namespace not in ("aten", "prims"):
            return self._decomposed(func, name, args, kwargs)
        return self._remember(name, func(*args, **kwargs), self._convert(name, args, kwargs))

    def _convert(self, name: str, args: Any, kwargs: Any) -> Any:
        def swap(x: Any) -> Any:
            return self.values.get(id(x), x) if isinstance(x, Tensor) else x

        return ATEN[name](self.axes, *tree_map(swap, list(args)), **tree_map(swap, kwargs))

    def _remember(self, name: str, out: Any, value: Any) -> Any:
        """Tie the tensors an operation returned to their values, None being a constant."""
        outs, values = (out, value) if isinstance(out, tuple | list) else ((out,), (value,))
        for i, tensor in enumerate(outs):
            if isinstance(tensor, Tensor):
                found = None if value is None else values[i]
                if found is not None and found.shape != tuple(tensor.shape):
                    raise GraphError(f"traced shape {found.shape}, torch has {tuple(tensor.shape)}")
                self.know(tensor, found)
                if value is not None and found is None:
                    self.opaque[id(tensor)] = name
        return out

    def _in_place(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A write to a tensor that nothing else looks at is the same as a new tensor."""
        target, plain = args[0], name.removesuffix("_")
        place = target.untyped_storage().data_ptr()
        shared = any(t is not target and t.untyped_storage().data_ptr() == place for t in self.seen.values())
        if plain not in ATEN or plain == name or shared:
            raise Untraceable(name, "no writing into tensors (use torch.where, torch.stack, torch.cat)")
        value = self._convert(plain, args, kwargs)
        return self._remember(name, func(*args, **kwargs), value)

    def _decomposed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An operation without a rule of its own: torch may know how to write it in simpler ones."""
        from torch._decomp import decomposition_table  # a slow import, seldom needed

        with self:
            found = func.decompose(*args, **kwargs)
            if found is NotImplemented and func in decomposition_table:
                found = decomposition_table[func](*args, **kwargs)
        if found is NotImplemented:
            raise Untraceable(name, "sums, products, entrywise functions, norms and constant indices")
        return found

    def result(self, found: Any) -> Node:
        """The node of a result, with an axis for each dimension, in order."""
        value = self.axes.lift(self.values.get(id(found), found))
        for dim in range(len(value.shape)):
            value = self.axes.solid(value, dim)
        return in_order(value.node, value.axes)
