"""One run on a GPU: kernels against the token loop, then the bars, then time and memory over lengths next to torch, attention and fla.

    python -m benchmarks.gpu                   about 8 minutes on one H200; writes docs/gpu_benchmarks.{json,md,png}
    TRITON_INTERPRET=1 python -m benchmarks.gpu --quick --presets deltanet     no GPU: tiny sizes, to see that it works

Kernels are compiled first, by many processes at once. What the time does not suffice for is left out, and the page says so.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from rich.console import Console

import memkit
from benchmarks import gpu_cases, gpu_report
from benchmarks.bench import Bar
from benchmarks.gpu_cases import Missing, Plan, Run
from memkit.benchmark import progress
from memkit.compiler.cost import plan_cost
from memkit.compiler.launch import interpreted
from memkit.specs.errors import KernelError, MemkitError

FIRST = ("deltanet", "gated_deltanet", "titans", "omeganet", "atlas", "linear_attention")  # what bars are about is compiled first
WARM = 0.45  # share of the time after which no compilation is started
Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every check held; 1 if one did not."""
    options = parsed(arguments)
    if not torch.cuda.is_available() and not (options.quick and interpreted()):
        raise KernelError("torch sees no GPU", "a CUDA or ROCm device", "python benchmarks/cpu.py measures on the CPU", "benchmarks.gpu")
    plan, console, started = Plan.of(options.quick), Console(highlight=False, soft_wrap=True), time.monotonic()
    end = started + 60 * options.minutes
    names = memkit.presets() if options.presets == "all" else options.presets.split(",")
    names = sorted(names, key=lambda n: (n not in FIRST, FIRST.index(n) if n in FIRST else 0))
    device = torch.cuda.get_device_name() if plan.device == "cuda" else "no GPU: triton's interpreter"
    result: dict[str, Any] = {"device": device, "torch": torch.__version__, "quick": options.quick, "checks": [], "bars": [], "times": []}
    with progress(console) as bar:
        for title, rows, total in stages(plan, names, options, started, end):
            task = bar.add_task(title, total=total)
            for row in rows:
                result[title].append(row)
                bar.advance(task)
            bar.remove_task(task)
            gpu_report.save(options.out, result)
    bad = [row for row in result["checks"] if not row["ok"]]
    console.print(gpu_report.summary(result), f"{time.monotonic() - started:.0f} s, {options.out}")
    return int(bool(bad))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no measurement after this long (8)")
    parser.add_argument("--presets", default="all", help="names with commas between them (all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one bar each, to see that it works")
    parser.add_argument("--out", type=Path, help="folder to write into (docs; with --quick runs/gpu)")
    options = parser.parse_args(arguments)
    options.out = options.out or ROOT / ("runs/gpu" if options.quick else "docs")
    unknown = [] if options.presets == "all" else [n for n in options.presets.split(",") if n not in memkit.presets()]
    if unknown:
        parser.error(f"no preset {unknown[0]!r}; there are {', '.join(memkit.presets())}")
    return options


def stages(plan: Plan, names: Sequence[str], options: argparse.Namespace, started: float, end: float) -> Iterator[tuple[str, Any, int]]:
    """(key of the result, rows as they come, how many at most)."""
    without: list[dict[str, Any]] = []
    if plan.device == "cuda":
        without = prepare(plan, names, options.quick, started + WARM * (end - started))
    able = [n for n in names if all(n != row["preset"] for row in without)]
    yield "checks", itertools.chain(without, checks(plan, able, options.quick, end)), len(without) + 2 * len(able)
    yield "bars", bars(plan, able, end), 2 * len(plan.widths) + 4
    yield "times", times(plan, able, end), 2 * len(plan.lengths) * len(plan.widths) * (2 * len(able) + 4)


def prepare(plan: Plan, names: Sequence[str], quick: bool, until: float) -> list[dict[str, Any]]:
    """Compile all kernels in many processes; a row for each preset that has none, or whose kernels failed, as far as that was found."""
    rows: dict[str, dict[str, Any]] = {}
    jobs = [(n, w) for w in plan.widths for n in names]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=spawn) as pool:
        found = {pool.submit(gpu_cases.warm, name, width, quick): name for name, width in jobs}
        try:
            for done in as_completed(found, timeout=max(1.0, until - time.monotonic())):
                name, error = found[done], done.exception()
                if error is not None:  # a compiler, a driver or a process that died: that preset fails, the others go on
                    rows[name] = {"preset": name, "ok": False, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
                elif done.result():
                    rows.setdefault(name, {"preset": name, "ok": True, "refused": done.result()})
        except TimeoutError:
            for job in found:
                job.cancel()
    return list(rows.values())


def checks(plan: Plan, names: Sequence[str], quick: bool, end: float) -> Iterator[dict[str, Any]]:
    """Values and gradients of every preset in both types; in float32 alone under the interpreter, whose bfloat16 products are wrong."""
    types = list(gpu_cases.CHECKED)[: 2 if plan.device == "cuda" else 1]
    for name in names:
        for dtype in types:
            if time.monotonic() > end:
                return
            row = gpu_cases.check(plan, name, dtype, quick)
            yield row
            if "refused" in row:
                break


# ---- bars


def bars(plan: Plan, names: Sequence[str], end: float) -> Iterator[dict[str, Any]]:
    """What the kernels must reach, forward and backward: fla's speed, many times torch's, and a window that costs nothing."""
    for name in ("deltanet", "gated_deltanet"):
        for width in plan.widths:
            tokens = plan.lengths[1]
            bar = Bar(f"{name}, K = V = {width}, T {tokens}, training: time of fla's kernels over ours", ">=", 1.0)
            yield filled(bar, name, names, end, lambda n=name, w=width, t=tokens: _against(plan, n, w, t, fla=True))
    for name, floor in (("titans", 20.0), ("omeganet", 20.0), ("atlas", 5.0)):
        tokens, width = plan.lengths[0], plan.widths[0]
        bar = Bar(f"{name}, K = V = {width}, T {tokens}, training: time of torch's backend over the kernels'", ">=", floor)
        yield filled(bar, name, names, end, lambda n=name, w=width, t=tokens: _against(plan, n, w, t, fla=False))
    bar = Bar(f"omeganet, T {plan.lengths[0]}, training: time with window 16 over window 1", "<=", 1.10)
    yield filled(bar, "omeganet", names, end, lambda: _windows(plan))


def filled(bar: Bar, name: str, names: Sequence[str], end: float, measure: Callable[[], tuple[float, float]]) -> dict[str, Any]:
    """A bar with its two times, or with why it has none."""
    try:
        if name not in names or time.monotonic() > end:
            raise Missing("no kernels" if name not in names else "out of time")
        above, below = measure()
        bar.fill(above / below, detail=f"{above:.3g} ms against {below:.3g} ms")
    except (Missing, MemkitError) as why:
        bar.detail = f"not measured: {str(why).splitlines()[0]}"
    return vars(bar) | {"reached": bar.reached}


def _against(plan: Plan, name: str, width: int, tokens: int, fla: bool) -> tuple[float, float]:
    batch = max(1, plan.tokens // tokens) if fla else 1
    other = gpu_cases.fla(plan, name, width, batch, tokens) if fla else _rule(plan, name, width, batch, tokens, "torch")
    return _time(plan, other), _time(plan, _rule(plan, name, width, batch, tokens, "triton"))


def _windows(plan: Plan) -> tuple[float, float]:
    tokens, width = plan.lengths[0], plan.widths[0]
    return _time(plan, _rule(plan, "omeganet", width, 1, tokens, "triton", {"window.size": 16})), _time(
        plan, _rule(plan, "omeganet", width, 1, tokens, "triton", {"window.size": 1})
    )


def _rule(plan: Plan, name: str, width: int, batch: int, tokens: int, backend: str, changes: dict[str, Any] | None = None) -> Run:
    rule = memkit.compile(name, key_dim=width, value_dim=width, backend=backend, overrides=changes)
    return gpu_cases.runner(plan, rule, batch, tokens)


def _time(plan: Plan, run: Run) -> float:
    found = gpu_cases.measured(plan, run, True)
    if "error" in found:
        raise Missing(found["error"])
    return found["ms"]


# ---- curves


def times(plan: Plan, names: Sequence[str], end: float) -> Iterator[dict[str, Any]]:
    """Every preset and peer over lengths, forward and with backward, until the time is up."""
    for tokens in plan.lengths:
        batch = max(1, plan.tokens // tokens)
        for width in plan.widths:
            moved = 2.0 * 4 * width * batch * tokens * plan.heads  # bytes of q, k, v and y
            for who, make, flops in runners(plan, names, width, batch, tokens):
                if time.monotonic() > end:
                    return
                try:
                    run = make()
                except (Missing, MemkitError):
                    continue
                for train in (False, True):
                    found = gpu_cases.measured(plan, run, train)
                    if "ms" in found:
                        passes = 3 if train else 1
                        found |= {"tflops": passes * flops / found["ms"] / 1e9, "gb_s": passes * moved / found["ms"] / 1e6}
                    yield {"who": who, "width": width, "batch": batch, "tokens": tokens, "train": train, **found}
                if plan.device == "cuda":
                    torch.cuda.empty_cache()


def runners(plan: Plan, names: Sequence[str], width: int, batch: int, tokens: int) -> Iterator[tuple[str, Callable[[], Run], float]]:
    """(name, how to make a run, FLOPs of a forward pass); torch's backend at the shorter lengths only."""
    yield "softmax attention", lambda: gpu_cases.attention(plan, width, batch, tokens), 2.0 * batch * plan.heads * tokens**2 * width
    for name in names:
        compiled = memkit.compile(name, key_dim=width, value_dim=width, backend="torch").compiled
        cost = plan_cost(compiled.equations, {n: s.last for n, s in compiled.graphs.items()}, compiled.chunk)
        flops = cost.at(tokens).flops * batch * tokens * plan.heads
        if name in ("linear_attention", "deltanet", "gated_deltanet"):
            yield f"{name} fla", lambda n=name: gpu_cases.fla(plan, n, width, batch, tokens), flops
        yield f"{name} triton", lambda n=name: _rule(plan, n, width, batch, tokens, "triton"), flops
        if tokens <= plan.lengths[1]:
            yield f"{name} torch", lambda n=name: _rule(plan, n, width, batch, tokens, "torch"), flops


if __name__ == "__main__":
    sys.exit(main())
