"""Known equivalences of the shipped kinds, each with its exact condition, and near misses: tests hold every row, the docs print them.

`python -m memkit.equivalence_table > docs/equivalences.md` writes the page anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Source = str | Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """`a` and `b` under `given` are one rule ("structural": proved, "numerical": checked), or differ ("no")."""

    a: Source
    b: Source
    given: Mapping[str, Any]
    answer: str
    why: str

    def presets(self) -> set[str]:
        """The presets it speaks of."""
        return {s if isinstance(s, str) else str(s.get("extends", "")) for s in (self.a, self.b)}

    def name(self) -> str:
        return f"{said(self.a)} | {said(self.b)} | {listed(self.given) or 'always'}"


def said(source: Source) -> str:
    """A source in one line: a preset's name, or the name and what is changed."""
    if isinstance(source, str):
        return source
    rest = ", ".join(f"{k}: {_short(v)}" for k, v in source.items() if k != "extends")
    return f"{source['extends']} with {rest}" if "extends" in source else rest


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        kind = value.get("kind")
        rest = ", ".join(f"{k} {_short(v)}" for k, v in value.items() if k != "kind")
        return f"{kind} ({rest})" if kind and rest else str(kind or f"({rest})")
    if isinstance(value, list | tuple):
        return ", ".join(_short(v) for v in value)
    return str(value)


def listed(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={_short(v) if isinstance(v, Mapping) else v}" for k, v in given.items())


def _with(base: str, **sections: Any) -> dict[str, Any]:
    return {"extends": base, **sections}


TOKEN = {"grad_at": "token"}
CHUNK = {"grad_at": "chunk", "chunk_size": 4}
LINEAR = {"memory": "linear", "features": "identity"}
ONE = {"window.size": 1}

NET = [{"linear": 4}, {"activation": "gelu"}, {"linear": 1}]
PROOF, NUMBERS, NO = "structural", "numerical", "no"

EQUAL: Sequence[Row] = (
    # delta rules
    Row("omeganet", "deltanet", {**ONE, **LINEAR, "gates.retain": 1, "update.chunk_size": 1}, PROOF,
        "the Omega rule over one token, on a matrix, without decay, is the delta rule"),
    Row("dot_linear", "deltanet", {**ONE, "features": "identity"}, PROOF, "Dot with phi = id over one token is the delta rule"),
    Row("dot_linear", "omeganet", {**LINEAR, "gates.retain": 1, "update.chunk_size": 1}, PROOF, "Dot with phi = id is Omega without decay"),
    Row("dot", "dot_linear", {"memory": "linear", "update.chunk_size": 1}, PROOF, "the linear case of Dot, gradients at every token"),
    Row("titans_linear", "deltanet", {"gates.momentum": 0, "gates.retain": 1}, PROOF,
        "Titans without momentum and decay is the delta rule"),
    Row("titans_linear", "gated_deltanet", {"gates.momentum": 0, "update.grad_at": "decayed"}, PROOF,
        "the same for every decay only if the gradient is taken at the decayed memory"),
    Row("gated_deltanet", "deltanet", {"gates.retain": 1}, PROOF, "no decay"),
    Row("gated_deltanet", "retnet", {"gates.retain": 0, "gates.step_size": 1}, PROOF,
        "nothing kept: at an empty memory the delta rule is Hebbian"),
    Row("kda", "deltanet", {"gates.retain": 1}, PROOF, "no decay, channel by channel"),
    Row("kda", "gated_deltanet", {"gates.retain": 0.9}, PROOF, "one fraction kept for all channels"),
    Row("ttt_linear", "deltanet", {"memory": "linear", "update.chunk_size": 1}, PROOF, "TTT on a bare matrix, mini-batches of one token"),
    Row("ttt_mlp", "titans", {"memory": "mlp", "update.chunk_size": 1, "gates.retain": 1, "gates.momentum": 0}, PROOF,
        "the same net without norm and residual: TTT is Titans that forgets nothing and has no momentum"),
    # Omega, Titans, Atlas
    Row("omeganet", "titans", {**ONE, "features": "identity", "memory.residual": False, "optimizer": "momentum"}, PROOF,
        "Omega over one token with momentum is Titans, for any memory"),
    Row("titans", "omeganet", {**ONE, "gates.momentum": 0, "features": "identity", "memory": "mlp"}, PROOF,
        "Titans without momentum is OmegaNet over one token"),
    Row("titans", _with("titans", optimizer="gd"), {"gates.momentum": 0}, PROOF, "momentum 0 is gradient descent; the slot is dead"),
    Row("atlas", "omeganet", {"optimizer": "gd"}, PROOF, "Atlas without Muon is OmegaNet"),
    Row("atlas_plus", "omeganet", {"memory": "mlp", "optimizer": "gd"}, PROOF, "Atlas++ with the plain net, without Muon"),
    Row("atlas", "titans", {**ONE, "features": "identity", "memory": "mlp", "optimizer": "momentum"}, PROOF,
        "Newton-Schulz left out altogether, over one token, is Titans"),
    Row(_with("omeganet", window={"size": 3, "gate": "input"}), _with("omeganet", window={"size": 1, "gate": "none"}),
        {"gates.window_gate": [0, 0, 1]}, PROOF, "older tokens weighed 0: any window is a window of one"),
    Row(_with("omeganet", window={"size": 3, "gate": "input"}), _with("omeganet", window={"size": 3, "gate": "none"}),
        {"gates.window_gate": [1, 1, 1]}, PROOF, "gate none weighs every token of the window 1"),
    # Hebbian rules
    Row("retnet", "linear_attention", {"gates.retain": 1}, PROOF, "no decay"),
    Row("gla", "linear_attention", {"gates.retain": 1}, PROOF, "no decay, channel by channel"),
    Row("gla", "retnet", {"gates.retain": 0.9}, PROOF, "one constant fraction for all channels"),
    Row("swla", "retnet", ONE, PROOF, "SWLA over one token is gated linear attention"),
    Row("swla", "linear_attention", {**ONE, "gates.retain": 1}, PROOF, "and without decay linear attention"),
    Row("dla", "retnet", {"memory": "linear", "gates.step_size": 1}, PROOF,
        "DLA on a matrix is gated linear attention, whatever the chunk: the gradient does not read the memory"),
    Row("swla", _with("swla", update=CHUNK), {}, PROOF, "a gradient that does not read the memory: the chunk form is exact"),
    Row(_with("swla", optimizer="momentum"), _with("swla", optimizer="momentum", update=CHUNK), {}, PROOF, "also with momentum"),
    Row(_with("swla", optimizer="muon"), _with("swla", optimizer="muon", update=CHUNK), {}, PROOF, "also with Newton-Schulz"),
    Row("swla", _with("swla", update={"grad_at": "decayed"}), {}, PROOF, "nor does it matter that the memory has decayed"),
    Row("deltanet", "linear_attention", {"gates.step_size": 0}, PROOF, "no step, no write: all rules keep what they have"),
    # infinite features
    Row("exp_attention", "linear_attention", {"features": "identity"}, PROOF, "phi = id"),
    Row("deep_transformer", "exp_attention", {"memory": "linear", "gates.step_size": 1}, PROOF,
        "the numerator of softmax attention is the linear DeepTransformer"),
    Row("swdt", "deep_transformer", {**ONE, "gates.retain": 1}, PROOF, "SWDT over one token, without decay"),
    Row("swdt", "swla", {**LINEAR, "gates.step_size": 1}, PROOF, "SWDT on a matrix with phi = id is SWLA"),
    # kinds that are other kinds
    Row("atlas", _with("atlas", update=TOKEN), {"update.chunk_size": 1}, PROOF, "chunks of one token are the recurrence, for every rule"),
    Row("titans", _with("titans", memory={"kind": "chain", "steps": NET}), {}, PROOF,
        "an mlp written out as a chain of steps"),
    Row("deltanet", _with("deltanet", memory={"kind": "mlp", "depth": 1}), {}, PROOF, "one layer and no residual: a matrix"),
    Row("deltanet", _with("deltanet", bias={"kind": "lq", "q": 2}), {}, PROOF, "l_q with q = 2 is l2"),
    Row("titans", _with("titans", bias={"kind": "expression", "formula": "0.5*r^2"}), {}, PROOF, "l2 as a formula"),
    Row(_with("deltanet", bias={"kind": "expression", "formula": "r^2"}, optimizer={"kind": "gd", "step_size": 0.25}),
        _with("deltanet", optimizer={"kind": "gd", "step_size": 0.5}), {}, PROOF, "l2 without its 1/2 is l2 with the step size doubled"),
    Row("deltanet", _with("deltanet", features={"kind": "elementwise", "degree": 1}), {}, PROOF, "powers up to the first: nothing"),
    Row("deltanet", _with("deltanet", bias={"kind": "huber", "delta": 1e6}), {}, NUMBERS, "equal while no residual reaches delta"),
    Row("omeganet", _with("omeganet", features={"kind": "polynomial", "coefficients": "taylor"}), {}, NUMBERS,
        "learned coefficients at their start, 1/i!"),
    Row("titans_linear", "retnet", {"gates.step_size": 0}, NUMBERS, "the slot starts at zero and, without a step, stays there"),
)  # fmt: skip

DIFFERENT: Sequence[Row] = (
    Row("titans_linear", "gated_deltanet", {"gates.momentum": 0}, NO,
        "the papers equate them; Titans takes the gradient before the decay, Gated DeltaNet after it"),
    Row("titans_linear", "deltanet", {"gates.retain": 1}, NO, "momentum is left"),
    Row(_with("atlas", optimizer={"kind": "muon", "steps": 0}), _with("atlas", optimizer="momentum"), {"gates.step_size": 1}, NO,
        "Newton-Schulz with 0 steps still divides by the norm"),
    Row("atlas", "omeganet", {"gates.momentum": 0}, NO, "without momentum Atlas is a normalised delta rule, not gradient descent"),
    Row("deltanet", _with("deltanet", update=CHUNK), {}, NO, "a frozen chunk is not the token rule once the gradient reads the memory"),
    Row("dla", _with("dla", update=TOKEN), {}, NO, "nor with a deep memory, whose gradient reads its own other layers"),
    Row("titans", _with("titans", update=CHUNK), {}, NO, "chunk sizes are part of the meaning: 64 is not 4"),
    Row("omeganet", _with("omeganet", window={"size": 2, "gate": "none"}), {"window.gate": "none"}, NO, "windows of 8 and of 2 tokens"),
    Row("swla", _with("swla", window={"size": 1, "gate": "none"}), {"gates.window_gate": 1}, NO,
        "a window writes its tokens more than once"),
    Row("ttt_linear", "deltanet", {"update.chunk_size": 1}, NO, "the norm and the residual are left"),
    Row("deltanet", _with("deltanet", memory={"kind": "linear", "residual": True}), {}, NO,
        "a residual is a matrix memory with targets v - k, not the same one"),
    Row("deltanet", _with("deltanet", bias={"kind": "huber", "delta": 1.0}), {}, NO, "residuals beyond delta"),
    Row("deltanet", _with("deltanet", bias={"kind": "expression", "formula": "r^2"}), {}, NO, "the 1/2 is a factor of the step size"),
    Row("deltanet", _with("deltanet", bias={"kind": "lq", "q": 3}), {}, NO, "q = 3"),
    Row("deltanet", _with("deltanet", features={"kind": "polynomial", "degree": 1, "coefficients": "taylor"}), {}, NO,
        "degree 1 has the constant feature as well: phi(a).phi(b) = 1 + a.b"),
    Row("exp_attention", _with("exp_attention", features={"kind": "polynomial", "degree": 4, "coefficients": "taylor"}), {}, NO,
        "a truncation: off by at most sum_(i > 4) |q.k|^i / i!"),
    Row("linear_attention", _with("linear_attention", update={"read": "before"}), {}, NO,
        "a read before the write does not see its own token"),
    Row("kda", "gated_deltanet", {}, NO, "channels may decay apart"),
    Row("titans", _with("titans", memory={"kind": "gated_mlp"}), {}, NO, "another net"),
)  # fmt: skip


def markdown(reductions: str) -> str:
    """The docs page; `reductions` is the table of `memkit equiv --lattice`."""
    rows = [_HEAD, "| rule | is | given | shown | |\n|---|---|---|---|---|"]
    rows += [
        f"| {said(r.a)} | {said(r.b)} | {_code(r.given)} | {'proof' if r.answer == 'structural' else 'numbers'} | {_cell(r.why)} |"
        for r in EQUAL
    ]
    rows += [_MISSES, "| rule | is not | given | why |\n|---|---|---|---|"]
    rows += [f"| {said(r.a)} | {said(r.b)} | {_code(r.given)} | {_cell(r.why)} |" for r in DIFFERENT]
    rows += [_LATTICE, "```\n" + reductions + "\n```\n"]
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(given: Mapping[str, Any]) -> str:
    return f"`{listed(given)}`" if given else "-"


_HEAD = """# Equivalences

`memkit.equivalent(a, b, given={...})` and `memkit equiv A B --given PATH=VALUE` say whether two specs are the same rule.

- **proof**: one token of both rules (inner gradient, optimizer, retention, read) is brought to one canonical form by identities of real
  numbers, each printed by name. It holds for every input, gate, weight and length. It is made at two pairs of widths (K, V).
- **numbers**: outputs, final memories and gradients agree in float64 on drawn inputs, at lengths around the edges of windows and chunks.
- A **no** comes with the shortest sequence found on which the two differ, the token, the head and the values.

Rules are compared, that is `memkit.compile(...)`: y and the state from q, k, v, gates and weights. The projections, convolutions and norms
of `layer` are not part of a rule, nor is where its memory starts. `given` sets knobs and fixes gates on whichever side has them; a side
without such a gate stays as it is. `window.size=1` switches the window off together with its gate, unless the gate is given as well.

## Equal
"""
_MISSES = "\n## Near misses\n"
_LATTICE = """
## Which preset becomes which

All reductions between presets under some of the switches, each proved; the smallest sets are shown. `memkit equiv --lattice -o lattice.svg`
draws them.
"""


def main() -> None:
    from memkit.lattice import lattice, table

    print(markdown(table(lattice())), end="")


if __name__ == "__main__":
    main()
