"""`memkit list --kinds`: every kind and section of a spec with its fields, read from the same JSON Schema that checks a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memkit.specs import schema
from memkit.specs.component import FAMILIES, Component
from memkit.specs.document import shown
from memkit.specs.layer import LayerSpec, Section

Json = Mapping[str, Any]


def rows() -> Iterator[tuple[str, str]]:
    """(kind or section, what it is), each followed by its indented fields: type, range, default and meaning."""
    defs = schema.generate(schema.registry())["$defs"]
    for family, root in FAMILIES.items():
        for kind, member in root.members.items():
            yield f"{family}: {kind}", _first_line(member)
            yield from _fields(_properties(defs, family, member), defs)
    for name, info in LayerSpec.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield name, _first_line(info.annotation)
            yield from _fields(defs[name]["properties"], defs)


def _first_line(model: type) -> str:
    return (model.__doc__ or "").strip().partition("\n")[0]


def _properties(defs: Json, family: str, member: type[Component]) -> Json:
    """A kind's fields. A gate's range is its role's, and the schema has one gate for each role: here it is shown without any."""
    found = defs.get(f"{family}.{member.kind}")
    return found["properties"] if found else member.model_json_schema()["properties"]


def _fields(properties: Json, defs: Json) -> Iterator[tuple[str, str]]:
    for name, field in properties.items():
        if name != "kind":
            yield f"  {name}", _described(field, defs)


def _described(field: Json, defs: Json) -> str:
    reference = field.get("$ref", "").rpartition("/")[2]
    accepted = schema.in_words(defs[reference] if reference else dict(field))
    default = f"default {shown(field['default'])}" if "default" in field else "required"
    meaning = f": {field['description']}" if field.get("description") else ""
    return f"{accepted}, {default}{meaning}"
