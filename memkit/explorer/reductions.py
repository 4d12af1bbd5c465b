"""What a spec reduces to: neutral values of its own knobs under which its one-token equations are those of a preset, as the compiler proves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import networkx

from memkit.compiler.build import build
from memkit.compiler.canonical import Canonical
from memkit.compiler.facts import facts
from memkit.compiler.ir import GraphError
from memkit.compiler.match import isomorphic, live, to_networkx
from memkit.compiler.terms import Rewrites, Table
from memkit.compiler.token_graph import token_graph
from memkit.specs.errors import MemkitError
from memkit.specs.gate import Number
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule

WIDTH = 4  # of keys and values; the equations do not depend on it
ONE = {"window.size": 1, "window.gate": "none"}


@dataclass(frozen=True)
class Form:
    """The equations of one token in normal form, as a graph."""

    chunk: int
    graph: networkx.DiGraph

    def same(self, other: Form) -> bool:
        return self.chunk == other.chunk and isomorphic(self.graph, other.graph)


class Reductions:
    """Remembers the forms it has made: one build of the explorer asks for the same ones often."""

    def __init__(self, presets: Iterable[str]) -> None:
        self.traits: dict[str, Any] = {}
        self.forms: dict[str, Form | None] = {}
        self.presets = {name: load_spec(name) for name in presets}

    def trait(self, spec: LayerSpec) -> Any:
        """What equal rules have in common, cheap to find: shapes of the weights, chunks, facts."""
        key = spec.model_dump_json(exclude={"name", "source", "layer"})
        if key not in self.traits:
            try:
                equations = build(Rule(spec, WIDTH, WIDTH))
                chunk = spec.update.chunk_size if spec.update.grad_at == "chunk" else 0
                known = facts(equations)
                about = (known.optimizer is not None, known.gradient_degree, known.memory_linear, known.read_before)
                self.traits[key] = (sorted(equations.weights.values()), sorted(equations.sizes.items()), chunk, about)
            except (GraphError, MemkitError):
                self.traits[key] = None
        return self.traits[key]

    def form(self, spec: LayerSpec, fixed: Mapping[str, float]) -> Form | None:
        """None where the equations have no normal form."""
        key = spec.model_dump_json(exclude={"name", "source", "layer"}) + repr(sorted(fixed.items()))
        if key not in self.forms:
            try:
                self.forms[key] = _form(spec, fixed)
            except (GraphError, MemkitError):
                self.forms[key] = None
        return self.forms[key]

    def of(self, spec: LayerSpec, own: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
        """(preset, knobs at their neutral value) for each preset but `own`, the one that the spec is."""
        for name, preset in self.presets.items():
            knobs = _neutralised(spec, preset)
            if name == own or knobs is None or self.trait(preset) != self.trait(spec):
                continue
            form, other = self._neutral(spec, knobs), self.form(preset, {})
            if form is not None and other is not None and form.same(other):
                yield name, tuple(TEXTS[knob] for knob in knobs)

    def _neutral(self, spec: LayerSpec, knobs: tuple[str, ...]) -> Form | None:
        if "window" in knobs:
            spec = load_spec(spec, ONE)
        return self.form(spec, {knob: VALUES[knob] for knob in knobs if knob in VALUES})


VALUES = {"momentum": 0.0, "retain": 1.0, "step_size": 1.0}
TEXTS = {"window": "window.size = 1, weighed 1", "momentum": "momentum = 0", "retain": "retain = 1", "step_size": "step_size = 1"}


def _neutralised(spec: LayerSpec, preset: LayerSpec) -> tuple[str, ...] | None:
    """The knobs to put to their neutral value so that `spec` has the gates and the window of `preset`; None where none does that."""
    mine, wanted = _open(spec), _open(preset)
    knobs = mine - wanted - {"window_gate"}
    if spec.window.size != preset.window.size:
        if preset.window.size > 1:
            return None
        knobs.add("window")
    elif "window_gate" in mine - wanted:
        return None
    return tuple(sorted(knobs)) if wanted <= mine and knobs <= TEXTS.keys() else None


def _open(spec: LayerSpec) -> set[str]:
    return {name for name, (_, gate) in spec.roles().items() if not isinstance(gate, Number)}


def _form(spec: LayerSpec, fixed: Mapping[str, float]) -> Form:
    rule = Rule(spec, WIDTH, WIDTH)
    constants: dict[str, Any] = {**rule.constants, **fixed}
    token = token_graph(build(rule), constants)
    table = Table()
    forms = Canonical(table, Rewrites()).form(token.graph, token.sizes)
    return Form(token.chunk, to_networkx(live(forms, table), table, token.sizes))
