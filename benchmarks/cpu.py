"""The benchmark on a CPU: memkit, as native and as torch code, against titans-pytorch, transformers, fla, its token loop, this machine.

`make bench` sets everything up, runs it all and writes docs/benchmarks.{md,json,png}. `python benchmarks/cpu.py --quick` runs tiny sizes,
to see that it works, and writes into runs/benchmarks. `--only titans` measures one section again and leaves the others as they were.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console

from benchmarks import curves, own_sections, peer_sections, report
from benchmarks.bench import NATIVE, Bench, Section, backends, load_average
from benchmarks.process import Missing, peers_python
from memkit.benchmark import progress

SECTIONS = {
    "titans": peer_sections.titans,
    "memory": peer_sections.memory,
    "delta": peer_sections.delta,
    "window": own_sections.window,
    "lengths": own_sections.lengths,
    "rate": own_sections.rate,
    "loop": own_sections.loop,
    "naive": peer_sections.naive,
    "attention": own_sections.attention,
    "curves": curves.curves,
}


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 if something could not be measured."""
    args = parsed(arguments)
    console = Console(highlight=False, soft_wrap=True)
    names = [name for name in SECTIONS if not args.only or name in args.only]
    out = args.out or ROOT / ("runs/benchmarks" if args.quick else "docs")
    if args.quick:
        os.environ.setdefault("MEMKIT_CXXFLAGS", "-O1")  # compiles in less than half of the time
    bench = Bench(sys.executable, peers(console), threads=args.threads, quick=args.quick)
    if load_average() > 1 and not args.quick:
        console.print(f"[yellow]the load average is {load_average():.1f}: something else is running, and ratios will suffer[/]")
    command = "make bench" if not args.quick else "python benchmarks/cpu.py --quick"
    sections = report.load(out) if args.only else {}
    started = time.perf_counter()
    with progress(console) as bar:
        task = bar.add_task("", total=sum(steps(name, bench) for name in names))
        for name in names:
            sections[name] = measured(name, bench, lambda what: bar.update(task, advance=1, description=what))
            sections[name].again = bool(args.only)
            for found in sections[name].bars:
                console.print("  ".join(report.bar_row(found)[:5]).replace("**", ""))
            for why in (note for note in sections[name].notes if note.startswith("Not measured")):
                console.print(f"[red]{name}: {why}[/]")
            sections = {name: sections[name] for name in SECTIONS if name in sections}
            report.save(out, sections, command, args.threads)  # after every section: a run that is cut short keeps what it has
    console.print(f"{report.summary([bar for s in sections.values() for bar in s.bars])} {time.perf_counter() - started:.0f} s")
    console.print(f"{out}: benchmarks.md, benchmarks.json, benchmarks.png")
    return int(any(bar.value is None for name in names for bar in sections[name].bars))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="memkit against its peers, on a CPU; see docs/benchmarks.md")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), metavar="NAME", help="a section: " + ", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few runs, to see that it works")
    parser.add_argument("--threads", type=int, default=2, help="threads of each process (2)")
    parser.add_argument("--out", type=Path, help="folder to write into (docs; with --quick runs/benchmarks)")
    args = parser.parse_args(arguments)
    if args.threads < 1:
        parser.error("--threads must be at least 1")
    return args


def peers(console: Console):
    """A function that gives the peers' Python, made on first use; a failure is remembered."""

    @cache
    def made() -> Path | Missing:
        try:
            return peers_python(console.print)
        except Missing as why:
            return why

    def python() -> Path:
        found = made()
        if isinstance(found, Missing):
            raise found
        return found

    return python


def measured(name: str, bench: Bench, step) -> Section:
    """One section; what cannot be measured is said in it and stops nothing else."""
    section = Section(name, quick=bench.quick, load=load_average())
    bench.step = step
    try:
        SECTIONS[name](bench, section)
    except Missing as why:
        section.miss(str(why))
    return section


def steps(name: str, bench: Bench) -> int:
    """How many measurements a section makes."""
    if name == "curves":
        lines = sum(len(systems) for systems in curves.families(bench).values())
        return bench.size(5, 2) * len(curves.families(bench)) + lines * len(curves.MODES)
    known = {
        "titans": 2 + (NATIVE in backends("titans")),
        "memory": bench.size(3, 1),
        "window": bench.size(3, 2),
        "naive": len(peer_sections.NAIVE),
        "attention": bench.size(5, 2),
    }
    presets = {"lengths": own_sections.bounded, "loop": own_sections.memkit.presets}
    return len(presets[name]()) if name in presets else known.get(name, 1)


if __name__ == "__main__":
    sys.exit(main())
