"""Hypothesis strategies: whole layer specs at small sizes, and a run of each (widths, batch, length, the state it starts from).

The one module that needs hypothesis; `memkit.testing` imports it when it is asked for a strategy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

from memkit.inputs import Inputs
from memkit.inputs import draw as draw_inputs
from memkit.specs.errors import SpecError
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule
from memkit.specs.rule import Rule

FORMULAS = (
    "log(cosh(r))",
    "0.5*r^2",
    "sqrt(1 + r^2) - 1",
    "r^2/2 + r^4/12",
    "r*atan(r)",
    "2*tanh(r/2)^2",
    "softplus(r) - r/2",
    "1 - cos(r)",
    "3*r",
)
ACTIVATIONS = ("gelu", "identity", "relu", "sigmoid", "silu", "softplus", "tanh")
NORM_WIDTH = 3  # a norm over fewer entries is a step function of its input, and no two ways of computing it agree


class Run(NamedTuple):
    """A spec and what it is run on: `prefix` tokens make the state that `tokens` more start from; `tile` tokens a tile where it is free."""

    spec: LayerSpec
    key_dim: int
    value_dim: int
    batch: int
    heads: int
    tokens: int
    prefix: int
    tile: int
    seed: int

    def rule(self) -> Rule:
        """The oracle at these widths."""
        return ReferenceRule(self.spec, self.key_dim, self.value_dim)

    def inputs(self, rule: Rule | None = None) -> Inputs:
        """Random inputs of all prefix + tokens tokens."""
        return draw_inputs(rule or self.rule(), self.batch, self.prefix + self.tokens, self.heads, self.seed)


def gates(number: float = 0.5) -> st.SearchStrategy[Any]:
    """A gate, mostly given with the input."""
    return st.sampled_from(("input", "input", "input", "learned", number))


def finite_features() -> st.SearchStrategy[Any]:
    polynomial = st.fixed_dictionaries(
        {"kind": st.just("polynomial"), "degree": st.integers(1, 3), "coefficients": st.sampled_from(("learned", "taylor"))}
    )
    elementwise = st.fixed_dictionaries({"kind": st.just("elementwise"), "degree": st.integers(1, 3)})
    return st.one_of(st.just("identity"), polynomial, elementwise, st.sampled_from(("elu1", "relu")))


@st.composite
def chain_steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Steps of a chain: 1 to 3 linear steps with activations, norms and skips between; the last width is V."""
    steps: list[dict[str, Any]] = []
    widths = [None]  # expansions; None is the width of the features
    count = draw(st.integers(1, 3))
    for i in range(count):
        expansion = 1 if i == count - 1 else draw(st.sampled_from((1, 2)))
        steps.append({"linear": expansion})
        widths.append(expansion)  # type: ignore[arg-type]
        for _ in range(draw(st.integers(0, 2))):
            step = draw(st.sampled_from(("activation", "norm", "skip")))
            if step == "skip":
                back = [n for n in range(1, len(steps) + 1) if widths[-1 - n] == widths[-1]]
                if not back:
                    continue
                steps.append({"skip": draw(st.sampled_from(back))})
            else:
                steps.append({step: draw(st.sampled_from(ACTIVATIONS if step == "activation" else ("layer", "rms")))})
            widths.append(widths[-1])
    return steps


@st.composite
def memories(draw: st.DrawFn) -> dict[str, Any]:
    net: dict[str, Any] = {"kind": draw(st.sampled_from(("linear", "linear", "mlp", "gated_mlp", "chain")))}
    if net["kind"] == "mlp":
        net |= {"depth": draw(st.integers(1, 3)), "expansion": draw(st.sampled_from((1, 2)))}
        net |= {"activation": draw(st.sampled_from(ACTIVATIONS))}
    elif net["kind"] == "gated_mlp":
        net |= {"expansion": draw(st.sampled_from((1, 2))), "activation": draw(st.sampled_from(ACTIVATIONS))}
    elif net["kind"] == "chain":
        net |= {"steps": draw(chain_steps())}
    net |= {"residual": draw(st.booleans()), "norm": draw(st.sampled_from(("none", "none", "layer")))}
    return net


def leaves_zero(memory: dict[str, Any]) -> bool:
    """Whether a net over features that exist only as a kernel, whose first weights start at 0, can learn at all; no others are specs."""
    try:
        load_spec({"features": "exponential", "memory": memory})
    except SpecError:
        return False
    return True


def biases() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(("dot", "l2")),
        st.fixed_dictionaries({"kind": st.just("lq"), "q": st.sampled_from((2, 2.5, 3, 4))}),
        st.fixed_dictionaries({"kind": st.just("huber"), "delta": st.sampled_from((0.3, 1.0))}),
        st.fixed_dictionaries({"kind": st.just("expression"), "formula": st.sampled_from(FORMULAS)}),
    )


def optimizers(linear: bool) -> st.SearchStrategy[Any]:
    gd = st.fixed_dictionaries({"kind": st.just("gd"), "step_size": gates(0.1)})
    momentum = st.fixed_dictionaries({"kind": st.just("momentum"), "momentum": gates(), "step_size": gates(0.1)})
    muon = st.fixed_dictionaries({"kind": st.just("muon"), "steps": st.integers(0, 2), "momentum": gates(), "step_size": gates(0.1)})
    return st.one_of(gd, momentum) if linear else st.one_of(gd, momentum, muon)


def normed(memory: dict[str, Any]) -> bool:
    return memory["norm"] != "none" or any("norm" in step for step in memory.get("steps", ()))


@st.composite
def runs(draw: st.DrawFn, grad_at: str | None = None, finite: bool | None = None) -> Run:
    """A whole spec, under one `grad_at` if it is given, with features of finite width or a kernel only, and a run of it."""
    grad_at = grad_at or draw(st.sampled_from(("token", "decayed", "chunk")))
    finite = draw(st.sampled_from((True, True, False))) if finite is None else finite
    plain = grad_at != "chunk" and draw(st.sampled_from((True, True, False)))  # a linear memory has plans of its own at every token
    nets = memories() if finite else memories().filter(leaves_zero)
    memory = {"kind": "linear", "residual": draw(st.booleans()), "norm": "none"} if plain else draw(nets)
    retention = draw(st.sampled_from(("none", "scalar", "channel") if finite and memory["kind"] == "linear" else ("none", "scalar")))
    spec = {
        "features": draw(finite_features()) if finite else "exponential",
        "memory": memory,
        "bias": draw(st.sampled_from(("dot", "l2", "l2")) if plain else biases()),
        "window": {"size": draw(st.sampled_from((1, 2, 3, 5))), "gate": draw(st.sampled_from(("input", "input", "none", 0.5)))},
        "retention": "none" if retention == "none" else {"kind": retention, "gate": draw(gates(0.9))},
        "optimizer": draw(optimizers(linear=not finite)),
        "update": {"grad_at": grad_at, "chunk_size": draw(st.integers(1, 5)), "read": draw(st.sampled_from(("after", "after", "before")))},
    }
    value_dim = draw(st.integers(NORM_WIDTH if normed(memory) else 1, 4))
    key_dim = value_dim if memory["residual"] else draw(st.integers(1, 4))
    prefix = draw(st.sampled_from((0, 0, 1, 3)))
    tokens, batch, heads = draw(st.integers(1, 7)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    tile, seed = draw(st.sampled_from((1, 2, 3, 64))), draw(st.integers(0, 9))
    return Run(load_spec(spec), key_dim, value_dim, batch, heads, tokens, prefix, tile, seed)


def specs(grad_at: str | None = None, finite: bool | None = None) -> st.SearchStrategy[LayerSpec]:
    """The specs of `runs`."""
    return runs(grad_at, finite).map(lambda run: run.spec)
