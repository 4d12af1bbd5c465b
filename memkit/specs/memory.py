"""Memory nets: what the memory is, and how it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from .component import Component, near
from .errors import SpecError

Activation = Literal["gelu", "identity", "relu", "sigmoid", "silu", "softplus", "tanh"]
ACTIVATIONS: Mapping[str, Any] = {
    "gelu": F.gelu,
    "identity": lambda z: z,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


def layer_norm(z: Tensor, eps: float = 1e-6) -> Tensor:
    """Zero mean, unit variance over the last axis, without scale and shift."""
    centred = z - z.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)


def rms_norm(z: Tensor, eps: float = 1e-6) -> Tensor:
    """Unit root mean square over the last axis, without scale."""
    return z * torch.rsqrt((z * z).mean(-1, keepdim=True) + eps)


class MemoryNet(Component):
    """Root of the memory nets. A member writes `shapes` and `read`, and `init` where the default start does not do.

    `predict` is what the rule uses: read, then the optional norm with its learned scale and shift, then the residual. Every weight is
    named in `shapes(F, V)` with its own axes, [out, in]; `read(W, f, x)` sees one token: f = phi(x) [F] and the raw x [K].
    """

    family: ClassVar[str] = "memory"

    residual: bool = Field(default=False, description="add the raw key or query to the prediction; needs key_dim = value_dim")
    norm: Literal["none", "layer"] = Field(default="none", description="norm of the output, before the residual; learned scale, shift")
    initial: Literal["learned", "zero"] = Field(
        default="learned", description="start of the memory: learned weights, or zeros where it can leave them"
    )

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, ...]]:
        """Weight name -> shape, [out, in]; `features` is F, `values` is V."""
        raise NotImplementedError

    def read(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor) -> Tensor:
        """The net's output [V] for one token, before norm and residual."""
        raise NotImplementedError

    def init(self, shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
        """A fresh weight [H, *shape]: normal with variance 1 / fan_in."""
        return torch.randn(shape, generator=generator, dtype=dtype) / math.sqrt(shape[-1])

    def params(self, values: int) -> dict[str, Tensor]:
        """Learned scale and shift of the output norm, shared by all tokens; not part of the memory."""
        if self.norm == "none":
            return {}
        return {"scale": torch.ones(values, dtype=torch.float64), "shift": torch.zeros(values, dtype=torch.float64)}

    def predict(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """What the memory answers for one token: norm(read) + x, as the fields say."""
        out = self.read(W, f, x)
        if self.norm == "layer":
            out = layer_norm(out)
            out = out if scale is None else out * scale
            out = out if shift is None else out + shift
        return out + x if self.residual else out

    def equation(self) -> str:
        out = self.formula()
        out = f"LN({out})" if self.norm == "layer" else out
        return "M(x) = " + ("x + " if self.residual else "") + out

    def formula(self) -> str:
        """`read` in ASCII; phi(x) stands for f."""
        return f"{self.kind}(phi(x))"


def hidden_width(expansion: float, values: int) -> int:
    """E = expansion * V, which must be a whole number."""
    width = expansion * values
    if width < 1 or abs(width - round(width)) > 1e-9:
        raise SpecError(
            f"expansion {expansion:g} with value_dim {values}: hidden width {width:g}",
            "expansion * value_dim to be a whole number >= 1",
            f"expansion: {max(1, round(expansion))}",
            "memory.expansion",
        )
    return round(width)


STEPS = {"linear": "expansion", "activation": "name", "norm": "layer | rms", "skip": "number of steps to skip back over"}
NORMS: Mapping[str, Any] = {"layer": layer_norm, "rms": rms_norm}


class Chain(MemoryNet):
    """A net written as a list of steps, so that a new net needs no Python.

    Equation:  z = f; each step maps z: {linear: e} -> W_i z (width e * V), {activation: name}, {norm: layer | rms},
               {skip: n} adds the value of z from n steps before
    Source:    memkit
    Shapes:    f [F] -> [V]; weights W1, W2, .. [e_i V, e_(i-1) V], the first [e_1 V, F]
    Ranges:    the last width is V, so the last linear step is {linear: 1}
    """

    kind = "chain"
    steps: tuple[dict[str, Any], ...] = Field(
        default=({"linear": 2}, {"activation": "gelu"}, {"linear": 1}), min_length=1, max_length=64, description="the net, step by step"
    )
    examples = (
        {},
        {"steps": ({"linear": 2}, {"activation": "silu"}, {"linear": 2}, {"skip": 2}, {"norm": "rms"}, {"linear": 1})},
        {"steps": ({"linear": 1}, {"norm": "layer"}, {"activation": "tanh"})},
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> Any:
        steps = value if isinstance(value, list | tuple) else ()
        for i, step in enumerate(steps):
            where = f"memory.steps.{i}"
            if not isinstance(step, Mapping) or len(step) != 1:
                raise SpecError(f"{step!r}", "a step with one key: " + ", ".join(STEPS), "{linear: 1}", where)
            (key, arg) = next(iter(step.items()))
            if key not in STEPS:
                raise SpecError(f"{key!r}", "linear, activation, norm or skip", near(key, STEPS), where)
            known = {"activation": list(ACTIVATIONS), "norm": list(NORMS)}.get(key)
            if known is not None and arg not in known:
                raise SpecError(f"{key}: {arg!r}", ", ".join(known), near(arg, known), where)
            number = isinstance(arg, int | float) and not isinstance(arg, bool)
            if key == "linear" and not (number and 0 < arg <= 64):
                raise SpecError(f"linear: {arg!r}", "an expansion over V, in (0, 64]", "{linear: 1}", where)
            if key == "skip" and not (isinstance(arg, int) and not isinstance(arg, bool) and 1 <= arg <= i):
                raise SpecError(f"skip: {arg!r}", f"a number of steps from 1 to {i}", "", where)
        return value

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, ...]]:
        widths, shapes = [features], {}
        for i, step in enumerate(self.steps):
            width = widths[-1]
            if "linear" in step:
                width = hidden_width(step["linear"], values)
                shapes[f"W{len(shapes) + 1}"] = (width, widths[-1])
            if "skip" in step and widths[-1 - step["skip"]] != width:
                raise SpecError(
                    f"skip over {step['skip']} steps joins widths {widths[-1 - step['skip']] / values:g} and {width / values:g} value_dim",
                    "two equal widths",
                    "change the expansions in between",
                    f"memory.steps.{i}",
                )
            widths.append(width)
        if widths[-1] != values or not shapes:
            raise SpecError(
                f"a chain that ends {widths[-1] / values:g} value_dim wide", "value_dim", "end with {linear: 1}", "memory.steps"
            )
        return shapes

    def read(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor) -> Tensor:
        seen, used = [f], 0
        for step in self.steps:
            z = seen[-1]
            if "linear" in step:
                used += 1
                z = W[f"W{used}"] @ z
            elif "activation" in step:
                z = ACTIVATIONS[step["activation"]](z)
            elif "norm" in step:
                z = NORMS[step["norm"]](z)
            else:
                z = z + seen[-1 - step["skip"]]
            seen.append(z)
        return seen[-1]

    def formula(self) -> str:
        seen, used = ["phi(x)"], 0
        for step in self.steps:
            key, arg = next(iter(step.items()))
            used += key == "linear"
            z = seen[-1]
            forms = {"linear": f"W{used} {z}", "activation": f"{arg}({z})", "norm": f"{arg}_norm({z})"}
            seen.append(forms[key] if key in forms else f"({z} + {seen[-1 - arg]})")
        return seen[-1]


class GatedMlp(MemoryNet):
    """Two-layer memory with a gated hidden layer (Atlas++).

    Equation:  M(x) = x + W2 (act(W1 f) * W3 f)
    Source:    Atlas (arXiv 2505.23735), eq. 43
    Shapes:    f [F] -> [V]; W1, W3 [E, F], W2 [V, E], E = expansion * V
    Ranges:    expansion * V a whole number
    """

    kind = "gated_mlp"
    expansion: float = Field(default=4, gt=0, le=64, description="hidden width over value width")
    activation: Activation = Field(default="gelu", description="between the layers")
    examples = ({"expansion": 2}, {"expansion": 2, "residual": True, "activation": "silu"})

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, ...]]:
        hidden = hidden_width(self.expansion, values)
        return {"W1": (hidden, features), "W2": (values, hidden), "W3": (hidden, features)}

    def read(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor) -> Tensor:
        return W["W2"] @ (ACTIVATIONS[self.activation](W["W1"] @ f) * (W["W3"] @ f))

    def formula(self) -> str:
        return f"W2 ({self.activation}(W1 phi(x)) * W3 phi(x))"


class Linear(MemoryNet):
    """A matrix.

    Equation:  M(x) = W f
    Source:    Titans (arXiv 2501.00663), linear memory; the state of linear attention and DeltaNet
    Shapes:    f [F] -> [V]; W [V, F]
    """

    kind = "linear"
    examples = ({}, {"initial": "zero"}, {"norm": "layer", "residual": True})

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, ...]]:
        return {"W": (values, features)}

    def read(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor) -> Tensor:
        return W["W"] @ f

    def formula(self) -> str:
        return "W phi(x)"


class Mlp(MemoryNet):
    """A multi-layer perceptron without biases.

    Equation:  M(x) = x + W2 act(W1 f)   (depth 2; the residual x is optional)
    Source:    Atlas (arXiv 2505.23735), eq. 42; Titans (arXiv 2501.00663), section 3.1
    Shapes:    f [F] -> [V]; W1 [E, F], hidden [E, E], last [V, E], E = expansion * V; depth 1 has W1 [V, F] alone
    Ranges:    depth 1 to 8; expansion * V a whole number
    """

    kind = "mlp"
    depth: int = Field(default=2, ge=1, le=8, description="number of weight matrices")
    expansion: float = Field(default=4, gt=0, le=64, description="hidden width over value width")
    activation: Activation = Field(default="gelu", description="between the layers")
    examples = (
        {"expansion": 2},
        {"depth": 3, "expansion": 2, "activation": "silu"},
        {"depth": 1},
        {"expansion": 2, "residual": True, "norm": "layer"},
    )

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, ...]]:
        hidden = hidden_width(self.expansion, values)
        widths = [features, *[hidden] * (self.depth - 1), values]
        return {f"W{i}": (widths[i], widths[i - 1]) for i in range(1, self.depth + 1)}

    def read(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor) -> Tensor:
        z = f
        for i in range(1, self.depth):
            z = ACTIVATIONS[self.activation](W[f"W{i}"] @ z)
        return W[f"W{self.depth}"] @ z

    def formula(self) -> str:
        z = "phi(x)"
        for i in range(1, self.depth):
            z = f"{self.activation}(W{i} {z})"
        return f"W{self.depth} {z}"
