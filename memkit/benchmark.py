"""`memkit bench`: how fast compiled rules run on this machine, next to the token loop; and the clock and inputs that it measures with."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

import memkit
from memkit.specs.errors import MemkitError, SpecError
from memkit.specs.rule import Rule

# Ranges of drawn gates, so that a long sequence stays finite and no memory shrinks to nothing; other gates fill their own range.
SPANS = {"retain": (0.999, 1.0), "momentum": (0.0, 0.9), "step_size": (0.0, 0.002)}


class Timing(NamedTuple):
    """Seconds a run took: the median and the least of `runs` runs."""

    median: float
    best: float
    runs: int


def clocked(fn: Callable[[], Any]) -> Callable[[], float]:
    """`fn` as a function that returns the seconds one call took, garbage collected before."""

    def run() -> float:
        gc.collect()
        started = time.perf_counter()
        fn()
        return time.perf_counter() - started

    return run


def alternate(
    runs: Mapping[str, Callable[[], float]], *, least: int = 3, most: int = 15, seconds: float = 5.0, warm: int = 1
) -> dict[str, Timing]:
    """Time several things in turns, A B A B, so that all meet the same machine.

    Args:
        runs: name -> a function that does one run and returns the seconds it took.
        least, most: rounds; between them, rounds go on until `seconds` are used. warm: rounds before them that do not count.
    """
    for _ in range(warm):
        for run in runs.values():
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    rounds, used = 0, 0.0
    while rounds < least or (rounds < most and used < seconds):
        for name, run in runs.items():
            taken[name].append(run())
            used += taken[name][-1]
        rounds += 1
    return {name: Timing(statistics.median(t), min(t), len(t)) for name, t in taken.items()}


@dataclass
class Call:
    """One call of a rule on drawn inputs: `forward()`, and `both()` with the gradient of every input."""

    rule: Rule
    inputs: dict[str, Tensor]
    out: Tensor
    state_bytes: int = field(default=0, init=False)

    def _run(self) -> Tensor:
        groups: dict[str, dict[str, Tensor]] = {"gates": {}, "weights": {}, "params": {}}
        for name, t in self.inputs.items():
            group, _, inner = name.partition(".")
            if inner:
                groups[group][inner] = t
        q, k, v = (self.inputs[n] for n in "qkv")
        y, after = self.rule(q, k, v, groups["gates"], groups["weights"], groups["params"])
        self.state_bytes = after.nbytes
        return y

    def forward(self) -> Tensor:
        """y [B, T, H, V], no gradients."""
        with torch.no_grad():
            return self._run()

    def both(self) -> tuple[Tensor, ...]:
        """The gradients of <y, out> for every input."""
        return torch.autograd.grad(self._run(), list(self.inputs.values()), self.out, allow_unused=True)

    def check(self) -> None:
        """Require finite outputs: a run that blows up says nothing about speed."""
        if not torch.isfinite(self.forward()).all():
            raise MemkitError(f"{self.rule.spec.name}: outputs that are not finite", "finite values", "smaller step sizes", "benchmark")


def draw(rule: Rule, tokens: int, heads: int, *, batch: int = 1, seed: int = 0) -> Call:
    """A call on random float32 inputs: unit keys and queries [B, T, H, K], gates in `SPANS`, fresh weights; all require gradients."""
    g = torch.Generator().manual_seed(seed)
    rows = (batch, tokens, heads)
    q, k, v = (torch.randn((*rows, n), generator=g) for n in (rule.key_dim, rule.key_dim, rule.value_dim))
    found = {"q": torch.nn.functional.normalize(q, dim=-1), "k": torch.nn.functional.normalize(k, dim=-1), "v": v}
    roles = rule.spec.roles()
    for name, shape in rule.gates.items():
        role = roles[name][0]
        low, high = SPANS.get(name, (role.low, 1.0 if role.high is None else role.high))
        found[f"gates.{name}"] = low + (high - low) * torch.rand((*rows, *shape), generator=g)
    found |= {f"weights.{n}": w for n, w in rule.init_weights(heads, generator=g, dtype=torch.float32).items()}
    found |= {f"params.{n}": p.float() for n, p in rule.init_params().items()}
    out = torch.randn(v.shape, generator=g)
    return Call(rule, {n: t.requires_grad_() for n, t in found.items()}, out)


@dataclass
class Row:
    """What was measured for one spec; seconds, and bytes of state for one row of the batch."""

    spec: str
    plan: str
    tokens: list[int] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    state_bytes: int = 0
    loop: float | None = None  # forward + backward of the token loop at the longest length, scaled from fewer tokens


class Rate(ProgressColumn):
    """Steps of a bar a minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{60 * (task.speed or 0):.0f}/min", style="cyan")


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """A bar with how many are done, the rate and the time left."""
    columns = (BarColumn(30), MofNCompleteColumn(), Rate(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run with this many torch threads; the number before comes back after."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    specs: Annotated[list[str] | None, typer.Argument(help="Presets or files .yaml; every preset if none.")] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Longest sequence; a half and a quarter of it are measured too.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Heads, each with a memory of its own.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Width of keys and of values.")] = 16,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each, after one that does not count; the median is shown.")] = 3,
    cores: Annotated[int, typer.Option("--threads", min=1, help="Threads of torch.")] = 2,
    loop: Annotated[int, typer.Option(min=0, help="Tokens of the token loop, scaled to all; 0 leaves it out.")] = 64,
    plot: Annotated[Path | None, typer.Option(help="Draw time over length into this file .png, .svg or .pdf.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write what was measured into this file .json.")] = None,
) -> int:
    """Measure compiled rules, forward and forward + backward in float32, next to the token loop that defines them."""
    _writable(plot, (".png", ".svg", ".pdf"), "--plot")
    _writable(out, (".json",), "--out")
    names = specs or list(memkit.presets())
    loaded = [memkit.spec(name) for name in names]
    console = Console(highlight=False, soft_wrap=True)
    rows: list[Row] = []
    with threads(cores), progress(console) as bar:
        task = bar.add_task("", total=len(loaded))
        for name, spec in zip(names, loaded):
            bar.update(task, description=name)
            rows.append(measure(spec, tokens, heads, width, runs=runs, loop=loop))
            bar.advance(task)
    console.print(table(rows, heads, width, cores))
    if plot:
        draw_curves(rows, plot)
        console.print(f"{plot}: written")
    if out:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
        console.print(f"{out}: written")
    return 0


def measure(source: Any, tokens: int, heads: int, width: int, *, runs: int = 3, loop: int = 0) -> Row:
    """One spec at T / 4, T / 2 and T tokens, and the token loop on `loop` tokens (0: left out)."""
    rule = memkit.compile(source, key_dim=width, value_dim=width)
    row = Row(rule.spec.name, rule.plan)
    for length in (tokens // 4, tokens // 2, tokens):
        call = draw(rule, length, heads)
        call.check()
        took = alternate({"forward": clocked(call.forward), "both": clocked(call.both)}, least=runs, most=runs)
        row.tokens.append(length)
        row.forward.append(took["forward"].median)
        row.both.append(took["both"].median)
        row.state_bytes = call.state_bytes
    if loop:
        few = min(loop, tokens)
        slow = draw(memkit.reference(source, key_dim=width, value_dim=width), few, heads)
        row.loop = alternate({"loop": clocked(slow.both)}, least=1, most=1)["loop"].best * tokens / few
    return row


def table(rows: Sequence[Row], heads: int, width: int, cores: int) -> Table:
    """What was measured, one spec a line."""
    tokens = rows[0].tokens[-1]
    title = f"{tokens:,} tokens, {heads} heads, K = V = {width}, float32, torch {torch.__version__}, threads {cores}"
    found = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("spec", "plan"):
        found.add_column(name, no_wrap=True)
    for name in ("forward ms", "both ms", "tokens/s", "T : T/4", "loop : both", "state KiB"):
        found.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row.forward[-1] * 1e3:.1f}", f"{row.both[-1] * 1e3:.1f}", f"{tokens / row.both[-1]:,.0f}"]
        against = f"{row.loop / row.both[-1]:.0f}" if row.loop else ""
        cells += [f"{row.both[-1] / row.both[0]:.1f}", against, f"{row.state_bytes / 1024:,.0f}"]
        found.add_row(row.spec, row.plan, *cells)
    return found


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Time over length, forward + backward, one line a spec, a colour a plan.

    Raises:
        MemkitError: without matplotlib.
    """
    plt = pyplot()
    plans = list(dict.fromkeys(row.plan for row in rows))
    colours = dict(zip(plans, plt.get_cmap("tab10").colors))
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for row in rows:
        axes.loglog(row.tokens, [1e3 * t for t in row.both], "o-", color=colours[row.plan], linewidth=1, markersize=3)
        axes.annotate(row.spec, (row.tokens[-1], 1e3 * row.both[-1]), xytext=(4, 0), textcoords="offset points", fontsize=6, va="center")
    handles = [plt.Line2D([], [], color=colours[plan], label=plan) for plan in plans]
    axes.legend(handles=handles, title="plan", fontsize=7)
    lengths = rows[0].tokens
    axes.set_xticks(lengths, [f"{t:,}" for t in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens", ylabel="forward + backward, ms")
    axes.margins(x=0.18)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def pyplot() -> Any:
    """matplotlib.pyplot with a backend that needs no display."""
    try:
        import matplotlib
    except ImportError:
        raise MemkitError("matplotlib is missing", "the extra `plot`", "pip install 'memkit-layers[plot]'", "--plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _writable(path: Path | None, kinds: tuple[str, ...], where: str) -> None:
    """Refuse a wrong file before minutes of measuring."""
    if path is None:
        return
    if path.suffix not in kinds:
        raise SpecError(f"{path}", "a file " + ", ".join(kinds), "", where)
    if not path.parent.is_dir():
        raise SpecError(f"{path}: no folder {path.parent}", "a folder that exists", "", where)
