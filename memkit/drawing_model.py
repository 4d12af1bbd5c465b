"""A drawing before graphviz: boxes, arrows between them, clusters of boxes. The views make one; `drawing_dot`, `drawing_files` show it."""

from __future__ import annotations

from dataclasses import dataclass, field

# Box kind -> (fill, border). One warm hue for what is learned inside a sequence, one cool hue for what training learns.
BOXES = {
    "given": ("#f4f4f1", "#8a8a84"),
    "inner": ("#fbeee4", "#b5541c"),
    "outer": ("#e8f0f9", "#2f6fb3"),
    "step": ("#ffffff", "#55554f"),
    "fused": ("#f3eef8", "#74539c"),
    "result": ("#f4f4f1", "#2b2b28"),
    "again": ("#ffffff", "#b9b9b3"),
}
# Arrow kind -> (colour, style); a value's arrow has a second line, the outer gradient that comes back along it.
VALUE, INNER, OUTER = "#6b6b66", "#b5541c", "#2f6fb3"
ARROWS = {
    "value": (f"{VALUE}:{OUTER}", "solid"),
    "inner": (f"{INNER}:{OUTER}", "dashed"),
    "data": (VALUE, "solid"),
    "hold": (VALUE, "dotted"),
    "idle": ("#b9b9b3", "dotted"),
}
INK, FAINT = "#2b2b28", "#6b6b66"
MEANINGS = {
    "given": "given",
    "inner": "inner: lives in the state",
    "outer": "outer: learned by training",
    "step": "computed",
    "fused": "masked_product: one pass, scores not stored",
    "again": "the box of that name, once more",
    "value": "value",
    "data": "value, labelled with its axes",
    "inner_path": "inner gradient, part of the forward pass",
    "outer_path": "outer gradient, comes back in training",
    "hold": "kept from the chunk's start",
    "idle": "does not reach the gradient",
}


@dataclass(frozen=True)
class Box:
    """One node. `title` is its first line, `lines` are smaller ones, `cells` are drawn as a row of compartments, the last marked."""

    name: str
    title: str
    lines: tuple[str, ...] = ()
    kind: str = "step"
    cluster: str = ""
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrow:
    """An edge. `free` does not pull its ends into an order; a higher `weight` makes it short and straight."""

    tail: str
    head: str
    kind: str = "value"
    label: str = ""
    free: bool = False
    weight: int = 1


@dataclass(frozen=True)
class Cluster:
    name: str
    title: str
    kind: str = "step"
    parent: str = ""


@dataclass
class Picture:
    """A whole drawing. `notes` go under the drawing, above its legend."""

    title: str
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    legend: tuple[str, ...] = ()
    stacked: list[tuple[set[str], set[str]]] = field(default_factory=list)  # boxes that go above others
    tight: bool = False  # many boxes: smaller gaps

    def box(self, name: str, title: str, *lines: str, kind: str = "step", cluster: str = "", cells: tuple[str, ...] = ()) -> str:
        self.boxes.append(Box(name, title, lines, kind, cluster, cells))
        return name

    def arrow(self, tail: str, head: str, kind: str = "value", label: str = "", free: bool = False, weight: int = 1) -> None:
        self.arrows.append(Arrow(tail, head, kind, label, free, weight))
