"""memkit's side: rules, the layer that is held against titans-pytorch, the delta rules, and torch's own attention and products."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import flops
import inputs
import torch
import torch._dynamo  # torch would import it at a first call of native code, in the middle of what is measured
from inputs import KEPT, STEP, Timed, bias_of
from torch import Tensor, nn
from torch.nn import functional as F

import memkit
from memkit.benchmark import draw

TITANS = {"memory.expansion": 2, "memory.residual": False}


def compiled(spec: str, H: int, K: int, overrides: dict[str, Any] | None = None, backend: str = "torch") -> Any:
    """A compiled rule. Native code has run once, on one chunk: the C++ compiler has nothing left to do."""
    found = memkit.compile(spec, key_dim=K, value_dim=K, overrides=overrides, backend=backend)
    if backend == "native":
        once(draw(found, found.compiled.chunk, H))
    return found


def once(case: Any) -> None:
    """Run a case both ways."""
    case.forward()
    case.both()


class Drawn:
    """A rule on drawn inputs."""

    def __init__(self, rule: Any, T: int, H: int) -> None:
        self.call = draw(rule, T, H)
        self.forward, self.both = self.call.forward, self.call.both
        started = time.perf_counter()
        self.call.check()
        self.extra: dict[str, float] = {"forward": time.perf_counter() - started}

    @property
    def info(self) -> dict[str, Any]:
        """Its plan, the bytes of its state, seconds of a first forward, and what a case adds."""
        return {"plan": self.call.rule.plan, "state_bytes": self.call.state_bytes, **self.extra}


def rule(spec: str, T: int, H: int, K: int, overrides: dict[str, Any] | None = None, backend: str = "torch") -> Drawn:
    """A compiled rule."""
    return Drawn(compiled(spec, H, K, overrides, backend), T, H)


def loop(spec: str, T: int, H: int, K: int) -> Drawn:
    """The token loop that defines the same rule."""
    return Drawn(memkit.reference(spec, key_dim=K, value_dim=K), T, H)


def share(T: int, H: int, K: int, E: int, C: int, backend: str = "torch") -> Drawn:
    """titans, with the FLOPs that forward + backward needs and, of torch code, those that it does: products inside C++ cannot be seen."""
    overrides = {"memory.expansion": E / K, "memory.residual": False, "update.chunk_size": C}
    found = Drawn(compiled("titans", H, K, overrides, backend), T, H)
    found.extra["needed"] = flops.needed(found.call.rule, T, H)
    if backend == "torch":
        found.extra["done"] = flops.counted(draw(found.call.rule, 8 * C, H).both) * T / (8 * C)
    return found


class TitansLayer(nn.Module):
    """x [B, T, d] -> [B, T, d]: the norms, projections and gates of NeuralMemory around memkit's titans, gates a token."""

    def __init__(self, d: int, C: int, backend: str) -> None:
        super().__init__()
        self.rule = memkit.compile("titans", key_dim=d, value_dim=d, overrides={**TITANS, "update.chunk_size": C}, backend=backend)
        self.read_norm, self.store_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.queries, self.keys, self.values = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.gates = nn.Linear(d, 3)
        nn.init.constant_(self.gates.bias[:1], bias_of(KEPT ** (1 / C)))
        self.start = nn.ParameterDict(self.rule.init_weights(1))

    def forward(self, x: Tensor) -> Tensor:
        stored = self.store_norm(x)
        retain, momentum, step = self.gates(stored).sigmoid().unsqueeze(-2).unbind(-1)
        gates = {"retain": retain, "momentum": momentum, "step_size": step * (2 * STEP / x.shape[-1])}
        q, k, v = (t.unsqueeze(2) for t in (self.queries(self.read_norm(x)), self.keys(stored), self.values(stored)))
        return self.rule(q, k, v, gates, dict(self.start))[0].squeeze(2)


def layer_case(layer: TitansLayer, T: int, d: int) -> Timed:
    """The layer on drawn inputs."""
    x, out = torch.randn(1, T, d), torch.randn(1, T, d)
    return Timed(lambda x, *_: layer(x), [x, *layer.parameters()], out)


def titans(T: int, d: int, C: int, backend: str = "torch") -> Timed:
    """The layer that does what peer_titans.memory does."""
    layer = TitansLayer(d, C, backend)
    case = layer_case(layer, T, d)
    if backend == "native":
        once(layer_case(layer, C, d))
    case.info = {"needed": flops.needed(layer.rule, T, 1)}
    return case


def first_call(d: int, C: int) -> Timed:
    """titans on native code, one chunk; `info` has the seconds of its first forward + backward where no compiled code is on disk."""
    case = layer_case(TitansLayer(d, C, "native"), C, d)
    before = os.environ.get("MEMKIT_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEMKIT_CACHE"] = folder
        try:
            started = time.perf_counter()
            case.both()
            case.info = {"seconds": time.perf_counter() - started}
        finally:
            del os.environ["MEMKIT_CACHE"]
            if before is not None:
                os.environ["MEMKIT_CACHE"] = before
    return case


def delta(spec: str, T: int, H: int, K: int, backend: str = "torch") -> Timed:
    """A linear rule on the inputs that the peers get; its gates are those the spec has. Queries are scaled as peers do it."""
    found = compiled(spec, H, K, backend=backend)
    x = inputs.delta(T, H, K, channel=found.gates.get("retain") == (K,))
    x = {**x, "retain": x["log_retain"].exp(), "step_size": x["step"]}
    names = list(found.gates)
    weights = {n: torch.zeros(H, *s) for n, s in found.shapes.items()}

    def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        return found(q * K**-0.5, k, v, dict(zip(names, gates)), weights)[0]

    return Timed(run, [x["q"], x["k"], x["v"], *(x[n] for n in names)], x["out"])


def attention(T: int, H: int, K: int) -> Timed:
    """Causal softmax attention of torch."""
    q, k, v, out = (torch.randn(1, H, T, K) for _ in range(4))
    return Timed(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v], out)


def bmm() -> flops.Bmm:
    """The yardstick of FLOPs a second."""
    return flops.Bmm()
