"""`memkit kernels`: what the emitted kernels need on three GPUs, from the ahead-of-time compiler, and what a token costs there at best."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import memkit
from memkit.benchmark import progress
from memkit.compiler.cost import plan_cost
from memkit.compiler.emit_triton import kernel_module
from memkit.compiler.kernels.settings import TABLE, configs_for
from memkit.compiler.pipeline import CompiledRule, compile_rule
from memkit.compiler.resources import SHARED, SPILL, TYPES, Resources, Work, measure, work
from memkit.compiler.triton_rule import CHUNK_PARALLEL, refusal
from memkit.specs.errors import KernelError

# peaks of dense bfloat16 products and of float32 (FLOP/s), and of memory (bytes/s), from the makers' data sheets
PEAKS = {"sm_80": (312e12, 19.5e12, 2.0e12), "sm_90": (989e12, 67e12, 4.8e12), "gfx942": (1307e12, 163e12, 5.3e12)}


@dataclass(frozen=True)
class Row:
    """One kernel of one preset. found: what it needs; shared with every kernel of the same text."""

    preset: str
    width: int
    plan: str
    work: Work
    found: Resources

    @property
    def fits(self) -> bool:
        return self.found.fits(self.work.target)

    @property
    def order(self) -> tuple[Any, ...]:
        kernel = self.work.kernel
        return self.preset, self.width, list(SHARED).index(self.work.target), "backward" in kernel, kernel


def run(
    presets: Annotated[str, typer.Option(help="Names with commas between them, or all.")] = "all",
    widths: Annotated[str, typer.Option(help="Key and value widths, with commas.")] = "64,128",
    targets: Annotated[str, typer.Option(help="sm_80, sm_90, gfx942.")] = ",".join(SHARED),
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32: the type of sequences.")] = "bf16",
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if a kernel spills or needs too much shared memory.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the table here too, as .md or .json.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Keep what each kernel needs here, a line each, and compile none again: a run cut short goes on.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 1,
) -> int:
    """Compile kernels ahead of time, without a GPU, and print registers, spills, shared memory and roofline times.

    All presets take about half an hour; --presets deltanet --targets sm_90 takes seconds.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise KernelError(
            "TRITON_INTERPRET=1", "a process without it: the interpreter compiles nothing", "unset TRITON_INTERPRET", "kernels"
        )
    _known("targets", targets.split(","), SHARED)
    _known("dtype", [dtype], TYPES)
    names = memkit.presets() if presets == "all" else tuple(presets.split(","))
    console = Console(highlight=False, soft_wrap=True)
    rules, refused = compiled_rules(names, [int(w) for w in widths.split(",")])
    for line in refused:
        console.print(line, markup=False)
    wanted = [(name, width, rule, w) for name, width, rule in rules for t in targets.split(",") for w in works(rule, t, dtype)]
    console.print(f"{len(wanted)} kernels; fewer with --presets, --widths, --targets")
    rows: list[Row] = []
    for name, width, rule, item, found in measured(wanted, store, jobs, console):
        rows.append(Row(name, width, rule.plan, item, found))
        console.print(text(rows[-1]), markup=False)
    rows.sort(key=lambda r: r.order)
    rooflines = [(name, width, t, roofline(rule, t)) for name, width, rule in rules for t in targets.split(",")]
    if out is not None:
        command = f"memkit kernels --presets {presets} --widths {widths} --targets {targets} --dtype {dtype} --check"
        out.write_text(as_json(rows) if out.suffix == ".json" else markdown(rows, rooflines, refused, command), encoding="utf-8")
    bad = [r for r in rows if not r.fits]
    console.print(f"{len(rows)} kernels, {len(bad)} do not fit" + "".join(f"\n  {text(r)}" for r in bad), markup=False)
    return 1 if check and bad else 0


def _known(option: str, given: Sequence[str], known: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise KernelError(f"--{option} {name}", ", ".join(known), "", "kernels")


# ---- what is compiled


def compiled_rules(names: Sequence[str], widths: Sequence[int]) -> tuple[list[tuple[str, int, CompiledRule]], list[str]]:
    """The rules that have kernels, and a line for each that has none."""
    rules, refused = [], []
    for name, width in ((n, w) for n in names for w in widths):
        rule = compile_rule(memkit.spec(name), width, width, backend="torch")
        why = refusal(rule.compiled)
        if why:
            refused.append(f"{name} {width}: no kernels: {why}")
        else:
            rules.append((name, width, rule))
    return rules, refused


def works(rule: CompiledRule, target: str, dtype: str) -> list[Work]:
    """Every kernel of a training step of one rule, under the shipped configuration."""
    compiled, plan = rule.compiled, rule.plan
    graphs = {n: s.last for n, s in compiled.graphs.items()}
    configs = configs_for(plan, target, dtype == "fp32", max(compiled.equations.sizes.values()), compiled.chunk)
    module = kernel_module(compiled.equations, plan, rule.spec.name, graphs, compiled.chunk, configs, plan in CHUNK_PARALLEL)
    first = "chunks" if "chunks" in module.functions else "resume"
    return work(module, (f"{first}_saving", f"{first}_backward"), target, dtype)


Wanted = tuple[str, int, CompiledRule, Work]


def measured(
    wanted: Sequence[Wanted], store: Path | None, jobs: int, console: Console
) -> Iterator[tuple[str, int, CompiledRule, Work, Resources]]:
    """Every kernel with what it needs, as it gets known; those of one text are compiled once, and none that the store has."""
    known = read_store(store)
    users: dict[str, list[Wanted]] = {}
    for entry in wanted:
        users.setdefault(entry[3].key, []).append(entry)
    for key in [k for k in users if k in known]:
        yield from ((*entry, known[key]) for entry in users.pop(key))
    with results([entries[0][3] for entries in users.values()], jobs) as found, progress(console) as bar:
        task = bar.add_task("", total=len(users), visible=console.is_terminal)
        for item, needs in found:
            if store is not None:
                with store.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": item.key, "kernel": item.kernel, "target": item.target, **asdict(needs)}) + "\n")
            bar.update(task, advance=1, description=f"{users[item.key][0][0]} {item.target} {item.kernel}")
            yield from ((*entry, needs) for entry in users[item.key])


def read_store(store: Path | None) -> dict[str, Resources]:
    """What an earlier run found; a line cut short by an interruption is passed over."""
    found: dict[str, Resources] = {}
    for line in store.read_text(encoding="utf-8").splitlines() if store is not None and store.exists() else ():
        try:
            row = json.loads(line)
            found[row["key"]] = Resources(row["registers"], row["spill"], row["shared"], row["seconds"])
        except (ValueError, KeyError):
            continue
    return found


@contextmanager
def results(items: Sequence[Work], jobs: int) -> Iterator[Iterator[tuple[Work, Resources]]]:
    """Kernels with what they need as they are compiled: in this process one after another, or in several, the longest first."""
    if jobs == 1:
        yield ((item, measure(item)) for item in items)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(measure, item): item for item in sorted(items, key=lambda w: -len(w.text))}
        try:
            yield ((futures[done], done.result()) for done in as_completed(futures))
        finally:
            pool.shutdown(cancel_futures=True)


def roofline(rule: CompiledRule, target: str) -> dict[str, float]:
    """FLOPs a token and head, FLOPs a byte of inputs and outputs, and the least time a token can take on the target."""
    compiled = rule.compiled
    cost = plan_cost(compiled.equations, {n: s.last for n, s in compiled.graphs.items()}, compiled.chunk)
    flops = cost.token.flops
    moved = 2.0 * (2 * rule.key_dim + 2 * rule.value_dim) + 4.0 * len(rule.gates)
    narrow, single, bandwidth = PEAKS[target]
    peak = single if TABLE[rule.plan, target].loop.exact else narrow
    return {"flops": flops, "intensity": flops / moved, "nanoseconds": 1e9 * max(flops / peak, moved / bandwidth)}


# ---- what is written


def text(row: Row) -> str:
    """One row as text."""
    need, item = row.found, row.work
    head = f"{row.preset:<17} {row.width:>4} {item.target:<7} {item.kernel:<20} {tiles(item):<26}"
    body = f"registers {need.registers:>3}  spill {need.spill:>4}  shared {need.shared:>6}  {need.seconds:6.1f} s to compile"
    return f"{head} {body}{'' if row.fits else '  DOES NOT FIT'}"


def tiles(item: Work) -> str:
    """A configuration in short: rows x columns x how much of a sum at once, warps, values and sums in one loop over tiles."""
    c = item.config
    cap = f", cap {c.registers}" if c.registers else ""
    return f"{c.rows}x{c.cols}x{c.inner}, {c.warps} warps, {c.roots}/{c.sums}{cap}"


def as_json(rows: Sequence[Row]) -> str:
    parts = [
        {"preset": r.preset, "width": r.width, "plan": r.plan, "kernel": r.work.kernel, "target": r.work.target, "dtype": r.work.dtype,
         **asdict(r.found), "fits": r.fits, "config": asdict(r.work.config)}
        for r in rows
    ]  # fmt: skip
    return json.dumps(parts, indent=1) + "\n"


def markdown(rows: Sequence[Row], rooflines: Sequence[tuple[str, int, str, dict[str, float]]], refused: Sequence[str], command: str) -> str:
    """docs/kernels.md: what was compiled and whether it fits, every kernel, and the least time of a token."""
    parts = [
        "# Resources of the kernels", "", _summary(rows, command), "", *(f"- {line}" for line in refused), "",
        "tiles: rows x columns of a tile of results x entries of a sum loaded at once; values/sums: the most made in one loop over tiles;",
        "cap: the registers a thread that the compiler is told to use up to. spill: bytes a thread.", "",
        *_table(
            ("preset", "K = V", "target", "plan", "kernel", "tiles", "warps", "values/sums", "cap", "registers", "spill", "shared B",
             "compile s", ""),
            [_cells(r) for r in rows],
        ),
        "", "## The least time of a token", "",
        "Of one head, by the makers' peaks of dense bfloat16 products (under `orthogonal` of float32) and of memory: nothing measured.", "",
        *_table(("preset", "K = V", "target", "FLOP/token", "FLOP/byte", "ns/token"), [(n, w, t, *x.values()) for n, w, t, x in rooflines]),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _summary(rows: Sequence[Row], command: str) -> str:
    import triton

    counts = []
    for target in dict.fromkeys(r.work.target for r in rows):
        own = [r for r in rows if r.work.target == target]
        worst = max(r.found.spill for r in own)
        gate = f"at most {SPILL[target]} bytes spilled" if SPILL[target] else "no spill"
        counts.append(
            f"{target} ({gate}, {SHARED[target] // 1024} KiB shared): {sum(r.fits for r in own)} of {len(own)} fit, most spilled {worst}"
        )
    types = ", ".join(dict.fromkeys(r.work.dtype for r in rows))
    return (
        f"`{command}`: the kernels of a training step of every preset that has any, {types} sequences, compiled ahead of time by Triton "
        f"{triton.__version__} without a GPU; none has run on one. " + "; ".join(counts) + "."
    )


def _cells(row: Row) -> tuple[Any, ...]:
    c, need = row.work.config, row.found
    return (
        row.preset, row.width, row.work.target, row.plan, row.work.kernel, f"{c.rows}x{c.cols}x{c.inner}", c.warps, f"{c.roots}/{c.sums}",
        c.registers or "", need.registers, need.spill, need.shared, need.seconds, "" if row.fits else "does not fit",
    )  # fmt: skip


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [_line(heads), "|" + "---|" * len(heads), *map(_line, rows)]


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(f'{c:.3g}' if isinstance(c, float) else str(c) for c in cells)} |"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    raise SystemExit(app(standalone_mode=False))
