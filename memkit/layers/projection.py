"""What stands around a memory in a layer: projections to q, k and v, the causal convolution, norms, gates and learned scalars."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memkit.specs.layer import LayerSpec
from memkit.specs.memory import layer_norm, rms_norm
from memkit.specs.rule import Rule, without_autocast


def full_precision(x: Tensor) -> Tensor:
    """x in float32, or untouched if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


class CausalConv(nn.Module):
    """Depthwise causal convolution, y_t = sum_{j < width} w_j * x_(t - width + 1 + j), carried across calls by a tail.

    A sum of `width` shifted products: every output is the same sum whatever T is, so a cut sequence equals the uncut one bit for bit.

    Shapes: x [B, T, C] and tail [B, width - 1, C] (the inputs before x, zeros at a sequence's start) -> y [B, T, C] and the new tail.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))
        nn.init.uniform_(self.weight, -1 / math.sqrt(width), 1 / math.sqrt(width))

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        tokens, w = x.shape[1], self.weight.to(x.dtype)
        padded = torch.cat([tail, x], 1)
        y = padded[:, :tokens] * w[0]
        for j in range(1, len(w)):
            y = y + padded[:, j : j + tokens] * w[j]
        return y, padded[:, tokens:]


class Projections(nn.Module):
    """q, k and v from the layer's input: one projection, then convolution, activation and key norm as the spec says.

    Shapes: x [B, T, D] -> q, k [B, T, H, K], v [B, T, H, V] and the convolution's tail [B, max(conv - 1, 0), H (2 K + V)].
    Normalised queries and keys are float32 (float64 if x is): a norm rounded to bfloat16 is off by up to 0.4%.
    """

    def __init__(self, spec: LayerSpec, dim: int, heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.options, self.heads, self.key_dim, self.value_dim = spec.layer, heads, key_dim, value_dim
        self.channels = heads * (2 * key_dim + value_dim)
        self.qkv = nn.Linear(dim, self.channels, bias=False)
        if not self.qkv.weight.is_meta:  # drawing numbers for no memory would load half of torch
            nn.init.normal_(self.qkv.weight, std=1 / math.sqrt(dim))
        self.conv = CausalConv(self.channels, spec.layer.conv) if spec.layer.conv else None

    @property
    def tail(self) -> int:
        """Inputs the convolution looks back on."""
        return max(self.options.conv - 1, 0)

    def forward(self, x: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z = self.qkv(x)
        after = z.new_zeros(z.shape[0], self.tail, self.channels) if tail is None else tail.to(z.dtype)
        if self.conv is not None:
            z, after = self.conv(z, after)
        if self.options.activation == "silu":
            z = F.silu(z)
        key, value = self.heads * self.key_dim, self.heads * self.value_dim
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in z.split([key, key, value], -1))
        if self.options.key_norm == "l2":
            q, k = (F.normalize(full_precision(t), dim=-1, eps=1e-6) for t in (q, k))
        return q, k, v, after


class HeadNorm(nn.Module):
    """Norm over each head's output with a learned scale a head; computed in float32.

    Shapes: y [B, T, H, V] -> [B, T, H, V]
    """

    def __init__(self, kind: str, heads: int, width: int) -> None:
        super().__init__()
        self.norm = {"rms": rms_norm, "layer": layer_norm}[kind]
        self.scale = nn.Parameter(torch.ones(heads, width))

    def forward(self, y: Tensor) -> Tensor:
        return (self.norm(full_precision(y)) * self.scale).to(y.dtype)


class Gates(nn.Module):
    """All gates a rule is to be given, by role name, each in float32.

    Shapes: x [B, T, D] -> name -> [B, T, H, *axis]
    """

    def __init__(self, spec: LayerSpec, rule: Rule, dim: int, heads: int) -> None:
        super().__init__()
        found: dict[str, nn.Module] = {}
        for name, shape in rule.gates.items():
            role, gate = spec.roles()[name]
            module = gate.module(role, dim, heads, shape)
            if module is not None:
                found[name] = module
        self.by_role = nn.ModuleDict(found)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        held = next(self.parameters(), x).dtype
        with without_autocast(x.device):
            x = x.to(held)
            return {name: full_precision(gate(x)) for name, gate in self.by_role.items()}


class LearnedScalars(nn.Module):
    """The learned scalars of features and memory, one set a head; those that must stay positive are held as logarithms.

    Returns: dotted name -> [H, *shape], as `rule(params=..)` takes them.
    """

    def __init__(self, spec: LayerSpec, rule: Rule, heads: int) -> None:
        super().__init__()
        self.positive = {f"features.{name}" for name in spec.features.positive}
        self.names = tuple(rule.init_params())
        for name, start in rule.init_params().items():
            start = start.expand(heads, *start.shape).clone()
            self.register_parameter(self._attribute(name), nn.Parameter(start.log() if name in self.positive else start))

    def _attribute(self, name: str) -> str:
        return name.replace(".", "_") + ("_log" if name in self.positive else "")

    def forward(self) -> dict[str, Tensor]:
        found = {name: full_precision(getattr(self, self._attribute(name))) for name in self.names}
        return {name: value.exp() if name in self.positive else value for name, value in found.items()}
