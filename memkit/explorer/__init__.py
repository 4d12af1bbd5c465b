"""The explorer: one page, without a network, that shows what memkit says of every preset and of every spec one knob away from one."""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from memkit.drawing_dot import need
from memkit.specs.io import load_spec, presets

from .build import Builder

HERE = Path(__file__).parent


def explorer(source: Any = "atlas", only: Iterable[str] | None = None, *, progress: bool = True) -> str:
    """The page, as HTML text; it opens at `source`.

    Args:
        source: a preset's name, a path, a dict or a LayerSpec; one that is no preset is shown beside the presets.
        only: names of the presets to show; all unless given.
        progress: show how far it is, on stderr.

    Raises:
        SpecError: for a source or preset that cannot be read. KernelError: where no program here can draw.
    """
    need("svg")
    start = load_spec(source)
    names = tuple(only) if only is not None else presets()
    specs = [load_spec(name) for name in names]
    first = next((i for i, spec in enumerate(specs) if spec == start), None)
    if first is None:
        first, specs = 0, [start, *specs]
    data = Builder(names).build(specs, progress=progress)
    data["start"] = first
    return page(data)


def page(data: dict[str, Any]) -> str:
    """Template, styles, script and data in one text."""
    packed = base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode()
    parts = {name: (HERE / f"{name}.{ending}").read_text(encoding="utf-8") for name, ending in PARTS.items()}
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(parts, data=packed, version=html.escape(data["version"]))


PARTS = {"theme": "css", "style": "css", "script": "js"}
