"""What a spec reduces to: knobs and gates at neutral values under which it is a preset's rule, as `memkit.equivalence` proves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from memkit.compiler.build import build
from memkit.compiler.facts import facts
from memkit.compiler.ir import GraphError
from memkit.compiler.terms import Table
from memkit.equivalence import Form, canonical_form, prove, same
from memkit.given import GATE, Side, under
from memkit.specs.errors import MemkitError
from memkit.specs.gate import Number
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule

WIDTH = 4  # of keys and values in the first comparison; a proof is made at two pairs of widths
NEUTRAL = {"momentum": 0, "retain": 1, "step_size": 1}  # gate -> the value at which it does nothing


class Reductions:
    """Remembers what it has found about each spec: one build of the explorer asks for the same ones often."""

    def __init__(self, presets: Iterable[str]) -> None:
        self.presets = {name: load_spec(name) for name in presets}
        self.table = Table()
        self.traits: dict[str, Any] = {}
        self.forms: dict[str, Form | None] = {}

    def of(self, spec: LayerSpec, own: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """(preset, what is given) for each preset but `own`, the one that the spec is; nothing given where it is that rule as it is."""
        for name, preset in self.presets.items():
            given = _given(spec, preset)
            if name == own or given is None or self.trait(preset) != self.trait(spec):
                continue
            side, other = under(spec, given)[0], Side(preset)
            form, wanted = self.form(side), self.form(other)
            if form is not None and wanted is not None and same(form, wanted, self.table) and prove(side, other):
                yield name, given

    def trait(self, spec: LayerSpec) -> Any:
        """What equal rules have in common, cheap to find: shapes of the weights, chunks, facts."""
        key = _key(spec)
        if key not in self.traits:
            try:
                equations = build(Rule(spec, WIDTH, WIDTH))
                known = facts(equations)
                chunk = spec.update.chunk_size if spec.update.grad_at == "chunk" and known.gradient_degree else 0
                about = (known.optimizer is not None, known.gradient_degree, known.memory_linear, known.read_before)
                self.traits[key] = (sorted(equations.weights.values()), sorted(equations.sizes.items()), chunk, about)
            except (GraphError, MemkitError):
                self.traits[key] = None
        return self.traits[key]

    def form(self, side: Side) -> Form | None:
        """None where the equations have no normal form."""
        key = _key(side.spec)
        if key not in self.forms:
            try:
                self.forms[key] = canonical_form(side, WIDTH, WIDTH, self.table)
            except (GraphError, MemkitError):
                self.forms[key] = None
        return self.forms[key]


def _key(spec: LayerSpec) -> str:
    """What of a spec is its rule."""
    return spec.model_dump_json(exclude={"name", "source", "layer"})


def _given(spec: LayerSpec, preset: LayerSpec) -> dict[str, Any] | None:
    """What has to be fixed so that `spec` has the gates and the window of `preset`; None where that is not to be had."""
    mine, wanted = _open(spec), _open(preset)
    given: dict[str, Any] = {}
    if spec.window.size != preset.window.size:
        if preset.window.size > 1:
            return None
        given["window.size"] = 1
        mine.discard("window_gate")
    if not wanted <= mine or not mine - wanted <= NEUTRAL.keys():
        return None
    return given | {GATE + name: NEUTRAL[name] for name in sorted(mine - wanted)}


def _open(spec: LayerSpec) -> set[str]:
    return {name for name, (_, gate) in spec.roles().items() if not isinstance(gate, Number)}
