"""A large drawing made readable: long arrows become second boxes, and what comes before, in and after a loop goes below each other."""

from __future__ import annotations

from dataclasses import replace

from .drawing_model import Arrow, Box, Picture

MANY_USES = 3  # from which on a value is named and drawn again where it is used


def untangled(picture: Picture) -> Picture:
    """The same drawing with a small second box at the far uses of a value that is used in many places, instead of a long arrow."""
    home = {box.name: box for box in picture.boxes}
    uses: dict[str, list[Arrow]] = {}
    for arrow in picture.arrows:
        uses.setdefault(arrow.tail, []).append(arrow)
    boxes, arrows, marks = {box.name: box for box in picture.boxes}, [], 0
    for tail, out in uses.items():
        near_ones = [a for a in out if home[a.head].cluster == home[tail].cluster]
        kept = out if len(out) < MANY_USES else near_ones[:1]
        arrows += kept
        if len(kept) == len(out):
            continue
        name = home[tail].title.partition(" = ")[0] if " = " in home[tail].title or home[tail].kind != "step" else ""
        if not name:
            marks += 1
            name = f"x{marks}"
            boxes[tail] = replace(home[tail], title=f"{name} = {home[tail].title}")
        for arrow in out:
            if arrow not in kept:
                again = Box(f"again_{tail}_{arrow.head}_{len(boxes)}", name, kind="again", cluster=home[arrow.head].cluster)
                boxes[again.name] = again
                arrows.append(replace(arrow, tail=again.name))
    picture.boxes, picture.arrows = list(boxes.values()), arrows
    return picture


def stacked(picture: Picture) -> Picture:
    """The same drawing with inputs of a loop drawn in it, and with everything outside a loop above it or below it."""
    parents = {c.name: (c.parent if c.kind == "fused" else c.name) for c in picture.clusters}
    home = {box.name: parents.get(box.cluster, "") for box in picture.boxes}
    heads = {a.tail: a.head for a in picture.arrows}
    for i, box in enumerate(picture.boxes):
        head = heads.get(box.name)
        if head is not None and box.kind in ("given", "outer", "again"):
            picture.boxes[i] = replace(box, cluster=home[head])
            home[box.name] = home[head]
    loops = {name for name, cluster in home.items() if cluster}
    if not loops:
        return picture
    tails, ends = {a.tail for a in picture.arrows}, {a.head for a in picture.arrows}
    after = _reached(picture, loops) - loops
    before = set(home) - loops - after
    inputs = {a.tail for a in picture.arrows if a.head in after and a.tail in before}
    after |= inputs
    before -= inputs
    first = {name for name in loops if name not in ends}
    picture.stacked.append(({name for name in before if name not in tails}, first))
    last = {a.tail for a in picture.arrows if a.tail in loops and a.head in after} | {name for name in loops if name not in tails}
    picture.stacked.append((last, {name for name in after if name not in ends}))
    return picture


def _reached(picture: Picture, start: set[str]) -> set[str]:
    """Boxes that arrows lead to, a second box counting as the first."""
    users: dict[str, set[str]] = {}
    for arrow in picture.arrows:
        users.setdefault(arrow.tail, set()).add(arrow.head)
    for name in list(users):
        if name.startswith("again_"):
            users.setdefault(name.split("_")[1], set()).add(name)
    seen, stack = set(start), list(start)
    while stack:
        for user in users.get(stack.pop(), ()):
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return seen
