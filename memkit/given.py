"""`given`: what two specs are compared under. Every entry is laid over the side, or sides, that have such a knob or gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from memkit.specs.component import Component
from memkit.specs.errors import SpecError, near
from memkit.specs.gate import WINDOW_GATE, Number
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec

GATE = "gates."


@dataclass(frozen=True)
class Side:
    """One of the two specs with `given` worked in. slots: gates fixed slot by slot. applied: what of `given` it has, in words."""

    spec: LayerSpec
    slots: dict[str, tuple[float, ...]] = field(default_factory=dict)
    applied: tuple[str, ...] = ()

    def fixed(self) -> dict[str, Any]:
        """Every gate that is a number, or one number a slot."""
        return {n: g.value for n, (_, g) in self.spec.roles().items() if isinstance(g, Number)} | self.slots


def sides(a: Any, b: Any, given: Mapping[str, Any] | None) -> tuple[Side, Side]:
    """Both specs under `given`.

    Raises:
        SpecError: an entry that neither side has, or a value that does not fit.
    """
    given = dict(given or {})
    found = [under(x if isinstance(x, LayerSpec) else load_spec(x), given) for x in (a, b)]
    for path in given:
        if not any(path in used for _, used in found):
            got = f"given {path}: {_shown(given[path])}"
            raise SpecError(
                got,
                "a knob or gate that one side has; a list only for the gate of a window with as many slots",
                _hint(path, [s for s, _ in found]),
                f"given.{path}",
            )
    return found[0][0], found[1][0]


def under(spec: LayerSpec, given: Mapping[str, Any]) -> tuple[Side, set[str]]:
    """`spec` with the entries of `given` that it has, and their names."""
    knobs = {p: v for p, v in given.items() if not p.startswith(GATE)}
    whole = {p: v for p, v in knobs.items() if ("." not in p or p.endswith(".kind")) and has(spec, p)}
    spec = load_spec(spec, whole) if whole else spec
    parts = {p: v for p, v in knobs.items() if p not in whole and has(spec, p)}
    used, applied, slots = {*whole, *parts}, [f"{p} = {_shown(v)}" for p, v in (whole | parts).items()], {}
    if parts.get("window.size") == 1 and not {"window.gate", GATE + WINDOW_GATE.name} & given.keys() and spec.window.gate.given:
        parts["window.gate"] = "none"  # a window of one token is no window: its gate would be a second step size
        applied.append("window.gate = none, since the window is one token")
    size = parts.get("window.size", spec.window.size)
    for path, value in given.items():
        name = path.removeprefix(GATE)
        place = gate_path(spec, name)
        if path == name or place is None:
            continue
        if isinstance(value, Sequence) and not isinstance(value, str):
            if name != WINDOW_GATE.name or len(value) != size:
                continue  # it belongs to the side that has this many slots
            slots[name] = tuple(_number(path, x) for x in value)
        else:
            parts[place] = _number(path, value)
        used.add(path)
        applied.append(f"{path} = {_shown(value)}")
    return Side(load_spec(spec, parts) if parts else spec, slots, tuple(applied)), used


def has(spec: LayerSpec, path: str) -> bool:
    """Whether a dotted path leads to a field of the spec as it stands."""
    *above, last = path.split(".")
    node: Any = spec
    for part in above:
        if not isinstance(node, BaseModel) or part not in type(node).model_fields:
            return False
        node = getattr(node, part)
    return isinstance(node, BaseModel) and (last in type(node).model_fields or (last == "kind" and isinstance(node, Component)))


def gate_path(spec: LayerSpec, name: str) -> str | None:
    """The spec path of the gate that has this role, or None."""
    for path, component in spec.components():
        for knob, role in component.gates.items():
            if role.name == name:
                return f"{path}.{knob}"
    return "window.gate" if name == WINDOW_GATE.name else None


def _number(path: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SpecError(f"given {path}: {value!r}", "a number", "", f"given.{path}")
    return float(value)


def _hint(path: str, found: Sequence[Side]) -> str:
    names = {GATE + n for s in found for n in s.spec.roles()}
    for side in found:
        names |= set(LayerSpec.model_fields)
        names |= {
            f"{n}.{f}" for n in LayerSpec.model_fields if isinstance(x := getattr(side.spec, n), BaseModel) for f in type(x).model_fields
        }
    return near(path, sorted(names))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
