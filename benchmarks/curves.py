"""Curves over T: time and peak memory, forward and forward + backward, for titans and gated_deltanet and what they are held against."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench import SUFFIX, Bench, Section, backends, mib, ms
from benchmarks.peer_sections import tiny
from benchmarks.process import Missing, Worker
from memkit.benchmark import pyplot


class System(NamedTuple):
    """A line of the figure: whose it is, its case, and whether a peers' process runs it."""

    label: str
    module: str
    case: str
    args: dict[str, Any]
    peer: bool


MODES = ("forward", "both")


def own(spec: str, case: str, args: dict[str, Any]) -> list[System]:
    """memkit's lines, one a backend."""
    return [System(f"memkit {spec}{SUFFIX[n]}", "ours", case, {**args, "backend": n}, False) for n in backends(spec)]


def families(b: Bench) -> dict[str, list[System]]:
    """Title of a column -> its systems."""
    d, C, H, K = b.size((64, 64, 4, 64), (8, 8, 1, 8))
    one, rows = {"d": d, "C": C}, {"H": H, "K": K}
    return {
        f"titans, 1 head, d {d}, C {C}": [
            *own("titans", "titans", one),
            System("titans-pytorch, batch_size = chunk_size", "peer_titans", "memory", {**one, "batched": True}, True),
            System("titans-pytorch, default", "peer_titans", "memory", {**one, "batched": False}, True),
        ],
        f"gated_deltanet, {H} heads, K = V = {K}": [
            *own("gated_deltanet", "delta", {"spec": "gated_deltanet", **rows}),
            System("transformers, torch chunk form", "peer_delta", "transformers", rows, True),
            System("torch, causal softmax attention", "ours", "attention", rows, False),
        ],
    }


def curves(b: Bench, s: Section) -> None:
    """Measure all lines; without the peers' environment, memkit's alone."""
    s.title, s.columns = "Curves over T", ["system", "T", "forward", "forward + backward", "peak, forward", "peak, forward + backward"]
    lengths: list[int] = [*b.size((512, 1024, 2048, 4096, 8192), (32, 64))]
    s.data = {"tokens": lengths, "families": {}}
    for title, systems in families(b).items():
        lines = {system.label: {kind: [] for kind in ("forward", "both", "forward_bytes", "both_bytes")} for system in systems}
        with ExitStack() as stack:
            systems = times(b, s, systems, lengths, lines, stack)
        for system in systems:
            for mode in MODES:
                b.step(f"memory of {system.label}")
                lines[system.label][f"{mode}_bytes"] = peaks(b, system, mode, lengths)
        s.data["families"][title] = {system.label: lines[system.label] for system in systems}
        for label, line in s.data["families"][title].items():
            for i, T in enumerate(lengths):
                seconds, held = (ms(line[m][i]) for m in MODES), (mib(line[f"{m}_bytes"][i]) for m in MODES)
                s.rows.append([label, f"{T:,}", *seconds, *held])
    s.notes.append("Peak memory is over that of a first tiny run, inputs included, one process for each line and mode, lengths growing.")


def times(b: Bench, s: Section, systems: list[System], lengths: list[int], lines: dict[str, Any], stack: ExitStack) -> list[System]:
    """Fill the seconds of each line; returns the systems that could run."""
    sides: dict[bool, Worker] = {False: stack.enter_context(b.ours())}
    try:
        sides[True] = stack.enter_context(b.theirs())
    except Missing as why:
        s.miss(str(why))
    systems = [system for system in systems if system.peer in sides]
    for T in lengths:
        b.step(f"curves, T {T}")
        runs = {}
        for system in systems:
            sides[system.peer].load(system.label, system.module, system.case, T=T, **system.args)
            runs |= {f"{system.label}|{mode}": sides[system.peer].runner(system.label, mode) for mode in MODES}
        for name, t in b.time(runs, most=7, seconds=4).items():
            label, mode = name.split("|")
            lines[label][mode].append(t.median)
    return systems


def peaks(b: Bench, system: System, mode: str, lengths: list[int]) -> list[int]:
    """Bytes of peak memory at each length, over what a first tiny run leaves: libraries, and compilation."""
    found = []
    with b.theirs() if system.peer else b.ours() as worker:
        base = tiny(worker, system.module, system.case, mode, **system.args)
        for T in lengths:
            worker.load("case", system.module, system.case, T=T, **system.args)
            for _ in range(2):
                worker.ask("run", key="case", mode=mode)
            found.append(max(2**16, worker.ask("peak") - base))
    return found


COLOURS = ("#0b6e99", "#7fb8d4", "#d1495b", "#8a8d91")
UNITS = (("", "seconds", 1.0), ("_bytes", "peak memory, MiB", 2.0**-20))


def figure(data: dict[str, Any], path: Path) -> None:
    """Draw two columns, a family each: time above, memory below; full lines are forward + backward, dashed ones forward."""
    plt = pyplot()
    tokens = data["tokens"]
    picture, axes = plt.subplots(2, len(data["families"]), figsize=(10, 7), sharex=True, squeeze=False, layout="constrained")
    for column, (title, lines) in zip(axes.T, data["families"].items(), strict=True):
        for (label, line), colour in zip(lines.items(), COLOURS):
            for panel, (kind, name, scale) in zip(column, UNITS, strict=True):
                for mode, style in (("both", "o-"), ("forward", "o--")):
                    label_once = label if (kind, mode) == ("", "both") else None
                    values, width = [scale * x for x in line[mode + kind]], 1.6 if mode == "both" else 1
                    panel.loglog(tokens, values, style, color=colour, label=label_once, linewidth=width, markersize=3)
                panel.set_ylabel(name)
                panel.grid(alpha=0.25, which="major")
        column[0].set_title(title, fontsize=10)
        column[0].legend(fontsize=8, frameon=False, loc="upper left")
        column[-1].set_xlabel("tokens")
        column[-1].set_xticks(tokens, [f"{t:,}" for t in tokens])
        column[-1].xaxis.set_minor_locator(plt.NullLocator())
    picture.suptitle("full: forward + backward; dashed: forward; float32", fontsize=9)
    picture.savefig(path, dpi=150)
    plt.close(picture)
