"""Between YAML and `LayerSpec`: presets, files, `extends`, overrides, validation with places, and the way back.

    source -> Document (document) -> extends -> overrides -> schema problems -> components -> LayerSpec

How parts combine:

- `extends`: the file's own sections go over the base's, field by field. A component written with its kind (bare, or {kind: ...})
  replaces the base's; one written without a kind keeps the base's kind. Lists are replaced. `name` and `source` are inherited too.
- Overrides: `{"window": {...}}` replaces the whole section; `{"window.size": 1}` sets one field, and a bare kind or an absent section is
  written out first. `{"memory.kind": ...}` keeps the fields that the new kind has as well and drops the others. The order in which
  overrides are given does not count: whole sections first, then kinds, then fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from . import schema
from .component import Component
from .document import PRESETS, Document, KeyPath, dotted, parse_text, presets, read_file, shown
from .errors import SpecError, near
from .layer import LayerSpec, Section
from .python_data import from_python

MAX_EXTENDS = 8
__all__ = ["dump_yaml", "load_spec", "load_text", "presets"]

Source = str | os.PathLike[str] | Mapping[str, Any] | LayerSpec


def load_spec(source: Source, overrides: Mapping[str, object] | None = None) -> LayerSpec:
    """A checked spec.

    Args:
        source: a preset's name; a path (a string that ends with .yaml or .yml, or a pathlib.Path); a mapping; or a LayerSpec.
        overrides: dotted path -> value, such as {"window.size": 1, "memory": "linear", "bias": {"kind": "huber", "delta": 0.1}}.

    Raises:
        SpecError: every mistake found, each with file:line:column, or with its dotted path where it came from Python.
    """
    return build(open_document(source), overrides)


def load_text(text: str, name: str = "<text>", overrides: Mapping[str, object] | None = None) -> LayerSpec:
    """A checked spec from YAML text; `name` stands for the file in messages. `extends` is relative to the current directory."""
    return build(_extended(parse_text(text, name), Path(), (name,)), overrides)


def build(document: Document, overrides: Mapping[str, object] | None = None) -> LayerSpec:
    """Overrides, then validation."""
    if overrides:
        override(document, overrides)
    mistakes = schema.problems(document)
    broken = {path[0] for path, _ in mistakes if path}
    found = [problem for _, problem in mistakes]
    for name, root in _families():
        if name in document.data and name not in broken:
            try:
                root.parse(document.data[name])
            except (SpecError, ValidationError) as error:
                found += _placed(error, document, (name,))
    if not found:
        try:
            return LayerSpec.model_validate(document.data)
        except (SpecError, ValidationError) as error:
            found = _placed(error, document, ())
    raise SpecError.several(sorted(found, key=lambda problem: _position(problem.where))) from None


def _families() -> Iterator[tuple[str, type[Component]]]:
    for name, info in LayerSpec.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Component):
            yield name, info.annotation


def _placed(error: SpecError | ValidationError, document: Document, section: KeyPath) -> list[SpecError]:
    """Errors of validators, moved from their spec path to file:line:column; those without a path are put at `section`."""
    if isinstance(error, ValidationError):
        out: list[SpecError] = []
        for item in error.errors(include_url=False):
            path = section + tuple(item["loc"])
            inner = item.get("ctx", {}).get("error")
            message = str(inner) if inner is not None else item["msg"]
            name = f"{path[-1]}: " if path else ""
            out.append(SpecError(f"{name}{shown(item['input'])}", message[:300], "", document.where(path)))
        return out
    out = []
    for problem in error.problems:
        path = _path(problem.where)
        if not path or path[0] not in LayerSpec.model_fields or (section and path[0] != section[0]):
            path = section
        out.append(SpecError(problem.got, problem.expected, problem.hint, document.where(path)))
    return out


def _path(where: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in where.split(".")) if where else ()


def _position(where: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"(.*):(\d+):(\d+)", where)
    return (match[1], int(match[2]), int(match[3])) if match else ("", 0, 0)


# Sources


def open_document(source: Source) -> Document:
    """The data of `source` with `extends` resolved, not yet validated."""
    if isinstance(source, LayerSpec):
        return _python(source.model_dump())
    if isinstance(source, Mapping):
        return _extended(_python(source), Path(), ())
    if not isinstance(source, str | os.PathLike):
        raise SpecError(f"a value of type {type(source).__name__}", "a preset name, a path, a mapping or a LayerSpec", "", "source")
    return _named(source, Path(), (), "source")


def _python(source: Mapping[str, Any]) -> Document:
    data = from_python(source)
    return Document(data)


def _named(source: str | os.PathLike[str], folder: Path, chain: tuple[str, ...], where: str) -> Document:
    """The document of a preset or of a file; files are relative to `folder`."""
    path = Path(os.fspath(source)) if isinstance(source, os.PathLike) else None
    if isinstance(source, str):
        if source.lower().endswith((".yaml", ".yml")):
            path = Path(source)
        elif source in presets():
            path = PRESETS / f"{source}.yaml"
        else:
            raise SpecError(f"no preset {shown(source)}", f"a preset ({', '.join(presets())}) or a file .yaml", _name_hint(source), where)
    assert path is not None
    name = str(path if path.parent == PRESETS else folder / path)
    identity = os.path.realpath(name) if "\0" not in name else name
    if identity in chain:
        names = " -> ".join(Path(c).name for c in (*chain[chain.index(identity) :], identity))
        raise SpecError(f"a circle of extends: {names}", "a base that does not lead back here", "", where)
    if len(chain) > MAX_EXTENDS:
        raise SpecError(f"extends more than {MAX_EXTENDS} files deep", f"at most {MAX_EXTENDS}", "", where)
    try:
        text = read_file(Path(name))
    except SpecError as error:
        raise (error.at(where) if chain else error) from None
    return _extended(parse_text(text, name), Path(name).parent, (*chain, identity))


def _name_hint(source: str) -> str:
    if "\n" in source or ": " in source:
        return "this looks like YAML text: save it as a file, or pass a mapping"
    if "/" in source or "\\" in source or ".." in source:
        return "a name has no slashes and no dots; a path to a file ends with .yaml, or is a pathlib.Path"
    return near(source, presets())


def _extended(document: Document, folder: Path, chain: tuple[str, ...]) -> Document:
    """`document` over the base that its `extends` names."""
    if "extends" not in document.data:
        return document
    base, where = document.data["extends"], document.where(("extends",))
    if not isinstance(base, str):
        raise SpecError(f"extends: {shown(base)}", "a preset name or a file .yaml", "", where)
    below = _named(base, folder, chain or ("",), where)
    del document.data["extends"]
    _merge(below, document, ())
    if () in document.values:
        below.values[()] = document.values[()]
    return below


# Putting documents together


def _merge(base: Document, over: Document, path: KeyPath) -> None:
    """Lay the section of `over` at `path` over that of `base`, field by field."""
    for key, value in _get(over.data, path).items():
        inner = (*path, key)
        if isinstance(value, dict) and "kind" not in value and _slot(base.data, inner) is not None:
            _expand(base, inner)
            if isinstance(_get(base.data, inner), dict):
                _merge(base, over, inner)
                if over.values:
                    base.values[inner] = over.where(inner)
                continue
        _put(base, inner, value)
        base.move(inner, over, inner)
        if not over.values:  # from Python
            base.python.add(inner)


def override(document: Document, overrides: Mapping[str, object]) -> None:
    """Set dotted paths in `document`. Raises SpecError for paths that lead nowhere; the values are checked later, with the rest."""
    if not isinstance(overrides, Mapping):
        raise SpecError(f"overrides of type {type(overrides).__name__}", "a mapping of dotted paths", '{"window.size": 1}', "overrides")
    plain = from_python(overrides)
    paths = sorted(((tuple(name.split(".")), value) for name, value in plain.items()), key=lambda p: (len(p[0]), p[0][-1] != "kind"))
    for path, value in paths:
        _override(document, path, value)


def _override(document: Document, path: tuple[str, ...], value: Any) -> None:
    where = dotted(path)
    if path[0] not in LayerSpec.model_fields:
        raise SpecError(where, f"a path that starts with {', '.join(LayerSpec.model_fields)}", near(path[0], LayerSpec.model_fields), where)
    for end in range(1, len(path)):
        _expand(document, path[:end])
        section = _get(document.data, path[:end])
        if not isinstance(section, dict):
            raise SpecError(where, "a path into a section", f"{dotted(path[:end])} has no fields", where)
    section = path[:-1]
    old = _get(document.data, section)
    family = _family(_slot(document.data, section)) if path[-1] == "kind" else None
    if family is not None and isinstance(value, str) and value in family.members and isinstance(old, dict):
        for name in [n for n in old if n not in family.members[value].model_fields]:
            del old[name]
    _put(document, path, value)
    document.forget(path)
    document.python.add(path)


def _get(data: Any, path: KeyPath) -> Any:
    """The value at `path`, or None."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _put(document: Document, path: KeyPath, value: Any) -> None:
    _get(document.data, path[:-1])[path[-1]] = value


def _family(slot: FieldInfo | None) -> type[Component] | None:
    """The root of the family a field holds, or None."""
    kind = slot.annotation if slot is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, Component) and kind.is_root() else None


def _slot(data: Mapping[str, Any], path: KeyPath) -> FieldInfo | None:
    """The field that stands at `path`, if it is a section or holds a component."""
    model: type[BaseModel] | None = LayerSpec
    info: FieldInfo | None = None
    for end, key in enumerate(path, 1):
        info = model.model_fields.get(str(key)) if model is not None else None
        if info is None:
            return None
        family = _family(info)
        if family is not None:
            written = family.expand(_get(data, path[:end])) if _get(data, path[:end]) is not None else info.default.model_dump()
            kind = written.get("kind") if isinstance(written, Mapping) else None
            model = family.members.get(kind) if isinstance(kind, str) else None
        elif isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            model = info.annotation
        else:
            return None
    return info


def _expand(document: Document, path: KeyPath) -> None:
    """Write the section at `path` in its long form: a bare kind as {kind: ...}, an absent one as its default.

    A mapping is replaced by a copy: aliases may have put it in other places too.
    """
    slot = _slot(document.data, path)
    if slot is None:
        return
    value, family = _get(document.data, path), _family(slot)
    if value is None:
        default = slot.default
        value = from_python(default.model_dump()) if family is not None and isinstance(default, Component) else {}
    elif family is not None:
        value = family.expand(value)
    if isinstance(value, Mapping):
        _put(document, path, dict(value))


# The way back


def dump_yaml(spec: LayerSpec, minimal: bool = True) -> str:
    """YAML that loads to an equal spec; `minimal` leaves out every field at its default and writes bare kinds."""
    return "".join(f"{name}: {text}\n" for name, text in _lines(spec, minimal))


def _lines(spec: LayerSpec, minimal: bool) -> Iterator[tuple[str, str]]:
    for name, info in type(spec).model_fields.items():
        value = getattr(spec, name)
        if not minimal or name == "name" or value != info.default:
            yield name, _block(value) if isinstance(value, str) else _flow(_plain(value, minimal))


def _plain(value: Any, minimal: bool) -> Any:
    """The shortest (or the full) plain data of a section, component or value."""
    if not isinstance(value, BaseModel):
        return value
    out: dict[str, Any] = {"kind": value.kind} if isinstance(value, Component) else {}
    for name, info in type(value).model_fields.items():
        field = getattr(value, name)
        if not minimal or info.is_required() or field != info.get_default(call_default_factory=True):
            out[name] = _plain(field, minimal)
    if isinstance(value, Component):
        short = value.shorthand()
        return short if isinstance(short, int | float) else value.kind if list(out) == ["kind"] else out
    return out


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_word(str(k))}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(v) for v in value) + "]"
    if isinstance(value, str):
        return _word(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else repr(value)


RESERVED = re.compile(r"(?i:true|false|null|yes|no|on|off|y|n)\Z")


def _word(text: str) -> str:
    """A string in a flow: plain where nothing can misread it."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", text) and not RESERVED.match(text):
        return text
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'


def _block(text: str) -> str:
    """A string at the top level: a literal block where it has several plain lines."""
    lines = text.split("\n")
    fits = len(lines) > 1 and all(line.isprintable() and line == line.strip() and line for line in lines)
    return "|-\n" + "\n".join(f"  {line}" for line in lines) if fits else _word(text)
