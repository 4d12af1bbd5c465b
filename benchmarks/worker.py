"""One side of a comparison, in a process of its own: loads cases and runs them, told by lines of JSON on stdin, answering on stdout.

    {"do": "load", "key": k, "module": m, "case": c, "args": {..}}  ->  {"ok": what the case says of itself}
    {"do": "run", "key": k, "mode": "both"}                         ->  {"ok": seconds of one run}
    {"do": "value", "key": k}                                       ->  {"ok": a few numbers of its output}
    {"do": "peak"}                                                  ->  {"ok": bytes, the most held since the last `reset`}
    {"do": "reset"} forgets the peak; {"do": "drop"} the cases; "imports" a module.
A case is a function of `module` that returns an object with `forward()` and `both()`; `info` (a dict) and `value()` if it has them.
It imports nothing of memkit, since peers run without it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

import torch


def peak_bytes() -> int:
    """The most memory this process has held: `VmHWM` where there is one, since `ru_maxrss` may count the parent's."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> None:
    """Let the peak start again from what is held now, where the system can."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
            refs.write("5")
    except OSError:
        pass


class Cases:
    """The cases that are loaded, by key."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def answer(self, order: dict[str, Any]) -> Any:
        """Obey one order; what it returns is the answer."""
        return getattr(self, order.pop("do"))(**order)

    def load(self, key: str, module: str, case: str, args: dict[str, Any]) -> dict[str, Any]:
        self.loaded.pop(key, None)
        self.imports(module)
        torch.manual_seed(0)
        self.loaded[key] = getattr(sys.modules[module], case)(**args)
        return getattr(self.loaded[key], "info", {})

    def run(self, key: str, mode: str) -> float:
        fn = getattr(self.loaded[key], mode)
        gc.collect()
        started = time.perf_counter()
        fn()
        return time.perf_counter() - started

    def value(self, key: str) -> list[float]:
        y = self.loaded[key].forward().detach().double().flatten()
        return [*y[:: max(1, len(y) // 64)][:64].tolist(), y.norm().item()]

    def info(self, key: str) -> dict[str, Any]:
        return self.loaded[key].info

    def imports(self, module: str) -> None:
        if module not in sys.modules:
            importlib.import_module(module)
            gc.freeze()  # no run needs to have imported code searched for garbage before it

    def drop(self) -> None:
        self.loaded.clear()
        gc.collect()

    def peak(self) -> int:
        return peak_bytes()

    def reset(self) -> None:
        gc.collect()
        reset_peak()


def main() -> None:
    """Answer orders until stdin ends; what cases print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    cases = Cases()
    for line in sys.stdin:
        try:
            reply = {"ok": cases.answer(json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
