"""The C++ of the steps: a kept value, made entry by entry, by products that add into it, or along time."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from memkit.compiler.ir import Node, Op, order_axes
from memkit.compiler.kernels import keep
from memkit.compiler.symmetric import is_symmetric
from memkit.specs.errors import KernelError

from .choice import Chain, Choice
from .entries import Entries, Index, Nest, View, plus, times
from .inner import inner, is_inner
from .parts import Parts, apart, in_parts, is_max, terms
from .products import Product, product_of
from .step import Step
from .stretches import indexing, stretched, write_all, write_entries
from .zeros import ANYWHERE, ENDLESS, strip

if TYPE_CHECKING:
    from .text import Function


def step(f: Function, nodes: Sequence[Node], chosen: Choice) -> None:
    """The step that makes a value, or several functions of another."""
    *others, node = nodes
    each = work(f, node, chosen)
    if others:
        _together(f, nodes)
    elif terms(node, chosen) is not None:
        _chain(f, node, chosen, each)
    elif node.op is Op.DECAY:
        _decay(f, node)
    elif node.op is Op.SOLVE:
        _solve(f, node, each)
    elif (node.op is Op.FOLD and node not in chosen.laid) or (node.op is Op.SCATTER and keep.offset(node) is None):
        _scattered(f, node)
    elif keep.contracted(node):
        _summed(f, node, each)
    else:
        _together(f, nodes)


def _together(f: Function, nodes: Sequence[Node]) -> None:
    """Values made entry by entry: in the same loops, where a team shares these in the same way."""
    steps = [Step(f, node) for node in nodes]
    if any((x.split, x.owner, x.alone) != (steps[0].split, steps[0].owner, steps[0].alone) for x in steps):
        for made, node in zip(steps, nodes, strict=True):
            made.add(write_entries(made, [node]))
            made.done()
        return
    made, *others = steps
    made.writes += [(x.out.memory, x.share) for x in others]
    made.add(write_entries(made, nodes[:1]) if not others else write_all(steps))
    made.done()


def work(f: Function, node: Node, chosen: Choice) -> int:
    """What an entry takes, in entries that are only written, apart from sums of parts: products are fast, other sums less so."""
    chain, parts = terms(node, chosen), apart(f, node, chosen)
    sums = [p for p in (chain.products if chain else (node,)) if p not in parts and keep.contracted(p)]
    if node.op is Op.SOLVE:
        return f.most(node)[node.attrs["rows"]] // 4 + 1
    return max((prod(_lengths(f, p)[a] for a in keep.contracted(p)) // (32 if chain else 4) + 1 for p in sums), default=1)


def _lengths(f: Function, node: Node) -> dict[str, int]:
    """The most entries along every axis of what a node reads."""
    return {**f.most(node.args[-1]), **f.most(node.args[0])}


def _chain(f: Function, node: Node, chosen: Choice, each: int) -> None:
    """The terms that are no products first, then every product added."""
    chain, own = chosen.chains.get(node, Chain((), (node,))), apart(f, node, chosen)
    if own:
        in_parts(f, node, each, Parts(own, chain.rest, [p for p in chain.products if p not in own]), _products)
        return
    parted = {f.places[p].axis for p in chain.products if p in f.places}
    made = Step(f, node, each, unsplit=tuple(parted))
    count = len(chain.products) + bool(chain.rest)
    block = made.in_blocks(chain.products, count) if not parted and count > 1 else ""
    if chain.rest:
        made.add(write_entries(made, chain.rest))
    _products(made, chain.products, "1" if chain.rest else "", () if chain.rest else node.attrs.get("symmetric", ()))
    if block:
        made.lines = [block, *("    " + line for line in made.lines), "}"]
    made.done()


def _products(made: Step, products: Sequence[Node], begun: str = "", symmetric: Container[str] = ()) -> None:
    """All of them added. begun: whether something is there that the first adds to, "" for no. symmetric: axes of their sum that may
    change places; then one half of each is made, the same one, and the other half of the sum copied."""
    found = [_called(made, node) for node in products]
    able, sides = all(map(_is_whole_square, found)), {(p.rows, p.cols) for p in found}
    halves = able and len(sides) == 1 and all(x in symmetric for side in sides for x in side)
    for i, (node, p) in enumerate(zip(products, found, strict=True)):
        first = "1" if i else begun
        if not first and node in made.f.places:
            made.add(_around(made, node))
        half = halves or (able and not first and is_symmetric(node))
        name = "product" if not half else "product_half" if i + 1 < len(products) else "product_upper"
        made.add(_product(made, node, p, first, name))


FEWEST = 16  # rows of a block that leaves out zeros
WORTH = 0.8  # of a product's sums, if no more are left
def _called(made: Step, node: Node) -> Product:
    """A product as calls, for the entries that a step makes."""
    f = made.f
    a, b = (f.view(arg) for arg in node.args)
    if a is None or b is None:
        raise KernelError(f"a product of {node.args} without arrays", "operands that are kept", "backend: torch", "backend")
    made.note_view(a)
    made.note_view(b)
    most, out = {**f.most(node.args[0]), **f.most(node.args[1])}, made.out
    if node in f.places:
        inner, axis, first = f.places[node]
        part = out.at(axis, str(first))
        out = View(part.pointer, {**part.strides, inner: out.strides[axis]}, out.memory)
    return product_of(node, (a, b, out), f.sizes(*node.args), most, made.bounds(), tuple(f.fixed))


def _around(made: Step, node: Node) -> list[str]:
    """Zeros where the first of several products, which makes a part of a value, leaves nothing."""
    f, (inner, axis, first) = made.f, made.f.places[node]
    behind, size = plus(str(first), f.sizes(node)[inner]), made.sizes[axis]
    lines: list[str] = []
    for start, end in ([("0", str(first))] if first else []) + [(behind, size)]:
        nest, variable = Nest(), f.names.new(axis)
        nest.enter(variable, f"for (long {variable} = {start}; {variable} < {end}; ++{variable})")
        at = {axis: Index(variable)} | made.enter(nest, [a for a in f.own(made.node) if a != axis])
        nest.lines[-1].append(f"{made.out.pointer}[{made.out.offset(at)}] = real(0);")
        lines += nest.text()
    return lines


def _is_whole_square(p: Product) -> bool:
    """Whether a product has as many rows as columns, and one call makes all of it."""
    square = p.rows and p.cols and p.sizes[p.rows] == p.sizes[p.cols]
    return bool(square) and not {p.rows, p.cols, p.sums} & {*p.bounds} and not p.summed & {*p.loops}


def _product(made: Step, node: Node, p: Product, begun: str, name: str) -> list[str]:
    """Calls of `name` that write a product, or add it where something is `begun`."""
    nest, at, again = Nest(), {a: i.text for a, i in made.f.fixed.items() if a != "g"}, [begun] if begun else []
    for axis in p.loops:
        variable = made.f.names.new(axis)
        nest.enter(variable, made.header(axis, variable, size=p.sizes[axis]))
        at[axis] = variable
        again += [f"{variable} > 0"] if axis in p.summed else []
    add = "1" if begun == "1" else " || ".join(again) or "0"
    bounds = {a: b for a, b in p.bounds.items() if a in (p.rows, p.cols, p.sums)}
    if name == "product":
        bounds |= _past_zeros(made, node, p, nest, bounds)
    nest.lines[-1].append(p.call(name, at, add, bounds))
    return nest.text()


def _past_zeros(made: Step, node: Node, p: Product, nest: Nest, bounds: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """The loop over blocks of rows, or of columns, that leaves out most of what is known to be zero; the bounds of a block."""
    most, found, sizes = _lengths(made.f, node), [], made.f.sizes(*node.args)
    if not p.sums or p.sums in bounds or p.sizes[p.sums] != sizes[p.sums]:  # the last if others were joined to it
        return {}
    for x, operand in ((p.rows, node.args[0]), (p.cols, node.args[1])):
        if x and most[x] >= 2 * FEWEST and p.sizes[x] == sizes[x]:
            each, known = max(FEWEST, most[x] // 8 // FEWEST * FEWEST), strip(operand, x, p.sums)
            found.append((known.share(most[x], most[p.sums], each), x, each, known))
    share, x, each, known = min(found, default=(1.0, "", 0, ANYWHERE))
    if share > WORTH:
        return {}
    start, count = bounds.get(x, ("0", p.sizes[x]))
    past = plus(start, count, str(known.most))  # the entries behind the block's last that may differ from zero
    if x != made.blocks[0]:
        start, first, end = made.f.names.new(f"{x}_first"), start, made.part(x)[1] if x in bounds else p.sizes[x]
        nest.enter(start, f"for (long {start} = {first}; {start} < {end}; {start} += {each})")
        count, past = f"fewer({each}, {end} - {start})", plus(start, str(each + known.most))
    low = "0" if known.least <= -ENDLESS else f"above({plus(start, str(known.least))})"
    high = p.sizes[p.sums] if known.most >= ENDLESS else f"fewer({p.sizes[p.sums]}, {past})"
    return {x: (start, count), p.sums: (low, high if low == "0" else f"above({high} - {low})")}


def _summed(f: Function, node: Node, each: int) -> None:
    """A REDUCE, or an einsum that is no product of matrices."""
    if apart(f, node, Choice()):
        in_parts(f, node, each, Parts([node]), _sum)
        return
    made = Step(f, node, each)
    _sum(made, [node])
    made.done()


def _sum(made: Step, nodes: Sequence[Node], begun: str = "") -> None:
    """Loops that write the sum."""
    f, (node,) = made.f, nodes
    widest = max(node.args, key=lambda a: len(a.axes))
    gone, own = list(keep.contracted(node)), f.own(node)
    sizes = f.sizes(*node.args)
    largest = is_max(node)
    along = bool(own) and widest.axes[-1] == own[-1] and not largest
    nest = Nest()
    if is_inner(f, node):
        made.add(inner(made, node, sizes))
        return
    if along:
        made.add(write_entries(made, []))
        made.add(stretched(made, [*own[:-1], *gone, own[-1]], indexing(f, [node], own[-1]), partial(_summand, made, node), sizes))
        return
    at = made.enter(nest, own, simd=False)
    total = f.names.new("total")
    nest.lines[-1].append(f"real {total} = {'-real(INFINITY)' if largest else '0'};")
    depth = len(own)
    at |= made.enter(nest, [a for a in order_axes(widest.axes, gone) if a in gone], simd=False, sizes=sizes)
    if not largest:
        variable, header = nest.loops[-1]
        nest.loops[-1] = variable, f"SUM({total}) {header}"
    entries = made.entries(nest)
    term = _term(entries, node, at)
    nest.lines[-1].append(f"{total} = fn_maximum({total}, {term});" if largest else f"{total} += {term};")
    nest.after[depth].append(f"{made.out.pointer}[{made.out.offset(at)}] = {total};")
    made.note(entries, at)
    made.add(nest.text())


def _summand(made: Step, node: Node, nest: Nest, at: dict[str, Index], entries: Entries) -> None:
    nest.lines[-1].append(f"{made.out.pointer}[{made.out.offset(at)}] += {_term(entries, node, at)};")


def _term(entries: Entries, node: Node, at: dict[str, Index]) -> str:
    return " * ".join(entries.value(a, at).text for a in node.args)


def _scattered(f: Function, node: Node) -> None:
    """A FOLD or SCATTER: every entry of the operand is added where it belongs."""
    a, operand = node.attrs, node.args[0]
    made = Step(f, node, unsplit=(a["axis"], a.get("new", "")))
    made.add(write_entries(made, []))
    axes = f.own(operand)
    along = node.op is Op.SCATTER and axes[-1] == a["axis"]
    tables = [*indexing(f, [operand], axes[-1]), tuple(a["index"])] if along else []
    made.add(stretched(made, axes, tables, partial(_added, made, node), f.sizes(operand), simd=not along))
    made.done()


def _added(made: Step, node: Node, nest: Nest, at: dict[str, Index], entries: Entries) -> None:
    """One entry of the operand added where it belongs; summed first, if a whole stretch belongs there."""
    a, variable = node.attrs, nest.loops[-1][0]
    if node.op is Op.FOLD:
        o, i = at[a["outer"]], at[a["inner"]]
        spot, target = Index(f"({plus(times(o.text, str(a['step'])), i.text)})", o.uses | i.uses), a["axis"]
    else:
        spot, target = entries.spot(tuple(a["index"]), at[a["axis"]]), a["new"]
    place, term = f"{made.out.pointer}[{made.out.offset({**at, target: spot})}]", entries.value(node.args[0], at).text
    if node.op is Op.FOLD or variable in spot.uses or variable not in at[a["axis"]].uses:
        nest.lines[-1].append(f"{place} += {term};")
        return
    total, (_, header) = made.f.names.new("total"), nest.loops[-1]
    nest.lines[-2].append(f"real {total} = 0;")
    nest.loops[-1] = variable, f"SUM({total}) {header.removeprefix('IVDEP ')}"
    nest.lines[-1].append(f"{total} += {term};")
    nest.after[-2].append(f"{place} += {total};")


def _decay(f: Function, node: Node) -> None:
    """Row t is row t - 1 times x[t], and 1 on the diagonal."""
    t, s = node.attrs["axis"], node.attrs["new"]
    made = Step(f, node, unsplit=(t, "n"))
    nest = Nest()
    rest = [a for a in node.axes if a not in ("g", "n", t, s)]
    at = made.enter(nest, [*(a for a in node.axes if a == "n"), t, s, *rest])
    entries = made.entries(nest)
    x = entries.value(node.args[0], {a: i for a, i in at.items() if a != s}).text
    above = made.out.offset({**at, t: Index(f"({at[t].text} - 1)")})
    row, col, p = at[t].text, at[s].text, made.out.pointer
    nest.lines[-1].append(
        f"{p}[{made.out.offset(at)}] = {col} < {row} ? {p}[{above}] * {x} : {col} == {row} ? real(1) : real(0);"
    )
    made.note(entries, at)
    made.add(nest.text())
    made.done()


def _solve(f: Function, node: Node, each: int) -> None:
    """The right-hand side is copied and solved in place, with the system's entries below the diagonal negated in rows of their own."""
    lower, right = node.args
    rows, cols, back = node.attrs["rows"], node.attrs["cols"], int(node.attrs["transpose"])
    batch = [a for a in node.axes if a in lower.axes and a not in ("g", rows, cols)]
    own = [a for a in node.axes if a not in ("g", rows, *batch)]
    made = Step(f, node, each, unsplit=(rows, *batch))
    made.add(copied_from(made, right))
    copy = lower.replace(axes=("g", *batch, rows, cols) if "g" in lower.axes else (*batch, rows, cols), name="below")
    f.length[copy] = f.length[lower]
    f.views[copy] = f.own_scratch(copy) if made.alone else f.scratch(copy)
    below = Step(f, copy)
    nest = Nest()
    at = below.enter(nest, f.own(copy))
    entries = below.entries(nest)
    text = entries.value(lower, at).text
    nest.lines[-1].append(f"{below.out.pointer}[{below.out.offset(at)}] = {at[cols].text} < {at[rows].text} ? -{text} : real(0);")
    below.note(entries, at)
    below.add(nest.text())
    below.done()
    made.note_view(below.out)
    nest, here = Nest(), {}
    most = f.most(node)
    width = made.split or max(own, key=lambda a: most[a], default="")
    for axis in (*batch, *(a for a in own if a != width)):
        variable = f.names.new(axis)
        nest.enter(variable, made.header(axis, variable))
        here[axis] = Index(variable)
    first, count = made.bounds()[made.split] if made.split else ("0", made.sizes[width] if width else "1")
    step, apart = made.out.strides[rows], made.out.strides.get(width, "1")
    x = plus(made.out.pointer, *_moved(here, made.out), times(first, apart if width else "0"))
    low = plus(below.out.pointer, *_moved(here, below.out))
    nest.lines[-1].append(f"solve({made.sizes[rows]}, {count}, {low}, {below.out.strides[rows]}, {x}, {step}, {apart}, {back}, room);")
    made.add(nest.text())
    made.done()
    f.give(f.views[copy].memory)


def _moved(at: Mapping[str, Index], view: View) -> list[str]:
    """How far indices move along a view."""
    return [times(i.text, view.strides[a]) for a, i in at.items() if a in view.strides]


def copied_from(made: Step, node: Node) -> list[str]:
    """Loops that copy a value, repeated over the axes it lacks."""
    view = made.f.view(node)
    if view is not None and (rows := _unit(made, made.out)) and (columns := _unit(made, view)) and rows != columns:
        return _turned(made, view, rows, columns)
    nest = Nest()
    at = made.enter(nest, made.f.own(made.node))
    entries = made.entries(nest)
    text = entries.value(node, at).text
    nest.lines[-1].append(f"{made.out.pointer}[{made.out.offset(at)}] = {text};")
    made.note(entries, at)
    return nest.text()


def _unit(made: Step, view: View) -> str:
    """The axis along which entries are next to each other, if all that a step makes have a place of their own in a view."""
    axes = made.f.own(made.node)
    return next((a for a in axes if view.strides[a] == "1"), "") if all(view.strides.get(a, "0") != "0" for a in axes) else ""


def _turned(made: Step, view: View, rows: str, columns: str) -> list[str]:
    """A copy that lies along other axes than its origin, which each cache line would else be fetched for entry by entry."""
    nest, at = Nest(), dict(made.f.fixed)
    for axis in made.f.own(made.node):
        if axis not in (rows, columns):
            variable = made.f.names.new(axis)
            nest.enter(variable, made.header(axis, variable))
            at[axis] = Index(variable)
    bounds = {a: made.bounds().get(a, ("0", made.sizes[a])) for a in (rows, columns)}
    first = {**at, **{a: Index(start) for a, (start, _) in bounds.items()}}
    source, target = (plus(v.pointer, v.offset({a: first[a] for a in v.strides})) for v in (view, made.out))
    counts = ", ".join(bounds[a][1] for a in (rows, columns))
    nest.lines[-1].append(f"turned({counts}, {source}, {view.strides[rows]}, {target}, {made.out.strides[columns]});")
    made.note_view(view)
    return nest.text()
