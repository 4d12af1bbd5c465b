"""`memkit new`: a spec with every field written out, each section under a comment that says what it is and which kinds it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from memkit.specs.component import FAMILIES, Component
from memkit.specs.errors import SpecError
from memkit.specs.io import dump_yaml
from memkit.specs.layer import LayerSpec
from memkit.specs.schema import SCHEMA_FILE

NAME = r"[A-Za-z][A-Za-z0-9_-]{0,63}"


def scaffold(spec: LayerSpec, name: str | None) -> str:
    """Commented YAML that loads to `spec` under another name."""
    renamed = spec.model_copy(update={"name": name or "custom", "source": f"started from {spec.name}"})
    lines = [f"# yaml-language-server: $schema={SCHEMA_FILE.as_uri()}", "# Gates are input (projected from x_t), learned or a number.",
             "# `memkit list --kinds` shows the fields of every kind, with ranges and defaults."]
    for section, text in _sections(dump_yaml(renamed, minimal=False)):
        lines += ["", *(f"# {line}" for line in _comment(section)), *text]
    return "\n".join(lines) + "\n"


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """(field, its lines) of a dumped spec."""
    for block in re.split(r"^(?=[a-z_]+: )", text, flags=re.MULTILINE):
        if block:
            yield block.partition(":")[0], block.rstrip("\n").split("\n")


def _comment(section: str) -> Iterator[str]:
    info = LayerSpec.model_fields[section]
    description = str(info.description or "")
    yield description[:1].upper() + description[1:]
    kind = info.annotation
    if isinstance(kind, type) and issubclass(kind, Component):
        for member in FAMILIES[kind.family].members.values():
            yield f"  {member.kind:<12} {(member.__doc__ or '').strip().partition(chr(10))[0]}".rstrip()


def write(spec: LayerSpec, path: Path, force: bool) -> None:
    """Write the scaffold to `path`, named after the file.

    Raises:
        SpecError: for a file that exists (unless `force`), or that cannot be written.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise SpecError(str(path), "a file that ends with .yaml", f"{path}.yaml", "FILE")
    name = re.sub(r"[^A-Za-z0-9_-]", "_", path.stem)[:64]
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(scaffold(spec, name if re.fullmatch(NAME, name) else None))
    except FileExistsError:
        raise SpecError(f"{path} exists", "a new file", "--force", "FILE") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{str(path)!r} cannot be written: {getattr(error, 'strerror', None) or error}", "", "", "FILE") from None
