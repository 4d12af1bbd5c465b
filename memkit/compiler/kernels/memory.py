"""Where values lie: the addresses a kernel computes from indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Index(NamedTuple):
    """The text of an index, the dimensions of the tile it varies along, and the text of when it is in range ("" for always)."""

    text: str
    dims: frozenset[int] = frozenset()
    guard: str = ""

    def moved(self, text: str, guard: str = "") -> Index:
        """Another index made of this one, in range where this one is and `guard` holds."""
        return Index(text, self.dims, both(self.guard, guard))


class Value(NamedTuple):
    """The text of a value and the dimensions of the tile it varies along; `masked`: it is 0 wherever its indices are out of range."""

    text: str
    dims: frozenset[int] = frozenset()
    masked: bool = False


def both(*guards: str) -> str:
    """All of these conditions."""
    parts = list(dict.fromkeys(g for g in guards if g))
    return " & ".join(parts)


@dataclass(frozen=True)
class Buffer:
    """An array in memory. strides: axis -> text, for every axis of the values in it; `fixed` is what else is added to the address.

    outside: it came in or goes out with a batch and a head axis, where all else has the axis g; `arguments` are then its strides' names.
    """

    name: str
    strides: Mapping[str, str] = field(default_factory=dict)
    fixed: str = ""
    outside: bool = False
    arguments: tuple[str, ...] = ()

    def address(self, index: Mapping[str, Index]) -> tuple[str, str, str]:
        """(what is the same for the whole tile, what differs, the guard)."""
        same, differs, guards = [self.fixed] if self.fixed else [], [], []
        for axis, stride in self.strides.items():
            at = index[axis]
            guards.append(at.guard)
            if self.outside and axis == "g":
                same += [f"b * {self.name}_b", f"h * {self.name}_h"]
                continue
            term = at.text if stride == "1" else f"{at.text} * {stride}"
            (differs if at.dims else same).append(term)
        return " + ".join(same), " + ".join(differs), both(*guards)

    def dims(self, index: Mapping[str, Index]) -> frozenset[int]:
        return frozenset().union(*(index[a].dims for a in self.strides))

    def at(self, axis: str, text: str) -> Buffer:
        """The part of it at one index of an axis."""
        stride = self.strides[axis]
        rest = {a: s for a, s in self.strides.items() if a != axis}
        return replace(self, strides=rest, fixed=" + ".join(p for p in (self.fixed, f"{text} * {stride}") if p))


def packed(axes: list[str], sizes: Mapping[str, int]) -> tuple[dict[str, str], int]:
    """Strides of an array without gaps, and its size."""
    strides, step = {}, 1
    for axis in reversed(axes):
        strides[axis] = str(step)
        step *= sizes[axis]
    return {a: strides[a] for a in axes}, step
