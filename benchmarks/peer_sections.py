"""The sections that need peers: titans in time and memory, the gated delta rule, fla's naive functions."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.bench import Bench, Section, differ, mib, ms
from benchmarks.process import Missing, Worker

# (width, chunk, tokens), (bar against batch_size = chunk size, bar against the default)
TITANS = (((64, 64, 1024), (5.0, 1.5)), ((128, 16, 4096), (20.0, 8.0)))
CASES = (("ours", "peer_titans"), ("titans", "memory"))  # modules, cases
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
    s.columns = ["width, chunk, tokens", "memkit", "batch_size = chunk_size", "default", "memkit, forward", "products alone"]
    sizes = [(b.size(full, small), floors) for (full, floors), small in zip(TITANS, SMALL)]
    bars = []
    for (d, C, T), (same, default) in sizes:
        what = f"titans, d {d}, C {C}, T {T}"
        exact = s.bar(f"{what}: faster than titans-pytorch, same semantics", ">=", same)
        bars.append((exact, s.bar(f"{what}: faster than its default", ">=", default)))
    with b.theirs() as theirs, b.ours() as ours:
        yard = ours.load("bmm", "ours", "bmm")["flops"]
        for ((d, C, T), _), (same, default) in zip(sizes, bars):
            b.step(f"titans d {d} C {C} T {T}")
            args: dict[str, Any] = {"T": T, "d": d, "C": C}
            needed = ours.load("memkit", "ours", "titans", **args)["needed"]
            theirs.load("same", "peer_titans", "memory", batched=True, **args)
            theirs.load("default", "peer_titans", "memory", batched=False, **args)
            took = b.time({"memkit": ours.runner("memkit"), **{n: theirs.runner(n) for n in ("same", "default")}}, seconds=8)
            alone = b.time({"forward": ours.runner("memkit", "forward"), "bmm": ours.runner("bmm")}, seconds=2)
            same.faster(took["memkit"], took["same"])
            default.faster(took["memkit"], took["default"])
            least = needed * alone["bmm"].median / yard
            times = [took["memkit"], took["same"], took["default"], alone["forward"]]
            s.rows.append([f"{d}, {C}, {T}", *(ms(t.median) for t in times), ms(least)])
    s.notes += [
        "One head, hidden width 2 d, momentum, decay, no residual. Both sides take x [1, T, d] through a norm, three projections and the "
        "gates' projections to y, and give the gradients of x and of all parameters. memkit's gates differ at every token; there, decay "
        "and momentum are one a chunk.",
        "batch_size = chunk_size takes each gradient at the chunk's start, as memkit does. The default takes all of them at the first "
        "weights: a weaker function, without the loop over chunks.",
        "The last column is what the matrix products that memkit's forward and backward need would take alone, at the rate of torch.bmm on "
        "[512, 64, 64] in this run.",
    ]


def memory(b: Bench, s: Section) -> None:
    """Peak memory of the larger titans case, over imports, in fresh processes."""
    d, C, T = b.size(TITANS[1][0], SMALL[1])
    s.title = f"Peak memory of titans over imports, d {d}, C {C}, T {T}, forward + backward"
    s.columns = ["side", "median", "of fresh processes"]
    bar = s.bar(f"titans, d {d}, C {C}, T {T}: less peak memory than titans-pytorch, same semantics", ">=", 10)
    held: dict[str, list[int]] = {"memkit": [], "titans-pytorch, batch_size = chunk_size": []}
    for _ in range(b.size(3, 1)):
        b.step("memory of titans")
        for side, peaks, module, case, more in zip((b.ours, b.theirs), held.values(), CASES[0], CASES[1], ({}, {"batched": True})):
            with side() as worker:
                peaks.append(over_imports(worker, module, case, T=T, d=d, C=C, **more))
    ours, theirs = (statistics.median(peaks) for peaks in held.values())
    least = [min(peaks) for peaks in held.values()]
    bar.fill(theirs / ours, least[1] / least[0], f"{mib(ours)} against {mib(theirs)}")
    s.rows = [[name, mib(statistics.median(peaks)), ", ".join(map(mib, peaks))] for name, peaks in held.items()]
    s.notes.append(
        "The most memory a process held in two runs, less what it held after imports. titans-pytorch's differs much "
        "from process to process, so there are several; the least of each side gives `best runs`."
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
    s.columns = ["tokens, heads, width", "memkit", "transformers", "memkit, forward", "transformers, forward"]
    bar = s.bar(f"gated_deltanet, B 1, T {T}, H {H}, K = V = {K}: faster than transformers' torch chunk form", ">=", 2.5)
    b.step("gated_deltanet")
    with b.theirs() as theirs, b.ours() as ours:
        ours.load("memkit", "ours", "delta", spec="gated_deltanet", T=T, H=H, K=K)
        theirs.load("peer", "peer_delta", "transformers", T=T, H=H, K=K)
        gap = differ(ours.ask("value", key="memkit"), theirs.ask("value", key="peer"))
        if not gap <= 1e-3:
            raise Missing(f"the two sides do not compute the same: they differ by {gap:.0e} of the largest entry")
        took = b.time({"memkit": ours.runner("memkit"), "peer": theirs.runner("peer")}, seconds=8)
        forward = b.time({"memkit": ours.runner("memkit", "forward"), "peer": theirs.runner("peer", "forward")}, seconds=3)
    bar.faster(took["memkit"], took["peer"])
    s.rows.append([f"{T}, {H}, {K}", *(ms(t["memkit" if i == 0 else "peer"].median) for t in (took, forward) for i in range(2))])
    s.notes.append(f"The same inputs on both sides; outputs differ by {gap:.0e} of the largest entry.")


def naive(b: Bench, s: Section) -> None:
    """Points of reference: fla's naive functions, which its kernels are tested with."""
    T, H, K = b.size((2048, 4, 64), SMALL_DELTA)
    s.title = f"Against fla's naive functions, T {T}, H {H}, K = V = {K}, forward + backward"
    s.columns = ["preset", "fla function", "memkit", "fla", "ratio", "outputs differ by"]
    with b.theirs() as theirs, b.ours() as ours:
        for spec, (case, form) in NAIVE.items():
            b.step(f"{spec} and fla")
            ours.load("memkit", "ours", "delta", spec=spec, T=T, H=H, K=K)
            theirs.load("peer", "peer_delta", case, T=T, H=H, K=K)
            gap = differ(ours.ask("value", key="memkit"), theirs.ask("value", key="peer"))
            took = b.time({"memkit": ours.runner("memkit"), "peer": theirs.runner("peer")}, most=9, seconds=4)
            fast, slow = took["memkit"].median, took["peer"].median
            s.rows.append([spec, f"{case}, {form}", ms(fast), ms(slow), f"{slow / fast:.1f}x", f"{gap:.0e}"])
    s.notes.append("fla's speed is in its GPU kernels; these functions are what it offers without a GPU.")
