"""The state of a rule: one NamedTuple for training, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from .errors import ShapeError

Weights = dict[str, Tensor]
Slots = dict[str, dict[str, Tensor]]


class Span(NamedTuple):
    """Weights over infinite features, kept as coefficients of the kernels of all keys seen: W phi(x) = sum_n d_n kernel(k_n, x).

    keys: [B, N, H, K]. weights, anchor: name -> [B, H, out, N]. slots: name -> slot -> [B, H, out, N].
    """

    keys: Tensor
    weights: Weights
    slots: Slots
    anchor: Weights


class MemoryState(NamedTuple):
    """What a sequence leaves behind; feeding it back continues the sequence exactly, also inside a chunk and inside a window.

    weights: name -> [B, H, out, in], the memory after the last token.
    slots: name -> slot -> [B, H, out, in], the inner optimizer's state (momentum).
    anchor: name -> [B, H, out, in], the memory at the start of the running chunk; empty unless grad_at is chunk.
    keys, values: [B, c - 1, H, K] and [B, c - 1, H, V], the last c - 1 tokens, zeros before the sequence's start.
    position: number of tokens seen since the sequence's start.
    span: weights over infinite features, or None.
    """

    weights: Weights
    slots: Slots
    anchor: Weights
    keys: Tensor
    values: Tensor
    position: int
    span: Span | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> MemoryState:
        """The same state with `fn` applied to every tensor."""
        return map_tensors(self, fn)

    def detach(self) -> MemoryState:
        """Cut from the graph: call it between steps of truncated back-propagation, before the next `backward`."""
        return self.map(Tensor.detach)

    def clone(self) -> MemoryState:
        """A snapshot that later steps do not touch."""
        return self.map(Tensor.clone)

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors of the state."""
        return count_bytes(self)

    def state_dict(self) -> dict[str, Any]:
        """A flat dict: dotted names to tensors, and `position`."""
        return flatten(self)

    def load_state_dict(self, flat: Mapping[str, Any]) -> MemoryState:
        """A state of this one's structure with the values of `flat`; this one is not changed.

        Raises:
            ShapeError: on missing or unknown names, or shapes that differ in more than the batch or the number of keys seen.
        """
        return refill(self, flat)


# The same for every NamedTuple of tensors, dicts and NamedTuples; a layer's state uses them too.

State = TypeVar("State", bound=tuple[Any, ...])


def map_tensors(state: State, fn: Callable[[Tensor], Tensor]) -> State:
    """The same state with `fn` applied to every tensor."""
    return _map(state, fn)


def count_bytes(state: tuple[Any, ...]) -> int:
    """Bytes held by all tensors of a state."""
    return sum(t.numel() * t.element_size() for t in flatten(state).values() if isinstance(t, Tensor))


def flatten(state: tuple[Any, ...]) -> dict[str, Any]:
    """Dotted names to tensors and whole numbers."""
    return dict(_flatten("", state))


def refill(state: State, flat: Mapping[str, Any]) -> State:
    """A state of the structure of `state` with the values of `flat`.

    Raises:
        ShapeError: on missing or unknown names, or a different number of axes.
    """
    own = flatten(state)
    if not isinstance(flat, Mapping):
        raise ShapeError(type(flat).__name__, "what state_dict() returned", "", "state")
    if set(own) != set(flat):
        missing, extra = sorted(set(own) - set(flat)), sorted(map(str, set(flat) - set(own)))
        raise ShapeError(f"missing {missing}, unknown {extra}", f"the names {sorted(own)}", "", "state")
    for name, value in own.items():
        if isinstance(value, Tensor) and (not isinstance(flat[name], Tensor) or value.dim() != flat[name].dim()):
            raise ShapeError(f"{name}: {getattr(flat[name], 'shape', flat[name])}", f"{tuple(value.shape)}", "", "state")
        if not isinstance(value, Tensor) and (not isinstance(flat[name], int) or isinstance(flat[name], bool)):
            raise ShapeError(f"{name}: {type(flat[name]).__name__}", "a whole number", "int(..)", "state")
    return _unflatten("", state, flat)


def _map(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {k: _map(v, fn) for k, v in value.items()}
    return type(value)(*(_map(v, fn) for v in value)) if isinstance(value, tuple) else value


def _fields(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else list(zip(value._fields, value, strict=True))


def _flatten(prefix: str, value: Any) -> Any:
    if isinstance(value, Tensor | int):
        yield prefix, value
    elif value is not None:
        for name, item in _fields(value):
            yield from _flatten(f"{prefix}.{name}" if prefix else name, item)


def _unflatten(prefix: str, like: Any, flat: Mapping[str, Any]) -> Any:
    if isinstance(like, Tensor | int):
        return flat[prefix]
    if like is None:
        return None
    items = {name: _unflatten(f"{prefix}.{name}" if prefix else name, item, flat) for name, item in _fields(like)}
    return items if isinstance(like, dict) else type(like)(**items)
