"""LayerSpec: one recurrent layer, written down. Only cross-field checks live here; each component checks its own fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .bias import L2, AttentionalBias
from .component import Component
from .contract import feature_width, weight_shapes
from .errors import SpecError
from .features import FeatureMap, Identity
from .gate import WINDOW_GATE, Gate, Number, Role
from .learning import stuck
from .memory import Linear, MemoryNet
from .optimizer import Gd, InnerOptimizer
from .retention import NoRetention, Retention

GRAD_AT = Literal["token", "decayed", "chunk"]


class Section(BaseModel):
    """A group of plain fields of the spec."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Window(Section):
    """How many past tokens are in the objective (the Omega rule), and how they are weighed.

    Equation:  sum_{j < c} window_gate[t, j] loss(token t - c + 1 + j)
    Source:    Atlas (arXiv 2505.23735), eq. 9
    """

    size: int = Field(default=1, ge=1, le=4096, description="tokens in the objective; 1 looks at the current token alone")
    gate: Gate = Field(default=Number(value=1.0), description="weight of each token of the window; none weighs all 1")
    gates: ClassVar[Mapping[str, Role]] = {"gate": WINDOW_GATE}
    none: ClassVar[frozenset[str]] = frozenset({"gate"})  # fields that take `none` as well

    @model_validator(mode="before")
    @classmethod
    def _none(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("gate", 0) in ("none", None):
            return {**data, "gate": 1.0}
        return data


class Update(Section):
    """Where the inner gradient is taken, and which memory is read.

    grad_at: token is W_{t-1}, decayed is retain_t W_{t-1}, chunk is the memory at the chunk's start. chunk_size counts only under
    grad_at: chunk, and there it changes results.
    """

    grad_at: GRAD_AT = Field(default="token", description="where the inner gradient is taken")
    chunk_size: int = Field(default=64, ge=1, le=65536, description="tokens that share one gradient point, under grad_at: chunk")
    read: Literal["after", "before"] = Field(default="after", description="read the memory after or before the token's write")


class LayerOptions(Section):
    """What surrounds the memory in a layer [B, T, D] -> [B, T, D]."""

    heads: int = Field(default=4, ge=1, le=1024, description="number of memories")
    key_dim: int | None = Field(default=None, ge=1, le=65536, description="width of keys and queries a head; dim / heads unless given")
    value_dim: int | None = Field(default=None, ge=1, le=65536, description="width of values a head; dim / heads unless given")
    conv: int = Field(default=4, ge=0, le=64, description="width of the causal convolution on q, k, v; 0 for none")
    activation: Literal["none", "silu"] = Field(default="none", description="on q, k, v after the convolution")
    key_norm: Literal["none", "l2"] = Field(default="l2", description="norm of keys and queries, in float32")
    output_norm: Literal["none", "rms", "layer"] = Field(default="rms", description="norm of each head's output")
    output_gate: bool = Field(default=True, description="multiply the output by silu of a projection of x")


class LayerSpec(BaseModel):
    """A recurrent sequence layer: what the memory is, what it is asked to remember, over which window, what it forgets, how it learns.

    Equation:  G_t = sum_j window_gate[t, j] d/dW bias(read(A_t, phi(k)), v)
               W_t = retain(W_{t-1}) + optimizer(G_t);  y_t = read(W_t, phi(q_t))
    Source:    memkit design; the four choices follow MIRAS (arXiv 2504.13173)
    Raises:    SpecError where fields do not fit together
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    name: str = Field(default="custom", pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$", description="letters, digits, _ and -")
    source: str = Field(default="", max_length=4000, description="paper, equation number, deviations")
    features: FeatureMap = Field(default=Identity(), description="feature map of keys and queries")
    memory: MemoryNet = Field(default=Linear(), description="what the memory is")
    bias: AttentionalBias = Field(default=L2(), description="attentional bias: what the memory is asked to remember")
    window: Window = Field(default=Window(), description="past tokens in the objective")
    retention: Retention = Field(default=NoRetention(), description="what is kept")
    optimizer: InnerOptimizer = Field(default=Gd(), description="how the memory learns inside the sequence")
    update: Update = Field(default=Update(), description="where the gradient is taken, which memory is read")
    layer: LayerOptions = Field(default=LayerOptions(), description="projections, convolution, norms and gates around the memory")

    COMPONENTS: ClassVar[tuple[str, ...]] = ("features", "memory", "bias", "retention", "optimizer")

    def components(self) -> Iterator[tuple[str, Component]]:
        """(spec path, component) of the five families."""
        for path in self.COMPONENTS:
            yield path, getattr(self, path)

    def roles(self) -> dict[str, tuple[Role, Gate]]:
        """Gate name -> (role, gate) of all gates of this spec, constants included."""
        found: dict[str, tuple[Role, Gate]] = {}
        for _, component in self.components():
            found.update(component.roles())
        found[WINDOW_GATE.name] = (WINDOW_GATE, self.window.gate)
        return found

    def gate_shape(self, role: Role, key_dim: int) -> tuple[int, ...]:
        """Trailing shape of a gate, beyond [B, T, H]."""
        if role.axis == "feature":
            return (feature_width(self.features, key_dim),)
        return (self.window.size,) if role.axis == "window" else ()

    @model_validator(mode="after")
    def _fits(self) -> LayerSpec:
        problems = list(self._misfits())
        if problems:
            raise SpecError.several(problems)
        return self

    def _misfits(self) -> Iterator[SpecError]:
        """Every way in which fields that are each fine do not fit together."""
        for name, (role, gate) in self.roles().items():
            value = gate.value if isinstance(gate, Number) else getattr(gate, "start", None)
            high = float("inf") if role.high is None else role.high
            if value is not None and not role.low <= value <= high:
                span = f"[{role.low:g}, {high:g}]" if role.high is not None else f">= {role.low:g}"
                yield SpecError(f"{name}: {value:g}", f"a value in {span}", "", self._gate_path(name))
            yield from self._ceiling_misfits(name, role, gate)
        key, value = self.layer.key_dim, self.layer.value_dim
        if self.memory.residual and key and value and key != value:
            got = f"residual: true with key_dim {key} and value_dim {value}"
            yield SpecError(got, "key_dim = value_dim", "residual: false", "memory.residual")
        try:
            weight_shapes(self.memory, _WHOLE, _WHOLE)  # F = V, so that a step over the first layer may be skipped where widths allow it
        except SpecError as error:
            yield error
            return
        channel = any(role.axis == "feature" for role, _ in self.retention.roles().values())
        if channel:
            wrong = [n for n, s in self._probe_shapes() if s[-1] != _PROBE]
            if wrong:
                yield SpecError(
                    f"retention: {self.retention.kind} with memory: {self.memory.kind} (weights {', '.join(wrong)} have other columns)",
                    "a memory whose weights all have one column a feature",
                    "retention: scalar, or memory: linear",
                    "retention",
                )
        if not self.features.finite():
            yield from self._infinite_misfits(channel)
        yield from self._dead_ends()

    def _ceiling_misfits(self, name: str, role: Role, gate: Gate) -> Iterator[SpecError]:
        ceiling, start = getattr(gate, "ceiling", None), getattr(gate, "start", None)
        where = f"{self._gate_path(name)}.ceiling"
        if ceiling is not None and role.high is not None:
            yield SpecError(f"a ceiling of {ceiling:g} on {name}", f"none: {name} ends at {role.high:g} anyway", "leave it out", where)
        elif ceiling is not None and (role.start if start is None else start) >= ceiling:
            first = role.start if start is None else start
            yield SpecError(
                f"{name}: ceiling {ceiling:g} with start {first:g}", "a ceiling above the start", f"start: {ceiling / 2:g}", where
            )

    def _infinite_misfits(self, channel: bool) -> Iterator[SpecError]:
        where = f"features: {self.features.kind} (only its kernel exists)"
        if channel:
            yield SpecError(f"{where} with retention: {self.retention.kind}", "scalar or no retention", "retention: scalar", "retention")
        if not self.optimizer.elementwise():
            got = f"{where} with optimizer: {self.optimizer.kind}"
            yield SpecError(got, "an optimizer that is linear in the gradient", "optimizer: momentum", "optimizer")

    def _dead_ends(self) -> Iterator[SpecError]:
        """A memory that stands at 0 for ever: every gradient there has a factor that is 0."""
        try:
            endless = set() if self.features.finite() else {n for n, s in self._probe_shapes() if s[-1] == _PROBE}
        except SpecError:  # a net that joins features to values; refused where the widths are known
            return
        at_zero = self.memory.initial == "zero"
        zero = set(weight_shapes(self.memory, _WHOLE, _WHOLE)) if at_zero else endless
        if not stuck(self.memory, zero, self.retention, self.optimizer):
            return
        start = f"{', '.join(sorted(zero))} {'starts' if len(zero) == 1 else 'start'} at 0"
        end = f"with memory: {self.memory.kind}: every inner gradient is 0 there, so the memory never moves"
        if at_zero:
            yield SpecError(f"initial: zero ({start}) {end}", "a start that the memory can leave", "initial: learned", "memory.initial")
        else:
            got = f"features: {self.features.kind} (only its kernel exists, so {start}) {end}"
            hint = "an activation that is smooth and not 0 at 0 (sigmoid, softplus), memory: linear, or features of finite width"
            yield SpecError(got, "a memory that can leave 0", hint, "memory")

    def _gate_path(self, name: str) -> str:
        for path, component in self.components():
            for field, role in component.gates.items():
                if role.name == name:
                    return f"{path}.{field}"
        return "window.gate"

    def _probe_shapes(self) -> list[tuple[str, tuple[int, int]]]:
        """The memory's weight shapes at a feature width that no hidden width can have by chance."""
        return list(weight_shapes(self.memory, _PROBE, _WHOLE).items())


_PROBE = 1_000_003
_WHOLE = 504_000  # a value width that any plain expansion, such as 0.3, times gives a whole number
