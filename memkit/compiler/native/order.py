"""The order of a loop's steps: what goes round is overwritten where it lies, once nobody needs its old value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush

from memkit.compiler.ir import Node
from memkit.compiler.kernels import keep

Reads = Mapping[Node, keep.Reads]


def in_place(
    items: Sequence[Node], reads: Reads, carries: Sequence[tuple[Node, Node]], sums: Collection[Node]
) -> tuple[list[Node], set[int]]:
    """The items in an order, and which carries (value at an iteration's start, at its end) may then lie in one place.

    That needs every other step that reads the start to come before the one that makes the end, which reads it only entry by entry.
    Steps that read one of `sums`, for which members of a team wait, come when there is nothing else to do.
    """
    waits = {node: {keep.source(r) for r in reads[node].all} for node in items}
    order, found = _sorted(items, waits, sums), set()
    for i, (start, end) in enumerate(carries):
        if end not in waits or start in reads[end].elsewhere:
            continue
        readers = {n for n in items if n is not end and start in reads[n].all}
        tried = {**waits, end: waits[end] | readers}
        attempt = _sorted(items, tried, sums)
        if attempt is not None:
            order, waits = attempt, tried
            found.add(i)
    return order or list(items), found


def _sorted(items: Sequence[Node], waits: Mapping[Node, set[Node]], sums: Collection[Node]) -> list[Node] | None:
    """The items, each behind what it waits for, else as they come, and what reads `sums` as late as it can; None where they wait for each
    other."""
    place = {node: i for i, node in enumerate(items)}
    missing = {node: sum(w in place for w in waits[node]) for node in items}
    users: dict[Node, list[Node]] = {node: [] for node in items}
    for node in items:
        for w in waits[node]:
            if w in place:
                users[w].append(node)
    ready = [place[n] for n in items if not missing[n]]
    heapify(ready)
    order: list[Node] = []
    open_, held = set[Node](), list[Node]()  # sums that nobody has read, and what would
    while ready or held:
        if not ready:
            ready, held, open_ = sorted(place[n] for n in held), [], set()
        node = items[heappop(ready)]
        order.append(node)
        open_ |= {node} & {*sums}
        for user in users[node]:
            missing[user] -= 1
            if not missing[user] and waits[user] & open_:
                held.append(user)
            elif not missing[user]:
                heappush(ready, place[user])
    return order if len(order) == len(items) else None
