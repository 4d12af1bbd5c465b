"""What runs on the GPU: inputs, rules and peers as functions that run once, and a clock. Imported by worker processes, too."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import memkit
from memkit.benchmark import SPANS
from memkit.specs.errors import KernelError, MemkitError

CHECKED = {torch.float32: 2e-3, torch.bfloat16: 5e-2}  # of the largest value
LOOPED = 77  # tokens of a check: several chunks and a short one, and a token loop that ends soon


@dataclass(frozen=True)
class Plan:
    """Sizes of one run of the benchmark, and the device; "cpu" only under triton's interpreter, to see that everything runs."""

    device: str
    heads: int
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int  # batch x length, where a length is shorter
    small: int  # width of checks

    @classmethod
    def of(cls, quick: bool) -> Plan:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(device, 1, (8,), (8, 16), 8, 4) if quick else cls(device, 16, (64, 128), (2048, 8192, 32768, 131072), 32768, 32)


Run = Callable[[bool], Any]  # one run, with or without a backward pass


class Missing(Exception):
    """A comparison that cannot be made here, and why."""


# ---- memkit


def overrides(name: str, quick: bool) -> dict[str, Any]:
    """Short chunks, where the chunk is part of the meaning and the token loop must end soon."""
    return {"update.chunk_size": 4 if quick else 16} if memkit.spec(name).update.grad_at == "chunk" else {}


def drawn(plan: Plan, rule: Any, batch: int, tokens: int, dtype: torch.dtype, train: bool) -> tuple[Tensor, Tensor, Tensor, dict, dict]:
    """q, k, v, gates, weights on the device: unit keys, gates near those of a fresh layer."""
    g = torch.Generator(plan.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=plan.device)

    q, k = (torch.nn.functional.normalize(normal(batch, tokens, plan.heads, rule.key_dim), dim=-1) for _ in range(2))
    v = normal(batch, tokens, plan.heads, rule.value_dim)
    gates = {}
    for name, shape in rule.gates.items():
        low, high = SPANS.get(name, (0.0, 1.0))
        share = torch.rand((batch, tokens, plan.heads, *shape), generator=g, device=plan.device)
        gates[name] = (low + (high - low) * share).requires_grad_(train)
    weights = {n: w.to(plan.device) for n, w in rule.init_weights(plan.heads).items()}
    q, k, v = (t.to(dtype).requires_grad_(train) for t in (q, k, v))
    return q, k, v, gates, weights


def runner(plan: Plan, rule: Any, batch: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Run:
    """A rule on drawn inputs."""
    made: dict[bool, Any] = {}

    def run(train: bool) -> Any:
        if train not in made:
            made[train] = drawn(plan, rule, batch, tokens, dtype, train)
        with torch.set_grad_enabled(train):
            y, _ = rule(*made[train])
        if train:
            y.sum().backward()
        return y

    return run


def warm(name: str, width: int, quick: bool) -> str:
    """Compile and run every kernel of a preset once; why it has none, or nothing. For a process of its own: what triton compiles is kept
    on disk."""
    plan = Plan.of(quick)
    try:
        rule = memkit.compile(name, key_dim=width, value_dim=width, backend="triton")
        runner(plan, rule, 1, rule.compiled.chunk + 1)(True)
        runner(plan, rule, 1, rule.compiled.chunk + 1)(False)
    except KernelError as error:
        return str(error).splitlines()[0]
    return ""


def check(plan: Plan, name: str, dtype: torch.dtype, quick: bool) -> dict[str, Any]:
    """Values and gradients of the kernels against the token loop in float64: the largest difference over the largest value."""
    size = {"key_dim": plan.small, "value_dim": plan.small, "overrides": overrides(name, quick)}
    try:
        rule = memkit.compile(name, backend="triton", **size)
    except KernelError as error:
        return {"preset": name, "ok": True, "refused": error.got}
    given = drawn(plan, rule, 1, 9 if quick else LOOPED, dtype, True)
    found = []
    for run, kind in ((rule, dtype), (memkit.reference(name, **size), torch.float64)):
        wide = torch.promote_types(kind, torch.float32)
        q, k, v = (t.detach().to(kind).requires_grad_() for t in given[:3])
        gates = {n: t.detach().to(wide).requires_grad_() for n, t in given[3].items()}
        y, _ = run(q, k, v, gates, {n: w.to(wide) for n, w in given[4].items()})
        grads = torch.autograd.grad(y.double().square().sum(), [q, k, v, *gates.values()])
        found.append([y.double(), *(d.double() for d in grads)])
    worst = max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in zip(*found, strict=True))
    return {"preset": name, "dtype": str(dtype).removeprefix("torch."), "difference": worst, "ok": worst <= CHECKED[dtype]}


# ---- peers


def attention(plan: Plan, width: int, batch: int, tokens: int) -> Run:
    """Causal softmax attention of torch (FlashAttention, where torch has it)."""
    fn = torch.nn.functional.scaled_dot_product_attention
    return _peer(plan, lambda q, k, v: fn(q, k, v, is_causal=True), (batch, plan.heads, tokens, width))


def fla(plan: Plan, name: str, width: int, batch: int, tokens: int) -> Run:
    """flash-linear-attention's kernel of a preset.

    Raises:
        Missing: without the package, or where it has none.
    """
    if importlib.util.find_spec("fla") is None:
        raise Missing("fla is not installed")
    from fla.ops.delta_rule import chunk_delta_rule  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    shape = (batch, tokens, plan.heads, width)
    beta = torch.rand(shape[:3], device=plan.device, dtype=torch.bfloat16)
    decay = -0.05 * torch.rand(shape[:3], device=plan.device)
    functions: dict[str, Callable[..., Tensor]] = {
        "linear_attention": lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False)[0],
        "deltanet": lambda q, k, v: chunk_delta_rule(q, k, v, beta)[0],
        "gated_deltanet": lambda q, k, v: chunk_gated_delta_rule(q, k, v, decay, beta)[0],
    }
    if name not in functions:
        raise Missing(f"fla is not asked for {name}")
    return _peer(plan, functions[name], shape)


def _peer(plan: Plan, fn: Callable[..., Tensor], shape: tuple[int, ...]) -> Run:
    q, k, v = (torch.nn.functional.normalize(torch.randn(shape, device=plan.device), dim=-1).bfloat16() for _ in range(3))
    for t in (q, k, v):
        t.requires_grad_()

    def run(train: bool) -> Any:
        with torch.set_grad_enabled(train):
            y = fn(q, k, v)
        if train:
            y.sum().backward()
        return y

    return run


# ---- the clock


def measured(plan: Plan, run: Run, train: bool, rounds: int = 5) -> dict[str, Any]:
    """Milliseconds of a run by the device's clock (median and least of `rounds`), and peak bytes above what was held; or an error."""
    try:
        run(train)
        if plan.device == "cpu":
            spent = [1e3 * s for s in _by_wall_clock(run, train, 2)]
            return {"ms": statistics.median(spent), "least": min(spent), "peak_bytes": 0}
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        spent = list(_by_events(run, train, rounds))
    except (torch.OutOfMemoryError, MemkitError) as error:
        return {"error": str(error).splitlines()[0]}
    return {"ms": statistics.median(spent), "least": min(spent), "peak_bytes": torch.cuda.max_memory_allocated() - held}


def _by_events(run: Run, train: bool, rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(train)
        stop.record()
        torch.cuda.synchronize()
        yield start.elapsed_time(stop)


def _by_wall_clock(run: Run, train: bool, rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        started = time.perf_counter()
        run(train)
        yield time.perf_counter() - started
