"""A Picture as graphviz: the `Drawing` that `memkit.visualize` returns, and the programs that can turn it into a file."""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import graphviz

from memkit.specs.errors import KernelError

from .drawing_model import ARROWS, BOXES, FAINT, INK, INNER, MEANINGS, OUTER, VALUE, Box, Cluster, Picture
from .drawing_text import label_html, wrapped

FONT = "Helvetica"
TITLE, LINE, SMALL = 11, 9, 8
BOLD = ("given", "inner", "outer", "result")
WIDTH = 40  # characters of a box's line
PURE = "graphviz-pure"
PURE_FORMATS = ("svg", "png")
BINARY = "dot"


class Drawing(graphviz.Digraph):
    """A graphviz.Digraph that also draws where the program `dot` is missing and graphviz-pure is there (svg and png)."""

    picture: Picture

    def pipe(
        self,
        format: str | None = None,
        renderer: Any = None,
        formatter: Any = None,
        neato_no_op: Any = None,
        quiet: bool = False,
        *,
        engine: str | None = None,
        encoding: str | None = None,
    ) -> Any:
        """As graphviz.Digraph.pipe. Raises KernelError where nothing here can write the format."""
        kind = format or self.format
        if program(kind) != PURE or renderer or formatter or engine not in (None, "dot"):
            need(kind)
            return super().pipe(format, renderer, formatter, neato_no_op, quiet, engine=engine, encoding=encoding)
        data = draw(self.source, kind)
        return data if encoding is None else data.decode(encoding)

    def render(
        self,
        filename: Any = None,
        directory: Any = None,
        view: bool = False,
        cleanup: bool = False,
        format: str | None = None,
        renderer: Any = None,
        formatter: Any = None,
        neato_no_op: Any = None,
        quiet: bool = False,
        quiet_view: bool = False,
        *,
        outfile: Any = None,
        **rest: Any,
    ) -> str:
        """As graphviz.Digraph.render. Raises KernelError where nothing here can write the format."""
        kind = format or (Path(outfile).suffix[1:] if outfile else self.format)
        if program(kind) != PURE:
            need(kind)
            return super().render(
                filename, directory, view, cleanup, format, renderer, formatter, neato_no_op, quiet, quiet_view, outfile=outfile, **rest
            )
        source = Path(directory or str(self.directory or "")) / (filename or str(self.filename or "drawing.gv"))
        path = Path(outfile) if outfile else Path(f"{source}.{kind}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw(self.source, kind))
        if not cleanup and not outfile:
            source.write_text(self.source, encoding="utf-8")
        return str(path)

    def _repr_mimebundle_(self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None, **_: Any) -> dict[str, Any]:
        """SVG for a notebook; the text of the graph where nothing can draw it."""
        if program("svg") is None:
            return {"text/plain": self.source}
        return {"image/svg+xml": self.pipe("svg", encoding="utf-8")}


def program(kind: str) -> str | None:
    """`dot`, or `graphviz-pure` for what it can write, or None."""
    if shutil.which(BINARY):
        return BINARY
    return PURE if kind in PURE_FORMATS and pure() else None


def pure() -> str | None:
    """The path of graphviz-pure: on the PATH, or beside the Python that runs."""
    return shutil.which(PURE) or shutil.which(PURE, path=os.path.dirname(sys.executable))


def need(kind: str) -> None:
    """Raise where nothing here can write `kind`."""
    if program(kind) is None:
        extra = f" (or, for svg and png: pip install {PURE})" if kind in PURE_FORMATS else ""
        raise KernelError(
            f"no Graphviz program `dot`, which {kind} needs",
            f"Graphviz on the PATH{extra}",
            "apt install graphviz | brew install graphviz; a file .dot, or .html of one view (--view rule), needs neither",
            "graph",
        )


def draw(source: str, kind: str) -> bytes:
    """The drawing of `source`, by whichever program is here. Raises KernelError where there is none, or where it fails."""
    need(kind)
    command = [BINARY] if program(kind) == BINARY else [str(pure())]
    options = ["-Gdpi=200"] if kind == "png" else []
    done = subprocess.run([*command, f"-T{kind}", *options], input=source.encode(), capture_output=True)
    if done.returncode or not done.stdout:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise KernelError(f"{command[0]} failed: {reason[-1]}", "a drawing", "format dot writes the text of the graph", "graph")
    return done.stdout


GRAPH = {"rankdir": "TB", "fontname": FONT, "fontsize": str(SMALL), "fontcolor": INK, "pad": "0.08", "labelloc": "b", "newrank": "true"}
NODE = {"shape": "box", "style": "rounded,filled", "fontname": FONT, "fontsize": str(TITLE), "fontcolor": INK, "penwidth": "1"}
ROOM = {"margin": "0.11,0.06", "height": "0.3", "width": "0.3"}
EDGE = {"fontname": FONT, "fontsize": str(SMALL - 1), "fontcolor": FAINT, "arrowsize": "0.6", "penwidth": "1"}


def drawing(picture: Picture) -> Drawing:
    """The graphviz form. The same picture gives the same text."""
    nodesep, ranksep = ("0.16", "0.3") if picture.tight else ("0.28", "0.34")
    own = {"nodesep": nodesep, "ranksep": ranksep, "label": f"<{_legend(picture)}>", "splines": "true", "bgcolor": "white"}
    graph = Drawing(comment=picture.title, graph_attr=GRAPH | own, node_attr=NODE | ROOM, edge_attr=EDGE)
    graph.picture = picture
    _boxes(graph, picture, "")
    for i, (above, below) in enumerate(picture.stacked):
        hub = f"between{i}"
        graph.node(hub, shape="point", style="invis", width="0.01", height="0.01", label="")
        for tail, head in [*((name, hub) for name in sorted(above)), *((hub, name) for name in sorted(below))]:
            graph.edge(tail, head, style="invis", weight="0")
    for arrow in picture.arrows:
        colour, style = ARROWS[arrow.kind]
        more = {"dir": "both", "arrowtail": "vee"} if ":" in colour else {}
        if arrow.weight != 1:
            more |= {"weight": str(arrow.weight)}
        if arrow.kind in ("hold", "idle"):
            more |= {"arrowhead": "onormal"}
        if arrow.free:
            more |= {"constraint": "false"}
        label = {"label": f"<&#160;{label_html(arrow.label, SMALL - 1)}&#160;>"} if arrow.label else {}
        graph.edge(arrow.tail, arrow.head, color=colour, style=style, **more, **label)
    return graph


def _boxes(graph: Any, picture: Picture, cluster: str) -> None:
    for box in picture.boxes:
        if box.cluster == cluster:
            fill, border = BOXES[box.kind]
            graph.node(box.name, label=f"<{_label(box)}>", fillcolor=fill, color=border)
    for inner in picture.clusters:
        if inner.parent == cluster:
            with graph.subgraph(name=f"cluster_{inner.name}") as sub:
                sub.attr(**_cluster(inner))
                _boxes(sub, picture, inner.name)


def _cluster(cluster: Cluster) -> dict[str, str]:
    fill, border = BOXES[cluster.kind]
    title = '<BR ALIGN="LEFT"/>'.join(label_html(line, LINE) for line in wrapped(cluster.title, 60))
    return {
        "label": f"<{title}>" if cluster.title else "",
        "labelloc": "t",
        "labeljust": "l",
        "fontname": FONT,
        "fontsize": str(LINE),
        "fontcolor": border,
        "style": "rounded,filled",
        "fillcolor": "#fdfdfc" if cluster.kind == "step" else fill,
        "color": border,
        "penwidth": "0.8",
        "margin": "9",
    }


GAP = '<FONT POINT-SIZE="3">&#160;</FONT>'


def _label(box: Box) -> str:
    lines = [label_html(line, TITLE) for line in wrapped(box.title, WIDTH + 6) if line]
    if box.kind in BOLD:
        lines = [f"<B>{line}</B>" for line in lines]
    if not box.cells:  # room for subscripts below each line of the title
        lines = [part for line in lines for part in (line, GAP)][: None if box.lines else -1]
    for text in box.lines:
        lines += [f'<FONT POINT-SIZE="{LINE}" COLOR="{FAINT}">{label_html(line, LINE)}</FONT>' for line in wrapped(text, WIDTH)]
    if not box.cells:
        return "<BR/>".join(lines)
    fill, border = BOXES[box.kind]
    cells = "".join(
        f'<TD BORDER="1" COLOR="{border}" BGCOLOR="{"#ffffff" if i < len(box.cells) - 1 else "#dededa"}">'
        f'<FONT POINT-SIZE="{LINE}">{label_html(cell, LINE)}</FONT></TD>'
        for i, cell in enumerate(box.cells)
    )
    rows = [f'<TR><TD COLSPAN="{len(box.cells)}">{line}</TD></TR>' for line in lines]
    rows.insert(1, f"<TR>{cells}</TR>")
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3">{"".join(rows)}</TABLE>'


def _legend(picture: Picture) -> str:
    """The title, notes and keys of what the drawing uses, as one table under it."""
    keys = [f'<TD>{_swatch(key)}</TD><TD ALIGN="LEFT">{html.escape(MEANINGS[key])}&#160;&#160;&#160;</TD>' for key in picture.legend]
    columns = 3 if len(keys) > 4 else 2
    rows = [f'<TR><TD COLSPAN="{2 * columns}">{label_html(picture.title, SMALL)}</TD></TR>']
    rows += [
        f'<TR><TD COLSPAN="{2 * columns}">{label_html(line, SMALL)}</TD></TR>' for note in picture.notes for line in wrapped(note, 120)
    ]
    rows += [f"<TR>{''.join(keys[i : i + columns])}</TR>" for i in range(0, len(keys), columns)]
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="1" CELLPADDING="2">{"".join(rows)}</TABLE>'


def _swatch(key: str) -> str:
    """A small coloured box, or a piece of line, whole or broken."""
    if key in BOXES:
        fill, border = BOXES[key]
        cells = f'<TD BORDER="1" COLOR="{border}" BGCOLOR="{fill}" WIDTH="18" HEIGHT="9" FIXEDSIZE="TRUE"></TD>'
    else:
        colour = {"inner_path": INNER, "outer_path": OUTER, "idle": ARROWS["idle"][0]}.get(key, VALUE)
        pattern = {"inner_path": (5, 3, 5, 3, 5), "hold": (2, 3, 2, 3, 2, 3, 2), "idle": (2, 3, 2, 3, 2, 3, 2)}.get(key, (21,))
        cells = "".join(
            f'<TD WIDTH="{width}" HEIGHT="2" FIXEDSIZE="TRUE"{"" if i % 2 else f" BGCOLOR={chr(34)}{colour}{chr(34)}"}></TD>'
            for i, width in enumerate(pattern)
        )
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0"><TR>{cells}</TR></TABLE>'
