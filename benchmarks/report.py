"""What was measured, as JSON and as a page: the bars first, then a table a section, then how it was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.bench import Bar, Section
from benchmarks.curves import figure
from benchmarks.process import PEERS
from memkit.compiler import native_build

COMPARED = ("titans-pytorch", "fla-core", "transformers")
CODE = (
    "memkit has two kinds of code here. *Native code* (backend `native`) is the rule's graphs as C++, compiled by the machine's own "
    "compiler when first called, for every plan but `span` and `scan`; *torch code* (backend `torch`) is the same graphs as torch "
    "operations, for every plan, and what `auto` takes on a CPU."
)
JUDGED = "Bars are about native code where a preset has it and the bar does not say torch code; tables show both."
METHOD = """\
- One run, float32, batch 1. What is compared runs in turns, A B A B, so that both meet the same machine; each ratio is of medians, after
  runs that do not count. `best runs` is the ratio of the least values: far from the
  other in a time, it says that something else held the cores.
- C++ is compiled before anything is timed. Runs of many seconds have none before them that does not count.
- Each side is a process of its own, garbage collected before a run, with as many threads as the machine line says. The peers live in an
  environment of their own, `benchmarks/.venv`, with the versions of `benchmarks/peers.txt`; nothing of theirs is part of memkit.
- Forward + backward gives the gradients of every input. Inputs are drawn: unit keys and queries, retain from 0.999, momentum to 0.9, step
  sizes to 0.002.
- A peer that is given the same inputs must give the same outputs, or the comparison counts as not measured."""


def machine(threads: int) -> str:
    """The machine in general words."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, ValueError, OSError):
        memory = ""
    vector = torch.backends.cpu.get_cpu_capability()
    return f"{cores} cores, {platform.machine()} ({vector}){memory}, {platform.system()}, no GPU used; {threads} threads a process"


def versions() -> dict[str, str]:
    """Version of everything that matters, peers by their pins."""
    pins = dict(line.split("==") for line in PEERS.read_text().splitlines() if "==" in line)
    found = {"Python": platform.python_version()}
    for name, package in (("memkit", "memkit-layers"), ("torch", "torch"), ("numpy", "numpy")):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found | {name: pins[name] for name in COMPARED} | {"C++ compiler": compiler()}


@cache
def compiler() -> str:
    """The first line that the C++ compiler says of itself."""
    named = native_build.compiler()
    if named is None:
        return "none"
    try:
        told = subprocess.run([*named, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told.splitlines()[0] if told.strip() else "unknown"


def code(why_not: str | None) -> str:
    """What is measured of memkit."""
    return f"{CODE} {JUDGED}" if why_not is None else f"{CODE} **No native code was measured: {why_not}. All bars are about torch code.**"


def save(folder: Path, sections: Mapping[str, Section], command: str, threads: int) -> None:
    """Write benchmarks.json, benchmarks.md and, where there are curves, benchmarks.png."""
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"command": command, "machine": machine(threads), "threads": threads, "versions": versions()}
    facts["no_native"] = native_build.obstacle()
    content = {**facts, "sections": {name: s.to_dict() for name, s in sections.items()}}
    (folder / "benchmarks.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "benchmarks.md").write_text(page(facts, sections), encoding="utf-8")
    if "curves" in sections and sections["curves"].data.get("families"):
        figure(sections["curves"].data, folder / "benchmarks.png")


def load(folder: Path) -> dict[str, Section]:
    """The sections of an earlier run in this folder; none if there was none."""
    path = folder / "benchmarks.json"
    if not path.is_file():
        return {}
    return {name: Section.from_dict(s) for name, s in json.loads(path.read_text(encoding="utf-8"))["sections"].items()}


def page(facts: Mapping[str, Any], sections: Mapping[str, Section]) -> str:
    """benchmarks.md."""
    bars = [bar for s in sections.values() for bar in s.bars]
    named = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    parts = ["# Benchmarks", f"`{facts['command']}` measures everything here and writes this page. {summary(bars)}"]
    parts += [f"Machine: {facts['machine']}.  \nVersions: {named}.", code(facts["no_native"])]
    if any(s.quick for s in sections.values()):
        parts.append("**This is a quick run at tiny sizes: it shows that everything runs, and its numbers mean nothing.**")
    again = [s.title for s in sections.values() if s.again]
    if again:
        parts.append("Measured again after the rest: " + "; ".join(again) + ".")
    busy = [f"{n} ({s.load:.1f})" for n, s in sections.items() if s.load > facts["threads"] + 1]
    if busy:
        parts.append(f"**Other work was on the cores (load average) during: {', '.join(busy)}.**")
    parts += ["## Bars", grid(("what", "bar", "measured", "reached", "best runs", "details"), map(bar_row, bars))]
    if "curves" in sections and sections["curves"].data.get("families"):
        parts.append("![Time and peak memory over the length](benchmarks.png)")
    for s in sections.values():
        parts.append(f"## {s.title or s.name}")
        parts += [grid(s.columns, s.rows)] if s.rows else []
        parts += s.notes
    parts += ["## How it is measured", METHOD]
    return "\n\n".join(parts) + "\n"


def summary(bars: list[Bar]) -> str:
    """How many bars are reached."""
    reached, measured = sum(bar.reached is True for bar in bars), sum(bar.reached is not None for bar in bars)
    rest = f"; {len(bars) - measured} not measured" if measured < len(bars) else ""
    return f"{reached} of {measured} bars reached{rest}."


def bar_row(bar: Bar) -> list[str]:
    """A line of the table of bars."""
    answer = {True: "yes", False: "**no**", None: "not measured"}[bar.reached]
    goal, value, best = (number(x, bar.unit) for x in (bar.bar, bar.value, bar.best))
    return [bar.what, f"{bar.sense} {goal}", value, answer, best, bar.detail]


def number(value: float | None, unit: str) -> str:
    """A value with its unit, as many digits as mean something."""
    if value is None:
        return ""
    if unit == "%":
        return f"{value:.3g} %" if value < 10 else f"{value:.0f} %"
    return f"{value:.0f}{unit}" if value >= 100 or not unit else f"{value:.3g}{unit}" if value >= 2 else f"{value:.2f}{unit}"


def grid(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
