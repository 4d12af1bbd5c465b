"""Rule: a spec at given widths, as a function of q, k, v, gates and weights. What every way of running a spec has in common.

The token loop (`reference.py`) and the compiled forms subclass it; checks, defaults and the layout of the state live here once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .contract import feature_width, fresh_weight, learned_scalars, starting_slots, weight_shapes
from .document import shown
from .errors import ShapeError, SpecError
from .gate import Number
from .layer import LayerSpec
from .state import MemoryState, Slots, Span, Weights, flatten

Gates = Mapping[str, Tensor]
Wanted = dict[str, tuple[Tensor, tuple[int, ...]]]  # path -> (what was given, the shape it must have)


class Rule:
    """A spec at fixed key and value widths.

    Args:
        spec: the layer spec.
        key_dim: K, width of a key. value_dim: V, width of a value.

    Raises:
        SpecError: where the spec has no meaning at these widths (a residual with K != V, features too wide).
    """

    plan: str = "loop"
    source: str = ""

    def __init__(self, spec: LayerSpec, key_dim: int, value_dim: int) -> None:
        for name, size in (("key_dim", key_dim), ("value_dim", value_dim)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ShapeError(f"{name} = {size!r}", "a whole number >= 1", "", name)
            if size > MAX_WIDTH:
                raise ShapeError(f"{name} = {shown(size)}", f"at most {MAX_WIDTH:,}", "", name)
        self.spec, self.key_dim, self.value_dim = spec, key_dim, value_dim
        if spec.memory.residual and key_dim != value_dim:
            raise SpecError(
                f"memory.residual: true with key_dim {key_dim} and value_dim {value_dim}",
                "key_dim = value_dim, since the residual adds the raw key to a value",
                "memory.residual: false, or equal widths",
                "memory.residual",
            )
        self.finite = spec.features.finite()
        self.width = feature_width(spec.features, key_dim) if self.finite else 0
        if self.width > MAX_WIDTH:
            raise SpecError(
                f"features: {spec.features.kind} gives {self.width:,} features for key_dim {key_dim}",
                f"at most {MAX_WIDTH:,}",
                "a lower degree or a smaller key_dim",
                "features",
            )
        self._endless = {} if self.finite else {n: s[0] for n, s in weight_shapes(spec.memory, _PROBE, value_dim).items() if s[1] == _PROBE}
        self.infinite = tuple(self._endless)
        self.shapes: dict[str, tuple[int, ...]] = {
            n: s for n, s in weight_shapes(spec.memory, self.width or _PROBE, value_dim).items() if n not in self.infinite
        }
        for n, shape in self.shapes.items():
            if math.prod(shape) > MAX_ENTRIES:
                got = f"weight {n} of {shape[0]:,} x {shape[1]:,} entries a head"
                raise SpecError(got, f"at most {MAX_ENTRIES:,}", "smaller key_dim, value_dim, expansion or degree", "memory")
        self.slots = tuple(starting_slots(spec.optimizer, torch.zeros(2, 3)))
        learned_scalars(spec.features)  # refused here, where they are wrong, not in a call
        learned_scalars(spec.memory, value_dim)
        self.constants = {n: g.value for n, (_, g) in spec.roles().items() if isinstance(g, Number)}

    @property
    def gates(self) -> dict[str, tuple[int, ...]]:
        """The gates a call needs and their shape beyond [B, T, H]; gates given as a number are not among them."""
        return {n: self.spec.gate_shape(role, self.key_dim) for n, (role, g) in self.spec.roles().items() if g.given}

    def init_weights(self, heads: int, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Weights:
        """Fresh weights, name -> [H, out, in]; zeros where the spec's memory starts at zero. Infinite weights have no entry."""
        dtype = dtype or torch.get_default_dtype()
        zero = self.spec.memory.initial == "zero"
        return {
            n: torch.zeros((heads, *s), dtype=dtype) if zero else fresh_weight(self.spec.memory, (heads, *s), generator, dtype)
            for n, s in self.shapes.items()
        }

    def init_params(self) -> dict[str, Tensor]:
        """Learned scalars of the features and the memory's norm, dotted names, in the default dtype; {} if there are none."""
        return {n: p.to(torch.get_default_dtype()) for n, p in self._exact_params().items()}

    def _exact_params(self) -> dict[str, Tensor]:
        """`init_params` in float64, where 1/i! has no rounding of a smaller type."""
        found = {f"features.{n}": p for n, p in self.spec.features.params().items()}
        return found | {f"memory.{n}": p for n, p in self.spec.memory.params(self.value_dim).items()}

    def init_state(self, batch: int, weights: Weights, like: Tensor) -> MemoryState:
        """The state before the first token: the given weights for every row of the batch, zero slots, an empty window."""
        heads, c = like.shape[2], self.spec.window.size
        start = {n: _for_rows(weights[n].to(like), batch) for n in self.shapes}
        slots = {n: {s: t.to(w) for s, t in self.spec.optimizer.init(w).items()} for n, w in start.items()}
        chunked = self.spec.update.grad_at == "chunk"
        keys = like.new_zeros(batch, c - 1, heads, self.key_dim)
        values = like.new_zeros(batch, c - 1, heads, self.value_dim)
        return MemoryState(start, slots, dict(start) if chunked else {}, keys, values, 0, self._empty_span(batch, heads, like, chunked))

    def _empty_span(self, batch: int, heads: int, like: Tensor, chunked: bool) -> Span | None:
        if self.finite:
            return None
        empty = {n: like.new_zeros(batch, heads, out, 0) for n, out in self._endless.items()}
        slots: Slots = {n: dict(self.spec.optimizer.init(w)) for n, w in empty.items()}
        return Span(like.new_zeros(batch, 0, heads, self.key_dim), empty, slots, dict(empty) if chunked else {})

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        weights: Mapping[str, Tensor],
        params: Mapping[str, Tensor] | None = None,
        state: MemoryState | None = None,
        *,
        debug: bool = False,
        check: bool = False,
    ) -> tuple[Tensor, MemoryState]:
        """Run the rule over a piece of a sequence.

        Args:
            q, k: [B, T, H, K]. v: [B, T, H, V].
            gates: name -> [B, T, H, *shape] for every entry of `gates`; ranges as in the spec, 0 is a legal `retain`.
            weights: name -> [H, out, in], shared by the batch; used when `state` is None.
            params: learned scalars as `init_params` names them; None takes their start.
            state: what an earlier call returned, or None for a fresh sequence.
            debug: check that gates are finite and in range (costs a pass over them).
            check: look for non-finite values in outputs and states, and name the first token, its head, gates and what blew up.

        Returns:
            y [B, T, H, V] in v's dtype, and the state after the last token. Inside, everything is float32, or float64 if v is.

        Raises:
            ShapeError: tensors that do not fit, listing the sizes bound so far.
        """
        self._check_inputs(q, k, v, gates, weights, params, state)
        if debug:
            self._check_ranges(gates)
        dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        qf, kf, vf = (self.sequence(t, dtype) for t in (q, k, v))
        gf = {n: gates[n].to(dtype) for n in self.gates}
        pf = {n: t.to(device=v.device, dtype=dtype) for n, t in (self._exact_params() if params is None else params).items()}
        like = vf if vf.dtype == dtype else vf.new_empty((1, 1, v.shape[2], 1), dtype=dtype)
        state = self.init_state(v.shape[0], {n: w.to(dtype) for n, w in weights.items()}, like) if state is None else _cast(state, dtype)
        with without_autocast(v.device):
            y, after = self.run(qf, kf, vf, gf, pf, state)
            if check and not _finite(y, after):
                raise self._blown_up({"q": qf, "k": kf, "v": vf}, gf, pf, state)
        return y.to(v.dtype), after

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], params: dict[str, Tensor], state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        """The computation itself, on checked tensors of one dtype."""
        raise NotImplementedError

    def sequence(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """q, k or v in the type that `run` takes it in."""
        return x.to(dtype)

    def explain(self) -> str:
        """What was chosen and why."""
        return "plan: loop, one token after another"

    def gate(self, gates: Mapping[str, Tensor], name: str) -> Tensor | float | None:
        """A gate's values: given, constant, or None where the spec has no such gate."""
        return gates[name] if name in gates else self.constants.get(name)

    # ---- checks

    def _check_inputs(self, q, k, v, gates, weights, params, state) -> None:
        for name, t in (("q", q), ("k", k), ("v", v)):
            if not isinstance(t, Tensor) or t.dim() != 4:
                raise ShapeError(_described(t), "a floating tensor [B, T, H, width]", "", name)
        batch, tokens, heads, _ = v.shape
        bound = f"B={batch} T={tokens} H={heads} K={self.key_dim} V={self.value_dim}"
        if tokens < 1 or batch < 1 or heads < 1:
            raise ShapeError(f"v {list(v.shape)}", "at least one row, one token and one head", f"bound so far: {bound}", "v")
        row = (batch, tokens, heads)
        want: Wanted = {"v": (v, (*row, self.value_dim)), "q": (q, (*row, self.key_dim)), "k": (k, (*row, self.key_dim))}
        self._check_names("gates", gates, self.gates, bound)
        for name, shape in self.gates.items():
            want[f"gates.{name}"] = (gates[name], (*row, *shape))
        if state is None:
            self._check_names("weights", weights, self.shapes, bound)
            want |= {f"weights.{n}": (weights[n], (heads, *s)) for n, s in self.shapes.items()}
        else:
            want |= self._state_shapes(state, batch, heads)
        if params is not None:
            known = self.init_params()
            self._check_names("params", params, known, bound)
            for n, t in known.items():
                per_head = isinstance(params[n], Tensor) and params[n].dim() > t.dim()
                want[f"params.{n}"] = (params[n], (heads, *t.shape) if per_head else tuple(t.shape))
        for name, (t, shape) in want.items():
            _check_tensor(name, t, shape, v.device, bound)

    def _check_names(self, what: str, given: Mapping[str, Tensor], known: Iterable[str], bound: str) -> None:
        if not isinstance(given, Mapping) or set(given) != set(known):
            got = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise ShapeError(f"{got}", f"{sorted(known)} ({bound})", "", what)

    def _state_shapes(self, state: MemoryState, batch: int, heads: int) -> Wanted:
        """Every tensor of a state and the shape it must have; its other fields and names are checked here."""
        if not isinstance(state, MemoryState):
            raise ShapeError(type(state).__name__, "the MemoryState an earlier call returned, or None", "", "state")
        position, hint = state.position, "a state that this rule returned"
        if not isinstance(position, int | torch.SymInt) or isinstance(position, bool) or position < 0:
            got = type(position).__name__ if not isinstance(position, int) else f"{position}"
            raise ShapeError(got, "a whole number >= 0", "", "state.position")
        if (state.span is None) is not self.finite or not isinstance(state.span, Span | None):
            got, expected = type(state.span).__name__, "None" if self.finite else "a Span"
            raise ShapeError(got, f"{expected}, since the features of the spec are {'' if self.finite else 'in'}finite", hint, "state.span")
        bound, c = f"B={batch} H={heads}", self.spec.window.size - 1
        want = self._weights_like("state", state, self.shapes, (batch, heads), bound)
        want["state.keys"] = (state.keys, (batch, c, heads, self.key_dim))
        want["state.values"] = (state.values, (batch, c, heads, self.value_dim))
        if state.span is not None:
            keys = state.span.keys
            seen = keys.shape[1] if isinstance(keys, Tensor) and keys.dim() == 4 else 0
            shapes = {n: (out, seen) for n, out in self._endless.items()}
            want["state.span.keys"] = (keys, (batch, seen, heads, self.key_dim))
            want |= self._weights_like("state.span", state.span, shapes, (batch, heads), bound)
        return want

    def _weights_like(
        self, path: str, held: MemoryState | Span, shapes: Mapping[str, tuple[int, ...]], row: tuple[int, int], bound: str
    ) -> Wanted:
        """The weights, slots and anchor of a state or of its span, each with its shape."""
        anchored = shapes if self.spec.update.grad_at == "chunk" else {}
        want: Wanted = {}
        for field, known in (("weights", shapes), ("slots", shapes), ("anchor", anchored)):
            self._check_names(f"{path}.{field}", getattr(held, field), known, bound)
        for n, shape in shapes.items():
            want[f"{path}.weights.{n}"] = (held.weights[n], (*row, *shape))
            self._check_names(f"{path}.slots.{n}", held.slots[n], self.slots, bound)
            want |= {f"{path}.slots.{n}.{s}": (held.slots[n][s], (*row, *shape)) for s in self.slots}
        return want | {f"{path}.anchor.{n}": (held.anchor[n], (*row, *s)) for n, s in anchored.items()}

    def _check_ranges(self, gates: Gates) -> None:
        roles = self.spec.roles()
        for name in self.gates:
            role, g = roles[name][0], gates[name].detach()
            high = float("inf") if role.high is None else role.high
            bad = ~((g >= role.low) & (g <= high) & torch.isfinite(g))
            if bad.any():
                at = [int(i) for i in bad.nonzero()[0]]
                span = f"[{role.low:g}, {high:g}]" if role.high is not None else f"finite and >= {role.low:g}"
                raise ShapeError(
                    f"{name} = {g[tuple(at)].item():g} at batch {at[0]}, token {at[1]}, head {at[2]}",
                    span,
                    "pass the gate itself, not its logarithm or logit",
                    f"gates.{name}",
                )

    @torch.no_grad()
    def _blown_up(self, inputs: dict[str, Tensor], gates: dict[str, Tensor], params: dict[str, Tensor], state: MemoryState) -> ShapeError:
        """The error for outputs or states that are not finite, with the first token at which they are not, found by halving."""

        def run(first: int, last: int) -> tuple[Tensor, MemoryState]:
            q, k, v = (t[:, first:last] for t in inputs.values())
            return self.run(q, k, v, {n: g[:, first:last] for n, g in gates.items()}, params, state)

        first, last = 0, inputs["v"].shape[1]
        while last - first > 1:
            middle = (first + last) // 2
            y, after = run(first, middle)
            first, last, state = (middle, last, after) if _finite(y, after) else (first, middle, state)
        y, after = run(first, last)
        tokens = {n: t[:, first] for n, t in inputs.items()} | {f"gates.{n}": g[:, first] for n, g in gates.items()}
        inner = {n: t for n, t in flatten(after).items() if isinstance(t, Tensor) and n.split(".")[-1] not in ("keys", "values")}
        name, bad = next((n, t) for n, t in {**tokens, **inner, "the output": y[:, 0]}.items() if not torch.isfinite(t).all())
        b, h = (int(i) for i in (~torch.isfinite(bad)).nonzero()[0][:2])
        values = ", ".join(f"{n} = {[round(x, 4) for x in g[b, first, h].flatten().tolist()[:8]]}" for n, g in gates.items())
        return ShapeError(
            f"non-finite values, first in {name} at batch {b}, token {first}, head {h}; gates there: {values or 'none'}",
            "finite values", "normalise the keys (layer.key_norm: l2), smaller step sizes, retain below 1", "check",
        )


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """No automatic change of types; the meta device knows none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _for_rows(w: Tensor, batch: int) -> Tensor:
    """w [H, ..] for every row of a batch: a view, as its gradient is where there is one row."""
    return w[None] if batch == 1 else w.expand(batch, *w.shape)


def _described(t: object) -> str:
    """A tensor's type, layout and shape, or the type of what is no tensor."""
    if not isinstance(t, Tensor):
        return type(t).__name__
    layout = "" if t.layout is torch.strided else f" {t.layout}"
    return f"{t.dtype}{layout} {list(t.shape)}"


def _check_tensor(name: str, t: Tensor, shape: tuple[int, ...], device: torch.device, bound: str) -> None:
    """Whether `t` is a dense floating tensor of this shape on this device; ShapeError if not."""
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.layout is not torch.strided:
        raise ShapeError(_described(t), f"a dense floating tensor {list(shape)} ({bound})", "", name)
    if tuple(t.shape) != shape:
        raise ShapeError(f"{list(t.shape)}", f"{list(shape)} ({bound})", "", name)
    if t.device != device:
        raise ShapeError(f"{name} on {t.device}", f"every tensor on {device}, where v is", "", name)


def _finite(y: Tensor, state: MemoryState) -> bool:
    """Whether the outputs and every tensor of the state are finite."""
    tensors = (t for t in (y, *flatten(state).values()) if isinstance(t, Tensor))
    return all(bool(torch.isfinite(t.detach()).all()) for t in tensors)


MAX_WIDTH = 200_000
MAX_ENTRIES = 1 << 27  # of one weight of one head; compiling traces the formulas at their own sizes
_PROBE = 1_000_003


def _cast(state: MemoryState, dtype: torch.dtype) -> MemoryState:
    return state.map(lambda t: t.to(dtype))
