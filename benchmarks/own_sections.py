"""The sections that need no peer: windows, lengths, FLOPs a second, the token loop, softmax attention."""

from __future__ import annotations

import math

import memkit
from benchmarks.bench import BACKENDS, LABELS, SUFFIX, TORCH, Bench, Section, backends, cell, ms
from benchmarks.process import Worker
from memkit.benchmark import Timing
from memkit.compiler.passes.delay import LONG as LONGEST

WHOLE = "span"  # the plan that keeps the whole past, by its meaning
SEQUENTIAL = "scan"
SLOW, SHORTER = 4.0, 8  # a preset whose shorter run takes longer than so many seconds is measured at a part of both lengths
LOOP = 2.0  # seconds that one run of the token loop should take
LONG = 1.0  # seconds of a forward from which on a preset is run next to its loop without a run before that does not count
NEAR = 3.0  # times the bar: a preset that is farther above it is timed once


def window(b: Bench, s: Section) -> None:
    """omeganet with a window of 16 tokens against one of 1, same plan."""
    T, K, chunks = b.size((2048, 64, (64, 128, 256)), (64, 8, (16, 32)))
    s.title = f"omeganet, window 16 against window 1, T {T}, H 1, K = V = {K}, forward + backward"
    s.columns = ["chunk", "plan", "code", "window 1", "window 16", "ratio"]
    names = backends("omeganet")
    what = "omeganet{}, chunk {}: time with window 16 over window 1"
    bars = {n: {C: s.bar(what.format(SUFFIX[n], C), "<=", 1.10) for C in chunks} for n in names}
    rows: dict[str, list[list[str]]] = {n: [] for n in names}
    with b.ours() as ours:
        for C in chunks:
            b.step(f"omeganet, chunk {C}")
            cases = {f"{n} {c}": (n, {"update.chunk_size": C, "window.size": c}) for n in names for c in (1, 16)}
            plans = {
                key: ours.load(key, "ours", "rule", spec="omeganet", T=T, H=1, K=K, overrides=size, backend=n)["plan"]
                for key, (n, size) in cases.items()
            }
            for n in names:
                both = f"{n} 1", f"{n} 16"
                one, many = b.time({key: ours.runner(key) for key in both}, least=9, most=41, seconds=12).values()
                used = list(dict.fromkeys((plans[f"{n} 1"], plans[f"{n} 16"])))
                if len(used) == 1:
                    bars[n][C].fill(many.median / one.median, many.best / one.best, f"{ms(many.median)} against {ms(one.median)}")
                ratio = f"{many.median / one.median:.2f}"
                rows[n].append([str(C), ", ".join(used), LABELS[n], ms(one.median), ms(many.median), ratio])
    s.rows = [row for n in names for row in rows[n]]
    s.notes.append(
        "A chunk of C tokens sees C + 15 keys where it saw C, since the window's tokens from before the chunk are taken at the chunk's "
        "start: 23 % more for C = 64, 12 % for 128, 6 % for 256. Torch code evaluates all of them. In native code, "
        f"up to C = {LONGEST * 15}, "
        "what the last 15 add to a wide state waits for the next chunk, and no product with that state takes more than C tokens "
        "(`memkit/compiler/passes/delay.py`)."
    )


def lengths(b: Bench, s: Section) -> None:
    """Time at T 16384 against T 2048, and the bytes of the state at both."""
    short, long = b.size((2048, 16384), (32, 256))
    H, K = b.size((4, 16), (1, 4))
    s.title, s.columns = (
        f"Length: T {long} against T {short}, H {H}, K = V = {K}, forward + backward",
        ["preset", "plan", f"T {short}", f"T {long}", *(f"ratio, {LABELS[n]}" for n in BACKENDS), "state, both lengths"],
    )
    time_bar = s.bar(f"every preset but those on `{WHOLE}`: T {long} over T {short}, the worst", "<=", 8.8)
    state_bar = s.bar("of these, presets whose state grows with T", "<=", 0, "")
    ratios: dict[str, tuple[float, float]] = {}
    grown = []
    with b.ours() as ours:
        for spec in bounded():
            b.step(f"{spec}, T {long}")
            part, took, state = eightfold(b, ours, spec, (short, long), H, K)
            first = next(n for n in BACKENDS if n in took)
            one, eight = took[first]
            ratios[spec] = (eight.median / one.median, eight.best / one.best)
            grown += [spec] if state[0] != state[1] else []
            held = " / ".join(f"{n:,} B" for n in dict.fromkeys(state))
            name = spec if part == 1 else f"{spec}, an {SHORTER}th of both lengths"
            both = (f"{took[n][1].median / took[n][0].median:.2f}" if n in took else "-" for n in BACKENDS)
            s.rows.append([name, plan_of(spec), ms(one.median), ms(eight.median), *both, held])
    worst = max(ratios, key=lambda n: ratios[n][0])
    time_bar.fill(*ratios[worst], detail=f"{worst}; {sum(r <= 8.8 for r, _ in ratios.values())} of {len(ratios)} presets are within it")
    state_bar.fill(len(grown), detail=", ".join(grown) or f"equal bytes for all {len(ratios)} presets")
    s.notes.append("The times are those of native code, where there is one.")


def eightfold(
    b: Bench, ours: Worker, spec: str, tokens: tuple[int, int], H: int, K: int
) -> tuple[int, dict[str, tuple[Timing, Timing]], list[int]]:
    """(part of the two lengths that was measured, backend -> times at both, bytes of state at both).

    Torch code of slow presets runs once and alone: no bar is about it.
    """
    names = backends(spec)
    ours.load("part", "ours", "rule", spec=spec, T=tokens[0] // SHORTER, H=H, K=K)
    part = 1 if ours.runner("part")() * SHORTER < SLOW else SHORTER
    for n in names:
        for T in tokens:
            ours.load(f"{n} {T}", "ours", "rule", spec=spec, T=T // part, H=H, K=K, backend=n)
    runs = {n: {f"{n} {T}": ours.runner(f"{n} {T}") for T in tokens} for n in names}
    if part == 1:
        took = b.time({key: run for own in runs.values() for key, run in own.items()}, seconds=3)
    else:
        took = b.time(runs[names[0]], seconds=2, warm=0)
        took |= b.time(runs[TORCH], least=1, most=1, warm=0) if names[0] != TORCH else {}
    state = [ours.ask("info", key=f"{names[0]} {T}")["state_bytes"] for T in tokens]
    ours.ask("drop")
    return part, {n: (took[f"{n} {tokens[0]}"], took[f"{n} {tokens[1]}"]) for n in names}, state


def rate(b: Bench, s: Section) -> None:
    """titans' FLOPs a second as a share of this machine's own for batched 64 x 64 products."""
    T, H, K, E, C = b.size((8192, 8, 64, 256, 64), (64, 1, 8, 16, 8))
    s.title = f"titans, T {T}, H {H}, K = V = {K}, E = {E}, C {C}, forward + backward: share of the rate of torch.bmm [512, 64, 64]"
    s.columns = ["what", "GFLOP", "time", "GFLOP/s", "share of bmm"]
    bar = s.bar(f"titans, T {T}, H {H}, K = V = {K}, E {E}: counted FLOPs over time, share of the bmm rate", ">=", 40, "%")
    names = backends("titans")
    b.step("FLOPs a second")
    with b.ours() as ours:
        yard = ours.load("bmm", "ours", "bmm")["flops"]
        info = {n: ours.load(n, "ours", "share", T=T, H=H, K=K, E=E, C=C, backend=n) for n in names}
        took = b.time({n: ours.runner(n) for n in (*names, "bmm")}, least=5, seconds=15)
    layer, bmm, needed = took[names[0]], took["bmm"], info[TORCH]["needed"]
    top, best = yard / bmm.median, yard / bmm.best
    detail = f"{needed / layer.median / 1e9:.1f} of {top / 1e9:.1f} GFLOP/s"
    bar.fill(100 * needed / layer.median / top, 100 * needed / layer.best / best, detail)
    counts = [(f"products needed, {LABELS[n]}", n, needed) for n in names]
    for what, n, count in (*counts, ("products done by torch code, some twice", TORCH, info[TORCH]["done"])):
        per = count / took[n].median
        s.rows.append([what, f"{count / 1e9:.1f}", ms(took[n].median), f"{per / 1e9:.1f}", f"{100 * per / top:.0f} %"])
    s.rows.append(["torch.bmm, 20 times", f"{yard / 1e9:.1f}", ms(bmm.median), f"{top / 1e9:.1f}", "100 %"])
    s.notes.append(
        "The bar counts what is needed: the matrix products of the forward graph, and twice that for the backward. What the backward "
        "computes again is in `done` only; work entry by entry (gelu, gates, masks) is in neither."
    )


def loop(b: Bench, s: Section) -> None:
    """Every preset, compiled, against the token loop that defines it."""
    T, H, K = b.size((2048, 4, 16), (64, 2, 4))
    s.title = f"Compiled against the token loop, T {T}, H {H}, K = V = {K}, forward + backward"
    labels = [LABELS[n] for n in BACKENDS]
    s.columns = ["preset", "plan", *labels, "loop", "tokens of the loop", *(f"ratio, {label}" for label in labels)]
    bar = s.bar(f"every preset but those on `{SEQUENTIAL}`: faster than the token loop, the least", ">=", 10)
    ratios: dict[str, tuple[float, float]] = {}
    with b.ours() as ours:
        for spec in memkit.presets():
            b.step(f"{spec} and its loop")
            took, tokens = next_to_loop(b, ours, spec, (T, H, K), NEAR * bar.bar)
            scale, slow, first = T / tokens, took["loop"], took[backends(spec)[0]]
            ratios[spec] = (scale * slow.median / first.median, scale * slow.best / first.best)
            times = (cell(took, n) for n in BACKENDS)
            faster = (f"{scale * slow.median / took[n].median:.0f}x" if n in took else "-" for n in BACKENDS)
            s.rows.append([spec, plan_of(spec), *times, ms(scale * slow.median), str(tokens), *faster])
    judged = {n: r for n, r in ratios.items() if plan_of(n) != SEQUENTIAL}
    least = min(judged, key=lambda n: judged[n][0])
    bar.fill(*judged[least], detail=f"{least}; {sum(r >= 10 for r, _ in judged.values())} of {len(judged)} presets reach it")
    s.notes.append(
        f"The loop runs on as many tokens as take about {LOOP:g} s and is scaled linearly to {T}. That favours the loop for presets "
        f"on `{WHOLE}`, whose loop grows with the square of the length. Presets above {NEAR * bar.bar:g}x are timed once."
    )


def next_to_loop(b: Bench, ours: Worker, spec: str, sizes: tuple[int, int, int], far: float) -> tuple[dict[str, Timing], int]:
    """Times of a preset's backends and of its loop, and how many tokens the loop took; one run where the ratio is above `far`."""
    T, H, K = sizes
    names = backends(spec)
    info = {n: ours.load(n, "ours", "rule", spec=spec, T=T, H=H, K=K, backend=n) for n in names}
    tokens = loop_tokens(b, ours, spec, T, H, K)
    runs = {n: ours.runner(n) for n in (*names, "loop")}
    took = b.time(runs, least=1, most=1, warm=int(info[names[0]]["forward"] < LONG))
    if T / tokens * took["loop"].median / took[names[0]].median < far:
        took |= b.time({n: runs[n] for n in (names[0], "loop")}, least=2, most=2, warm=0)
    ours.ask("drop")
    return took, tokens


def loop_tokens(b: Bench, ours: Worker, spec: str, T: int, H: int, K: int) -> int:
    """Load the loop at a length that takes about `LOOP` seconds, and return the length."""
    tokens = b.size(16, 4)
    ours.load("loop", "ours", "loop", spec=spec, T=tokens, H=H, K=K)
    runner = ours.runner("loop")
    runner()
    a_token = runner() / tokens
    goal = 2 ** math.floor(math.log2(max(1.0, LOOP / a_token)))
    found = max(tokens, min(T, goal)) if not b.quick else tokens
    if found != tokens:
        ours.load("loop", "ours", "loop", spec=spec, T=found, H=H, K=K)
    return found


def attention(b: Bench, s: Section) -> None:
    """From which length on a layer is faster than causal softmax attention."""
    H, K, all_lengths = b.size((4, 64, (512, 1024, 2048, 4096, 8192)), (1, 8, (32, 64)))
    s.title = f"Against torch's causal softmax attention, H {H}, K = V = {K}, forward + backward"
    layers = {f"{spec}{SUFFIX[n]}": (spec, n) for spec in ("gated_deltanet", "titans") for n in backends(spec)}
    s.columns = ["tokens", "attention", *layers]
    seconds: dict[str, list[float]] = {n: [] for n in ("attention", *layers)}
    with b.ours() as ours:
        for T in all_lengths:
            b.step(f"attention, T {T}")
            ours.load("attention", "ours", "attention", T=T, H=H, K=K)
            for name, (spec, n) in layers.items():
                ours.load(name, "ours", "rule", spec=spec, T=T, H=H, K=K, backend=n)
            took = b.time({n: ours.runner(n) for n in seconds}, most=7, seconds=4)
            for n, t in took.items():
                seconds[n].append(t.median)
            s.rows.append([f"{T:,}", *(ms(took[n].median) for n in seconds)])
    for name in layers:
        T = crossing(list(all_lengths), seconds["attention"], seconds[name])
        s.notes.append(f"{name}: faster from {T:,.0f} tokens on." if T else f"{name}: not faster at {all_lengths[-1]:,} tokens.")


def crossing(tokens: list[int], slow: list[float], fast: list[float]) -> float | None:
    """Where `fast` falls below `slow` for good, between two lengths on log scales; the first length if it always is, None if never."""
    gap = [math.log(a / b) for a, b in zip(slow, fast)]  # above 0: faster
    if gap[-1] <= 0:
        return None
    last = max((i for i, g in enumerate(gap) if g <= 0), default=-1)
    if last < 0:
        return float(tokens[0])
    part = -gap[last] / (gap[last + 1] - gap[last])
    return tokens[last] * (tokens[last + 1] / tokens[last]) ** part


def plan_of(spec: str) -> str:
    """The plan a preset is compiled by."""
    return memkit.compile(spec, key_dim=4, value_dim=4).plan


def bounded() -> list[str]:
    """The presets that do not keep the whole past."""
    return [name for name in memkit.presets() if plan_of(name) != WHOLE]
