"""LayerSpec -> equations: every formula of a spec traced into a small graph over one token, without batch or heads.

First step of the pipeline. Nothing here, or later, looks at what kind a component is: only at what its formulas do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memkit.specs.contract import weight_shapes
from memkit.specs.errors import SpecError
from memkit.specs.rule import Rule

from . import ir
from .autodiff import vjp
from .ir import Graph, Node
from .simplify import simplify
from .trace import Untraceable, trace


@dataclass(frozen=True)
class Equations:
    """The traced formulas of a spec at given widths. Axis names: k, f, v for key, feature and value width, e, e2, .. for hidden widths.

    features: x [k], params -> [f]; None where only the kernel exists. kernel: a [k], b [k2], params -> [].
    predict: weights, f, x [k], params -> [v]. slope: p [v], target [v] -> d loss / d p [v].
    retain: weight name -> graph (W, retain) -> W. update: weight name -> graph (grad, slots, gates) -> (move, slots).
    """

    rule: Rule
    features: Graph | None
    kernel: Graph | None
    predict: Graph
    slope: Graph
    retain: dict[str, Graph]
    update: dict[str, Graph]
    weights: dict[str, tuple[str, str]]
    slots: tuple[str, ...]
    params: dict[str, tuple[str, ...]]
    sizes: dict[str, int]
    infinite: tuple[str, ...] = field(default=())

    @property
    def window(self) -> int:
        return self.rule.spec.window.size

    @property
    def grad_at(self) -> str:
        return self.rule.spec.update.grad_at

    @property
    def read_before(self) -> bool:
        return self.rule.spec.update.read == "before"


def identifier(dotted: str) -> str:
    """A dotted name as a Python identifier."""
    return dotted.replace(".", "_")


def build(rule: Rule) -> Equations:
    """Trace all formulas of `rule.spec`.

    Raises:
        SpecError: where a formula uses an operation the compiler does not know.
    """
    spec, values = rule.spec, rule.value_dim
    infinite_width = _unused_width(rule)
    wide = rule.width if rule.finite else infinite_width
    shapes = weight_shapes(spec.memory, wide, values)
    sizes = {"k": rule.key_dim, "v": values, "f": wide}
    weights = {name: _weight_axes(shape, wide, values, sizes) for name, shape in shapes.items()}
    params = {name: tuple(_axis_of(n, values, sizes) for n in p.shape) for name, p in rule.init_params().items()}
    slots = rule.slots
    make = _Tracer(rule, weights, params, slots, sizes)
    features, kernel = make.features(), make.kernel()
    make.agreed()
    return Equations(
        rule,
        features,
        kernel,
        make.predict(),
        make.slope(),
        {n: make.retain(n) for n in weights},
        {n: make.update(n) for n in weights},
        weights,
        slots,
        {identifier(n): a for n, a in params.items()},
        sizes,
        tuple(rule.infinite),
    )


def _unused_width(rule: Rule) -> int:
    """A stand-in for the width of infinite features, unlike every other width."""
    taken = {rule.key_dim, rule.value_dim, *(n for s in rule.shapes.values() for n in s)}
    return next(n for n in range(7, 100_000) if n not in taken)


def _weight_axes(shape: tuple[int, ...], features: int, values: int, sizes: dict[str, int]) -> tuple[str, str]:
    """Axes [out, in]: f for the feature width where it comes in, v for the value width where it goes out, hidden names else."""
    out, into = shape
    source = "f" if into == features else _hidden(into, sizes, ())
    target = "v" if out == values else _hidden(out, sizes, (source,))
    return (target, source)


def _hidden(size: int, sizes: dict[str, int], taken: tuple[str, ...]) -> str:
    names = [n for n, s in sizes.items() if n.startswith("e") and s == size and n not in taken]
    if names:
        return names[0]
    count = sum(n.startswith("e") for n in sizes)
    name = "e" if not count else f"e{count + 1}"
    sizes[name] = size
    return name


def _axis_of(size: int, values: int, sizes: dict[str, int]) -> str:
    if size == values:
        return "v"
    sizes[f"p{size}"] = size
    return f"p{size}"


class _Tracer:
    """Traces one formula after another, with the names and sizes they share."""

    def __init__(
        self,
        rule: Rule,
        weights: dict[str, tuple[str, str]],
        params: dict[str, tuple[str, ...]],
        slots: tuple[str, ...],
        sizes: dict[str, int],
    ) -> None:
        self.rule, self.spec, self.weights, self.params, self.slots, self.sizes = rule, rule.spec, weights, params, slots, sizes

    def _trace(self, what: str, fn: Callable[..., Any], inputs: dict[str, tuple[str, ...]], *want: tuple[str, ...]) -> Graph:
        """The graph of a formula, whose results must be tensors with the axes `want`."""
        shapes: list[Any] = []

        def watched(*tensors: Tensor) -> Any:
            found = fn(*tensors)
            shapes[:] = [tuple(r.shape) if isinstance(r, Tensor) else type(r).__name__ for r in _results(found)]
            return found

        kind, expected = getattr(self.spec, what.split(".")[0]).kind, [tuple(self.sizes[a] for a in axes) for axes in want]
        try:
            graph = trace(watched, inputs, self.sizes)
        except Untraceable as error:
            raise SpecError(f"{what} of {kind!r}: {error}", "an equation made of plain tensor operations", "", what) from None
        except Exception as error:
            if shapes in ([], expected):  # what the formula itself raised, or an operation that is traced wrongly
                text = f"{what} of {kind!r}: {type(error).__name__}: {error}".split("\n")[0][:300]
                raise SpecError(text, f"a formula of tensors {_sizes(inputs, self.sizes)}", "", what) from error
        if shapes != expected:
            got = f"{what} of {kind!r} returns {', '.join(map(_shape, shapes)) or 'nothing'}"
            raise SpecError(got, f"{', '.join(map(_shape, expected))} for {_sizes(inputs, self.sizes)}", "", what)
        marked = ir.rebuild(graph, lambda node, args: node.replace(args=args, where=node.where or f"layer.{what}"))
        graph = simplify(marked)
        for result, axes in zip(graph.results, want, strict=True):
            if result.axes != axes and set(result.axes) == set(axes):
                raise SpecError(f"{what} of {kind!r} returns its result transposed", f"axes {', '.join(axes)}", "", what)
        return graph

    def _own(self, family: str) -> dict[str, tuple[str, ...]]:
        return {n: a for n, a in self.params.items() if n.startswith(family + ".")}

    def _with_params(self, inputs: dict[str, tuple[str, ...]], family: str) -> tuple[dict[str, tuple[str, ...]], list[str]]:
        own = self._own(family)
        return inputs | {identifier(n): a for n, a in own.items()}, [n.split(".", 1)[1] for n in own]

    def features(self) -> Graph | None:
        if not self.rule.finite:
            return None
        inputs, names = self._with_params({"x": ("k",)}, "features")
        graph = self._trace("features", lambda x, *p: self.spec.features(x, **dict(zip(names, p, strict=True))), inputs, ("f",))
        return _renamed_result(graph, ("f",))

    def kernel(self) -> Graph | None:
        if not self.spec.features.has_kernel():
            return None
        inputs, names = self._with_params({"a": ("k",), "b": ("k",)}, "features")
        call = self.spec.features.kernel  # type: ignore[attr-defined]
        return self._trace("features.kernel", lambda a, b, *p: call(a, b, **dict(zip(names, p, strict=True))), inputs, ())

    def agreed(self) -> None:
        """Where features and kernel both exist, they must be one: the compiler puts either in the place of the other."""
        if not self.rule.finite or not self.spec.features.has_kernel():
            return
        draw = torch.Generator().manual_seed(3)
        a, b = (torch.randn(self.rule.key_dim, generator=draw, dtype=torch.float64) for _ in range(2))
        own = {n.split(".", 1)[1]: p for n, p in self.rule._exact_params().items() if n.startswith("features.")}
        product = (self.spec.features(a, **own) * self.spec.features(b, **own)).sum()
        kernel = self.spec.features.kernel(a, b, **own)  # type: ignore[attr-defined]
        if not torch.allclose(product, kernel, rtol=1e-6, atol=1e-9, equal_nan=True):
            got = f"kernel of {self.spec.features.kind!r}: {float(kernel):g} where phi(a).phi(b) is {float(product):g}"
            raise SpecError(got, "kernel(a, b) = phi(a).phi(b)", "mend one of the two, or write only one", "features.kernel")

    def predict(self) -> Graph:
        inputs, names = self._with_params({**self.weights, "f": ("f",), "x": ("k",)}, "memory")
        count = len(self.weights)

        def fn(*t: Tensor) -> Tensor:
            weights = dict(zip(self.weights, t[:count], strict=True))
            return self.spec.memory.predict(weights, t[count], t[count + 1], **dict(zip(names, t[count + 2 :], strict=True)))

        return _renamed_result(self._trace("memory", fn, inputs, ("v",)), ("v",))

    def slope(self) -> Graph:
        loss = self._trace("bias", self.spec.bias.loss, {"p": ("v",), "target": ("v",)}, ())
        (gradient,) = vjp([loss.results[0]], [ir.const(1.0)], [loss.param("p")])
        zero = ir.expand(ir.const(0.0), loss.param("p"))
        return simplify(Graph(loss.params, (zero if gradient is None else gradient,), ("slope",)))

    def retain(self, weight: str) -> Graph:
        inputs: dict[str, tuple[str, ...]] = {"W": self.weights[weight]}
        roles = self.spec.retention.roles()
        if roles:
            (role, _) = next(iter(roles.values()))
            inputs["retain"] = ("f",) if role.axis == "feature" else ()
        return self._trace("retention", self.spec.retention.retain, inputs, self.weights[weight])

    def update(self, weight: str) -> Graph:
        axes, gates = self.weights[weight], tuple(self.spec.optimizer.roles())
        inputs = {"grad": axes} | {f"slot_{s}": axes for s in self.slots} | dict.fromkeys(gates, ())

        def fn(grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            state = dict(zip(self.slots, rest[: len(self.slots)], strict=True))
            found = self.spec.optimizer.update(grad, state, dict(zip(gates, rest[len(self.slots) :], strict=True)))
            if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
                raise Untraceable("an update that returns something else than a pair", "(move, slots), slots a dict")
            if set(found[1]) != set(self.slots):
                raise Untraceable(f"an update that returns the slots {sorted(found[1])}", f"those that init makes: {sorted(self.slots)}")
            return (found[0], *(found[1][s] for s in self.slots))

        graph = self._trace("optimizer", fn, inputs, axes, *(axes for _ in self.slots))
        return Graph(graph.params, tuple(_match_axes(r, axes) for r in graph.results), ("move", *self.slots))


def _results(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple | list) else [found]


def _shape(shape: tuple[int, ...] | str) -> str:
    return shape if isinstance(shape, str) else f"a tensor {list(shape)}"


def _sizes(inputs: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {[sizes[a] for a in axes]}" for name, axes in inputs.items())


def _renamed_result(graph: Graph, axes: tuple[str, ...]) -> Graph:
    return Graph(graph.params, (_match_axes(graph.results[0], axes), *graph.results[1:]), graph.labels)


def _match_axes(node: Node, axes: tuple[str, ...]) -> Node:
    """`node` with its axes, by position, called `axes`."""
    if len(node.axes) != len(axes):
        raise ir.GraphError(f"a result with axes {node.axes} where {axes} are needed")
    return node if set(node.axes) == set(axes) else ir.rename(node, dict(zip(node.axes, axes, strict=True)))
