"""Plots: how a chunk's coefficients come about, and what a layer's memory does over a text. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.compiler.build import build
from memkit.compiler.facts import facts
from memkit.layers.memory_layer import MemoryLayer
from memkit.specs.errors import KernelError, ShapeError, SpecError
from memkit.specs.gate import Number, Role
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule
from memkit.specs.rule import Rule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2f6fb3", "#b5541c", "#4f8a4b", "#74539c")
SPREAD = 0.8  # standard deviation of drawn gates, before they are squashed
WIDTH = 4  # of keys, where only the form of a rule is asked for


def coefficients(source: Any, gates: Mapping[str, Any] | None = None, *, tokens: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """C = R M diag(step) Gamma of one head, and its parts: row t says how much each token's gradient weighs in the memory after token t.

    Where the optimizer is not linear in the gradient, C = M Gamma is what its slot holds, and R weighs the moves.

    Args:
        source: a preset's name, a path, a dict or a LayerSpec.
        gates: name -> values [T], [T, c] for the window, [T, F] for retention by channel (its mean is taken) or one number; those not
            given are drawn around their role's start.
        tokens: T, where no gate is given as values. seed: of drawn gates.

    Returns:
        C, Gamma [T, T + c - 1] (columns: the c - 1 tokens before, then the T tokens), R, M [T, T] and step [T].

    Raises:
        ShapeError: gates of other shapes. SpecError: a gate that the spec does not have.
    """
    spec = load_spec(source)
    known = _gates(spec, dict(gates or {}), tokens, seed)
    length = len(known["step_size"])
    c = spec.window.size
    R, M = _decay(known["retain"]), _decay(known["momentum"]) if "momentum" in spec.roles() else torch.eye(length, dtype=torch.float64)
    Gamma = torch.zeros(length, length + c - 1, dtype=torch.float64)
    for t in range(length):
        Gamma[t, t : t + c] = known["window_gate"][t]
    linear = is_linear(spec)
    C = R @ M @ torch.diag(known["step_size"]) @ Gamma if linear else M @ Gamma
    return {"C": C, "R": R, "M": M, "Gamma": Gamma, "step": known["step_size"]}


def is_linear(spec: LayerSpec) -> bool:
    """Whether the memory is a weighted sum of gradients, as the compiler infers it."""
    return facts(build(Rule(spec, WIDTH, WIDTH))).optimizer is not None


def weights_of_past(source: Any, gates: Mapping[str, Any] | None = None, *, tokens: int = 32, seed: int = 0) -> Tensor:
    """[T, T]: how much of token s is in the memory after token t, as a share of each row; zero for s > t.

    The absolute coefficients C without the tokens before; for an optimizer that is not linear, what retention leaves of each move.
    """
    found = coefficients(source, gates, tokens=tokens, seed=seed)
    C = found["C"][:, found["Gamma"].shape[1] - len(found["step"]) :].abs() if is_linear(load_spec(source)) else found["R"] * found["step"]
    return C / C.sum(1, keepdim=True).clamp_min(1e-30)


def plot_coefficients(source: Any, gates: Mapping[str, Any] | None = None, *, tokens: int = 32, seed: int = 0) -> Figure:
    """C and its parts as heatmaps; see `coefficients`."""
    spec = load_spec(source)
    found = coefficients(spec, gates, tokens=tokens, seed=seed)
    linear = is_linear(spec)
    parts = {"C": "C = R M diag(step) Gamma" if linear else "C = M Gamma, in the slot", "R": "R: kept of the memory"}
    if "momentum" in spec.roles():
        parts["M"] = "M: kept of the momentum"
    if spec.window.size > 1:
        parts["Gamma"] = f"Gamma: window of {spec.window.size}"
    figure = _figure(3.1 * len(parts), 3.0)
    for i, (name, title) in enumerate(parts.items()):
        axes = figure.add_subplot(1, len(parts), i + 1)
        values = found[name].numpy()
        first = len(values) - values.shape[1]  # columns before the first token have negative numbers
        extent = (first - 0.5, len(values) - 0.5, len(values) - 0.5, -0.5)
        picture = axes.imshow(values, cmap="magma_r", extent=extent, interpolation="nearest", vmin=0, aspect="equal")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("gradient of token s")
        axes.set_ylabel("memory after token t")
        figure.colorbar(picture, ax=axes, fraction=0.046, pad=0.03)
    figure.suptitle(spec.name, fontsize=11)
    return figure


def trace(layer: MemoryLayer, x: Tensor, head: int = 0) -> dict[str, Any]:
    """What one head's memory does over a sequence, by the token loop.

    Args:
        layer: trained or fresh. x: [1, T, D], or [T, D]. head: which memory.

    Returns:
        gates: name -> [T, ..]; surprise [T], the norm of the inner gradient over all weights; past [T, T], see `weights_of_past`.

    Raises:
        ShapeError: an x that is no single sequence, a head that does not exist.
    """
    x = x[None] if x.dim() == 2 else x
    if x.dim() != 3 or len(x) != 1:
        raise ShapeError(f"{list(x.shape)}", f"one sequence [1, T, {layer.dim}]", "x[:1]", "x")
    if not 0 <= head < layer.heads:
        raise ShapeError(f"head {head}", f"0 to {layer.heads - 1}", "", "head")
    with torch.no_grad():
        q, k, v, _ = layer.project(x, None)
        gates = layer.gates(x)
        recorder = _Recorder(layer.spec, layer.key_dim, layer.value_dim)
        recorder(q, k, v, gates, layer.initial_weights(x), layer.scalars(), None)
    own = {name: gate[0, :, head].double() for name, gate in gates.items()}
    surprise = torch.stack(recorder.norms)[:, 0, head]
    return {"gates": own, "surprise": surprise, "past": weights_of_past(layer.spec, own, tokens=x.shape[1])}


def plot_text(layer: MemoryLayer, x: Tensor, labels: Sequence[str] | None = None, *, head: int = 0) -> Figure:
    """Gates over the tokens, surprise, and how much each past token still weighs in the memory, above each other; see `trace`.

    Args:
        labels: the text of each token, shown below.
    """
    found = trace(layer, x, head)
    length = len(found["surprise"])
    figure = _figure(min(12.0, 4 + 0.12 * length), 8.2)
    from matplotlib.colors import PowerNorm

    gates, surprise, past = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1, 2.2))
    for i, (name, values) in enumerate(found["gates"].items()):
        values = values.mean(-1) if values.dim() > 1 else values
        shown = {"window_gate": f"{name}, mean of the slots"}.get(name, f"{name}, mean" if found["gates"][name].dim() > 1 else name)
        gates.plot(values.numpy(), color=COLOURS[i % len(COLOURS)], label=shown, linewidth=1.4)
    gates.set_ylabel("gates")
    if found["gates"]:
        gates.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False)
    surprise.bar(range(length), found["surprise"].numpy(), color=COLOURS[1], width=0.85)
    surprise.set_ylabel("surprise, |G_t|")
    extent = (-0.5, length - 0.5, length - 0.5, -0.5)
    norm = PowerNorm(0.5, vmin=0, vmax=1)  # early tokens have large shares, late ones are to be seen too
    picture = past.imshow(found["past"].numpy(), cmap="magma_r", norm=norm, aspect="auto", interpolation="nearest", extent=extent)
    past.set_ylabel("memory after token t")
    past.set_xlabel("share of token s")
    figure.colorbar(picture, ax=past, fraction=0.03, pad=0.01, location="right")
    if labels is not None:
        past.set_xticks(range(length), [label if label.strip() else repr(label)[1:-1] for label in labels], fontsize=7)
    for axes in (gates, surprise):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{layer.spec.name}, head {head}", fontsize=11)
    return figure


class _Recorder(ReferenceRule):
    """The token loop, keeping the norm of every token's inner gradient, [B, H] each."""

    def __init__(self, spec: LayerSpec, key_dim: int, value_dim: int) -> None:
        super().__init__(spec, key_dim, value_dim)
        self.norms: list[Tensor] = []

    def _step(self, G: dict[str, Any], S: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        self.norms.append(sum((g.double() ** 2).sum((-1, -2)) for g in G.values()).sqrt())  # type: ignore[union-attr]
        return super()._step(G, S, now)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise KernelError("matplotlib is not installed", "matplotlib, for plots", "pip install matplotlib", "plots") from None
    return Figure(figsize=(width, height), layout="constrained")


def _decay(x: Tensor) -> Tensor:
    """[T] -> [T, T]: the product of x over s < r <= t, 1 on the diagonal, 0 above it."""
    length = len(x)
    later = torch.ones(length, length, dtype=torch.bool).tril(-1)
    return torch.where(later, x[:, None], torch.ones((), dtype=x.dtype)).cumprod(0).tril()


def _gates(spec: LayerSpec, given: dict[str, Any], tokens: int, seed: int) -> dict[str, Tensor]:
    """Every gate as [T], the window's as [T, c]: constants, given values, drawn ones."""
    roles = spec.roles()
    unknown = sorted(set(given) - {name for name, (_, gate) in roles.items() if not isinstance(gate, Number)})
    if unknown:
        open_ones = [name for name, (_, gate) in roles.items() if not isinstance(gate, Number)]
        raise SpecError(f"gate {', '.join(unknown)}", f"a gate that {spec.name} has: {', '.join(open_ones) or 'none'}", "", "gates")
    values = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in given.items()}
    lengths = {len(value) for value in values.values() if value.dim()} or {tokens}
    if len(lengths) > 1:
        raise ShapeError(f"gates of {sorted(lengths)} tokens", "one length", "", "gates")
    length = lengths.pop()
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.ones(length, dtype=torch.float64) for name in ("retain", "momentum", "step_size")}
    for name, (role, gate) in roles.items():
        c = (spec.window.size,) if role.axis == "window" else ()
        if isinstance(gate, Number):
            found[name] = torch.full((length, *c), gate.value, dtype=torch.float64)
        elif name not in values:
            found[name] = _drawn(role, getattr(gate, "start", None), (length, *c), generator)
        else:
            value = values[name].mean(-1) if role.axis == "feature" and values[name].dim() == 2 else values[name]
            if value.dim() and tuple(value.shape) != (length, *c):
                raise ShapeError(f"{name} {list(value.shape)}", f"{[length, *c]} or a number", "", "gates")
            found[name] = value.expand(length, *c)
    return found


def _drawn(role: Role, start: float | None, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values around a role's start, within its range."""
    middle = role.start if start is None else start
    noise = SPREAD * torch.randn(shape, generator=generator, dtype=torch.float64)
    if role.high is None:
        return middle * noise.exp()
    share = min(max((middle - role.low) / (role.high - role.low), 1e-6), 1 - 1e-6)
    return role.low + (role.high - role.low) * torch.sigmoid(math.log(share / (1 - share)) + noise)
