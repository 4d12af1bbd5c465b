"""`memkit doctor`: what is installed, and whether every preset computes here what its oracle says; the exit code is 1 if not."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from memkit.specs.errors import KernelError, MemkitError
from memkit.specs.io import load_spec, presets
from memkit.specs.layer import LayerSpec

PACKAGES = ("torch", "triton", "numpy", "pydantic", "networkx", "graphviz", "einops")
TOKENS = 9
TOLERANCE = 1e-8  # float64
SLACK = 4.0  # in float32: times the oracle's own error in float32


@dataclass(frozen=True)
class Check:
    """One preset on one device: its plan, the largest errors of values and gradients, and what to do where they are too large."""

    preset: str
    device: str
    plan: str
    values: float
    gradients: float
    ok: bool
    remedy: str = ""


def run(only: Annotated[str, typer.Option(metavar="PRESETS", help="Presets with commas between them; all unless given.")] = "") -> int:
    """Check this machine."""
    from rich.console import Console

    console, begun = Console(), time.perf_counter()
    names = [n.strip() for n in only.split(",") if n.strip()] or list(presets())
    console.print(_versions())
    checks = [check for device in devices() for check in checked(names, device)]
    console.print(_table(checks))
    count, broken = _reductions(names)
    console.print(f"{count - len(broken)} of {count} known equivalences of these presets proved", markup=False)
    for line in broken:
        console.print(line, style="red", markup=False)
    bad = [c for c in checks if not c.ok]
    for c in bad:
        console.print(f"{c.preset} on {c.device}: {c.remedy}", style="red", markup=False)
    verdict = (
        "everything agrees"
        if not (bad or broken)
        else f"{len(bad)} of {len(checks)} checks failed, {len(broken)} known equivalences broken"
    )
    console.print(f"{verdict} ({time.perf_counter() - begun:.0f} s)", markup=False)
    return 1 if bad or broken else 0


def devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def small(name: str) -> LayerSpec:
    """A preset with chunks and windows that a few tokens cross, and a narrow net."""
    spec = load_spec(name)
    cut: dict[str, object] = {"update.chunk_size": 4}
    if spec.window.size > 1:
        cut["window.size"] = 3
    if "expansion" in type(spec.memory).model_fields:
        cut["memory.expansion"] = 2
    return load_spec(spec, cut)


def checked(names: Sequence[str], device: str) -> Iterator[Check]:
    """The presets one after another; what raises is a failed check."""
    for name in names:
        spec = small(name)
        try:
            yield _check(name, spec, device, "auto")
        except MemkitError as error:
            yield Check(name, device, "-", float("inf"), float("inf"), False, f"{error}")


def _check(name: str, spec: LayerSpec, device: str, plan: str) -> Check:
    values, gradients, used = errors(spec, device, plan)
    ok = max(values, gradients) <= 1.0
    unit = TOLERANCE if device == "cpu" else 1.0
    return Check(name, device, used, values * unit, gradients * unit, ok, "" if ok else _remedy(spec, device, used))


def errors(spec: LayerSpec, device: str, plan: str = "auto", backend: str = "auto") -> tuple[float, float, str]:
    """The largest errors of values and of gradients, over what is allowed, and the plan that ran.

    On the CPU in float64 against the oracle; on a GPU in float32 against the float64 oracle, allowed SLACK times the float32 oracle's
    own error.
    """
    import torch

    from memkit.compiler.pipeline import compile_rule
    from memkit.inputs import distance, draw, values_and_gradients
    from memkit.specs.reference import ReferenceRule

    width = 4 if device == "cpu" else 16
    rule, oracle = compile_rule(spec, width, width, plan=plan, backend=backend), ReferenceRule(spec, width, width)
    inputs = draw(oracle, 1, TOKENS, 2)
    want = values_and_gradients(oracle, inputs)
    if device == "cpu":
        got = values_and_gradients(rule, inputs)
        found = {n: distance(got[n], want[n]) / TOLERANCE for n in want}
    else:
        narrow = values_and_gradients(oracle, inputs.map(lambda t: t.float()))
        got = values_and_gradients(rule, inputs.map(lambda t: t.float().to(device)))
        allowed = {n: SLACK * distance(narrow[n].double(), want[n]) + 32 * torch.finfo(torch.float32).eps for n in want}
        found = {n: distance(got[n].cpu().double(), want[n]) / allowed[n] for n in want}
    return (
        max(e for n, e in found.items() if not n.startswith("grad.")),
        max(e for n, e in found.items() if n.startswith("grad.")),
        rule.plan,
    )


def _remedy(spec: LayerSpec, device: str, plan: str) -> str:
    """A way that does agree here, tried in order: another backend, the plan `scan`, the oracle itself."""
    for backend, other in (("torch", "auto"), ("torch", "scan")):
        if device == "cpu" and other == "auto":
            continue
        try:
            values, gradients, _ = errors(spec, device, other, backend)
        except MemkitError:
            continue
        if max(values, gradients) <= 1.0:
            chosen = 'backend="torch"' + (f', plan="{other}"' if other != "auto" else "")
            return f"plan {plan} is wrong here; until it is mended use memkit.compile(..., {chosen}), which agrees with the oracle"
    return f"plan {plan} is wrong here; until it is mended use memkit.reference(...), slow and right"


def _reductions(names: Sequence[str]) -> tuple[int, list[str]]:
    """How many known equivalences there are, and those that no longer hold: a preset, or a kind it uses, does not say what it said."""
    from memkit.equivalence import prove
    from memkit.equivalence_table import EQUAL
    from memkit.given import sides

    broken = []
    rows = [row for row in EQUAL if row.answer == "structural" and row.presets() & set(names)]
    for row in rows:
        try:
            held = prove(*sides(row.a, row.b, row.given)) is not None
        except MemkitError:
            held = False
        if not held:
            broken.append(f"no longer proved: {row.name()}; `memkit equiv` shows where they differ: a kind or a preset file was changed")
    return len(rows), broken


def _versions() -> object:
    from rich.table import Table

    table = Table("what", "version", box=None, pad_edge=False)
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("memkit-layers", *PACKAGES):
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    for what, said in _machine():
        table.add_row(what, said)
    return table


def _machine() -> Iterator[tuple[str, str]]:
    """Devices, backends and the program that draws."""
    import torch

    from memkit.compiler.native_build import compiler, obstacle
    from memkit.compiler.pipeline import compile_rule
    from memkit.drawing_dot import program

    cuda = torch.cuda.is_available()
    yield (
        "device",
        f"{torch.cuda.get_device_name(0)} and {torch.get_num_threads()} CPU threads" if cuda else f"CPU, {torch.get_num_threads()} threads",
    )
    for backend in ("torch", "triton"):
        try:
            compile_rule(load_spec("deltanet"), 16, 16, backend=backend)
            yield f"backend {backend}", "yes"
        except KernelError as error:
            yield f"backend {backend}", f"no: {error.got}, expected {error.expected}"
    why = obstacle()
    yield "backend native", f"no: {why}" if why else f"yes, compiled by {shlex.join(compiler() or ())}"
    yield "drawings", f"{program('svg')}" if program("svg") else ".dot, and .html of one view, only: no Graphviz program"


def _table(checks: Sequence[Check]) -> object:
    from rich.table import Table

    table = Table("preset", "device", "plan", "values", "gradients", "", box=None, pad_edge=False)
    for c in checks:
        table.add_row(
            c.preset, c.device, c.plan, f"{c.values:.1e}", f"{c.gradients:.1e}", "ok" if c.ok else "WRONG", style="" if c.ok else "red"
        )
    return table
