"""Sums of products in index notation: the normal form in which two graphs are compared.

Where it sits: `canonical` turns a graph into these, `match` compares them. A term is a number times factors; a factor is a symbol
with one index for each of its axes. An index that is a name is free, one that is a number is summed over. Operands have no order and
summed indices no name, so what differs only in these is one object; equal keys always mean equal values, and an unlucky order of
symmetric indices costs a merge, never truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Any

Index = str | int
Factor = tuple[str, tuple[Index, ...]]
Factors = tuple[Factor, ...]
Sum = dict[Factors, float]  # canonical factors -> coefficient

TIES = 24  # orders of symmetric indices that are tried


@dataclass(frozen=True)
class Symbol:
    """What a factor's symbol stands for.

    op: "param" (detail: its name), "tensor" (detail: its entries) or a function of `args`, numbers of definitions; an index list is
    that of the arguments' formal indices, one after the other. gone: for a function that reduces, the formals it sums or maximises over.
    """

    op: str
    detail: Any = None
    args: tuple[int, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class Definition:
    """A sum used as an argument; its free indices are `formals`."""

    formals: tuple[str, ...]
    terms: tuple[tuple[Factors, float], ...]


@dataclass
class Table:
    """Symbols and definitions, each once: two sums that are the same get the same number."""

    symbols: dict[str, Symbol] = field(default_factory=dict)
    definitions: list[Definition] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    names: dict[Symbol, str] = field(default_factory=dict)

    def symbol(self, found: Symbol) -> str:
        """The name of a symbol; names order the factors of a term."""
        if found not in self.names:
            hint = f"{found.op}:{found.detail}" if found.op == "param" else f"{found.op}:{len(self.names):06d}"
            self.names[found] = hint
            self.symbols[hint] = found
        return self.names[found]

    def define(self, total: Sum) -> tuple[int, tuple[str, ...]]:
        """(number of the definition, the sum's free indices in the order of its formals)."""
        order = _formal_order(total)
        formals = tuple(f"@{i}" for i in range(len(order)))
        terms = ordered(renamed(total, dict(zip(order, formals, strict=True))))
        key = tuple((factors, number(c)) for factors, c in terms)
        if (formals, key) not in self.numbers:
            self.numbers[formals, key] = len(self.definitions)
            self.definitions.append(Definition(formals, terms))
        return self.numbers[formals, key], order


def number(value: float) -> str:
    """A coefficient as it is compared: 12 significant digits."""
    return f"{value:.12g}"


def ordered(total: Sum) -> tuple[tuple[Factors, float], ...]:
    return tuple(sorted(total.items(), key=lambda item: _order_of(item[0])))


def _order_of(factors: Factors) -> Any:
    return [(symbol, [str(i) for i in indices]) for symbol, indices in factors]


def constant(value: float) -> Sum:
    return {(): value} if value else {}


def value_of(total: Sum) -> float | None:
    """The number a sum is, or None."""
    return 0.0 if not total else total[()] if set(total) == {()} else None


def free_indices(total: Iterable[Factors]) -> set[str]:
    return {i for factors in total for _, indices in factors for i in indices if isinstance(i, str)}


def bound_count(factors: Factors) -> int:
    return 1 + max((i for _, indices in factors for i in indices if isinstance(i, int)), default=-1)


def substituted(factors: Iterable[Factor], names: Mapping[Any, Index]) -> Factors:
    return tuple((symbol, tuple(names.get(i, i) for i in indices)) for symbol, indices in factors)


def renamed(total: Sum, names: Mapping[str, str]) -> Sum:
    """The sum with free indices renamed, all at once."""
    names = {old: new for old, new in names.items() if old != new}
    if not names:
        return total
    return collect((canonical(substituted(factors, names)), c) for factors, c in total.items())


def collect(terms: Iterable[tuple[Factors, float]]) -> Sum:
    """Equal products added up; those that cancel are gone."""
    total: Sum = {}
    size: dict[Factors, float] = {}
    for factors, c in terms:
        total[factors] = total.get(factors, 0.0) + c
        size[factors] = max(size.get(factors, 0.0), abs(c))
    return {factors: c for factors, c in total.items() if abs(c) > 1e-13 * size[factors]}


def canonical(factors: Sequence[Factor]) -> Factors:
    """The factors in one order, and the summed indices numbered by it."""
    bound = {i for _, indices in factors for i in indices if isinstance(i, int)}
    if not bound:
        return tuple(sorted(factors))
    colours = _refined(factors, dict.fromkeys(bound, 0))
    best: tuple[Any, Factors] | None = None
    for rank in _rankings(colours):
        found = _numbered(factors, rank)
        key = _order_of(found)
        if best is None or key < best[0]:
            best = (key, found)
    assert best is not None
    return best[1]


def _shown(index: Index, colours: Mapping[int, int]) -> tuple[str, str | int]:
    return ("free", index) if isinstance(index, str) else ("sum", colours[index])


def _refined(factors: Sequence[Factor], colours: dict[int, int]) -> dict[int, int]:
    """Colours of summed indices by where they stand, until no colour splits."""
    for _ in range(len(colours) + 1):
        seen: dict[int, list[Any]] = {i: [] for i in colours}
        for symbol, indices in factors:
            shape = [_shown(i, colours) for i in indices]
            for place, i in enumerate(indices):
                if isinstance(i, int):
                    seen[i].append((symbol, place, shape))
        keys = {i: (colours[i], sorted(seen[i], key=repr)) for i in colours}
        distinct = sorted({repr(k) for k in keys.values()})
        new = {i: distinct.index(repr(k)) for i, k in keys.items()}
        if len(set(new.values())) == len(set(colours.values())):
            return new
        colours = new
    return colours


def _rankings(colours: Mapping[Any, int]) -> Iterator[dict[Any, int]]:
    """Orders of the indices that follow their colours; all of them among equal ones, up to TIES."""
    groups: dict[int, list[Any]] = {}
    for index, colour in colours.items():
        groups.setdefault(colour, []).append(index)
    ways = 1
    for group in groups.values():
        for n in range(2, len(group) + 1):
            ways *= n
    parts = [list(permutations(groups[c])) if ways <= TIES else [tuple(groups[c])] for c in sorted(groups)]
    for choice in product(*parts):
        yield {index: rank for rank, index in enumerate(i for part in choice for i in part)}


def _numbered(factors: Sequence[Factor], rank: Mapping[int, int]) -> Factors:
    first = sorted(substituted(factors, rank), key=lambda f: (f[0], [str(i) for i in f[1]]))
    names: dict[Index, Index] = {}
    for _, indices in first:
        for i in indices:
            if isinstance(i, int):
                names.setdefault(i, len(names))
    return tuple(sorted(substituted(first, names), key=lambda f: (f[0], [str(i) for i in f[1]])))


def _formal_order(total: Sum) -> tuple[str, ...]:
    """The free indices in an order that does not depend on their names."""
    free = sorted(free_indices(total))
    if len(free) < 2:
        return tuple(free)
    colours = dict.fromkeys(free, 0)
    for _ in free:
        keys = {x: (colours[x], _profile(total, x, colours)) for x in free}
        distinct = sorted({repr(k) for k in keys.values()})
        new = {x: distinct.index(repr(k)) for x, k in keys.items()}
        if len(set(new.values())) == len(set(colours.values())):
            break
        colours = new
    found = [sorted(rank, key=lambda x: rank[x]) for rank in _rankings(colours)]
    if len(found) == 1:
        return tuple(found[0])
    return tuple(min(found, key=lambda order: [_order_of(f) for f, _ in ordered(renamed(total, _formal_names(order)))]))


def _formal_names(order: Sequence[str]) -> dict[str, str]:
    return {x: f"@{i}" for i, x in enumerate(order)}


def _profile(total: Sum, index: str, colours: Mapping[str, int]) -> list[Any]:
    """How `index` stands in the terms, other free indices known by colour alone."""
    names: dict[Index, Index] = {x: "*" if x == index else f"#{c}" for x, c in colours.items()}
    return sorted((repr(canonical(substituted(factors, names))), number(c)) for factors, c in total.items())


def multiplied(a: Factors, b: Factors) -> Factors:
    """The factors of both, summed indices kept apart; not yet canonical."""
    shift = bound_count(a)
    return (*a, *((symbol, tuple(i + shift if isinstance(i, int) else i for i in indices)) for symbol, indices in b))


def bound(factors: Factors, axes: Iterable[str]) -> Factors:
    """The same product summed over the free indices `axes`; not yet canonical."""
    start = bound_count(factors)
    return substituted(factors, {axis: start + n for n, axis in enumerate(axes)})


@dataclass
class Rewrites:
    """The rules that were applied, in order of first use: (rule, where) -> times."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, rule: str, where: str = "") -> None:
        self.counts[rule, where] += 1

    def lines(self) -> list[str]:
        return [
            f"{rule}{f'   at {where}' if where else ''}{f'   ({n} times)' if n > 1 else ''}" for (rule, where), n in self.counts.items()
        ]
