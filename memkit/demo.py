"""The demonstration: load `atlas`, show its equation, hold it against the oracle, then train it on English next to `deltanet`."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from memkit.layers.memory_layer import make_rule
from memkit.layers.model import ByteLM
from memkit.specs.errors import MemkitError
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule

from .explanation import equation

# Small enough for two CPU cores; what is not named here is the preset's own.
SMALL: dict[str, dict[str, Any]] = {
    "atlas": {"update.chunk_size": 16, "memory.expansion": 2},
    "deltanet": {},
}
SIZES: dict[str, Any] = {"dim": 64, "depth": 1, "heads": 8, "hidden": 128}
BATCH, TOKENS, RATE = 8, 64, 1e-2
ENOUGH = 30  # steps below which a loss says nothing of what can be learned
HELD_OUT, EVALUATED = 0.1, (64, 128)  # share of the text; rows and bytes a row
PROMPT = b"The "


@dataclass
class Trainee:
    """One model in training, with its own clock."""

    name: str
    model: ByteLM
    optimizer: torch.optim.Optimizer
    batches: torch.Generator
    used: float = 0.0
    tokens: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)  # (seconds of training, loss in nats a byte)

    @property
    def loss(self) -> float:
        recent = [loss for _, loss in self.curve[-10:]]
        return sum(recent) / len(recent) if recent else math.nan


def run_demo(seconds: float = 60.0, out: str | Path = "runs/demo", *, text: str | Path | None = None, seed: int = 0) -> int:
    """Run the demonstration.

    Args:
        seconds: training time for each of the two models; they take turns, so both meet the same machine.
        out: folder for specs, weights, metrics, curve and sample.
        text: a file to train on, instead of the help topics that come with Python.
        seed: of the starts and of the batches.

    Returns:
        0 if the first model's held-out loss is below the unigram entropy of the text, or it had too few steps to judge that, and it came
        back from disk unchanged; else 1.

    Raises:
        MemkitError: where the text or the folder cannot be used.
    """
    if not 0 <= seconds < math.inf:
        raise MemkitError(f"{seconds} s of training", "a number of seconds >= 0", "", "seconds")
    console, threads = Console(highlight=False, soft_wrap=True), torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations: a second thread costs more than it brings
    try:
        return _demo(console, seconds, Path(out), text, seed)
    finally:
        torch.set_num_threads(threads)


def _demo(console: Console, seconds: float, out: Path, text: str | Path | None, seed: int) -> int:
    started = time.perf_counter()
    folder = _folder(out)
    train, held = split(read_text(text))
    unigram = entropy(torch.cat([train, held]))
    specs = {name: load_spec(name, overrides) for name, overrides in SMALL.items()}
    first = next(iter(specs))

    console.print(f"[bold]{first}[/]\n{equation(specs[first])}\n")
    console.print(f"against the oracle, float64: {check_oracle(specs[first])}")
    for name, overrides in SMALL.items():
        sizes = {**overrides, **SIZES}
        console.print(f"{name}, made small for a CPU: " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
    console.print(f"text: {len(train) + len(held):,} bytes, the last {len(held):,} held out")
    console.print(f"training: {seconds:g} s a model, {BATCH} x {TOKENS} bytes a step\n")

    trainees = [_trainee(name, spec, seed) for name, spec in specs.items()]
    _train(trainees, train, seconds, console)
    results = {t.name: _result(t, held) for t in trainees}
    sample = trainees[0].model.generate(PROMPT, 200, temperature=0.7, generator=torch.Generator().manual_seed(seed))

    same = True
    for trainee in trainees:
        back = ByteLM.load(trainee.model.save(folder / trainee.name))
        same &= _same_output(trainee.model, back, held)
    (folder / "sample.txt").write_bytes(PROMPT + sample)
    drawn = _draw(trainees, results, unigram, folder / "curve.png")
    learned = _learned(results[first], unigram)
    metrics = {"unigram_entropy": unigram, "unit": "nats a byte", "learned": learned, "same_after_reload": same, "models": results}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")

    _report(console, results, unigram, (PROMPT + sample).decode("utf-8", "replace"))
    console.print(f"saved in {folder}: spec, weights, metrics.json, sample.txt, {drawn}")
    took = time.perf_counter() - started
    console.print(f"read back, the models give {'the same output' if same else 'ANOTHER output'}; {took:.0f} s in all")
    console.print(f"[bold]{first}: {_verdict(results[first], learned, unigram)}[/]")
    return 0 if learned is not False and same else 1


# ---- the text


def read_text(path: str | Path | None = None) -> bytes:
    """The text to train on: a file's bytes, or the help topics that ship with Python.

    Raises:
        MemkitError: where there is none, or too little.
    """
    if path is None:
        try:
            from pydoc_data import topics
        except ImportError:
            raise MemkitError("a Python without pydoc_data", "its standard library's help topics", "--text FILE", "text") from None
        data = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    else:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise MemkitError(f"{path}: {error.strerror or error}", "a readable file", "", "text") from None
    least = math.ceil((TOKENS + 2) / HELD_OUT)
    if len(data) < least:
        raise MemkitError(f"{len(data)} bytes of text", f"at least {least}", "a longer file", "text")
    return data


def split(data: bytes) -> tuple[Tensor, Tensor]:
    """Bytes for training, and the last tenth, held out; each [N] uint8."""
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    kept = len(ids) - int(len(ids) * HELD_OUT)
    return ids[:kept], ids[kept:]


def entropy(ids: Tensor) -> float:
    """Entropy of single bytes in nats: what a model that ignores all context cannot beat on this text."""
    share = torch.bincount(ids.long(), minlength=256).double() / len(ids)
    share = share[share > 0]
    return float(-(share * share.log()).sum())


# ---- the check


def check_oracle(spec: LayerSpec, heads: int = 2, width: int = 4, tokens: int = 37) -> str:
    """Values and all gradients of the rule a layer runs, against the token loop.

    Raises:
        MemkitError: where they differ by more than 1e-9.
    """
    rule, oracle = make_rule(spec, width, width), ReferenceRule(spec, width, width)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(2, tokens, heads, *shape, generator=generator, dtype=torch.float64)

    q, k, v = (torch.nn.functional.normalize(draw(width) - 0.5, dim=-1) for _ in range(3))
    gates = {name: draw(*shape) / 2 for name, shape in rule.gates.items()}
    weights = rule.init_weights(heads, generator=generator, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v, *gates.values(), *weights.values())]
    found = []
    for each in (rule, oracle):
        y, _ = each(q, k, v, gates, weights)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)))
    errors = [0.0 if a is None and b is None else (a - b).abs().max().item() for a, b in zip(*found)]  # type: ignore[operator]
    worst = max(errors)
    if not worst < 1e-9:
        raise MemkitError(f"the rule that runs differs from the token loop by {worst:.1e}", "at most 1e-9", "backend='reference'", "check")
    return f"{len(errors) - 1} gradients and the values agree, largest difference {worst:.0e}"


# ---- training


def _trainee(name: str, spec: LayerSpec, seed: int) -> Trainee:
    torch.manual_seed(seed)
    model = ByteLM(spec, **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return Trainee(name, model, optimizer, torch.Generator().manual_seed(seed))


def _train(trainees: list[Trainee], data: Tensor, seconds: float, console: Console) -> None:
    """The model that has trained for the shortest time takes the next step, until all have had `seconds`."""
    shown = ("speed]:>6.1f} steps/s", "loss]:.3f} nats", "rate]:>7,.0f} tokens/s", "left]:>4.0f} s left")
    columns = [TextColumn("{task.fields[" + column) for column in shown]
    with Progress(TextColumn("{task.description:<9}"), BarColumn(20), *columns, console=console) as bar:
        start: dict[str, Any] = {"speed": 0.0, "loss": math.nan, "rate": 0.0, "left": seconds}
        tasks = {t.name: bar.add_task(t.name, total=seconds, **start) for t in trainees}
        try:
            while min(t.used for t in trainees) < seconds:
                t = min(trainees, key=lambda t: t.used)
                _step(t, data, seconds)
                bar.update(
                    tasks[t.name], completed=min(t.used, seconds), speed=len(t.curve) / t.used, loss=t.loss, rate=t.tokens / t.used,
                    left=max(0.0, seconds - t.used),
                )
        except KeyboardInterrupt:
            console.print("stopped; what was learned so far is kept")


def _step(trainee: Trainee, data: Tensor, seconds: float) -> None:
    started = time.perf_counter()
    at = torch.randint(len(data) - TOKENS, (BATCH, 1), generator=trainee.batches)
    for group in trainee.optimizer.param_groups:
        group["lr"] = RATE * _schedule(trainee.used / seconds)
    loss = trainee.model.loss(data[at + torch.arange(TOKENS + 1)])
    trainee.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 1.0)
    trainee.optimizer.step()
    trainee.used += time.perf_counter() - started
    trainee.tokens += BATCH * TOKENS
    trainee.curve.append((trainee.used, float(loss.detach())))


def _schedule(done: float) -> float:
    """Share of the peak rate after a share `done` of the time: a short rise, then a cosine down to a tenth."""
    return min(1.0, 0.2 + done / 0.05) * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))


@torch.inference_mode()
def _held_out(model: ByteLM, held: Tensor) -> tuple[float, int]:
    """Mean loss in nats a byte over pieces spread evenly over the held-out text, and the number of bytes predicted."""
    rows, tokens = EVALUATED
    tokens = min(tokens, len(held) - 1)
    at = torch.linspace(0, len(held) - 1 - tokens, rows).long()[:, None]
    return float(model.loss(held[at + torch.arange(tokens + 1)])), rows * tokens


def _result(trainee: Trainee, held: Tensor) -> dict[str, Any]:
    loss, count = _held_out(trainee.model, held)
    return {
        "held_out": loss, "held_out_bits": loss / math.log(2), "held_out_bytes": count,
        "train_loss": trainee.loss if trainee.curve else None, "steps": len(trainee.curve), "seconds": trainee.used,
        "tokens": trainee.tokens, "tokens_a_second": trainee.tokens / trainee.used if trainee.used else 0.0,
        "parameters": sum(p.numel() for p in trainee.model.parameters()), "curve": trainee.curve,
    }


def _learned(result: dict[str, Any], unigram: float) -> bool | None:
    """Whether held-out loss is below the unigram entropy; None where it is not, after too few steps to expect that."""
    return True if result["held_out"] < unigram else None if result["steps"] < ENOUGH else False


def _verdict(result: dict[str, Any], learned: bool | None, unigram: float) -> str:
    if learned is None:
        return f"too few steps to judge ({result['steps']}): give it more --seconds"
    said = "it learned, held-out loss is below" if learned else "it did NOT learn, held-out loss is not below"
    return f"{said} the unigram entropy, {result['held_out']:.3f} to {unigram:.3f} nats a byte"


# ---- what is left behind


def _folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemkitError(f"{out}: {error.strerror or error}", "a folder that can be written to", "--out FOLDER", "out") from None
    return out


@torch.inference_mode()
def _same_output(a: ByteLM, b: ByteLM, held: Tensor) -> bool:
    ids = held[None, :TOKENS]
    return torch.equal(a(ids)[0], b(ids)[0])


def _draw(trainees: list[Trainee], results: dict[str, Any], unigram: float, path: Path) -> str:
    """Loss over training time, as a PNG; returns what to say about it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no curve (matplotlib is not installed)"
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for trainee in trainees:
        (line,) = axes.plot([at for at, _ in trainee.curve], [loss for _, loss in trainee.curve], alpha=0.8, label=trainee.name)
        axes.plot([trainee.used], [results[trainee.name]["held_out"]], "o", color=line.get_color(), label=f"{trainee.name}, held out")
    axes.axhline(unigram, linestyle="--", color="grey", label="unigram entropy")
    axes.set(xlabel="seconds of training", ylabel="loss, nats a byte", title="bytes of English")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path.name


def _report(console: Console, results: dict[str, Any], unigram: float, sample: str) -> None:
    console.print(f"\n{'':<18}{'nats a byte':>12}{'bits a byte':>12}{'steps':>8}{'tokens/s':>10}{'parameters':>12}")
    for name, r in results.items():
        numbers = f"{r['held_out']:>12.3f}{r['held_out_bits']:>12.3f}{r['steps']:>8,}{r['tokens_a_second']:>10,.0f}{r['parameters']:>12,}"
        console.print(f"{name + ', held out':<18}{numbers}")
    console.print(f"{'unigram entropy':<18}{unigram:>12.3f}{unigram / math.log(2):>12.3f}\n")
    console.print("sample:")
    console.print(sample, markup=False)
    console.print()
