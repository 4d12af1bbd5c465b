"""Drawings as files: svg, png, pdf, dot and html. dot and html need no other program; the explorer, which holds many drawings, does."""

from __future__ import annotations

import html
import json
from pathlib import Path
from string import Template

from memkit.specs.errors import SpecError, near

from .drawing_dot import Drawing, program
from .drawing_model import ARROWS, BOXES, MEANINGS, Picture
from .drawing_text import count

FORMATS = ("svg", "png", "pdf", "dot", "html")
ALIASES = {"gv": "dot", "htm": "html"}
PARTS = Path(__file__).with_name("explorer")


def format_of(path: Path) -> str:
    """The format a file's name asks for. Raises SpecError for others."""
    ending = path.suffix[1:].lower()
    kind = ALIASES.get(ending, ending)
    if kind not in FORMATS:
        raise SpecError(f"{path.name}", "a file ." + ", .".join(FORMATS), near(kind, FORMATS), "--out")
    return kind


def content(drawing: Drawing, kind: str) -> bytes:
    """The bytes of a drawing in a format. Raises KernelError where no program here can make it; dot and html always work."""
    if kind == "dot":
        return drawing.source.encode()
    if kind == "html":
        return page(drawing).encode()
    return drawing.pipe(kind)


def save(path: Path, data: bytes) -> None:
    """Write a file and say so. Raises SpecError where it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}", "a file in a folder that exists", "", "--out") from None
    print(f"{path}: written, {count(len(data), 'B')}")


def page(drawing: Drawing) -> str:
    """One self-contained HTML page: the drawing as svg or, where nothing here can draw, its boxes in rows with arrows drawn by the page."""
    picture = drawing.picture
    body = inline(drawing.pipe("svg", encoding="utf-8")) if program("svg") else rows(picture)
    text = Template((PARTS / "drawing.html").read_text(encoding="utf-8"))
    return text.substitute(title=html.escape(picture.title), theme=(PARTS / "theme.css").read_text(encoding="utf-8"), body=body)


def inline(svg: str) -> str:
    """An svg to be put inside a page: without prolog and fixed size, as wide as it needs to be or as there is room for."""
    svg = svg[svg.index("<svg") :]
    head, _, rest = svg.partition(">")
    width = head.partition('width="')[2].partition('"')[0]
    box = head.partition('viewBox="')[2].partition('"')[0]
    return f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" viewBox="{box}" style="max-width:{width}">{rest}'


def rows(picture: Picture) -> str:
    """Boxes in rows, each below what it needs; a script draws the arrows between them."""
    depth = _depths(picture)
    lines: dict[int, list[str]] = {}
    for box in picture.boxes:
        fill, border = BOXES[box.kind]
        small = "".join(f"<small>{html.escape(line)}</small>" for line in ((" | ".join(box.cells),) if box.cells else ()) + box.lines)
        style = f"background:{fill};border-color:{border}"
        text = f'<div class="box" id="{html.escape(box.name)}" style="{style}">{html.escape(box.title)}{small}</div>'
        lines.setdefault(depth[box.name], []).append(text)
    body = "".join(f'<div class="row">{"".join(lines[d])}</div>' for d in sorted(lines))
    arrows = [[a.tail, a.head, ARROWS[a.kind][0].partition(":")[0], ARROWS[a.kind][1], a.label] for a in picture.arrows]
    keys = ", ".join(f"{key.replace('_', ' ')}: {MEANINGS[key]}" for key in picture.legend)
    data = json.dumps(arrows).replace("<", "\\u003c")
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in (*picture.notes, keys))
    return f'<div class="rows">{body}<svg class="arrows"></svg></div>{notes}<script type="application/json" id="arrows">{data}</script>'


def _depths(picture: Picture) -> dict[str, int]:
    """The row of each box: one below the lowest of what it needs."""
    needs: dict[str, list[str]] = {box.name: [] for box in picture.boxes}
    for arrow in picture.arrows:
        if not arrow.free:
            needs[arrow.head].append(arrow.tail)
    depth: dict[str, int] = {}
    while len(depth) < len(needs):
        ready = [name for name, tails in needs.items() if name not in depth and all(tail in depth for tail in tails)]
        for name in ready or [next(n for n in needs if n not in depth)]:
            depth[name] = 1 + max((depth[tail] for tail in needs[name] if tail in depth), default=-1)
    return depth
