"""`memkit kernels`: what the emitted kernels need on three GPUs, from the ahead-of-time compiler, and what a token costs there at best."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import memkit
from memkit.compiler.cost import plan_cost
from memkit.compiler.emit_triton import kernel_module
from memkit.compiler.kernels.settings import configs_for
from memkit.compiler.pipeline import CompiledRule, compile_rule
from memkit.compiler.resources import SHARED, Resources, measure
from memkit.compiler.triton_rule import CHUNK_PARALLEL, refusal
from memkit.specs.errors import KernelError

# peak of dense bfloat16 products (FLOP/s) and of memory (bytes/s), from the makers' data sheets
PEAKS = {"sm_80": (312e12, 2.0e12), "sm_90": (989e12, 4.8e12), "gfx942": (1307e12, 5.3e12)}
WIDTHS = (64, 128)


def run(
    presets: Annotated[str, typer.Option(help="Names with commas between them, or all.")] = "all",
    widths: Annotated[str, typer.Option(help="Key and value widths, with commas.")] = "64,128",
    targets: Annotated[str, typer.Option(help="sm_80, sm_90, gfx942.")] = ",".join(SHARED),
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32: the type of sequences.")] = "bf16",
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if a kernel spills or needs too much shared memory.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the table here too, as .md or .json.")] = None,
) -> int:
    """Compile every kernel ahead of time, without a GPU, and print registers, spills, shared memory and roofline times."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise KernelError(
            "TRITON_INTERPRET=1", "a process without it: the interpreter compiles nothing", "unset TRITON_INTERPRET", "kernels"
        )
    names = memkit.presets() if presets == "all" else tuple(presets.split(","))
    rows: list[dict[str, Any]] = []
    for name, width, target in ((n, int(w), t) for n in names for w in widths.split(",") for t in targets.split(",")):
        rule = compile_rule(memkit.spec(name), width, width, backend="torch")
        why = refusal(rule.compiled)
        if why:
            typer.echo(f"{name} {width}: no kernels: {why}")
            continue
        for found in resources(rule, target, dtype):
            rows.append({"preset": name, "width": width, "dtype": dtype, **asdict(found), "fits": found.fits, **roofline(rule, target)})
            typer.echo(line(rows[-1]))
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) if out.suffix == ".json" else markdown(rows), encoding="utf-8")
    bad = [r for r in rows if not r["fits"]]
    typer.echo(f"{len(rows)} kernels, {len(bad)} do not fit" + "".join(f"\n  {line(r)}" for r in bad))
    return 1 if check and bad else 0


def resources(rule: CompiledRule, target: str, dtype: str) -> Iterator[Resources]:
    """Every kernel of a training step of one rule, under the shipped configuration."""
    compiled, plan = rule.compiled, rule.plan
    graphs = {n: s.last for n, s in compiled.graphs.items()}
    configs = configs_for(plan, target, dtype == "fp32", max(compiled.equations.sizes.values()))
    module = kernel_module(compiled.equations, plan, rule.spec.name, graphs, compiled.chunk, configs, plan in CHUNK_PARALLEL)
    first = "chunks" if "chunks" in module.functions else "resume"
    yield from measure(module, (f"{first}_saving", f"{first}_backward"), target, dtype)


def roofline(rule: CompiledRule, target: str) -> dict[str, float]:
    """FLOPs a token and head, FLOPs a byte of inputs and outputs, and the least time a token can take on the target."""
    compiled = rule.compiled
    cost = plan_cost(compiled.equations, {n: s.last for n, s in compiled.graphs.items()}, compiled.chunk)
    flops = cost.token.flops
    moved = 2.0 * (2 * rule.key_dim + 2 * rule.value_dim) + 4.0 * len(rule.gates)
    peak, bandwidth = PEAKS[target]
    return {"flops": flops, "intensity": flops / moved, "nanoseconds": 1e9 * max(flops / peak, moved / bandwidth)}


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    head = f"{row['preset']:<17} {row['width']:>4} {row['target']:<7} {row['kernel']:<20}"
    body = f"registers {row['registers']:>3}  spill {row['spill']:>4}  shared {row['shared']:>6}  {row['seconds']:5.1f} s to compile"
    return f"{head} {body}{'' if row['fits'] else '  DOES NOT FIT'}"


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/kernels.md."""
    heads = (
        "preset",
        "K = V",
        "target",
        "kernel",
        "registers",
        "spill B/thread",
        "shared B",
        "compile s",
        "FLOP/token",
        "FLOP/byte",
        "roofline ns/token",
    )
    keys = ("preset", "width", "target", "kernel", "registers", "spill", "shared", "seconds", "flops", "intensity", "nanoseconds")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(_cell(row[k]) for k in keys)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
