"""Optional: time a few configurations on the device at hand, once, and keep the fastest on disk. Off unless MEMKIT_AUTOTUNE=1.

Where it sits: below `launch`, which asks `wanted` at every call. A key says which kernels, which types and which device, never how long
a sequence is or how many there are, so that no new length starts a search.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from memkit.specs.errors import KernelError

from .emit_triton import Function
from .kernels import functions
from .kernels.settings import TABLE, Configs
from .kernels.tile import Config
from .resources import SPILL

SWITCH = "MEMKIT_AUTOTUNE"
GAIN = 0.98  # of the table's time: what is not below is noise, and the table stays
WARM, ROUNDS, LONG = 2, 9, 300.0  # runs that do not count, runs that do, and milliseconds after which three are enough
LARGEST = 1 << 20  # bytes of a file that is looked at
LOCK = threading.Lock()  # one search at a time: two would time each other

FEW = 6  # options: each costs the time to compile it
# How far results may lie from the table's, over the largest: tiles change the order of sums, and a recurrence carries that on.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
TF32 = 2e-2


def wanted() -> bool:
    """Whether configurations are tuned, or read from the disk. Unset or 0: neither, the table is all there is.

    Raises:
        KernelError: a value that is neither 0 nor 1.
    """
    said = os.environ.get(SWITCH, "")
    if said not in ("", "0", "1"):
        raise KernelError(f"{SWITCH}={said}", "1: time configurations once and keep the fastest; 0: the table", f"{SWITCH}=1", SWITCH)
    return said == "1"


def candidates(table: Configs, target: str, single: bool) -> tuple[Configs, ...]:
    """The table's configurations; then those that ship for other plans on the target, and the table's with one size changed."""
    shipped = [] if single else [c for (_, other), c in TABLE.items() if other == target and c.loop.exact == table.loop.exact]
    changed = [Configs(change(table.loop), change(table.each)) for change in CHANGES]
    return tuple(dict.fromkeys((table, *shipped, *changed)))[:FEW]


CHANGES: tuple[Callable[[Config], Config], ...] = (
    lambda c: replace(c, warps=12 - c.warps if c.warps in (4, 8) else c.warps),
    lambda c: replace(c, rows=max(16, c.rows // 2)),
    lambda c: replace(c, cols=max(16, c.cols // 2)),
    lambda c: replace(c, inner=max(16, c.inner // 2)),
)


@dataclass(frozen=True)
class Choice:
    """configs: None for the table's. why: for people. final: no later call will change it."""

    configs: Configs | None
    why: str
    final: bool = True


OFF = Choice(None, "the table's", final=False)


@dataclass(frozen=True)
class Machine:
    """A device, as far as times depend on it. processors: how many programs it runs at once, at least."""

    name: str
    target: str
    processors: int
    triton: str


@cache
def machine(device: torch.device) -> Machine:
    """What a device is."""
    import triton

    if device.type != "cuda":
        return Machine("interpreter", platform.machine(), 1, triton.__version__)
    found = torch.cuda.get_device_properties(device)
    target = found.gcnArchName if torch.version.hip else f"sm_{found.major}{found.minor}"
    return Machine(found.name, target, found.multi_processor_count, triton.__version__)


@dataclass(frozen=True)
class Job:
    """A function to tune. options: the table's configurations first. make: the function under some, on the inputs of the call at hand;
    it returns new arrays and writes nowhere else. spilled: bytes a thread that it spilled, once it has run."""

    function: Function
    options: tuple[Configs, ...]
    target: str
    dtype: torch.dtype
    precision: str
    device: torch.device
    make: Callable[[Configs], Callable[[], Sequence[Tensor]]]
    spilled: Callable[[Configs], int]

    @property
    def about(self) -> dict[str, str]:
        """What the key is made of, apart from the kernels' text and the options."""
        m = machine(self.device)
        said = {"type": str(self.dtype).removeprefix("torch."), "precision": self.precision, "device": m.name, "target": m.target}
        return {**said, "processors": str(m.processors), "triton": m.triton}

    @property
    def key(self) -> str:
        """The kernels as the table has them, so that a new table or new emitter asks anew."""
        sources = self.function.sources
        helpers = functions.definitions({h for s in sources for h in s.helpers})
        said = [helpers, *(s.text for s in sources), [repr(o) for o in self.options], self.about]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


# ---- what lies on the disk


class Trial(BaseModel):
    """One configuration: the median of its times, or why it has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    configs: Configs
    milliseconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    dropped: str = ""


class Tuned(BaseModel):
    """One file: what was chosen, for which key, and what led to it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    format: Literal[1] = 1
    key: str
    function: str
    about: dict[str, str]
    configs: Configs
    trials: tuple[Trial, ...] = Field(min_length=1)


def cache_root() -> Path | None:
    """Where memkit keeps files: $MEMKIT_CACHE, $XDG_CACHE_HOME/memkit or ~/.cache/memkit; None where there is no home."""
    own, shared = os.environ.get("MEMKIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "memkit"
    except RuntimeError:
        return None


def folder() -> Path | None:
    """Where files of tuning lie, if anywhere."""
    root = cache_root()
    return root and root / "autotune"


def load(path: Path, job: Job) -> Tuned | None:
    """A file's contents, if they are what `save` wrote for this key and name one of the options; a file cannot bring in another."""
    try:
        if path.stat().st_size > LARGEST:
            return None
        found = Tuned.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if found.key == job.key and found.configs in job.options else None


def save(path: Path, found: Tuned, job: Job) -> Tuned | None:
    """Write a file at once or not at all. What then lies there: another process may have been first, and all take what it found."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.part")
        try:
            part.write_text(found.model_dump_json(indent=1), encoding="utf-8")
            try:
                os.link(part, path)  # unlike a rename, does not replace
            except OSError:  # there is one already, or there are no links here
                if load(path, job) is None:
                    os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError:  # a disk that cannot be written: this process alone knows
        return None
    return load(path, job)


# ---- the search


def choose(job: Job, timing: bool) -> Choice:
    """The configurations for a job: from the disk, or else, if this call may be timed, the fastest."""
    place = folder()
    path = None if place is None else place / f"{job.key}.json"
    found = None if path is None else load(path, job)
    if found is not None:
        return _chosen(found, job, "read from the disk")
    if not timing:
        return Choice(None, "the table's: nothing was tuned, and this call is too small to time or is being captured", final=False)
    tried = search(job)
    best = fastest(tried)
    if best is None:
        return Choice(None, f"the table's: no configuration ran; its own: {tried[0].dropped}")
    found = Tuned(key=job.key, function=job.function.name, about=job.about, configs=best, trials=tuple(tried))
    kept = None if path is None else save(path, found, job)
    return _chosen(kept or found, job, "timed in this process" + ("" if kept else ", not kept on the disk"))


def _chosen(found: Tuned, job: Job, where: str) -> Choice:
    times = {t.configs: t.milliseconds for t in found.trials}
    own, best = times.get(job.options[0]), times.get(found.configs)
    said = "" if best is None else f" {best:.3f} ms" + ("" if own is None else f", the table's {own:.3f} ms")
    out = sum(bool(t.dropped) for t in found.trials)
    why = f"tuned:{said}; {len(found.trials) - out} configurations timed, {out} dropped; {where}"
    return Choice(None if found.configs == job.options[0] else found.configs, why)


def search(job: Job) -> list[Trial]:
    """Every option tried, the table's first."""
    tried: list[Trial] = []
    want: Sequence[Tensor] | None = None
    with _progress(job) as advance:
        for configs in job.options:
            trial, found = attempt(job, configs, want)
            want = found if configs == job.options[0] else want
            tried.append(trial)
            advance()
    return tried


def attempt(job: Job, configs: Configs, want: Sequence[Tensor] | None) -> tuple[Trial, Sequence[Tensor] | None]:
    """One configuration and its results. It is dropped where it does not compile or launch, spills, or is further off than rounding."""
    try:
        run = job.make(configs)
        found = run()[: job.function.results]  # saved values behind them have entries that nobody reads
        why = "" if want is None else unlike(found, want, TF32 if job.precision == "tf32" else ROUNDING[job.dtype])
        spilled = job.spilled(configs)
        if configs != job.options[0] and spilled > SPILL[job.target]:
            why = f"spills {spilled} bytes a thread"
        return (Trial(configs=configs, dropped=why) if why else Trial(configs=configs, milliseconds=measure(run, job.device))), found
    except Exception as error:  # a compiler and a driver raise what they like
        said = (str(error).strip().splitlines() or [""])[0][:300]
        return Trial(configs=configs, dropped=f"{type(error).__name__}: {said}"), None


def unlike(found: Sequence[Tensor], want: Sequence[Tensor], share: float) -> str:
    """How results differ by more than `share` of the largest entry, or ""."""
    for i, (x, y) in enumerate(zip(found, want, strict=True)):
        if y.numel():
            allowed = share * float(y.abs().nan_to_num(0.0, 0.0, 0.0).max())
            if not torch.allclose(x, y, rtol=0.0, atol=allowed, equal_nan=True):
                return f"result {i} is not the table's: {float((x - y).abs().max()):.1e} away, {allowed:.1e} allowed"
    return ""


def fastest(tried: Sequence[Trial]) -> Configs | None:
    """The configuration with the least median; the table's unless another is faster by more than noise. None where nothing ran."""
    times = {t.configs: t.milliseconds for t in tried if t.milliseconds is not None}
    if not times:
        return None
    own, best = tried[0].configs, min(times, key=lambda c: times[c])
    return own if own in times and times[best] > GAIN * times[own] else best


def measure(run: Callable[[], object], device: torch.device) -> float:
    """The median of a run's milliseconds, by the device's clock where it has one."""
    for _ in range(WARM):
        run()
    spent: list[float] = []
    while len(spent) < 3 or (len(spent) < ROUNDS and sum(spent) < LONG):
        spent.append(_milliseconds(run, device))
    return statistics.median(spent)


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


@contextlib.contextmanager
def _progress(job: Job) -> Iterator[Callable[[], None]]:
    """A line on the terminal while a search goes on; each option has to be compiled, which takes seconds a kernel."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"memkit times configurations of {job.function.name}", total=len(job.options))
        yield lambda: bar.advance(task)


def described(configs: Configs) -> str:
    """Tiles and warps in words."""

    def one(c: Config) -> str:
        return f"{c.rows} x {c.cols}, sums by {c.inner}, {c.warps} warps"

    return one(configs.loop) if configs.loop == configs.each else f"loop {one(configs.loop)}; each chunk {one(configs.each)}"
