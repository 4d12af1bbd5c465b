"""What a section of the benchmark works with: bars to fill, a table, the two sides, and how long to measure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import memkit
from benchmarks.process import Worker
from memkit.benchmark import Timing, alternate
from memkit.compiler import native_build
from memkit.specs.errors import KernelError

Size = TypeVar("Size")
NATIVE, TORCH = BACKENDS = ("native", "torch")
LABELS = {NATIVE: "native", TORCH: "torch code"}
SUFFIX = {NATIVE: "", TORCH: ", torch code"}  # behind a name


@dataclass
class Bar:
    """A number to reach. `sense` is >= or <=; `best` is the same number from the fastest run of each side instead of the median."""

    what: str
    sense: str
    bar: float
    unit: str = "x"
    value: float | None = None
    best: float | None = None
    detail: str = ""

    @property
    def reached(self) -> bool | None:
        """None where it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.bar if self.sense == ">=" else self.value <= self.bar

    def fill(self, value: float, best: float | None = None, detail: str = "") -> None:
        """Set what was measured."""
        self.value, self.best, self.detail = value, best, detail

    def faster(self, ours: Timing, theirs: Timing) -> None:
        """Set how many times faster ours is."""
        self.fill(theirs.median / ours.median, theirs.best / ours.best, f"{ms(ours.median)} against {ms(theirs.median)}")


@dataclass
class Section:
    """One part of the benchmark: its bars, a table of all it measured, remarks, and data for the figure."""

    name: str
    title: str = ""
    bars: list[Bar] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    again: bool = False  # measured alone, after the others
    load: float = 0.0  # of the machine when the section began: 0 where nothing else ran

    def bar(self, what: str, sense: str, bar: float, unit: str = "x") -> Bar:
        """A new bar, not measured yet."""
        self.bars.append(Bar(what, sense, bar, unit))
        return self.bars[-1]

    def miss(self, why: str) -> None:
        """Say why bars that have no value have none."""
        self.notes.append(f"Not measured: {why}")
        for bar in self.bars:
            if bar.value is None:
                bar.detail = why

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Section:
        """Back from JSON."""
        return cls(**{**data, "bars": [Bar(**bar) for bar in data["bars"]]})


@dataclass
class Bench:
    """How to measure: sizes and rounds (few of both if `quick`), the two Pythons, and whom to tell."""

    ours_python: str
    peers_python: Callable[[], Path]
    threads: int = 2
    quick: bool = False
    step: Callable[[str], None] = lambda what: None  # called before each measurement

    def size(self, full: Size, quick: Size) -> Size:
        """One of two, by the kind of run."""
        return quick if self.quick else full

    def time(
        self, runs: Mapping[str, Callable[[], float]], least: int = 3, most: int = 15, seconds: float = 5.0, warm: int = 1
    ) -> dict[str, Timing]:
        """Time runs in turns."""
        return alternate(runs, least=2, most=2) if self.quick else alternate(runs, least=least, most=most, seconds=seconds, warm=warm)

    @contextmanager
    def ours(self) -> Iterator[Worker]:
        """A fresh process of memkit's side."""
        with Worker(self.ours_python, self.threads) as worker:
            yield worker

    @contextmanager
    def theirs(self) -> Iterator[Worker]:
        """A fresh process of the peers' side.

        Raises:
            Missing: without their environment.
        """
        with Worker(self.peers_python(), self.threads) as worker:
            yield worker


def backends(spec: str) -> tuple[str, ...]:
    """What a preset is measured with, what its bars are about first: native where its plan and this machine have it, and torch."""
    if native_build.obstacle() is not None:
        return (TORCH,)
    try:
        memkit.compile(spec, key_dim=4, value_dim=4, backend=NATIVE)
    except KernelError:
        return (TORCH,)
    return BACKENDS


def load_average() -> float:
    """Processes that wanted a core in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def differ(ours: list[float], theirs: list[float]) -> float:
    """The largest difference of two outputs, as `Cases.value` gives them, over the largest entry."""
    return max(abs(a - b) for a, b in zip(ours[:-1], theirs[:-1], strict=True)) / max(abs(b) for b in theirs[:-1])


def ms(seconds: float) -> str:
    """Milliseconds with three digits, seconds from 1 s on."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def cell(took: Mapping[str, Timing], name: str) -> str:
    """The median of a run, or a dash where it was not measured."""
    return ms(took[name].median) if name in took else "-"


def mib(size: float) -> str:
    """MiB with three digits."""
    return f"{size / 2**20:,.3g} MiB" if size < 1000 * 2**20 else f"{size / 2**20:,.0f} MiB"
