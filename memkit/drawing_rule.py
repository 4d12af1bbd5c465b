"""The rule view: what one token reads and writes, in one head."""

from __future__ import annotations

from memkit.specs.errors import MemkitError
from memkit.specs.gate import Number
from memkit.specs.layer import LayerSpec

from .drawing_model import Picture
from .equations import gradient_line

LEGEND = ("given", "inner", "outer", "step", "value", "inner_path", "outer_path")


def rule_picture(spec: LayerSpec) -> Picture:
    """Boxes: tokens, gates, memory, prediction, loss, gradient, optimizer, retention, write, read."""
    c = spec.window.size
    picture = Picture(f"{spec.name}: one token, one head", legend=LEGEND)
    _tokens(picture, spec)
    _memory(picture, spec)
    i = "i" if c > 1 else "t"
    body = spec.memory.equation().partition(" = ")[2]
    at = {"token": "W_{t-1}", "decayed": "retained", "chunk": "A_t"}[spec.update.grad_at]
    point = {"token": "W_{t-1}", "decayed": spec.retention.equation(), "chunk": "A_t"}[spec.update.grad_at]
    picture.box("predict", f"p_{i} = M(k_{i}; {point})", f"M(x) = {_short(spec, body)}")
    free, linear = gradient_is_free(spec)
    loss_lines = (spec.bias.equation().partition(" = ")[2],) + (("its gradient does not depend on p",) if free else ())
    picture.box("loss", f"loss(p_{i}, v_{i})", *loss_lines)
    picture.arrow({"W_{t-1}": "W_before", "retained": "retain", "A_t": "anchor"}[at], "predict", "idle" if free and linear else "value")
    picture.arrow("predict", "loss", "idle" if free else "value")
    left, _, right = gradient_line(spec).partition("   ")[0].partition(" = ")
    shown = right.replace(f"; {point}", "") if len(right) > 30 else right
    picture.box("gradient", f"{left} = {shown}")
    picture.arrow("loss", "gradient", "inner", weight=3)
    if free and not linear:
        picture.arrow("predict", "gradient", label="activations")
    _features(picture, spec, "key", "tokens", "predict")
    picture.arrow("tokens", "loss")
    _write(picture, spec)
    _read(picture, spec)
    _gates(picture, spec)
    used = {arrow.kind for arrow in picture.arrows}
    picture.legend += tuple(kind for kind in ("hold", "idle") if kind in used)
    return picture


def gradient_is_free(spec: LayerSpec) -> tuple[bool, bool]:
    """Whether the loss's gradient is the same whatever the memory predicts, and whether the memory is linear in its weights.

    As the compiler infers it; (False, False) where the equations cannot be traced.
    """
    from memkit.compiler.build import build
    from memkit.compiler.facts import facts
    from memkit.specs.rule import Rule

    try:
        known = facts(build(Rule(spec, 4, 4)))
    except MemkitError:
        return False, False
    return known.gradient_degree == 0, known.memory_linear


def _short(spec: LayerSpec, body: str) -> str:
    return body.replace("phi(x)", "x") if spec.features.equation() == "phi(x) = x" else body


def _tokens(picture: Picture, spec: LayerSpec) -> None:
    c = spec.window.size
    if c == 1:
        picture.box("tokens", "k_t, v_t", "the token's key and value", kind="given")
    else:
        names = [f"t-{c - 1 - i}" for i in range(c - 1)] + ["t"]
        cells = tuple(names) if c <= 5 else (*names[:2], "..", *names[-2:])
        picture.box("tokens", f"window of {c}: k_i, v_i", kind="given", cells=cells)
    picture.box("query", "q_t", kind="given")


def _memory(picture: Picture, spec: LayerSpec) -> None:
    weights = ", ".join(f"{name} [{', '.join(_axes(spec, shape))}]" for name, shape in spec.memory.shapes(1_000_003, 1009).items())
    span = () if spec.features.finite() else ("as coefficients of all keys seen",)
    start = "W_0 = 0" if spec.memory.initial == "zero" else "W_0 learned by training"
    picture.box("W_before", "W_{t-1}", f"memory: {weights}", *span, start, kind="inner")
    if spec.update.grad_at == "chunk":
        picture.box("anchor", "A_t", f"W at the start of the chunk of {spec.update.chunk_size}", kind="inner")
        picture.arrow("W_before", "anchor", "hold")


def _axes(spec: LayerSpec, shape: tuple[int, ...]) -> list[str]:
    """Letters for the axes of a weight, from widths that stand for F and V."""
    return [{1_000_003: "F" if spec.features.equation() != "phi(x) = x" else "K", 1009: "V"}.get(n, f"{n / 1009:g}V") for n in shape]


def _features(picture: Picture, spec: LayerSpec, which: str, tail: str, head: str) -> None:
    """An arrow for a key or query, through the features where they are not the identity."""
    if spec.features.equation() == "phi(x) = x":
        picture.arrow(tail, head)
        return
    i = {"key": "i" if spec.window.size > 1 else "t", "query": "t"}[which]
    letter = which[0]
    name = picture.box(f"features_{which}", f"phi({letter}_{i})", *((spec.features.equation(),) if which == "key" else ()))
    picture.arrow(tail, name)
    picture.arrow(name, head)
    if spec.features.params():
        learned = picture.box(f"scalars_{which}", ", ".join(spec.features.params()), "one set a head", kind="outer")
        picture.arrow(learned, name)


def _write(picture: Picture, spec: LayerSpec) -> None:
    """The optimizer's lines, what is kept, and the sum."""
    last = "gradient"
    slots = _slots(spec)
    lines = spec.optimizer.equation().split("; ")
    for i, line in enumerate(lines):
        name = picture.box(f"optimizer_{i}", line)
        picture.arrow(last, name, "inner", weight=3)
        if slots and i == 0:
            for slot in slots:
                picture.box(f"slot_{slot}", f"{slot}_{{t-1}}", "the optimizer's slot", kind="inner")
                picture.arrow(f"slot_{slot}", name)
                picture.box(f"slot_{slot}_after", f"{slot}_t", kind="inner")
                picture.arrow(name, f"slot_{slot}_after")
        last = name
    picture.box("W_after", "W_t", kind="inner")
    if spec.retention.equation() == "W_{t-1}":
        picture.box("write", "W_{t-1} + U_t")
        picture.arrow("W_before", "write")
    else:
        picture.box("retain", spec.retention.equation())
        picture.box("write", f"{spec.retention.equation()} + U_t")
        picture.arrow("W_before", "retain")
        picture.arrow("retain", "write", weight=1 if spec.update.grad_at == "decayed" else 3)
    picture.arrow(last, "write", "inner", weight=3)
    picture.arrow("write", "W_after", weight=3)


def _slots(spec: LayerSpec) -> list[str]:
    import torch

    return list(spec.optimizer.init(torch.zeros(2, 2)))


def _read(picture: Picture, spec: LayerSpec) -> None:
    before = spec.update.read == "before"
    picture.box("read", "y_t = M(q_t; W_{t-1})" if before else "y_t = M(q_t; W_t)", kind="result")
    picture.arrow("W_before" if before else "W_after", "read", weight=1 if before else 3)
    _features(picture, spec, "query", "query", "read")
    norm = ", ".join(spec.memory.params(4))
    if norm:
        for head in ("predict", "read"):
            picture.box(f"norm_{head}", norm, "of the memory's norm", kind="outer")
            picture.arrow(f"norm_{head}", head)


def _gates(picture: Picture, spec: LayerSpec) -> None:
    """Each gate beside what it acts on; a number is part of an equation and no gate."""
    for name, (_, gate) in spec.roles().items():
        if isinstance(gate, Number) or (name == "window_gate" and spec.window.size == 1 and gate.term(name) == ""):
            continue
        what = gate.term(name).strip() or name
        head = {"window_gate": "gradient", "retain": "retain"}.get(name) or _acts(spec, what)
        shown = f"{name}_{{t,i}}" if name == "window_gate" and spec.window.size > 1 and what.endswith("_t") else what
        picture.box(f"gate_{name}", shown, gate.equation(), kind="outer")
        picture.arrow(f"gate_{name}", head)


def _acts(spec: LayerSpec, what: str) -> str:
    """The optimizer's line that names a gate; the first where none does."""
    lines = spec.optimizer.equation().split("; ")
    return f"optimizer_{next((i for i, line in enumerate(lines) if what in line), 0)}"
