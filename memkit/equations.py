"""A spec's equation in plain text, put together from what each component says about itself."""

from __future__ import annotations

from memkit.specs.layer import LayerSpec

# Role -> the letter of each paper. Titans and Atlas swap theirs.
PAPERS = ("Atlas", "Titans", "DeltaNet")
LETTERS = {
    "retain": ("alpha_t", "1 - alpha_t", "alpha_t"),
    "step_size": ("eta_t", "theta_t", "beta_t"),
    "momentum": ("theta_t", "eta_t", "-"),
    "window_gate": ("gamma^(t)_i", "-", "-"),
}

MARK = 1_000_003  # a width that no hidden layer has


def equation_of(spec: LayerSpec) -> str:
    """The recurrence of one head, one line a step, with this spec's own terms.

    phi is left out where it is the identity; gates that are the number 1 are left out; `_t` marks what changes from token to token.
    """
    plain = spec.features.equation() == "phi(x) = x"
    memory = spec.memory.equation().replace("phi(x)", "x") if plain else spec.memory.equation()
    lines = [] if plain else [spec.features.equation()]
    lines += [memory, spec.bias.equation(), gradient_line(spec), *spec.optimizer.equation().split("; ")]
    lines += [f"W_t = {spec.retention.equation()} + U_t", f"y_t = M(q_t; {'W_{t-1}' if spec.update.read == 'before' else 'W_t'})"]
    if not spec.features.finite():
        first = " and ".join(n for n, shape in spec.memory.shapes(MARK, 64).items() if shape[-1] == MARK)
        lines.insert(2, f"W phi(x) = sum_n d_n phi(k_n).phi(x) over all keys seen, for W = {first}; no d at the start")
    return "\n".join(_align(line) for line in lines)


def gradient_line(spec: LayerSpec) -> str:
    """G_t, with the point at which it is taken."""
    at = {"token": "W_{t-1}", "decayed": spec.retention.equation(), "chunk": "A_t"}[spec.update.grad_at]
    c, weight = spec.window.size, spec.window.gate.term("window_gate")
    weight = {"window_gate_t ": "window_gate_{t,i} ", "window_gate ": "window_gate_{i-t} "}.get(weight, weight) if c > 1 else weight
    where = f"   A_t = W at the start of t's chunk of {spec.update.chunk_size} tokens" if spec.update.grad_at == "chunk" else ""
    if c == 1:
        return f"G_t = {weight}grad_W loss(M(k_t; {at}), v_t){where}"
    return f"G_t = sum_{{i=t-{c - 1}..t}} {weight}grad_W loss(M(k_i; {at}), v_i){where}"


def _align(line: str) -> str:
    left, sign, right = line.partition(" = ")
    return f"{left:<13}{sign}{right}"
