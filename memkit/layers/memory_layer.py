"""MemoryLayer: a spec as an nn.Module, and `load`, which makes one from a preset, a file, a dict or a LayerSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memkit.compiler.pipeline import compile_rule
from memkit.specs.errors import ShapeError, SpecError
from memkit.specs.io import Source, load_spec
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule
from memkit.specs.rule import Rule
from memkit.specs.state import MemoryState, count_bytes, flatten, map_tensors, refill

from .projection import Gates, HeadNorm, LearnedScalars, Projections

DEFAULT_DIM = 256
RuleFactory = Callable[[LayerSpec, int, int], Rule]


class LayerState(NamedTuple):
    """What a layer leaves behind after a piece of a sequence; feeding it back continues the sequence exactly.

    conv: [B, max(conv - 1, 0), channels], the last inputs of the causal convolution.
    memory: the rule's state.

    After an optimizer step call `detach()` before carrying a state on: the graph behind it is freed by `backward`.
    """

    conv: Tensor
    memory: MemoryState

    def map(self, fn: Callable[[Tensor], Tensor]) -> LayerState:
        """The same state with `fn` applied to every tensor."""
        return map_tensors(self, fn)

    def detach(self) -> LayerState:
        """Cut from the graph, as truncated back-propagation through time needs."""
        return self.map(Tensor.detach)

    def clone(self) -> LayerState:
        """A snapshot that later steps do not touch."""
        return self.map(Tensor.clone)

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors of the state."""
        return count_bytes(self)

    def state_dict(self) -> dict[str, Any]:
        """A flat dict: dotted names to tensors, and `memory.position`."""
        return flatten(self)

    def load_state_dict(self, flat: Mapping[str, Any]) -> LayerState:
        """A state of this one's structure with the values of `flat`; this one is not changed. Raises ShapeError on other names."""
        return refill(self, flat)


def make_rule(spec: LayerSpec, key_dim: int, value_dim: int, backend: str = "auto") -> Rule:
    """The rule a layer runs: compiled, or the token loop for backend "reference".

    Raises:
        KernelError: on a backend that cannot run here.
    """
    if backend == "reference":
        return ReferenceRule(spec, key_dim, value_dim)
    return compile_rule(spec, key_dim, value_dim, backend=backend)


class MemoryLayer(nn.Module):
    """A recurrent layer, y, state = layer(x, state), with the convention of nn.GRU(batch_first=True).

    Args:
        spec: what the memory is and how it learns: a LayerSpec, or a preset's name, a path or a dict.
        dim: D, width of x and y.
        heads: H, number of memories; the spec's own unless given.
        rule_factory: (spec, key_dim, value_dim) -> Rule.

    Outer (learned) parameters: the projections, convolution, norms, gates, learned scalars and, unless the spec's memory starts at
    zero, the initial memory in `initial`. Inner (per sequence): the memory itself, which lives in the state and never in the module.

    Raises:
        SpecError: where the spec has no meaning at these widths.
        ShapeError: for a dim or heads that cannot be.
    """

    def __init__(
        self, spec: Source, dim: int = DEFAULT_DIM, heads: int | None = None, rule_factory: RuleFactory = make_rule
    ) -> None:
        super().__init__()
        spec = spec if isinstance(spec, LayerSpec) else load_spec(spec)
        heads = spec.layer.heads if heads is None else heads
        for name, size in (("dim", dim), ("heads", heads)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ShapeError(f"{name} = {size!r}", "a whole number >= 1", "", name)
        self.spec = spec.model_copy(update={"layer": spec.layer.model_copy(update={"heads": heads})})
        self.dim, self.heads = dim, heads
        self.key_dim, self.value_dim = (_head_width(self.spec, name, dim, heads) for name in ("key_dim", "value_dim"))
        self.rule_factory = rule_factory
        self.rule = rule_factory(self.spec, self.key_dim, self.value_dim)

        options, inner = spec.layer, heads * self.value_dim
        self.project = Projections(self.spec, dim, heads, self.key_dim, self.value_dim)
        self.gates = Gates(self.spec, self.rule, dim, heads)
        self.scalars = LearnedScalars(self.spec, self.rule, heads)
        learned = {} if spec.memory.initial == "zero" else self.rule.init_weights(heads)
        self.initial = nn.ParameterDict({name: nn.Parameter(w) for name, w in learned.items()})
        self.norm = None if options.output_norm == "none" else HeadNorm(options.output_norm, heads, self.value_dim)
        self.output_gate = nn.Linear(dim, inner, bias=False) if options.output_gate else None
        self.output = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, state: LayerState | None = None, *, check: bool = False) -> tuple[Tensor, LayerState]:
        """Run over a piece of a sequence.

        Args:
            x: [B, T, D], T >= 1.
            state: what an earlier call returned, or None for a fresh sequence.
            check: raise on the first non-finite output instead of returning it.

        Returns:
            y [B, T, D], and the state after the last token.

        Raises:
            ShapeError: for an x or a state that does not fit.
        """
        self._check(x, state)
        if state is not None and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            state = state.map(_plain)
        q, k, v, tail = self.project(x, None if state is None else state.conv)
        memory = None if state is None else state.memory
        y, memory = self.rule(q, k, v, self.gates(x), self.initial_weights(x), self.scalars(), memory, check=check)
        y = y if self.norm is None else self.norm(y)
        y = y.flatten(2)
        if self.output_gate is not None:
            y = y * F.silu(self.output_gate(x))
        return self.output(y), LayerState(tail, memory)

    def initial_weights(self, like: Tensor) -> dict[str, Tensor]:
        """The memory before the first token, name -> [H, out, in]: learned, or zeros on the device of `like`."""
        zeros = {name: shape for name, shape in self.rule.shapes.items() if name not in self.initial}
        made = {name: torch.zeros(self.heads, *shape, dtype=self.output.weight.dtype, device=like.device) for name, shape in zeros.items()}
        return dict(self.initial.items()) | made

    def extra_repr(self) -> str:
        memory = ", ".join(f"{name} {list(shape)}" for name, shape in self.rule.shapes.items()) or "a span of keys"
        widths = f"dim={self.dim}, heads={self.heads}, key_dim={self.key_dim}, value_dim={self.value_dim}"
        return f"{self.spec.name}, {widths}, plan={self.rule.plan}, memory a head: {memory}"

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the rule, whose code may not be copied; it is made anew."""
        return {name: value for name, value in self.__dict__.items() if name != "rule"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rule = self.rule_factory(self.spec, self.key_dim, self.value_dim)

    def _check(self, x: Tensor, state: LayerState | None) -> None:
        bound = f"D={self.dim} H={self.heads} K={self.key_dim} V={self.value_dim}"
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
            got = f"a tensor of {x.dtype}, {x.layout}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(got, f"a dense floating tensor [B, T, {self.dim}] ({bound})", "embed tokens first", "x")
        if x.dim() != 3 or x.shape[-1] != self.dim or x.shape[0] < 1 or x.shape[1] < 1:
            raise ShapeError(f"{list(x.shape)}", f"[B, T, {self.dim}] with B, T >= 1 ({bound})", _shape_hint(x, self.dim), "x")
        weight = self.output.weight
        if x.device != weight.device:
            raise ShapeError(f"x on {x.device}", f"{weight.device}, where the layer is", f"x.to({str(weight.device)!r})", "x")
        if x.dtype != weight.dtype and (x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type)):
            name = str(weight.dtype).removeprefix("torch.")
            raise ShapeError(f"{x.dtype}", f"{weight.dtype}, as the layer is", f"x.to(torch.{name}), or run under torch.autocast", "x")
        if state is None:
            return
        if not isinstance(state, LayerState):
            raise ShapeError(type(state).__name__, "the LayerState an earlier call returned, or None", "", "state")
        want = (x.shape[0], self.project.tail, self.project.channels)
        if not isinstance(state.conv, Tensor) or tuple(state.conv.shape) != want:
            hint = "a state of this layer and this batch"
            got = f"{list(state.conv.shape)}" if isinstance(state.conv, Tensor) else type(state.conv).__name__
            raise ShapeError(got, f"{list(want)} (B={x.shape[0]} {bound})", hint, "state.conv")


def _head_width(spec: LayerSpec, name: str, dim: int, heads: int) -> int:
    given = getattr(spec.layer, name)
    if given is not None:
        return given
    if dim % heads:
        fits = max(h for h in range(1, min(heads, dim) + 1) if dim % h == 0)
        raise SpecError(f"dim {dim} with {heads} heads", f"a dim that {heads} divides, or layer.{name}", f"heads: {fits}", "layer.heads")
    return dim // heads


def _plain(t: Tensor) -> Tensor:
    """A tensor made under inference_mode cannot take part in autograd; its copy can."""
    return t.clone() if t.is_inference() else t


def _shape_hint(x: Tensor, dim: int) -> str:
    if x.dim() == 2 and x.shape[-1] == dim:
        return "x[None] for a batch of one"
    if x.dim() == 3 and x.shape[1] == dim:
        return "x.transpose(1, 2)"
    return ""


def load(
    source: Any = "atlas", *, dim: int | None = None, heads: int | None = None, overrides: Mapping[str, Any] | None = None,
    backend: str = "auto",
) -> MemoryLayer:
    """A fresh layer.

    Args:
        source: a preset's name, a path, a dict or a LayerSpec.
        dim: D, width of x and y; 256 unless given.
        heads: H; the spec's own unless given.
        overrides: dotted path -> value, for instance {"window.size": 1, "memory": "linear"}.
        backend: how the rule is run: torch, native (C++ on a CPU), triton, or reference for the token loop; auto chooses.

    Raises:
        SpecError: for a spec that cannot be read or has no meaning. ShapeError: for sizes that cannot be. KernelError: for a backend
            that cannot run here.
    """
    spec = load_spec(source, overrides)
    return MemoryLayer(spec, DEFAULT_DIM if dim is None else dim, heads, partial(make_rule, backend=backend))
