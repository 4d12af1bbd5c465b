"""A large drawing made readable: long arrows become second boxes, and what comes before, in and after a loop goes below each other."""

from __future__ import annotations

from dataclasses import replace

from .drawing_model import Arrow, Box, Picture

MANY_USES = 3  # from which on a value is named and drawn again where it is used
INPUTS = ("given", "outer", "inner")
BEFORE, INSIDE, AFTER = range(3)


def untangled(picture: Picture) -> Picture:
    """The same drawing, with a small second box at the far uses of a value, instead of a long arrow, and loops below what they need."""
    region = _regions(picture)
    home = {box.name: box for box in picture.boxes}
    uses: dict[str, list[Arrow]] = {}
    for arrow in picture.arrows:
        uses.setdefault(arrow.tail, []).append(arrow)
    boxes, arrows = dict(home), []
    taken: set[str] = set()
    for tail, out in uses.items():
        kept = [a for a in out if region[a.head] == region[tail]]
        kept = kept if len(out) < MANY_USES else [a for a in kept if home[a.head].cluster == home[tail].cluster][:1]
        arrows += kept
        if len(kept) == len(out):
            continue
        name = _named(boxes, tail, taken)
        for arrow in out:
            if arrow not in kept:
                again = Box(f"again{len(boxes)}", name, kind="again")
                boxes[again.name] = again
                region[again.name] = region[arrow.head]
                arrows.append(replace(arrow, tail=again.name))
    picture.boxes, picture.arrows = list(boxes.values()), arrows
    _sources_inside(picture)
    _stack(picture, region)
    return picture


def _named(boxes: dict[str, Box], tail: str, taken: set[str]) -> str:
    """A name of its own for a box: the one its title has, or a new one, which is then put in front of the title."""
    box = boxes[tail]
    name, sign, what = box.title.partition(" = ")
    named = bool(sign) or box.kind != "step"
    name, what = (name, what) if named else ("x", box.title)
    number = 0 if named else 1
    others = taken | {b.title.partition(" = ")[0] for other, b in boxes.items() if other != tail and b.kind in INPUTS}
    while (full := f"{name}{number or ''}") in others:
        number += 1
    taken.add(full)
    if full != box.title.partition(" = ")[0]:
        boxes[tail] = replace(box, title=f"{full} = {what}" if what else full)
    return full


def _regions(picture: Picture) -> dict[str, int]:
    """Whether each box comes before the loops, is in one, or after; what is only an input is where it is used."""
    fused = {c.name for c in picture.clusters if c.kind == "fused" and not c.parent}
    inside = {box.name for box in picture.boxes if box.cluster and box.cluster not in fused}
    users: dict[str, set[str]] = {}
    for arrow in picture.arrows:
        users.setdefault(arrow.tail, set()).add(arrow.head)
    after, stack = set(inside), list(inside)
    while stack:
        new = users.get(stack.pop(), set()) - after
        after |= new
        stack += new
    region = {box.name: INSIDE if box.name in inside else AFTER if box.name in after else BEFORE for box in picture.boxes}
    for cluster in fused:  # the steps of a fused node stay together
        names = [box.name for box in picture.boxes if box.cluster == cluster]
        region |= dict.fromkeys(names, max(region[name] for name in names))
    ends = {arrow.head for arrow in picture.arrows}
    for box in picture.boxes:
        if box.name not in ends and box.kind in INPUTS and len(users.get(box.name, ())) == 1:
            region[box.name] = region[next(iter(users[box.name]))]
    return region


def _sources_inside(picture: Picture) -> None:
    """Put what is only an input of one box into the loop that box is in."""
    loop = {c.name: (c.parent if c.kind == "fused" else c.name) for c in picture.clusters}
    home = {box.name: loop.get(box.cluster, "") for box in picture.boxes}
    heads = {a.tail: a.head for a in picture.arrows}
    ends = {a.head for a in picture.arrows}
    for i, box in enumerate(picture.boxes):
        if box.name in heads and box.name not in ends and not box.cluster and (box.kind in INPUTS or box.kind == "again"):
            picture.boxes[i] = replace(box, cluster=home[heads[box.name]])


def _stack(picture: Picture, region: dict[str, int]) -> None:
    tails, ends = {a.tail for a in picture.arrows}, {a.head for a in picture.arrows}
    last = {where: {n for n, r in region.items() if r == where and n not in tails} for where in (BEFORE, INSIDE, AFTER)}
    first = {where: {n for n, r in region.items() if r == where and n not in ends} for where in (BEFORE, INSIDE, AFTER)}
    if INSIDE not in region.values():
        return
    for above, below in ((BEFORE, INSIDE), (INSIDE, AFTER)):
        if last[above] and first[below]:
            picture.stacked.append((last[above], first[below]))
