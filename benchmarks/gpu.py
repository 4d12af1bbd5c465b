"""One run on a GPU: kernels against the token loop, then time and memory over lengths, against torch and other libraries' kernels.

python -m benchmarks.gpu [--minutes 8] [--presets titans,atlas] [--out runs/gpu]     (writes gpu.json, gpu.md and gpu.png)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memkit
from memkit.compiler.cost import plan_cost
from memkit.compiler.pipeline import compile_rule
from memkit.specs.errors import KernelError, MemkitError

LENGTHS = (2048, 8192, 32768, 131072)
HEADS, WIDTHS, TOKENS = 16, (64, 128), 32768  # batch x length stays at TOKENS up to that length
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2}
SPANS = {"retain": (0.95, 1.0), "momentum": (0.0, 0.9), "step_size": (0.0, 0.02)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="stop starting measurements after this long")
    parser.add_argument("--presets", default="all")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise KernelError("torch sees no GPU", "a CUDA or ROCm device", "python -m benchmarks.cpu measures on the CPU", "benchmarks.gpu")
    names = memkit.presets() if options.presets == "all" else options.presets.split(",")
    until = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": [], "times": []}
    for row in checks(names, until):
        result["checks"].append(row)
        print(row, flush=True)
    for row in times(names, until):
        result["times"].append(row)
        print(row, flush=True)
        (options.out / "gpu.json").write_text(json.dumps(result, indent=1))
    (options.out / "gpu.json").write_text(json.dumps(result, indent=1))
    (options.out / "gpu.md").write_text(table(result["times"]))
    draw(result["times"], options.out / "gpu.png")
    return 0 if all(row["ok"] for row in result["checks"]) else 1


# ---- inputs


def inputs(rule: Any, batch: int, tokens: int, dtype: torch.dtype, train: bool) -> tuple[Tensor, Tensor, Tensor, dict, dict]:
    """q, k, v, gates, weights on the device: unit keys, gates near those of a fresh layer."""
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cuda")

    q, k = (torch.nn.functional.normalize(normal(batch, tokens, HEADS, rule.key_dim), dim=-1) for _ in range(2))
    v = normal(batch, tokens, HEADS, rule.value_dim)
    gates = {}
    for name, shape in rule.gates.items():
        low, high = SPANS.get(name, (0.0, 1.0))
        gates[name] = low + (high - low) * torch.rand((batch, tokens, HEADS, *shape), generator=g, device="cuda")
    weights = {n: w.cuda() for n, w in rule.init_weights(HEADS).items()}
    made = [t.to(dtype).requires_grad_(train) for t in (q, k, v)]
    return made[0], made[1], made[2], {n: t.requires_grad_(train) for n, t in gates.items()}, weights


# ---- checks


def checks(names: Any, until: float) -> Iterator[dict[str, Any]]:
    """Values and gradients of the kernels against the token loop in float64 on the device."""
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            if time.monotonic() > until:
                return
            try:
                rule = memkit.compile(name, key_dim=32, value_dim=32, backend="triton", overrides=small(name))
            except KernelError as error:
                yield {"preset": name, "ok": True, "refused": error.got}
                break
            oracle = memkit.reference(name, key_dim=32, value_dim=32, overrides=small(name))
            worst = difference(rule, oracle, dtype)
            yield {"preset": name, "dtype": str(dtype), "difference": worst, "ok": worst <= TOLERANCE[dtype]}


def small(name: str) -> dict[str, Any]:
    """What keeps the token loop short."""
    return {"update.chunk_size": 16} if memkit.spec(name).update.grad_at == "chunk" else {}


def difference(rule: Any, oracle: Any, dtype: torch.dtype) -> float:
    """The largest difference of outputs and gradients over 77 tokens, relative to the largest value."""
    given = inputs(rule, 1, 77, dtype, True)
    found = []
    for run, kind in ((rule, dtype), (oracle, torch.float64)):
        q, k, v = (t.detach().to(kind).requires_grad_() for t in given[:3])
        gates = {n: t.detach().to(torch.promote_types(kind, torch.float32)).requires_grad_() for n, t in given[3].items()}
        y, _ = run(q, k, v, gates, {n: w.to(torch.promote_types(kind, torch.float32)) for n, w in given[4].items()})
        grads = torch.autograd.grad(y.double().square().sum(), [q, k, v, *gates.values()])
        found.append([y.double(), *(d.double() for d in grads)])
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in zip(*found, strict=True))


# ---- times


def times(names: Any, until: float) -> Iterator[dict[str, Any]]:
    """Every preset and peer over lengths, forward and forward with backward, until the time is up."""
    for tokens in LENGTHS:
        batch = max(1, TOKENS // tokens)
        for width in WIDTHS:
            for who, run, flops in runners(names, width, batch, tokens):
                for train in (False, True):
                    if time.monotonic() > until:
                        return
                    yield {"who": who, "width": width, "batch": batch, "tokens": tokens, "train": train, **measured(run, train, flops)}
                torch.cuda.empty_cache()


def runners(names: Any, width: int, batch: int, tokens: int) -> Iterator[tuple[str, Callable[[bool], Any], float]]:
    """(name, a function that runs once, FLOPs of a forward run)."""
    yield from peers(width, batch, tokens)
    for name in names:
        for backend in ("triton", "torch"):
            try:
                rule = memkit.compile(name, key_dim=width, value_dim=width, backend=backend)
            except MemkitError:
                continue
            if backend == "torch" and tokens > LENGTHS[1]:
                continue
            compiled = compile_rule(memkit.spec(name), width, width, backend="torch").compiled
            cost = plan_cost(compiled.equations, {n: s.last for n, s in compiled.graphs.items()}, compiled.chunk)
            yield f"{name} {backend}", call(rule, batch, tokens), cost.at(tokens).flops * batch * tokens * HEADS


def call(rule: Any, batch: int, tokens: int) -> Callable[[bool], Any]:
    made: dict[bool, Any] = {}

    def run(train: bool) -> Any:
        if train not in made:
            made[train] = inputs(rule, batch, tokens, torch.bfloat16, train)
        with torch.set_grad_enabled(train):
            y, _ = rule(*made[train])
        if train:
            y.sum().backward()
        return y

    return run


def peers(width: int, batch: int, tokens: int) -> Iterator[tuple[str, Callable[[bool], Any], float]]:
    """Softmax attention, and flash-linear-attention's kernels where they are installed."""
    shape = (batch, HEADS, tokens, width)
    attention = torch.nn.functional.scaled_dot_product_attention
    yield "softmax attention", peer(lambda q, k, v: attention(q, k, v, is_causal=True), shape), 2.0 * batch * HEADS * tokens**2 * width
    if importlib.util.find_spec("fla") is None:
        return
    from fla.ops.delta_rule import chunk_delta_rule  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    long = (batch, tokens, HEADS, width)
    beta = torch.rand(long[:3], device="cuda", dtype=torch.bfloat16)
    decay = -0.05 * torch.rand(long[:3], device="cuda")
    yield "fla linear attention", peer(lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False)[0], long), 0.0
    yield "fla delta rule", peer(lambda q, k, v: chunk_delta_rule(q, k, v, beta)[0], long), 0.0
    yield "fla gated delta rule", peer(lambda q, k, v: chunk_gated_delta_rule(q, k, v, decay, beta)[0], long), 0.0


def peer(fn: Callable[..., Tensor], shape: tuple[int, ...]) -> Callable[[bool], Any]:
    q, k, v = (torch.nn.functional.normalize(torch.randn(shape, device="cuda"), dim=-1).bfloat16().requires_grad_() for _ in range(3))

    def run(train: bool) -> Any:
        with torch.set_grad_enabled(train):
            y = fn(q, k, v)
        if train:
            y.sum().backward()
        return y

    return run


def measured(run: Callable[[bool], Any], train: bool, flops: float, rounds: int = 5) -> dict[str, Any]:
    """Median milliseconds of a run by the device's clock, peak memory above what was there, FLOP/s."""
    try:
        run(train)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        spent = []
        for _ in range(rounds):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(train)
            stop.record()
            torch.cuda.synchronize()
            spent.append(start.elapsed_time(stop))
    except (torch.OutOfMemoryError, MemkitError) as error:
        return {"error": str(error).splitlines()[0]}
    ms = statistics.median(spent)
    peak = torch.cuda.max_memory_allocated() - held
    work = flops * (3 if train else 1)
    return {"ms": ms, "least": min(spent), "peak_bytes": peak, "tflops": work / ms / 1e9, "gb_s": peak / ms / 1e6}


# ---- what is written


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| who | K = V | B | T | pass | ms | TFLOP/s | peak MiB |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        numbers = f"{r['ms']:.3f} | {r['tflops']:.1f} | {r['peak_bytes'] / 2**20:.0f}" if "ms" in r else f"{r['error']} | |"
        lines.append(f"| {r['who']} | {r['width']} | {r['batch']} | {r['tokens']} | {'train' if r['train'] else 'forward'} | {numbers} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time a token over length, one line for each of `who`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(WIDTHS), figsize=(14, 9), squeeze=False)
    for r, train in enumerate((False, True)):
        for c, width in enumerate(WIDTHS):
            found = [x for x in rows if x["train"] == train and x["width"] == width and "ms" in x]
            for who in dict.fromkeys(x["who"] for x in found):
                own = [x for x in found if x["who"] == who]
                axes[r][c].loglog(
                    [x["tokens"] for x in own], [1e6 * x["ms"] / (x["tokens"] * x["batch"]) for x in own], marker=".", label=who
                )
            axes[r][c].set(title=f"{'forward and backward' if train else 'forward'}, K = V = {width}", xlabel="tokens", ylabel="ns a token")
            axes[r][c].legend(fontsize=5)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    raise SystemExit(main())
