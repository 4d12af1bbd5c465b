"""The knobs of the explorer: which fields of a spec it turns, and every spec that is one turn away from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memkit.specs.component import FAMILIES, Component
from memkit.specs.errors import MemkitError
from memkit.specs.gate import Number
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec

WINDOWS = (1, 2, 8, 16)
# Spec path -> (the knob's name on the page, the values it takes; of a family all kinds).
FIELDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "features": ("features", ()),
    "memory": ("memory", ()),
    "memory.residual": ("residual", (False, True)),
    "memory.norm": ("memory norm", ("none", "layer")),
    "bias": ("bias", ()),
    "window.size": ("window", WINDOWS),
    "window.gate": ("window gate", ("none", "learned", "input")),
    "retention": ("retention", ()),
    "optimizer": ("optimizer", ()),
    "update.grad_at": ("gradient at", ("token", "decayed", "chunk")),
    "update.read": ("read", ("after", "before")),
}


@dataclass(frozen=True)
class Turn:
    """One knob turned: the spec that results, or what memkit says against it."""

    path: str
    value: str
    spec: LayerSpec | None
    error: str = ""


def settings(spec: LayerSpec) -> dict[str, str]:
    """Path -> the value of each knob, as the page shows it."""
    return {path: _shown(_at(spec, path)) for path in FIELDS}


def turns(spec: LayerSpec) -> Iterator[Turn]:
    """Every spec that differs in one knob; other fields stay, those too that a new kind shares with the old."""
    for path, (_, values) in FIELDS.items():
        now = _at(spec, path)
        options = [_kept(now, kind) for kind in FAMILIES[path].members] if path in FAMILIES else list(values)
        for option in options:
            if _shown(option) == _shown(now) or (path == "window.gate" and spec.window.size == 1):
                continue
            try:
                turned = load_spec(spec, {path: option})
            except MemkitError as error:
                yield Turn(path, _shown(option), None, str(error))
            else:
                yield Turn(path, _shown(option), turned)


def _at(spec: LayerSpec, path: str) -> Any:
    value: Any = spec
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _kept(now: Component, kind: str) -> dict[str, Any]:
    """Another kind of the same family with the fields that both have, so that one knob turns one thing; but not with the old one's start,
    since zeros that a matrix can leave hold most nets for ever."""
    member = FAMILIES[now.family].members[kind]
    shared = {name: value for name, value in now.model_dump().items() if name in member.model_fields and name != "initial"}
    return {"kind": kind, **shared}


def _shown(value: Any) -> str:
    """A value on the page: of a component its kind, of a gate that is 1 `none`."""
    if isinstance(value, Mapping):
        return str(value["kind"])
    if isinstance(value, Number):
        return "none" if value.value == 1 else f"{value.value:g}"
    if isinstance(value, Component):
        return value.kind
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
