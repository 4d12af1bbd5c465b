"""Emitted C++ as a torch operation, with shapes for tracing and a gradient; long sequences keep few states and make the others again.

Where it sits: above `native_build`, below `native_rule`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from math import prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from . import native_build, native_memory
from .assemble import again
from .build import Equations
from .emit_native import NativeModule, native_module
from .ir import Graph
from .native.text import Source
from .passes import dedupe, delay, kernel_trick
from .pipeline import Compiled, Stages
from .plans import PLANS

LARGE = 1 << 22  # bytes of an array that are worth large pages
BLOCK, WEIGHTS = 8, 1 << 19  # most tokens whose weights exist at once, where they must, and most numbers in these
LEAST = 4  # such tokens however large their weights are: a team's members share them
STACKS = 3 << 25  # bytes of states that are all saved; of more, few are, and the others made again
DEAR = 1 << 30  # the same where a state takes all of a block's work to make again
PART = 1 << 24  # bytes of states that are made again at a time: more leave the cache; the first and last ones of each part are copied
FEWEST = 4  # chunks whose states are made again at a time, however large these are: all states are copied twice each time
MANY, ROOMY = 16, 1 << 26  # of large states up to so many, as far as they take no more than these bytes: they are in no cache anyway
Sizes = tuple[int, int, int]  # N, G, LT


@dataclass
class Native:
    """A rule's C++: the module, written when first asked for, and its functions, each compiled when first called."""

    key: str
    make: Callable[[], NativeModule]
    title: str
    plain: dict[str, Any]  # what the emitted torch module defines
    written: NativeModule | None = None
    loaded: dict[tuple[str, torch.dtype], Future[ctypes.CDLL]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    @property
    def module(self) -> NativeModule:
        with self.lock:
            if self.written is None:
                self.written = self.make()
            return self.written

    def library(self, name: str, dtype: torch.dtype) -> Future[ctypes.CDLL]:
        """The library of a function, to be waited for."""
        unit = self.module.unit(name)
        with self.lock:
            if (name, dtype) not in self.loaded:
                self.loaded[name, dtype] = _compilers().submit(native_build.library, f"{self.title}-{name}", unit, dtype)
            return self.loaded[name, dtype]

    def sequences(self, base: str) -> set[str]:
        """The inputs of a forward function that have an entry for every chunk."""
        source = self.module.functions[base]
        return {n for n, axes in zip(source.inputs, source.axes, strict=True) if axes[:1] == ("n",)}

    def parts(self, base: str, sizes: Sizes, bytes_each: int) -> list[tuple[int, int]]:
        """First chunk, and the one behind the last, of the parts of which a thin function keeps the first states."""
        chunks, G, _ = sizes
        a_chunk = max(1, self.state_numbers(base) * G * bytes_each)
        most = max(FEWEST, PART // a_chunk, min(MANY, ROOMY // a_chunk))
        return [(first, min(chunks, first + most)) for first in range(0, chunks, most)]

    def state_numbers(self, base: str) -> int:
        """Numbers in the states of one head that a thin function spares; 0 without one."""
        stacks = self.module.functions[f"{base}_states"].results if base in self.module.stacks else ()
        return sum(
            prod(length.at(1) for a, length in zip(axes, lengths, strict=True) if a not in ("n", "g")) for _, axes, lengths in stacks
        )

    def behind(self, base: str) -> list[str]:
        """What a thin function's backward is given: what its two functions read, and the states at the parts' starts."""
        module, stacks = self.module, self.module.stacks[base]
        states = module.functions[f"{base}_states"]
        read, made = (*states.inputs, *module.functions[f"{base}_backward"].inputs), {label for label, _, _ in states.results}
        rest = [n for n in dict.fromkeys(read) if n not in made and n not in stacks.values()]
        grads = [f"grad_{state}" for state in stacks.values()]
        return [*dict.fromkeys((*rest, *grads)), *(f"starts_{state}" for state in stacks.values())]

    def function_in_torch(self, base: str) -> Callable[..., Sequence[Tensor]]:
        """What a forward function computes, as torch operations."""
        if base != "blocks":
            return self.plain[f"plain_{base}"]
        sequences, states = len(self.sequences(base)), self.module.results[base] - 1

        def in_turn(*inputs: Tensor) -> Sequence[Tensor]:
            outputs, carried, rest = [], inputs[sequences : sequences + states], inputs[sequences + states :]
            for parts in zip(*inputs[:sequences], strict=True):
                y, *carried = self.plain["plain_resume"](*parts, *carried, *rest)
                outputs.append(y)
            return torch.stack(outputs), *carried

        return in_turn

    def function(self, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
        """A function, and one that asks for large pages. What will be called after it is compiled at the same time."""
        found = self.library(name, dtype)
        if name.endswith("_saving"):
            self.library(name.replace("_saving", "_backward"), dtype)
        if name.endswith("_thin"):
            for later in ("_states", "_backward"):
                self.library(name.replace("_thin", later), dtype)
        try:
            library = found.result()
        except BaseException:
            with self.lock:  # tried anew by the next call, which may find room on the disk or another compiler
                self.loaded.pop((name, dtype), None)
            raise
        run, large = getattr(library, name), library.in_large_pages
        run.restype, run.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_long,) * 4)
        large.restype, large.argtypes = None, (ctypes.c_void_p, ctypes.c_long)
        return run, large


@cache
def _compilers() -> ThreadPoolExecutor:
    """Threads that wait for the C++ compiler."""
    return ThreadPoolExecutor(2, "memkit-native")


_KNOWN: dict[str, Native] = {}


def _forked() -> None:
    """A forked process has none of its parent's threads: what they were compiling is compiled anew."""
    _compilers.cache_clear()
    for native in _KNOWN.values():
        native.lock = Lock()
        native.loaded = {name: found for name, found in native.loaded.items() if found.done()}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def native_of(compiled: Compiled, title: str, plain: dict[str, Any], tokens: int) -> Native:
    """The C++ of a compiled spec for chunks, or blocks, of at most so many tokens, findable by its key, which is all that a traced graph
    holds of it."""
    key = hashlib.sha256(f"{tokens} {compiled.source}".encode()).hexdigest()[:24]

    def make() -> NativeModule:
        graphs = {name: first(compiled, stages) for name, stages in compiled.graphs.items()}
        if "chunks" not in graphs:
            blocks = PLANS[compiled.choice.name].blocks(compiled.equations, compiled.facts)
            graphs["blocks"] = _with_kernel(compiled.equations, dedupe(blocks))
        return native_module(compiled.equations, compiled.choice.name, title, graphs, tokens)

    return _KNOWN.setdefault(key, Native(key, make, re.sub(r"\W", "_", title) or "rule", plain))


def first(compiled: Compiled, stages: Stages) -> Graph:
    """The graph that C++ is written of, before the passes that are C++'s own."""
    eq, graph = compiled.equations, stages.after("lower")
    if eq.features is None or eq.kernel is None:
        return graph
    return _with_kernel(eq, delay(dedupe(graph), eq.window, compiled.chunk, eq.sizes))


def _with_kernel(eq: Equations, graph: Graph) -> Graph:
    return graph if eq.features is None or eq.kernel is None else kernel_trick(graph, eq.features, eq.kernel)


def block(numbers: int) -> int:
    """The tokens of one call, of a spec whose weights exist a token: `numbers` in these."""
    return min(BLOCK, max(LEAST, WEIGHTS // numbers))


def sizes_of(axes: Sequence[tuple[str, ...]], inputs: Sequence[Tensor]) -> Sizes:
    """N, G, LT, from inputs with these axes."""
    found = {"n": 1, "g": 1, "t": 1}
    for own, x in zip(axes, inputs, strict=True):
        found |= dict(zip(own, x.shape, strict=True))
    return found["n"], found["g"], found["t"]


def saving(base: str, state_numbers: int, sizes: Sizes, bytes_each: int) -> str:
    """The forward function for a backward: one that saves all states, or a thin one where they are too many."""
    most = DEAR if base == "blocks" else STACKS
    return f"{base}_thin" if state_numbers * sizes[0] * sizes[1] * bytes_each > most else f"{base}_saving"


def empty(source: Source, sizes: Sizes, like: Tensor) -> dict[str, Tensor]:
    """The results of a function, to be written. What only its backward sees lies in memory that is used again and again."""
    N, G, LT = sizes
    found = {}
    for label, axes, lengths in source.results:
        shape = [G if a == "g" else length.at(LT, N) for a, length in zip(axes, lengths, strict=True)]
        found[label] = native_memory.empty(shape, like) if label.startswith("saved_") else like.new_empty(shape)
    return found


# ---- calls


def call(native: Native, name: str, sizes: Sizes, given: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> None:
    """Run one function on contiguous tensors by name; it writes `results`."""
    launch = Launch(native, name, next(iter(given.values())).dtype)
    launch.ask_for_large_pages(results.values())
    launch(sizes, *(Places(group).at(0) for group in (given, results)))


class Launch:
    """One function of a rule, ready to be called on addresses by name: part after part of long sequences, at little cost a part."""

    def __init__(self, native: Native, name: str, dtype: torch.dtype) -> None:
        source = native.module.functions[name]
        self.name, self.inputs, self.labels = name, source.inputs, [label for label, _, _ in source.results]
        self.function, self.in_large_pages = native.function(name, dtype)

    def ask_for_large_pages(self, arrays: Iterable[Tensor]) -> None:
        for x in arrays:
            if x.nbytes >= LARGE:
                self.in_large_pages(x.data_ptr(), x.nbytes)

    def __call__(self, sizes: Sizes, given: Mapping[str, int], results: Mapping[str, int]) -> None:
        groups = [given[n] for n in self.inputs], [results[n] for n in self.labels]
        pointers = [(ctypes.c_void_p * len(group))(*group) for group in groups]
        if self.function(*pointers, *sizes, torch.get_num_threads()):
            raise MemoryError(f"no memory for the scratch of {self.name}")


class Places:
    """Where arrays begin, and those of `stepped`, which have an entry for every chunk or part, at any entry."""

    def __init__(self, arrays: Mapping[str, Tensor], stepped: Container[str] = ()) -> None:
        self.all = {n: (x.data_ptr(), x.stride(0) * x.element_size() if n in stepped else 0) for n, x in arrays.items()}

    def at(self, entry: int) -> dict[str, int]:
        return {n: start + entry * step for n, (start, step) in self.all.items()}


def shapes(native: Native, name: str, sizes: Sizes, like: Tensor) -> list[Tensor]:
    """Empty results of an operation. A thin function's are its own and the states at the starts of its parts."""
    base, _, kind = name.partition("_")
    found = list(empty(native.module.functions[base + "_backward" if kind == "thin_backward" else name], sizes, like).values())
    return [*found, *starts(native, base, sizes, like).values()] if kind == "thin" else found


def starts(native: Native, base: str, sizes: Sizes, like: Tensor) -> dict[str, Tensor]:
    """Room for the states that a thin function keeps, by the states' names."""
    last = empty(native.module.functions[f"{base}_thin"], sizes, like)
    count = len(native.parts(base, sizes, like.element_size()))
    return {state: native_memory.empty([count, *last[state].shape], like) for state in native.module.stacks[base].values()}


def run(inputs: list[Tensor], key: str, name: str, sizes: Sizes) -> list[Tensor]:
    """The operation."""
    native = _KNOWN[key]
    base, _, kind = name.partition("_")
    inputs = [x.contiguous() for x in inputs]
    if kind == "thin":
        return _thin(native, base, sizes, inputs)
    if kind == "thin_backward":
        return _thin_backward(native, base, sizes, inputs)
    source = native.module.functions[name]
    results = empty(source, sizes, inputs[0])
    call(native, name, sizes, dict(zip(source.inputs, inputs, strict=True)), results)
    return list(results.values())


def _of_chunks(native: Native, name: str) -> set[str]:
    """Labels of results that have an entry for every chunk."""
    return {label for label, axes, _ in native.module.functions[name].results if axes[:1] == ("n",)}


def _thin(native: Native, base: str, sizes: Sizes, inputs: list[Tensor]) -> list[Tensor]:
    """Part after part, from the state that the one before left."""
    name, (_, G, LT), like = f"{base}_thin", sizes, inputs[0]
    source, sequences, of_chunks = native.module.functions[name], native.sequences(base), _of_chunks(native, name)
    given = dict(zip(source.inputs, inputs, strict=True))
    results, kept = empty(source, sizes, like), starts(native, base, sizes, like)
    launch = Launch(native, name, like.dtype)
    launch.ask_for_large_pages([*results.values(), *kept.values()])
    for state, rows in kept.items():
        rows[0] = given[state]
    parts = native.parts(base, sizes, like.element_size())
    read, wrote, states = Places(given, sequences), Places(results, of_chunks), Places(kept, kept)
    for i, (first, last) in enumerate(parts):
        into = wrote.at(first) | (states.at(i + 1) if i + 1 < len(parts) else {})
        launch((last - first, G, LT), read.at(first) | states.at(i), into)
    return [*results.values(), *kept.values()]


def _thin_backward(native: Native, base: str, sizes: Sizes, inputs: list[Tensor]) -> list[Tensor]:
    """The last part first: its states are made again, then its gradients, which those of its first state carry on."""
    module, (_, G, LT), like = native.module, sizes, inputs[0]
    stacks, back = module.stacks[base], module.functions[f"{base}_backward"]
    given = dict(zip(native.behind(base), inputs, strict=True))
    kept = {state: given.pop(f"starts_{state}") for state in stacks.values()}
    of_chunks = _of_chunks(native, back.name)
    stepped = {*native.sequences(base), "grad_y", *(n for n in given if n.startswith("saved_"))}
    results = empty(back, sizes, like)
    once = [n for n in results if n not in of_chunks]
    both = [results, {**results, **{n: torch.empty_like(results[n]) for n in once}}]  # a part reads what the one before wrote
    parts = native.parts(base, sizes, like.element_size())
    room = empty(module.functions[f"{base}_states"], (parts[0][1], G, LT), like)
    remake, pull = Launch(native, f"{base}_states", like.dtype), Launch(native, back.name, like.dtype)
    pull.ask_for_large_pages([*results.values(), *room.values()])
    sums: dict[str, Tensor] = {}
    read, states, into, own = Places(given, stepped), Places(kept, kept), [Places(x, of_chunks) for x in both], Places(room).at(0)
    zeros = {n: torch.zeros_like(given[f"grad_{n}"]) for n in kept if n not in results}
    behind: dict[str, int] = {}  # gradients of the states that a part leaves
    for turn, (i, (first, last)) in enumerate(reversed(list(enumerate(parts)))):
        part, wrote = read.at(first) | states.at(i) | behind, both[turn % 2]
        remake((last - first, G, LT), part, own)
        pull((last - first, G, LT), part | own, into[turn % 2].at(first))
        for n in once:
            if n not in kept:
                sums[n] = sums[n] + wrote[n] if n in sums else wrote[n].clone()
        behind = {f"grad_{n}": (wrote[n] if n in results else zeros[n]).data_ptr() for n in kept}
    return list((results | {n: wrote[n] for n in once} | sums).values())


# ---- the operation


@cache
def operation() -> Any:
    """`memkit::native(inputs, key, name, sizes) -> results and saved values`."""

    def native(inputs: list[Tensor], key: str, name: str, sizes: list[int]) -> list[Tensor]:
        return run(inputs, key, name, (sizes[0], sizes[1], sizes[2]))

    native.__annotations__ = {"inputs": list[Tensor], "key": str, "name": str, "sizes": list[int], "return": list[Tensor]}
    op = torch.library.custom_op("memkit::native", native, mutates_args=(), device_types="cpu")
    op.register_fake(lambda inputs, key, name, sizes: shapes(_KNOWN[key], name, tuple(sizes), inputs[0]))
    op.register_autograd(_pull, setup_context=_keep)
    return op


def _keep(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, ctx.key, ctx.name, ctx.sizes = inputs
    ctx.set_materialize_grads(False)  # else zeros are made for the gradients of all saved values
    ctx.results = _KNOWN[ctx.key].module.results[ctx.name.partition("_")[0]]
    ctx.save_for_backward(*tensors, *output[ctx.results :])
    ctx.count = len(tensors)
    ctx.like = [x.shape for x in output[: ctx.results]]


def _pull(ctx: Any, grads: list[Tensor | None]) -> tuple:
    """The gradients of a call with saved values."""
    tensors, native = ctx.saved_tensors, _KNOWN[ctx.key]
    module, (name, _, kind) = native.module, ctx.name.partition("_")
    given = [tensors[0].new_zeros(shape) if g is None else g for g, shape in zip(grads, ctx.like, strict=False)]
    if torch.is_grad_enabled():  # differentiated once more: let torch differentiate the forward's source
        inputs = tensors[: ctx.count]
        return list(again(native.function_in_torch(name), inputs, given, [x.requires_grad for x in inputs])), None, None, None
    forward, back = module.functions[ctx.name], module.functions[f"{name}_backward"]
    labels = [label for label, _, _ in forward.results]
    behind = [f"starts_{state}" for state in module.stacks[name].values()] if kind == "thin" else []
    names = (*forward.inputs, *labels[ctx.results :], *behind, *(f"grad_{x}" for x in labels[: ctx.results]))
    known = dict(zip(names, (*tensors, *given), strict=True))
    wanted, later = (native.behind(name), f"{name}_thin_backward") if kind == "thin" else (back.inputs, back.name)
    found = operation()([known[n] for n in wanted], ctx.key, later, ctx.sizes)
    by_name = dict(zip((label for label, _, _ in back.results), found, strict=True))
    return [by_name.get(n) for n in forward.inputs], None, None, None
