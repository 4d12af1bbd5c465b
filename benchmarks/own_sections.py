"""The sections that need no peer: windows, lengths, FLOPs a second, the token loop, softmax attention."""

from __future__ import annotations

import math

import memkit
from benchmarks.bench import Bench, Section, ms
from benchmarks.process import Worker

WHOLE = "span"  # the plan that keeps the whole past, by its meaning
SEQUENTIAL = "scan"
SLOW, SHORTER = 4.0, 8  # a preset whose shorter run takes longer than so many seconds is measured at a part of both lengths
LOOP = 2.0  # seconds that one run of the token loop should take


def window(b: Bench, s: Section) -> None:
    """omeganet with a window of 16 tokens against one of 1, same plan."""
    T, K, chunks = b.size((2048, 64, (64, 128, 256)), (64, 8, (16, 32)))
    s.title = f"omeganet, window 16 against window 1, T {T}, H 1, K = V = {K}, forward + backward"
    s.columns = ["chunk", "plan", "window 1", "window 16", "ratio"]
    bars = {C: s.bar(f"omeganet, chunk {C}: time with window 16 over window 1", "<=", 1.10) for C in chunks}
    with b.ours() as ours:
        for C, bar in bars.items():
            b.step(f"omeganet, chunk {C}")
            sizes = [{"update.chunk_size": C, "window.size": c} for c in (1, 16)]
            info = [ours.load(n, "ours", "rule", spec="omeganet", T=T, H=1, K=K, overrides=size) for n, size in zip(("1", "16"), sizes)]
            took = b.time({c: ours.runner(c) for c in ("1", "16")}, least=5, seconds=8)
            one, many = took["1"], took["16"]
            same = info[0]["plan"] == info[1]["plan"]
            if same:
                bar.fill(many.median / one.median, many.best / one.best, f"{ms(many.median)} against {ms(one.median)}")
            plans = info[0]["plan"] if same else f"{info[0]['plan']}, {info[1]['plan']}"
            s.rows.append([str(C), plans, ms(one.median), ms(many.median), f"{many.median / one.median:.2f}"])
    s.notes.append(
        "A chunk of C tokens evaluates C + 15 keys where it had C, since the window's tokens from before the chunk are taken at the "
        "chunk's start: 23 % more for C = 64, 12 % for 128, 6 % for 256."
    )


def lengths(b: Bench, s: Section) -> None:
    """Time at T 16384 against T 2048, and the bytes of the state at both."""
    short, long = b.size((2048, 16384), (32, 256))
    H, K = b.size((4, 16), (1, 4))
    s.title, s.columns = (
        f"Length: T {long} against T {short}, H {H}, K = V = {K}, forward + backward",
        ["preset", "plan", f"T {short}", f"T {long}", "ratio", "state, both lengths"],
    )
    time_bar = s.bar(f"every preset but those on `{WHOLE}`: T {long} over T {short}, the worst", "<=", 8.8)
    state_bar = s.bar("of these, presets whose state grows with T", "<=", 0, "")
    ratios: dict[str, tuple[float, float]] = {}
    grown = []
    with b.ours() as ours:
        for spec in bounded():
            b.step(f"{spec}, T {long}")
            ours.load("one", "ours", "rule", spec=spec, T=short // SHORTER, H=H, K=K)
            part = 1 if ours.runner("one")() * SHORTER < SLOW else SHORTER
            for key, T in (("one", short // part), ("eight", long // part)):
                ours.load(key, "ours", "rule", spec=spec, T=T, H=H, K=K)
            took = b.time({key: ours.runner(key) for key in ("one", "eight")}, seconds=2)
            state = [ours.ask("info", key=key)["state_bytes"] for key in ("one", "eight")]
            one, eight = took["one"], took["eight"]
            ratios[spec] = (eight.median / one.median, eight.best / one.best)
            grown += [spec] if state[0] != state[1] else []
            held = " / ".join(f"{n:,} B" for n in dict.fromkeys(state))
            name = spec if part == 1 else f"{spec}, an {SHORTER}th of both lengths"
            s.rows.append([name, plan_of(spec), ms(one.median), ms(eight.median), f"{ratios[spec][0]:.2f}", held])
            ours.ask("drop")
    worst = max(ratios, key=lambda n: ratios[n][0])
    time_bar.fill(*ratios[worst], detail=f"{worst}; {sum(r <= 8.8 for r, _ in ratios.values())} of {len(ratios)} presets are within it")
    state_bar.fill(len(grown), detail=", ".join(grown) or f"equal bytes for all {len(ratios)} presets")


def rate(b: Bench, s: Section) -> None:
    """titans' FLOPs a second as a share of this machine's own for batched 64 x 64 products."""
    T, H, K, E, C = b.size((8192, 8, 64, 256, 64), (64, 1, 8, 16, 8))
    s.title = f"titans, T {T}, H {H}, K = V = {K}, E = {E}, C {C}, forward + backward: share of the rate of torch.bmm [512, 64, 64]"
    s.columns = ["what", "GFLOP", "time", "GFLOP/s", "share of bmm"]
    bar = s.bar(f"titans, T {T}, H {H}, K = V = {K}, E {E}: counted FLOPs over time, share of the bmm rate", ">=", 40, "%")
    b.step("FLOPs a second")
    with b.ours() as ours:
        yard = ours.load("bmm", "ours", "bmm")["flops"]
        info = ours.load("titans", "ours", "share", T=T, H=H, K=K, E=E, C=C)
        took = b.time({"titans": ours.runner("titans"), "bmm": ours.runner("bmm")}, least=5, seconds=15)
    layer, bmm = took["titans"], took["bmm"]
    top, best = yard / bmm.median, yard / bmm.best
    bar.fill(
        100 * info["needed"] / layer.median / top,
        100 * info["needed"] / layer.best / best,
        f"{info['needed'] / layer.median / 1e9:.1f} of {top / 1e9:.1f} GFLOP/s",
    )
    for what, count in (("products needed", info["needed"]), ("products done, some twice", info["done"])):
        per = count / layer.median
        s.rows.append([what, f"{count / 1e9:.1f}", ms(layer.median), f"{per / 1e9:.1f}", f"{100 * per / top:.0f} %"])
    s.rows.append(["torch.bmm, 20 times", f"{yard / 1e9:.1f}", ms(bmm.median), f"{top / 1e9:.1f}", "100 %"])
    s.notes.append(
        "The bar counts what is needed: the matrix products of the forward graph, and twice that for the backward. What the backward "
        "computes again is in `done` only; work entry by entry (gelu, gates, masks) is in neither."
    )


def loop(b: Bench, s: Section) -> None:
    """Every preset, compiled, against the token loop that defines it."""
    T, H, K = b.size((2048, 4, 16), (64, 2, 4))
    s.title = f"Compiled against the token loop, T {T}, H {H}, K = V = {K}, forward + backward"
    s.columns = ["preset", "plan", "compiled", "loop", "tokens of the loop", "ratio"]
    bar = s.bar(f"every preset but those on `{SEQUENTIAL}`: faster than the token loop, the least", ">=", 10)
    ratios: dict[str, tuple[float, float]] = {}
    with b.ours() as ours:
        for spec in memkit.presets():
            b.step(f"{spec} and its loop")
            ours.load("compiled", "ours", "rule", spec=spec, T=T, H=H, K=K)
            tokens = loop_tokens(b, ours, spec, T, H, K)
            took = b.time({"compiled": ours.runner("compiled"), "loop": ours.runner("loop")}, least=2, most=2)
            fast, slow = took["compiled"], took["loop"]
            scale = T / tokens
            ratios[spec] = (scale * slow.median / fast.median, scale * slow.best / fast.best)
            s.rows.append([spec, plan_of(spec), ms(fast.median), ms(scale * slow.median), str(tokens), f"{ratios[spec][0]:.0f}x"])
            ours.ask("drop")
    judged = {n: r for n, r in ratios.items() if plan_of(n) != SEQUENTIAL}
    least = min(judged, key=lambda n: judged[n][0])
    bar.fill(*judged[least], detail=f"{least}; {sum(r >= 10 for r, _ in judged.values())} of {len(judged)} presets reach it")
    s.notes.append(
        f"The loop runs on as many tokens as take about {LOOP:g} s and is scaled linearly to {T}. That favours the loop for presets "
        f"on `{WHOLE}`, whose loop grows with the square of the length."
    )


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
    specs = ("gated_deltanet", "titans")
    s.title = f"Against torch's causal softmax attention, H {H}, K = V = {K}, forward + backward"
    s.columns = ["tokens", "attention", *specs]
    seconds: dict[str, list[float]] = {n: [] for n in ("attention", *specs)}
    with b.ours() as ours:
        for T in all_lengths:
            b.step(f"attention, T {T}")
            ours.load("attention", "ours", "attention", T=T, H=H, K=K)
            for spec in specs:
                ours.load(spec, "ours", "rule", spec=spec, T=T, H=H, K=K)
            took = b.time({n: ours.runner(n) for n in seconds}, most=7, seconds=4)
            for n, t in took.items():
                seconds[n].append(t.median)
            s.rows.append([f"{T:,}", *(ms(took[n].median) for n in seconds)])
    for spec in specs:
        T = crossing(list(all_lengths), seconds["attention"], seconds[spec])
        s.notes.append(f"{spec} is faster from {T:,.0f} tokens on." if T else f"{spec} is not faster at {all_lengths[-1]:,} tokens.")


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
