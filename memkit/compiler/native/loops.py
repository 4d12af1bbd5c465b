"""The C++ of a SCAN: what goes round lies in a stack where it is saved, else in two places by turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels.layout import copied
from memkit.compiler.kernels.memory import packed

from .arena import Memory
from .entries import View, plus, times
from .order import in_place
from .parts import sums
from .private import private
from .step import Step
from .steps import copied_from

if TYPE_CHECKING:
    from .text import Function


def loop(f: Function, scan: Node) -> dict[Node, Memory]:
    """Write the loop. Returns the scratch memory of its results, by GET node."""
    assert scan.body is not None
    body, k, axis = scan.body, scan.attrs["carries"], scan.attrs["axis"]
    gets, count = f.gets.get(scan, {}), f.length[scan.args[k]][axis].text
    found: dict[Node, Memory] = {}
    for get in gets.values():
        if get not in f.views:
            f.views[get] = f.scratch(get)
            if f.views[get].memory.space == "mine":
                found[get] = f.views[get].memory
    idle = scan.attrs["save"] and all(index >= len(body.results) for index in gets)
    turns = f"{count} - 1" if idle else count  # what the last would make, nobody reads
    items, reads = f.items(body)
    gone = [i for i in range(k) if _stack(f, scan, i) is None]  # the others' old values are all kept
    items, still = in_place(items, reads, [(body.params[i], body.results[i]) for i in gone], sums(f, items, f.choices[body]))
    f.private |= private(f, items, reads, f.choices[body], body.params[:k])
    rounds = [_Carry(f, scan, i, i in {gone[j] for j in still}, idle) for i in range(k)]
    if f.waits:
        f.barrier()
    step, at = f.names.new(f"{axis}_step"), f.names.new(axis)
    order = "backwards along" if scan.attrs["reverse"] else "along"
    f.line(f"// {order} {axis}: {', '.join(p.attrs['name'] for p in body.params[:k])}")
    f.line(f"for (long {step} = 0; {step} < {turns}; ++{step}) {{")
    f.depth += 1
    f.line(f"const long {at} = {f'{count} - 1 - {step}' if scan.attrs['reverse'] else step};")
    _inputs(f, scan, at)
    for carry in rounds:
        carry.turn(step, at, count)
    for i, result in enumerate(body.results[k:], k):
        if i in gets:
            view = f.views[gets[i]].at(axis, at)
            name = f.names.new(result.name or "kept")
            f.line(f"real* const {name} = {view.pointer};")
            f.views[result] = View(name, view.strides, Memory(name))
    f.waits.clear()
    f.adopt(body)
    f.level(body, items, reads)
    f.barrier()
    f.depth -= 1
    f.line("}")
    for carry in rounds:
        carry.finish()
    return found


def _inputs(f: Function, scan: Node, at: str) -> None:
    """Where an iteration finds its slices, and what is the same for all."""
    assert scan.body is not None
    k, m = scan.attrs["carries"], scan.attrs["slices"]
    for i, (param, outer) in enumerate(zip(scan.body.params[k:], scan.args[k:], strict=True)):
        view = f.view(outer)
        assert view is not None
        if i < m:
            name = f.names.new(param.attrs["name"])
            moved = view.at(scan.attrs["axis"], at)
            f.line(f"const real* const {name} = {moved.pointer};")
            view = View(name, moved.strides, moved.memory)
        f.views[param] = view


def _stack(f: Function, scan: Node, i: int) -> View | None:
    """Where the values that iterations start from are saved, if they are."""
    assert scan.body is not None
    stack = f.gets.get(scan, {}).get(len(scan.body.results) + i)
    return f.views[stack] if stack is not None and scan.attrs["save"] else None


class _Carry:
    """One value that goes round a loop: where an iteration finds it and where it leaves it."""

    def __init__(self, f: Function, scan: Node, i: int, still: bool, idle: bool) -> None:
        """still: it is overwritten where it lies. idle: the last iteration, which would only make the final value, is left out."""
        assert scan.body is not None
        self.f, self.scan, self.i, self.still, self.idle = f, scan, i, still, idle
        self.param, self.result = scan.body.params[i], scan.body.results[i]
        self.axis, self.reverse = scan.attrs["axis"], scan.attrs["reverse"]
        self.final, self.saved = f.gets.get(scan, {}).get(i), _stack(f, scan, i)
        axes = [a for a in self.param.axes if a != "g"]
        most = f.most(self.param)
        strides, size = packed(axes, most)
        self.strides, self.size = strides, -(-size // 16) * 16
        self.memory: Memory | None = None
        self.private = self.saved is None and self.param in f.private and self.result in f.private
        start = f.view(scan.args[i])
        self.start = start.pointer if start is not None and dict(start.strides) == strides else ""
        self.direct = ""
        if self.final is not None and dict(f.views[self.final].strides) == strides:
            self.direct = f.views[self.final].pointer
        if self.saved is not None:
            self.strides = {a: s for a, s in self.saved.strides.items() if a != self.axis}
            first = "0" if not self.reverse else f"({f.length[scan.args[scan.attrs['carries']]][self.axis].text} - 1)"
            self._copy(self.saved.at(self.axis, first))
            fits = self.final is not None and dict(f.views[self.final].strides) == self.strides
            self.last = "" if idle else f.views[self.final].pointer if fits else self._room(1)  # type: ignore[index]
        elif still:
            self.slots = self._room(1) if self.private or not self.direct else self.direct
            self._copy(self._slot())
        else:
            self.slots = self._room(2)
            if not self.start:
                self._copy(View(self.slots, strides, self.memory or Memory("")))

    def _room(self, count: int) -> str:
        """Scratch for `count` values."""
        f = self.f
        space, arena = ("own", f.own_arena) if self.private else ("mine", f.arena)
        self.memory = arena.take(self.size * count)._replace(space=space)
        name = f.names.new(f"{self.param.attrs['name']}_slots")
        alone = f"members == 1 ? {self.direct} : " if self.still and self.direct else ""
        f.line(f"real* const {name} = {alone}{space} + {self.memory.start};")
        return name

    def _slot(self) -> View:
        """The one place of a value that is overwritten where it lies: room that other values may have had, or the final value's."""
        memory = self.memory
        if memory is None:
            assert self.final is not None
            memory = self.f.views[self.final].memory
        return View(self.slots, self.strides, Memory("own") if self.private else memory)

    def _memory(self, name: str) -> Memory:
        """What its steps touch: nothing that other members see, or an array."""
        return Memory("own") if self.private else Memory(name)

    def _copy(self, view: View) -> None:
        """The value at the start, copied to where the first iteration finds it."""
        copy = copied(self.scan.args[self.i]).replace(axes=self.param.axes, name=self.param.attrs["name"])
        self.f.length[copy], self.f.views[copy] = self.f.length[self.param], view
        if self.private:
            self.f.private.add(copy)
        made = Step(self.f, copy)
        made.add(copied_from(made, self.scan.args[self.i]))
        made.done()

    def turn(self, step: str, at: str, count: str) -> None:
        """Declare both places for one iteration."""
        f = self.f
        if self.still:
            f.views[self.param] = f.views[self.result] = self._slot()
            return
        before, after = f.names.new(self.param.attrs["name"]), f.names.new(f"{self.param.attrs['name']}_next")
        if self.saved is not None:
            stride = self.saved.strides[self.axis]
            here = plus(self.saved.pointer, times(at, stride))
            following = f"({at} {'-' if self.reverse else '+'} 1)"
            there = plus(self.saved.pointer, times(following, stride))
            there = there if self.idle else f"{step} + 1 < {count} ? {there} : {self.last}"
        else:
            slot = f"{self.slots} + {step} % 2 * {self.size}"
            here = f"{step} ? {slot} : {self.start}" if self.start else slot
            there = f"{self.slots} + ({step} + 1) % 2 * {self.size}"
            there = f"{step} + 1 < {count} ? {there} : {self.direct}" if self.direct else there
        f.line(f"const real* const {before} = {here};")
        f.line(f"real* const {after} = {there};")
        f.views[self.param] = View(before, self.strides, self._memory(before))
        f.views[self.result] = View(after, self.strides, self._memory(after))

    def finish(self) -> None:
        """The last value, copied to where it is read, unless the last iteration left it there."""
        f = self.f
        if self.final is not None:
            target = f.views[self.final]
            pointer = self.last if self.saved is not None else self.slots if self.still else self.direct
            if pointer != target.pointer:
                count = f.length[self.scan.args[self.scan.attrs["carries"]]][self.axis].text
                where = pointer or f"({self.slots} + {count} % 2 * {self.size})"
                self._copy_final(View(where, self.strides, self.memory or Memory("")))
        if self.memory is not None:
            f.give(self.memory)

    def _copy_final(self, source: View) -> None:
        f = self.f
        assert self.final is not None
        held = Node(Op.PARAM, (), self.param.axes, {"name": "last"})
        f.length[held], f.views[held] = f.length[self.param], source
        if self.private:
            f.private.add(self.final)
        made = Step(f, self.final)
        made.add(copied_from(made, held))
        if self.still and self.direct:
            made.lines = ["if (members > 1) {", *("    " + line for line in made.lines), "}"]
        made.done()
