"""Families of components: one class is one YAML kind, found by its `kind`, and nothing else has to be edited.

A family root (AttentionalBias, MemoryNet, ..) subclasses `Component`; a member subclasses its root and sets `kind`. Members are
frozen pydantic models whose fields are the YAML fields; the equation is a method in pure torch, for one token, without batch or heads.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, SerializationInfo, SerializerFunctionWrapHandler, model_serializer
from pydantic_core import core_schema

from .errors import SpecError, near

FAMILIES: dict[str, type[Component]] = {}  # family name -> root, in order of definition


KIND = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def _written_anew(cls: type, known: type) -> bool:
    """Whether a class is `known` once more: run again in a notebook, reloaded, or a script's own file imported."""
    one, other = (getattr(sys.modules.get(c.__module__), "__file__", None) for c in (cls, known))
    return cls.__qualname__ == known.__qualname__ and (cls.__module__ == known.__module__ or (one is not None and one == other))


class Component(BaseModel):
    """Root of all families.

    Class attributes:
        family: the spec field a root stands for; set on roots only.
        kind: the YAML name of a member.
        gates: field name -> `Role`, for fields that hold a gate.
        examples: field values the conformance tests try.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, strict=False)

    family: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    gates: ClassVar[Mapping[str, Any]] = {}
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    members: ClassVar[dict[str, type[Component]]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.is_root():
            cls.members = {}
            FAMILIES[cls.family] = cls
        elif "kind" in cls.__dict__:
            if not isinstance(cls.kind, str) or not KIND.fullmatch(cls.kind):
                raise SpecError(f"kind = {cls.kind!r} in {cls.__qualname__}", "a word of letters, digits and _", "", "kind")
            known = cls.members.get(cls.kind)
            if known is not None and not _written_anew(cls, known):
                raise SpecError(
                    f"a second {cls.family} called {cls.kind!r} ({cls.__module__}.{cls.__qualname__})",
                    f"a name not yet taken by {known.__module__}.{known.__qualname__}",
                    "choose another `kind`",
                )
            cls.members[cls.kind] = cls

    @classmethod
    def is_root(cls) -> bool:
        return bool(cls.__dict__.get("family"))

    @classmethod
    def parse(cls, value: Any) -> Component:
        """A member from an instance, a bare kind, a number (for families that take one) or a mapping with `kind`."""
        if isinstance(value, cls):
            return value
        fields = cls.expand(value)
        if not isinstance(fields, Mapping) or "kind" not in fields:
            raise SpecError(f"{value!r}", f"a kind of {cls.family} ({', '.join(cls.members)})", "write {kind: ...}", cls.family)
        kind = fields["kind"]
        member = cls.members.get(kind) if isinstance(kind, str) else None
        if member is None:
            raise SpecError(f"{kind!r}", f"a kind of {cls.family}: {', '.join(cls.members)}", near(kind, cls.members), cls.family)
        return member.model_validate({k: v for k, v in fields.items() if k != "kind"})

    @classmethod
    def expand(cls, value: Any) -> Any:
        """The long form of a shorthand: a bare kind becomes {kind: ...}. Families with further shorthands extend this."""
        return {"kind": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        if not cls.is_root():
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.model_dump())
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # a field that holds a component is filled in by `schema`, from the registry and the field's role
        return {"title": cls.family} if cls.is_root() else handler(core)

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler, _: SerializationInfo) -> dict[str, Any]:
        return {"kind": self.kind, **handler(self)}

    def shorthand(self) -> Any:
        """The shortest YAML that means this: the bare kind when every field is at its default."""
        fields = {k: v for k, v in self.model_dump(exclude_defaults=True).items() if k != "kind"}
        return {"kind": self.kind, **fields} if fields else self.kind

    def roles(self) -> dict[str, tuple[Any, Any]]:
        """Gate role name -> (Role, gate component) for every field that holds a gate."""
        return {role.name: (role, getattr(self, field)) for field, role in self.gates.items()}

    def equation(self) -> str:
        """This member's part of the equation, in ASCII, with its own fields; the kind's name where a member does not say."""
        return self.kind

    def term(self, field: str) -> str:
        """The factor that a gate field stands for in `equation`, with a space behind it: `step_size_t `, `0.5 ` or nothing for 1."""
        return getattr(self, field).term(self.gates[field].name)
