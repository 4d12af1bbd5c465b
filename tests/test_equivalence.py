"""Equivalences: the table, what a proof rests on, what a counterexample says, and the command line."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from memkit import cli
from memkit.compiler import interpret
from memkit.compiler.build import build
from memkit.compiler.canonical import Canonical
from memkit.compiler.match import isomorphic, to_networkx
from memkit.compiler.terms import Definition, Factors, Rewrites, Sum, Symbol, Table
from memkit.compiler.token_graph import TokenGraph, token_graph
from memkit.equivalence import equivalent, prove
from memkit.equivalence_table import DIFFERENT, EQUAL, Row, markdown
from memkit.given import Side, sides
from memkit.inputs import Inputs, draw
from memkit.lattice import drawing, lattice, nearest, table
from memkit.specs.errors import SpecError
from memkit.specs.gate import Number
from memkit.specs.io import load_spec, presets
from memkit.specs.layer import LayerSpec
from memkit.specs.optimizer import Gd, Momentum
from memkit.specs.reference import ReferenceRule
from memkit.specs.retention import Channel, Scalar
from memkit.specs.rule import Rule
from memkit.specs.state import MemoryState

PAGE = Path(__file__).resolve().parent.parent / "docs" / "equivalences.md"


# the table


@pytest.mark.parametrize("row", EQUAL, ids=Row.name)
def test_equal(row: Row) -> None:
    found = equivalent(row.a, row.b, given=row.given)
    assert found and found.kind == row.answer, str(found)
    assert found.counterexample is None and ("one canonical form" in found.evidence) == (found.kind == "structural")


@pytest.mark.parametrize("row", DIFFERENT, ids=Row.name)
def test_near_misses(row: Row) -> None:
    found = equivalent(row.a, row.b, given=row.given)
    assert not found and found.kind == "numerical", str(found)
    example = found.counterexample
    assert example is not None and example.quantity == "y" and example.token == example.tokens - 1
    assert max(abs(a - b) for a, b in zip(example.a, example.b, strict=True)) > 1e-9
    assert str(example) in found.evidence and f"token {example.token}, head {example.head}" in str(found)


def test_the_table_is_large_enough() -> None:
    assert len(EQUAL) + len(DIFFERENT) >= 25 and sum(row.answer == "structural" for row in EQUAL) >= 15
    assert set(presets()) <= set().union(*(row.presets() for row in EQUAL))
    assert len({row.name() for row in (*EQUAL, *DIFFERENT)}) == len(EQUAL) + len(DIFFERENT)


@pytest.fixture(scope="module")
def reductions():
    return lattice()


def test_the_docs_page_is_current(reductions) -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(table(reductions)), "python -m memkit.equivalence_table > docs/equivalences.md"


def test_lattice(reductions) -> None:
    found = {(r.start, r.end): r for r in reductions}
    assert found["titans_linear", "deltanet"].given in ({"gates.momentum": 0, "gates.retain": 1}, {"gates.retain": 1, "optimizer": "gd"})
    assert found["swla", "retnet"].given == {"window.size": 1} and ("deltanet", "linear_attention") not in found
    assert ("titans_linear", "gated_deltanet") not in found and ("omeganet", "deltanet") in found
    shown = {(r.start, r.end) for r in nearest(reductions)}
    assert ("swla", "retnet") in shown and ("swla", "linear_attention") not in shown
    source = drawing(reductions).source
    assert all(f"{a} -> {b}" in source for a, b in shown)


# what a proof rests on


def _values(tokens: TokenGraph, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(size, generator=g, dtype=torch.float64) for n, size in tokens.sizes.items()}


class Evaluate:
    """The meaning of a canonical form, on numbers."""

    def __init__(self, table: Table, env: Mapping[str, Tensor]) -> None:
        self.table, self.env = table, env
        self.known: dict[str, Tensor] = {}

    def sum(self, total: Sum, order: tuple[str, ...]) -> Tensor:
        return sum((c * self.product(factors, order) for factors, c in total.items()), torch.zeros((), dtype=torch.float64))  # type: ignore[return-value]

    def product(self, factors: Factors, order: tuple[str, ...]) -> Tensor:
        letters: dict[Any, str] = {}
        parts = []
        for symbol, indices in factors:
            if symbol not in self.known:
                self.known[symbol] = self.factor(symbol)
            parts.append((self.known[symbol], "".join(letters.setdefault(i, string.ascii_letters[len(letters)]) for i in indices)))
        kept = "".join(letters[i] for i in order if i in letters)
        value = (
            torch.einsum(",".join(p for _, p in parts) + "->" + kept, *(t for t, _ in parts))
            if parts
            else torch.ones((), dtype=torch.float64)
        )
        return value[tuple(slice(None) if i in letters else None for i in order)]

    def factor(self, name: str) -> Tensor:
        symbol = self.table.symbols[name]
        if symbol.op == "param":
            return self.env[symbol.detail]
        if symbol.op == "tensor":
            return torch.tensor(symbol.detail, dtype=torch.float64)
        assert not symbol.gone
        arguments, dims = [], sum(len(self.table.definitions[n].formals) for n in symbol.args)
        before = 0
        for n in symbol.args:
            definition = self.table.definitions[n]
            value = self.sum(dict(definition.terms), definition.formals)
            count = len(definition.formals)
            arguments.append(value[(None,) * before + (slice(None),) * count + (None,) * (dims - before - count)])
            before += count
        own = {"group": lambda x: x, "positive": lambda x: (x > 0).double(), "zero": lambda x: (x == 0).double()}
        return own.get(symbol.op, interpret.FUNCTION_MEANING.get(symbol.op))(*arguments)  # type: ignore[misc]


def _check_form(source: Any) -> None:
    spec = load_spec(source)
    rule = Rule(spec, 3, 3) if spec.memory.residual else Rule(spec, 3, 4)
    tokens = token_graph(build(rule), {n: g.value for n, (_, g) in spec.roles().items() if isinstance(g, Number)})
    shared, env = Table(), _values(tokens)
    if "param.features_coefficients" in env:
        env["param.features_coefficients"] = env["param.features_coefficients"].abs()
    forms = Canonical(shared, Rewrites()).form(tokens.graph, tokens.sizes)
    expected = interpret.run(tokens.graph, env)
    evaluate = Evaluate(shared, env)
    for label, result, want in zip(tokens.graph.labels, tokens.graph.results, expected, strict=True):
        got = evaluate.sum(forms[label], result.axes).expand(want.shape)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m, label=label: f"{spec.name}: {label}: {m}")


ODD_ONES = [
    {"bias": {"kind": "lq", "q": 2}},
    {"bias": {"kind": "lq", "q": 3}, "memory": {"kind": "mlp", "expansion": 1, "activation": "silu"}, "window": {"size": 2}},
    {"bias": {"kind": "huber", "delta": 0.5}, "features": "elu1"},
    {"bias": {"kind": "expression", "formula": "log(cosh(r)) + r^3/3"}, "features": {"kind": "elementwise", "degree": 3}},
    {"bias": {"kind": "lq", "q": 1}, "memory": {"kind": "linear", "norm": "layer"}, "optimizer": {"kind": "muon", "steps": 1}},
    {"bias": {"kind": "lq", "q": 4}, "memory": {"kind": "gated_mlp", "expansion": 1, "activation": "relu"}, "features": "relu"},
]


@pytest.mark.parametrize("source", [*(n for n in presets() if n != "atlas_plus"), *ODD_ONES], ids=str)
def test_the_canonical_form_has_the_value_of_the_graph(source: Any) -> None:
    _check_form(source)


def _token_inputs(spec: LayerSpec, oracle: ReferenceRule, drawn: Inputs, t: int, state: MemoryState | None) -> dict[str, Tensor]:
    """What the token graph reads at token t of one row and head."""
    c, names = spec.window.size, {n: f"weight{i}" for i, n in enumerate(oracle.shapes, 1)}
    env = {names[n]: drawn.weights[n][0] if state is None else state.weights[n][0, 0] for n in names}
    for n, slots in oracle.init_state(1, drawn.weights, drawn.v).slots.items() if state is None else state.slots.items():
        env |= {f"{names[n]}.{s}": x[0, 0] for s, x in slots.items()}
    past = range(t - c + 1, t)
    older = [max(i, 0) for i in past]
    env |= {"q": drawn.q[0, t, 0], "k": drawn.k[0, t, 0], "v": drawn.v[0, t, 0], "x": torch.zeros(3, dtype=torch.float64)}
    env |= {"old_k": drawn.k[0, older, 0], "old_v": drawn.v[0, older, 0], "inside": torch.tensor([float(i >= 0) for i in past]).double()}
    env |= {f"gate.{n}": g[0, t, 0] for n, g in drawn.gates.items() if n != "window_gate"}
    if "window_gate" in drawn.gates:
        gate = drawn.gates["window_gate"][0, t, 0]
        env |= {"gate.window_gate": gate[-1], "gate.window_gate.old": gate[:-1]}
    env |= {f"param.{n.replace('.', '_')}": p for n, p in drawn.params.items()}
    own = {n.partition(".")[2]: p for n, p in drawn.params.items() if n.startswith("features.")}
    tokens = {"q": [env["q"]], "k": [env["k"]], "old_k": list(env["old_k"])}
    wide = {name: torch.stack([spec.features(x, **own) for x in xs]) for name, xs in tokens.items() if xs}
    return env | {f"phi_{n}": x if n == "old_k" else x[0] for n, x in wide.items()}


@pytest.mark.parametrize("name", ["atlas", "gated_deltanet", "titans", "kda", "ttt_mlp", "swla"])
def test_the_token_graph_is_the_oracle(name: str) -> None:
    """Its y and next memory are those of the oracle, token after token; the window's older tokens as the sequence has them."""
    window = {"window.size": 3} if load_spec(name).window.size > 1 else {}
    spec = load_spec(name, {"update.grad_at": load_spec(name).update.grad_at.replace("chunk", "token")} | window)
    oracle = ReferenceRule(spec, 3, 3)
    drawn, state = draw(oracle, 1, 4, 1), None
    tokens = token_graph(build(oracle), oracle.constants)
    for t in range(4):
        env = _token_inputs(spec, oracle, drawn, t, state)
        found = dict(zip(tokens.graph.labels, interpret.run(tokens.graph, env), strict=True))
        y, state = drawn.piece(t, t + 1).run(oracle, state)
        torch.testing.assert_close(found["y"], y[0, 0, 0], rtol=1e-9, atol=1e-9)
        for i, n in enumerate(oracle.shapes, 1):
            torch.testing.assert_close(found[f"next.weight{i}"], state.weights[n][0, 0], rtol=1e-9, atol=1e-9)


def test_names_do_not_matter_and_roles_do() -> None:
    """Isomorphism finds which weight is which; q and k are never exchanged."""
    side = Side(load_spec("dla", {"update.grad_at": "token", "memory.residual": False}))
    tokens = token_graph(build(Rule(side.spec, 3, 4)), side.fixed())
    shared = Table()
    forms = Canonical(shared, Rewrites()).form(tokens.graph, tokens.sizes)
    graph = to_networkx(forms, shared, tokens.sizes)

    def swapped(old: str, new: str):
        names = {old: new, new: old}
        known: dict[int, int] = {}
        renamed = {n: _renamed_params(shared, total, names, known) for n, total in forms.items()}
        labels = {f"next.{a}": f"next.{b}" for a, b in names.items()}
        return to_networkx({labels.get(n, n): t for n, t in renamed.items()}, shared, {names.get(n, n): s for n, s in tokens.sizes.items()})

    assert isomorphic(graph, swapped("weight1", "weight2"))
    assert not isomorphic(graph, swapped("q", "k"))


def _renamed_params(shared: Table, total: Sum, names: Mapping[str, str], known: dict[int, int]) -> Sum:
    """The same sum over other inputs; `known`: definition -> the renamed one."""

    def symbol(name: str) -> str:
        s = shared.symbols[name]
        if s.op == "param":
            return shared.symbol(Symbol("param", names.get(s.detail, s.detail)))
        if not s.args:
            return name
        for n in s.args:
            if n not in known:
                d = shared.definitions[n]
                terms = tuple(_renamed_params(shared, dict(d.terms), names, known).items())
                shared.definitions.append(Definition(d.formals, terms))
                known[n] = len(shared.definitions) - 1
        return shared.symbol(Symbol(s.op, s.detail, tuple(known[n] for n in s.args), s.gone))

    return {tuple((symbol(s), i) for s, i in factors): c for factors, c in total.items()}


def test_the_chain_names_the_rewrites() -> None:
    text = str(memkit.equivalent("titans_linear", "deltanet", given={"gates.momentum": 0, "gates.retain": 1}))
    for part in ("titans_linear = deltanet", "given gates.momentum = 0", "0 x = 0   at layer.optimizer", "1 x = x   at layer.retention",
                 "weight1.S dropped: no output reads it", "K=3 V=4 and K=7 V=6"):  # fmt: skip
        assert part in text
    frozen = equivalent("swla", {"extends": "swla", "update": {"grad_at": "chunk", "chunk_size": 4}})
    assert "chunks of 4 tokens are the token rule" in frozen.evidence


# given


def test_given_goes_to_the_side_that_has_it() -> None:
    left, right = sides("titans_linear", "linear_attention", {"gates.momentum": 0, "gates.retain": 1, "memory.initial": "zero"})
    assert left.fixed() == {"momentum": 0.0, "retain": 1.0, "window_gate": 1.0} and "momentum" not in right.fixed()
    assert left.spec.memory.initial == right.spec.memory.initial == "zero"


def test_a_window_of_one_loses_its_gate_unless_told() -> None:
    assert sides("swla", "swla", {"window.size": 1})[0].fixed()["window_gate"] == 1
    assert "window_gate" not in sides("swla", "swla", {"window.size": 1, "window.gate": "input"})[0].fixed()
    found = equivalent({"extends": "swla", "window": {"size": 1, "gate": "input"}}, "retnet")
    assert not found and "equal given gates.window_gate=1" in str(found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gates.momentm": 0}, "did you mean gates.momentum?"),
        ({"windw.size": 1}, "did you mean window.size?"),
        ({"gates.retain": "one"}, "a number"),
        ({"gates.retain": 2}, "from 0 to 1"),
        ({"gates.window_gate": [1, 0, 0, 1, 1]}, "as many slots"),
        ({"window.size": 0}, "window.size"),
    ],
)
def test_a_given_that_fits_neither_side(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        equivalent("titans_linear", "deltanet", given=given)
    assert said in str(error.value)


def test_gates_of_one_side_alone_are_a_difference() -> None:
    found = equivalent("retnet", "linear_attention")
    assert not found and "gates of one side alone: retain []" in found.evidence and "equal given gates.retain=1" in found.evidence


# mutations: each is caught


def test_a_sign_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Momentum, grad: Any, state: Any, gates: Any) -> Any:
        slot = gates["momentum"] * state["S"] + gates["step_size"] * grad
        return slot, {"S": slot}

    given = {"gates.momentum": 0, "gates.retain": 1}
    assert prove(*sides("titans_linear", "deltanet", given)) is not None
    monkeypatch.setattr(Momentum, "update", wrong)
    found = equivalent("titans_linear", "deltanet", given=given)
    assert not found and found.counterexample is not None and found.counterexample.tokens == 1


@pytest.mark.parametrize(
    ("kind", "a", "b"), [(Channel, "kda", "gated_deltanet"), (Scalar, "kda", "gated_deltanet"), (Scalar, "gla", "retnet")]
)
def test_a_lost_gate_is_caught(monkeypatch: pytest.MonkeyPatch, kind: Any, a: str, b: str) -> None:
    monkeypatch.setattr(kind, "retain", lambda self, W, retain=None: W)
    assert not equivalent(a, b, given={"gates.retain": 0.9})


def test_a_step_size_that_is_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gd, "update", lambda self, grad, state, gates: (-grad, {}))
    assert not equivalent("titans_linear", "deltanet", given={"gates.momentum": 0, "gates.retain": 1})


# the command line


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["equiv", *args])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_command(run, tmp_path: Path) -> None:
    code, out, _ = run("titans_linear", "deltanet", "--given", "gates.momentum=0", "--given", "gates.retain=1")
    assert code == 0 and out.startswith("titans_linear = deltanet given gates.momentum=0, gates.retain=1   (structural)")
    code, out, _ = run("titans_linear", "gated_deltanet", "--given", "gates.momentum=0")
    assert code == 1 and "titans_linear != gated_deltanet" in out and "token 0, head" in out
    for args, said in ((("deltanet",), "two specs"), (("deltanet", "kda", "--given", "x"), "--given"), (("deltanet", "--lattice"), "alone"),
                       ((), "no spec"), (("--lattice", "--import", "x"), "alone"),
                       (("--lattice", "-o", str(tmp_path / "x.html")), ".svg")):  # fmt: skip
        code, out, err = run(*args)
        assert code == 2 and said in err and not out


def test_lattice_command(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reductions) -> None:
    monkeypatch.setattr("memkit.lattice.lattice", lambda: reductions)
    code, out, _ = run("--lattice")
    assert code == 0 and "digraph reductions" in out and "titans_linear" in out
    code, out, _ = run("--lattice", "-o", str(tmp_path / "lattice.dot"))
    assert code == 0 and (tmp_path / "lattice.dot").read_text().startswith("// an edge") and "digraph" not in out
