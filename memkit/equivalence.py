"""`memkit.equivalent`: whether two specs are the same rule, shown by a proof where there is one, else by numbers.

The rules are compared, y and state from q, k, v, gates and weights; the projections and norms around them (`layer`) are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from memkit.given import GATE, Side, gate_path, sides
from memkit.specs.errors import MemkitError, SpecError

if TYPE_CHECKING:
    from memkit.compiler.terms import Sum, Table
    from memkit.counterexample import Counterexample

WIDTHS = ((3, 4), (7, 6), (9, 8), (17, 16))  # (K, V) a proof is made at: two of these, one under and one over V
NEUTRAL: Mapping[str, float] = {"retain": 1.0, "momentum": 0.0, "window_gate": 1.0}


@dataclass(frozen=True)
class Equivalence:
    """The answer of `memkit.equivalent`; true where the rules are equal.

    kind: "structural" for a proof, "numerical" for drawn numbers. evidence: the proof's rewrites, or what was run and found.
    counterexample: the smallest difference found, where they differ.
    """

    equal: bool
    kind: Literal["structural", "numerical"]
    evidence: str
    a: str
    b: str
    given: Mapping[str, Any] = field(default_factory=dict)
    counterexample: Counterexample | None = None

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        under = f" given {', '.join(f'{k}={v}' for k, v in self.given.items())}" if self.given else ""
        return f"{self.a} {'=' if self.equal else '!='} {self.b}{under}   ({self.kind})\n{self.evidence}"


def equivalent(a: Any, b: Any, *, given: Mapping[str, Any] | None = None) -> Equivalence:
    """Whether two specs are one rule.

    Args:
        a, b: presets, paths, dicts or LayerSpecs.
        given: dotted overrides, laid over whichever side has that knob, and gates fixed to a number:
            {"window.size": 1, "gates.momentum": 0}. A side without such a gate is as it is. `window.size: 1` switches the window
            off, its gate included, unless that is given too.

    Returns:
        Equivalence: "structural" where both sides have one canonical form, which proves it for every input; else "numerical":
        values, final memories and gradients in float64 on drawn inputs, with the smallest counterexample where they differ.

    Raises:
        SpecError: a spec that cannot be read, or a `given` that neither side has.
    """
    left, right = sides(a, b, given)
    names, given = (left.spec.name, right.spec.name), dict(given or {})
    names = (f"{names[0]} (first)", f"{names[1]} (second)") if names[0] == names[1] else names
    proof = prove(left, right)
    if proof is not None:
        return Equivalence(True, "structural", proof, *names, given)
    from memkit.counterexample import search

    found, text = search(left, right)
    if found is not None:
        text += _hint(left, right)
    return Equivalence(found is None, "numerical", text, *names, given, found)


@dataclass(frozen=True)
class Form:
    """A side in canonical form at one pair of widths: results, the chunk they depend on (0 for none), the rules that led there."""

    results: dict[str, Sum]
    chunk: int
    sizes: dict[str, tuple[int, ...]]
    steps: tuple[str, ...]

    def key(self) -> Any:
        """Equal for equal forms of one table."""
        from memkit.compiler.terms import number

        results = {label: frozenset((f, number(c)) for f, c in total.items()) for label, total in self.results.items()}
        return self.chunk, frozenset(results.items()), frozenset((n, s) for n, s in self.sizes.items())


def canonical_form(side: Side, key_dim: int, value_dim: int, table: Table) -> Form:
    """The canonical form of a side.

    Raises:
        SpecError: widths the spec cannot have, or a formula that cannot be traced. GraphError: an operation without a normal form.
    """
    from memkit.compiler.build import build
    from memkit.compiler.canonical import Canonical
    from memkit.compiler.match import inputs, live
    from memkit.compiler.terms import Rewrites
    from memkit.compiler.token_graph import token_graph
    from memkit.specs.rule import Rule

    token = token_graph(build(Rule(side.spec, key_dim, value_dim)), side.fixed())
    rewrites = Rewrites()
    forms = Canonical(table, rewrites).form(token.graph, token.sizes)
    results = live(forms, table)
    read = inputs(results, table)
    chunk = token.chunk if any(n.startswith("anchor") for n in read) else 0
    steps = [f"given {text}" for text in side.applied] + rewrites.lines()
    steps += [f"{n} stands for {own}" for n, own in token.names.items()]
    steps += [f"{label.removeprefix('next.')} dropped: no output reads it" for label in forms if label not in results]
    if token.chunk and not chunk:
        free = "no gradient reads the memory, so it does not matter where it is taken"
        steps.append(f"{free}: chunks of {token.chunk} tokens are the token rule, exactly")
    return Form(results, chunk, {n: s for n, s in token.sizes.items() if n in read or n in token.names}, tuple(steps))


def prove(left: Side, right: Side) -> str | None:
    """The chain of rewrites that leads both sides to one form, at two pairs of widths; None where it does not."""
    from memkit.compiler.ir import GraphError
    from memkit.compiler.terms import Table

    residual = left.spec.memory.residual or right.spec.memory.residual
    first: tuple[Form, Form] | None = None
    done: list[str] = []
    for key_dim, value_dim in WIDTHS:
        table = Table()
        try:
            forms = [canonical_form(side, value_dim if residual else key_dim, value_dim, table) for side in (left, right)]
        except GraphError:
            return None
        except SpecError as error:
            if "memory" not in error.where:
                raise
            continue
        if not same(forms[0], forms[1], table):
            return None
        first = first or (forms[0], forms[1])
        done.append(f"K={value_dim if residual else key_dim} V={value_dim}")
        if len(done) == 2:
            break
    return None if first is None else _chain(left, right, first, done)


def same(a: Form, b: Form, table: Table) -> bool:
    """Whether two forms are one up to the names of weights, slots and axes."""
    if a.chunk != b.chunk or set(a.results) != set(b.results):
        return False
    if a.key() == b.key():
        return True  # the isomorphism that maps everything to itself
    from memkit.compiler.match import isomorphic, to_networkx

    return isomorphic(to_networkx(a.results, table, a.sizes), to_networkx(b.results, table, b.sizes))


def _chain(left: Side, right: Side, forms: tuple[Form, Form], widths: list[str]) -> str:
    lines = [f"one canonical form for both, {' and '.join(widths)}; it holds for every input and every length"]
    for side, form in zip((left, right), forms, strict=True):
        lines += [f"  {side.spec.name}:", *(f"    {step}" for step in form.steps)]
    lines.append("  both: operands sorted, summed axes renamed; the graphs are isomorphic, inputs matched by role")
    return "\n".join(lines)


def _hint(left: Side, right: Side) -> str:
    """The gates to fix that would make the two equal, if fixing those that one side lacks does."""
    more = {}
    for name, value in NEUTRAL.items():
        given = [gate_path(s.spec, name) is not None and name not in s.fixed() for s in (left, right)]
        if given[0] != given[1]:
            more[GATE + name] = value
    if not more:
        return ""
    try:
        proof = prove(*(sides(left.spec, right.spec, more)))
    except MemkitError:
        return ""
    return "" if proof is None else f"\nequal given {', '.join(f'{n}={v:g}' for n, v in more.items())}"
