"""memkit: write a recurrent memory layer down as a spec, and get it checked, drawn, explained and compiled.

import memkit
layer = memkit.load("atlas", dim=256)
y, state = layer(x)                       # x, y [B, T, dim]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memkit.specs.errors import KernelError, MemkitError, PlanError, ShapeError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memkit import testing
    from memkit.drawing_dot import Drawing
    from memkit.equivalence import Equivalence
    from memkit.layers.memory_layer import MemoryLayer
    from memkit.specs.layer import LayerSpec
    from memkit.specs.rule import Rule

__version__ = "0.1.0"
__all__ = [
    "KernelError",
    "LayerSpec",
    "MemkitError",
    "MemoryLayer",
    "PlanError",
    "ShapeError",
    "SpecError",
    "compile",
    "equivalent",
    "explain",
    "load",
    "presets",
    "reference",
    "spec",
    "testing",
    "visualize",
]


def presets() -> tuple[str, ...]:
    """The names of the shipped presets."""
    from memkit.specs import io

    return io.presets()


def spec(source: Any, overrides: Mapping[str, Any] | None = None) -> LayerSpec:
    """A checked LayerSpec from a preset's name, a path, a dict or a LayerSpec.

    Args:
        overrides: dotted paths to values, {"window.size": 1, "memory": "linear"}; bare kinds and dicts included.

    Raises:
        SpecError: with file:line:column, what was got, what was expected and a fix: for every field that is wrong or, once all are
            right, for every way found in which they do not fit together.
    """
    from memkit.specs import io

    return io.load_spec(source, overrides)


def load(
    source: Any = "atlas",
    *,
    dim: int | None = None,
    heads: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    backend: str = "auto",
) -> Any:
    """A layer (nn.Module): y, state = layer(x, state=None), x and y [B, T, dim]; dim defaults to 256, heads to the spec's.

    Args:
        overrides: see `spec`. backend: auto, torch, native (C++ on a CPU), triton, or reference for the token loop.

    Raises:
        SpecError: a spec that cannot be read. ShapeError: a dim that does not fit the heads. KernelError: a backend that cannot run here.
    """
    from memkit.layers.memory_layer import load

    return load(source, dim=dim, heads=heads, overrides=overrides, backend=backend)


def compile(
    source: Any, *, key_dim: int, value_dim: int, overrides: Mapping[str, Any] | None = None, backend: str = "auto", plan: str = "auto"
) -> Rule:
    """The compiled rule at fixed widths: y, state = rule(q, k, v, gates, weights, params=None, state=None).

    Args:
        plan: auto, or a plan to pin. backend: auto, torch, native (C++ on a CPU) or triton.

    Raises:
        SpecError: a spec that cannot be read or compiled. PlanError: a pinned plan that refuses. KernelError: see `load`.
    """
    from memkit.compiler.pipeline import compile_rule

    return compile_rule(spec(source, overrides), key_dim, value_dim, backend=backend, plan=plan)


def reference(source: Any, *, key_dim: int, value_dim: int, overrides: Mapping[str, Any] | None = None) -> Rule:
    """The token loop that defines what a spec means; same calls as `compile`, slow, differentiable, any dtype."""
    from memkit.specs.reference import ReferenceRule

    return ReferenceRule(spec(source, overrides), key_dim, value_dim)


def explain(source: Any, *, overrides: Mapping[str, Any] | None = None) -> str:
    """What a spec means: its equation, what is inner and what is outer, plan and refusals, state bytes, FLOPs a token.

    Args:
        source: as for `spec`, or a layer; overrides go over a spec alone.
    """
    from memkit.explanation import explain

    return explain(spec(source, overrides) if overrides else source)


def visualize(source: Any, view: str = "rule", *, overrides: Mapping[str, Any] | None = None) -> Drawing:
    """A graphviz.Digraph of a spec or a layer; views: rule (one token), plan (the compiled graph of a chunk), layer.

    Args:
        source: as for `spec`, or a layer; overrides go over a spec alone.

    Raises:
        SpecError: a source that cannot be read, or a view that does not exist.
    """
    from memkit.drawing import visualize

    return visualize(spec(source, overrides) if overrides else source, view)


def equivalent(a: Any, b: Any, *, given: Mapping[str, Any] | None = None) -> Equivalence:
    """Whether two specs are one rule: truthy with a proof or with agreeing numbers, falsy with a counterexample. Print it.

    Args:
        given: knobs and gates fixed on whichever side has them, {"window.size": 1, "gates.momentum": 0}.

    Raises:
        SpecError: a spec that cannot be read, or a `given` that neither side has.
    """
    from memkit.equivalence import equivalent

    return equivalent(a, b, given=given)


def __getattr__(name: str) -> Any:
    """LayerSpec, MemoryLayer and the module `testing`, imported when first asked for."""
    if name == "testing":
        import importlib

        return importlib.import_module("memkit.testing")
    if name == "LayerSpec":
        from memkit.specs.layer import LayerSpec

        return LayerSpec
    if name == "MemoryLayer":
        from memkit.layers.memory_layer import MemoryLayer

        return MemoryLayer
    raise AttributeError(f"module 'memkit' has no attribute {name!r}")
