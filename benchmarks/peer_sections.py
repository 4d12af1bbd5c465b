"""The sections that need peers: titans in time and memory, the gated delta rule, fla's naive functions."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.bench import BACKENDS, LABELS, NATIVE, Bench, Section, backends, cell, differ, mib, ms
from benchmarks.process import Missing, Worker

# (width, chunk, tokens), (bar against batch_size = chunk size, bar against the default)
TITANS = (((64, 64, 1024), (5.0, 1.5)), ((128, 16, 4096), (20.0, 8.0)))
SMALL = ((16, 8, 64), (16, 4, 128))
DELTA, SMALL_DELTA = (4096, 8, 64), (256, 2, 16)  # tokens, heads, width
NAIVE = {
    "deltanet": ("delta_rule", "chunkwise"),
    "gated_deltanet": ("gated_delta_rule", "chunk form"),
    "retnet": ("simple_gla", "chunk form"),
    "gla": ("gla", "loop over tokens"),
}


def titans(b: Bench, s: Section) -> None:
    """titans against titans-pytorch, forward + backward, x to y with projections and gates on both sides."""
    s.title = "titans against titans-pytorch's NeuralMemory, forward + backward"
    labels = [LABELS[n] for n in BACKENDS]
    s.columns = ["width, chunk, tokens", *(f"memkit, {label}" for label in labels), "batch_size = chunk_size", "default"]
    s.columns += [*(f"forward, {label}" for label in labels), "products alone"]
    sizes = [(b.size(full, small), floors) for (full, floors), small in zip(TITANS, SMALL)]
    bars = []
    for (d, C, T), (same, default) in sizes:
        what = f"titans, d {d}, C {C}, T {T}"
        exact = s.bar(f"{what}: faster than titans-pytorch, same semantics", ">=", same)
        bars.append((exact, s.bar(f"{what}: faster than its default", ">=", default)))
    names = backends("titans")
    with b.theirs() as theirs, b.ours() as ours:
        yard = ours.load("bmm", "ours", "bmm")["flops"]
        for ((d, C, T), _), (same, default) in zip(sizes, bars):
            b.step(f"titans d {d} C {C} T {T}")
            args: dict[str, Any] = {"T": T, "d": d, "C": C}
            needed = [ours.load(n, "ours", "titans", backend=n, **args)["needed"] for n in names][-1]
            theirs.load("same", "peer_titans", "memory", batched=True, **args)
            theirs.load("default", "peer_titans", "memory", batched=False, **args)
            took = b.time({n: ours.runner(n) for n in names} | {n: theirs.runner(n) for n in ("same", "default")}, seconds=8)
            alone = b.time({n: ours.runner(n, "forward") for n in names} | {"bmm": ours.runner("bmm")}, seconds=2)
            same.faster(took[names[0]], took["same"])
            default.faster(took[names[0]], took["default"])
            times = [*(cell(took, n) for n in (*BACKENDS, "same", "default")), *(cell(alone, n) for n in BACKENDS)]
            s.rows.append([f"{d}, {C}, {T}", *times, ms(needed * alone["bmm"].median / yard)])
    s.notes += [*TITANS_NOTES, *compiling(b, *sizes[0][0][:2])]


TITANS_NOTES = (
    "One head, hidden width 2 d, momentum, decay, no residual. Both sides take x [1, T, d] through a norm, three projections and the "
    "gates' projections to y, and give the gradients of x and of all parameters. memkit's gates differ at every token; there, decay "
    "and momentum are one a chunk. The biases of both are such that 99.9 % of the memory outlast a chunk, and the largest "
    "step is the same.",
    "batch_size = chunk_size takes each gradient at the chunk's start, as memkit does. The default takes all of them at the first "
    "weights: a weaker function, without the loop over chunks.",
    "The last column is what the matrix products that memkit's forward and backward need would take alone, at the rate of torch.bmm on "
    "[512, 64, 64] in this run.",
)


def compiling(b: Bench, d: int, C: int) -> list[str]:
    """A note on how long the C++ compiler takes, in a process that finds nothing compiled."""
    if NATIVE not in backends("titans"):
        return []
    b.step("compiling titans")
    with b.ours() as worker:
        seconds = worker.load("first", "ours", "first_call", d=d, C=C)["seconds"]
    return [
        f"Native code is compiled once and kept on disk: the first forward + backward of d {d}, C {C} took {seconds:.1f} s, almost all of "
        "it in the C++ compiler. No other time on this page has compiling in it."
    ]


def memory(b: Bench, s: Section) -> None:
    """Peak memory of the larger titans case, over imports, in fresh processes."""
    d, C, T = b.size(TITANS[1][0], SMALL[1])
    s.title = f"Peak memory of titans over imports, d {d}, C {C}, T {T}, forward + backward"
    s.columns = ["side", "median", "of fresh processes"]
    bar = s.bar(f"titans, d {d}, C {C}, T {T}: less peak memory than titans-pytorch, same semantics", ">=", 10)
    sides = {f"memkit, {LABELS[n]}": (b.ours, "ours", "titans", {"backend": n}) for n in backends("titans")}
    sides["titans-pytorch, batch_size = chunk_size"] = (b.theirs, "peer_titans", "memory", {"batched": True})
    held: dict[str, list[int]] = {name: [] for name in sides}
    for _ in range(b.size(3, 1)):
        b.step("memory of titans")
        for name, (side, module, case, more) in sides.items():
            with side() as worker:
                held[name].append(over_imports(worker, module, case, T=T, d=d, C=C, **more))
    first, last = (list(held.values())[i] for i in (0, -1))
    ours, theirs = statistics.median(first), statistics.median(last)
    bar.fill(theirs / ours, min(last) / min(first), f"{mib(ours)} against {mib(theirs)}")
    s.rows = [[name, mib(statistics.median(peaks)), ", ".join(map(mib, peaks))] for name, peaks in held.items()]
    s.notes.append(
        "The most memory a process held in two runs, less what it held after imports, torch._dynamo among them: titans-pytorch imports "
        "it, and torch would at memkit's first call. titans-pytorch's differs much from process to process, so there are several; the "
        "least of each side gives `best runs`."
    )


def over_imports(worker: Worker, module: str, case: str, **args: Any) -> int:
    """Bytes of peak memory that a case adds to what its imports hold, over two runs."""
    worker.ask("imports", module=module)
    worker.ask("reset")
    base = worker.ask("peak")
    worker.load("case", module, case, **args)
    for _ in range(2):
        worker.ask("run", key="case", mode="both")
    return max(2**16, worker.ask("peak") - base)


def tiny(worker: Worker, module: str, case: str, mode: str, **args: Any) -> int:
    """Bytes held after a run of one chunk; the peak starts again from there."""
    worker.load("case", module, case, T=args.get("C", 64), **args)
    worker.ask("run", key="case", mode=mode)
    worker.ask("drop")
    worker.ask("reset")
    return worker.ask("peak")


def delta(b: Bench, s: Section) -> None:
    """gated_deltanet against what transformers runs on a CPU."""
    T, H, K = b.size(DELTA, SMALL_DELTA)
    s.title = "gated_deltanet against transformers' torch_chunk_gated_delta_rule, forward + backward"
    sides = [*(f"memkit, {LABELS[n]}" for n in BACKENDS), "transformers"]
    s.columns = ["tokens, heads, width", *sides, *(f"{side}, forward" for side in sides)]
    bar = s.bar(f"gated_deltanet, B 1, T {T}, H {H}, K = V = {K}: faster than transformers' torch chunk form", ">=", 2.5)
    names = backends("gated_deltanet")
    b.step("gated_deltanet")
    with b.theirs() as theirs, b.ours() as ours:
        theirs.load("peer", "peer_delta", "transformers", T=T, H=H, K=K)
        gap = max(agreement(ours, theirs, n, spec="gated_deltanet", T=T, H=H, K=K, backend=n) for n in names)
        took, forward = (
            b.time({n: ours.runner(n, mode) for n in names} | {"peer": theirs.runner("peer", mode)}, seconds=seconds)
            for mode, seconds in (("both", 8), ("forward", 3))
        )
    bar.faster(took[names[0]], took["peer"])
    s.rows.append([f"{T}, {H}, {K}", *(cell(times, n) for times in (took, forward) for n in (*BACKENDS, "peer"))])
    s.notes.append(f"The same inputs on both sides; outputs differ by {gap:.0e} of the largest entry.")


def agreement(ours: Worker, theirs: Worker, key: str, **args: Any) -> float:
    """Load memkit's delta case as `key`; how far its output is from the peer's, over the largest entry.

    Raises:
        Missing: where the two do not compute the same.
    """
    ours.load(key, "ours", "delta", **args)
    gap = differ(ours.ask("value", key=key), theirs.ask("value", key="peer"))
    if not gap <= 1e-3:
        raise Missing(f"the two sides do not compute the same: they differ by {gap:.0e} of the largest entry")
    return gap


def naive(b: Bench, s: Section) -> None:
    """Points of reference: fla's naive functions, which its kernels are tested with."""
    T, H, K = b.size((2048, 4, 64), SMALL_DELTA)
    s.title = f"Against fla's naive functions, T {T}, H {H}, K = V = {K}, forward + backward"
    labels = [LABELS[n] for n in BACKENDS]
    s.columns = ["preset", "fla function", *(f"memkit, {label}" for label in labels), "fla", *(f"ratio, {label}" for label in labels)]
    s.columns.append("outputs differ by")
    with b.theirs() as theirs, b.ours() as ours:
        for spec, (case, form) in NAIVE.items():
            b.step(f"{spec} and fla")
            names = backends(spec)
            theirs.load("peer", "peer_delta", case, T=T, H=H, K=K)
            gap = max(agreement(ours, theirs, n, spec=spec, T=T, H=H, K=K, backend=n) for n in names)
            took = b.time({n: ours.runner(n) for n in names} | {"peer": theirs.runner("peer")}, most=9, seconds=4)
            times = (cell(took, n) for n in (*BACKENDS, "peer"))
            ratios = (f"{took['peer'].median / took[n].median:.1f}x" if n in took else "-" for n in BACKENDS)
            s.rows.append([spec, f"{case}, {form}", *times, *ratios, f"{gap:.0e}"])
    s.notes.append("fla's speed is in its GPU kernels; these functions are what it offers without a GPU.")
