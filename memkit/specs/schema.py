"""The JSON Schema of a spec, generated from the component registry: editors complete by it, and `io` finds every mistake of a file with it.

Each section is checked against the schema of the kind it names, so a message speaks of that kind's fields and of no others.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from pydantic import BaseModel

from .component import FAMILIES, Component
from .document import Document, KeyPath, shown
from .errors import SpecError, near
from .gate import Role
from .layer import LayerSpec, Section

SCHEMA_FILE = Path(__file__).with_name("layer.schema.json")

MAX_PROBLEMS = 100  # enough for any spec; a file that is something else altogether has thousands

Json = dict[str, Any]
Registry = tuple[tuple[str, tuple[type[Component], ...]], ...]


def registry(*, shipped: bool = False) -> Registry:
    """The members of every family, as a key that changes when one is added; `shipped` leaves out those of other packages."""
    package = f"{__package__}."
    return tuple(
        (name, tuple(m for m in root.members.values() if not shipped or m.__module__.startswith(package)))
        for name, root in FAMILIES.items()
    )


@lru_cache(maxsize=8)
def generate(known: Registry, whole: bool = True) -> Json:
    """The schema (draft 2020-12) of the specs that `known` members can form.

    `whole` False allows a component without its kind, for a file that has the kind from the spec it extends.
    """
    builder = _Builder({name: members for name, members in known}, whole)
    top = builder.fields(LayerSpec)
    extends = {"type": "string", "description": "a preset, or a file relative to this one, that this one goes over"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "spec",
        "description": inspect.cleandoc(LayerSpec.__doc__ or ""),
        "type": "object",
        "properties": {"extends": extends, **top},
        "additionalProperties": False,
        "$defs": dict(sorted(builder.defs.items())),
    }


def text() -> str:
    """What layer.schema.json holds: the schema of a file, with the members shipped with memkit."""
    return json.dumps(generate(registry(shipped=True), whole=False), indent=1, ensure_ascii=False) + "\n"


class _Builder:
    """Collects the definitions; every method returns the schema of one thing."""

    def __init__(self, members: Mapping[str, tuple[type[Component], ...]], whole: bool) -> None:
        self.members, self.whole = members, whole
        self.defs: Json = {}

    def fields(self, model: type[BaseModel]) -> Json:
        """Field name -> schema."""
        plain = model.model_json_schema(ref_template="#/$defs/{model}")
        for name, schema in plain.get("$defs", {}).items():
            if not (isinstance(model, type) and issubclass(model, LayerSpec)):
                self.defs.setdefault(name, schema)
        out: Json = {}
        for name, info in model.model_fields.items():
            kind = info.annotation
            schema = {k: v for k, v in plain["properties"][name].items() if k != "title"}
            if isinstance(kind, type) and issubclass(kind, Component) and kind.is_root():
                none = name in getattr(model, "none", ())
                schema = self.family(kind, getattr(model, "gates", {}).get(name), none)
            elif isinstance(kind, type) and issubclass(kind, Section):
                schema = self.section(name, kind)
            if info.description:
                schema["description"] = info.description
            if isinstance(info.default, Component):
                schema["default"] = info.default.shorthand()
            out[name] = schema
        return out

    def section(self, name: str, model: type[Section]) -> Json:
        self.defs[name] = {
            "title": name,
            "description": inspect.cleandoc(model.__doc__ or ""),
            "type": "object",
            "properties": self.fields(model),
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}

    def family(self, root: type[Component], role: Role | None, none: bool) -> Json:
        """A field that holds a member: a bare kind, a number where the family takes one, or a mapping with `kind`."""
        name = root.family if role is None else f"{root.family}.{role.name}"
        low, high = (None, None) if role is None else (role.low, role.high)
        kinds = {member.kind: self.member(name, member, low, high) for member in self.members[root.family]}
        numbers = isinstance(root.expand(1.0), Mapping)
        bare = [k for k in kinds if not (numbers and root.expand(1.0)["kind"] == k)]
        branches: list[Json] = [{"type": "string", "enum": bare + ["none"] * none}]
        if numbers:
            branches.append({"type": "number", **_bounds(low, high)})
        if none:
            branches.append({"type": "null"})
        cases = [
            {"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": {"$ref": f"#/$defs/{ref}"}}
            for kind, ref in kinds.items()
        ]
        required = {"required": ["kind"]} if self.whole else {}
        branches.append({"title": root.family, "type": "object", **required, "properties": {"kind": {"enum": list(kinds)}}, "allOf": cases})
        self.defs[name] = {"title": name, "anyOf": branches}
        return {"$ref": f"#/$defs/{name}"}

    def member(self, family: str, member: type[Component], low: float | None, high: float | None) -> str:
        """Defines one kind, and returns the definition's name. In a gate, numbers are bounded by the gate's role."""
        name = f"{family}.{member.kind}"
        fields = self.fields(member)
        if low is not None:
            fields = {field: _bounded(schema, low, high) for field, schema in fields.items()}
        needed = [n for n, info in member.model_fields.items() if info.is_required()]
        self.defs[name] = {
            "title": member.kind,
            "description": inspect.cleandoc(member.__doc__ or ""),
            "type": "object",
            "properties": {"kind": {"const": member.kind}, **fields},
            "required": ["kind", *needed],
            "additionalProperties": False,
        }
        return name


def _bounds(low: float | None, high: float | None) -> Json:
    return {key: value for key, value in (("minimum", low), ("maximum", high)) if value is not None}


def _bounded(schema: Json, low: float | None, high: float | None) -> Json:
    """`schema` with its numbers kept within the gate's range."""
    if schema.get("type") == "number":
        return {**schema, **_bounds(low, high)}
    if "anyOf" in schema:
        return {**schema, "anyOf": [_bounded(s, low, high) for s in schema["anyOf"]]}
    return schema


@lru_cache(maxsize=8)
def _validator(known: Registry) -> Draft202012Validator:
    return Draft202012Validator(generate(known))


def problems(document: Document) -> list[tuple[KeyPath, SpecError]]:
    """Every mistake the schema finds: the path of the value it concerns, and the error at its place."""
    found: list[tuple[KeyPath, SpecError]] = []
    for error in _validator(registry()).iter_errors(document.data):
        for leaf in _leaves(error):
            for problem in _describe(leaf, document):
                if any(p.where == problem.where and p.got == problem.got for _, p in found):
                    continue  # two keywords of one schema, such as type and enum
                found.append((tuple(leaf.absolute_path), problem))
                if len(found) >= MAX_PROBLEMS:
                    return found
    return found


def _leaves(error: ValidationError) -> Iterator[ValidationError]:
    """The errors to report: of alternatives, those of the one that fits the value's type; if none does, the error itself."""
    if error.validator != "anyOf":
        yield error
        return
    branches: dict[Any, list[ValidationError]] = {}
    for inner in error.context or ():
        branches.setdefault(inner.relative_schema_path[0], []).append(inner)
    chosen = [errors for errors in branches.values() if not any(e.validator == "type" and not e.relative_path for e in errors)]
    if not chosen:
        yield error
        return
    if any(inner.validator == "enum" and not inner.relative_path for inner in chosen[0]):
        yield error  # an unknown word: show all that may stand here
        return
    for inner in chosen[0]:
        yield from _leaves(inner)


def _describe(error: ValidationError, document: Document) -> Iterator[SpecError]:
    path: KeyPath = tuple(error.absolute_path)
    schema: Any = error.schema
    value: Any = error.instance
    if error.validator == "additionalProperties":
        known = list(schema["properties"])
        for key in value:
            if key not in known:
                owner = schema.get("title", "this section")
                hint = near(key, known) or _elsewhere(key, path)
                yield SpecError(key, f"a field of {owner}: {', '.join(known)}", hint, document.where((*path, key), key=True))
        return
    where = document.where(path)
    if error.validator == "required":
        for key in schema["required"]:
            if key not in value:
                kinds = schema["properties"].get(key, {}).get("enum")
                expected = f"{key}: one of {', '.join(kinds)}" if kinds else f"the field {key}"
                got = f"{_name(path)}{shown(value)} without {key}"
                yield SpecError(got, expected, _kind_hint(path, value) if kinds else "", where)
        return
    yield SpecError(f"{_name(path)}{shown(value)}", in_words(schema), _hint(error, schema), where)


def _kind_hint(path: KeyPath, fields: Mapping[str, Any]) -> str:
    """A kind that has all the fields given, for a section that names none."""
    members = FAMILIES[str(path[0])].members if len(path) == 1 and path[0] in FAMILIES else {}
    fitting = [kind for kind, member in members.items() if set(fields) <= set(member.model_fields)]
    return f"{{kind: {fitting[0]}, ...}}" if fitting else ""


def _name(path: KeyPath) -> str:
    """The field a message speaks of; an item of a list is named by its list."""
    words = [str(p) for p in path]
    return (".".join(words[-2:]) if path and isinstance(path[-1], int) else words[-1] if words else "spec") + ": "


def _elsewhere(key: str, path: KeyPath) -> str:
    """Where an unknown key would be at home: a section of the spec, or another kind of the same family."""
    if not path:
        for name, info in LayerSpec.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section) and key in info.annotation.model_fields:
                return f"{name}: {{{key}: ...}}"
            if "." in key and key.split(".")[0] == name:
                return f"{name}: {{{key.partition('.')[2]}: ...}}; dotted paths are for overrides"
        return ""
    root = FAMILIES.get(str(path[0])) if len(path) == 1 else None
    homes = [kind for kind, member in root.members.items() if key in member.model_fields] if root else []
    return f"{key} is a field of {', '.join(homes)}" if homes else ""


def _hint(error: ValidationError, schema: Json) -> str:
    value = error.instance
    if not isinstance(value, str):
        return ""
    if options := list(_options(schema)):
        return near(value, options)
    types = [s.get("type") for s in (schema, *schema.get("anyOf", ()))]
    if "boolean" in types and value.lower() in ("yes", "on", "y", "no", "off", "n"):
        return "true" if value.lower() in ("yes", "on", "y") else "false"
    if error.validator == "type" and ("integer" in types or "number" in types):
        plain = value.replace("_", "").replace(",", ".")
        try:
            return f"{float(plain):g}"
        except ValueError:
            return ""
    return ""


def _options(schema: Json) -> Iterable[str]:
    for part in (schema, *schema.get("anyOf", ())):
        yield from (str(v) for v in part.get("enum", ()))


WORDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null", "array": "a list", "string": "text"}


def in_words(schema: Json) -> str:
    """What a schema accepts, in words."""
    if "anyOf" in schema:
        return ", or ".join(in_words(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        values = [shown(v) for v in schema["enum"]]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if "const" in schema:
        return shown(schema["const"])
    kind = schema.get("type", "")
    if kind == "object":
        fields = [f for f in schema.get("properties", {}) if f != "kind"]
        if "allOf" in schema:
            return "{kind: ...}"
        return f"a mapping with {', '.join(fields)}" if fields else "a mapping"
    return " ".join(filter(None, (WORDS.get(kind, "a value"), _range(schema))))


def _range(schema: Json) -> str:
    """The bounds of a schema in words."""
    low, high = schema.get("minimum"), schema.get("maximum")
    parts = []
    if low is not None and high is not None:
        parts.append(f"from {low:g} to {high:g}")
    else:
        parts += [f">= {low:g}"] if low is not None else []
    for key, word in (("exclusiveMinimum", ">"), ("exclusiveMaximum", "<")):
        parts += [f"{word} {schema[key]:g}"] if key in schema else []
    if high is not None and low is None:
        parts.append(f"<= {high:g}")
    unit = "entries" if schema.get("type") == "array" else "characters"
    least, most = schema.get("minLength", schema.get("minItems")), schema.get("maxLength", schema.get("maxItems"))
    if least is not None or most is not None:
        parts.append(f"of {least or 0} to {most} {unit}" if most is not None else f"of at least {least} {unit}")
    if "pattern" in schema:
        parts.append(f"of {schema.get('description') or schema['pattern']}")
    return " ".join(parts)


if __name__ == "__main__":
    SCHEMA_FILE.write_text(text(), encoding="utf-8")
