"""What the run on a GPU found, as JSON, as a page and as a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.bench import Bar
from memkit.benchmark import pyplot


def save(folder: Path, result: dict[str, Any]) -> None:
    """Write gpu_benchmarks.json, gpu_benchmarks.md and, once there are times, gpu_benchmarks.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_benchmarks.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu_benchmarks.md").write_text(page(result), encoding="utf-8")
    if any("ms" in row for row in result["times"]):
        figure(result["times"], folder / "gpu_benchmarks.png")


def summary(result: dict[str, Any]) -> str:
    """Checks and bars in a line."""
    checks = [row for row in result["checks"] if "refused" not in row]
    good = sum(row["ok"] for row in checks)
    return f"{good} of {len(checks)} checks held. {report.summary(_bars(result))}"


def page(result: dict[str, Any]) -> str:
    """gpu_benchmarks.md."""
    parts = ["# Benchmarks on a GPU", f"`python -m benchmarks.gpu` writes this page. {summary(result)}"]
    parts.append(f"Device: {result['device']}. torch {result['torch']}. bfloat16 sequences.")
    if result["quick"]:
        parts.append("**This is a quick run at tiny sizes: it shows that everything runs, and its numbers mean nothing.**")
    parts += ["## Bars", report.grid(("what", "bar", "measured", "reached", "best runs", "details"), map(report.bar_row, _bars(result)))]
    rows = [[r["preset"], r.get("dtype", ""), _check(r), "yes" if r["ok"] else "**no**"] for r in result["checks"]]
    parts += ["## Kernels against the token loop in float64", report.grid(("preset", "type", "difference", "held"), rows)]
    heads = ("who", "K = V", "B", "T", "pass", "ms", "TFLOP/s", "GB/s of q, k, v, y", "peak MiB")
    parts += ["## Times", report.grid(heads, map(_time, result["times"]))]
    return "\n\n".join(parts) + "\n"


def _bars(result: dict[str, Any]) -> list[Bar]:
    return [Bar(**{k: v for k, v in row.items() if k != "reached"}) for row in result["bars"]]


def _check(row: dict[str, Any]) -> str:
    return row.get("refused") or row.get("failed") or f"{row['difference']:.1e}"


def _time(row: dict[str, Any]) -> list[str]:
    head = [row["who"], str(row["width"]), str(row["batch"]), f"{row['tokens']:,}", "train" if row["train"] else "forward"]
    if "error" in row:
        return [*head, row["error"], "", "", ""]
    return [*head, f"{row['ms']:.3f}", f"{row['tflops']:.1f}", f"{row['gb_s']:.0f}", f"{row['peak_bytes'] / 2**20:,.0f}"]


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Time a token over length: a panel for each width and pass, a line for each of `who`."""
    plot = pyplot()
    widths = sorted({row["width"] for row in rows})
    drawing, panels = plot.subplots(2, len(widths), figsize=(7 * len(widths), 10), squeeze=False)
    for train, across in zip((False, True), panels):
        for width, axes in zip(widths, across):
            found = [x for x in rows if x["train"] == train and x["width"] == width and "ms" in x]
            for who in dict.fromkeys(x["who"] for x in found):
                own = [x for x in found if x["who"] == who]
                cost = [1e6 * x["ms"] / (x["tokens"] * x["batch"]) for x in own]
                axes.loglog([x["tokens"] for x in own], cost, marker=".", label=who, linestyle="--" if who.endswith("torch") else "-")
            title = f"{'forward and backward' if train else 'forward'}, K = V = {width}"
            axes.set(title=title, xlabel="tokens", ylabel="nanoseconds a token")
            axes.legend(fontsize=6, ncols=2)
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)
    plot.close(drawing)
