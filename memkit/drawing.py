"""`visualize`: a spec or a layer as a graphviz drawing, in one of three views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memkit.layers.memory_layer import MemoryLayer
from memkit.specs.errors import SpecError, near
from memkit.specs.io import load_spec
from memkit.specs.rule import Rule

from .drawing_dot import Drawing, drawing
from .drawing_model import Picture

VIEWS = ("rule", "plan", "layer")


def visualize(source: Any, view: str = "rule", *, after: str = "", overrides: Mapping[str, Any] | None = None) -> Drawing:
    """A drawing of what a spec computes.

    Args:
        source: a preset's name, a path, a dict, a LayerSpec, a MemoryLayer or a Rule.
        view: rule (one token: what is read, what is written, which gates act), plan (the compiled graph of a chunk, with shapes, FLOPs
            and bytes) or layer (projections, convolution, norms, gates, memory, output).
        after: for the plan view, the pass after which the graph is drawn (lower, fold, ..); the last unless given.
        overrides: dotted path -> value.

    Returns:
        A graphviz.Digraph: `.source`, `.pipe("svg")`, `.render(outfile="a.png")`; it shows itself in a notebook.

    Raises:
        SpecError: a source that cannot be read, a view or pass that does not exist.
    """
    return drawing(picture(source, view, after=after, overrides=overrides))


def picture(source: Any, view: str = "rule", *, after: str = "", overrides: Mapping[str, Any] | None = None) -> Picture:
    """The boxes and arrows of a drawing; see `visualize`."""
    if view not in VIEWS:
        raise SpecError(f"view {view!r}", ", ".join(VIEWS), near(view, VIEWS), "view")
    if after and view != "plan":
        raise SpecError(f"after {after!r} with view {view}", "a pass only for view plan", "view plan", "after")
    if overrides and isinstance(source, MemoryLayer | Rule):
        source = source.spec
    spec = source.spec if isinstance(source, MemoryLayer | Rule) else load_spec(source, overrides)
    if view == "rule":
        from .drawing_rule import rule_picture

        return rule_picture(spec)
    if view == "layer":
        from .drawing_layer import layer_picture

        return layer_picture(source if isinstance(source, MemoryLayer) else spec)
    from .drawing_plan import plan_picture

    rule = source.rule if isinstance(source, MemoryLayer) else source
    return plan_picture(rule if isinstance(rule, Rule) else spec, after)
